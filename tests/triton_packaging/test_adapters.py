"""Attached adapters, virtual tokens and referenced weights in the Python backend of a real Triton server.

The tests marked `long` prove further forms of adapters, each with its own server start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package, write_repository
from components.triton_packaging.triton_server import ModelLoadError, running_server
from tests.tiny import tiny_model
from tests.triton_packaging.triton_clients import generate_with_transformers, infer_grpc, stream_grpc

pytestmark = pytest.mark.triton

PROMPTS = ["What is a list?", "Name the fox."]


def prove_package(model: LoadableModel, output: Path, **settings: Any) -> Any:
    config = TritonPackagingConfig(golden_prompts=PROMPTS, golden_max_tokens=12, **settings)
    return package(model, output, config, seed=1, reporter=SilentReporter())


def test_attached_adapter_is_proven_and_batched(adapted_model: LoadableModel, tmp_path: Path) -> None:
    artifact = prove_package(adapted_model, tmp_path / "out", adapter="attached")
    assert artifact.manifest.summary["proof"]["matched"] == 2
    with running_server(artifact.path, log=tmp_path / "log") as server:
        assert infer_grpc(server, "tuneline", text_input="Name the fox.", max_tokens=24)[
            "text_output"
        ] == generate_with_transformers(adapted_model, "Name the fox.", 24)
    assert "one by one" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_virtual_tokens_are_proven_and_answered_sequentially(p_tuning_model: LoadableModel, tmp_path: Path) -> None:
    artifact = prove_package(p_tuning_model, tmp_path / "out", max_prompt_tokens=3000)
    assert artifact.manifest.summary["proof"]["matched"] == 2
    with running_server(artifact.path, log=tmp_path / "log") as server:
        text = generate_with_transformers(p_tuning_model, "Name the fox.", 24)
        assert stream_grpc(server, "tuneline_stream", text_input="Name the fox.", max_tokens=24).text == text
        sampled = {"text_input": "Name the fox.", "max_tokens": 8, "temperature": 1.0, "seed": 3}
        assert infer_grpc(server, "tuneline", **sampled) == infer_grpc(server, "tuneline", **sampled)
        with pytest.raises(
            Exception, match="at most 2043 are allowed"
        ):  # 2048 minus 4 virtual tokens and 1 answer token
            infer_grpc(server, "tuneline", text_input="list " * 3000, max_tokens=1)
        answer = infer_grpc(server, "tuneline", text_input="0 " * 1010, max_tokens=4)
        assert answer["prompt_tokens"] + 4 <= 2044
    assert "one by one: its adapter prepends virtual tokens to every prompt" in (tmp_path / "log").read_text()


@pytest.mark.long
def test_referenced_weights_are_proven_and_damaged_ones_fail_to_load(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    artifact = prove_package(model_loading.open_model(base), tmp_path / "out", weights="referenced")
    assert artifact.manifest.summary["proof"]["matched"] == 2
    (base / "model.safetensors").write_bytes(b"short")
    message = r"refers to model\.safetensors in .*base, which has 5 bytes; expected"
    with pytest.raises(ModelLoadError, match=message), running_server(artifact.path, log=tmp_path / "log"):
        pass


@pytest.mark.long
def test_attached_adapter_with_referenced_base_weights_answers(adapted_model: LoadableModel, tmp_path: Path) -> None:
    config = TritonPackagingConfig(weights="referenced", adapter="attached")
    write_repository(adapted_model, tmp_path / "out", config, "float32")
    with running_server(tmp_path / "out", log=tmp_path / "log") as server:
        answer = infer_grpc(server, "tuneline", text_input=PROMPTS[0], max_tokens=12)
    assert answer["text_output"] == generate_with_transformers(adapted_model, PROMPTS[0], 12)
