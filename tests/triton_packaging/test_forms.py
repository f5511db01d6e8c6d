"""What becomes of a model's adapter, what a vLLM package holds, and what a package refers to; without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts, models
from components.common.errors import ArtifactDamagedError, ConfigurationError, InputError, TunelineError
from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging import form, pbtxt, serve
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import layout
from components.triton_packaging.stage import package
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import publish_adapter


def pack(model: Model, output: Path, adapters: dict[str, Model] | None = None, **settings: Any) -> artifacts.Artifact:
    return package(model, output, TritonPackagingConfig(prove=False, **settings), seed=1, reporter=Silent(), adapters=adapters or {})


def vllm_package(model: Model, output: Path, adapters: dict[str, Model] | None = None, **settings: Any) -> artifacts.Artifact:
    return pack(model, output, adapters, backend="vllm", **settings)


def read(made: artifacts.Artifact, name: str) -> Any:
    return json.loads((made.path / "tuneline" / "1" / name).read_text(encoding="utf-8"))


def parameters(made: artifacts.Artifact) -> dict[str, str]:
    return {name: value.string_value for name, value in pbtxt.read(made.path / "tuneline").parameters.items()}


def test_a_vllm_package_says_what_vllm_is_started_with(tiny_adapted: Model, tmp_path: Path) -> None:
    settings = {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2, "enforce_eager": True}
    made = vllm_package(tiny_adapted, tmp_path / "out", slots=7, max_prompt_tokens=100, max_tokens=28, dtype="bfloat16", vllm=settings)
    assert read(made, "model.json") == {
        "model": "tuneline/1/weights", "tokenizer": "tuneline/1/weights", "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 7,
        "trust_remote_code": False, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1, **settings,
    }  # fmt: skip
    config = pbtxt.read(made.path / "tuneline")
    assert (config.backend, config.instance_group[0].KIND_MODEL, len(config.input)) == ("vllm", config.instance_group[0].kind, 0)
    assert not (made.path / "tuneline_stream").exists()


def test_adapters_lie_beside_one_base_and_are_told_by_digest(tiny_adapted: Model, tiny_other: Model, tmp_path: Path) -> None:
    made = vllm_package(tiny_adapted, tmp_path / "out", {"other": tiny_other})
    assert read(made, "multi_lora.json") == {"tuneline": "tuneline/1/adapters/tuneline", "other": "tuneline/1/adapters/other"}
    assert read(made, "model.json")["max_lora_rank"] == 16  # the other's is 12
    assert json.loads(parameters(made)["adapters"]) == {"tuneline": tiny_adapted.sha256, "other": tiny_other.sha256}
    assert {one.content_sha256 for one in made.manifest.inputs} == {tiny_adapted.sha256, tiny_other.sha256, tiny_adapted.base.sha256}
    weights = [file.path for file in made.manifest.files if file.path.endswith(".safetensors")]
    assert weights == [
        f"tuneline/1/{part}.safetensors" for part in ("adapters/other/adapter_model", "adapters/tuneline/adapter_model", "weights/model")
    ]
    assert made.manifest.summary["adapters"] == ["other", "tuneline"]


def test_a_vllm_package_names_no_place_of_this_machine(tiny_adapted: Model, tiny_other: Model, tmp_path: Path) -> None:
    first, second = (vllm_package(tiny_adapted, tmp_path / name, {"other": tiny_other}) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    payload = [first.path / file.path for file in first.manifest.files if file.payload]
    assert all(str(place).encode() not in path.read_bytes() for path in payload for place in (tmp_path, tiny_adapted.base.path))


def test_a_serving_root_makes_the_paths_absolute(tiny_adapted: Model, tmp_path: Path) -> None:
    made = vllm_package(tiny_adapted, tmp_path / "out", serving_root="/models/")
    assert read(made, "model.json")["model"] == "/models/tuneline/1/weights"
    assert read(made, "multi_lora.json") == {"tuneline": "/models/tuneline/1/adapters/tuneline"}
    with pytest.raises(ValueError, match="serving_root"):
        TritonPackagingConfig(serving_root="models")


def test_full_and_merged_weights_need_no_adapter_in_vllm(tiny_base: Model, tiny_adapted: Model, tmp_path: Path) -> None:
    whole = vllm_package(tiny_base, tmp_path / "whole")
    merged = vllm_package(tiny_adapted, tmp_path / "merged", adapter="merged")
    for made, how in ((whole, "none"), (merged, "merged")):
        assert made.manifest.summary["adapter"] == how
        assert "enable_lora" not in read(made, "model.json")
        assert not (made.path / "tuneline" / "1" / "multi_lora.json").exists()


def test_an_adapter_of_another_base_is_refused(tiny_adapted: Model, tmp_path: Path) -> None:
    foreign = models.from_artifact(publish_adapter(models.open_model(tiny_model(tmp_path / "base", seed=5)), tmp_path / "model"))
    with pytest.raises(InputError, match="they share no weights"):
        vllm_package(tiny_adapted, tmp_path / "out", {"foreign": foreign})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "python"}, "need triton_packaging.backend vllm"),
        ({"backend": "vllm", "adapter": "merged"}, "and attached adapters"),
        ({"backend": "vllm", "model_name": "other"}, "the name of the model itself"),
    ],
)
def test_several_adapters_are_refused_where_they_have_no_place(
    tiny_adapted: Model, tiny_other: Model, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        pack(tiny_adapted, tmp_path / "out", {"other": tiny_other}, **settings)


def test_a_model_without_an_adapter_is_no_adapter(tiny_base: Model, tiny_adapted: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no adapter"):
        vllm_package(tiny_adapted, tmp_path / "out", {"base": tiny_base})


@pytest.mark.parametrize(
    ("given", "said"),
    [(["legal"], "NAME=MODEL_DIR"), (["a b=x"], "NAME=MODEL_DIR"), (["legal="], "NAME=MODEL_DIR"), (["a=x", "a=y"], "given twice")],
)
def test_an_adapter_option_that_cannot_be_meant_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        form.named(given)


def test_adapters_are_given_as_name_and_folder() -> None:
    assert form.named(["legal=models/legal", "a.b=c=d"]) == {"legal": Path("models/legal"), "a.b": Path("c=d")}


def test_what_vllm_would_leave_out_of_an_adapter_is_refused(tiny_base: Model, tmp_path: Path) -> None:
    model = models.from_artifact(publish_adapter(tiny_base, tmp_path / "model", use_dora=True))
    with pytest.raises(InputError, match="use_dora, which vLLM does not compute"):
        vllm_package(model, tmp_path / "out")


def test_a_rank_too_low_for_the_adapters_is_refused(tiny_adapted: Model, tiny_other: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_lora_rank is 8, and the adapters need 16"):
        vllm_package(tiny_adapted, tmp_path / "out", {"other": tiny_other}, vllm={"max_lora_rank": 8})


@pytest.mark.parametrize(("settings", "said"), [({"adapter": "merged"}, "cannot be merged"), ({"backend": "vllm"}, "LoRA adapters only")])
def test_virtual_tokens_are_refused_where_they_cannot_be_served(
    tiny_prompted: Model, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        pack(tiny_prompted, tmp_path / "out", **settings)
    assert not (tmp_path / "out" / "tuneline").exists()


def test_virtual_tokens_are_attached_with_the_reason_said_and_take_their_part_of_the_context(tiny_prompted: Model, tmp_path: Path) -> None:
    made = pack(tiny_prompted, tmp_path / "out")
    assert made.manifest.summary["adapter"] == "attached"
    assert "P_TUNING cannot be merged" in made.manifest.summary["adapter_because"]
    assert int(parameters(made)["context"]) == 2048 - 4


def test_a_referring_package_holds_no_weights(tiny_base: Model, tiny_adapted: Model, tmp_path: Path) -> None:
    whole = pack(tiny_base, tmp_path / "whole", weights="referenced")
    attached = pack(tiny_adapted, tmp_path / "attached", weights="referenced", adapter="attached")
    for made, digests in ((whole, [tiny_base.sha256]), (attached, [tiny_base.sha256, tiny_adapted.sha256])):
        assert not [file for file in made.manifest.files if file.path.endswith(".safetensors")]
        assert [one["sha256"] for one in json.loads(parameters(made)["references"])] == digests
        serve.verified(made.path)


def test_vllm_is_told_where_referenced_weights_lie(tiny_adapted: Model, tiny_other: Model, tmp_path: Path) -> None:
    made = vllm_package(tiny_adapted, tmp_path / "out", {"other": tiny_other}, weights="referenced", serving_root="/models")
    arguments = read(made, "model.json")
    assert (arguments["model"], arguments["tokenizer"]) == (str(tiny_adapted.base.path), "/models/tuneline/1/tokenizer")
    assert read(made, "multi_lora.json") == {"tuneline": str(tiny_adapted.adapter), "other": str(tiny_other.adapter)}


def test_a_merged_adapter_cannot_be_referred_to(tiny_adapted: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no weights anywhere"):
        pack(tiny_adapted, tmp_path / "out", weights="referenced")


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_a_folder_that_is_not_as_it_was_is_told_before_serving(tmp_path: Path, harm: str) -> None:
    base = tiny_model(tmp_path / "base")
    made = pack(models.open_model(base), tmp_path / "out", weights="referenced")
    path = base / "model.safetensors"
    if harm == "gone":
        base.rename(tmp_path / "elsewhere")
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactDamagedError, match=r"refers to .*base, which is not there as it was"):
        serve.verified(made.path)


def test_a_deployment_refuses_a_package_whose_weights_are_gone(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    referring = pack(models.open_model(base), tmp_path / "referring", weights="referenced")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactDamagedError, match="not there as it was"):
        layout.lay_out(tmp_path / "deployed", layout.Release("1", referring), "m", {})


@pytest.mark.parametrize("serving_root", ["", "/models", "/models/"])
def test_a_deployed_vllm_package_names_folders_that_any_server_finds_and_its_tensors(
    tiny_adapted: Model, tiny_other: Model, tmp_path: Path, serving_root: str
) -> None:
    made = vllm_package(tiny_adapted, tmp_path / "vllm", {"other": tiny_other}, serving_root=serving_root)
    folder = tmp_path / "deployed"
    taken = layout.take_in(folder, made)
    assert layout.lay_out(folder, layout.Release("7", taken), "clerk", {"registered_version": "7"}) == ["clerk"]
    version = folder / "repository" / "clerk" / "7"
    arguments, adapters = (json.loads((version / name).read_text()) for name in ("model.json", "multi_lora.json"))
    assert all((Path(arguments[key]) / "config.json").is_file() for key in ("model", "tokenizer"))
    assert all((Path(place) / "adapter_config.json").is_file() for place in adapters.values())
    assert all(Path(place).is_relative_to(taken.path) for place in [arguments["model"], *adapters.values()])
    config = pbtxt.read(folder / "repository" / "clerk")
    assert [one.name for one in config.input][:2] == ["text_input", "stream"]
    assert config.model_transaction_policy.decoupled
    assert list(config.version_policy.specific.versions) == [7]
    assert layout.laid_out(folder, "clerk") == {("clerk", "7"): made.sha256}
    assert artifacts.read(taken.path, "repository").sha256 == made.sha256, "the package's own files stay as they are"
    layout.keep_only(folder, set())
    assert not version.exists()


def test_a_changed_file_of_a_vllm_package_is_refused(tiny_adapted: Model, tmp_path: Path) -> None:
    made = vllm_package(tiny_adapted, tmp_path / "out")
    path = made.path / "tuneline" / "1" / "multi_lora.json"
    path.write_text(path.read_text().replace("adapters", "adaptors"))
    with pytest.raises(TunelineError, match=r"multi_lora\.json"):
        serve.verified(made.path)


def test_a_package_is_copied_to_a_shared_folder_under_its_digest_once(tiny_base: Model, tmp_path: Path) -> None:
    made = pack(tiny_base, tmp_path / "out", publish_to=str(tmp_path / "shared"))
    copy = tmp_path / "shared" / made.sha256
    assert serve.verified(copy).sha256 == made.sha256
    config = min(copy.glob("*/config.pbtxt"))
    written = config.stat().st_mtime_ns
    pack(tiny_base, tmp_path / "out", publish_to=str(tmp_path / "shared"))
    assert config.stat().st_mtime_ns == written


@pytest.mark.parametrize("target", ["shared", "s3://", "s3://Bucket/x", "http://host/x"])
def test_a_place_to_publish_to_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="publish_to"):
        TritonPackagingConfig(publish_to=target)
