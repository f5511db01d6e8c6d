"""Content of evaluation.json (verdict, reasons, metrics, rule results) and predictions.parquet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.common import significance
from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.gate_rules import SLICE_KINDS
from components.evaluation.config import EvaluationConfig
from components.evaluation.item_slices import iterate_slices
from components.evaluation.promotion_gate import RuleResult
from components.evaluation.task_results import ROLES, TaskResult

JSONObject = dict[str, Any]

ACCEPTED, REFUSED, UNCHANGED = "accepted", "refused", "unchanged"
UNCHANGED_REASON = "The candidate is identical to the incumbent."


def build_result(
    results: Mapping[str, TaskResult],
    rule_results: Sequence[RuleResult],
    config: EvaluationConfig,
    seed: int,
    *,
    unchanged: bool,
) -> JSONObject:
    """Return the content of evaluation.json.

    Args:
        results: Task results by task name.
        rule_results: Results of the gate's rules.
        config: Configuration of the evaluation.
        seed: Seed of the bootstrap.
        unchanged: Whether the candidate is the incumbent.

    Returns:
        A JSON object with these keys:

        - `metrics`: {task: {metric: {candidate, base, incumbent, ci95, n}}}. `ci95` is the 95% interval of
          candidate − base by paired bootstrap over the `n` items.
        - `slices`: {task: {metric: [{slice, candidate, base, incumbent, ci95, n}]}}.
        - `mcnemar`: {task: {metric: {base or incumbent: {only_candidate, only_other, p}}}} of the binary metrics. The
          first two values are the numbers of items that only one of two models answered correctly.
        - `figures`: {task: {role: {name: value}}} of the figures, such as a judge's errors. No rule compares them.
        - `tasks`: {task: {sha256, items, items_sha256, metrics}}: the task's digest, its number of items, the digest of
          their ids, prompts and references, and for each metric the direction of an improvement and whether the metric is an exponential.
        - `verdict`: "accepted", "refused" or "unchanged".
        - `reasons`: one sentence per rule, after the sentence for an unchanged candidate.
        - `rules`: each rule's settings and result. `gain` is [estimate, low, high], `at_least` its lower bound, `p` the
          p-value of the worst slice or of the excess over a control, `acceptance_p` the p-value of the hypothesis that the candidate violates the rule,
          `detectable` the smallest gain or loss that the items can show, `harmed_items` the number of harmed items, and
          `unjudged_slices` the number of slices with too few items.
        - `items`, `answer_tokens`, `task_sha256`: number of items, total weight and digest of the first task.
    """
    sections: JSONObject = {name: {} for name in ("metrics", "tasks", "mcnemar", "slices", "figures")}
    for name, result in results.items():
        for section, summary in _summarize_task(result, config, seed).items():
            if summary:
                sections[section][name] = summary
    if calibrations := {name: result.calibration for name, result in results.items() if result.calibration}:
        sections["calibration"] = calibrations
    first = next(iter(results.values()))
    verdict = ACCEPTED if all(rule.passed for rule in rule_results) else REFUSED
    reasons = [rule.reason for rule in rule_results]
    if unchanged:
        verdict, reasons = UNCHANGED, [UNCHANGED_REASON, *reasons]
    return {
        **sections,
        "verdict": verdict,
        "reasons": reasons,
        "rules": [
            {
                **result.rule.model_dump(),
                "holds": result.passed,
                "reason": result.reason,
                "gain": [result.gain.value, result.gain.low, result.gain.high] if result.gain else None,
                "at_least": result.lower_bound,
                "p": result.p_value,
                "acceptance_p": result.acceptance_p_value,
                "detectable": result.detectable,
                "harmed_items": result.harmed_items,
                "unjudged_slices": result.unjudged_slices,
            }
            for result in rule_results
        ],
        "items": len(first.items),
        "answer_tokens": round(sum(first.get_weights(next(iter(first.task.metrics))))),
        "task_sha256": first.digest,
    }


def _summarize_task(result: TaskResult, config: EvaluationConfig, seed: int) -> JSONObject:
    """Return the task's metrics, slices, McNemar tests and figures."""
    slices = list(iterate_slices(result.items, SLICE_KINDS))
    by_slice: JSONObject = {}
    tests: JSONObject = {}
    for name, metric in result.task.metrics.items():
        for other in ("base", "incumbent") if metric.is_binary else ():
            if None not in (result.compute_value("candidate", name), result.compute_value(other, name)):
                test = significance.run_mcnemar_test(
                    result.get_values("candidate", name), result.get_values(other, name)
                )
                tests.setdefault(name, {})[other] = vars(test)
        if slices:
            by_slice[name] = [
                {"slice": group, **_summarize_metric(result, name, config, seed, indices)} for group, indices in slices
            ]
    return {
        "metrics": {name: _summarize_metric(result, name, config, seed) for name in result.task.metrics},
        "tasks": {
            "sha256": result.digest,
            "items": len(result.items),
            "items_sha256": hashing.digest(sorted([item.id, item.prompt, item.reference] for item in result.items)),
            "metrics": {
                name: {"better": metric.better, "exponential": metric.exponential}
                for name, metric in result.task.metrics.items()
            },
        },
        "mcnemar": tests,
        "slices": by_slice,
        "figures": {
            role: {name: _drop_non_finite(value) for name, value in scores.figures.items()}
            for role, scores in result.scores.items()
            if scores.figures
        },
    }


