"""What a package holds, without a server."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from components.common import artifacts, models
from components.common.errors import ArtifactDamagedError, OutputOccupiedError, TunelineError, UsageError
from components.common.models import Model
from components.common.progress import Silent
from components.triton_packaging import engine, pbtxt, serve, stage, weights
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import package
from tests.tiny import tiny_model


def pack(model: Model, output: Path, config: TritonPackagingConfig, **more: bool) -> artifacts.Artifact:
    return package(model, output, config, seed=1, reporter=Silent(), **more)


@pytest.mark.parametrize("name", ["", "a/b", "../up", "with space", ".hidden", "-flag", "n" * 101])
def test_a_name_that_triton_or_a_url_cannot_bear_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        TritonPackagingConfig(model_name=name)


def test_an_empty_golden_prompt_is_refused() -> None:
    with pytest.raises(ValidationError, match="golden prompt is empty"):
        TritonPackagingConfig(golden_prompts=["Hello", " "])


def test_the_configuration_is_named_like_its_folder_and_tells_the_lineage(
    tiny_adapted: Model, tmp_path: Path, quick: TritonPackagingConfig
) -> None:
    made = pack(tiny_adapted, tmp_path / "out", quick)
    config = pbtxt.read(made.path / "tuneline")
    told = {name: value.string_value for name, value in config.parameters.items()}
    assert (config.name, config.backend, config.max_batch_size) == ("tuneline", "python", 0)
    assert told["model_sha256"] == tiny_adapted.sha256
    assert told["base_model_sha256"] == tiny_adapted.base.sha256
    assert told["dataset_sha256"] == "d" * 64
    assert int(told["context"]) == 2048
    assert int(told["max_prompt_tokens"]) == 2047  # within the context, though 4096 is configured


def test_a_renamed_model_folder_is_refused_because_triton_never_loads_it(
    tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig
) -> None:
    made = pack(tiny_base, tmp_path / "out", quick)
    (made.path / "tuneline").rename(made.path / "other")
    with pytest.raises(TunelineError, match="names the model 'tuneline', its folder 'other'"):
        pbtxt.read(made.path / "other")


def test_a_configuration_with_an_unknown_field_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m" nonsense: 3', encoding="utf-8")
    with pytest.raises(TunelineError, match=r"config\.pbtxt cannot be read: .*nonsense"):
        pbtxt.read(tmp_path / "m")


def test_the_merged_weights_compute_what_the_adapter_does(tiny_adapted: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_adapted, tmp_path / "out", quick)
    packaged = models.load(models.open_model(made.path / "tuneline" / "1" / "weights"))
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.inference_mode():
        merged, adapted, base = (
            m(ids).logits for m in (packaged, models.load(tiny_adapted), models.load(models.open_model(tiny_adapted.weights)))
        )
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=1e-4)
    assert (adapted - base).abs().max() > 0.1


def test_merged_weights_are_stored_in_the_configured_number_format(tiny_adapted: Model, tmp_path: Path) -> None:
    from safetensors import safe_open

    made = pack(tiny_adapted, tmp_path / "out", TritonPackagingConfig(prove=False, dtype="bfloat16"))
    with safe_open(made.path / "tuneline" / "1" / "weights" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - no dict


def test_packaging_twice_gives_equal_bytes_that_name_no_place(tiny_adapted: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    first, second = (pack(tiny_adapted, tmp_path / name, quick) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    payload = [first.path / f.path for f in first.manifest.files if f.payload]
    assert payload
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in payload)
    assert all(str(tiny_adapted.base.path).encode() not in path.read_bytes() for path in payload)


def test_reports_and_proofs_are_no_payload(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_base, tmp_path / "out", quick)
    assert {f.path for f in made.manifest.files if not f.payload} == {"proof.json", "report.html"}
    assert all(f.path.startswith(("tuneline/", "tuneline_stream/")) for f in made.manifest.files if f.payload)


def test_another_user_may_read_every_file(tiny_adapted: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_adapted, tmp_path / "out", quick)
    for path in (made.path / "tuneline").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o444 == 0o444, path
        assert not path.is_dir() or mode & 0o111 == 0o111, path


def test_full_weights_lie_once_where_others_may_read_them(tmp_path: Path, quick: TritonPackagingConfig) -> None:
    source = tiny_model(tmp_path / "base") / "model.safetensors"
    source.chmod(0o644)
    made = pack(models.open_model(tmp_path / "base"), tmp_path / "out", quick)
    assert (made.path / "tuneline" / "1" / "weights" / "model.safetensors").samefile(source)


def test_private_weights_are_copied_and_stay_private(tmp_path: Path, quick: TritonPackagingConfig) -> None:
    source = tiny_model(tmp_path / "base") / "model.safetensors"
    source.chmod(0o600)
    made = pack(models.open_model(tmp_path / "base"), tmp_path / "out", quick)
    copy = made.path / "tuneline" / "1" / "weights" / "model.safetensors"
    assert not copy.samefile(source)
    assert copy.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(source.stat().st_mode) == 0o600


def test_where_a_model_was_loaded_from_is_not_packaged(tmp_path: Path, quick: TritonPackagingConfig) -> None:
    config = tiny_model(tmp_path / "base") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": "/home/someone/model"}))
    made = pack(models.open_model(tmp_path / "base"), tmp_path / "out", quick)
    assert "someone" not in (made.path / "tuneline" / "1" / "weights" / "config.json").read_text()


def test_a_finished_package_is_returned_and_another_one_refused(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_base, tmp_path / "out", quick)
    written = (made.path / "manifest.json").stat().st_mtime_ns
    assert pack(tiny_base, tmp_path / "out", quick).sha256 == made.sha256
    assert (made.path / "manifest.json").stat().st_mtime_ns == written
    other = TritonPackagingConfig(prove=False, model_name="other")
    with pytest.raises(OutputOccupiedError):
        pack(tiny_base, tmp_path / "out", other)
    assert pack(tiny_base, tmp_path / "out", other, overwrite=True).manifest.summary["model_name"] == "other"
    assert not (tmp_path / "out" / "tuneline").exists()


def test_without_triton_a_package_is_made_and_says_that_it_is_unproven(
    tiny_base: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "availability", lambda: "the embedded Triton needs glibc 2.35 or newer")
    made = pack(tiny_base, tmp_path / "out", TritonPackagingConfig())
    assert made.manifest.summary["proof"] is None
    assert "glibc" in made.manifest.summary["unproven_because"]
    assert "glibc" in (made.path / "report.html").read_text(encoding="utf-8")


def test_an_unproven_package_is_made_again_once_triton_runs(tiny_base: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TritonPackagingConfig()
    assert stage._key(tiny_base, config, 1, "no wheel") != stage._key(tiny_base, config, 1, None)


def test_a_changed_byte_is_refused_by_name_before_serving(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_base, tmp_path / "out", quick)
    path = made.path / "tuneline" / "1" / "model.py"
    path.write_bytes(path.read_bytes().replace(b"greedy", b"gready", 1))
    with pytest.raises(ArtifactDamagedError, match=r"tuneline/1/model\.py"):
        serve.verified(made.path)


def test_an_added_version_is_refused_by_name_before_serving(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_base, tmp_path / "out", quick)
    (made.path / "tuneline" / "2").mkdir()
    (made.path / "tuneline" / "2" / "model.py").write_text("import os")
    with pytest.raises(ArtifactDamagedError, match=r"tuneline/2/model\.py was added"):
        serve.verified(made.path)


def test_a_foreign_triton_repository_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m"')
    with pytest.raises(UsageError, match="not packaged by tuneline"):
        serve.serve(tmp_path, on_ready=lambda _: None)


def test_an_unfinished_package_is_not_served(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    made = pack(tiny_base, tmp_path / "out", quick)
    (made.path / "manifest.json").rename(tmp_path / "kept")
    (made.path / ".unfinished").touch()
    with pytest.raises(TunelineError):
        serve.verified(made.path)


def test_a_context_is_read_from_nested_configurations_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert weights.context_tokens(tmp_path, 5) == 77
    (tmp_path / "config.json").write_text("{}")
    assert weights.context_tokens(tmp_path, 5) == 5
