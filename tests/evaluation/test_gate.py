"""The gate's rules, and the sentences it gives."""

from __future__ import annotations

import numpy as np
import pytest

from components.evaluation import gate
from components.evaluation.config import EvaluationConfig, Rule

TOKENS = [10] * 60
NOISE = np.random.default_rng(0).normal(0, 2.0, 60)
BASE = list(30 + NOISE)


def judge(candidate: list[float], rule: Rule, **others: list[float]) -> gate.Ruling:
    config = EvaluationConfig(gate=[rule], bootstrap_samples=1000)
    return gate.rulings({"candidate": candidate, "base": BASE, **others}, TOKENS, config, seed=1)[0]


def test_a_clear_gain_over_the_base_is_accepted_with_its_interval() -> None:
    ruling = judge([v - 5 for v in BASE], Rule(against="base", min_gain=0.0))
    assert ruling.holds
    assert "0.5000 better than the base" in ruling.reason
    assert "60 items" in ruling.reason


def test_a_clear_loss_is_refused() -> None:
    ruling = judge([v + 5 for v in BASE], Rule(against="base", min_gain=0.0))
    assert not ruling.holds
    assert "0.5000 worse than the base" in ruling.reason


def test_a_difference_too_small_for_the_sample_is_refused_and_called_so() -> None:
    wobble = np.random.default_rng(1).normal(0, 3, 60)
    ruling = judge([v + w for v, w in zip(BASE, wobble, strict=True)], Rule(against="base", min_gain=0.0))
    assert not ruling.holds
    assert "too small a difference for this many items" in ruling.reason


def test_a_gain_below_the_least_gain_is_refused() -> None:
    assert not judge([v - 5 for v in BASE], Rule(against="base", min_gain=0.6)).holds


def test_a_loss_within_what_is_allowed_is_accepted() -> None:
    worse = [v + 1 for v in BASE]
    assert judge(worse, Rule(against="incumbent", max_loss=0.2), incumbent=BASE).holds
    assert not judge(worse, Rule(against="incumbent", max_loss=0.05), incumbent=BASE).holds


def test_without_a_model_in_service_the_rule_against_it_holds_and_says_why() -> None:
    ruling = judge(BASE, Rule(against="incumbent", min_gain=0.0))
    assert ruling.holds
    assert ruling.reason == "There is no model in service to compare with."


def test_a_number_is_reached_only_by_the_whole_interval() -> None:
    assert judge(BASE, Rule(against=3.5, min_gain=0.0)).holds
    assert not judge(BASE, Rule(against=3.0, min_gain=0.0)).holds


def test_perplexity_is_judged_like_loss() -> None:
    better = [v - 5 for v in BASE]
    assert judge(better, Rule(metric="held_out.perplexity", against="base", min_gain=1.0)).holds
    assert not judge(better, Rule(metric="held_out.perplexity", against="base", min_gain=50.0)).holds


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_score_that_is_not_a_number_refuses(broken: float) -> None:
    ruling = judge([broken, *BASE[1:]], Rule(against="base", min_gain=0.0))
    assert not ruling.holds
    assert "not a finite number" in ruling.reason


def test_an_incumbent_whose_tokens_differ_is_not_compared_and_refuses() -> None:
    ruling = judge([v - 5 for v in BASE], Rule(against="incumbent", min_gain=0.0), incumbent=[])
    assert not ruling.holds
    assert ruling.reason == "The held_out.loss cannot be compared: the model in service has another tokenizer."
