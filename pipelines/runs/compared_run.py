"""The parts of a run that a comparison reads: configuration, stages, training curve and artifacts. Read-only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.pipeline_step import STAGE_BY_ARTIFACT
from components.common.runtime.errors import ArtifactDamagedError
from components.common.workspace.artifact_store import Workdir
from pipelines.config.customization_config import read_sections
from pipelines.provenance.environment_diff import flatten
from pipelines.runs import run_status
from pipelines.runs.run_folder import Run

Json = dict[str, Any]
ANSWER_COLUMNS = ["id", "task", "prompt", "reference", "weights", "candidate_answer", "candidate_scores", "base_answer"]


@dataclass(frozen=True)
class ComparedRun:
    """A run and the results of its finished stages.

    Attributes:
        summary: the object of `run_status.summarize_run`.
        stages: the objects of `run_status.list_stages`.
        parameters: values of the configuration by `section.key`.
        curve: logged steps of the training, {"step", "train_loss"?, "validation_loss"?}.
        artifacts: dataset, model and evaluation, if the run has reached them and the store has them.
        evaluation: content of evaluation.json; {} without an evaluation.
        predictions: rows of predictions.parquet by task, sorted by id.
        gaps: results that the run has built but this machine no longer has, one sentence each.
    """

    run: Run
    summary: Json
    stages: list[Json]
    parameters: Json
    curve: list[Json]
    artifacts: dict[str, Artifact]
    evaluation: Json = field(default_factory=dict)
    predictions: dict[str, list[Json]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


def load_run(run: Run) -> ComparedRun:
    """Load the results of a run in any state; results of unfinished stages are absent.

    Raises:
        ArtifactDamagedError: a manifest or a file of the evaluation has changed since it was published.
        ConfigurationError: the configuration in the run's folder is unreadable.
    """
    events, state, gaps = run_status.read_events(run), run.state, []
    artifacts = {}
    for kind, folder in _locate_artifacts(run, events).items():
        if not (folder / artifact_folder.MANIFEST_FILENAME).exists():
            gaps.append(f"{run.name}: the {kind} {folder.name[:12]} is no longer in {folder.parent}.")
        elif kind == "evaluation":
            artifacts[kind] = artifact_folder.read(folder, kind)
        else:  # only the manifest is read; hashing the weights of a model would take minutes
            artifacts[kind] = Artifact(folder, artifact_folder.read_manifest(folder))
    evaluation: Json = {}
    predictions: dict[str, list[Json]] = {}
    if "evaluation" in artifacts:
        folder = artifacts["evaluation"].path
        evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        predictions = _read_predictions(folder / "predictions.parquet")
    configuration = run.folder / "customization.yaml"
    return ComparedRun(
        run=run,
        summary=run_status.summarize_run(run),
        stages=run_status.list_stages(run, state),
        parameters=flatten_parameters(read_sections(configuration)) if configuration.exists() else {},
        curve=_read_curve(artifacts.get("model"), events),
        artifacts=artifacts,
        evaluation=evaluation,
        predictions=predictions,
        gaps=gaps,
    )


def _locate_artifacts(run: Run, events: list[Json]) -> dict[str, Path]:
    """Return the folders of dataset, model and evaluation by kind, from the events and the result of the run."""
    store = Workdir(run.folder.absolute().parent.parent).store
    kinds = {stage: kind for kind, stage in STAGE_BY_ARTIFACT.items() if kind != "repository"}
    found = {
        kind: store / event[kind]
        for event in events
        if event["event"] == "result" and (kind := kinds.get(event["stage"], "")) in event
    }
    recorded = (run.read().get("result") or {}).get("artifacts") or {}
    for kind in kinds.values():
        if path := recorded.get(kind):  # another store, or the store of a workdir that has moved since
            found[kind] = Path(path) if Path(path).exists() else store / Path(path).name
    return found


def flatten_parameters(values: Mapping[str, Any]) -> Json:
    """Return the values by `section.key`; an entry of a list of mappings is called by its name or its number."""
    flat: Json = {}
    for key, value in flatten(values).items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for number, entry in enumerate(value):
                flat |= flatten_parameters({f"{key}[{entry.get('name', number)}]": entry})
        else:
            flat[key] = value
    return flat


def _read_curve(model: Artifact | None, events: list[Json]) -> list[Json]:
    """Return the logged steps of the model's training, or those of a training run that has not ended or has failed."""
    log = model.path / "training.jsonl" if model else None
    if log and log.exists():
        try:
            return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise ArtifactDamagedError(
                f"{log} is unreadable: {error}",
                hint=f"Restore the file, or remove {log.parent} and run the customization again.",
            ) from None
    return [
        {"step": event["step"], **event["values"]}
        for event in events
        if (event["stage"], event["event"]) == ("fine_tuning", "metrics")
    ]


def _read_predictions(path: Path) -> dict[str, list[Json]]:
    import pyarrow.parquet as parquet

    rows: dict[str, list[Json]] = {}
    for row in parquet.read_table(path, columns=ANSWER_COLUMNS).to_pylist():
        rows.setdefault(row["task"], []).append(row)
    return {task: sorted(items, key=lambda row: (row["id"], row["prompt"] or "")) for task, items in rows.items()}
