"""How far two models lie apart on the same items, and how sure that is.

A metric over items is r = Σ score / Σ weight (weights are token counts for a loss, 1 for a share of right answers), or exp(r). A gain is
the difference of two models' metrics, in the metric's better direction. Items are resampled in pairs: both models on the same resample
(Koehn, EMNLP 2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DRAWN_AT_ONCE = 4_000_000  # items drawn at once: bounds the memory of the resamples


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that holds it with the confidence asked for."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """A gain over `items` items with what resampling them gave: `estimates`, and `pivots`, each (estimate − gain) / its standard error."""

    value: float
    error: float
    items: int
    estimates: Any
    pivots: Any

    def interval(self, confidence: float) -> Interval:
        """The percentile interval (Efron & Tibshirani 1993, ch. 13), confidence two-sided."""
        import numpy as np

        tail = (1 - confidence) / 2
        low, high = np.quantile(self.estimates, [tail, 1 - tail])
        return Interval(self.value, float(low), float(high))

    def at_least(self, confidence: float) -> float:
        """The gain that the true one exceeds with this (one-sided) confidence, by the more careful of two ways.

        Studentised (Efron & Tibshirani, ch. 12.5) errs too often where right and wrong differ on few items; percentiles, even at levels
        widened for small samples (Hesterberg, The American Statistician 69, 2015, section 5.3), err where the differences are skewed.
        """
        import numpy as np

        studentised = self.value - self.error * float(np.quantile(self.pivots, confidence)) if self.error else self.value
        return min(studentised, float(np.quantile(self.estimates, _widened(1 - confidence, self.items))))

    def at_most(self, confidence: float) -> float:
        """The gain that the true one stays below with this (one-sided) confidence."""
        import numpy as np

        studentised = self.value - self.error * float(np.quantile(self.pivots, 1 - confidence)) if self.error else self.value
        return max(studentised, float(np.quantile(self.estimates, 1 - _widened(1 - confidence, self.items))))

    def harm(self, allowed: float) -> float:
        """p of the hypothesis that the gain is no worse than −`allowed`, against its being worse: a studentised test, one-sided."""
        import numpy as np

        if not self.error:
            return 0.0 if self.value < -allowed else 1.0
        from scipy import stats

        reached = (self.value + allowed) / self.error
        as_far = np.count_nonzero(self.pivots <= reached)
        if as_far:
            return float((1 + as_far) / (1 + len(self.pivots)))
        # Farther out than any resample: 1 / resamples would be too much where many slices are looked at, so Student's t says how far.
        return float(min(stats.t.cdf(reached, self.items - 1), 1 / (1 + len(self.pivots))))


def _widened(tail: float, items: int) -> float:
    """Φ(√(n/(n−1)) · t(tail, n−1)): the level at which percentiles of n items are as wide as Student's t asks."""
    from scipy import stats

    return float(stats.norm.cdf((items / (items - 1)) ** 0.5 * stats.t.ppf(tail, items - 1)))


def ratio(totals: Sequence[float], weights: Sequence[float]) -> float:
    """Σ totals / Σ weights: the loss a token of all items together, not the mean of the items' means."""
    return float(sum(totals) / sum(weights))


def gain(
    better: Sequence[float], worse: Sequence[float], weights: Sequence[float], *, samples: int, seed: int, exponential: bool = False
) -> Gain:
    """The gain ratio(better) − ratio(worse), or the difference of their exponentials. One entry an item in each; at least two items.

    For a metric that should be low, `better` is the other model and `worse` the candidate.
    """
    import numpy as np

    scores, counts = np.stack([np.asarray(better, float), np.asarray(worse, float)], axis=1), np.asarray(weights, float)
    centre = scores.sum(axis=0) / counts.sum()
    moments = _moments(scores - counts[:, None] * centre, counts)
    value, error = (float(one[0]) for one in _differences(moments.sum(axis=0)[None], centre, len(counts), exponential))
    estimates, errors = _differences(_resampled(moments, samples, seed), centre, len(counts), exponential)
    return Gain(value, error, len(counts), estimates, _pivots(estimates - value, errors))


