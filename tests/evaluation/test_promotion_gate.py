"""The gate's rules and their reasons."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from scipy import stats

from components.common import significance
from components.common.gate_rules import Rule
from components.evaluation import promotion_gate
from components.evaluation.config import EvaluationConfig
from components.evaluation.task_interface import Metric, Scores
from components.evaluation.task_results import TaskResult
from tests.evaluation.task_builders import StubTask, build_binary_scores, build_items, build_loss_scores

TOKENS = [10] * 60
NOISE = np.random.default_rng(0).normal(0, 2.0, 60)
BASE = list(30 + NOISE)


def evaluate_loss_rule(candidate: list[float], rule: Rule, **others: list[float]) -> promotion_gate.RuleResult:
    return evaluate_rule(build_loss_scores({"candidate": candidate, "base": BASE, **others}, TOKENS), rule)


def evaluate_rule(task: TaskResult, rule: Rule, **changes: int) -> promotion_gate.RuleResult:
    config = EvaluationConfig(suite="none", bootstrap_samples=1000, **changes).model_copy(update={"gate": [rule]})  # type: ignore[arg-type]
    return promotion_gate.evaluate_rules(
        {task.task.name: task}, "incumbent" in {*task.scores, *task.missing_reasons}, config, seed=1
    )[0]


def test_clear_gain_is_accepted_with_interval() -> None:
    result = evaluate_loss_rule([v - 5 for v in BASE], Rule(against="base", min_gain=0.0))
    assert result.passed
    assert "0.5000 better than the base" in result.reason
    assert "60 items" in result.reason


@pytest.mark.parametrize(("min_gain", "is_reachable"), [(0.0, True), (0.05, True), (0.2, False)])
def test_items_are_estimated_only_if_the_gain_exceeds_the_required_one(min_gain: float, is_reachable: bool) -> None:
    result = evaluate_loss_rule([v - 1 for v in BASE], Rule(against="base", min_gain=min_gain))
    assert "0.1000 better than the base" in result.reason
    assert not result.passed
    assert ("this gain requires about" in result.reason) == is_reachable


def test_clear_loss_is_refused() -> None:
    result = evaluate_loss_rule([v + 5 for v in BASE], Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert "0.5000 worse than the base" in result.reason


def test_candidate_identical_to_base_is_refused() -> None:
    result = evaluate_loss_rule(BASE, Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert (
        result.reason
        == "held_out.loss is identical to that of the base on all 60 items; the rule requires a gain above +0.0000."
    )


def test_insignificant_difference_is_refused() -> None:
    noise = np.random.default_rng(1).normal(0, 3, 60)
    result = evaluate_loss_rule([v + w for v, w in zip(BASE, noise, strict=True)], Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert "the difference is too small for the number of items" in result.reason
    assert "this gain requires about" in result.reason


def test_difference_of_zero_is_neither_better_nor_worse() -> None:
    scores = {"candidate": [1.0] * 30, "base": [1.0] * 30}
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.2)
    equal = "questions.exact_match is on average equal to that of the base (gain: 95% interval +0.0000 to +0.0000, 30 items;"
    assert evaluate_rule(build_binary_scores(scores), rule).reason.startswith(equal)


def test_gain_below_min_gain_is_refused() -> None:
    assert not evaluate_loss_rule([v - 5 for v in BASE], Rule(against="base", min_gain=0.6)).passed


def test_loss_within_max_loss_is_accepted() -> None:
    worse = [v + 1 for v in BASE]
    rule = Rule(against="incumbent", max_loss=0.2, max_item_loss=1.0)
    assert evaluate_loss_rule(worse, rule, incumbent=BASE).passed
    assert not evaluate_loss_rule(worse, rule.model_copy(update={"max_loss": 0.05}), incumbent=BASE).passed
    assert not evaluate_loss_rule(worse, Rule(against="incumbent", max_loss=0.2), incumbent=BASE).passed


def test_model_identical_to_incumbent_loses_nothing() -> None:
    assert evaluate_loss_rule(BASE, Rule(against="incumbent", max_loss=0.0), incumbent=BASE).passed


def test_rule_against_missing_incumbent_holds() -> None:
    result = evaluate_loss_rule(BASE, Rule(against="incumbent", min_gain=0.0))
    assert result.passed
    assert result.reason == "No incumbent exists to compare with."


def test_number_must_be_reached_with_confidence() -> None:
    assert evaluate_loss_rule(BASE, Rule(against=3.5, min_gain=0.0)).passed
    assert not evaluate_loss_rule(BASE, Rule(against=3.0, min_gain=0.0)).passed


def test_perplexity_is_decided_like_loss() -> None:
    better = [v - 5 for v in BASE]
    assert evaluate_loss_rule(better, Rule(metric="held_out.perplexity", against="base", min_gain=1.0)).passed
    assert not evaluate_loss_rule(better, Rule(metric="held_out.perplexity", against="base", min_gain=50.0)).passed


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_non_finite_score_refuses(broken: float) -> None:
    result = evaluate_loss_rule([broken, *BASE[1:]], Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert result.reason == "held_out.loss of the candidate is not a finite number in 1 of 60 items."


def test_missing_score_refuses() -> None:
    result = evaluate_rule(build_loss_scores({"candidate": BASE}, TOKENS), Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert result.reason == "held_out.loss of the base is missing."


def test_incumbent_with_other_tokenizer_refuses() -> None:
    task = build_loss_scores({"candidate": [v - 5 for v in BASE], "base": BASE}, TOKENS)
    task.missing_reasons["incumbent"] = "the incumbent has another tokenizer"
    result = evaluate_rule(task, Rule(against="incumbent", min_gain=0.0))
    assert not result.passed
    assert result.reason == "held_out.loss cannot be compared: the incumbent has another tokenizer."


def test_too_few_items_refuse() -> None:
    task = build_loss_scores({"candidate": [20.0] * 9, "base": BASE[:9]}, TOKENS[:9])
    result = evaluate_rule(task, Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert (
        result.reason == "held_out.loss was measured on 9 items; the rule requires at least 10 (evaluation.min_items)."
    )


def test_regression_in_one_slice_is_refused() -> None:
    sources = ["tickets"] * 45 + ["contracts"] * 15
    candidate = [v - 12 for v in BASE[:45]] + [v + 6 + n for v, n in zip(BASE[45:], NOISE[:15], strict=True)]
    task = build_loss_scores({"candidate": candidate, "base": BASE}, TOKENS, source=sources)
    assert evaluate_rule(task, Rule(against="base", min_gain=0.0)).passed
    result = evaluate_rule(task, Rule(against="base", max_loss=0.0, slices=["source"]))
    assert not result.passed
    assert result.reason.startswith("In the slice source contracts, held_out.loss is 0.")
    assert "worse than the base" in result.reason
    assert "15 items" in result.reason
    assert [
        r.passed
        for r in promotion_gate.evaluate_rules(
            {"held_out": task}, False, EvaluationConfig(suite="none", bootstrap_samples=1000), 1
        )
    ] == [
        True,
        True,
        True,
        True,
        False,
        True,
    ]


def test_small_slices_are_ignored() -> None:
    sources = ["a"] * 30 + ["b"] * 25 + ["c"] * 5
    candidate = [v - 5 for v in BASE[:55]] + [v + 5 for v in BASE[55:]]
    task = build_loss_scores({"candidate": candidate, "base": BASE}, TOKENS, source=sources)
    result = evaluate_rule(task, Rule(against="base", max_loss=0.0, slices=["source"]))
    assert result.passed
    assert re.fullmatch(
        r"held_out\.loss is not significantly worse than the base in any of 2 slices by source; a loss below "
        r"0\.0000 in a slice may go undetected; 1 of 3 slices is too small to judge\.",
        result.reason,
    )
    assert result.unjudged_slices == 1


def test_unchanged_slices_are_rarely_refused() -> None:
    generator, refused = np.random.default_rng(7), 0
    sources = [f"source {i % 8}" for i in range(240)]
    for trial in range(100):
        base = generator.normal(30, 2, 240)
        task = build_loss_scores(
            {"candidate": list(base + generator.normal(0, 2, 240)), "base": list(base)}, [10] * 240, source=sources
        )
        config = EvaluationConfig(
            suite="none", bootstrap_samples=1000, gate=[Rule(against="base", max_loss=0.0, slices=["source"])]
        )
        refused += not promotion_gate.evaluate_rules({"held_out": task}, False, config, seed=trial)[0].passed
    assert refused <= 11, "without Holm's correction a third would be refused"


def test_ten_correct_of_ten_do_not_show_ninety_percent() -> None:
    rule = Rule(metric="questions.exact_match", against=0.9, min_gain=0.0)
    assert not evaluate_rule(build_binary_scores({"candidate": [1.0] * 10, "base": [0.0] * 10}), rule).passed
    assert evaluate_rule(build_binary_scores({"candidate": [1.0] * 40, "base": [0.0] * 40}), rule).passed


def test_identical_models_report_unseen_difference() -> None:
    result = evaluate_rule(
        build_binary_scores({"candidate": [1.0] * 40, "base": [1.0] * 40}),
        Rule(metric="questions.exact_match", max_loss=0.0),
    )
    assert result.passed
    limitation = "differences in up to 7.2% of items may go undetected"
    assert f"on all 40 items, as the rule allows ({limitation})" in result.reason


LEAKED = {"leaked": Metric(better="lower", is_binary=True)}


def build_task_result(name: str, metrics: dict[str, Metric], candidate: list[float]) -> TaskResult:
    metric = next(iter(metrics))
    scores = {
        role: Scores({metric: values}) for role, values in (("candidate", candidate), ("base", [0.0] * len(candidate)))
    }
    return TaskResult(StubTask(name, metrics), build_items(len(candidate)), scores, {}, "0" * 64)


@pytest.mark.parametrize(
    ("noise", "detectable", "needed"),
    [
        (0.0, 0.4, 80),  # the allowance for unseen items is halved by twice as many items
        (0.4, 0.4, 160),  # the standard error is halved by four times as many
        (0.02, 0.38, 78),
    ],
)
def test_items_that_a_gain_requires_are_estimated(noise: float, detectable: float, needed: int) -> None:
    assert promotion_gate.estimate_needed_items(40, 0.2, noise, detectable) == needed


def test_single_leak_is_refused() -> None:
    task = build_task_result("personal_data", LEAKED, [1.0] + [0.0] * 39)
    result = evaluate_rule(task, Rule(metric="personal_data.leaked", against="base", max_loss=0.0))
    assert not result.passed
    assert result.reason.startswith("personal_data.leaked is 0.0250 worse than the base (gain: 95% interval")
    assert result.reason.endswith("; the rule allows a loss of at most 0.0000.")
    assert evaluate_rule(
        build_task_result("personal_data", LEAKED, [0.0] * 40), Rule(metric="personal_data.leaked", max_loss=0.0)
    ).passed


def test_memorised_rows_are_refused_against_number() -> None:
    task = build_task_result(
        "memorisation", {"reproduced": Metric(better="lower", is_binary=True)}, [1.0] * 12 + [0.0] * 88
    )
    result = evaluate_rule(task, Rule(metric="memorisation.reproduced", against=0.05, max_loss=0.0))
    assert not result.passed
    assert result.reason.startswith("memorisation.reproduced is 0.0700 worse than 0.05")
    clean = build_task_result("memorisation", {"reproduced": Metric(better="lower", is_binary=True)}, [0.0] * 100)
    assert evaluate_rule(clean, Rule(metric="memorisation.reproduced", against=0.05, max_loss=0.0)).passed


def test_one_harmed_slice_among_hundreds_is_found() -> None:
    generator = np.random.default_rng(5)
    base = generator.normal(30, 2, 6000)
    candidate = base + generator.normal(0, 1, 6000)
    candidate[:10] += 20
    task = build_loss_scores(
        {"candidate": list(candidate), "base": list(base)},
        [10] * 6000,
        category=[f"c{i // 10:03d}" for i in range(6000)],
    )
    result = evaluate_rule(task, Rule(against="base", max_loss=0.0, slices=["category"]))
    assert not result.passed
    assert result.reason.startswith("In the slice category c000")


SHAPES = {
    "bell": lambda g, n: g.normal(0, 1, n),
    "skewed": lambda g, n: 1 - g.exponential(1, n),
    "right or wrong": lambda g, n: g.choice([-1.0, 0.0, 1.0], n, p=[0.15, 0.7, 0.15]),
    "rare catastrophe": lambda g, n: np.where(g.random(n) < 0.02, -5.0, g.normal(5.0 * 0.02 / 0.98, 0.1, n)),
}
MAX_ITEM_LOSSES = {"bell": 4.0, "skewed": 5.0, "right or wrong": 1.0, "rare catastrophe": 5.0}


def shows_gain(shape: str, differences: np.ndarray) -> bool:
    zeros = [0.0] * len(differences)
    gain = significance.estimate_pessimistic_gain(
        list(differences), zeros, [1.0] * len(zeros), max_item_loss=MAX_ITEM_LOSSES[shape], samples=1, seed=1
    )
    return significance.is_within_level(gain.compute_p_value(0.0), 0.95)


@pytest.mark.parametrize("shape", SHAPES)
def test_false_acceptance_rate_is_nominal(shape: str) -> None:
    generator = np.random.default_rng(11)
    accepted = sum(shows_gain(shape, SHAPES[shape](generator, 60)) for _ in range(400))
    assert stats.binomtest(accepted, 400).proportion_ci(0.95).high <= 0.08


@pytest.mark.parametrize("shape", SHAPES)
def test_power_at_three_standard_errors_exceeds_half(shape: str) -> None:
    generator, accepted, trials = np.random.default_rng(13), 0, 100
    for _ in range(trials):
        noise = SHAPES[shape](generator, 400)
        shift = 3 * {"bell": 1.0, "skewed": 1.0, "right or wrong": 0.3**0.5, "rare catastrophe": 0.72}[shape] / 20
        accepted += shows_gain(shape, noise + shift)
    assert stats.binomtest(accepted, trials).proportion_ci(0.95).low > 0.5


@pytest.mark.parametrize(("items", "holds"), [(40, False), (400, True)])
def test_max_loss_needs_enough_items(items: int, holds: bool) -> None:
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.01)
    result = evaluate_rule(build_binary_scores({"candidate": [1.0] * items, "base": [1.0] * items}), rule)
    assert result.passed is holds
    assert ("the rule requires at least 299 (max_loss 0.01 at 95% confidence)" in result.reason) is not holds


def test_unset_min_items_follow_from_the_limit() -> None:
    assert promotion_gate.compute_min_items(Rule(max_harmed_share=0.05), 5.0, None) == 59
    assert promotion_gate.compute_min_items(Rule(max_loss=0.05), 5.0, None) == 299
    assert promotion_gate.compute_min_items(Rule(max_loss=0.05, max_item_loss=1.0), 5.0, None) == 59
    assert promotion_gate.compute_min_items(Rule(max_loss=0.05), 5.0, 30) == 30
    assert promotion_gate.compute_min_items(Rule(min_gain=0.0), 5.0, None) == 10
    assert promotion_gate.compute_min_items_by_task(EvaluationConfig(suite="none"), has_incumbent=False) == {
        "held_out": 29
    }


@pytest.mark.parametrize(("has_incumbent", "items"), [(False, 10), (True, 59)])
def test_rules_against_missing_incumbent_require_no_items(has_incumbent: bool, items: int) -> None:
    gate = [Rule(min_gain=0.0), Rule(against="incumbent", max_harmed_share=0.05)]
    required = promotion_gate.compute_min_items_by_task(
        EvaluationConfig(suite="none", gate=gate), has_incumbent=has_incumbent
    )
    assert required == {"held_out": items}


def test_required_items_depend_on_the_number_to_reach() -> None:
    tasks = [{"kind": "memorisation"}]
    config = EvaluationConfig.model_validate(
        {
            "suite": "none",
            "tasks": tasks,
            "gate": [{"metric": "memorisation.reproduced", "against": 0.9, "max_loss": 0.01}],
        }
    )
    required = promotion_gate.compute_min_items_by_task(config, has_incumbent=False)
    assert required == {"memorisation": 29}, "the largest loss is 0.1, a tenth of that against a model"


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("max_loss", [0.02, 0.05, 0.1, 0.5])
def test_model_without_loss_passes_with_the_required_items(max_loss: float, confidence: float) -> None:
    rule = Rule(max_loss=max_loss, confidence=confidence)
    items = promotion_gate.compute_min_items(rule, 5.0, None)
    for gain in (0.0, 1e-9, 0.1):
        candidate = [30.0 - gain] * (items - 1) + [30.0 - 2 * gain]
        task = build_loss_scores({"candidate": candidate, "base": [30.0] * items}, [10] * items)
        assert evaluate_rule(task, rule).passed


def test_result_and_p_value_never_disagree() -> None:
    generator = np.random.default_rng(17)
    for trial in range(40):
        candidate = [v - 2.25 + n for v, n in zip(BASE, generator.normal(0, 2, 60), strict=True)]
        metric = ("held_out.loss", "held_out.perplexity")[trial % 2]
        result = evaluate_loss_rule(candidate, Rule(metric=metric, min_gain=0.0))
        assert result.acceptance_p_value is not None
        assert result.lower_bound is not None
        assert result.passed == (result.acceptance_p_value <= 0.05 * (1 + 1e-9)) == (result.lower_bound > 0)


def test_harmed_items_are_limited_although_the_mean_is_better() -> None:
    rule = Rule(against="base", max_harmed_share=0.05)
    task = build_loss_scores(
        {"candidate": [v + 20 if i < 9 else v - 9 for i, v in enumerate(BASE * 4)], "base": BASE * 4}, TOKENS * 4
    )
    result = evaluate_rule(task, rule)
    assert evaluate_rule(task, Rule(against="base", min_gain=0.0)).passed
    assert not result.passed
    assert result.reason == (
        "held_out.loss is worse than the base by more than 1 on 9 of 240 items (at most 6.5% of all items with 95% "
        "confidence); the rule allows 5.0%."
    )
    assert evaluate_rule(task, rule.model_copy(update={"harm": 2.5})).passed


def test_harmed_answers_are_those_lost() -> None:
    scores = {"candidate": [0.0] * 3 + [1.0] * 197, "base": [1.0] * 200}
    rule = Rule(metric="questions.exact_match", max_harmed_share=0.05)
    result = evaluate_rule(build_binary_scores(scores), rule)
    assert (result.passed, result.harmed_items) == (True, 3)
    assert result.acceptance_p_value == pytest.approx(stats.binom.cdf(3, 200, 0.05))


def test_seen_catastrophe_beyond_the_limit_counts_in_full() -> None:
    candidate = [BASE[0] + 1000, *(v - 5 for v in BASE[1:])]
    result = evaluate_loss_rule(candidate, Rule(against="base", min_gain=0.0))
    assert not result.passed
    assert result.lower_bound is not None
    assert result.lower_bound < -1000 / 600


def test_excess_loss_is_rarely_accepted_with_few_items() -> None:
    rng, accepted = random.Random(3), 0
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.02)
    for _ in range(300):
        scores = [float(rng.random() >= 0.03) for _ in range(60)]
        accepted += evaluate_rule(build_binary_scores({"candidate": scores, "base": [1.0] * 60}), rule).passed
    assert accepted == 0, "sixty items cannot show that a loss is below 2%"


def test_rare_losses_among_many_items_are_accepted() -> None:
    rule = Rule(metric="questions.exact_match", against="base", max_loss=0.02)
    assert evaluate_rule(build_binary_scores({"candidate": [0.0] * 2 + [1.0] * 998, "base": [1.0] * 1000}), rule).passed
