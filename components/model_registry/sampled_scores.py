"""Recomputation of the scores of items with several sampled answers from the scores of these answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]

ROLES = ("candidate", "base", "incumbent")
PASS_AT = "_pass_at_"  # between metric and k in the name of a pass@k metric
TOLERANCE = 1e-9


def check_samples(rows: Mapping[str, Sequence[Json]], tasks: Sequence[Json]) -> list[str]:
    """Return an objection, as a clause, for each task and role whose scores do not follow from the samples.

    Args:
        rows: the rows of predictions.parquet by task.
        tasks: the settings of the tasks, as in `evaluation.tasks`.
    """
    counts = {task.get("name") or task["kind"]: task.get("samples", 1) for task in tasks}
    found = [_find_problem(rows[name], role, counts[name]) for name in rows for role in ROLES]
    labels = [f"{name} of the {role}" for name in rows for role in ROLES]
    return [f"{label}: {problem}" for label, problem in zip(labels, found, strict=True) if problem]


def _find_problem(rows: Sequence[Json], role: str, count: int) -> str:
    for row in rows:
        scores: Json = json.loads(row.get(f"{role}_scores") or "{}")
        if not scores:  # the role was not measured
            continue
        samples: list[Json] = json.loads(row.get(f"{role}_samples") or "[]")
        if len(samples) != (count if count > 1 else 0):
            return f"item {row['id']} has {len(samples)} sampled answers; expected {count if count > 1 else 0}"
        if samples and (
            row[f"{role}_answer"] != samples[0]["answer"]
            or any(not _follows(value, metric, samples) for metric, value in scores.items())
        ):
            return f"the scores or the answer of item {row['id']} do not follow from its samples"
    return ""


def _follows(value: float, metric: str, samples: Sequence[Json]) -> bool:
    """Return whether a score is the mean over the samples, or the estimate of pass@k from them."""
    name, _, k = metric.partition(PASS_AT)
    values = [sample[name] for sample in samples]
    expected = math.fsum(values) / len(values)
    if k:
        right = values.count(1.0)
        expected = 1 - math.comb(len(values) - right, int(k)) / math.comb(len(values), int(k))
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
