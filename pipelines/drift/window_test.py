"""Permutation test of a window of prompts against all earlier prompts, on their embeddings.

Principal components and kernel features are computed from the window and the earlier prompts together, so that they
treat both alike. Without drift, the rank of the window's statistic among random windows is then uniform, and independent
of the ranks of all other windows (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005, chapter 8).
Ties and the screening with fewer permutations only lower the probability of small p-values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MEAN_SHIFT, MMD, COMBINED = "mean_shift", "mmd", "combined"
MAX_COMPONENTS = 32
ROWS_PER_COMPONENT = 4  # the fewest earlier prompts per principal component
KERNEL_FEATURES = 128  # cosines and sines of this number of frequencies
MAX_WIDTH = 1024  # wider embeddings are projected at random
# Without drift, the shift of the mean varies 64 to 73 times as much as the discrepancy (three corpora, 600 to 5,000
# earlier prompts). The mean gets twice the weight, because it finds foreign topics earlier (docs/reference/benchmarks-drift.md).
KERNEL_WEIGHT = 35.0
SCREENING_PERMUTATIONS = 199
MAX_SCREENED_RANK = 10  # p up to 0.05: the window is tested with all permutations
PERMUTATIONS = 4_999
PERMUTATIONS_PER_BLOCK = 400


@dataclass(frozen=True)
class WindowTest:
    """The statistics of a window and their permutation p-values, by name: MEAN_SHIFT, MMD and COMBINED.

    Attributes:
        statistics: squared shift of the mean in standard deviations, squared discrepancy, and their weighted sum.
        p_values: p-values. The alarm uses COMBINED, whose statistic was divided by the inflation.
        expected: mean of the combined statistic without drift.
    """

    statistics: dict[str, float]
    p_values: dict[str, float]
    expected: float


def reduce_width(embeddings: np.ndarray) -> np.ndarray:
    """Return embeddings of at most MAX_WIDTH columns, by a Gaussian projection that does not depend on the data.

    The projection keeps distances up to a few percent (Johnson and Lindenstrauss 1984).
    """
    width = embeddings.shape[1]
    if width <= MAX_WIDTH:
        return embeddings
    projection = np.random.default_rng(0).standard_normal((width, MAX_WIDTH), dtype=np.float32) / MAX_WIDTH**0.5
    projected: np.ndarray = embeddings @ projection
    return projected


def compute_features(embeddings: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the features of prompts (prompts x features), and the number of principal components among them.

    The first columns are whitened principal components; the difference of their means is the shift of the mean. The
    others are random Fourier features of a Gaussian kernel on these components (Rahimi and Recht, NIPS 2007); the
    difference of their means approximates the maximum mean discrepancy (Gretton et al., JMLR 13, 2012). The kernel's
    width is the root of the number of components, which is the median heuristic for whitened components.
    """
    from scipy.sparse.linalg import eigsh

    centred = embeddings - embeddings.mean(axis=0)
    covariance = centred.T @ centred / len(centred)
    count = min(MAX_COMPONENTS, covariance.shape[0] - 1, len(embeddings) // ROWS_PER_COMPONENT)
    if not covariance.any():  # equal embeddings, from which ARPACK cannot start
        values, vectors = np.zeros(1), np.zeros((len(covariance), 1))
    else:
        # ARPACK needs a start outside the null space, which contains the vector of ones if a layer norm made the rows.
        start = np.random.default_rng(0).standard_normal(len(covariance))
        values, vectors = eigsh(covariance.astype(np.float64), k=count, v0=start)
    used = values > max(values[-1] * 1e-9, 1e-12)
    whitened = centred @ (vectors[:, used] / np.sqrt(values[used])).astype(np.float32)
    generator = np.random.default_rng(0)
    frequencies = generator.standard_normal((whitened.shape[1], KERNEL_FEATURES), dtype=np.float32)
    angles = whitened @ (frequencies / whitened.shape[1] ** 0.5)  # a NumPy scalar would make it float64
    kernel = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / KERNEL_FEATURES**0.5
    return np.concatenate([whitened, kernel], axis=1), whitened.shape[1]


def compare_window(
    embeddings: np.ndarray, size: int, generator: np.random.Generator, inflation: float = 1.0
) -> WindowTest:
    """Compare the last `size` prompts with those before them.

    A window whose first 199 permutations give p ≤ 0.05 is tested with 4,999 permutations.

    Args:
        embeddings: prompts in chronological order (prompts x width).
        size: number of prompts of the window.
        generator: draws the permutations.
        inflation: at least 1; the combined statistic is divided by it (see `estimate_inflation`).
    """
    features, components = compute_features(embeddings)
    observed = _compute_statistics(features, components, np.arange(len(features) - size, len(features))[None])
    observed[:, 2] /= inflation
    drawn = _draw_statistics(features, components, size, generator, SCREENING_PERMUTATIONS)
    ranks = 1 + np.count_nonzero(drawn >= observed, axis=0)
    if ranks[2] <= MAX_SCREENED_RANK:
        more = _draw_statistics(features, components, size, generator, PERMUTATIONS - SCREENING_PERMUTATIONS)
        drawn = np.concatenate([drawn, more])
        ranks = 1 + np.count_nonzero(drawn >= observed, axis=0)
    names = (MEAN_SHIFT, MMD, COMBINED)
    observed[:, 2] *= inflation
    return WindowTest(
        dict(zip(names, observed[0].tolist(), strict=True)),
        dict(zip(names, (ranks / (1 + len(drawn))).tolist(), strict=True)),
        float(drawn[:, 2].mean()),
    )


def draw_windows(prompts: int, size: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return random windows of distinct prompts (count x size) by Floyd's algorithm (Bentley, CACM 30, 1987).

    Its time does not depend on the number of prompts.
    """
    rows = np.arange(count)
    is_chosen: np.ndarray = np.zeros((count, prompts), bool)
    windows: np.ndarray = np.empty((count, size), np.int64)
    for column, last in enumerate(range(prompts - size, prompts)):
        drawn = generator.integers(0, last + 1, count)
        windows[:, column] = np.where(is_chosen[rows, drawn], last, drawn)
        is_chosen[rows, windows[:, column]] = True
    return windows


def _draw_statistics(
    features: np.ndarray, components: int, size: int, generator: np.random.Generator, count: int
) -> np.ndarray:
    """Return the statistics of random windows (count x 3)."""
    parts = []
    for begin in range(0, count, PERMUTATIONS_PER_BLOCK):
        block = min(PERMUTATIONS_PER_BLOCK, count - begin)
        windows = draw_windows(len(features), size, block, generator)
        parts.append(_compute_statistics(features, components, windows))
    statistics: np.ndarray = np.concatenate(parts)
    return statistics


def _compute_statistics(features: np.ndarray, components: int, windows: np.ndarray) -> np.ndarray:
    """Return the shift of the mean, the discrepancy and the combined statistic of windows (windows x 3).

    Args:
        features: features of the prompts, components first.
        components: number of principal components.
        windows: indices of the prompts of each window (windows x size).
    """
    from scipy import sparse

    count, size = windows.shape
    rest = len(features) - size
    starts = np.arange(0, windows.size + 1, size)
    sums = sparse.csr_array((np.ones(windows.size, np.float32), windows.ravel(), starts), (count, len(features)))
    differences = (sums @ features) * (1 / size + 1 / rest) - features.sum(axis=0) / rest
    mean_shift = np.square(differences[:, :components]).sum(axis=1)
    discrepancy = np.square(differences[:, components:]).sum(axis=1)
    statistics: np.ndarray = np.stack([mean_shift, discrepancy, mean_shift + KERNEL_WEIGHT * discrepancy], axis=1)
    return statistics.astype(np.float64)


def estimate_inflation(tests: Sequence[WindowTest]) -> float:
    """Return how much larger the combined statistic of windows without drift is than that of random windows.

    Prompts of one window are alike if a few users, or a day's event, send many of them. As for overdispersed counts
    (Wedderburn, Biometrika 61, 1974), the statistic is divided by the mean ratio. It is at least 1, so that ranks only
    increase and the bound on false alarms still holds.
    """
    ratios = [test.statistics[COMBINED] / test.expected for test in tests if test.expected]
    return max(1.0, float(np.mean(ratios))) if ratios else 1.0
