"""Adapter placement, contents of vLLM packages and referenced weights, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError, InputError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import adapter_placement, package_serving, triton_config
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import serving_folder
from components.triton_packaging.stage import package
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import publish_adapter


def pack(
    model: LoadableModel, output: Path, adapters: dict[str, LoadableModel] | None = None, **settings: Any
) -> artifact_folder.Artifact:
    return package(
        model,
        output,
        TritonPackagingConfig(prove=False, **settings),
        seed=1,
        reporter=SilentReporter(),
        adapters=adapters or {},
    )


def vllm_package(
    model: LoadableModel, output: Path, adapters: dict[str, LoadableModel] | None = None, **settings: Any
) -> artifact_folder.Artifact:
    return pack(model, output, adapters, backend="vllm", **settings)


def read_json(artifact: artifact_folder.Artifact, name: str) -> Any:
    return json.loads((artifact.path / "tuneline" / "1" / name).read_text(encoding="utf-8"))


def read_parameters(artifact: artifact_folder.Artifact) -> dict[str, str]:
    return {
        name: value.string_value
        for name, value in triton_config.read_config(artifact.path / "tuneline").parameters.items()
    }


def test_vllm_package_contains_the_engine_arguments(adapted_model: LoadableModel, tmp_path: Path) -> None:
    settings = {
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "quantization": "fp8",
    }
    artifact = vllm_package(
        adapted_model, tmp_path / "out", slots=7, max_prompt_tokens=100, max_tokens=28, dtype="bfloat16", vllm=settings
    )
    assert read_json(artifact, "model.json") == {
        "model": "tuneline/1/weights", "tokenizer": "tuneline/1/weights", "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 7,
        "trust_remote_code": False, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1, **settings,
    }  # fmt: skip
    assert read_parameters(artifact)["slots"] == "7"
    config = triton_config.read_config(artifact.path / "tuneline")
    assert (config.backend, config.instance_group[0].KIND_MODEL, len(config.input)) == (
        "vllm",
        config.instance_group[0].kind,
        0,
    )
    assert not (artifact.path / "tuneline_stream").exists()


def test_adapters_share_one_base_and_are_recorded_by_digest(
    adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path: Path
) -> None:
    artifact = vllm_package(adapted_model, tmp_path / "out", {"other": second_adapter})
    assert read_json(artifact, "multi_lora.json") == {
        "tuneline": "tuneline/1/adapters/tuneline",
        "other": "tuneline/1/adapters/other",
    }
    assert read_json(artifact, "model.json")["max_lora_rank"] == 16  # the second adapter's rank is 12
    assert json.loads(read_parameters(artifact)["adapters"]) == {
        "tuneline": adapted_model.sha256,
        "other": second_adapter.sha256,
    }
    assert {entry.content_sha256 for entry in artifact.manifest.inputs} == {
        adapted_model.sha256,
        second_adapter.sha256,
        adapted_model.base.sha256,
    }
    weights = [file.path for file in artifact.manifest.files if file.path.endswith(".safetensors")]
    assert weights == [
        f"tuneline/1/{name}.safetensors"
        for name in ("adapters/other/adapter_model", "adapters/tuneline/adapter_model", "weights/model")
    ]
    assert artifact.manifest.summary["adapters"] == ["other", "tuneline"]


def test_vllm_package_contains_no_local_path(
    adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path: Path
) -> None:
    first, second = (vllm_package(adapted_model, tmp_path / name, {"other": second_adapter}) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    payload = [first.path / file.path for file in first.manifest.files if file.payload]
    assert all(
        str(local_path).encode() not in path.read_bytes()
        for path in payload
        for local_path in (tmp_path, adapted_model.base.path)
    )


def test_serving_root_makes_paths_absolute(adapted_model: LoadableModel, tmp_path: Path) -> None:
    artifact = vllm_package(adapted_model, tmp_path / "out", serving_root="/models/")
    assert read_json(artifact, "model.json")["model"] == "/models/tuneline/1/weights"
    assert read_json(artifact, "multi_lora.json") == {"tuneline": "/models/tuneline/1/adapters/tuneline"}
    with pytest.raises(ValueError, match="serving_root"):
        TritonPackagingConfig(serving_root="models")


def test_full_and_merged_weights_need_no_adapter_in_vllm(
    base_model: LoadableModel, adapted_model: LoadableModel, tmp_path: Path
) -> None:
    full = vllm_package(base_model, tmp_path / "whole")
    merged = vllm_package(adapted_model, tmp_path / "merged", adapter="merged")
    for artifact, adapter_mode in ((full, "none"), (merged, "merged")):
        assert artifact.manifest.summary["adapter"] == adapter_mode
        assert "enable_lora" not in read_json(artifact, "model.json")
        assert not (artifact.path / "tuneline" / "1" / "multi_lora.json").exists()


def test_adapter_of_another_base_is_rejected(adapted_model: LoadableModel, tmp_path: Path) -> None:
    foreign = model_loading.open_model_artifact(
        publish_adapter(model_loading.open_model(tiny_model(tmp_path / "base", seed=5)), tmp_path / "model")
    )
    with pytest.raises(InputError, match="its base model is"):
        vllm_package(adapted_model, tmp_path / "out", {"foreign": foreign})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "python"}, "requires triton_packaging.backend vllm"),
        ({"backend": "vllm", "adapter": "merged"}, "and attached adapters"),
        ({"backend": "vllm", "model_name": "other"}, "the packaged model has the same name"),
    ],
)
def test_multiple_adapters_are_rejected_if_unsupported(
    adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pack(adapted_model, tmp_path / "out", {"other": second_adapter}, **settings)


def test_model_without_adapter_is_rejected_as_adapter(
    base_model: LoadableModel, adapted_model: LoadableModel, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="has full weights instead of an adapter"):
        vllm_package(adapted_model, tmp_path / "out", {"base": base_model})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["legal"], "NAME=MODEL_DIR"),
        (["a b=x"], "NAME=MODEL_DIR"),
        (["legal="], "NAME=MODEL_DIR"),
        (["a=x", "a=y"], "given twice"),
    ],
)
def test_invalid_adapter_option_is_rejected(options: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        adapter_placement.parse_adapter_options(options)


def test_adapter_options_are_parsed_as_name_and_folder() -> None:
    assert adapter_placement.parse_adapter_options(["legal=models/legal", "a.b=c=d"]) == {
        "legal": Path("models/legal"),
        "a.b": Path("c=d"),
    }


def test_adapter_with_dora_is_rejected_for_vllm(base_model: LoadableModel, tmp_path: Path) -> None:
    model = model_loading.open_model_artifact(publish_adapter(base_model, tmp_path / "model", use_dora=True))
    with pytest.raises(InputError, match="use_dora, which vLLM does not support"):
        vllm_package(model, tmp_path / "out")


def test_max_lora_rank_below_adapter_rank_is_rejected(
    adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="max_lora_rank is 8; expected at least 16"):
        vllm_package(adapted_model, tmp_path / "out", {"other": second_adapter}, vllm={"max_lora_rank": 8})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"adapter": "merged"}, "cannot be merged"), ({"backend": "vllm"}, "supports only LoRA adapters")],
)
def test_virtual_tokens_are_rejected_if_unsupported(
    p_tuning_model: LoadableModel, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pack(p_tuning_model, tmp_path / "out", **settings)
    assert not (tmp_path / "out" / "tuneline").exists()


def test_virtual_tokens_are_attached_and_reduce_the_context(p_tuning_model: LoadableModel, tmp_path: Path) -> None:
    artifact = pack(p_tuning_model, tmp_path / "out")
    assert artifact.manifest.summary["adapter"] == "attached"
    assert "P_TUNING cannot be merged" in artifact.manifest.summary["adapter_because"]
    assert int(read_parameters(artifact)["context"]) == 2048 - 4


def test_referencing_package_contains_no_weights(
    base_model: LoadableModel, adapted_model: LoadableModel, tmp_path: Path
) -> None:
    full = pack(base_model, tmp_path / "whole", weights="referenced")
    attached = pack(adapted_model, tmp_path / "attached", weights="referenced", adapter="attached")
    for artifact, digests in ((full, [base_model.sha256]), (attached, [base_model.sha256, adapted_model.sha256])):
        assert not [file for file in artifact.manifest.files if file.path.endswith(".safetensors")]
        assert [reference["sha256"] for reference in json.loads(read_parameters(artifact)["references"])] == digests
        package_serving.verify_package(artifact.path)


def test_vllm_arguments_point_to_referenced_weights(
    adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path: Path
) -> None:
    artifact = vllm_package(
        adapted_model, tmp_path / "out", {"other": second_adapter}, weights="referenced", serving_root="/models"
    )
    arguments = read_json(artifact, "model.json")
    assert (arguments["model"], arguments["tokenizer"]) == (
        str(adapted_model.base.path),
        "/models/tuneline/1/tokenizer",
    )
    assert read_json(artifact, "multi_lora.json") == {
        "tuneline": str(adapted_model.adapter),
        "other": str(second_adapter.adapter),
    }


def test_merged_adapter_cannot_be_referenced(adapted_model: LoadableModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="merged weights exist only in the package"):
        pack(adapted_model, tmp_path / "out", weights="referenced")


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_changed_or_missing_referenced_weights_fail_verification(tmp_path: Path, damage: str) -> None:
    base = tiny_model(tmp_path / "base")
    artifact = pack(model_loading.open_model(base), tmp_path / "out", weights="referenced")
    path = base / "model.safetensors"
    if damage == "missing":
        base.rename(tmp_path / "elsewhere")
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactDamagedError, match=r"refers to .*base, which is missing or has changed"):
        package_serving.verify_package(artifact.path)


def test_deployment_rejects_package_with_missing_weights(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    artifact = pack(model_loading.open_model(base), tmp_path / "referring", weights="referenced")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactDamagedError, match="missing or has changed"):
        serving_folder.install_release(tmp_path / "deployed", serving_folder.Release("1", artifact), "m")


@pytest.mark.parametrize("serving_root", ["", "/models", "/models/"])
def test_deployed_vllm_package_has_absolute_paths_and_tensors(
    adapted_model: LoadableModel, second_adapter: LoadableModel, tmp_path: Path, serving_root: str
) -> None:
    artifact = vllm_package(adapted_model, tmp_path / "vllm", {"other": second_adapter}, serving_root=serving_root)
    folder = tmp_path / "deployed"
    copied = serving_folder.copy_package(folder, artifact)
    assert serving_folder.install_release(
        folder, serving_folder.Release("7", copied, {"registered_version": "7"}), "clerk"
    ) == ["clerk"]
    version = folder / "repository" / "clerk" / "7"
    arguments, adapters = (json.loads((version / name).read_text()) for name in ("model.json", "multi_lora.json"))
    assert all((Path(arguments[key]) / "config.json").is_file() for key in ("model", "tokenizer"))
    assert all((Path(path) / "adapter_config.json").is_file() for path in adapters.values())
    assert all(Path(path).is_relative_to(copied.path) for path in [arguments["model"], *adapters.values()])
    config = triton_config.read_config(folder / "repository" / "clerk")
    assert [tensor.name for tensor in config.input][:2] == ["text_input", "stream"]
    assert config.model_transaction_policy.decoupled
    assert list(config.version_policy.specific.versions) == [7]
    assert serving_folder.list_installed_versions(folder, "clerk") == {("clerk", "7"): artifact.sha256}
    assert artifact_folder.read(copied.path, "repository").sha256 == artifact.sha256, (
        "the package's own files stay as they are"
    )
    serving_folder.remove_other_packages(folder, set())
    assert not version.exists()


def test_changed_file_of_vllm_package_is_rejected(adapted_model: LoadableModel, tmp_path: Path) -> None:
    artifact = vllm_package(adapted_model, tmp_path / "out")
    path = artifact.path / "tuneline" / "1" / "multi_lora.json"
    path.write_text(path.read_text().replace("adapters", "adaptors"))
    with pytest.raises(TunelineError, match=r"multi_lora\.json"):
        package_serving.verify_package(artifact.path)


def test_package_is_published_once_under_its_digest(base_model: LoadableModel, tmp_path: Path) -> None:
    artifact = pack(base_model, tmp_path / "out", publish_to=str(tmp_path / "shared"))
    copy = tmp_path / "shared" / artifact.sha256
    assert package_serving.verify_package(copy).sha256 == artifact.sha256
    config = min(copy.glob("*/config.pbtxt"))
    modified_ns = config.stat().st_mtime_ns
    pack(base_model, tmp_path / "out", publish_to=str(tmp_path / "shared"))
    assert config.stat().st_mtime_ns == modified_ns


@pytest.mark.parametrize("target", ["shared", "s3://", "s3://Bucket/x", "http://host/x"])
def test_invalid_publish_target_is_rejected(target: str) -> None:
    with pytest.raises(ValueError, match="publish_to"):
        TritonPackagingConfig(publish_to=target)
