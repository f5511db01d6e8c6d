"""Probabilities of weighted sums of exponential variables agree with closed forms and with simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from components.common.exponential_sums import compute_probability_below_zero


@pytest.mark.parametrize(("ones", "items"), [(1, 40), (7, 20), (50, 60), (30, 30), (2, 2), (900, 1000)])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.99])
def test_sum_of_two_values_is_a_binomial_tail(ones: int, items: int, share: float) -> None:
    coefficients = np.array([1 - share] * ones + [-share] * (items - ones + 1))
    exact = stats.binom.sf(ones - 1, items, share)
    assert compute_probability_below_zero(coefficients) == pytest.approx(exact, rel=1e-11, abs=1e-290)


@pytest.mark.parametrize("items", [1, 2, 29, 299, 20_000])
def test_one_negative_value_gives_a_power(items: int) -> None:
    coefficients = np.array([0.05] * items + [-4.95])
    assert compute_probability_below_zero(coefficients) == pytest.approx(0.99**items, rel=1e-11)
    assert compute_probability_below_zero(-coefficients) == pytest.approx(1 - 0.99**items, rel=1e-11)


@pytest.mark.parametrize("seed", range(12))
def test_distinct_values_give_a_sum_over_the_negative_ones(seed: int) -> None:
    """By partial fractions, P is the sum over the negative c of the product over the other d of c / (c − d)."""
    generator = np.random.default_rng(seed)
    values = generator.normal(0.3, 1, 6) * 10.0 ** generator.integers(-3, 4)
    negative = [c for c in values if c < 0]
    exact = sum(np.prod([c / (c - d) for d in values if d != c]) for c in negative)
    assert compute_probability_below_zero(values) == pytest.approx(exact, rel=1e-7, abs=1e-9)


def test_values_of_very_different_size_agree_with_a_simulation() -> None:
    generator = np.random.default_rng(5)
    values = np.concatenate([generator.lognormal(0, 2, 40) - 1.5, [-60.0]])
    sums = generator.standard_exponential((100_000, 41)) @ values
    simulated = np.mean(sums <= 0)
    assert compute_probability_below_zero(values) == pytest.approx(simulated, abs=0.006)


def test_sums_of_one_sign_are_certain() -> None:
    assert compute_probability_below_zero(np.array([1.0, 2.0, 0.0])) == 0.0
    assert compute_probability_below_zero(np.array([-1.0, 0.0])) == 1.0
    assert compute_probability_below_zero(np.zeros(3)) == 1.0
    assert compute_probability_below_zero(np.zeros(3), inclusive=False) == 0.0
    assert compute_probability_below_zero(np.array([1.0] * 50 + [-1e-20])) == pytest.approx(0.0, abs=1e-300)
    assert compute_probability_below_zero(np.array([1e-20] * 5 + [-1.0])) == pytest.approx(1.0)
