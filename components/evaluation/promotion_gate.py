"""The promotion gate: rules over the measured gains, each with a result and a one-sentence reason.

All rules must hold. The number of rules needs no correction: a candidate without the required gains passes all rules at
most as often as a single rule. Source: intersection-union test, Berger, Technometrics 24, 1982.
"""

# A rule over slices tests many slices for a loss, which needs Holm's correction.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from components.evaluation import significance
from components.evaluation.config import EvaluationConfig, Rule
from components.evaluation.item_slices import iterate_slices
from components.evaluation.significance import Interval
from components.evaluation.task_results import TaskResult

ROLE_LABELS = {"candidate": "the candidate", "base": "the base", "incumbent": "the incumbent"}
TOKENIZER_MISMATCH = "the incumbent has another tokenizer"
NO_GAIN = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RuleResult:
    """Result of a rule with its reason.

    Attributes:
        gain: Gain with its 95% interval; for a failed rule over slices, the gain of the worst slice.
        lower_bound: One-sided lower confidence bound of the gain.
        p_value: For a rule over slices, the corrected p-value of the worst slice.
    """

    rule: Rule
    passed: bool
    reason: str
    gain: Interval | None = None
    lower_bound: float | None = None
    p_value: float | None = None


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
        elif problem := _find_problem(rule, result, metric, config.min_items):
            rule_results.append(RuleResult(rule, False, problem))
        elif rule.slices:
            rule_results.append(_evaluate_slices(rule, result, metric, config, seed))
        else:
            rule_results.append(_evaluate_gain(rule, result, metric, config, seed))
    return rule_results


def _find_problem(rule: Rule, result: TaskResult, metric: str, min_items: int) -> str | None:
    """Return the reason why the rule cannot be evaluated, as a sentence, or None."""
    for role in ["candidate", *([rule.against] if isinstance(rule.against, str) else [])]:
        reason = result.missing_reasons.get(role)
        if not reason and role in result.foreign_tokenizer_roles and result.get_metric(metric).per_token:
            reason = TOKENIZER_MISMATCH
        if reason:
            return f"The {rule.metric} cannot be compared: {reason}."
        if not result.get_values(role, metric):
            return f"The {rule.metric} of {ROLE_LABELS[role]} is missing."
        if non_finite := result.count_non_finite(role, metric):
            share = f"{non_finite} of {len(result.items)} items"
            return f"The {rule.metric} of {ROLE_LABELS[role]} is not a finite number in {share}."
    if len(result.items) < min_items:
        measured = f"The {rule.metric} was measured on {len(result.items)} items"
        return f"{measured}; the rule requires at least {min_items} (evaluation.min_items)."
    return None


def _evaluate_gain(rule: Rule, result: TaskResult, metric: str, config: EvaluationConfig, seed: int) -> RuleResult:
    """Compare the lower confidence bound of the gain with the rule's limit."""
    # Identical scores show neither a gain nor a loss, but rare differences may go undetected. For a binary metric, a
    # rule with a loss limit above 0 requires enough items to rule out a larger loss.
    if result.is_identical(metric, rule.against):
        items = len(result.items)
        same = f"{rule.metric} is identical to that of {ROLE_LABELS[str(rule.against)]} on all {items} items"
        if rule.max_loss is None:
            reason = f"{same}; the rule requires a gain above {rule.min_gain or 0.0:+.4f}."
            return RuleResult(rule, False, reason, NO_GAIN, 0.0)
        # Upper confidence bound of the share of items that differ, if no sampled item differs.
        undetected = 1 - (1 - rule.confidence) ** (1 / items)
        limitation = f"differences in up to {undetected:.1%} of items may go undetected"
        if rule.max_loss and result.get_metric(metric).is_binary and undetected > rule.max_loss:
            reason = (
                f"{same}, but {limitation}: too few items to rule out a loss above {rule.max_loss:.4f}"
                f" with {rule.confidence:.0%} confidence."
            )
            return RuleResult(rule, False, reason, NO_GAIN, -undetected)
        return RuleResult(rule, True, f"{same}, as the rule allows ({limitation}).", NO_GAIN, 0.0)

    gain = result.estimate_gain(metric, rule.against, samples=config.bootstrap_samples, seed=seed)
    bound = result.compute_exact_lower_bound(metric, rule.against, rule.confidence) if rule.max_loss else None
    if bound is None:
        bound = result.compute_lower_bound(metric, rule.against, gain, rule.confidence)
    interval = gain.compute_interval(0.95)
    against = ROLE_LABELS.get(str(rule.against), str(rule.against))
    difference = f"{abs(gain.value):.4f} {'better' if gain.value >= 0 else 'worse'} than {against}"
    certainty = f"at least {bound:+.4f} with {rule.confidence:.0%} confidence"
    measured = f"{rule.metric} is {difference} ({_describe_interval(interval, gain.items)}; {certainty})"
    if rule.min_gain is None:
        max_loss = float(rule.max_loss or 0.0)
        passed, limit = bound >= -max_loss, f"a loss of at most {max_loss:.4f}"
        reason = f"{measured}, as the rule allows ({limit})." if passed else f"{measured}; the rule allows {limit}."
    else:
        passed = bound > rule.min_gain
        if passed:
            reason = f"{measured}, as the rule requires (gain above {rule.min_gain:+.4f})."
        else:
            small = "; the difference is too small for the number of items" if bound <= 0 < gain.value else ""
            reason = f"{measured}{small}; the rule requires a gain above {rule.min_gain:+.4f}."
    return RuleResult(rule, passed, reason, interval, bound)


def _describe_interval(gain: Interval, items: int) -> str:
    return f"95% interval of the gain {gain.low:+.4f} to {gain.high:+.4f}, {items} items"


def _evaluate_slices(rule: Rule, result: TaskResult, metric: str, config: EvaluationConfig, seed: int) -> RuleResult:
    """Compare the models in every slice of the rule with at least `min_items` items."""
    against, kinds = ROLE_LABELS[str(rule.against)], ", ".join(rule.slices or ())
    slices: list[tuple[str, int, Interval]] = []
    p_values = []
    for name, indices in iterate_slices(result.items, rule.slices or ()):
        if len(indices) >= config.min_items:
            gain = result.estimate_gain(
                metric, rule.against, samples=config.bootstrap_samples, seed=seed, indices=indices
            )
            slices.append((name, len(indices), gain.compute_interval(0.95)))
            p_values.append(gain.compute_harm_p_value(float(rule.max_loss or 0.0)))
    if not slices:
        reason = f"{rule.metric} has no slices by {kinds} with {config.min_items} or more items."
        return RuleResult(rule, True, reason)
    corrected = significance.apply_holm_correction(p_values)
    p_value, (name, items, worst) = min(
        zip(corrected, slices, strict=True), key=lambda pair: (pair[0], pair[1][2].value)
    )
    if p_value >= 1 - rule.confidence:
        reason = f"{rule.metric} is not significantly worse than {against} in any of {len(slices)} slices by {kinds}."
        return RuleResult(rule, True, reason, p_value=p_value)
    more = sum(p < 1 - rule.confidence for p in corrected) - 1
    others = f", and {more} more of {len(slices)} slices are worse" if more else ""
    limit = f"; the rule allows {rule.max_loss:.4f}" if rule.max_loss else ""
    reason = (
        f"In the slice {name}, {rule.metric} is {abs(worst.value):.4f} worse than {against}"
        f" ({_describe_interval(worst, items)}; p {p_value:.2g} after correction for {len(slices)} slices)"
        f"{others}{limit}."
    )
    return RuleResult(rule, False, reason, worst, p_value=p_value)
