"""The summary of a customization on its MLflow run and on the registered model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.reporting import mlflow_tracking
from components.common.runtime.reporters import SilentReporter
from components.model_registry import run_summary
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import Registration, register
from tests.model_registry.conftest import Customization

pytestmark = pytest.mark.mlflow
VERSION = {
    "repo": "/data",
    "path": "d",
    "rev": "c0ffee",
    "md5": "1f.dir",
    "tag": "dataset-v1",
    "remote": "",
    "uri": "dvc://d",
}


@pytest.fixture
def artifacts(registry: Any, customize: Customization, tmp_path: Path) -> dict[str, Artifact]:
    """The artifacts of an accepted customization, by kind."""
    made = customize("one", incumbent="1c" * 32)
    assert made.repository
    dataset = artifact_folder.read(tmp_path / "customizations" / "dataset")
    return {"dataset": dataset, "model": made.model, "evaluation": made.evaluation, "repository": made.repository}


@pytest.fixture
def parent(registry: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The run of the customization."""
    run_id = mlflow_tracking.start_run("customization", {})
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    return run_id


def register_and_log(artifacts: dict[str, Artifact], own: Any = None) -> Registration:
    registered = register(
        artifacts["model"],
        artifacts["evaluation"],
        artifacts.get("repository"),
        ModelRegistryConfig(name="helper"),
        reporter=SilentReporter(),
    )
    run_summary.log_summary(own, registered, artifacts, VERSION)
    return registered


def list_nested(registry: Any, parent: str) -> dict[str, Any]:
    experiment = registry.get_run(parent).info.experiment_id
    runs = registry.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert len(runs) == len({run.info.run_name for run in runs})
    return {run.info.run_name: run for run in runs}


def test_run_and_logged_model_have_recipe_and_scores(
    registry: Any, artifacts: dict[str, Artifact], parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts["model"].manifest.config.update(base_model="tiny", learning_rate=1e-4, lora={"rank": 8})
    artifacts["model"].manifest.summary.update(startup={"load": 0.3})
    registered = register_and_log(artifacts)
    run = registry.get_run(parent)
    recipe = {
        "fine_tuning.base_model": "tiny",
        "fine_tuning.learning_rate": "0.0001",
        "fine_tuning.lora.rank": "8",
        "seed": "1",
        "dataset_sha256": artifacts["dataset"].sha256,
        "base_model_sha256": "ba5e" * 16,
    }
    assert run.data.params.items() >= {**recipe, "dataset": "dataset-v1", "evaluation.min_items": "2"}.items()
    assert not {"evaluation.tasks", "evaluation.gate"} & set(run.data.params)
    assert run.data.tags["tuneline.verdict"] == "accepted"
    scores = {
        "steps": 3.0,
        "held_out.loss.candidate": 1.0,
        "held_out.loss.base": 2.0,
        "held_out.loss.incumbent": 1.5,
        "held_out.loss.n": 4.0,
    }
    assert run.data.metrics == scores
    version = registry.get_model_version("helper", registered.version)
    model = registry.get_logged_model(version.source.removeprefix("models:/"))
    assert model.params == recipe
    assert {metric.key: metric.value for metric in model.metrics} == scores
    assert {metric.run_id for metric in model.metrics} == {parent}
    assert model.tags["mlflow.user"]
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]


def test_run_has_the_splits_as_inputs(registry: Any, artifacts: dict[str, Artifact], parent: str) -> None:
    register_and_log(artifacts)
    inputs = registry.get_run(parent).inputs.dataset_inputs
    described = {one.tags[0].value: (one.dataset.name, json.loads(one.dataset.profile)["num_rows"]) for one in inputs}
    assert described == {
        "train": ("dataset-v1/train", 12),
        "validation": ("dataset-v1/validation", 2),
        "test": ("dataset-v1/test", 4),
    }


def test_items_are_a_table_of_the_run(registry: Any, artifacts: dict[str, Artifact], parent: str) -> None:
    register_and_log(artifacts)
    experiment = registry.get_run(parent).info.experiment_id
    table = registry.load_table(experiment, run_summary.ITEMS_FILENAME, run_ids=[parent], extra_columns=["run_id"])
    assert list(table.columns) == [
        "task", "id", "prompt", "reference", "loss.candidate", "loss.base", "loss.incumbent", "run_id",
    ]  # fmt: skip
    assert list(table["loss.candidate"]) == [1.0] * 4
    assert list(table["loss.base"]) == [2.0] * 4


def test_table_is_limited_in_items_and_characters(
    artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_summary, "MAX_ITEMS_PER_TASK", 3)
    monkeypatch.setattr(run_summary, "MAX_CELL_CHARACTERS", 10)
    table = run_summary.build_item_table(artifacts["evaluation"])
    assert len(table["data"]) == 3
    prompts = [row[table["columns"].index("prompt")] for row in table["data"]]
    assert all(len(prompt) == 12 and prompt.endswith(" …") for prompt in prompts)


def test_repeated_summary_adds_nothing_twice(registry: Any, artifacts: dict[str, Artifact], parent: str) -> None:
    register_and_log(artifacts)
    register_and_log(artifacts)
    run = registry.get_run(parent)
    assert len(run.inputs.dataset_inputs) == 3
    assert len(run.outputs.model_outputs) == 1
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": run_summary.ITEMS_FILENAME, "type": "table"}
    ]
    assert set(list_nested(registry, parent)) == {"data_curation", "fine_tuning", "evaluation", "triton_packaging"}


def test_cached_stages_get_nested_runs_that_link_the_original(
    registry: Any, artifacts: dict[str, Artifact], parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow_tracking.stage_run("fine_tuning") as original:
        original.metrics({"train_loss": 3.0}, step=1)
        original.log_result(artifacts["model"])
    register_and_log(artifacts)
    assert "tuneline.reused" not in list_nested(registry, parent)["fine_tuning"].data.tags
    second = mlflow_tracking.start_run("second", {})
    monkeypatch.setenv("MLFLOW_RUN_ID", second)
    del artifacts["repository"]
    register_and_log(artifacts)
    nested = list_nested(registry, second)
    assert set(nested) == {"data_curation", "fine_tuning", "evaluation"}
    cached = nested["fine_tuning"]
    assert cached.info.status == "FINISHED"
    assert cached.data.tags["tuneline.original_run"] == original.run_id
    assert cached.data.tags["tuneline.model_sha256"] == artifacts["model"].sha256
    assert "train_loss" not in cached.data.metrics


def test_stage_run_of_kubeflow_has_the_summary(
    registry: Any, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_RUN_ID", "kubeflow-1")
    with mlflow_tracking.stage_run("fine_tuning") as tuned:
        tuned.log_result(artifacts["model"])
    with mlflow_tracking.stage_run("registration") as own:
        register_and_log(artifacts, own)
    run = registry.get_run(own.run_id)
    assert run.data.metrics["held_out.loss.candidate"] == 1.0
    assert run.data.tags["mlflow.source.type"] == "JOB"
    assert set(list_nested(registry, own.run_id)) == {"data_curation", "evaluation", "triton_packaging"}


def test_untracked_registration_has_no_summary(
    registry: Any, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_and_log(artifacts)
    experiments = [experiment.experiment_id for experiment in registry.search_experiments()]
    assert list(registry.search_runs(experiments)) == []
