"""The promotion gate: rules over the measured gains, each with a result and a one-sentence reason.

All rules must hold. The number of rules needs no correction: a candidate without the required gains passes all rules at
most as often as a single rule. Source: intersection-union test, Berger, Technometrics 24, 1982.
"""

# A rule over slices tests many slices for a loss, which needs Holm's correction.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from components.common import gate_rules, significance
from components.common.gate_rules import CONTROL_MIN_ITEMS, Rule, compute_excess_p_value, get_min_items
from components.common.runtime.counts import format_count
from components.common.significance import Interval
from components.evaluation.config import EvaluationConfig
from components.evaluation.item_slices import iterate_slices
from components.evaluation.task_results import TaskResult
from components.evaluation.tasks.task_registry import build_task

ROLE_LABELS = {"candidate": "the candidate", "base": "the base", "incumbent": "the incumbent"}
TOKENIZER_MISMATCH = "the incumbent has another tokenizer"
NO_GAIN = Interval(0.0, 0.0, 0.0)
MAX_ITEMS_FACTOR = 1000  # a gain that requires more than this multiple of the items is negligible
MIN_ITEMS = 10  # default of evaluation.min_items
DETECTION_POWER = 0.8  # of the smallest detectable loss in a slice (Cohen, Statistical Power Analysis, 1988)


@dataclass(frozen=True)
class RuleResult:
    """Result of a rule with its reason.

    Attributes:
        gain: Gain with its 95% interval; for a failed rule over slices, the gain of the worst slice.
        lower_bound: One-sided lower confidence bound of the gain.
        p_value: For a rule over slices, the corrected p-value of the worst slice; for a rule with control, that of an
            excess.
        acceptance_p_value: p-value of the hypothesis that the candidate violates the rule; None for a rule over slices
            or with control, and for a rule that compares nothing. With it, the repeated use of a test split is corrected.
        detectable: Smallest gain that these items can show; for a rule over slices, the smallest detectable loss; for a
            rule on harmed items, the smallest limit that these items can show; for a rule with control, the smallest share
            of worse items that is a significant excess.
        harmed_items: Number of harmed items, for a rule on harmed items; of worse items, for a rule with control.
        unjudged_slices: Number of slices with too few items.
    """

    rule: Rule
    passed: bool
    reason: str
    gain: Interval | None = None
    lower_bound: float | None = None
    p_value: float | None = None
    acceptance_p_value: float | None = None
    detectable: float | None = None
    harmed_items: int | None = None
    unjudged_slices: int = 0

    @property
    def outcome(self) -> gate_rules.Outcome:
        """The outcome for people: a rule that holds without a comparison is not applicable."""
        figures = {"gain": self.gain, "p": self.p_value, "acceptance_p": self.acceptance_p_value}
        return gate_rules.describe_outcome({"holds": self.passed, **figures, "harmed_items": self.harmed_items})


def compute_min_items(rule: Rule, max_item_loss: float | None, min_items: int | None, exponential: bool = False) -> int:
    """Return the number of items that the rule requires.

    By default it is the number with which a model without any loss on the items passes: with fewer, unseen items with
    the largest loss could exceed the limit.

    Args:
        rule: The rule.
        max_item_loss: Largest loss of an unseen item; None if the metric has no limit.
        min_items: evaluation.min_items; None for the default.
        exponential: Whether the limit is in another unit than the loss, as for a perplexity.
    """
    if min_items:
        return min_items
    needed, loss = MIN_ITEMS, rule.max_item_loss or max_item_loss
    if rule.control:
        needed = CONTROL_MIN_ITEMS
    elif rule.max_harmed_share is not None:
        needed = significance.compute_required_items(rule.max_harmed_share, rule.confidence)
    elif rule.max_loss and not rule.slices and loss and not exponential:
        needed = significance.compute_required_items(rule.max_loss / loss, rule.confidence)
    return max(needed, MIN_ITEMS)


def compute_min_items_by_task(config: EvaluationConfig, *, has_incumbent: bool) -> dict[str, int]:
    """Return the number of items that the rules over all items of each task require.

    Args:
        config: Tasks, rules and minimum number of items.
        has_incumbent: Whether an incumbent exists. Without an incumbent, the rules against the incumbent hold.
    """
    required: dict[str, int] = {}
    for rule in config.gate:
        if rule.against == "incumbent" and not has_incumbent:
            continue
        task_name, _, name = rule.metric.partition(".")
        metric = next(build_task(task).metrics[name] for task in config.tasks if task.name == task_name)
        min_items, loss = get_min_items(rule.metric, config.min_items), metric.get_max_item_loss(rule.against)
        count = compute_min_items(rule, loss, min_items, metric.exponential)
        for name in {task_name, rule.control.partition(".")[0] if rule.control else task_name}:
            required[name] = max(required.get(name, 0), count)
    return required


