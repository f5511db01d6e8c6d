"""The difference between the metrics of two models on the same items, and its uncertainty.

A metric over items is r = Σ score / Σ weight (weights are token counts for a loss, 1 for an accuracy), or exp(r). A
gain is the difference of two models' metrics, positive if the candidate is better.
"""

# The bootstrap is paired: both models are evaluated on the same resample of the items (Koehn, EMNLP 2004).

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from components.common import exponential_sums

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray

MAX_DRAWS_PER_CHUNK = 4_000_000  # items drawn at once; limits the memory of the resamples
MAX_WEIGHTINGS = 200_000
MIN_TAIL_SAMPLES = 20  # a p-value of fewer samples has a standard error above 22%
LEVEL_TOLERANCE = 1e-9  # relative, of rounding


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """A gain and its bootstrap distribution.

    Attributes:
        value: Estimate of the gain.
        standard_error: Standard error of the estimate.
        items: Number of items.
        estimates: Gain in each resample, shape (samples,).
        pivots: (estimate − gain) / standard error of the resample, shape (samples,).
    """

    value: float
    standard_error: float
    items: int
    estimates: Array
    pivots: Array

    def compute_interval(self, confidence: float) -> Interval:
        """Return the two-sided percentile interval (Efron & Tibshirani 1993, ch. 13)."""
        import numpy as np

        tail = (1 - confidence) / 2
        low, high = np.quantile(self.estimates, [tail, 1 - tail])
        return Interval(self.value, float(low), float(high))

    def compute_detectable_loss(self, level: float, power: float) -> float:
        """Return the loss beyond the allowed one that a one-sided test at `level` finds with probability `power`."""
        from scipy import stats

        degrees = self.items - 1
        return float((stats.t.ppf(1 - level, degrees) + stats.t.ppf(power, degrees)) * self.standard_error)

    def compute_harm_p_value(self, allowed: float) -> float:
        """Return the p-value of the hypothesis that the gain is at least −`allowed` (one-sided studentised test)."""
        import numpy as np

        if not self.standard_error:
            return 0.0 if self.value < -allowed else 1.0
        from scipy import stats

        statistic = (self.value + allowed) / self.standard_error
        as_extreme = np.count_nonzero(self.pivots <= statistic)
        if as_extreme:
            return float((1 + as_extreme) / (1 + len(self.pivots)))
        # No resample is as extreme. 1 / samples is too coarse for many slices, so Student's t estimates the tail.
        return float(min(stats.t.cdf(statistic, self.items - 1), 1 / (1 + len(self.pivots))))


class PessimisticGain(Protocol):
    """Gaffke's confidence distribution of a gain, whose lower quantiles are lower confidence bounds."""

    def compute_p_value(self, limit: float, *, inclusive: bool = True) -> float:
        """Return the p-value of the hypothesis that the gain is at most `limit`; below `limit` if not `inclusive`."""

    def compute_lower_bound(self, confidence: float) -> float:
        """Return the one-sided lower confidence bound of the gain."""


@dataclass(frozen=True)
class LinearGain:
    """The exact distribution of Σ differences / Σ weights under flat Dirichlet weights of the items.

    Attributes:
        differences: Difference of the scores of each item and of the pessimistic item, shape (items + 1,).
        weights: Weight of each of them.
    """

    differences: Array
    weights: Array

    def compute_p_value(self, limit: float, *, inclusive: bool = True) -> float:
        """See `PessimisticGain`."""
        coefficients = self.differences - limit * self.weights
        return exponential_sums.compute_probability_below_zero(coefficients, inclusive=inclusive)

    def compute_lower_bound(self, confidence: float) -> float:
        """See `PessimisticGain`."""
        from scipy import optimize

        weighted = self.weights > 0
        gains = self.differences[weighted] / self.weights[weighted]
        low, high = float(gains.min()), float(gains.max())
        level, step = 1 - confidence, max(high - low, abs(low), 1.0)
        if low == high and weighted.all():
            return low
        while self.compute_p_value(low) > level:  # an item without weight has a difference
            low, step = low - step, 2 * step
        while self.compute_p_value(high) < level:
            high, step = high + step, 2 * step
        return float(optimize.brentq(lambda limit: self.compute_p_value(limit) - level, low, high, xtol=1e-10))


