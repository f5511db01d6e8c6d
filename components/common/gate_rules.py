"""Rules of the promotion gate, in the configuration of an evaluation and in the release policy of a registered model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SUITE_PREFIX = "suite_"  # of the names of the regression suite's tasks; reserved for them
CONTROL_MIN_ITEMS = 29  # of either kind; 29 control items find an excess of 16% of 64 items (power 80%)
# Of int8 packages. A larger increase in nats per token exceeds the smallest differences that a gate is set to detect, so
# that the evaluation of the unquantized model would not apply to the package.
MAX_QUANTIZATION_MARGIN = 0.05
MIN_QUANTIZATION_ITEMS = 10
QUANTIZATION_CONFIDENCE = 0.95  # one-sided, as the default of a rule
LIMIT_KEYS = ("min_gain", "max_loss", "max_harmed_share")
METRIC_PATTERN = r"^[a-z][a-z0-9_]*\.[A-Za-z0-9_,@.-]+$"
OTHER_LIMITS = ("max_item_loss", "slices")  # of a rule without control
Outcome = Literal["passed", "failed", "not applicable"]
SliceKind = Literal["source", "category", "length"]
SLICE_KINDS: tuple[SliceKind, ...] = ("source", "category", "length")


class Rule(BaseModel):
    """One rule of the promotion gate. A gain is an improvement of the metric: a lower loss or a higher score."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    metric: str = Field(
        "held_out.loss",
        pattern=METRIC_PATTERN,
        description="Metric to compare, as task.metric.",
    )
    against: Literal["base", "incumbent"] | float = Field(
        "base", description="Comparison target: the base model, the incumbent, or a number that the metric must reach."
    )
    min_gain: float | None = Field(
        None,
        ge=0,
        description="Minimum gain (exclusive) in the metric's unit, at the rule's confidence. "
        "null: the rule uses max_loss or max_harmed_share.",
    )
    max_loss: float | None = Field(
        None,
        ge=0,
        description="Maximum loss (inclusive) in the metric's unit, at the rule's confidence. "
        "null: the rule uses min_gain or max_harmed_share.",
    )
    max_harmed_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        exclude_if=lambda share: share is None,
        description="Maximum share of items with a loss of more than `harm`, at the rule's confidence (exact bound). "
        "null: the rule uses min_gain or max_loss.",
    )
    harm: float | None = Field(
        None,
        gt=0,
        exclude_if=lambda harm: harm is None,
        description="Loss above which an item counts as harmed, for max_harmed_share. "
        "null: the metric's default, such as 1 nat per token for held_out.loss.",
    )
    max_item_loss: float | None = Field(
        None,
        gt=0,
        exclude_if=lambda loss: loss is None,
        description="Largest loss of an unseen item that the bound of min_gain or max_loss allows for. "
        "A smaller value needs fewer items and protects less against rare large losses. "
        "null: the metric's default, such as 5 nats per token for held_out.loss.",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="One-sided confidence of the rule's bound.")
    slices: list[SliceKind] | None = Field(
        None,
        min_length=1,
        description="Apply the rule to every slice by source, category or length. null: apply it to all items. "
        "The rule fails if a slice is significantly worse by more than max_loss (Holm's correction over the slices).",
    )

    control: str | None = Field(
        None,
        pattern=METRIC_PATTERN,
        exclude_if=lambda control: control is None,
        description="Metric of a control task, as task.metric. The rule fails if the share of worse items is significantly "
        "higher than in the control task (Fisher's exact test at the rule's confidence). Requires max_loss: 0.0 and binary "
        "metrics. null: no control.",
    )

    @property
    def _set_limits(self) -> list[str]:
        return [name for name in LIMIT_KEYS if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _check_limits(self) -> Rule:
        if len(self._set_limits) != 1:
            raise ValueError(
                f"limits set: {', '.join(self._set_limits) or 'none'}; expected exactly one of {', '.join(LIMIT_KEYS)}"
            )
        if self.harm is not None and self.max_harmed_share is None:
            raise ValueError(f"harm is {self.harm}; expected null in a rule without max_harmed_share")
        if self.max_item_loss is not None and (self.slices or self.max_harmed_share is not None):
            raise ValueError(
                f"max_item_loss is {self.max_item_loss}; expected null in a rule with slices or max_harmed_share"
            )
        if self.max_harmed_share is not None and isinstance(self.against, float):
            raise ValueError(f"max_harmed_share: against is {self.against}; expected base or incumbent")
        return self

    @model_validator(mode="after")
    def _check_slices(self) -> Rule:
        if self.slices and self.max_loss is None:
            raise ValueError(
                f"slices: {self._set_limits[0]} is set; expected max_loss, because a slice is too small to prove a gain"
            )
        if self.slices and isinstance(self.against, float):
            raise ValueError(f"slices: against is {self.against}; expected base or incumbent")
        return self

    @model_validator(mode="after")
    def _check_control(self) -> Rule:
        if self.control and (self.max_loss != 0 or self.max_item_loss is not None or self.slices):
            found = [
                f"{name}: {value}" for name, value in self if name in LIMIT_KEYS + OTHER_LIMITS and value is not None
            ]
            raise ValueError(f"control: found {', '.join(found)}; expected max_loss: 0.0 alone")
        if self.control and isinstance(self.against, float):
            raise ValueError(f"control: against is {self.against}; expected base or incumbent")
        return self


def describe_outcome(result: Mapping[str, Any]) -> Outcome:
    """Return the outcome of a rule of evaluation.json: a rule that holds without a comparison is not applicable.

    Such a rule has no incumbent to compare with, or no slice with enough items.
    """
    if not result["holds"]:
        return "failed"
    # Rules of earlier releases lack some of the figures; a rule that compares has at least one.
    compared = any(result.get(figure) is not None for figure in ("gain", "p", "acceptance_p", "harmed_items"))
    return "passed" if compared else "not applicable"


def get_min_items(metric: str, min_items: int | None) -> int | None:
    """Return `evaluation.min_items` for a rule on this metric; None for the suite, whose numbers of items are fixed."""
    return None if metric.startswith(SUITE_PREFIX) else min_items


def compute_excess_p_value(worse: int, items: int, control_worse: int, control_items: int) -> float:
    """Return the p-value of the hypothesis that items are worse as often as control items (Fisher's exact test, one-sided).

    Given the number of all worse items, the number of them outside the control is hypergeometric (Fisher, The Design of
    Experiments, 1935).
    """
    total = worse + control_worse
    ways = (
        math.comb(items, k) * math.comb(control_items, total - k)
        for k in range(max(worse, total - control_items), min(items, total) + 1)
    )
    return sum(ways) / math.comb(items + control_items, total)