def evaluate_rules(
    results: Mapping[str, TaskResult], has_incumbent: bool, config: EvaluationConfig, seed: int
) -> list[RuleResult]:
    """Return the result of every rule of the gate, in order.

    Args:
        results: Task results by task name.
        has_incumbent: Whether an incumbent exists. Without an incumbent, the rules against the incumbent hold.
        config: Rules, number of bootstrap resamples and minimum number of items.
        seed: Seed of the bootstrap.
    """
    rule_results = []
    for rule in config.gate:
        task_name, _, metric = rule.metric.partition(".")
        result = results[task_name]
        if rule.against == "incumbent" and not has_incumbent:
            reason = f"No incumbent exists to compare {'slices ' if rule.slices else ''}with."
            rule_results.append(RuleResult(rule, True, reason))
        elif problem := _find_problem(rule, result, metric, get_min_items(rule.metric, config.min_items)):
            rule_results.append(RuleResult(rule, False, problem))
        elif rule.control:
            rule_results.append(_evaluate_excess(rule, rule.control, results, config))
        elif rule.slices:
            rule_results.append(_evaluate_slices(rule, result, metric, config, seed))
        elif rule.max_harmed_share is not None:
            rule_results.append(_evaluate_harmed_share(rule, result, metric))
        else:
            rule_results.append(_evaluate_gain(rule, result, metric, config, seed))
    return rule_results


def _find_problem(rule: Rule, result: TaskResult, metric: str, min_items: int | None) -> str | None:
    """Return the reason why the rule cannot be evaluated, as a sentence, or None."""
    if problem := result.task.find_gate_problem(result.calibration):
        return f"The gate cannot use {rule.metric}: {problem}."
    for role in ["candidate", *([rule.against] if isinstance(rule.against, str) else [])]:
        reason = result.missing_reasons.get(role)
        if not reason and role in result.foreign_tokenizer_roles and result.get_metric(metric).per_token:
            reason = TOKENIZER_MISMATCH
        if reason:
            return f"{rule.metric} cannot be compared: {reason}."
        if not result.get_values(role, metric):
            return f"{rule.metric} of {ROLE_LABELS[role]} is missing."
        if non_finite := result.count_non_finite(role, metric):
            share = f"{non_finite} of {len(result.items)} items"
            return f"{rule.metric} of {ROLE_LABELS[role]} is not a finite number in {share}."
    if not rule.control and len(result.items) >= (min_items or MIN_ITEMS) and _is_unchanged(rule, result, metric):
        return None
    loss, exponential = result.get_max_item_loss(metric, rule.against), result.get_metric(metric).exponential
    required = compute_min_items(rule, loss, min_items, exponential)
    if len(result.items) >= required:
        return None
    basis = "evaluation.min_items"
    if rule.control and not min_items:
        basis = "control"
    elif required > MIN_ITEMS and not min_items:
        name = "max_loss" if rule.max_harmed_share is None else "max_harmed_share"
        basis = f"{name} {getattr(rule, name)} at {rule.confidence:.0%} confidence"
    items = len(result.items)
    measured = f"{rule.metric} was measured on {format_count(items, 'item')}"
    return f"{measured}; the rule requires at least {required} ({basis})."


def _is_unchanged(rule: Rule, result: TaskResult, metric: str) -> bool:
    """Return whether equal scores show equal models: binary scores of different models may agree by chance."""
    return result.is_identical(metric, rule.against) and not result.get_metric(metric).is_binary