@dataclass(frozen=True)
class SampledGain:
    """The distribution of a gain without a closed form, by random weightings of the items.

    Attributes:
        estimates: Gain under each weighting, in ascending order, shape (samples,).
    """

    estimates: Array

    def compute_p_value(self, limit: float, *, inclusive: bool = True) -> float:
        """See `PessimisticGain`. The smallest value is 1 / (1 + samples)."""
        import numpy as np

        count = int(np.searchsorted(self.estimates, limit, side="right" if inclusive else "left"))
        return (1 + count) / (1 + len(self.estimates))

    def compute_lower_bound(self, confidence: float) -> float:
        """Return the highest limit whose p-value is within the error probability: an order statistic."""
        rank = math.floor((1 - confidence) * (1 + len(self.estimates)) * (1 + LEVEL_TOLERANCE))
        return float(self.estimates[max(rank - 1, 0)])


def estimate_pessimistic_gain(
    better: Sequence[float],
    worse: Sequence[float],
    weights: Sequence[float],
    *,
    max_item_loss: float | None,
    samples: int,
    seed: int,
    exponential: bool = False,
    limit: float = 0.0,
) -> PessimisticGain:
    """Return the distribution of lower confidence bounds of the gain that `estimate_gain` estimates.

    The items and one added item that is worse by `max_item_loss` have random weights with the flat Dirichlet
    distribution. For zeros and ones the bound is that of Clopper & Pearson. For a support that is bounded below, its
    coverage is a conjecture that no simulation has contradicted; docs/reference/benchmarks-gate.md measures it (Gaffke 2005,
    Math. Methods of Operations Research 62; Learned-Miller & Thomas, arXiv:1905.06208, 2019).

    Args:
        better: As for `estimate_gain`.
        worse: As for `estimate_gain`.
        weights: As for `estimate_gain`.
        max_item_loss: Largest loss of an unseen item of mean weight. A larger loss of a seen item replaces it. None:
            the largest difference seen, in either direction.
        samples: Number of weightings of an exponential metric. More are drawn, up to MAX_WEIGHTINGS, while fewer than
            MIN_TAIL_SAMPLES of their gains are at most `limit`. Other metrics need no weightings.
        seed: Seed of the weightings.
        exponential: Whether the metric is the exponential of the ratio.
        limit: Limit of the rule.
    """
    import numpy as np

    first, second, weight_array = (np.asarray(values, float) for values in (better, worse, weights))
    mean_weight = weight_array.mean()
    differences = (first - second) / mean_weight
    seen = float(np.abs(differences).max() if max_item_loss is None else -differences.min())
    loss = max(max_item_loss or 0.0, seen)
    level = first.mean()  # the pessimistic item has the mean score of the better model
    pessimistic = [level, level + loss * mean_weight, mean_weight]
    items = np.vstack([np.stack([first, second, weight_array], axis=1), pessimistic])
    if not exponential:
        return LinearGain(items[:, 0] - items[:, 1], items[:, 2])
    generator = np.random.Generator(np.random.PCG64(seed))
    estimates, step = np.empty(0), max(1, MAX_DRAWS_PER_CHUNK // len(items))
    while (missing := samples - len(estimates)) > 0 or np.count_nonzero(estimates <= limit) < MIN_TAIL_SAMPLES:
        size = min(step, missing if missing > 0 else MAX_WEIGHTINGS - len(estimates))
        if size <= 0:
            break
        a, b, total = (generator.standard_exponential((size, len(items))) @ items).T
        gains = np.exp(np.minimum(a / total, 700.0)) - np.exp(np.minimum(b / total, 700.0))
        estimates = np.concatenate([estimates, gains])
    return SampledGain(np.sort(estimates))


def is_within_level(p_value: float, confidence: float) -> bool:
    """Return whether a p-value is at most the error probability, apart from rounding."""
    return p_value <= (1 - confidence) * (1 + LEVEL_TOLERANCE)


def compute_required_items(share: float, confidence: float) -> int:
    """Return the number of items of which none may differ, to show with `confidence` that at most `share` differ.

    The bound of Clopper & Pearson is 1 − (1 − confidence)^(1/items), about 3 / items (rule of three, Hanley &
    Lippman-Hand, JAMA 249, 1983).
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-share) - 1e-9) if share < 1 else 1


def compute_binomial_p_value(count: int, items: int, share: float) -> float:
    """Return the p-value of the hypothesis that at least `share` of the population has a property of `count` items."""
    from scipy import stats

    return float(stats.binom.cdf(count, items, share))


def count_allowed_losses(items: int, share: float, confidence: float) -> int | None:
    """Return how many of the items may be worse, if none is better, to show that less than `share` of all are worse.

    None: not even zero.
    """
    counts = range(items + 1)
    allowed = [n for n in counts if is_within_level(compute_binomial_p_value(n, items, share), confidence)]
    return max(allowed, default=None)


def estimate_gain(
    better: Sequence[float],
    worse: Sequence[float],
    weights: Sequence[float],
    *,
    samples: int,
    seed: int,
    exponential: bool = False,
) -> Gain:
    """Return the gain ratio(better) − ratio(worse), or the difference of their exponentials.

    Args:
        better: Scores of the candidate, one per item, for at least two items. For a metric that is better when lower,
            exchange the candidate's scores and the other model's.
        worse: Scores of the other model, one per item.
        weights: One weight per item.
        samples: Number of bootstrap resamples.
        seed: Seed of the resampling.
        exponential: Whether the metric is the exponential of the ratio.
    """
    import numpy as np

    scores, weight_array = np.stack([better, worse], axis=1).astype(float), np.asarray(weights, float)
    count = len(weight_array)
    centre = scores.sum(axis=0) / weight_array.sum()
    # Terms of each item in the sums from which the ratios and their errors are computed, shape (items, 9).
    u, v = (scores - weight_array[:, None] * centre).T
    w = weight_array
    moments = np.stack([u, v, w, u * u, v * v, u * v, u * w, v * w, w * w], axis=1)
    # The sums of the moments over each resample of the items, shape (samples, 9).
    generator = np.random.Generator(np.random.PCG64(seed))
    sums, step = [], max(1, MAX_DRAWS_PER_CHUNK // count)
    for start in range(0, samples, step):
        size = min(step, samples - start)
        drawn = generator.integers(0, count, size=(size, count)) + count * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count).astype(float)
        sums.append(times @ moments)
    (value,), (error,) = _compute_differences(moments.sum(axis=0)[None], centre, count, exponential)
    estimates, errors = _compute_differences(np.concatenate(sums), centre, count, exponential)

    # The pivot of a resample without spread is ±1e6, or 0 if its estimate equals the gain.
    distances = estimates - value
    degenerate = np.where(np.abs(distances) <= 1e-12, 0.0, np.sign(distances) * 1e6)
    with np.errstate(divide="ignore", invalid="ignore"):
        pivots = np.where(errors > 0, distances / errors, degenerate)
    return Gain(float(value), float(error), count, estimates, np.clip(pivots, -1e6, 1e6))


def _compute_differences(sums: Array, centre: Array, items: int, exponential: bool) -> tuple[Array, Array]:
    """Return the differences of the metrics and their standard errors, one per row of sums."""
    # The error is linearised as for a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.4).
    import numpy as np

    u, v, w, uu, vv, uv, uw, vw, ww = sums.T
    du, dv = u / w, v / w
    a, b = centre[0] + du, centre[1] + dv
    slope_a = slope_b = 1.0
    if exponential:
        a, b = np.exp(np.minimum(a, 700.0)), np.exp(np.minimum(b, 700.0))
        slope_a, slope_b = a, b
    variance_a, variance_b = slope_a**2 * (uu - 2 * du * uw + du**2 * ww), slope_b**2 * (vv - 2 * dv * vw + dv**2 * ww)
    squares = variance_a + variance_b - 2 * slope_a * slope_b * (uv - du * vw - dv * uw + du * dv * ww)
    squares = np.where(squares > 1e-12 * (variance_a + variance_b), squares, 0.0)  # smaller values are rounding errors
    return a - b, np.sqrt(squares * items / (items - 1)) / w


def compute_clopper_pearson_bounds(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the one-sided lower and upper confidence bounds of the proportion of ones in zeros and ones.

    The bounds are exact for any number of items (Clopper & Pearson, Biometrika 26, 1934).
    """
    from scipy import stats

    ones, count = round(sum(values)), len(values)
    low = stats.beta.ppf(1 - confidence, ones, count - ones + 1) if ones else 0.0
    high = stats.beta.ppf(confidence, ones + 1, count - ones) if ones < count else 1.0
    return float(low), float(high)


def apply_holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return the p-values in order, corrected for their number (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


@dataclass(frozen=True)
class McNemarResult:
    """Result of McNemar's exact test (McNemar 1947).

    Attributes:
        only_candidate: Number of items that only the candidate answered correctly.
        only_other: Number of items that only the other model answered correctly.
        p: Two-sided p-value of the hypothesis that both numbers have the same expected value.
    """

    only_candidate: int
    only_other: int
    p: float


def run_mcnemar_test(candidate: Sequence[float], other: Sequence[float]) -> McNemarResult:
    """Run McNemar's exact test on two models' scores per item: 1 for correct, 0 for incorrect."""
    from scipy import stats

    first = sum(c > o for c, o in zip(candidate, other, strict=True))
    second = sum(o > c for c, o in zip(candidate, other, strict=True))
    p = float(stats.binomtest(first, first + second, 0.5).pvalue) if first + second else 1.0
    return McNemarResult(first, second, p)
