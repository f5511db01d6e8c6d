"""What was measured of a task: its items, and the scores of candidate, base and incumbent on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from components.evaluation import statistics
from components.evaluation.statistics import Gain
from components.evaluation.task import Item, Metric, Scores, Task

ROLES = ("candidate", "base", "incumbent")
FEW = 10  # items that differ, below which a share is bounded exactly


@dataclass(frozen=True)
class Measured:
    """A task with its items and each role's scores; a role is measured into `scores`, or `why_not` says why it is not."""

    task: Task
    items: Sequence[Item]
    scores: dict[str, Scores]
    why_not: dict[str, str]
    digest: str
    foreign: set[str] = field(default_factory=set)  # roles whose model has another tokenizer

    def metric(self, name: str) -> Metric:
        """A metric's meaning."""
        return self.task.metrics[name]

    def values(self, role: str, metric: str) -> list[float]:
        """One score an item; empty where the role has none, or none that compares: a figure a token, of another tokenizer's tokens."""
        found = self.scores.get(role)
        if role in self.foreign and self.metric(metric).per_token:
            return []
        return list(found.values.get(metric, ())) if found else []

    def weights(self, metric: str) -> list[float]:
        """One weight an item: the candidate's, which are the same for every model that is compared by this metric."""
        return list(self.scores["candidate"].weights.get(metric) or [1.0] * len(self.items))

    def broken(self, role: str, metric: str) -> int:
        """How many items' scores are no finite number."""
        return sum(not math.isfinite(v) for v in self.values(role, metric))

    def value(self, role: str, metric: str, indices: Sequence[int] | None = None) -> float | None:
        """The metric of a role over all items or some of them; None where it cannot be given."""
        chosen = range(len(self.items)) if indices is None else indices
        values, weights = self.values(role, metric), self.weights(metric)
        if not values or not chosen or self.broken(role, metric):
            return None
        mean = statistics.ratio([values[i] for i in chosen], [weights[i] for i in chosen])
        return math.exp(min(mean, 700.0)) if self.metric(metric).exponential else mean

    def gain(self, metric: str, other: str | float, *, samples: int, seed: int, indices: Sequence[int] | None = None) -> Gain:
        """How much better the candidate is than a role or than a number, over all items or some of them, with what resampling gave."""
        chosen = range(len(self.items)) if indices is None else indices
        weights, own = self.weights(metric), self.values("candidate", metric)
        others = self.values(other, metric) if isinstance(other, str) else self._level(other, metric)
        pair = ([own[i] for i in chosen], [others[i] for i in chosen])
        better, worse = pair if self.metric(metric).better == "higher" else (pair[1], pair[0])
        exponential = self.metric(metric).exponential
        return statistics.gain(better, worse, [weights[i] for i in chosen], samples=samples, seed=seed, exponential=exponential)

    def alike(self, metric: str, other: str | float) -> bool:
        """Whether another model scored the same in every item."""
        return isinstance(other, str) and self.values("candidate", metric) == self.values(other, metric)

    def at_least(self, metric: str, other: str | float, gain: Gain, confidence: float) -> float:
        """The gain that the true one exceeds with this one-sided confidence. For shares of right answers beside a number it is also the
        exact one: resamples of answers that are all alike would know no doubt."""
        bound, values = gain.at_least(confidence), self.values("candidate", metric)
        if isinstance(other, str) or not self.metric(metric).right_or_wrong or not set(values) <= {0.0, 1.0}:
            return bound
        low, high = statistics.share_within(values, confidence)
        return min(bound, low - other if self.metric(metric).better == "higher" else other - high)

    def at_least_of_few(self, metric: str, other: str | float, confidence: float) -> float | None:
        """The gain beside another model that the true one exceeds, by exact bounds on the shares of items won and lost.

        For shares of right answers of which fewer than FEW differ: resamples of so few know too little of what is rarer still (None for
        all others). Each of the two bounds has half of the doubt (Bonferroni).
        """
        own = self.values("candidate", metric)
        others = self.values(other, metric) if isinstance(other, str) else []
        told = self.metric(metric)
        if not others or not told.right_or_wrong or not {*own, *others} <= {0.0, 1.0}:
            return None
        better = 1.0 if told.better == "higher" else -1.0
        signs = [better * (mine - theirs) for mine, theirs in zip(own, others, strict=True)]
        if sum(sign != 0 for sign in signs) >= FEW:
            return None
        each = (1 + confidence) / 2
        won, _ = statistics.share_within([float(sign > 0) for sign in signs], each)
        _, lost = statistics.share_within([float(sign < 0) for sign in signs], each)
        return won - lost

    def _level(self, number: float, metric: str) -> list[float]:
        """What every item would score if the metric were this number throughout."""
        level = math.log(number) if self.metric(metric).exponential and number > 0 else number
        return [level * weight for weight in self.weights(metric)]
