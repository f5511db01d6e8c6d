"""The gate's rules, and the sentences it gives."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy import stats

from components.evaluation import gate
from components.evaluation.config import EvaluationConfig, Rule
from components.evaluation.measured import Measured
from components.evaluation.task import Metric, Scores
from tests.evaluation.making import Numbers, items, losses, rights

TOKENS = [10] * 60
NOISE = np.random.default_rng(0).normal(0, 2.0, 60)
BASE = list(30 + NOISE)


def judge(candidate: list[float], rule: Rule, **others: list[float]) -> gate.Ruling:
    return ruling(losses({"candidate": candidate, "base": BASE, **others}, TOKENS), rule)


def ruling(task: Measured, rule: Rule, **changes: int) -> gate.Ruling:
    config = EvaluationConfig(bootstrap_samples=1000, **changes).model_copy(update={"gate": [rule]})  # type: ignore[arg-type]
    return gate.rulings({task.task.name: task}, "incumbent" in {*task.scores, *task.why_not}, config, seed=1)[0]


def test_a_clear_gain_over_the_base_is_accepted_with_its_interval() -> None:
    found = judge([v - 5 for v in BASE], Rule(against="base", min_gain=0.0))
    assert found.holds
    assert "0.5000 better than the base" in found.reason
    assert "60 items" in found.reason


def test_a_clear_loss_is_refused() -> None:
    found = judge([v + 5 for v in BASE], Rule(against="base", min_gain=0.0))
    assert not found.holds
    assert "0.5000 worse than the base" in found.reason


def test_a_candidate_equal_to_the_base_is_refused_and_called_equal() -> None:
    found = judge(BASE, Rule(against="base", min_gain=0.0))
    assert not found.holds
    assert found.reason == "held_out.loss is the same as that of the base in all 60 items; the rule asks for a gain above +0.0000."


def test_a_difference_too_small_for_the_sample_is_refused_and_called_so() -> None:
    wobble = np.random.default_rng(1).normal(0, 3, 60)
    found = judge([v + w for v, w in zip(BASE, wobble, strict=True)], Rule(against="base", min_gain=0.0))
    assert not found.holds
    assert "too small a difference for this many items" in found.reason


def test_a_gain_below_the_least_gain_is_refused() -> None:
    assert not judge([v - 5 for v in BASE], Rule(against="base", min_gain=0.6)).holds


def test_a_loss_within_what_is_allowed_is_accepted() -> None:
    worse = [v + 1 for v in BASE]
    assert judge(worse, Rule(against="incumbent", max_loss=0.2), incumbent=BASE).holds
    assert not judge(worse, Rule(against="incumbent", max_loss=0.05), incumbent=BASE).holds


def test_a_model_equal_to_the_one_in_service_loses_nothing() -> None:
    assert judge(BASE, Rule(against="incumbent", max_loss=0.0), incumbent=BASE).holds


def test_without_a_model_in_service_the_rule_against_it_holds_and_says_why() -> None:
    found = judge(BASE, Rule(against="incumbent", min_gain=0.0))
    assert found.holds
    assert found.reason == "There is no model in service to compare with."


def test_a_number_is_reached_only_with_confidence() -> None:
    assert judge(BASE, Rule(against=3.5, min_gain=0.0)).holds
    assert not judge(BASE, Rule(against=3.0, min_gain=0.0)).holds


def test_perplexity_is_judged_like_loss() -> None:
    better = [v - 5 for v in BASE]
    assert judge(better, Rule(metric="held_out.perplexity", against="base", min_gain=1.0)).holds
    assert not judge(better, Rule(metric="held_out.perplexity", against="base", min_gain=50.0)).holds


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_score_that_is_not_a_number_refuses(broken: float) -> None:
    found = judge([broken, *BASE[1:]], Rule(against="base", min_gain=0.0))
    assert not found.holds
    assert found.reason == "The held_out.loss of the candidate is not a finite number in 1 of 60 items."


def test_a_missing_score_refuses() -> None:
    found = ruling(losses({"candidate": BASE}, TOKENS), Rule(against="base", min_gain=0.0))
    assert not found.holds
    assert found.reason == "The held_out.loss of the base is missing."


def test_an_incumbent_whose_tokens_differ_is_not_compared_and_refuses() -> None:
    task = losses({"candidate": [v - 5 for v in BASE], "base": BASE}, TOKENS)
    task.why_not["incumbent"] = "the model in service has another tokenizer"
    found = ruling(task, Rule(against="incumbent", min_gain=0.0))
    assert not found.holds
    assert found.reason == "The held_out.loss cannot be compared: the model in service has another tokenizer."


def test_too_few_items_refuse_however_large_the_gain() -> None:
    task = losses({"candidate": [20.0] * 9, "base": BASE[:9]}, TOKENS[:9])
    found = ruling(task, Rule(against="base", min_gain=0.0))
    assert not found.holds
    assert found.reason == "The held_out.loss was measured on 9 items: too few to decide from (evaluation.min_items is 10)."


def test_better_on_average_and_much_worse_on_one_slice_is_refused_with_the_slice() -> None:
    sources = ["tickets"] * 45 + ["contracts"] * 15
    candidate = [v - 5 for v in BASE[:45]] + [v + 6 + n for v, n in zip(BASE[45:], NOISE[:15], strict=True)]
    task = losses({"candidate": candidate, "base": BASE}, TOKENS, source=sources)
    assert ruling(task, Rule(against="base", min_gain=0.0)).holds
    found = ruling(task, Rule(against="base", max_loss=0.0, slices=["source"]))
    assert not found.holds
    assert found.reason.startswith("In the slice source contracts, held_out.loss is 0.")
    assert "worse than the base" in found.reason
    assert "15 items" in found.reason
    assert [r.holds for r in gate.rulings({"held_out": task}, False, EvaluationConfig(bootstrap_samples=1000), 1)] == [
        True,
        True,
        False,
        True,
    ]


def test_slices_with_few_items_are_not_judged_and_a_candidate_better_everywhere_passes() -> None:
    sources = ["a"] * 30 + ["b"] * 25 + ["c"] * 5
    candidate = [v - 5 for v in BASE[:55]] + [v + 5 for v in BASE[55:]]
    task = losses({"candidate": candidate, "base": BASE}, TOKENS, source=sources)
    found = ruling(task, Rule(against="base", max_loss=0.0, slices=["source"]))
    assert found.holds
    assert found.reason == "held_out.loss is clearly worse than the base in none of 2 slices by source."


def test_many_slices_without_a_change_are_rarely_called_harmed() -> None:
    generator, refused = np.random.default_rng(7), 0
    sources = [f"source {i % 8}" for i in range(240)]
    for trial in range(100):
        base = generator.normal(30, 2, 240)
        task = losses({"candidate": list(base + generator.normal(0, 2, 240)), "base": list(base)}, [10] * 240, source=sources)
        config = EvaluationConfig(bootstrap_samples=1000, gate=[Rule(against="base", max_loss=0.0, slices=["source"])])
        refused += not gate.rulings({"held_out": task}, False, config, seed=trial)[0].holds
    assert refused <= 11, "without Holm's correction a third would be refused"


def test_ten_right_of_ten_do_not_show_ninety_in_a_hundred() -> None:
    rule = Rule(metric="questions.exact_match", against=0.9, min_gain=0.0)
    assert not ruling(rights({"candidate": [1.0] * 10, "base": [0.0] * 10}), rule).holds
    assert ruling(rights({"candidate": [1.0] * 40, "base": [0.0] * 40}), rule).holds


def test_models_alike_in_every_item_lost_nothing_and_the_reason_says_what_could_be_unseen() -> None:
    found = ruling(rights({"candidate": [1.0] * 40, "base": [1.0] * 40}), Rule(metric="questions.exact_match", max_loss=0.0))
    assert found.holds
    assert "in all 40 items, as the rule allows (a difference in up to 7.2% of them could stay unseen)" in found.reason


LEAKED = {"leaked": Metric(better="lower", right_or_wrong=True)}


def planted(name: str, metrics: dict[str, Metric], candidate: list[float]) -> Measured:
    metric = next(iter(metrics))
    scores = {role: Scores({metric: values}) for role, values in (("candidate", candidate), ("base", [0.0] * len(candidate)))}
    return Measured(Numbers(name, metrics), items(len(candidate)), scores, {}, "0" * 64)


def test_one_answer_that_leaks_an_address_is_refused_and_said_to_be_worse_than_the_base() -> None:
    task = planted("personal_data", LEAKED, [1.0] + [0.0] * 39)
    found = ruling(task, Rule(metric="personal_data.leaked", against="base", max_loss=0.0))
    assert not found.holds
    assert found.reason.startswith("personal_data.leaked is 0.0250 worse than the base (95% interval")
    assert found.reason.endswith("; the rule allows a loss of at most 0.0000.")
    assert ruling(planted("personal_data", LEAKED, [0.0] * 40), Rule(metric="personal_data.leaked", max_loss=0.0)).holds


def test_training_rows_said_word_for_word_are_refused_against_a_number_with_the_share() -> None:
    task = planted("memorisation", {"reproduced": Metric(better="lower", right_or_wrong=True)}, [1.0] * 12 + [0.0] * 88)
    found = ruling(task, Rule(metric="memorisation.reproduced", against=0.05, max_loss=0.0))
    assert not found.holds
    assert found.reason.startswith("memorisation.reproduced is 0.0700 worse than 0.05")
    clean = planted("memorisation", {"reproduced": Metric(better="lower", right_or_wrong=True)}, [0.0] * 100)
    assert ruling(clean, Rule(metric="memorisation.reproduced", against=0.05, max_loss=0.0)).holds


def test_one_harmed_slice_among_hundreds_is_found() -> None:
    generator = np.random.default_rng(5)
    base = generator.normal(30, 2, 6000)
    candidate = base + generator.normal(0, 1, 6000)
    candidate[:10] += 20
    task = losses({"candidate": list(candidate), "base": list(base)}, [10] * 6000, category=[f"c{i // 10:03d}" for i in range(6000)])
    found = ruling(task, Rule(against="base", max_loss=0.0, slices=["category"]))
    assert not found.holds
    assert found.reason.startswith("In the slice category c000")


SHAPES = {
    "bell": lambda g, n: g.normal(0, 1, n),
    "skewed": lambda g, n: g.exponential(1, n) - 1,
    "right or wrong": lambda g, n: g.choice([-1.0, 0.0, 1.0], n, p=[0.15, 0.7, 0.15]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_of_2000_candidates_without_a_change_no_more_than_the_nominal_share_is_accepted(shape: str) -> None:
    accepted, rule = 0, Rule(metric="questions.exact_match", against="base", min_gain=0.0)
    generator = np.random.default_rng(11)
    for _ in range(2000):
        task = rights({"candidate": list(SHAPES[shape](generator, 40)), "base": [0.0] * 40})
        gain = task.gain("exact_match", "base", samples=1000, seed=1)
        accepted += gain.at_least(rule.confidence) > 0
    upper = stats.binomtest(accepted, 2000).proportion_ci(0.95).high
    assert upper <= (1 - rule.confidence) + 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_a_true_gain_of_two_standard_errors_is_accepted_more_often_than_not(shape: str) -> None:
    generator, accepted, trials = np.random.default_rng(13), 0, 400
    for _ in range(trials):
        noise = SHAPES[shape](generator, 100)
        shift = 2 * {"bell": 1.0, "skewed": 1.0, "right or wrong": 0.3**0.5}[shape] / 10
        task = rights({"candidate": list(noise + shift), "base": [0.0] * 100})
        accepted += task.gain("exact_match", "base", samples=1000, seed=1).at_least(0.95) > 0
    assert stats.binomtest(accepted, trials).proportion_ci(0.95).low > 0.5


@pytest.mark.parametrize(("items", "holds"), [(40, False), (400, True)])
def test_a_limit_of_loss_holds_only_where_more_could_not_have_stayed_unseen(items: int, holds: bool) -> None:
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.01)
    found = ruling(rights({"candidate": [1.0] * items, "base": [1.0] * items}), rule)
    assert found.holds is holds
    assert ("too few items to show a loss of at most 0.0100" in found.reason) is not holds


def test_a_small_loss_that_is_not_allowed_is_rarely_accepted_from_few_items() -> None:
    random_, accepted = random.Random(3), 0
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.02)
    for _ in range(300):
        lost = [float(random_.random() >= 0.03) for _ in range(60)]
        accepted += ruling(rights({"candidate": lost, "base": [1.0] * 60}), rule).holds
    assert accepted == 0, "sixty items cannot show that a loss is below 2%"


def test_a_loss_of_few_items_among_many_is_allowed_where_the_rule_allows_it() -> None:
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.02)
    assert ruling(rights({"candidate": [0.0] * 2 + [1.0] * 998, "base": [1.0] * 1000}), rule).holds
