"""Intervals for the difference between two models measured on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CHUNK = 1000  # resamples drawn at once: bounds the memory to CHUNK × items


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval that holds it with the confidence asked for."""

    value: float
    low: float
    high: float


def ratio(totals: Sequence[float], weights: Sequence[float]) -> float:
    """Σ totals / Σ weights: the loss a token of all items together, not the mean of the items' means."""
    return float(sum(totals) / sum(weights))


def paired_bootstrap(
    candidate: Sequence[float], other: Sequence[float], weights: Sequence[float], *, samples: int, confidence: float, seed: int
) -> Interval:
    """Interval of ratio(candidate) − ratio(other), items resampled in pairs.

    Percentile bootstrap (Efron & Tibshirani 1993, ch. 13) over items, both models on the same resample (Koehn, EMNLP 2004). All three
    sequences have one entry an item; `weights` are the items' token counts.
    """
    import numpy as np

    difference = np.asarray(candidate, float) - np.asarray(other, float)
    return _percentiles(difference, np.asarray(weights, float), samples, confidence, seed)


def bootstrap(values: Sequence[float], weights: Sequence[float], *, samples: int, confidence: float, seed: int) -> Interval:
    """Interval of ratio(values), items resampled."""
    import numpy as np

    return _percentiles(np.asarray(values, float), np.asarray(weights, float), samples, confidence, seed)


def _percentiles(totals: Any, weights: Any, samples: int, confidence: float, seed: int) -> Interval:
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(seed))
    count, estimates = len(totals), []
    for start in range(0, samples, CHUNK):
        drawn = generator.integers(0, count, size=(min(CHUNK, samples - start), count))
        estimates.append(totals[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(estimates), [tail, 1 - tail])
    return Interval(float(totals.sum() / weights.sum()), float(low), float(high))


def paired_perplexity(
    candidate: Sequence[float], other: Sequence[float], weights: Sequence[float], *, samples: int, confidence: float, seed: int
) -> Interval:
    """Interval of exp(ratio(other)) − exp(ratio(candidate)), items resampled in pairs: how much lower the candidate's perplexity is."""
    import numpy as np

    both = np.stack([np.asarray(candidate, float), np.asarray(other, float)], axis=1)
    counts = np.asarray(weights, float)
    generator = np.random.Generator(np.random.PCG64(seed))
    estimates = []
    for start in range(0, samples, CHUNK):
        drawn = generator.integers(0, len(counts), size=(min(CHUNK, samples - start), len(counts)))
        loss = both[drawn].sum(axis=1) / counts[drawn].sum(axis=1)[:, None]
        estimates.append(np.exp(loss[:, 1]) - np.exp(loss[:, 0]))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(estimates), [tail, 1 - tail])
    own, others = both.sum(axis=0) / counts.sum()
    return Interval(float(np.exp(others) - np.exp(own)), float(low), float(high))
