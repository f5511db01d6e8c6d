"""docs/examples/tensorrt-llm-model.yaml has the documented keys and types. TensorRT-LLM needs a GPU and was not run."""

from __future__ import annotations

import yaml

from tests.pipelines.command import ROOT

# NVIDIA/TensorRT-LLM, triton_backend/all_models/llmapi/tensorrt_llm/1/model.yaml at commit 0ebb1536ac12
KEYS = {"model": str, "backend": str, "tensor_parallel_size": int, "pipeline_parallel_size": int, "triton_config": dict}
TRITON_KEYS = {"max_batch_size": int, "decoupled": bool}


def test_example_has_the_documented_keys() -> None:
    text = (ROOT / "docs" / "examples" / "tensorrt-llm-model.yaml").read_text(encoding="utf-8")
    settings = yaml.safe_load(text)
    assert {name: type(value) for name, value in settings.items()} == KEYS
    assert {name: type(value) for name, value in settings["triton_config"].items()} == TRITON_KEYS
    assert settings["backend"] == "pytorch"
    assert settings["triton_config"]["max_batch_size"] == 0, "the backend does not support Triton's batching"


def test_container_of_the_page_has_no_known_vulnerability() -> None:
    page = (ROOT / "docs" / "how-to" / "tensorrt-llm.md").read_text(encoding="utf-8")
    script = (ROOT / "images" / "triton_version.sh").read_text(encoding="utf-8")
    minimum = next(line.removeprefix("minimum=") for line in script.splitlines() if line.startswith("minimum="))
    assert f"tritonserver:{minimum}-trtllm-python-py3" in page
    assert f"Use {minimum} or later" in page