def _evaluate_gain(rule: Rule, result: TaskResult, metric: str, config: EvaluationConfig, seed: int) -> RuleResult:
    """Compare the lower confidence bound of the gain with the rule's limit."""
    # Identical scores show neither a gain nor a loss, but rare differences may go undetected.
    # Different models may agree on all binary scores, so a positive limit is compared with the bound.
    if result.is_identical(metric, rule.against) and not (rule.max_loss and result.get_metric(metric).is_binary):
        items = len(result.items)
        same = f"{rule.metric} is identical to that of {ROLE_LABELS[str(rule.against)]} on all {items} items"
        if rule.max_loss is None:
            reason = f"{same}; the rule requires a gain above {rule.min_gain or 0.0:+.4f}."
            return RuleResult(rule, False, reason, NO_GAIN, 0.0)
        # Upper confidence bound of the share of items that differ, if no sampled item differs.
        undetected = 1 - (1 - rule.confidence) ** (1 / items)
        limitation = f"differences in up to {undetected:.1%} of items may go undetected"
        return RuleResult(rule, True, f"{same}, as the rule allows ({limitation}).", NO_GAIN, 0.0)

    gain = result.estimate_gain(metric, rule.against, samples=config.bootstrap_samples, seed=seed)
    limit = -float(rule.max_loss or 0.0) if rule.min_gain is None else rule.min_gain
    distribution = result.estimate_pessimistic_gain(
        metric,
        rule.against,
        max_item_loss=rule.max_item_loss or result.get_max_item_loss(metric, rule.against),
        samples=config.bootstrap_samples,
        seed=seed,
        limit=limit,
    )
    p_value = distribution.compute_p_value(limit, inclusive=rule.min_gain is not None)
    passed = significance.is_within_level(p_value, rule.confidence)
    # The p-value decides, so that the result agrees with the registry's correction. The bound is rounded to that side.
    bound = distribution.compute_lower_bound(rule.confidence)
    bound = max(bound, math.nextafter(limit, math.inf)) if passed else min(bound, math.nextafter(limit, -math.inf))
    detectable = gain.value - bound
    interval = gain.compute_interval(0.95)
    against = ROLE_LABELS.get(str(rule.against), str(rule.against))
    difference = f"{abs(gain.value):.4f} {'better' if gain.value > 0 else 'worse'} than {against}"
    if gain.value == 0:
        difference = f"on average equal to that of {against}"
    certainty = f"at least {bound:+.4f} with {rule.confidence:.0%} confidence"
    measured = f"{rule.metric} is {difference} ({_describe_interval(interval, gain.items)}; {certainty})"
    if rule.min_gain is None:
        allowed = f"a loss of at most {float(rule.max_loss or 0.0):.4f}"
        reason = f"{measured}, as the rule allows ({allowed})." if passed else f"{measured}; the rule allows {allowed}."
    elif passed:
        reason = f"{measured}, as the rule requires (gain above {rule.min_gain:+.4f})."
    else:
        small = ""
        if bound <= 0 < gain.value:
            small = f"; the difference is too small for the number of items: only gains above {detectable:.4f} are significant"
            excess, noise = gain.value - rule.min_gain, min(gain.value - interval.low, detectable)
            needed = estimate_needed_items(gain.items, excess, noise, detectable) if excess > 0 else math.inf
            if needed <= MAX_ITEMS_FACTOR * gain.items:
                small += f", and this gain requires about {needed:,.0f} items"
        reason = f"{measured}{small}; the rule requires a gain above {rule.min_gain:+.4f}."
    return RuleResult(rule, passed, reason, interval, bound, acceptance_p_value=p_value, detectable=detectable)


def estimate_needed_items(items: int, gain: float, noise: float, detectable: float) -> float:
    """Estimate the number of items for which a gain would be significant, with two digits.

    Args:
        items: Number of measured items.
        gain: Measured gain beyond the required one; above 0.
        noise: Half the width of the gain's interval, which is proportional to 1 / √items.
        detectable: Distance of the gain from its lower bound. The part beyond `noise` allows for losses of unseen items
            and is proportional to 1 / items.
    """
    unseen = max(detectable - noise, 0.0)
    # gain = noise · x + unseen · x², with x = √(items / needed)
    root = 2 * gain / (noise + math.hypot(noise, 2 * math.sqrt(unseen) * math.sqrt(gain)))
    return float(f"{items / root / root:.2g}")


def _evaluate_harmed_share(rule: Rule, result: TaskResult, metric: str) -> RuleResult:
    """Compare the exact upper bound of the share of harmed items with the rule's limit."""
    limit, harm = float(rule.max_harmed_share or 0.0), rule.harm or result.get_metric(metric).get_harm()
    flags = [float(loss > float(harm or 0.0)) for loss in result.compute_item_losses(metric, str(rule.against))]
    harmed, items = int(sum(flags)), len(flags)
    _, bound = significance.compute_clopper_pearson_bounds(flags, rule.confidence)
    p_value = significance.compute_binomial_p_value(harmed, items, limit)
    measured = (
        f"{rule.metric} is worse than {ROLE_LABELS[str(rule.against)]} by more than {harm:g} on {harmed} of {items} items"
        f" (at most {bound:.1%} of all items with {rule.confidence:.0%} confidence)"
    )
    passed = significance.is_within_level(p_value, rule.confidence)
    reason = f"{measured}{', as the rule allows' if passed else '; the rule allows'}"
    reason += f" ({limit:.1%})." if passed else f" {limit:.1%}."
    detectable = 1 - (1 - rule.confidence) ** (1 / items)
    return RuleResult(rule, passed, reason, acceptance_p_value=p_value, detectable=detectable, harmed_items=harmed)


