"""The gate: rules over measured differences, a verdict, and a sentence of reason for every rule.

All rules must hold. That needs no correction for their number: the chance that a candidate without the gains asked for passes all of them
is at most that of passing one (intersection-union test; Berger, Technometrics 24, 1982). A rule over slices looks for harm in any of many
parts, which does: Holm's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from components.evaluation import statistics
from components.evaluation.config import EvaluationConfig, Rule
from components.evaluation.measured import Measured
from components.evaluation.slices import parts
from components.evaluation.statistics import Interval

THE = {"candidate": "the candidate", "base": "the base", "incumbent": "the model in service"}


ANOTHER_TOKENIZER = "the model in service has another tokenizer"


@dataclass(frozen=True)
class Ruling:
    """What a rule said: whether it holds, why in a sentence, the gain with its 95% interval, and what the gain is at least (or, over
    slices, the p of the worst one)."""

    rule: Rule
    holds: bool
    reason: str
    gain: Interval | None = None
    at_least: float | None = None
    p: float | None = None


def rulings(measured: Mapping[str, Measured], has_incumbent: bool, config: EvaluationConfig, seed: int) -> list[Ruling]:
    """Judge every rule on the tasks measured, by name."""
    return [_judge(rule, measured, has_incumbent, config, seed) for rule in config.gate]


def _judge(rule: Rule, measured: Mapping[str, Measured], has_incumbent: bool, config: EvaluationConfig, seed: int) -> Ruling:
    if rule.against == "incumbent" and not has_incumbent:
        return Ruling(rule, True, f"There is no model in service to compare {'slices ' if rule.slices else ''}with.")
    task, metric = measured[rule.metric.partition(".")[0]], rule.metric.partition(".")[2]
    problem = _problem(rule, task, metric, config.min_items)
    if problem:
        return Ruling(rule, False, problem)
    judge = _over_slices if rule.slices else _over_all
    return judge(rule, task, metric, config, seed)


def _problem(rule: Rule, task: Measured, metric: str, min_items: int) -> str | None:
    """Why the rule cannot be decided, in a sentence: a missing score refuses."""
    for role in ["candidate", *([rule.against] if isinstance(rule.against, str) else [])]:
        why = task.why_not.get(role) or (ANOTHER_TOKENIZER if role in task.foreign and task.metric(metric).per_token else None)
        if why:
            return f"The {rule.metric} cannot be compared: {why}."
        if not task.values(role, metric):
            return f"The {rule.metric} of {THE[role]} is missing."
        broken = task.broken(role, metric)
        if broken:
            return f"The {rule.metric} of {THE[role]} is not a finite number in {broken} of {len(task.items)} items."
    if len(task.items) < min_items:
        return f"The {rule.metric} was measured on {len(task.items)} items: too few to decide from (evaluation.min_items is {min_items})."
    return None


def _over_all(rule: Rule, task: Measured, metric: str, config: EvaluationConfig, seed: int) -> Ruling:
    if task.alike(metric, rule.against):
        return _of_equals(rule, task, metric)
    gain = task.gain(metric, rule.against, samples=config.bootstrap_samples, seed=seed)
    exact = task.at_least_of_few(metric, rule.against, rule.confidence) if rule.max_loss else None
    at_least = task.at_least(metric, rule.against, gain, rule.confidence) if exact is None else exact
    holds = at_least > rule.min_gain if rule.min_gain is not None else at_least >= -float(rule.max_loss or 0.0)
    interval = gain.interval(0.95)
    return Ruling(rule, holds, _sentence(rule, interval, at_least, holds, gain.items), interval, at_least)


def _of_equals(rule: Rule, task: Measured, metric: str) -> Ruling:
    """Two models that score the same in every item: nothing was gained, nothing was lost; what is too rare to be seen is said.

    Where items are right or wrong, a rule that allows a loss up to a limit asks that a larger one could not have stayed unseen.
    """
    items, holds = len(task.items), rule.max_loss is not None
    told = f"{rule.metric} is the same as that of {THE[str(rule.against)]} in all {items} items"
    if not holds:
        return Ruling(rule, False, f"{told}; the rule asks for a gain above {rule.min_gain or 0.0:+.4f}.", Interval(0.0, 0.0, 0.0), 0.0)
    unseen = statistics.unseen(items, rule.confidence)
    rare = f"a difference in up to {unseen:.1%} of them could stay unseen"
    if rule.max_loss and task.metric(metric).right_or_wrong and unseen > rule.max_loss:
        few = f"{told}, and {rare}: too few items to show a loss of at most {rule.max_loss:.4f}"
        return Ruling(rule, False, f"{few} with {rule.confidence:.0%} confidence.", Interval(0.0, 0.0, 0.0), -unseen)
    return Ruling(rule, True, f"{told}, as the rule allows ({rare}).", Interval(0.0, 0.0, 0.0), 0.0)


def _sentence(rule: Rule, gain: Interval, at_least: float, holds: bool, items: int) -> str:
    against = THE.get(str(rule.against), str(rule.against))
    direction = "better" if gain.value >= 0 else "worse"
    interval = f"95% interval of the gain {gain.low:+.4f} to {gain.high:+.4f}, {items} items"
    sure = f"at least {at_least:+.4f} with {rule.confidence:.0%} confidence"
    measured = f"{rule.metric} is {abs(gain.value):.4f} {direction} than {against} ({interval}; {sure})"
    if rule.min_gain is None:
        limit = f"a loss of at most {rule.max_loss or 0.0:.4f}"
        return f"{measured}, as the rule allows ({limit})." if holds else f"{measured}; the rule allows {limit}."
    if holds:
        return f"{measured}, as the rule asks (gain above {rule.min_gain:+.4f})."
    small = ": too small a difference for this many items" if at_least <= 0 < gain.value else ""
    return f"{measured}{small}; the rule asks for a gain above {rule.min_gain:+.4f}."


@dataclass(frozen=True)
class Part:
    """A slice's gain with its 95% interval, and the p that it is no worse than allowed, before correction."""

    name: str
    items: int
    gain: Interval
    p: float


