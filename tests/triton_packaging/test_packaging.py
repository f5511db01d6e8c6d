"""Contents of a package and its verification, without a server."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from components.common.artifacts import artifact_folder
from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.common.runtime import process_control
from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError, TunelineError, UsageError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import (
    package_serving,
    publishing,
    stage,
    triton_config,
    triton_installation,
    weight_files,
)
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.deployment import serving_folder
from components.triton_packaging.stage import package
from tests.lost_answers import lose_answers
from tests.tiny import tiny_model


def pack(
    model: LoadableModel, output: Path, config: TritonPackagingConfig, **options: bool
) -> artifact_folder.Artifact:
    return package(model, output, config, seed=1, reporter=SilentReporter(), **options)


@pytest.mark.parametrize("name", ["", "a/b", "../up", "with space", ".hidden", "-flag", "n" * 101])
def test_invalid_model_name_is_rejected(name: str) -> None:
    with pytest.raises(ValidationError):
        TritonPackagingConfig(model_name=name)


def test_empty_golden_prompt_is_rejected() -> None:
    with pytest.raises(ValidationError, match="golden prompt 2 is empty"):
        TritonPackagingConfig(golden_prompts=["Hello", " "])


def test_model_configuration_contains_name_and_lineage(
    adapted_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(adapted_model, tmp_path / "out", unproven_config)
    config = triton_config.read_config(artifact.path / "tuneline")
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    assert (config.name, config.backend, config.max_batch_size) == ("tuneline", "python", 0)
    assert parameters["model_sha256"] == adapted_model.sha256
    assert parameters["base_model_sha256"] == adapted_model.base.sha256
    assert parameters["dataset_sha256"] == "d" * 64
    assert int(parameters["context"]) == 2048
    assert int(parameters["max_prompt_tokens"]) == 2047  # the configured 4096 exceed the context


def test_renamed_model_folder_is_rejected(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    (artifact.path / "tuneline").rename(artifact.path / "other")
    with pytest.raises(TunelineError, match="name is 'tuneline'; expected the folder name 'other'"):
        triton_config.read_config(artifact.path / "other")


def test_unknown_configuration_field_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m" nonsense: 3', encoding="utf-8")
    with pytest.raises(TunelineError, match=r"config\.pbtxt cannot be read: .*nonsense"):
        triton_config.read_config(tmp_path / "m")


def test_merged_weights_match_the_adapter(
    adapted_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(adapted_model, tmp_path / "out", unproven_config)
    packaged = model_loading.load_model(model_loading.open_model(artifact.path / "tuneline" / "1" / "weights"))
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.inference_mode():
        merged, adapted, base = (
            m(ids).logits
            for m in (
                packaged,
                model_loading.load_model(adapted_model),
                model_loading.load_model(model_loading.open_model(adapted_model.weights)),
            )
        )
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
    assert (adapted - base).abs().max() > 0.1


def test_package_is_written_and_installed_over_a_server_whose_answers_are_lost(
    adapted_model: LoadableModel, tmp_path: Path
) -> None:
    config = TritonPackagingConfig(prove=False, adapter="attached")
    with lose_answers(tmp_path) as lost:
        artifact = pack(adapted_model, tmp_path / "out", config)
        publishing.publish(artifact, str(tmp_path / "published"), SilentReporter())
        package = serving_folder.copy_package(tmp_path / "deployed", artifact)
        models = serving_folder.install_release(tmp_path / "deployed", serving_folder.Release("7", package), "clerk")
        triton_installation.create_backend_folder(tmp_path / "backends")
    assert lost >= {"mkdir", "link", "symlink", "rename"}
    assert artifact_folder.read(tmp_path / "published" / artifact.sha256, "repository").sha256 == artifact.sha256
    assert all((tmp_path / "deployed" / "repository" / model / "7").is_dir() for model in models)


def test_merged_weights_have_the_configured_dtype(adapted_model: LoadableModel, tmp_path: Path) -> None:
    from safetensors import safe_open

    artifact = pack(adapted_model, tmp_path / "out", TritonPackagingConfig(prove=False, dtype="bfloat16"))
    with safe_open(artifact.path / "tuneline" / "1" / "weights" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - no dict


def test_packaging_is_reproducible_and_contains_no_local_path(
    adapted_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    first, second = (pack(adapted_model, tmp_path / name, unproven_config) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    payload = [first.path / f.path for f in first.manifest.files if f.payload]
    assert payload
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in payload)
    assert all(str(adapted_model.base.path).encode() not in path.read_bytes() for path in payload)


def test_payload_is_the_model_folders_and_the_proof(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    assert {f.path for f in artifact.manifest.files if not f.payload} == {"report.html"}
    assert all(
        f.path.startswith(("tuneline/", "tuneline_stream/", "proof.json")) for f in artifact.manifest.files if f.payload
    )


def test_all_package_files_are_readable_by_the_group_only(
    adapted_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    before = os.umask(0o077)
    process_control.restrict_new_files()
    try:
        artifact = pack(adapted_model, tmp_path / "out", unproven_config)
    finally:
        os.umask(before)
    for path in (artifact.path / "tuneline", *(artifact.path / "tuneline").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_readable_full_weights_are_hard_linked(tmp_path: Path, unproven_config: TritonPackagingConfig) -> None:
    source = tiny_model(tmp_path / "base") / "model.safetensors"
    source.chmod(0o644)
    artifact = pack(model_loading.open_model(tmp_path / "base"), tmp_path / "out", unproven_config)
    assert (artifact.path / "tuneline" / "1" / "weights" / "model.safetensors").samefile(source)


def test_private_weights_are_copied_and_stay_private(tmp_path: Path, unproven_config: TritonPackagingConfig) -> None:
    source = tiny_model(tmp_path / "base") / "model.safetensors"
    source.chmod(0o600)
    artifact = pack(model_loading.open_model(tmp_path / "base"), tmp_path / "out", unproven_config)
    copy = artifact.path / "tuneline" / "1" / "weights" / "model.safetensors"
    assert not copy.samefile(source)
    assert copy.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(source.stat().st_mode) == 0o600


def test_local_path_of_the_model_is_not_packaged(tmp_path: Path, unproven_config: TritonPackagingConfig) -> None:
    config = tiny_model(tmp_path / "base") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": "/home/someone/model"}))
    artifact = pack(model_loading.open_model(tmp_path / "base"), tmp_path / "out", unproven_config)
    assert "someone" not in (artifact.path / "tuneline" / "1" / "weights" / "config.json").read_text()


def test_finished_package_is_reused_and_another_one_rejected(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    modified_ns = (artifact.path / "manifest.json").stat().st_mtime_ns
    assert pack(base_model, tmp_path / "out", unproven_config).sha256 == artifact.sha256
    assert (artifact.path / "manifest.json").stat().st_mtime_ns == modified_ns
    other = TritonPackagingConfig(prove=False, model_name="other")
    with pytest.raises(OutputOccupiedError):
        pack(base_model, tmp_path / "out", other)
    assert pack(base_model, tmp_path / "out", other, overwrite=True).manifest.summary["model_name"] == "other"
    assert not (tmp_path / "out" / "tuneline").exists()


def test_package_without_triton_is_marked_unproven(
    base_model: LoadableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        triton_installation, "unavailable_reason", lambda: "the embedded Triton requires glibc 2.35 or newer"
    )
    artifact = pack(base_model, tmp_path / "out", TritonPackagingConfig())
    assert artifact.manifest.summary["proof"] is None
    assert "glibc" in artifact.manifest.summary["unproven_because"]
    assert "glibc" in (artifact.path / "report.html").read_text(encoding="utf-8")


def test_cache_key_changes_once_triton_is_available(base_model: LoadableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TritonPackagingConfig()
    assert stage._compute_key(base_model, config, 1, "no wheel") != stage._compute_key(base_model, config, 1, None)


def test_changed_file_is_rejected_by_name_before_serving(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    path = artifact.path / "tuneline" / "1" / "model.py"
    path.write_bytes(path.read_bytes().replace(b"greedy", b"gready", 1))
    with pytest.raises(ArtifactDamagedError, match=r"tuneline/1/model\.py"):
        package_serving.verify_package(artifact.path)


def test_added_version_is_rejected_by_name_before_serving(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    (artifact.path / "tuneline" / "2").mkdir()
    (artifact.path / "tuneline" / "2" / "model.py").write_text("import os")
    with pytest.raises(ArtifactDamagedError, match=r"contains tuneline/2/model\.py, which is not part"):
        package_serving.verify_package(artifact.path)


def test_foreign_triton_repository_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m"')
    with pytest.raises(UsageError, match="not packaged by tuneline"):
        package_serving.verify_package(tmp_path)


def test_unfinished_package_is_not_served(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    (artifact.path / "manifest.json").rename(tmp_path / "kept")
    (artifact.path / ".unfinished").touch()
    with pytest.raises(TunelineError):
        package_serving.verify_package(artifact.path)


def test_cache_for_all_slots_is_requested_on_a_gpu(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    artifact = pack(base_model, tmp_path / "out", unproven_config)
    parameters = triton_config.read_config(artifact.path / "tuneline").parameters
    assert parameters["gpu_cache_tokens"].string_value == str(16 * 2048)


def test_context_length_is_read_from_nested_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert weight_files.read_context_tokens(tmp_path, 5) == 77
    (tmp_path / "config.json").write_text("{}")
    assert weight_files.read_context_tokens(tmp_path, 5) == 5
