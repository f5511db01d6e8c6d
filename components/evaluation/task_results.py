"""The result of one task: its items, the scores of candidate, base and incumbent, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from components.evaluation import significance
from components.evaluation.significance import Gain
from components.evaluation.task_interface import Item, Metric, Scores

if TYPE_CHECKING:
    from components.evaluation.tasks.base_task import AnyTask

ROLES = ("candidate", "base", "incumbent")
MIN_DISCORDANT_ITEMS = 10  # with fewer items on which two models differ, the bounds are exact


@dataclass(frozen=True)
class TaskResult:
    """A task with its items and each role's scores.

    Every role has an entry in `scores`, or a reason in `missing_reasons`.
    """

    task: AnyTask
    items: Sequence[Item]
    scores: dict[str, Scores]
    missing_reasons: dict[str, str]
    digest: str
    foreign_tokenizer_roles: set[str] = field(default_factory=set)  # roles whose model has another tokenizer

    def get_metric(self, name: str) -> Metric:
        """Return the definition of a metric."""
        return self.task.metrics[name]

    def get_values(self, role: str, metric: str) -> list[float]:
        """Return one score per item; empty if the role has no scores, or its tokenizer makes them incomparable."""
        scores = self.scores.get(role)
        if scores is None or (role in self.foreign_tokenizer_roles and self.get_metric(metric).per_token):
            return []
        return list(scores.values.get(metric, ()))

    def get_weights(self, metric: str) -> list[float]:
        """Return the candidate's weight of each item, which is equal for all comparable models."""
        return list(self.scores["candidate"].weights.get(metric) or [1.0] * len(self.items))

    def count_non_finite(self, role: str, metric: str) -> int:
        """Return the number of items whose score is not a finite number."""
        return sum(not math.isfinite(v) for v in self.get_values(role, metric))

    def compute_value(self, role: str, metric: str, indices: Sequence[int] | None = None) -> float | None:
        """Return a role's metric over all items, or over those at `indices`; None if it cannot be computed."""
        chosen = range(len(self.items)) if indices is None else indices
        values, weights = self.get_values(role, metric), self.get_weights(metric)
        if not values or not chosen or self.count_non_finite(role, metric):
            return None
        # The loss per token over all items, not the mean of the losses per item.
        mean = sum(values[i] for i in chosen) / sum(weights[i] for i in chosen)
        return math.exp(min(mean, 700.0)) if self.get_metric(metric).exponential else mean

    def estimate_gain(
        self, metric: str, other: str | float, *, samples: int, seed: int, indices: Sequence[int] | None = None
    ) -> Gain:
        """Return the candidate's gain over a role or a number.

        Args:
            metric: Name of the metric.
            other: "base", "incumbent", or a value of the metric.
            samples: Number of bootstrap resamples.
            seed: Seed of the bootstrap.
            indices: Indices of the items to compare; None for all items.
        """
        chosen = range(len(self.items)) if indices is None else indices
        weights, own, definition = (
            self.get_weights(metric),
            self.get_values("candidate", metric),
            self.get_metric(metric),
        )
        if isinstance(other, str):
            others = self.get_values(other, metric)
        else:  # item scores that give exactly this number
            level = math.log(other) if definition.exponential and other > 0 else other
            others = [level * weight for weight in weights]
        candidate, opponent = [own[i] for i in chosen], [others[i] for i in chosen]
        better, worse = (candidate, opponent) if definition.better == "higher" else (opponent, candidate)
        return significance.estimate_gain(
            better,
            worse,
            [weights[i] for i in chosen],
            samples=samples,
            seed=seed,
            exponential=definition.exponential,
        )

    def is_identical(self, metric: str, other: str | float) -> bool:
        """Return whether the role `other` has the same score on every item; False for a number."""
        return isinstance(other, str) and self.get_values("candidate", metric) == self.get_values(other, metric)

    def compute_lower_bound(self, metric: str, other: str | float, gain: Gain, confidence: float) -> float:
        """Return the one-sided lower confidence bound of a gain.

        For a binary metric compared with a number, an exact bound also applies: resamples of equal scores do not vary.

        Args:
            metric: Name of the metric.
            other: "base", "incumbent", or a value of the metric.
            gain: The candidate's gain over `other`.
            confidence: Confidence of the bound, between 0 and 1.
        """
        bound, values = gain.compute_lower_bound(confidence), self.get_values("candidate", metric)
        if isinstance(other, str) or not self.get_metric(metric).is_binary or not set(values) <= {0.0, 1.0}:
            return bound
        low, high = significance.compute_clopper_pearson_bounds(values, confidence)
        return min(bound, low - other if self.get_metric(metric).better == "higher" else other - high)

    def compute_exact_lower_bound(self, metric: str, other: str | float, confidence: float) -> float | None:
        """Return the lower bound of a gain over another model from exact bounds on the shares of items won and lost.

        The shares have Clopper-Pearson bounds, each with half the error probability (Bonferroni). The bound is None
        unless `other` is a model, the metric is binary and fewer than MIN_DISCORDANT_ITEMS items differ. The bootstrap
        underestimates rare differences, since resamples of few differences often contain none.
        """
        own = self.get_values("candidate", metric)
        others = self.get_values(other, metric) if isinstance(other, str) else []
        if not others or not self.get_metric(metric).is_binary or not {*own, *others} <= {0.0, 1.0}:
            return None
        sign = 1.0 if self.get_metric(metric).better == "higher" else -1.0
        signs = [sign * (mine - theirs) for mine, theirs in zip(own, others, strict=True)]
        if sum(sign != 0 for sign in signs) >= MIN_DISCORDANT_ITEMS:
            return None
        confidence_per_bound = (1 + confidence) / 2
        won, _ = significance.compute_clopper_pearson_bounds([float(sign > 0) for sign in signs], confidence_per_bound)
        _, lost = significance.compute_clopper_pearson_bounds([float(sign < 0) for sign in signs], confidence_per_bound)
        return won - lost