def _moments(residuals: Any, weights: Any) -> Any:
    """What each item adds to the sums that two ratios and the standard error of their difference are computed from, (items, 9)."""
    import numpy as np

    u, v, w = residuals[:, 0], residuals[:, 1], weights
    return np.stack([u, v, w, u * u, v * v, u * v, u * w, v * w, w * w], axis=1)


def _resampled(moments: Any, samples: int, seed: int) -> Any:
    """The sums of the moments over each resample of the items, (samples, 9)."""
    import numpy as np

    count = len(moments)
    generator = np.random.Generator(np.random.PCG64(seed))
    found, step = [], max(1, DRAWN_AT_ONCE // count)
    for start in range(0, samples, step):
        size = min(step, samples - start)
        drawn = generator.integers(0, count, size=(size, count)) + count * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count).astype(float)
        found.append(times @ moments)
    return np.concatenate(found)


def _differences(sums: Any, centre: Any, items: int, exponential: bool) -> tuple[Any, Any]:
    """The difference and its standard error, from sums of moments (any number of rows): linearised, as for a ratio estimator
    (Cochran, Sampling Techniques, 1977, section 6.4)."""
    import numpy as np

    u, v, w, uu, vv, uv, uw, vw, ww = sums.T
    du, dv = u / w, v / w
    a, b = centre[0] + du, centre[1] + dv
    if exponential:
        a, b = np.exp(np.minimum(a, 700.0)), np.exp(np.minimum(b, 700.0))
    slope_a, slope_b = (a, b) if exponential else (1.0, 1.0)
    one, other = slope_a**2 * (uu - 2 * du * uw + du**2 * ww), slope_b**2 * (vv - 2 * dv * vw + dv**2 * ww)
    squares = one + other - 2 * slope_a * slope_b * (uv - du * vw - dv * uw + du * dv * ww)
    squares = np.where(squares > 1e-12 * (one + other), squares, 0.0)  # below it, rounding is all there is
    return a - b, np.sqrt(squares * items / (items - 1)) / w


def _pivots(distances: Any, errors: Any) -> Any:
    """distance / error; a resample without spread counts as far away, unless it lies where the estimate does."""
    import numpy as np

    near = np.abs(distances) <= 1e-12
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(errors > 0, distances / errors, np.where(near, 0.0, np.sign(distances) * 1e6))
    return np.clip(found, -1e6, 1e6)


def share_within(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The ends that the true share of ones among zeros and ones lies above, and below, each with this confidence, one-sided.

    Clopper and Pearson's (Biometrika 26, 1934), which hold for few items too, and where all are alike.
    """
    from scipy import stats

    ones, count = round(sum(values)), len(values)
    low = stats.beta.ppf(1 - confidence, ones, count - ones + 1) if ones else 0.0
    high = stats.beta.ppf(confidence, ones + 1, count - ones) if ones < count else 1.0
    return float(low), float(high)


def unseen(items: int, confidence: float) -> float:
    """The largest share of items that may differ, with this confidence, where none of so many did: 1 − (1 − confidence)^(1/items)."""
    return float(1 - (1 - confidence) ** (1 / items))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number, in order (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected


@dataclass(frozen=True)
class McNemar:
    """Items that only one of two models got right, and the exact two-sided p that they are as many on either side (McNemar 1947)."""

    only_candidate: int
    only_other: int
    p: float


def mcnemar(candidate: Sequence[float], other: Sequence[float]) -> McNemar:
    """McNemar's exact test on right (1) and wrong (0), one entry an item."""
    from scipy import stats

    first = sum(1 for c, o in zip(candidate, other, strict=True) if c > o)
    second = sum(1 for c, o in zip(candidate, other, strict=True) if o > c)
    p = float(stats.binomtest(first, first + second, 0.5).pvalue) if first + second else 1.0
    return McNemar(first, second, p)
