"""An anytime-valid test of paired scores: is the candidate better than the champion on the same requests?

A bet on "better" multiplies its capital by 1 + L·d for each pair with the difference d of the scores. If the expected
difference, given the earlier pairs, is at most 0, the mean capital of several bets is a nonnegative supermartingale: it
ever reaches 1/alpha with probability alpha at most (Ville 1939), however often it is evaluated and whenever it is
stopped. Sources: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86, 2024;
Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference", Statistical Science 38, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipelines.gateway import canary_comparison

ALPHA = 0.05  # probability of a wrong decision of each kind, over all pairs
BETS = np.array(canary_comparison.BETS)  # the same mixture; the canary counts wins only, so that it needs no order
BISECTIONS = 12  # of a bound of the confidence sequence

Decision = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """The state of a test after its pairs.

    Attributes:
        decision: the first decision; `undecided` if the evidence never sufficed.
        decided_after: number of pairs until the decision, or None.
        pairs: number of pairs.
        mean_difference: mean of candidate minus champion.
        low, high: bounds of the mean that hold at all times together with probability 1 - ALPHA.
        e_better, e_worse: highest evidence so far for each decision; 1/ALPHA decides.
        max_loss: the loss of the candidate that is tolerated.
    """

    decision: Decision
    decided_after: int | None
    pairs: int
    mean_difference: float
    low: float
    high: float
    e_better: float
    e_worse: float
    max_loss: float


def compute_log_evidence(differences: Any, mean: float = 0.0) -> np.ndarray:
    """Return the logarithm of the capital after each pair, for a bet that the expected difference exceeds `mean`.

    Args:
        differences: values from -1 to 1; the last axis is the order of the pairs.
        mean: from -1 (exclusive) to 1.
    """
    gains = (np.asarray(differences, dtype=float) - mean) / (1 + mean)  # at least -1: no bet can lose more than it has
    paths = np.cumsum(np.log1p(BETS[:, None] * gains[..., None, :]), axis=-1)
    result: np.ndarray = np.logaddexp.reduce(paths, axis=-2) - np.log(len(BETS))
    return result


def compare(differences: Sequence[float], *, max_loss: float = 0.0) -> Comparison:
    """Test whether the candidate is better than the champion less `max_loss`, or worse.

    Args:
        differences: candidate minus champion for each pair, from -1 to 1. For preferences: 1, -1, and 0 for a tie. The
            order must not depend on the scores.
        max_loss: 0: the candidate must be better; 0.02: it may lose up to 0.02 on average.

    Raises:
        ValueError: a difference is not a number from -1 to 1, or there is none.
    """
    values = np.asarray(differences, dtype=float)
    if not values.size or not np.all(np.abs(values) <= 1):
        raise ValueError("expected at least one difference, and only differences from -1 to 1")
    better = compute_log_evidence(values, -max_loss)
    worse = compute_log_evidence(-values, max_loss)
    threshold = -np.log(ALPHA)
    reached = {"better": better >= threshold, "worse": worse >= threshold}
    first: dict[Decision, int] = {
        name: int(np.argmax(hits)) + 1  # type: ignore[misc]
        for name, hits in reached.items()
        if hits.any()
    }
    decision: Decision = min(first, key=lambda name: first[name]) if first else "undecided"
    low, high = compute_bounds(values)
    return Comparison(
        decision,
        first.get(decision),
        len(values),
        float(values.mean()),
        low,
        high,
        float(np.exp(min(better.max(), 700))),  # JSON has no infinity; a lower value is still valid
        float(np.exp(min(worse.max(), 700))),
        max_loss,
    )


def compute_bounds(differences: np.ndarray) -> tuple[float, float]:
    """Return the confidence sequence of the mean after the last pair: the means that neither side has ever rejected.

    Each side has half of ALPHA. The bounds are found by bisection, because the evidence falls with the mean.
    """
    return _find_low(differences), -_find_low(-differences)


def _find_low(differences: np.ndarray) -> float:
    """Return a mean that is rejected, at most 2·2^-BISECTIONS below the lowest one that is not; -1 if none is rejected."""
    low, high = -1.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if compute_log_evidence(differences, middle).max() >= -np.log(ALPHA / 2):
            low = middle
        else:
            high = middle
    return low
