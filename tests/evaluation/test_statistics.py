"""Intervals hold what they promise, and agree with what others compute."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from components.evaluation import statistics

OPTIONS = {"samples": 4000, "seed": 1}


def test_the_estimate_is_the_difference_a_token() -> None:
    found = statistics.gain([20.0, 40.0], [10.0, 30.0], [10, 10], **OPTIONS).interval(0.95)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        other = generator.normal(3.0, 1.0, 120)
        candidate = other + generator.normal(-0.1, 0.5, 120)
        found = statistics.gain(other, candidate, [1] * 120, samples=1000, seed=trial).interval(0.95)
        covered += found.low <= 0.1 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_pairing_finds_a_small_difference_between_items_that_differ_much() -> None:
    other = np.random.default_rng(3).normal(100.0, 50.0, 200)
    assert statistics.gain(other, other - 1.0, [50] * 200, **OPTIONS).at_least(0.95) > 0


def test_the_same_seed_gives_the_same_interval() -> None:
    values = list(np.random.default_rng(5).normal(1, 1, 50))
    pair = (values, [v + 0.1 for v in values], [3] * 50)
    assert statistics.gain(*pair, **OPTIONS).interval(0.9) == statistics.gain(*pair, **OPTIONS).interval(0.9)


def test_perplexity_gains_are_the_difference_of_exponentials() -> None:
    found = statistics.gain([4.0, 4.0], [2.0, 2.0], [2, 2], exponential=True, **OPTIONS)
    assert found.value == pytest.approx(math.exp(2) - math.exp(1))


@pytest.mark.parametrize("exponential", [False, True])
def test_percentiles_are_those_of_scipy_over_the_same_resamples(exponential: bool) -> None:
    generator = np.random.default_rng(2)
    other, candidate, tokens = generator.normal(30, 3, 50), generator.normal(29, 3, 50), generator.integers(5, 30, 50).astype(float)

    def gain(c: np.ndarray, o: np.ndarray, w: np.ndarray, axis: int = -1) -> np.ndarray:
        a, b = o.sum(axis) / w.sum(axis), c.sum(axis) / w.sum(axis)
        return np.exp(a) - np.exp(b) if exponential else a - b

    ours = statistics.gain(other, candidate, tokens, samples=2000, seed=9, exponential=exponential)
    theirs = stats.bootstrap(
        (candidate, other, tokens), gain, paired=True, n_resamples=2000, method="percentile", vectorized=True,
        rng=np.random.Generator(np.random.PCG64(9)),
    )  # fmt: skip
    found = ours.interval(0.95)
    assert ours.value == pytest.approx(gain(candidate, other, tokens), rel=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval), rel=1e-9)


@pytest.mark.parametrize("exponential", [False, True])
def test_the_standard_error_is_what_resampling_says(exponential: bool) -> None:
    generator = np.random.default_rng(4)
    tokens = generator.integers(5, 30, 400).astype(float)
    other, candidate = tokens * generator.normal(3, 0.3, 400), tokens * generator.normal(2.9, 0.3, 400)
    found = statistics.gain(other, candidate, tokens, samples=4000, seed=3, exponential=exponential)
    assert found.error == pytest.approx(float(np.std(found.estimates)), rel=0.05)


def test_holm_is_what_statistics_books_compute() -> None:
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize(("first", "second"), [(8, 2), (0, 5), (3, 3), (25, 40)])
def test_mcnemar_is_the_exact_binomial_test_of_the_items_that_differ(first: int, second: int) -> None:
    candidate = [1.0] * first + [0.0] * second + [1.0] * 7 + [0.0] * 4
    other = [0.0] * first + [1.0] * second + [1.0] * 7 + [0.0] * 4
    found = statistics.mcnemar(candidate, other)
    below = sum(math.comb(first + second, k) for k in range(min(first, second) + 1)) / 2 ** (first + second)
    assert (found.only_candidate, found.only_other) == (first, second)
    assert found.p == pytest.approx(min(1.0, 2 * below))


def test_models_that_never_differ_have_nothing_to_test() -> None:
    assert statistics.mcnemar([1.0, 0.0], [1.0, 0.0]).p == 1.0


def test_the_p_of_harm_is_small_only_where_it_is_worse_than_allowed() -> None:
    generator = np.random.default_rng(6)
    other = generator.normal(0, 1, 80)
    worse = statistics.gain(other - 1 + generator.normal(0, 0.5, 80), other, [1] * 80, **OPTIONS)
    assert worse.harm(0.0) < 0.001
    assert worse.harm(2.0) > 0.99
