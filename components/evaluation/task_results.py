"""The result of one task: its items, the scores of candidate, base and incumbent, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from components.common import significance
from components.common.significance import Gain, PessimisticGain
from components.evaluation.task_interface import Item, Metric, Scores

if TYPE_CHECKING:
    from components.evaluation.tasks.base_task import AnyTask

ROLES = ("candidate", "base", "incumbent")


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
    calibration: dict[str, float] = field(default_factory=dict)  # figures of a judge; empty if not measured

    def without_texts(self) -> TaskResult:
        """Return the result without prompts, references and answers."""
        items = [replace(item, prompt="", reference="", request={}) for item in self.items]
        scores = {role: replace(each, answers=(), samples=()) for role, each in self.scores.items()}
        return replace(self, items=items, scores=scores)

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
        better, worse = self._pair_values(metric, other, indices)
        return significance.estimate_gain(
            better,
            worse,
            self._select_weights(metric, indices),
            samples=samples,
            seed=seed,
            exponential=self.get_metric(metric).exponential,
        )

    def estimate_pessimistic_gain(
        self, metric: str, other: str | float, *, max_item_loss: float | None, samples: int, seed: int, limit: float
    ) -> PessimisticGain:
        """Return the distribution of lower bounds of the candidate's gain over a role or a number, on all items.

        Args:
            metric: Name of the metric.
            other: "base", "incumbent", or a value of the metric.
            max_item_loss: Largest loss of an unseen item; see `get_max_item_loss`.
            samples: Number of weightings of the items, for an exponential metric.
            seed: Seed of the weightings.
            limit: Limit of the rule.
        """
        better, worse = self._pair_values(metric, other, None)
        return significance.estimate_pessimistic_gain(
            better,
            worse,
            self._select_weights(metric, None),
            max_item_loss=max_item_loss,
            samples=samples,
            seed=seed,
            exponential=self.get_metric(metric).exponential,
            limit=limit,
        )

    def get_max_item_loss(self, metric: str, other: str | float) -> float | None:
        """Return the largest loss of an unseen item against a role or a number; None if the metric has no limit."""
        return self.get_metric(metric).get_max_item_loss(other)

    def compute_item_losses(self, metric: str, other: str) -> list[float]:
        """Return by how much each item is worse than that of a role, per unit of weight; negative if it is better."""
        better, worse = self._pair_values(metric, other, None)
        weights = self.get_weights(metric)
        return [(b - a) / w if w else 0.0 for a, b, w in zip(better, worse, weights, strict=True)]

    def _pair_values(
        self, metric: str, other: str | float, indices: Sequence[int] | None
    ) -> tuple[list[float], list[float]]:
        """Return the candidate's scores and the other's, exchanged for a metric that is better when lower."""
        weights, definition = self._select_weights(metric, indices), self.get_metric(metric)
        candidate = self._select(self.get_values("candidate", metric), indices)
        if isinstance(other, str):
            opponent = self._select(self.get_values(other, metric), indices)
        else:  # item scores that give exactly this number
            level = math.log(other) if definition.exponential and other > 0 else other
            opponent = [level * weight for weight in weights]
        return (candidate, opponent) if definition.better == "higher" else (opponent, candidate)

    def _select_weights(self, metric: str, indices: Sequence[int] | None) -> list[float]:
        return self._select(self.get_weights(metric), indices)

    @staticmethod
    def _select(values: list[float], indices: Sequence[int] | None) -> list[float]:
        return values if indices is None else [values[i] for i in indices]

    def is_identical(self, metric: str, other: str | float) -> bool:
        """Return whether the role `other` has the same score on every item; False for a number."""
        return isinstance(other, str) and self.get_values("candidate", metric) == self.get_values(other, metric)
