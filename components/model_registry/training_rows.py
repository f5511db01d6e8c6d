"""Comparison of the evaluated rows with the training rows of a model and of the models that it was tuned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.models import training_lineage
from components.common.row_comparison import training_overlap
from components.common.row_comparison.training_overlap import MAX_OVERLAPS, ComparedRow, Overlap
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
    measured = evidence.read_content(evaluation)["measured"]
    dataset = lineage.datasets[measured["dataset"]["content_sha256"]]
    kinds = measured["tasks"]
    path = dataset.path / "test.parquet"
    split = list(training_overlap.read_rows(path))
    test_rows = {row.id: row for row in split}
    predictions = evidence.read_predictions(evaluation)
    items = [
        (
            kinds[item["task"]],
            training_overlap.build_item_row(item["id"], item["prompt"] or "", item["reference"] or ""),
        )
        for item in predictions
        if kinds[item["task"]] not in NOT_COMPARED
    ]
    problem = _check_items(items, test_rows, is_conversation="messages" in parquet.read_schema(path).names)
    problem = problem or _check_coverage(measured, predictions, [row.id for row in split])
    if problem:
        return [f"{problem} of dataset {dataset.sha256[:12]}"]
    rows = _list_compared_rows(items, test_rows)
    objections = []
    # The curation separates the splits by this threshold. With a lower one, rows that it keeps apart would be refused.
    threshold = training_overlap.parse_threshold(measured["dataset"].get("near_duplicate_threshold"))
    for sha256, trained in lineage.datasets.items():
        read_trained = partial(training_overlap.read_rows, trained.path / "train.parquet")
        if overlaps := training_overlap.find_overlaps(rows, read_trained, threshold):
            objections.append(f"{_describe_overlaps(overlaps)} of dataset {sha256[:12]}")
    return objections


def _check_items(
    items: Sequence[tuple[str, ComparedRow]], test_rows: Mapping[str, ComparedRow], *, is_conversation: bool
) -> str:
    """Return a problem if an item of a held-out task, given with the kind of its task, is not a row of the test split."""
    for kind, row in items:
        if kind != HELD_OUT:
            continue
        if row.id not in test_rows:
            return f"row {row.id} of its evaluation is not in the test split"
        if is_conversation and not test_rows[row.id].words.startswith(row.words):
            return f"row {row.id} of its evaluation differs from the row"
    return ""


def _list_compared_rows(
    items: Sequence[tuple[str, ComparedRow]], test_rows: Mapping[str, ComparedRow]
) -> list[ComparedRow]:
    """Return the items, each after its test row; an item that is not from the test split is external."""
    rows: list[ComparedRow] = []
    for kind, row in items:
        if own := test_rows.get(row.id):
            rows.append(own)
        is_test_row = kind == HELD_OUT or (own is not None and own.last_turn in row.words)
        rows.append(replace(row, is_external=not is_test_row))
    return rows


def _describe_overlaps(overlaps: Sequence[Overlap]) -> str:
    """Return the objection to a training dataset, with the most similar rows."""
    first = max(overlaps, key=lambda overlap: overlap.rank)
    relation = "equals" if first.similarity == 1 else f"has the similarity {first.similarity:.2f} to"
    if first.is_question:
        relation = "shares its question with"
    count = f"at least {len(overlaps)}" if len(overlaps) == MAX_OVERLAPS else str(len(overlaps))
    return (
        f"the model was trained on {count} of its evaluated rows: row {first.evaluated_id} {relation} the training row "
        f"{first.trained_id}"
    )


def _check_coverage(measured: Json, predictions: Sequence[Json], test_ids: Sequence[str]) -> str:
    """Return a problem if the evaluated rows are not those of the test split, apart from the rows left out as stated."""
    for task in (name for name, kind in measured["tasks"].items() if kind == HELD_OUT):
        evaluated = [str(item["id"]) for item in predictions if item["task"] == task]
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
