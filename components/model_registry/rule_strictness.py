"""Comparison of the rules of an evaluation's gate with the rules that a promotion requires."""

# The registry must not import the evaluation, so the defaults of the metrics are repeated here; a test compares them.

from __future__ import annotations

import math
from typing import Any

from components.common.gate_rules import CONTROL_MIN_ITEMS, LIMIT_KEYS

Rule = dict[str, Any]

# The figures that a rule limits.
GAIN, SHARE, SLICES, EXCESS = "gain", "share of harmed items", "slices", "excess over a control"
COMPARED_KEYS = {"confidence", "slices", "harm", "max_item_loss", *LIMIT_KEYS}
MIN_ITEMS = 10  # default of evaluation.min_items
# By kind of task and metric. A binary or similarity metric counts an item as harmed from a loss above 1/2; other metrics
# have no default, so their rules set `harm`.
DEFAULT_HARMS = {("held_out", "loss"): 1.0, ("generation", "chrf"): 50.0}
OTHER_DEFAULT_HARM = 0.5
DEFAULT_MAX_ITEM_LOSSES = {("held_out", "loss"): 5.0, ("held_out", "perplexity"): 5.0}
LARGEST_MAX_ITEM_LOSS = 100.0  # of the defaults of all metrics
# Calibration that a judge must have before a rule may use its verdicts.
MIN_PAIRS, MIN_KAPPA = 30, 0.4
EXPONENTIAL_METRICS = ("perplexity", "word_perplexity", "byte_perplexity")


def get_figure(rule: Rule) -> str:
    """Return the figure that a rule limits: GAIN, SHARE, SLICES or EXCESS."""
    if rule.get("control"):
        return EXCESS
    if rule.get("max_harmed_share") is not None:
        return SHARE
    return SLICES if rule.get("slices") else GAIN


def get_harm(rule: Rule, kind: str) -> float:
    """Return the loss above which the rule counts an item as harmed.

    Args:
        kind: kind of the rule's task.
    """
    default = DEFAULT_HARMS.get((kind, _get_metric_name(rule)), OTHER_DEFAULT_HARM)
    return float(rule.get("harm") or default)


def is_as_strict(rule: Rule, wanted: Rule, kind: str) -> bool:
    """Return whether a rule fails whenever the wanted rule fails, apart from the numbers of items.

    A setting whose default is unknown is not as strict as a value, and the reverse.

    Args:
        rule: a rule of the evaluation, as in `evaluation.gate`.
        wanted: the required rule.
        kind: kind of the task of both rules.
    """
    figure = get_figure(rule)
    if figure != get_figure(wanted):
        return False
    if any(rule.get(name) != wanted.get(name) for name in (rule.keys() | wanted.keys()) - COMPARED_KEYS):
        return False
    if figure == EXCESS:  # it fails if its p-value is below 1 − confidence
        return bool(rule["confidence"] <= wanted["confidence"])
    if figure == SLICES:
        # A slice fails if its p-value is below 1 − confidence. Holm's correction depends on the number of slices.
        is_same_family = set(rule["slices"]) == set(wanted["slices"])
        is_limit_as_strict = rule["max_loss"] <= wanted["max_loss"]
        return bool(is_same_family and is_limit_as_strict and rule["confidence"] <= wanted["confidence"])
    if rule["confidence"] < wanted["confidence"]:
        return False
    if figure == SHARE:
        is_limit_as_strict = rule["max_harmed_share"] <= wanted["max_harmed_share"]
        return bool(is_limit_as_strict and get_harm(rule, kind) <= get_harm(wanted, kind))
    return _is_gain_limit_as_strict(rule, wanted) and _allows_for_loss(rule, wanted, kind)


def _is_gain_limit_as_strict(rule: Rule, wanted: Rule) -> bool:
    """Compare the lowest gains that two rules allow; `min_gain` excludes its limit."""
    limits = [-each["max_loss"] if each.get("min_gain") is None else each["min_gain"] for each in (rule, wanted)]
    is_weaker_at_limit = rule.get("min_gain") is None and wanted.get("min_gain") is not None
    return bool(limits[0] > limits[1] or (limits[0] == limits[1] and not is_weaker_at_limit))


def _allows_for_loss(rule: Rule, wanted: Rule, kind: str) -> bool:
    """Return whether the rule's bound allows for at least the wanted loss of an unseen item."""
    default = DEFAULT_MAX_ITEM_LOSSES.get((kind, _get_metric_name(rule)))
    own, other = (each.get("max_item_loss") or default for each in (rule, wanted))
    return own == other if own is None or other is None else bool(own >= other)


def compute_min_items(rule: Rule, min_items: int | None, kind: str) -> int:
    """Return the largest number of items that a rule can require; exact for the held-out loss.

    The formula is that of the promotion gate: with this number, a model without any loss passes.

    Args:
        rule: the rule, as in `evaluation.gate`.
        min_items: `evaluation.min_items`; None for the default.
        kind: kind of the rule's task.
    """
    if min_items:
        return min_items
    if rule.get("control"):
        return CONTROL_MIN_ITEMS
    share, metric = 1.0, _get_metric_name(rule)
    if rule.get("max_harmed_share") is not None:
        share = rule["max_harmed_share"]
    elif rule.get("max_loss") and not rule.get("slices") and metric not in EXPONENTIAL_METRICS:
        default = DEFAULT_MAX_ITEM_LOSSES.get((kind, metric), LARGEST_MAX_ITEM_LOSS)
        share = rule["max_loss"] / (rule.get("max_item_loss") or default)
    if share >= 1:
        return MIN_ITEMS
    return max(MIN_ITEMS, math.ceil(math.log(1 - rule["confidence"]) / math.log1p(-share) - 1e-9))


def requires_as_many_items(rule: Rule, wanted: Rule) -> bool:
    """Return whether a rule as strict as the wanted rule requires as many items, without `evaluation.min_items`.

    A rule without an allowed loss requires MIN_ITEMS, fewer than a rule with a small one.
    """
    return not wanted.get("max_loss") or bool(rule.get("max_loss"))


def _get_metric_name(rule: Rule) -> str:
    return str(rule["metric"]).partition(".")[2]
