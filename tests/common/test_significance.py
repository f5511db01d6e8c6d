"""Confidence intervals have their nominal coverage, and tests agree with reference implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from components.common import significance

OPTIONS = {"samples": 4000, "seed": 1}


def test_estimate_is_difference_per_token() -> None:
    interval = significance.estimate_gain([20.0, 40.0], [10.0, 30.0], [10, 10], **OPTIONS).compute_interval(0.95)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)


def test_interval_has_nominal_coverage() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        other = generator.normal(3.0, 1.0, 120)
        candidate = other + generator.normal(-0.1, 0.5, 120)
        interval = significance.estimate_gain(other, candidate, [1] * 120, samples=1000, seed=trial).compute_interval(
            0.95
        )
        covered += interval.low <= 0.1 <= interval.high
    assert 0.90 <= covered / 200 <= 0.99


def test_paired_items_detect_small_difference() -> None:
    other = np.random.default_rng(3).normal(100.0, 50.0, 200)
    gain = significance.estimate_pessimistic_gain(other, other - 1.0, [50] * 200, max_item_loss=0.1, **OPTIONS)
    assert gain.compute_lower_bound(0.95) > 0


@pytest.mark.parametrize(("ones", "items"), [(0, 30), (1, 40), (7, 20), (50, 60), (30, 30)])
def test_bound_of_binary_scores_is_clopper_pearson(ones: int, items: int) -> None:
    scores = [1.0] * ones + [0.0] * (items - ones)
    gain = significance.estimate_pessimistic_gain(
        scores, [0.0] * items, [1.0] * items, max_item_loss=0.0, samples=1, seed=2
    )
    low, _ = significance.compute_clopper_pearson_bounds(scores, 0.95)
    assert gain.compute_lower_bound(0.95) == pytest.approx(low, abs=1e-8)
    for share in (0.3, 0.9):
        exact = stats.binom.sf(ones - 1, items, share)
        assert gain.compute_p_value(share) == pytest.approx(exact, rel=1e-10)


def test_bound_without_any_difference_follows_the_rule_of_three() -> None:
    gain = significance.estimate_pessimistic_gain(
        [1.0] * 60, [1.0] * 60, [1.0] * 60, max_item_loss=5.0, samples=1, seed=2
    )
    assert gain.compute_lower_bound(0.95) == pytest.approx(-5 * (1 - 0.05 ** (1 / 60)), rel=1e-8)


@pytest.mark.parametrize("exponential", [False, True])
def test_small_p_values_are_possible(exponential: bool) -> None:
    """The registry requires p-values below 1e-4 after several failures."""
    generator = np.random.default_rng(4)
    other = generator.normal(3, 0.3, 400)
    gain = significance.estimate_pessimistic_gain(
        other, other - 0.5, [1] * 400, max_item_loss=1.0, samples=1000, seed=1, exponential=exponential
    )
    assert gain.compute_p_value(0.0) < 1e-5


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("samples", [1000, 1999, 9999, 10_000])
def test_bound_and_p_value_of_samples_agree(confidence: float, samples: int) -> None:
    gain = significance.SampledGain(np.sort(np.random.default_rng(samples).normal(0, 1, samples)))
    bound = gain.compute_lower_bound(confidence)
    for limit in (np.nextafter(bound, -1e9), bound, np.nextafter(bound, 1e9)):
        for inclusive in (False, True):
            holds = limit < bound if inclusive else limit <= bound
            p_value = gain.compute_p_value(limit, inclusive=inclusive)
            assert significance.is_within_level(p_value, confidence) == holds


def test_exact_and_sampled_distribution_agree() -> None:
    generator = np.random.default_rng(9)
    better, worse, weights = generator.normal(3, 1, 80), generator.normal(2.8, 1, 80), generator.integers(1, 9, 80)
    exact = significance.estimate_pessimistic_gain(better, worse, weights, max_item_loss=2.0, samples=1, seed=1)
    assert isinstance(exact, significance.LinearGain)
    draws = generator.dirichlet(np.ones(81), 20_000)
    sampled = (draws @ exact.differences) / (draws @ exact.weights)
    for limit in (-0.1, 0.0, 0.05):
        assert exact.compute_p_value(limit) == pytest.approx(np.mean(sampled <= limit), abs=0.012)
    assert exact.compute_lower_bound(0.95) == pytest.approx(np.quantile(sampled, 0.05), abs=0.003)


def test_item_without_weight_keeps_its_difference() -> None:
    gain = significance.LinearGain(np.array([1.0, 1.0, -2.0, -0.5]), np.array([1.0, 1.0, 0.0, 1.0]))
    bound = gain.compute_lower_bound(0.95)
    assert bound < -0.5
    assert gain.compute_p_value(bound) == pytest.approx(0.05)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.05, 0.3])
def test_required_items_are_the_fewest_that_show_a_share(share: float) -> None:
    items = significance.compute_required_items(share, 0.95)
    bounds = [significance.compute_clopper_pearson_bounds([0.0] * n, 0.95)[1] for n in (items - 1, items)]
    assert bounds[0] > share >= bounds[1]


def test_bound_scales_with_unit_and_weights() -> None:
    generator = np.random.default_rng(8)
    better, worse, weights = generator.normal(3, 1, 50), generator.normal(2, 1, 50), generator.integers(1, 9, 50)

    def compute_bound(unit: float, scale: float) -> float:
        return significance.estimate_pessimistic_gain(
            better * unit * scale, worse * unit * scale, weights * scale, max_item_loss=2.0 * unit, **OPTIONS
        ).compute_lower_bound(0.95)

    assert compute_bound(100, 7) == pytest.approx(100 * compute_bound(1, 1))


def test_same_seed_gives_same_interval() -> None:
    values = list(np.random.default_rng(5).normal(1, 1, 50))
    pair = (values, [v + 0.1 for v in values], [3] * 50)
    assert significance.estimate_gain(*pair, **OPTIONS).compute_interval(0.9) == significance.estimate_gain(
        *pair, **OPTIONS
    ).compute_interval(0.9)


def test_perplexity_gain_is_difference_of_exponentials() -> None:
    estimate = significance.estimate_gain([4.0, 4.0], [2.0, 2.0], [2, 2], exponential=True, **OPTIONS)
    assert estimate.value == pytest.approx(math.exp(2) - math.exp(1))


@pytest.mark.parametrize("exponential", [False, True])
def test_percentiles_match_scipy(exponential: bool) -> None:
    generator = np.random.default_rng(2)
    other, candidate, tokens = (
        generator.normal(30, 3, 50),
        generator.normal(29, 3, 50),
        generator.integers(5, 30, 50).astype(float),
    )

    def gain(c: np.ndarray, o: np.ndarray, w: np.ndarray, axis: int = -1) -> np.ndarray:
        a, b = o.sum(axis) / w.sum(axis), c.sum(axis) / w.sum(axis)
        return np.exp(a) - np.exp(b) if exponential else a - b

    ours = significance.estimate_gain(other, candidate, tokens, samples=2000, seed=9, exponential=exponential)
    theirs = stats.bootstrap(
        (candidate, other, tokens), gain, paired=True, n_resamples=2000, method="percentile", vectorized=True,
        rng=np.random.Generator(np.random.PCG64(9)),
    )  # fmt: skip
    interval = ours.compute_interval(0.95)
    assert ours.value == pytest.approx(gain(candidate, other, tokens), rel=1e-9)
    assert (interval.low, interval.high) == pytest.approx(tuple(theirs.confidence_interval), rel=1e-9)


@pytest.mark.parametrize("exponential", [False, True])
def test_standard_error_matches_bootstrap(exponential: bool) -> None:
    generator = np.random.default_rng(4)
    tokens = generator.integers(5, 30, 400).astype(float)
    other, candidate = tokens * generator.normal(3, 0.3, 400), tokens * generator.normal(2.9, 0.3, 400)
    estimate = significance.estimate_gain(other, candidate, tokens, samples=4000, seed=3, exponential=exponential)
    assert estimate.standard_error == pytest.approx(float(np.std(estimate.estimates)), rel=0.05)


def test_holm_correction_matches_textbook() -> None:
    assert significance.apply_holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.apply_holm_correction([0.6, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize(("first", "second"), [(8, 2), (0, 5), (3, 3), (25, 40)])
def test_mcnemar_is_exact_binomial_test_of_discordant_items(first: int, second: int) -> None:
    candidate = [1.0] * first + [0.0] * second + [1.0] * 7 + [0.0] * 4
    other = [0.0] * first + [1.0] * second + [1.0] * 7 + [0.0] * 4
    result = significance.run_mcnemar_test(candidate, other)
    tail_probability = sum(math.comb(first + second, k) for k in range(min(first, second) + 1)) / 2 ** (first + second)
    assert (result.only_candidate, result.only_other) == (first, second)
    assert result.p == pytest.approx(min(1.0, 2 * tail_probability))


def test_mcnemar_of_equal_models_is_one() -> None:
    assert significance.run_mcnemar_test([1.0, 0.0], [1.0, 0.0]).p == 1.0


def test_harm_p_value_is_small_only_beyond_allowed_loss() -> None:
    generator = np.random.default_rng(6)
    other = generator.normal(0, 1, 80)
    worse = significance.estimate_gain(other - 1 + generator.normal(0, 0.5, 80), other, [1] * 80, **OPTIONS)
    assert worse.compute_harm_p_value(0.0) < 0.001
    assert worse.compute_harm_p_value(2.0) > 0.99
