"""Recomputation of the results of an evaluation's rules from its predictions.

Numbers of harmed items and of slices, and the exact bound on the share of harmed items, follow from the predictions. The
bootstrap and Gaffke's bound are not repeated: their results are only checked against each other and against the rule.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from components.common.gate_rules import CONTROL_MIN_ITEMS, compute_excess_p_value, get_min_items
from components.common.length_buckets import get_length_bucket
from components.common.runtime.counts import format_count
from components.model_registry import rule_strictness
from components.model_registry.rule_strictness import EXCESS, SHARE, SLICES

Json = dict[str, Any]

RELATIVE_TOLERANCE = 1e-9  # of sums of equal numbers in another order


def check_results(content: Json, rows: Mapping[str, Sequence[Json]]) -> list[str]:
    """Return an objection, as a clause, for each rule that holds although its result does not show it.

    Args:
        content: the content of evaluation.json.
        rows: the rows of predictions.parquet by task.
    """
    objections = []
    for rule in content["rules"]:
        if not rule["holds"] or (rule["against"] == "incumbent" and not content["measured"]["incumbent"]):
            continue
        name, _, metric = rule["metric"].partition(".")
        definition = content["tasks"][name]["metrics"][metric]
        better, exponential = definition["better"], definition["exponential"]
        items = ScoredItems(rows[name], metric, rule["against"], better=better, exponential=exponential)
        figure, settings = rule_strictness.get_figure(rule), content["measured"]["settings"]
        required = get_min_items(rule["metric"], settings["min_items"]) or rule_strictness.MIN_ITEMS
        if not items.is_complete:
            objections.append(f"a rule on {rule['metric']} holds in its evaluation without scores")
            continue
        if calibration_problem := _find_calibration_problem(content, name):
            problem = calibration_problem
        elif len(rows[name]) < required:
            problem = f"the rule has {format_count(len(rows[name]), 'item')} and requires {required}"
        elif figure == SHARE:
            problem = _check_harmed_share(rule, items, content["measured"]["tasks"][name])
        elif figure == EXCESS:
            problem = _check_excess(rule, items, content, rows)
        elif figure == SLICES:
            problem = _check_slices(rule, rows[name], required)
        else:
            problem = _check_gain(rule, items)
        if problem:
            objections.append(f"a rule on {rule['metric']} holds in its evaluation, but {problem}")
    return objections


def _find_calibration_problem(content: Json, task: str) -> str:
    """Return why a judge cannot carry a rule, as a clause; "" for another task and for a calibrated judge.

    The judgements are not recomputed: the figures are compared with each other and with the limits of every evaluation.
    """
    if content["measured"]["tasks"][task] != "judge":
        return ""
    calibration = content.get("calibration", {}).get(task)
    if not calibration:
        return "its judge has no calibration"
    pairs, kappa, bound = (calibration[key] for key in ("pairs", "kappa", "kappa_bound"))
    if pairs < rule_strictness.MIN_PAIRS:
        return f"the number of pairs in the calibration of its judge is {pairs:.0f}; expected at least {rule_strictness.MIN_PAIRS}"
    if not bound > rule_strictness.MIN_KAPPA:
        return f"the agreement of its judge (kappa_bound) is {bound:.3f}; expected above {rule_strictness.MIN_KAPPA}"
    return "" if bound <= kappa <= 1 else "the calibration of its judge contradicts itself"


def find_kappa_problem(content: Json, task: str, min_kappa: float | None, source: str) -> str:
    """Return the objection to a judge whose agreement `source` does not accept; "" if it accepts the judge."""
    bound = content.get("calibration", {}).get(task, {}).get("kappa_bound")
    if min_kappa is None or (bound is not None and bound > min_kappa):
        return ""
    found = "none" if bound is None else f"{bound:.3f}"
    return (
        f"{source} requires a kappa_bound above {min_kappa:g} of the judge in task {task}; its evaluation has {found}"
    )


class ScoredItems:
    """The scores of the candidate and of the model or number that a rule compares it with, and the item weights.

    Attributes:
        is_complete: whether every item has both scores.
    """

    def __init__(
        self, rows: Sequence[Json], metric: str, against: str | float, *, better: str, exponential: bool
    ) -> None:
        self.better, self.exponential, self.against = better, exponential, against
        self.weights = [_read(row["weights"]).get(metric, 1.0) for row in rows]
        self.candidate: list[Any] = [_read(row["candidate_scores"]).get(metric) for row in rows]
        if isinstance(against, str):
            self.other: list[Any] = [_read(row.get(f"{against}_scores")).get(metric) for row in rows]
        else:
            level = math.log(against) if exponential and against > 0 else against
            self.other = [level * weight for weight in self.weights]
        scores = [*self.candidate, *self.other]
        self.is_complete = bool(scores and sum(self.weights)) and all(
            isinstance(score, (int, float)) and math.isfinite(score) for score in scores
        )

    @property
    def gain(self) -> float:
        """The candidate's gain over all items, in the metric's unit."""
        own = _compute_ratio(self.candidate, self.weights, exponential=self.exponential)
        other = _compute_ratio(self.other, self.weights, exponential=self.exponential)
        if not isinstance(self.against, str):
            other = float(self.against)
        return own - other if self.better == "higher" else other - own

    @property
    def is_identical(self) -> bool:
        """Whether the scores of all items are equal."""
        return bool(self.candidate == self.other)

    def count_harmed(self, harm: float) -> int:
        """Return the number of items that are worse by more than `harm` per unit of weight."""
        sign = 1 if self.better == "higher" else -1
        pairs = zip(self.candidate, self.other, self.weights, strict=True)
        return sum((sign * (other - own) / weight if weight else 0.0) > harm for own, other, weight in pairs)


def _read(text: str | None) -> Json:
    content: Json = json.loads(text or "{}")
    return content


def _compute_ratio(scores: Sequence[float], weights: Sequence[float], *, exponential: bool) -> float:
    ratio = sum(scores) / sum(weights)
    return math.exp(min(ratio, 700.0)) if exponential else ratio


def compute_metric(rows: Sequence[Json], role: str, metric: str, *, exponential: bool) -> float | None:
    """Return a role's metric over the rows of a task; None if an item has no score."""
    scores: list[Any] = [_read(row.get(f"{role}_scores")).get(metric) for row in rows]
    weights = [_read(row["weights"]).get(metric, 1.0) for row in rows]
    if None in scores or not sum(weights):
        return None
    return _compute_ratio(scores, weights, exponential=exponential)


