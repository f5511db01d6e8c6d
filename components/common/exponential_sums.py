"""The distribution of a weighted sum of independent standard exponential variables, to the precision of a float."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray

STEP = 0.05  # of the integration; the relative error is below 1e-12 (tests/common/test_exponential_sums.py)
STEPS_PER_BLOCK = 40
MAX_BLOCKS = 20
MAX_TERMS_PER_CHUNK = 50_000  # coefficients evaluated at once; limits the memory of a block to 32 MB


def compute_probability_below_zero(coefficients: Array, *, inclusive: bool = True) -> float:
    """Return the probability that Σ coefficient × exponential is below zero.

    The generating function is integrated along a path through its saddle point with the trapezoidal rule, which keeps
    small probabilities precise (Rice, SIAM Journal on Scientific and Statistical Computing 1, 1980).

    Args:
        coefficients: Finite numbers, one per variable.
        inclusive: Whether a sum of exactly zero counts, which occurs if all coefficients are zero.
    """
    import numpy as np

    values = coefficients[coefficients != 0]
    if not len(values):
        return float(inclusive)
    if values.min() > 0 or values.max() < 0:
        return float(values.max() < 0)
    distinct, counts = np.unique(values / np.abs(values).max(), return_counts=True)
    if distinct @ counts < 0:  # the smaller tail is integrated
        return 1.0 - _integrate_lower_tail(-distinct, counts)
    return _integrate_lower_tail(distinct, counts)


def _integrate_lower_tail(values: Array, counts: Array) -> float:
    """Return the probability of a negative sum whose mean is not negative."""
    import numpy as np
    from scipy import optimize

    def compute_slope(point: float) -> float:
        return float(counts @ (values / (1 - point * values)))

    def compute_scale(point: float) -> float:
        return float((counts @ (values / (1 - point * values)) ** 2 + 1 / point**2) ** -0.5)

    pole = 1 / values.min()
    nearest = pole * (1 - 1e-15)
    is_inside = compute_slope(nearest) < 0 < compute_slope(0.0)
    saddle = optimize.brentq(compute_slope, nearest, 0.0) if is_inside else (nearest if compute_slope(0.0) > 0 else 0.0)
    # The path must not touch the pole of the integrand at zero.
    spread = float(counts @ values**2) ** -0.5
    point = min(saddle, max(-spread / 2, pole / 2))
    scale, total = compute_scale(point), 0.0
    for block in range(MAX_BLOCKS):
        steps = STEP * np.arange(block * STEPS_PER_BLOCK, (block + 1) * STEPS_PER_BLOCK)
        path = point + 1j * scale * np.sinh(steps)
        logarithm: Array = np.zeros(len(path), complex)
        for start in range(0, len(values), MAX_TERMS_PER_CHUNK):
            part = slice(start, start + MAX_TERMS_PER_CHUNK)
            logarithm -= counts[part] @ np.log1p(-np.multiply.outer(values[part], path))
        terms = np.exp(logarithm) / -path * np.cosh(steps)
        total += float(terms.real.sum()) - (float(terms[0].real) / 2 if block == 0 else 0.0)
        if abs(terms[-1]) <= 1e-18 * abs(total):
            break
    return min(1.0, max(0.0, total * scale * STEP / np.pi))