def _evaluate_excess(
    rule: Rule, control: str, results: Mapping[str, TaskResult], config: EvaluationConfig
) -> RuleResult:
    """Compare the number of items that are worse than the other model's with that of the control's items."""
    control_task, _, control_metric = control.partition(".")
    as_measured, min_items = rule.model_copy(update={"metric": control}), get_min_items(rule.metric, config.min_items)
    if problem := _find_problem(as_measured, results[control_task], control_metric, min_items):
        return RuleResult(rule, False, problem)
    counts, against = [], str(rule.against)
    for name in (rule.metric, control):
        task, _, metric = name.partition(".")
        losses = results[task].compute_item_losses(metric, against)
        counts += [sum(loss > 0 for loss in losses), len(losses)]
    worse, items, control_worse, control_items = counts
    p_value = compute_excess_p_value(*counts)
    passed = p_value >= 1 - rule.confidence
    refused = next(
        (n for n in range(items + 1) if compute_excess_p_value(n, *counts[1:]) < 1 - rule.confidence), items + 1
    )
    significant_from = (
        f"; it would be significant from {format_count(refused, 'worse item')} on" if refused <= items else ""
    )
    verdict = f"not significant{significant_from}" if passed else "significant"
    reason = (
        f"{rule.metric} is worse than {ROLE_LABELS[against]} on {worse} of {items} items, and {control} on "
        f"{control_worse} of {control_items} control items; the difference is {verdict} (p {p_value:.2g}; the rule requires p of "
        f"at least {1 - rule.confidence:.2g})."
    )
    return RuleResult(rule, passed, reason, p_value=p_value, detectable=refused / items, harmed_items=worse)


def _describe_interval(gain: Interval, items: int) -> str:
    return f"gain: 95% interval {gain.low:+z.4f} to {gain.high:+z.4f}, {format_count(items, 'item')}"


def _evaluate_slices(rule: Rule, result: TaskResult, metric: str, config: EvaluationConfig, seed: int) -> RuleResult:
    """Compare the models in every slice of the rule with at least `min_items` items."""
    against, kinds = ROLE_LABELS[str(rule.against)], ", ".join(rule.slices or ())
    allowed, min_items = float(rule.max_loss or 0.0), config.min_items or MIN_ITEMS
    groups = list(iterate_slices(result.items, rule.slices or ()))
    judged = [(name, indices) for name, indices in groups if len(indices) >= min_items]
    unjudged = len(groups) - len(judged)
    if not judged:
        reason = f"{rule.metric} has no slices by {kinds} with {min_items} or more items"
        return RuleResult(rule, True, f"{reason}{_describe_unjudged(unjudged, len(groups))}.", unjudged_slices=unjudged)
    slices: list[tuple[str, int, Interval]] = []
    p_values, detectable = [], 0.0
    for name, indices in judged:
        gain = result.estimate_gain(metric, rule.against, samples=config.bootstrap_samples, seed=seed, indices=indices)
        slices.append((name, len(indices), gain.compute_interval(0.95)))
        p_values.append(gain.compute_harm_p_value(allowed))
        level = (1 - rule.confidence) / len(judged)
        detectable = max(detectable, allowed + gain.compute_detectable_loss(level, DETECTION_POWER))
    corrected = significance.apply_holm_correction(p_values)
    p_value, (name, items, worst) = min(
        zip(corrected, slices, strict=True), key=lambda pair: (pair[0], pair[1][2].value)
    )
    if p_value >= 1 - rule.confidence:
        reason = (
            f"{rule.metric} is not significantly worse than {against} in any of {format_count(len(slices), 'slice')} "
            f"by {kinds}; a loss below {detectable:.4f} in a slice may go "
            f"undetected{_describe_unjudged(unjudged, len(groups))}."
        )
        return RuleResult(rule, True, reason, p_value=p_value, detectable=detectable, unjudged_slices=unjudged)
    more = sum(p < 1 - rule.confidence for p in corrected) - 1
    others = f", and {more} more of {len(slices)} slices are worse" if more else ""
    limit = f"; the rule allows {rule.max_loss:.4f}" if rule.max_loss else ""
    reason = (
        f"In the slice {name}, {rule.metric} is {abs(worst.value):.4f} worse than {against}"
        f" ({_describe_interval(worst, items)}; p {p_value:.2g} after correction for "
        f"{format_count(len(slices), 'slice')}){others}{limit}{_describe_unjudged(unjudged, len(groups))}."
    )
    return RuleResult(rule, False, reason, worst, p_value=p_value, detectable=detectable, unjudged_slices=unjudged)


def _describe_unjudged(unjudged: int, slices: int) -> str:
    return (
        f"; {unjudged} of {format_count(slices, 'slice')} {'is' if unjudged == 1 else 'are'} too small to judge"
        if unjudged
        else ""
    )