def is_within_limit(rule: Json, gain: float) -> bool:
    """Return whether a gain satisfies the limit of a rule, apart from rounding."""
    if rule.get("min_gain") is not None:
        return bool(gain > rule["min_gain"])
    return rule.get("max_loss") is None or bool(gain >= -rule["max_loss"] - RELATIVE_TOLERANCE * max(1.0, abs(gain)))


def _check_harmed_share(rule: Json, items: ScoredItems, kind: str) -> str:
    """Recompute the number of harmed items, and the p-value that decides like the bound of Clopper & Pearson."""
    count, harmed = len(items.weights), items.count_harmed(rule_strictness.get_harm(rule, kind))
    if rule["harmed_items"] != harmed:
        return f"it counts {rule['harmed_items']} harmed items; its predictions have {harmed}"
    p_value = compute_binomial_p_value(harmed, count, rule["max_harmed_share"])
    if p_value > 1 - rule["confidence"] + RELATIVE_TOLERANCE:
        return f"{harmed} of {count} items are harmed"
    recorded = rule["acceptance_p"]
    if recorded is None or not math.isclose(recorded, p_value, rel_tol=1e-6, abs_tol=1e-12):
        found = "it records no p-value" if recorded is None else f"its recorded p-value is {recorded}"
        return f"{found}; recomputed for {harmed} of {count} items harmed, the p-value is {p_value:.4g}"
    return ""


