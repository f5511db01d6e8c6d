"""Where the training runs: settings by file, by option and by environment, and what of them cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from components.common.artifacts import Artifact
from components.common.errors import ConfigurationError, TunelineError
from components.common.launch import settings
from components.common.launch.settings import LauncherSettings
from components.common.launch.torchrun import TorchRun
from components.common.progress import Silent
from components.fine_tuning.stage import finetune
from pipelines.cli.app import where
from tests.datasets import small_dataset
from tests.fine_tuning.recipes import recipe
from tests.pipelines.command import refusal
from tests.tiny import tiny_model


def test_without_a_word_the_training_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.ENVIRONMENT, raising=False)
    assert where(None, "") == LauncherSettings(kind="process")


def test_a_file_wins_over_the_environment_and_an_option_over_the_kind_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LauncherSettings(kind="slurm", nodes=3)
    monkeypatch.setenv(settings.ENVIRONMENT, settings.as_environment(asked)[settings.ENVIRONMENT])
    assert where(None, "") == asked
    (tmp_path / "platform.yaml").write_text(
        "launcher: {kind: slurm, nodes: 2, slurm: {partition: gpu}, ray: {address: 'http://head:8265'}}"
    )
    assert where(tmp_path / "platform.yaml", "").slurm.partition == "gpu"
    found = where(tmp_path / "platform.yaml", "ray")
    assert (found.kind, found.nodes, found.ray.address) == ("ray", 2, "http://head:8265")


def test_a_launcher_that_there_is_not_and_one_machine_of_two_nodes_are_refused(tmp_path: Path) -> None:
    error = refusal(2, "finetune", "dataset", "-o", "model", "--launcher", "condor", cwd=tmp_path)
    assert error["message"].startswith("--launcher condor: kind: Input should be 'process'")
    assert error["hint"] == "There are process, slurm, trainjob, rayjob, ray."
    (tmp_path / "platform.yaml").write_text("launcher: {kind: slurm, nodes: 2}")
    error = refusal(2, "run", "-p", "platform.yaml", "--launcher", "process", cwd=tmp_path)
    assert "kind process is one machine: nodes must be 1" in error["message"]


def test_settings_of_a_step_that_are_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENVIRONMENT, '{"kind": "slurm", "quee": 1}')
    with pytest.raises(ConfigurationError, match="TUNELINE_LAUNCHER: quee: Extra inputs are not permitted"):
        settings.from_environment()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    folder = tmp_path_factory.mktemp("world")
    return tiny_model(folder / "tiny"), small_dataset(folder / "dataset")


def test_nodes_that_cannot_share_the_processes_evenly_are_refused_before_any_work(world: tuple[Path, Artifact], tmp_path: Path) -> None:
    tiny, dataset = world
    config = recipe(tiny, processes=3, batch_size=6)
    with pytest.raises(ConfigurationError, match=r"processes is 3, which 2 nodes \(launcher.nodes\) cannot share evenly"):
        finetune(
            dataset, tmp_path / "model", config, seed=1, state=tmp_path / "state", reporter=Silent(),
            where=LauncherSettings(kind="slurm", nodes=2),
        )  # fmt: skip
    assert not (tmp_path / "state").exists()


def test_a_step_that_is_tried_again_with_another_output_has_the_weights_of_the_job_it_finds(
    world: tuple[Path, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was started by a call whose output is gone by now: a step's folder in the store is its own."""
    tiny, dataset = world
    config, elsewhere = recipe(tiny, max_steps=2), LauncherSettings(kind="slurm")

    def here(_: LauncherSettings) -> TorchRun:
        return TorchRun()

    monkeypatch.setattr("components.fine_tuning.stage.chosen", here)
    common = {"seed": 1, "state": tmp_path / "state", "reporter": Silent(), "where": elsewhere}
    with monkeypatch.context() as patched:
        patched.setattr("components.fine_tuning.stage._bring_home", lambda *_: (_ for _ in ()).throw(TunelineError("killed here")))
        with pytest.raises(TunelineError, match="killed here"):
            finetune(dataset, tmp_path / "first", config, **common)  # type: ignore[arg-type]
    assert not list((tmp_path / "first").glob("*.safetensors"))
    made = finetune(dataset, tmp_path / "second", config, **common)  # type: ignore[arg-type]
    assert list(made.path.glob("*.safetensors"))
    assert not list((tmp_path / "state" / "fine_tuning").iterdir())


@pytest.mark.parametrize("kind", ["trainjob", "rayjob"])
def test_two_claims_of_a_trainings_pods_at_one_place_are_refused(kind: str) -> None:
    corpus = {"claim": "corpus", "mount": "/corpus"}
    for pods in ({"claims": [corpus, {**corpus, "claim": "other"}]}, {"claim": "work", "mount": "/corpus", "claims": [corpus]}):
        with pytest.raises(ValidationError, match="/corpus is where two claims are mounted"):
            LauncherSettings.model_validate({"kind": kind, kind: pods})
    assert LauncherSettings.model_validate({"kind": kind, kind: {"mount": "/corpus", "claims": [corpus]}}), "the step's claim has its own"
