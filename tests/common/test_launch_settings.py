"""Launcher settings from file, option and environment, and their validation.

The test marked `long` trains a model twice.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from components.common.artifacts.artifact_folder import Artifact
from components.common.launch import launcher_settings
from components.common.launch.launcher_registry import LAUNCHERS
from components.common.launch.launcher_settings import LauncherSettings
from components.common.launch.torchrun import TorchrunLauncher
from components.common.runtime.errors import ConfigurationError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.fine_tuning.stage import _move_to_output, finetune
from pipelines.cli.application import load_launcher
from tests.datasets import small_dataset
from tests.fine_tuning.recipes import recipe
from tests.lost_answers import lose_answers
from tests.pipelines.command import refusal
from tests.tiny import tiny_model


def test_default_launcher_is_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launcher_settings.SETTINGS_VARIABLE, raising=False)
    assert load_launcher(None, "") == LauncherSettings(kind="process")


def test_option_overrides_file_and_file_overrides_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_environment = LauncherSettings(kind="slurm", nodes=3)
    monkeypatch.setenv(
        launcher_settings.SETTINGS_VARIABLE,
        launcher_settings.to_environment(from_environment)[launcher_settings.SETTINGS_VARIABLE],
    )
    assert load_launcher(None, "") == from_environment
    (tmp_path / "platform.yaml").write_text(
        "launcher: {kind: slurm, nodes: 2, slurm: {partition: gpu}, ray: {address: 'http://head:8265'}}"
    )
    assert load_launcher(tmp_path / "platform.yaml", "").slurm.partition == "gpu"
    settings = load_launcher(tmp_path / "platform.yaml", "ray")
    assert (settings.kind, settings.nodes, settings.ray.address) == ("ray", 2, "http://head:8265")


def test_unknown_launcher_and_multi_node_process_are_refused(tmp_path: Path) -> None:
    error = refusal(2, "finetune", "dataset", "-o", "model", "--launcher", "condor", cwd=tmp_path)
    assert error["message"].startswith("--launcher condor: kind: found 'condor'; expected 'process'")
    assert error["hint"] == f"Choose one of: {', '.join(LAUNCHERS)}."
    (tmp_path / "platform.yaml").write_text("launcher: {kind: slurm, nodes: 2}")
    error = refusal(2, "run", "-p", "platform.yaml", "--launcher", "process", cwd=tmp_path)
    assert "expected 1, because kind process runs on one machine" in error["message"]


def test_invalid_settings_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = '{"kind": "slurm", "quee": 1, "nodes": 0, "environment": {"1A": "a secret"}}'
    monkeypatch.setenv(launcher_settings.SETTINGS_VARIABLE, settings)
    with pytest.raises(ConfigurationError) as error:
        launcher_settings.load_settings()
    problems = error.value.message.removeprefix("TUNELINE_LAUNCHER: ").split("; ")
    assert problems[:2] == ["nodes: found 0", "expected 1 or more"]
    assert any(problem.startswith("quee: unknown key") for problem in problems)
    assert "a secret" not in error.value.message


@pytest.fixture(scope="module")
def model_and_dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    folder = tmp_path_factory.mktemp("world")
    return tiny_model(folder / "tiny"), small_dataset(folder / "dataset")


def test_indivisible_process_count_is_refused_before_work(
    model_and_dataset: tuple[Path, Artifact], tmp_path: Path
) -> None:
    tiny, dataset = model_and_dataset
    config = recipe(tiny, processes=3, batch_size=6)
    with pytest.raises(ConfigurationError, match=r"processes is 3; expected a multiple of launcher.nodes \(2\)"):
        finetune(
            dataset, tmp_path / "model", config, seed=1, state=tmp_path / "state", reporter=SilentReporter(),
            launcher_settings=LauncherSettings(kind="slurm", nodes=2),
        )  # fmt: skip
    assert not (tmp_path / "state").exists()


@pytest.mark.long
def test_retry_with_other_output_gets_weights_of_finished_job(
    model_and_dataset: tuple[Path, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed call started the job, and the retry writes to another folder."""
    tiny, dataset = model_and_dataset
    config, slurm_settings = recipe(tiny, max_steps=2), LauncherSettings(kind="slurm")

    def create_local_launcher(_: LauncherSettings) -> TorchrunLauncher:
        return TorchrunLauncher()

    monkeypatch.setattr("components.fine_tuning.stage.create_launcher", create_local_launcher)
    common = {"seed": 1, "state": tmp_path / "state", "reporter": SilentReporter(), "launcher_settings": slurm_settings}
    with monkeypatch.context() as patched:
        patched.setattr(
            "components.fine_tuning.stage._move_to_output",
            lambda *_: (_ for _ in ()).throw(TunelineError("killed here")),
        )
        with pytest.raises(TunelineError, match="killed here"):
            finetune(dataset, tmp_path / "first", config, **common)  # type: ignore[arg-type]
    assert not list((tmp_path / "first").glob("*.safetensors"))
    artifact = finetune(dataset, tmp_path / "second", config, **common)  # type: ignore[arg-type]
    assert list(artifact.path.glob("*.safetensors"))
    assert not list((tmp_path / "state" / "fine_tuning").iterdir())


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The folder with the weights of a remote job, beside a folder for the output."""
    folder = tmp_path / "state" / "weights"
    folder.mkdir(parents=True)
    (tmp_path / "output").mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def fail_to_rename(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("components.common.runtime.filesystem.rename", fail)
    monkeypatch.setattr("os.rename", fail)  # the first attempt of shutil.move


def test_weights_are_moved_to_another_file_system(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_rename(monkeypatch, errno.EXDEV)
    output = weights.parents[1] / "output"
    _move_to_output(weights, output)
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    assert not list(weights.iterdir())


def test_weights_are_moved_over_a_server_whose_answers_are_lost(weights: Path) -> None:
    output = weights.parents[1] / "output"
    with lose_answers(output) as lost:
        _move_to_output(weights, output)
    assert lost == {"rename"}
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]


def test_failed_move_keeps_the_weights_and_is_reported(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_rename(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        _move_to_output(weights, weights.parents[1] / "output")
    assert list(weights.iterdir())


@pytest.mark.parametrize("kind", ["trainjob", "rayjob"])
def test_two_claims_with_equal_mount_path_are_refused(kind: str) -> None:
    corpus = {"claim": "corpus", "mount": "/corpus"}
    for pods in (
        {"claims": [corpus, {**corpus, "claim": "other"}]},
        {"claim": "work", "mount": "/corpus", "claims": [corpus]},
    ):
        with pytest.raises(ValidationError, match="/corpus is the mount path of two or more claims"):
            LauncherSettings.model_validate({"kind": kind, kind: pods})
    assert LauncherSettings.model_validate({"kind": kind, kind: {"mount": "/corpus", "claims": [corpus]}}), (
        "the claim of the step has its own mount path"
    )
