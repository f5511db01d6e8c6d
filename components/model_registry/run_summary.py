"""The summary of a customization in MLflow: recipe, datasets, scores and evaluated items on one run.

The run is that of the customization, so that a comparison of runs in MLflow shows the recipe and the scores of each.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts.artifact_folder import Artifact
from components.common.pipeline_step import STAGE_BY_ARTIFACT
from components.common.reporting import mlflow_tracking
from components.common.reporting.mlflow_tracking import MlflowReporter
from components.model_registry import evidence, lineage_tags, model_versions, rule_results
from components.model_registry.model_versions import TAG_PREFIX
from components.model_registry.stage import LOGGED_MODEL_PREFIX, Registration

if TYPE_CHECKING:
    from mlflow import MlflowClient

ITEMS_FILENAME = "evaluation_items.json"
MAX_ITEMS_PER_TASK = 200
MAX_CELL_CHARACTERS = 2000
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's tag for the tables of a run
SOURCE_FIELDS = ("repo", "path", "rev", "md5", "tag", "remote")
ROLES = ("candidate", "base", "incumbent")
# Figures of the training to compare runs by; the run of the training has all of them.
TRAINING_FIGURES = (
    "train_loss", "validation_loss_before", "validation_loss", "steps", "best_step", "epochs", "tokens", "tokens_per_second", "peak_memory",
)  # fmt: skip
Json = dict[str, Any]


def log_summary(
    own: MlflowReporter | None,
    registered: Registration,
    artifacts: Mapping[str, Artifact],
    dataset_version: Mapping[str, str],
) -> None:
    """Log the result of a customization to its run, or to the stage's own run if the customization has none.

    The registered model gets the same metrics. A repeated call adds no second dataset, table or nested run.

    Args:
        own: reporter of the stage's own run; None if the stage is not tracked.
        registered: the registered version.
        artifacts: dataset, model and evaluation by kind, and the repository of an accepted candidate.
        dataset_version: the dataset's revision as returned by data_versioning.

    Raises:
        EngineMissingError, RegistryError: as `model_versions.registry_client`.
    """
    run_id = mlflow_tracking.get_summary_run_id(own)
    if run_id is None:
        return
    dataset, model, evaluation = (artifacts[kind] for kind in ("dataset", "model", "evaluation"))
    with model_versions.registry_client() as client:
        summary = MlflowReporter(client, run_id)
        # Lists, such as the tasks, fill a screen of MLflow's comparison; they are parameters of the evaluation's run.
        settings = mlflow_tracking.flatten(evaluation.manifest.config, "evaluation.")
        settings = {name: value for name, value in settings.items() if not isinstance(value, (list, tuple))}
        summary.log_params({**lineage_tags.list_recipe_params(model), **settings, "dataset": dataset_version["tag"]})
        client.set_tag(run_id, f"{TAG_PREFIX}verdict", lineage_tags.read_verdict(evaluation))
        source = str(client.get_model_version(registered.name, registered.version).source)
        model_id = source.removeprefix(LOGGED_MODEL_PREFIX) if source.startswith(LOGGED_MODEL_PREFIX) else None
        summary.metrics(collect_metrics(model, evaluation), 0, model_id)
        if model_id:
            _link_model(client, run_id, model_id)
        location = {name: dataset_version[name] for name in SOURCE_FIELDS}
        summary.log_dataset(dataset, name=dataset_version["tag"], source=location)
        _log_items(client, run_id, evaluation)
        _log_cached_stages(client, summary, artifacts)


def collect_metrics(model: Artifact, evaluation: Artifact) -> dict[str, float]:
    """Return the figures of the training, and the scores as TASK.METRIC.ROLE with the ends of their intervals."""
    figures = mlflow_tracking.extract_metrics(model.manifest.summary)
    return {
        **{name: figures[name] for name in TRAINING_FIGURES if name in figures},
        **mlflow_tracking.extract_metrics(evaluation.manifest.summary.get("metrics", {})),
    }


def _link_model(client: MlflowClient, run_id: str, model_id: str) -> None:
    """Link a logged model as an output of the run."""
    from mlflow.entities import LoggedModelOutput

    outputs = client.get_run(run_id).outputs
    if not outputs or model_id not in [output.model_id for output in outputs.model_outputs]:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])


def _log_items(client: MlflowClient, run_id: str, evaluation: Artifact) -> None:
    """Log the table of evaluated items, in the format of `mlflow.log_table`."""
    # `log_table` would append the rows again when a step is repeated.
    table = build_item_table(evaluation)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ITEMS_FILENAME
        path.write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
        client.log_artifact(run_id, str(path))
    tables = json.loads(client.get_run(run_id).data.tags.get(TABLES_TAG, "[]"))
    entry = {"path": ITEMS_FILENAME, "type": "table"}
    if entry not in tables:
        client.set_tag(run_id, TABLES_TAG, json.dumps([*tables, entry]))


def build_item_table(evaluation: Artifact) -> Json:
    """Return {"columns", "data"}: a row for each of the first MAX_ITEMS_PER_TASK items of a task.

    Scores are the metrics of the single item, in columns METRIC.ROLE. Texts are cut to MAX_CELL_CHARACTERS.
    """
    tasks, counts = evidence.read_content(evaluation).get("tasks", {}), Counter[str]()
    items: list[Json] = []
    for row in evidence.read_predictions(evaluation):
        counts[row["task"]] += 1
        if counts[row["task"]] > MAX_ITEMS_PER_TASK:
            continue
        texts = ("task", "id", "prompt", "reference", *(f"{role}_answer" for role in ROLES))
        item: Json = {name: _shorten(row[name]) for name in texts if row.get(name) is not None}
        for metric, definition in tasks.get(row["task"], {}).get("metrics", {}).items():
            for role in ROLES:
                exponential = definition["exponential"]
                item[f"{metric}.{role}"] = rule_results.compute_metric([row], role, metric, exponential=exponential)
        items.append(item)
    columns = list(dict.fromkeys(name for item in items for name, value in item.items() if value is not None))
    return {"columns": columns, "data": [[item.get(name) for name in columns] for item in items]}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARACTERS else text[:MAX_CELL_CHARACTERS] + " …"


def _log_cached_stages(client: MlflowClient, summary: MlflowReporter, artifacts: Mapping[str, Artifact]) -> None:
    """Add a nested run for each stage that Kubeflow Pipelines skipped because its cache had the result."""
    parent, kfp_run = os.environ.get("MLFLOW_RUN_ID"), os.environ.get("KFP_RUN_ID")
    tag, value = ("mlflow.parentRunId", parent) if parent else (mlflow_tracking.KFP_RUN_TAG, kfp_run)
    if not value:
        return
    experiment = client.get_run(summary.run_id).info.experiment_id
    runs = model_versions.iterate_pages(client.search_runs, [experiment], f"tags.`{tag}` = '{value}'", max_results=1000)
    tracked = {run.data.tags.get(mlflow_tracking.STAGE_TAG) for run in runs}
    for kind, stage in STAGE_BY_ARTIFACT.items():
        artifact = artifacts.get(kind)
        if artifact and stage not in tracked:
            with mlflow_tracking.nested_run(summary, stage) as run:
                run.log_reuse(stage, artifact)
                run.log_result(artifact)
