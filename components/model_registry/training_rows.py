"""Comparison of the evaluated rows with the training rows of a model and of the models that it was tuned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, ArtifactInput, Manifest
from components.common.row_comparison import training_overlap
from components.common.row_comparison.training_overlap import ComparedRow, Overlap
from components.common.runtime.errors import TunelineError
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.model_registry import evidence

TRAINED_ON_PURPOSE = ("memorisation",)  # kinds of tasks that evaluate training rows
ANCESTOR_KINDS = ("model", "base_model", "initial_adapter")
THRESHOLD_KEY = "near_duplicate_threshold"  # in the configuration of a dataset


@dataclass(frozen=True)
class TrainingLineage:
    """The datasets of a model's lineage, and a clause for each artifact of the lineage that no store has."""

    datasets: dict[str, Artifact]
    missing: list[str]


def check_training_rows(evaluation: Artifact, model: Manifest, store_uri: str) -> list[str]:
    """Return the objections, as clauses: evaluated rows are training rows, or a dataset is not available.

    Args:
        evaluation: an evaluation that `evidence.check_evaluation` accepts.
        model: the manifest of the model.
        store_uri: URI of the model in its artifact store, which also has the datasets.
    """
    lineage = collect_lineage(model, store_uri)
    if lineage.missing:
        return lineage.missing
    content = evidence.read_content(evaluation)
    dataset = lineage.datasets[content["measured"]["dataset"]["content_sha256"]]
    kinds = content["measured"]["tasks"]
    test_rows = {row.id: row for row in training_overlap.read_rows(dataset.path / "test.parquet")}
    is_conversation = dataset.manifest.summary.get("rows_kind", "sft") == "sft"
    rows: list[ComparedRow] = []
    for item in evidence.read_predictions(evaluation):
        kind = kinds[item["task"]]
        if kind in TRAINED_ON_PURPOSE:
            continue
        if kind == "held_out" and item["id"] not in test_rows:
            return [f"row {item['id']} of its evaluation is not in the test split of dataset {dataset.sha256[:12]}"]
        row = training_overlap.build_item_row(item["id"], item["prompt"] or "", item["reference"] or "")
        if item["id"] in test_rows:
            own = test_rows[item["id"]]
            if kind == "held_out" and is_conversation and not own.words.startswith(row.words):
                return [f"row {row.id} of its evaluation differs from the row of dataset {dataset.sha256[:12]}"]
            rows.append(own)
        rows.append(row)
    objections = []
    for sha256, trained in lineage.datasets.items():
        overlaps = _find_overlaps(rows, trained)
        if overlaps:
            first = max(overlaps, key=lambda overlap: overlap.similarity)
            relation = "equals" if first.similarity == 1 else f"has the similarity {first.similarity:.2f} to"
            count = len({overlap.evaluated_id for overlap in overlaps})
            objections.append(
                f"the model was trained on {count} of its evaluated rows: row {first.evaluated_id} {relation} the "
                f"training row {first.trained_id} of dataset {sha256[:12]}"
            )
    return objections


def _find_overlaps(rows: Sequence[ComparedRow], dataset: Artifact) -> list[Overlap]:
    threshold = dataset.manifest.config.get(THRESHOLD_KEY, training_overlap.DEFAULT_THRESHOLD)
    path = dataset.path / "train.parquet"
    return training_overlap.find_overlaps(rows, lambda: training_overlap.read_rows(path), float(threshold))


def collect_lineage(model: Manifest, store_uri: str) -> TrainingLineage:
    """Return the datasets on which the model, its tuned base models and its initial adapters were trained."""
    lineage = TrainingLineage({}, [])
    pending, seen = [model], {model.content_sha256}
    while pending:
        for source in pending.pop().inputs:
            if source.content_sha256 in seen or source.kind not in ("dataset", *ANCESTOR_KINDS):
                continue
            seen.add(source.content_sha256)
            folder = _find_folder(source, store_uri)
            if folder is not None and source.kind == "dataset":
                try:
                    lineage.datasets[source.content_sha256] = artifact_folder.read(folder, "dataset")
                except TunelineError as error:
                    lineage.missing.append(f"a dataset of its lineage cannot be verified ({error.message})")
            elif folder is not None:
                pending.append(artifact_folder.read_manifest(folder))
            elif source.kind != "base_model" or source.uri.startswith(artifact_store.STORE_PREFIX):
                name = source.kind.replace("_", " ")
                lineage.missing.append(
                    f"the {name} {source.content_sha256[:12]} of its lineage is not in the artifact store, so its "
                    "evaluated rows cannot be compared with all training rows"
                )
    return lineage


def _find_folder(source: ArtifactInput, store_uri: str) -> Path | None:
    """Return the folder of an input: beside the model, in the workdir's store, or at the recorded path."""
    for folder in _list_folders(source, store_uri):
        try:
            has_manifest = (folder / artifact_folder.MANIFEST_FILENAME).exists()
            if has_manifest and artifact_folder.read_manifest(folder).content_sha256 == source.content_sha256:
                return folder
        except (TunelineError, OSError):
            continue
    return None


def _list_folders(source: ArtifactInput, store_uri: str) -> Iterator[Path]:
    sibling = artifact_store.build_sibling_uri(store_uri, source.content_sha256)
    default = artifact_store.build_artifact_uri(Workdir.from_environment().store, source.content_sha256)
    for uri in (sibling, default):
        folder = artifact_store.resolve_artifact_uri(uri) if uri else None
        if folder is not None:
            yield folder
    if ":" not in source.uri and source.uri:
        yield Path(source.uri).absolute()
