"""evaluation.json and predictions.parquet: verdict, reasons, every figure with its interval and n, every rule with what it found."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.evaluation import statistics
from components.evaluation.config import SLICES, EvaluationConfig
from components.evaluation.gate import Ruling
from components.evaluation.measured import ROLES, Measured
from components.evaluation.slices import parts

ACCEPTED, REFUSED, UNCHANGED = "accepted", "refused", "unchanged"
UNCHANGED_BECAUSE = "The candidate is the model in service, byte for byte."


def result(
    measured: Mapping[str, Measured], ruled: Sequence[Ruling], config: EvaluationConfig, seed: int, *, unchanged: bool
) -> dict[str, Any]:
    """evaluation.json as a value.

    `metrics` is {task: {metric: {candidate, base, incumbent, ci95, n}}}, ci95 the 95% interval of candidate − base by paired bootstrap over
    items; `mcnemar` has, for metrics that are right or wrong, the items only one of two models got right.
    """
    accepted = all(ruling.holds for ruling in ruled)
    reasons = [ruling.reason for ruling in ruled]
    first = next(iter(measured.values()))
    return {
        "verdict": UNCHANGED if unchanged else ACCEPTED if accepted else REFUSED,
        "reasons": [UNCHANGED_BECAUSE, *reasons] if unchanged else reasons,
        "metrics": {name: _metrics(task, config, seed) for name, task in measured.items()},
        "rules": [_rule(one) for one in ruled],
        "items": len(first.items),
        "answer_tokens": round(sum(first.weights(next(iter(first.task.metrics))))),
        "task_sha256": first.digest,
        "tasks": {name: {"sha256": task.digest, "items": len(task.items)} for name, task in measured.items()},
        "mcnemar": {name: found for name, task in measured.items() if (found := _mcnemar(task))},
        "slices": {name: found for name, task in measured.items() if (found := _slices(task, config, seed))},
        "figures": {name: found for name, task in measured.items() if (found := _figures(task))},
    }


def _rule(ruled: Ruling) -> dict[str, Any]:
    gain = [ruled.gain.value, ruled.gain.low, ruled.gain.high] if ruled.gain else None
    return {**ruled.rule.model_dump(), "holds": ruled.holds, "reason": ruled.reason, "gain": gain, "at_least": ruled.at_least, "p": ruled.p}


def _metrics(task: Measured, config: EvaluationConfig, seed: int) -> dict[str, Any]:
    found = {}
    for name in task.task.metrics:
        values = {role: _finite(task.value(role, name)) for role in ROLES}
        found[name] = {**values, "ci95": difference(task, name, "base", config, seed), "n": len(task.items)}
    return found


def difference(
    task: Measured, metric: str, other: str, config: EvaluationConfig, seed: int, indices: Sequence[int] | None = None
) -> list[float] | None:
    """The 95% interval of candidate − other, in the metric's own direction; None where one has no value or there are under 2 items."""
    if None in (task.value("candidate", metric, indices), task.value(other, metric, indices)) or len(indices or task.items) < 2:
        return None
    gain = task.gain(metric, other, samples=config.bootstrap_samples, seed=seed, indices=indices).interval(0.95)
    return [gain.low, gain.high] if task.metric(metric).better == "higher" else [-gain.high, -gain.low]


def _mcnemar(task: Measured) -> dict[str, Any]:
    """By metric and by the model compared with."""
    found: dict[str, Any] = {}
    for name, metric in task.task.metrics.items():
        for other in ("base", "incumbent") if metric.right_or_wrong else ():
            if None in (task.value("candidate", name), task.value(other, name)):
                continue
            test = statistics.mcnemar(task.values("candidate", name), task.values(other, name))
            found.setdefault(name, {})[other] = {"only_candidate": test.only_candidate, "only_other": test.only_other, "p": test.p}
    return found


def _slices(task: Measured, config: EvaluationConfig, seed: int) -> dict[str, list[dict[str, Any]]]:
    """By metric, every slice with each model's value and the interval of candidate − base."""
    found = {
        name: [
            {
                "slice": part,
                "n": len(indices),
                **{role: _finite(task.value(role, name, indices)) for role in ROLES},
                "ci95": difference(task, name, "base", config, seed, indices),
            }
            for part, indices in parts(task.items, SLICES)
        ]
        for name in task.task.metrics
    }
    return {name: rows for name, rows in found.items() if rows}


def _figures(task: Measured) -> dict[str, dict[str, float | None]]:
    return {role: {name: _finite(v) for name, v in scores.figures.items()} for role, scores in task.scores.items() if scores.figures}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def write_predictions(path: Path, measured: Mapping[str, Measured]) -> None:
    """One row an item of a task: what was asked, each model's answer, and its scores by metric (JSON).

    For a task measured in nats a token, `<role>_nll` and `answer_tokens` hold its first metric's sum and weight.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = [row for name, task in measured.items() for row in _predictions(name, task)]
    roles = [role for role in ROLES if any(role in task.scores or role in task.why_not for task in measured.values())]
    texts = ("id", "task", "source", "category", "prompt", "reference")
    fields = [*((name, pa.string()) for name in texts), ("length", pa.int32()), ("answer_tokens", pa.int32())]
    for role in roles:
        fields += [(f"{role}_nll", pa.float64()), (f"{role}_answer", pa.string()), (f"{role}_scores", pa.string())]
    parquet.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path, compression="zstd")


def _predictions(name: str, task: Measured) -> list[dict[str, Any]]:
    first = next(iter(task.task.metrics))
    nats = task.metric(first).per_token
    rows: list[dict[str, Any]] = [
        {
            "id": i.id,
            "task": name,
            "source": i.source,
            "category": i.category,
            "prompt": i.prompt,
            "reference": i.reference,
            "length": i.length,
        }
        for i in task.items
    ]
    for index, weight in enumerate(task.weights(first) if nats else ()):
        rows[index]["answer_tokens"] = round(weight)
    for role, scores in task.scores.items():
        for index, row in enumerate(rows):
            row[f"{role}_nll"] = scores.values[first][index] if nats else None
            row[f"{role}_answer"] = scores.answers[index] if scores.answers else None
            row[f"{role}_scores"] = json.dumps({metric: _finite(values[index]) for metric, values in scores.values.items()})
    return rows