def harmed(
    task: Measured, metric: str, against: str, kinds: Sequence[str], allowed: float, config: EvaluationConfig, seed: int
) -> Iterator[Part]:
    """Every slice with enough items to say something of."""
    for name, indices in parts(task.items, kinds):
        if len(indices) >= config.min_items:
            gain = task.gain(metric, against, samples=config.bootstrap_samples, seed=seed, indices=indices)
            yield Part(name, len(indices), gain.interval(0.95), gain.harm(allowed))


def _over_slices(rule: Rule, task: Measured, metric: str, config: EvaluationConfig, seed: int) -> Ruling:
    allowed, against = float(rule.max_loss or 0.0), str(rule.against)
    found = list(harmed(task, metric, against, rule.slices or (), allowed, config, seed))
    if not found:
        return Ruling(rule, True, f"{rule.metric} has no slices of {config.min_items} items or more by {_listed(rule)} to compare.")
    corrected = statistics.holm([part.p for part in found])
    worst_p, worst = min(zip(corrected, found, strict=True), key=lambda one: (one[0], one[1].gain.value))
    if worst_p >= 1 - rule.confidence:
        return Ruling(
            rule, True, f"{rule.metric} is clearly worse than {THE[against]} in none of {len(found)} slices by {_listed(rule)}.", p=worst_p
        )
    told = f"In the slice {worst.name}, {rule.metric} is {abs(worst.gain.value):.4f} worse than {THE[against]}"
    interval = f"95% interval of the gain {worst.gain.low:+.4f} to {worst.gain.high:+.4f}, {worst.items} items"
    more = sum(p < 1 - rule.confidence for p in corrected) - 1
    others = f", and {more} more of {len(found)} slices are worse" if more else ""
    limit = f"; the rule allows {allowed:.4f}" if allowed else ""
    return Ruling(
        rule, False, f"{told} ({interval}; p {worst_p:.2g} after correction for {len(found)} slices){others}{limit}.", worst.gain, p=worst_p
    )


def _listed(rule: Rule) -> str:
    return ", ".join(rule.slices or ())
