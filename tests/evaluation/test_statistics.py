"""Intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from components.evaluation import statistics

OPTIONS = {"samples": 4000, "confidence": 0.95, "seed": 1}


def test_the_estimate_is_the_difference_a_token() -> None:
    found = statistics.paired_bootstrap([10.0, 30.0], [20.0, 40.0], [10, 10], **OPTIONS)
    assert (found.value, found.low, found.high) == (-1.0, -1.0, -1.0)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        other = generator.normal(3.0, 1.0, 120)
        candidate = other + generator.normal(-0.1, 0.5, 120)
        found = statistics.paired_bootstrap(candidate, other, [1] * 120, samples=1000, confidence=0.95, seed=trial)
        covered += found.low <= -0.1 <= found.high
    assert 0.90 <= covered / 200 <= 0.99


def test_pairing_finds_a_small_difference_between_items_that_differ_much() -> None:
    generator = np.random.default_rng(3)
    other = generator.normal(100.0, 50.0, 200)
    found = statistics.paired_bootstrap(other - 1.0, other, [50] * 200, **OPTIONS)
    assert found.high < 0


def test_the_same_seed_gives_the_same_interval() -> None:
    values = list(np.random.default_rng(5).normal(1, 1, 50))
    pair = (values, [v + 0.1 for v in values], [3] * 50)
    assert statistics.paired_bootstrap(*pair, **OPTIONS) == statistics.paired_bootstrap(*pair, **OPTIONS)


def test_perplexity_gains_are_the_difference_of_exponentials() -> None:
    found = statistics.paired_perplexity([2.0, 2.0], [4.0, 4.0], [2, 2], **OPTIONS)
    assert found.value == pytest.approx(math.exp(2) - math.exp(1))
