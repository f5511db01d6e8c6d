"""Size and limits of the regression suite in a run: items, tokens, rules, and dataset rows that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.common import regression_suite, significance
from components.common.gate_rules import CONTROL_MIN_ITEMS, SUITE_PREFIX, compute_excess_p_value
from components.common.runtime.counts import format_count
from components.evaluation import promotion_gate
from components.evaluation.config import EvaluationConfig
from components.evaluation.tasks.answer_checks import AnswerChecks
from components.evaluation.tasks.memorisation import EXTRA_TOKENS, SPLITS, Memorisation
from components.evaluation.tasks.task_preflight import TaskWorkload

Json = dict[str, Any]


def list_suite_tasks(
    evaluation: EvaluationConfig, workloads: Sequence[TaskWorkload], rows: Mapping[str, int], mean_length: float
) -> list[TaskWorkload]:
    """Return the workload of each task of the suite; empty without the suite.

    Args:
        evaluation: the configuration of the evaluation.
        workloads: the workloads of the tasks that read files.
        rows: number of rows of each split.
        mean_length: mean row length in tokens.
    """
    known = {workload.settings.name: workload for workload in workloads}
    found: dict[str, TaskWorkload] = {}
    tasks = [task for task in evaluation.tasks if evaluation.suite != "none" and task.name.startswith(SUITE_PREFIX)]
    for settings in sorted(tasks, key=lambda task: isinstance(task, AnswerChecks)):  # these read the others' items
        workload = known.get(settings.name, TaskWorkload(settings))
        if isinstance(settings, Memorisation):
            items = min(settings.rows, rows["train"], sum(rows[split] for split in SPLITS[settings.split]))
            # The number of rows with personal data is unknown; all may have some.
            output = items * (settings.tokens + EXTRA_TOKENS) if settings.search_leaks else 0
            workload = TaskWorkload(settings, "", items, round(items * (mean_length / 2 + settings.tokens)), output)
        elif isinstance(settings, AnswerChecks):
            workload = TaskWorkload(settings, "", sum(found[name].items or 0 for name in settings.tasks))
        found[settings.name] = workload
    return list(found.values())


def summarize_suite(workloads: Sequence[TaskWorkload]) -> Json | None:
    """Return the suite's items, tokens per model and rules for the dry run; None without the suite."""
    if not workloads:
        return None
    items = {workload.settings.name: workload.items or 0 for workload in workloads}
    rules = []
    for rule in regression_suite.build_rules():
        count, limit = items[rule.metric.partition(".")[0]], rule.max_loss or rule.max_harmed_share or 0.0
        if rule.against != "base":
            continue
        if rule.control:
            control_items = items[rule.control.partition(".")[0]]
            significant = (
                compute_excess_p_value(n, count, 0, control_items) < 1 - rule.confidence for n in range(count)
            )
            allowed = next((n - 1 for n, is_significant in enumerate(significant) if is_significant), None)
            if min(count, control_items) < CONTROL_MIN_ITEMS:
                allowed = None
        else:
            allowed = significance.count_allowed_losses(count, limit, rule.confidence)
        rules.append(
            {"metric": rule.metric, "items": count, "limit": limit, "allowed": allowed, "control": rule.control}
        )
    return {
        "items": sum(count for name, count in items.items() if name != "suite_answers"),
        "input_tokens": sum(workload.input_tokens for workload in workloads),
        "output_tokens": sum(workload.output_tokens for workload in workloads),
        "rules": rules,
    }


def list_shortages(evaluation: EvaluationConfig, workloads: Sequence[TaskWorkload], has_incumbent: bool) -> list[str]:
    """Return a warning for each task of the suite with fewer items than its rules require."""
    if not workloads:
        return []
    required = promotion_gate.compute_min_items_by_task(evaluation, has_incumbent=has_incumbent)
    return [
        f"the gate will refuse the model: {load.settings.name} has {format_count(load.items, 'item')}; its rules require "
        f"at least {required[load.settings.name]}. Add rows, change data_curation.fractions, or set "
        "evaluation.suite to none and promote with `tuneline promote`"
        for load in workloads
        if load.items is not None and load.items < required.get(load.settings.name, 0)
    ]


def format_suite(summary: Json | None) -> list[str]:
    """Return the summary as lines of text."""
    if summary is None:
        return []
    seconds = summary["seconds"]
    time = "" if seconds is None else f", about {seconds:,.0f} s of the evaluation"
    first = (
        f"suite     {summary['items']} items, {summary['input_tokens']:,} tokens of prompts and at most "
        f"{summary['output_tokens']:,} of answers per model{time}"
    )
    return [first, *(f"          {rule['metric']}: {_describe_rule(rule)}" for rule in summary["rules"])]


def _describe_rule(rule: Json) -> str:
    """Return the items of a rule, and the number of lost items, without won ones, with which a model passes."""
    basis = f"compared with {rule['control']}" if rule["control"] else f"margin {rule['limit']:.0%}"
    allowed = (
        "too few items to pass"
        if rule["allowed"] is None
        else f"passes with at most {format_count(rule['allowed'], 'worse item')}"
    )
    return f"{rule['items']} items, {basis}; {allowed}"
