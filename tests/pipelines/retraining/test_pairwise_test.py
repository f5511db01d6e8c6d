"""The anytime-valid comparison of two models: false decisions and power over whole sequences, with fixed seeds.

Fast tier: simulations with numpy in this process, below a second each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pipelines.gateway.canary_comparison import log_evidence
from pipelines.retraining import pairwise_test
from pipelines.retraining.pairwise_test import ALPHA, compare, compute_log_evidence

RUNS, PAIRS = 600, 500


def draw_preferences(generator: np.random.Generator, share: float) -> np.ndarray:
    return 2.0 * (generator.random((RUNS, PAIRS)) < share) - 1


def draw_skewed(generator: np.random.Generator) -> np.ndarray:
    """Mean 0: a rare large win, and many small losses."""
    return np.where(generator.random((RUNS, PAIRS)) < 0.1, 0.9, -0.1)


def draw_ties(generator: np.random.Generator) -> np.ndarray:
    return generator.choice([-1.0, 0.0, 1.0], (RUNS, PAIRS), p=[0.1, 0.8, 0.1])


def draw_dependent(generator: np.random.Generator) -> np.ndarray:
    """The size of a difference depends on the earlier pairs; its expectation given them is 0."""
    signs = draw_preferences(generator, 0.5)
    sizes = np.where(np.cumsum(signs, axis=1) - signs > 0, 1.0, 0.2)
    return signs * sizes


@pytest.mark.parametrize(
    "draw", [lambda generator: draw_preferences(generator, 0.5), draw_skewed, draw_ties, draw_dependent]
)
def test_false_decisions_at_any_time_are_rarer_than_alpha(draw: Callable[[np.random.Generator], np.ndarray]) -> None:
    """Within 3 standard errors of ALPHA; a z-test after each pair decides wrongly in a third of these runs."""
    differences = draw(np.random.default_rng(1))
    for sign in (1, -1):
        reached = compute_log_evidence(sign * differences).max(axis=1) >= -np.log(ALPHA)
        assert reached.mean() <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / RUNS)


def test_z_test_after_each_pair_decides_wrongly_much_more_often() -> None:
    differences = draw_preferences(np.random.default_rng(1), 0.5)
    counts = np.arange(1, PAIRS + 1)
    z = differences.cumsum(axis=1) / np.sqrt(counts)
    assert (z[:, 20:].max(axis=1) > 1.645).mean() > 3 * ALPHA


@pytest.mark.parametrize(("share", "found", "median"), [(0.55, 0.2, None), (0.6, 0.9, 220), (0.7, 0.99, 60)])
def test_power_of_500_pairs(share: float, found: float, median: int | None) -> None:
    """The figures of docs/explanation/statistics.md: share of the runs that decide, and the median number of pairs."""
    hits = compute_log_evidence(draw_preferences(np.random.default_rng(2), share)) >= -np.log(ALPHA)
    decided = hits.any(axis=1)
    assert decided.mean() >= found
    if median is not None:
        assert np.median(hits[decided].argmax(axis=1) + 1) <= median


def test_equal_model_with_other_mistakes_passes_if_only_mistakes_are_corrected() -> None:
    """The exception of docs/explanation/statistics.md: the pairs are requests that the champion answered wrongly."""
    generator = np.random.default_rng(1)
    is_wrong = generator.random((200, 2, 1000)) < 0.2  # runs × models × requests
    runs = [1.0 - candidate[champion] for champion, candidate in is_wrong]
    assert [compare(list(differences)).decision for differences in runs] == ["better"] * 200
    # A random sample has the answers that the champion got right, too.
    sampled = [compare(list(champion.astype(float) - candidate)).decision for champion, candidate in is_wrong]
    assert sampled.count("better") <= 0.05 * len(sampled)


def test_evidence_of_preferences_equals_that_of_the_canary() -> None:
    assert compute_log_evidence([1.0] * 9 + [-1.0] * 3)[-1] == pytest.approx(log_evidence(9, 3))


def test_decision_is_the_first_one_and_stays() -> None:
    wins = [1.0] * 20
    result = compare(wins + [-1.0] * 40)
    assert (result.decision, result.decided_after) == ("better", 7)
    assert compare([-each for each in wins]).decision == "worse"
    assert compare([1.0, -1.0] * 10).decision == "undecided"
    assert compare([0.0] * 1000).decision == "undecided"


def test_tolerated_loss_accepts_an_equal_candidate() -> None:
    differences = np.random.default_rng(3).choice([-0.1, 0.1], 800)
    assert compare(differences.tolist()).decision == "undecided"
    assert compare(differences.tolist(), max_loss=0.2).decision == "better"


def test_bounds_contain_the_mean_at_all_times() -> None:
    generator, missed = np.random.default_rng(4), 0
    for _ in range(100):
        differences = generator.choice([-1.0, 0.0, 1.0], 100, p=[0.2, 0.4, 0.4])  # mean 0.2
        low, high = pairwise_test.compute_bounds(differences)
        assert low < high
        missed += not low <= 0.2 <= high
    assert missed <= 10
    assert compare([0.5] * 200).low > 0.3


@pytest.mark.parametrize("differences", [[], [1.5], [float("nan")]])
def test_invalid_differences_are_refused(differences: list[float]) -> None:
    with pytest.raises(ValueError, match="differences from -1 to 1"):
        compare(differences)
