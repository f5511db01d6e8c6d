"""The difference between the metrics of two models on the same items, and its uncertainty.

A metric over items is r = Σ score / Σ weight (weights are token counts for a loss, 1 for an accuracy), or exp(r). A
gain is the difference of two models' metrics, positive if the candidate is better.
"""

# The bootstrap is paired: both models are evaluated on the same resample of the items (Koehn, EMNLP 2004).

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray

MAX_DRAWS_PER_CHUNK = 4_000_000  # items drawn at once; limits the memory of the resamples


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


@dataclass(frozen=True)
class PessimisticGain:
    """Gaffke's confidence distribution of a gain, whose lower quantiles are lower confidence bounds.

    Attributes:
        estimates: Gain under each random weighting of the items and one pessimistic item, shape (samples,).
    """

    estimates: Array

    def compute_lower_bound(self, confidence: float) -> float:
        """Return the one-sided lower confidence bound of the gain."""
        import numpy as np

        return float(np.quantile(self.estimates, 1 - confidence))

    def compute_p_value(self, limit: float) -> float:
        """Return the p-value of the hypothesis that the gain is at most `limit`."""
        import numpy as np

        return float((1 + np.count_nonzero(self.estimates <= limit)) / (1 + len(self.estimates)))


def estimate_pessimistic_gain(
    better: Sequence[float],
    worse: Sequence[float],
    weights: Sequence[float],
    *,
    max_item_loss: float | None,
    samples: int,
    seed: int,
    exponential: bool = False,
) -> PessimisticGain:
    """Return the distribution of lower confidence bounds of the gain that `estimate_gain` estimates.

    The weights of the items and of one added item that is worse by `max_item_loss` are drawn from the flat Dirichlet
    distribution. For zeros and ones the bound is that of Clopper & Pearson. For a support that is bounded below, its
    coverage is a conjecture that no simulation has contradicted; docs/benchmarks-gate.md measures it (Gaffke 2005,
    Math. Methods of Operations Research 62; Learned-Miller & Thomas, arXiv:1905.06208, 2019).

    Args:
        better: As for `estimate_gain`.
        worse: As for `estimate_gain`.
        weights: As for `estimate_gain`.
        max_item_loss: Largest loss of an unseen item of mean weight. A larger loss of a seen item replaces it. None:
            the largest difference seen, in either direction.
        samples: Number of weightings.
        seed: Seed of the weightings.
        exponential: Whether the metric is the exponential of the ratio.
    """
    import numpy as np

    first, second, weight_array = (np.asarray(values, float) for values in (better, worse, weights))
    count, mean_weight = len(weight_array), weight_array.mean()
    differences = (first - second) / mean_weight
    seen = float(np.abs(differences).max() if max_item_loss is None else -differences.min())
    loss = max(max_item_loss or 0.0, seen)
    level = first.mean()  # the pessimistic item has the mean score of the better model
    items = np.stack([first, second, weight_array], axis=1)
    pessimistic = np.array([level, level + loss * mean_weight, mean_weight])
    generator = np.random.Generator(np.random.PCG64(seed))
    sums, step = [], max(1, MAX_DRAWS_PER_CHUNK // count)
    for start in range(0, samples, step):
        size = min(step, samples - start)
        drawn = generator.standard_exponential((size, count))
        sums.append(drawn @ items + generator.standard_exponential((size, 1)) * pessimistic)
    a, b, total = np.concatenate(sums).T
    own, other = a / total, b / total
    if exponential:
        own, other = np.exp(np.minimum(own, 700.0)), np.exp(np.minimum(other, 700.0))
    return PessimisticGain(own - other)


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
