"""Comparison of the evaluated rows with the training rows of a model and of the models that it was tuned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.models import training_lineage
from components.common.row_comparison import training_overlap
from components.common.row_comparison.training_overlap import MAX_OVERLAPS, ComparedRow
from components.model_registry import evidence

Json = dict[str, Any]

HELD_OUT = "held_out"  # kind of the tasks that evaluate the dataset's test split
# Kinds of tasks that evaluate training rows, or rows that are compared as items of another task.
NOT_COMPARED = ("memorisation", "answer_checks")


def check_training_rows(evaluation: Artifact, model: Manifest, store_uri: str) -> list[str]:
    """Return the objections, as clauses: evaluated rows are training rows, or a dataset is not available.

    Args:
        evaluation: an evaluation that `evidence.check_evaluation` accepts.
        model: the manifest of the model.
        store_uri: URI of the model in its artifact store, which also has the datasets.

    Raises:
        EngineMissingError, DiskFullError, NotWritableError: an artifact store is not available.
    """
    from pyarrow import parquet

    lineage = training_lineage.collect_datasets([model], store_uri)
    if lineage.missing:
        return lineage.missing
    content = evidence.read_content(evaluation)
    dataset = lineage.datasets[content["measured"]["dataset"]["content_sha256"]]
    kinds = content["measured"]["tasks"]
    path = dataset.path / "test.parquet"
    split = list(training_overlap.read_rows(path))
    test_rows = {row.id: row for row in split}
    is_conversation = "messages" in parquet.read_schema(path).names
    predictions = evidence.read_predictions(evaluation)
    rows: list[ComparedRow] = []
    for item in predictions:
        kind = kinds[item["task"]]
        if kind in NOT_COMPARED:
            continue
        if kind == HELD_OUT and item["id"] not in test_rows:
            return [f"row {item['id']} of its evaluation is not in the test split of dataset {dataset.sha256[:12]}"]
        row = training_overlap.build_item_row(item["id"], item["prompt"] or "", item["reference"] or "")
        if item["id"] in test_rows:
            own = test_rows[item["id"]]
            if kind == HELD_OUT and is_conversation and not own.words.startswith(row.words):
                return [f"row {row.id} of its evaluation differs from the row of dataset {dataset.sha256[:12]}"]
            rows.append(own)
        is_test_row = kind == HELD_OUT or (item["id"] in test_rows and test_rows[item["id"]].last_turn in row.words)
        rows.append(replace(row, is_external=not is_test_row))
    for task in (name for name, kind in kinds.items() if kind == HELD_OUT):
        evaluated = [str(item["id"]) for item in predictions if item["task"] == task]
        if problem := _check_coverage(content["measured"], task, evaluated, [row.id for row in split]):
            return [f"{problem} of dataset {dataset.sha256[:12]}"]
    objections = []
    # The curation separates the splits by this threshold. With a lower one, rows that it keeps apart would be refused.
    threshold = training_overlap.parse_threshold(content["measured"]["dataset"].get("near_duplicate_threshold"))
    for sha256, trained in lineage.datasets.items():
        read_trained = partial(training_overlap.read_rows, trained.path / "train.parquet")
        overlaps = training_overlap.find_overlaps(rows, read_trained, threshold)
        if overlaps:
            first = max(overlaps, key=lambda overlap: overlap.rank)
            relation = "equals" if first.similarity == 1 else f"has the similarity {first.similarity:.2f} to"
            if first.is_question:
                relation = "shares its question with"
            count = f"at least {len(overlaps)}" if len(overlaps) == MAX_OVERLAPS else str(len(overlaps))
            objections.append(
                f"the model was trained on {count} of its evaluated rows: row {first.evaluated_id} {relation} the "
                f"training row {first.trained_id} of dataset {sha256[:12]}"
            )
    return objections


def _check_coverage(measured: Json, task: str, evaluated: Sequence[str], test_ids: Sequence[str]) -> str:
    """Return a problem if the evaluated rows are not those of the test split, apart from the rows left out as stated."""
    limit, left_out = measured["settings"]["max_items"], 0
    if stated := measured.get("held_out", {}).get(task):
        limit, left_out = stated["max_items"], stated["left_out"]
    expected = sorted(test_ids)[:limit]
    if len(set(evaluated)) < len(evaluated):
        return f"its evaluation repeats rows of {task}: {len(evaluated)} items are {len(set(evaluated))} rows"
    if unexpected := sorted(set(evaluated) - set(expected)):
        return f"row {unexpected[0]} of its evaluation is not among the first {limit} test rows"
    if left_out < 0 or len(evaluated) + left_out != len(expected):
        return (
            f"its evaluation measured {task} on {len(evaluated)} of {len(expected)} test rows and states that it "
            f"left out {left_out}"
        )
    return ""
