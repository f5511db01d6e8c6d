"""Rules of an evaluation's gate: their strictness, and the recomputation of their results."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyarrow import parquet

from components.common import significance
from components.common.artifacts import hashing
from components.common.gate_rules import SLICE_KINDS, Rule, compute_excess_p_value
from components.evaluation import evaluation_result, promotion_gate
from components.evaluation.config import EvaluationConfig
from components.evaluation.tasks import judge, judge_calibration
from components.evaluation.tasks.task_registry import TASK_KINDS
from components.model_registry import evidence, rule_results, rule_strictness
from pipelines.config.customization_config import load_customization
from pipelines.steps.gate_requirements import describe_gate
from tests.evaluation.task_builders import build_loss_scores
from tests.model_registry.evidence_builder import RULE

GAIN = {"min_gain": None, "max_loss": None}
SHARE_RULE = {**RULE, **GAIN, "max_harmed_share": 0.1}
HOLDS = "a rule on held_out.loss holds in its evaluation, but "
NOTHING = '{"reproduced": 0.0}'
CALIBRATION = {"pairs": 80.0, "kappa": 0.6, "kappa_bound": 0.45}
SLICE_RULE = {**RULE, **GAIN, "max_loss": 0.0, "slices": ["source", "length"]}


def check_result(rule: dict[str, Any], losses: list[float], **result: Any) -> list[str]:
    """Return the objections to a rule that holds with this result, for losses per token against 1 of the base.

    The items have 2 tokens. Every third item is of source b, the others of source a.
    """
    stated = {"gain": None, "at_least": None, "p": None, "acceptance_p": None, "harmed_items": None}
    rows = [
        {
            "weights": '{"loss": 2.0}',
            "source": "b" if number % 3 == 0 else "a",
            "length": 10,
            "candidate_scores": json.dumps({"loss": 2 * loss}),
            "base_scores": '{"loss": 2.0}',
        }
        for number, loss in enumerate(losses)
    ]
    content = {
        "rules": [{**rule, **stated, "unjudged_slices": 0, "holds": True, **result}],
        "tasks": {"held_out": {"metrics": {"loss": {"better": "lower", "exponential": False}}}},
        "measured": {
            "incumbent": None,
            "tasks": {"held_out": "held_out"},
            "settings": {"min_items": None, "bootstrap_samples": 1000},
        },
    }
    return rule_results.check_results(content, {"held_out": rows})


@pytest.mark.parametrize(
    ("calibration", "problem"),
    [
        (None, "its judge has no calibration"),
        (
            {**CALIBRATION, "kappa_bound": 0.4},
            "the agreement of its judge (kappa_bound) is 0.400; expected above 0.4",
        ),
        (
            {**CALIBRATION, "kappa_bound": float("nan")},
            "the agreement of its judge (kappa_bound) is nan; expected above 0.4",
        ),
        ({**CALIBRATION, "kappa_bound": 0.7}, "the calibration of its judge contradicts itself"),
        (
            {**CALIBRATION, "pairs": 29.0},
            "the number of pairs in the calibration of its judge is 29; expected at least 30",
        ),
        (CALIBRATION, ""),
    ],
)
def test_rule_on_a_judge_requires_a_calibration(calibration: dict[str, float] | None, problem: str) -> None:
    rows = [{"weights": "{}", "candidate_scores": '{"win_rate": 1.0}', "base_scores": '{"win_rate": 0.5}'}] * 20
    gain = {
        "metric": "judge.win_rate",
        "min_gain": 0.0,
        "gain": [0.5, 0.4, 0.6],
        "at_least": 0.4,
        "acceptance_p": 0.001,
    }
    content = {
        "rules": [{**RULE, **gain, "slices": None, "holds": True}],
        "tasks": {"judge": {"metrics": {"win_rate": {"better": "higher", "exponential": False}}}},
        "measured": {
            "incumbent": None,
            "tasks": {"judge": "judge"},
            "settings": {"min_items": None, "bootstrap_samples": 1000},
        },
        **({"calibration": {"judge": calibration}} if calibration else {}),
    }
    objections = rule_results.check_results(content, {"judge": rows})
    assert objections == ([f"a rule on judge.win_rate holds in its evaluation, but {problem}"] if problem else [])


def test_share_of_harmed_items_is_recomputed() -> None:
    losses = [1.0] * 59 + [2.5]
    honest = {"harmed_items": 1, "acceptance_p": significance.compute_binomial_p_value(1, 60, 0.1)}
    assert check_result(SHARE_RULE, losses, **honest) == []
    [objection] = check_result(SHARE_RULE, losses, **honest | {"harmed_items": 0})
    assert objection == f"{HOLDS}it counts 0 harmed items; its predictions have 1"
    for p_value, found in ((None, "it records no p-value"), (0.001, "its recorded p-value is 0.001")):
        [objection] = check_result(SHARE_RULE, losses, **honest | {"acceptance_p": p_value})
        assert objection == f"{HOLDS}{found}; recomputed for 1 of 60 items harmed, the p-value is 0.01378"
    few = {"harmed_items": 0, "acceptance_p": significance.compute_binomial_p_value(0, 28, 0.1)}
    assert check_result(SHARE_RULE, [1.0] * 28, **few) == [f"{HOLDS}0 of 28 items are harmed"]
    for count, items, share in ((0, 29, 0.1), (3, 80, 0.1), (900, 10_000, 0.1), (40, 2_000_000, 0.001)):
        p_value = rule_results.compute_binomial_p_value(count, items, share)
        assert p_value == pytest.approx(significance.compute_binomial_p_value(count, items, share), rel=1e-6)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"at_least": None}, "its gain or its bound is missing"),
        ({"gain": None}, "its gain or its bound is missing"),
        ({"at_least": -0.1}, "its bound is -0.1000"),
        ({"gain": [0.7, 0.6, 0.8]}, "its gain is +0.7000; its predictions have +0.5000"),
        ({"acceptance_p": None}, "its p-value is None; the bound requires at most 0.05"),
        ({"acceptance_p": 0.06}, "its p-value is 0.06; the bound requires at most 0.05"),
        ({"acceptance_p": -0.1}, "its p-value is -0.1; the bound requires at most 0.05"),
    ],
)
def test_result_that_contradicts_the_rule_is_refused(result: dict[str, Any], problem: str) -> None:
    honest = {"gain": [0.5, 0.4, 0.6], "at_least": 0.3, "acceptance_p": 0.01}
    assert check_result(RULE, [0.5] * 12, **honest) == []
    [objection] = check_result(RULE, [0.5] * 12, **honest | result)
    assert objection.startswith(HOLDS + problem)
    [objection] = check_result(RULE, [0.5] * 9, **honest)
    assert objection == HOLDS + "the rule has 9 items and requires 10"


def check_control(reproduced: int, control: int, p: float | None, *, control_items: int = 40) -> list[str]:
    """Return the objections to a rule with control that holds, with these numbers of reproduced rows of 64 and of the control."""
    rule = {
        **RULE,
        **GAIN,
        "metric": "rows.reproduced",
        "max_loss": 0.0,
        "slices": None,
        "control": "control.reproduced",
    }
    rows = {
        name: [
            {"weights": "{}", "candidate_scores": json.dumps({"reproduced": float(n < count)}), "base_scores": NOTHING}
            for n in range(items)
        ]
        for name, count, items in (("rows", reproduced, 64), ("control", control, control_items))
    }
    metrics = {"metrics": {"reproduced": {"better": "lower", "exponential": False}}}
    content = {
        "rules": [{**rule, "p": p, "holds": True}],
        "tasks": {"rows": metrics, "control": metrics},
        "measured": {
            "incumbent": None,
            "tasks": {"rows": "memorisation", "control": "memorisation"},
            "settings": {"min_items": None, "bootstrap_samples": 1000},
        },
    }
    return rule_results.check_results(content, rows)


def test_excess_over_a_control_is_recomputed() -> None:
    holds = "a rule on rows.reproduced holds in its evaluation, but "
    honest = compute_excess_p_value(9, 64, 3, 40)
    assert honest == pytest.approx(0.2449, abs=1e-4), "as scipy.stats.fisher_exact"
    assert check_control(9, 3, honest) == []
    for stated in (None, 0.9):
        assert check_control(9, 3, stated) == [f"{holds}its p-value is {stated}; its predictions have 0.2449"]
    assert check_control(12, 0, compute_excess_p_value(12, 64, 0, 40)) == [f"{holds}its p-value is 0.0019"]
    assert check_control(0, 0, 1.0, control_items=28) == [f"{holds}it has 64 items and 28 control items"]


def test_results_of_the_gate_agree_with_their_recomputation(tmp_path: Path) -> None:
    bounds = [{"min_gain": 0.0}, {"max_loss": 0.3}, {"max_loss": 0.0}, {"max_harmed_share": 0.1}]
    rules = [
        Rule(metric="held_out.loss", **bound) for bound in [*bounds, {"max_loss": 0.0, "slices": list(SLICE_KINDS)}]
    ]
    rules += [Rule(metric="held_out.loss", against=1.4, max_loss=0.5), Rule(metric="held_out.perplexity", min_gain=0.1)]
    config = EvaluationConfig(suite="none", gate=rules, bootstrap_samples=1000)
    holding = 0
    for seed, (gain, spread) in enumerate(
        [(0.3, 0.1), (0.1, 0.3), (0.0, 0.0), (0.05, 1.2), (-0.05, 0.05), (0.06, 0.5)]
    ):
        draw = Random(seed)
        tokens = [draw.randint(1, 9) for _ in range(300)]
        base = [draw.uniform(1, 2) * count for count in tokens]
        candidate = [b + (draw.gauss(-gain, spread)) * count for b, count in zip(base, tokens, strict=True)]
        slices = {"source": [draw.choice("abc") for _ in tokens], "length": [draw.randint(1, 200) for _ in tokens]}
        results = {"held_out": build_loss_scores({"candidate": candidate, "base": base}, tokens, **slices)}
        found = promotion_gate.evaluate_rules(results, False, config, seed)
        content = evaluation_result.build_result(results, found, config, seed, unchanged=False)
        settings = {"min_items": None, "bootstrap_samples": 1000}
        content["measured"] = {"incumbent": None, "tasks": {"held_out": "held_out"}, "settings": settings}
        evaluation_result.write_predictions(tmp_path / "predictions.parquet", results)
        rows = {"held_out": parquet.read_table(tmp_path / "predictions.parquet").to_pylist()}
        assert rule_results.check_results(content, rows) == []
        holding += sum(rule["holds"] for rule in content["rules"])
        for rule in content["rules"]:
            rule["holds"] = True
        flipped = [rule for rule in found if not rule.passed]
        assert len(rule_results.check_results(content, rows)) == len(flipped)
    assert holding > 10


def test_identical_scores_have_no_p_value() -> None:
    rule = {**RULE, **GAIN, "max_loss": 0.1}
    assert check_result(rule, [1.0] * 12, gain=[0.0] * 3, at_least=0.0) == []
    assert check_result(RULE, [1.0] * 12, gain=[0.0] * 3, at_least=0.1) == [HOLDS + "the gain is +0.0000"]


def test_result_of_slices_requires_a_p_value_and_the_number_of_slices() -> None:
    losses = [1.0] * 40  # sources of 14 and 26 items; a single bucket of lengths is no slice
    assert check_result(SLICE_RULE, losses, p=0.2) == []
    assert check_result(SLICE_RULE, losses) == [HOLDS + "it has no p-value for 2 slices"]
    assert check_result(SLICE_RULE, losses, p=0.04) == [HOLDS + "the p-value of its worst slice is 0.04"]
    [objection] = check_result(SLICE_RULE, losses, unjudged_slices=2)
    assert objection == HOLDS + "it counts 2 slices with too few items; its predictions have 0"
    assert check_result(SLICE_RULE, losses[:15], unjudged_slices=1, p=0.5) == []
    assert check_result(SLICE_RULE, losses[:12], unjudged_slices=2) == []


def check_rules(
    own: dict[str, Any],
    wanted: dict[str, Any],
    own_min_items: int | None = None,
    min_items: int | None = None,
    **more: Any,
) -> list[str]:
    """Return the objections to an evaluation of 400 items with one rule, if another rule is required."""
    measured = {
        "settings": {"gate": [own], "min_items": own_min_items},
        "tasks": {"held_out": more.pop("kind", "held_out")},
        "task_files": {"held_out": more.pop("files", [])},
    }
    content = {"measured": measured, "tasks": {"held_out": {"items": more.pop("items", 400)}}}
    return evidence.compare_rules(content, [wanted], min_items, more.pop("tasks", None))


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({**SHARE_RULE, "harm": 1000.0}, SHARE_RULE),
        ({**SHARE_RULE, "max_harmed_share": 0.2}, SHARE_RULE),
        (SHARE_RULE, {**SHARE_RULE, "harm": 0.5}),
        ({**RULE, "max_item_loss": 1e-6}, RULE),
        (RULE, {**RULE, "max_item_loss": 6.0}),
        ({**RULE, "metric": "held_out.rouge", "max_item_loss": 0.5}, {**RULE, "metric": "held_out.rouge"}),
        ({**RULE, **GAIN, "max_loss": 0.0}, RULE),
        ({**RULE, **GAIN, "max_loss": 0.2}, {**RULE, **GAIN, "max_loss": 0.1}),
        ({**RULE, "confidence": 0.9}, RULE),
        ({**SLICE_RULE, "confidence": 0.99}, SLICE_RULE),
        ({**SLICE_RULE, "slices": ["source", "length", "category"]}, SLICE_RULE),
        ({**SLICE_RULE, "slices": ["source"]}, SLICE_RULE),
        (RULE, SLICE_RULE),
        (SHARE_RULE, RULE),
        (RULE, {**RULE, "min_gain": 0.5}),
        ({**RULE, "later_setting": 1}, RULE),
        ({**RULE, "against": "incumbent"}, RULE),
    ],
)
def test_weaker_rule_is_refused(own: dict[str, Any], wanted: dict[str, Any]) -> None:
    [objection] = check_rules(own, wanted)
    assert objection.startswith("the configuration requires a rule as strict as metric: held_out.")


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({**SHARE_RULE, "max_harmed_share": 0.05}, SHARE_RULE),
        ({**SHARE_RULE, "harm": 0.5}, {**SHARE_RULE, "harm": 1.0}),
        ({**SHARE_RULE, "harm": 0.5}, SHARE_RULE),
        ({**SHARE_RULE, "harm": 1.0}, SHARE_RULE),
        ({**SHARE_RULE, "harm": None}, SHARE_RULE),
        ({**RULE, "max_item_loss": 6.0}, RULE),
        (RULE, {**RULE, "max_item_loss": 4.0}),
        ({**RULE, "min_gain": 0.1}, RULE),
        ({**RULE, "confidence": 0.99}, RULE),
        (RULE, {**RULE, **GAIN, "max_loss": 0.1}),
        ({**SLICE_RULE, "confidence": 0.9, "slices": ["length", "source"]}, SLICE_RULE),
    ],
)
def test_stricter_rule_is_accepted(own: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert check_rules(own, wanted) == []


def test_min_items_does_not_apply_to_the_suite() -> None:
    suite_rule = {**RULE, **GAIN, "metric": "suite_harmful.refused", "max_loss": 0.2}
    content = {
        "measured": {"settings": {"gate": [suite_rule], "min_items": 50}, "tasks": {"suite_harmful": "refusal"}},
        "tasks": {"suite_harmful": {"items": 44}},
    }
    assert evidence.compare_rules(content, [suite_rule], 100) == []


def test_fewer_items_than_the_required_rule_needs_are_refused() -> None:
    loss = {**RULE, **GAIN, "max_loss": 0.1}
    refused = ["its evaluation measured held_out.loss on 20 items; the configuration requires 149"]
    assert check_rules(loss, loss, own_min_items=2, items=20) == refused
    assert check_rules({**loss, "max_loss": 0.0}, loss, items=20) == refused
    assert check_rules(loss, loss, own_min_items=2, items=149) == []
    assert "requires 29" in check_rules(SHARE_RULE, SHARE_RULE, own_min_items=2, items=28)[0]
    assert check_rules(RULE, RULE, min_items=10, items=10) == []
    assert "on 10 items; the configuration requires 11" in check_rules(RULE, RULE, min_items=11, items=10)[0]


@pytest.mark.parametrize(
    ("own", "wanted", "accepted"), [(50, None, False), (2, None, False), (10, None, True), (None, 10, True)]
)
def test_slices_are_judged_from_the_required_number_of_items(
    own: int | None, wanted: int | None, accepted: bool
) -> None:
    expected = (
        [] if accepted else [f"its evaluation judged slices of at least {own} items; the configuration requires 10"]
    )
    assert check_rules(SLICE_RULE, SLICE_RULE, own, wanted) == expected


def test_task_of_another_kind_or_with_another_file_is_refused() -> None:
    tasks = {"held_out": {"kind": "held_out", "files": ["a" * 64]}}
    assert check_rules(RULE, RULE, files=["a" * 64], tasks=tasks) == []
    [objection] = check_rules(RULE, RULE, files=["b" * 64], tasks=tasks)
    assert objection == "its evaluation measured held_out on other files than those of the configuration"
    [objection] = check_rules(RULE, RULE, kind="perplexity", tasks=tasks)
    assert "of kind held_out; its evaluation measured kind perplexity" in objection


def test_judge_with_less_agreement_than_the_configuration_requires_is_refused() -> None:
    content = {
        "calibration": {"judge": CALIBRATION},
        "tasks": {"judge": {"items": 200}},
        "measured": {"tasks": {"judge": "judge"}, "task_files": {"judge": []}, "settings": {"gate": [RULE]}},
    }
    content["measured"]["settings"]["gate"] = [{**RULE, "metric": "judge.win_rate"}]

    def check(min_kappa: float) -> list[str]:
        tasks = {"judge": {"kind": "judge", "files": [], "min_kappa": min_kappa}}
        return evidence.compare_rules(content, content["measured"]["settings"]["gate"], None, tasks)

    assert check(0.4) == []
    assert check(0.5) == [
        "the configuration requires a kappa_bound above 0.5 of the judge in task judge; its evaluation has 0.450"
    ]
    content["calibration"] = {}
    assert check(0.4) == [
        "the configuration requires a kappa_bound above 0.4 of the judge in task judge; its evaluation has none"
    ]


def test_default_settings_of_rules_equal_those_of_the_metrics() -> None:
    assert (rule_strictness.MIN_KAPPA, rule_strictness.MIN_PAIRS) == (judge.MIN_KAPPA, judge_calibration.MIN_PAIRS)
    for kind, task in TASK_KINDS.items():
        for name, metric in task.task.METRICS.items():
            if (harm := metric.get_harm()) is not None:
                assert rule_strictness.get_harm({"metric": f"task.{name}"}, kind) == harm, (kind, name)
            default = rule_strictness.DEFAULT_MAX_ITEM_LOSSES.get((kind, name))
            assert default in (None, metric.get_max_item_loss())
            assert (metric.get_max_item_loss() or 0) <= rule_strictness.LARGEST_MAX_ITEM_LOSS
    for loss in (0.01, 0.05, 0.3, 4.0, 6.0):
        for confidence in (0.9, 0.95):
            rule = Rule(max_loss=loss, confidence=confidence)
            expected = promotion_gate.compute_min_items(rule, 5.0, None)
            assert rule_strictness.compute_min_items(rule.model_dump(), None, "held_out") == expected


def test_configuration_given_to_promote_requires_its_rules(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "customization.yaml").write_text(
        f"evaluation: {{suite: none, min_items: 7, gate: [{{max_loss: 0.1}}], tasks: [{{kind: held_out}}, {{kind: generation, data: {rows}}}]}}"
    )
    gate = describe_gate(load_customization(tmp_path / "customization.yaml").evaluation)
    assert gate["min_items"] == 7
    configured = {"kind": "judge", "base_url": "https://judge.example/v1", "model": "j", "min_kappa": 0.6}
    override = f"evaluation.tasks=[{{kind: held_out}}, {json.dumps(configured)}]"
    changed = load_customization(tmp_path / "customization.yaml", [override])
    assert describe_gate(changed.evaluation)["tasks"]["judge"]["min_kappa"] == 0.6
    assert gate["rules"] == [{**RULE, "min_gain": None, "max_loss": 0.1}]
    assert gate["tasks"] == {
        "held_out": {"kind": "held_out", "files": []},
        "generation": {"kind": "generation", "files": [hashing.sha256_file(rows)]},
    }