def compute_binomial_p_value(count: int, items: int, share: float) -> float:
    """Return the probability of at most `count` of `items` items, each with the probability `share`.

    It is at most 1 − confidence if the upper bound of Clopper & Pearson is at most `share`.
    """
    logarithms = (
        math.lgamma(items + 1)
        - math.lgamma(k + 1)
        - math.lgamma(items - k + 1)
        + k * math.log(share)
        + (items - k) * math.log1p(-share)
        for k in range(count + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logarithms)))


def _check_excess(rule: Json, items: ScoredItems, content: Json, rows: Mapping[str, Sequence[Json]]) -> str:
    """Recount the worse items and those of the control, and recompute the p-value."""
    task, _, metric = rule["control"].partition(".")
    better = content["tasks"][task]["metrics"][metric]["better"]
    control = ScoredItems(rows[task], metric, rule["against"], better=better, exponential=False)
    min_items = get_min_items(rule["metric"], content["measured"]["settings"]["min_items"])
    counts = [items.count_harmed(0.0), len(items.weights), control.count_harmed(0.0), len(control.weights)]
    if not control.is_complete or min(counts[1], counts[3]) < (min_items or CONTROL_MIN_ITEMS):
        return f"it has {format_count(counts[1], 'item')} and {format_count(counts[3], 'control item')}"
    p_value = compute_excess_p_value(*counts)
    if rule["p"] is None or not math.isclose(rule["p"], p_value, rel_tol=RELATIVE_TOLERANCE):
        return f"its p-value is {rule['p']}; its predictions have {p_value:.4g}"
    return "" if p_value >= 1 - rule["confidence"] else f"its p-value is {p_value:.4g}"


def _check_slices(rule: Json, rows: Sequence[Json], min_items: int) -> str:
    """Recount the slices, and compare the stated p-value with the rule's confidence."""
    sizes: list[int] = []
    for by in rule["slices"]:
        names = (get_length_bucket(row.get("length") or 0) if by == "length" else row.get(by) for row in rows)
        groups = Counter(name for name in names if name)
        sizes += groups.values() if len(groups) > 1 else []
    unjudged = sum(size < min_items for size in sizes)
    if rule["unjudged_slices"] != unjudged:
        return f"it counts {rule['unjudged_slices']} slices with too few items; its predictions have {unjudged}"
    if rule["p"] is None:
        return f"it has no p-value for {format_count(len(sizes) - unjudged, 'slice')}" if len(sizes) > unjudged else ""
    return "" if rule["p"] >= 1 - rule["confidence"] else f"the p-value of its worst slice is {rule['p']}"


def _check_gain(rule: Json, items: ScoredItems) -> str:
    """Recompute the gain, and compare bound and p-value with the rule's limit and confidence."""
    gain, bound, p_value = items.gain, rule["at_least"], rule["acceptance_p"]
    if not is_within_limit(rule, gain):
        return f"the gain is {gain:+.4f}"
    if rule["gain"] is None or bound is None:
        return "its gain or its bound is missing"
    scale = max(1.0, abs(gain), *(abs(value) for value in rule["gain"]))
    if not math.isclose(rule["gain"][0], gain, rel_tol=0, abs_tol=scale * RELATIVE_TOLERANCE):
        return f"its gain is {rule['gain'][0]:+.4f}; its predictions have {gain:+.4f}"
    if not is_within_limit(rule, bound):
        return f"its bound is {bound:+.4f}"
    if items.is_identical:  # nothing is estimated
        return ""
    largest = 1 - rule["confidence"]
    if p_value is None or not 0 <= p_value <= largest * (1 + RELATIVE_TOLERANCE):
        return f"its p-value is {p_value}; the bound requires at most {largest:.4g}"
    return ""