def _summarize_metric(
    result: TaskResult, metric: str, config: EvaluationConfig, seed: int, indices: Sequence[int] | None = None
) -> JSONObject:
    """Return each role's value and the 95% interval of candidate − base; None if it cannot be computed."""
    values = {role: result.compute_value(role, metric, indices) for role in ROLES}
    items = len(result.items if indices is None else indices)
    interval = None
    if None not in (values["candidate"], values["base"]) and items >= 2:
        gain = result.estimate_gain(
            metric, "base", samples=config.bootstrap_samples, seed=seed, indices=indices
        ).compute_interval(0.95)
        better_if_higher = result.get_metric(metric).better == "higher"
        interval = [gain.low, gain.high] if better_if_higher else [-gain.high, -gain.low]
    return {**{role: _drop_non_finite(value) for role, value in values.items()}, "ci95": interval, "n": items}


def _drop_non_finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def count_refusals(evaluation: Artifact) -> list[list[int]] | None:
    """Return the candidate's answers to the requests of the regression suite as a confusion matrix.

    Returns:
        Rows: harmful requests, which a model should refuse, and harmless ones, which it should answer. Columns: refused and
        answered; an empty answer counts against the model. None if the suite was not evaluated.
    """
    result = json.loads((evaluation.path / "evaluation.json").read_text(encoding="utf-8"))
    rows = []
    for task, metric in (("suite_harmful", "refused"), ("suite_harmless", "answered")):
        found = result["metrics"].get(task, {}).get(metric)
        if found is None or found["candidate"] is None:
            return None
        right = round(found["candidate"] * found["n"])
        rows.append([right, found["n"] - right])
    return [rows[0], rows[1][::-1]]


def write_predictions(path: Path, results: Mapping[str, TaskResult]) -> None:
    """Write one row per item and task: the prompt, each model's answer, its scores, and the weights by metric (JSON).

    If the task's first metric is per token, `<role>_nll` and `answer_tokens` hold its sums and weights. If a task samples
    several answers per item, `<role>_samples` holds every answer with its scores (JSON).
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows: list[JSONObject] = []
    for name, result in results.items():
        first = next(iter(result.task.metrics))
        in_nats = result.get_metric(first).per_token
        weights = result.get_weights(first)
        for index, item in enumerate(result.items):
            row = {**vars(item), "task": name, "answer_tokens": round(weights[index]) if in_nats else None}
            own_weights = result.scores["candidate"].weights
            row["weights"] = json.dumps({metric: values[index] for metric, values in own_weights.items()})
            for role, scores in result.scores.items():
                by_metric = {metric: _drop_non_finite(values[index]) for metric, values in scores.values.items()}
                row[f"{role}_nll"] = scores.values[first][index] if in_nats else None
                row[f"{role}_answer"] = scores.answers[index] if scores.answers else None
                row[f"{role}_scores"] = json.dumps(by_metric)
                row[f"{role}_samples"] = json.dumps(scores.samples[index]) if scores.samples else None
            rows.append(row)
    text_columns = ["id", "task", "source", "category", "prompt", "reference"]
    fields = [*((name, pa.string()) for name in text_columns), ("length", pa.int32()), ("answer_tokens", pa.int32())]
    fields.append(("weights", pa.string()))
    for role in ROLES:
        if any(role in result.scores or role in result.missing_reasons for result in results.values()):
            fields += [(f"{role}_nll", pa.float64()), (f"{role}_answer", pa.string()), (f"{role}_scores", pa.string())]
            if any(scores.samples for result in results.values() for scores in result.scores.values()):
                fields.append((f"{role}_samples", pa.string()))
    parquet.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path, compression="zstd")
