"""The files of an evaluation and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from components.common.gate_rules import Rule
from components.evaluation import evaluation_result, promotion_gate, report
from components.evaluation.config import EvaluationConfig
from components.evaluation.task_interface import Scores
from components.evaluation.task_results import TaskResult
from tests.data_versioning.conftest import MakeDataset, make_dataset
from tests.evaluation.task_builders import ACCURACY, StubTask, build_items, build_loss_scores

__all__ = ["make_dataset"]
CONFIG = EvaluationConfig(suite="none", bootstrap_samples=1000)
SOURCES = ["tickets"] * 20 + ["contracts"] * 20


def build_task_results() -> dict[str, TaskResult]:
    base = [30.0 + i % 7 for i in range(40)]
    candidate = [v - 6 + i % 3 for i, v in enumerate(base[:20])] + [v + 4 + i % 3 for i, v in enumerate(base[20:])]
    held_out = build_loss_scores({"candidate": candidate, "base": base}, [10] * 40, source=SOURCES)
    right = Scores({"exact_match": [1.0] * 25 + [0.0] * 15}, answers=["<b>Paris</b>"] * 40)
    wrong = Scores(
        {"exact_match": [0.0] * 10 + [1.0] * 20 + [0.0] * 10}, answers=["Rome"] * 40, figures={"errors": 2.0}
    )
    questions = TaskResult(
        StubTask("questions", ACCURACY),
        build_items(40, source=SOURCES),
        {"candidate": right, "base": wrong},
        {},
        "1" * 64,
    )
    return {"held_out": held_out, "questions": questions}


def build_verdict(task_results: dict[str, TaskResult]) -> tuple[dict[str, object], list[promotion_gate.RuleResult]]:
    rule_results = promotion_gate.evaluate_rules(
        task_results, False, CONFIG.model_copy(update={"gate": CONFIG.gate}), 1
    )
    return evaluation_result.build_result(task_results, rule_results, CONFIG, 1, unchanged=False), rule_results


def test_metrics_have_values_interval_and_n() -> None:
    result = build_verdict(build_task_results())[0]["metrics"]
    assert result["questions"]["exact_match"] == {  # type: ignore[index]
        "candidate": 0.625, "base": 0.5, "incumbent": None, "ci95": pytest.approx([-0.05, 0.3], abs=0.03), "n": 40,
    }  # fmt: skip
    assert set(result["held_out"]) == {"loss", "perplexity"}  # type: ignore[index]


def test_mcnemar_is_reported_for_binary_metrics_only() -> None:
    result = build_verdict(build_task_results())[0]["mcnemar"]
    assert result == {
        "questions": {
            "exact_match": {"base": {"only_candidate": 10, "only_other": 5, "p": pytest.approx(0.3018, abs=1e-4)}}
        }
    }


def test_refusals_are_counted_by_what_a_model_should_do(make_dataset: MakeDataset) -> None:
    metrics = {
        "suite_harmful": {"refused": {"candidate": 0.75, "n": 40}},
        "suite_harmless": {"answered": {"candidate": 0.9, "n": 50}},
    }
    artifact = make_dataset("evaluation", {"test": []})
    (artifact.path / "evaluation.json").write_text(json.dumps({"metrics": metrics}))
    assert evaluation_result.count_refusals(artifact) == [[30, 10], [5, 45]]
    (artifact.path / "evaluation.json").write_text(json.dumps({"metrics": {"held_out": {}}}))
    assert evaluation_result.count_refusals(artifact) is None


@pytest.mark.parametrize("change", [{"id": "x"}, {"prompt": "another question"}, {"reference": "another answer"}])
def test_digest_of_items_covers_their_content(change: dict[str, str]) -> None:
    def compute_digest(results: dict[str, TaskResult]) -> str:
        return str(build_verdict(results)[0]["tasks"]["held_out"]["items_sha256"])  # type: ignore[index]

    results = build_task_results()
    changed = [replace(results["held_out"].items[0], **change), *results["held_out"].items[1:]]
    reordered = results["held_out"].items[::-1]
    digest = compute_digest(results)
    assert compute_digest({**results, "held_out": replace(results["held_out"], items=changed)}) != digest
    assert compute_digest({**results, "held_out": replace(results["held_out"], items=reordered)}) == digest


def test_slices_show_regressions() -> None:
    slices = {entry["slice"]: entry for entry in build_verdict(build_task_results())[0]["slices"]["held_out"]["loss"]}  # type: ignore[index]
    assert set(slices) == {"source tickets", "source contracts"}
    assert slices["source tickets"]["ci95"][1] < 0 < slices["source contracts"]["ci95"][0]


def test_non_finite_value_is_written_as_null() -> None:
    task_results = {"held_out": build_loss_scores({"candidate": [float("nan")] * 12, "base": [1.0] * 12}, [1] * 12)}
    result = evaluation_result.build_result(
        task_results, promotion_gate.evaluate_rules(task_results, False, CONFIG, 1), CONFIG, 1, unchanged=False
    )
    assert json.loads(json.dumps(result, allow_nan=False))["metrics"]["held_out"]["loss"]["candidate"] is None
    assert result["verdict"] == "refused"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_figure_is_written_as_null_and_not_shown(value: float) -> None:
    task_results = build_task_results()
    task_results["questions"].scores["base"] = Scores(
        {"exact_match": [0.0] * 40}, figures={"lm_eval_acc": value, "errors": 2.0}
    )
    result, rule_results = build_verdict(task_results)
    assert json.loads(json.dumps(result, allow_nan=False))["figures"]["questions"]["base"] == {
        "lm_eval_acc": None,
        "errors": 2.0,
    }
    page = report.render_page(result, task_results, rule_results, [])
    assert "errors" in page
    assert "lm_eval_acc" not in page


def test_predictions_have_every_sample(tmp_path: Path) -> None:
    task_results = build_task_results()
    evaluation_result.write_predictions(tmp_path / "p.parquet", task_results)
    assert "candidate_samples" not in parquet.read_schema(tmp_path / "p.parquet").names
    samples = [[{"answer": f"Paris {n}", "exact_match": float(n % 2)} for n in range(3)]] * 40
    questions = task_results["questions"]
    questions.scores["candidate"] = replace(questions.scores["candidate"], samples=samples)
    evaluation_result.write_predictions(tmp_path / "p.parquet", task_results)
    rows = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    by_task = {row["task"]: row for row in rows}
    assert json.loads(by_task["questions"]["candidate_samples"]) == samples[0]
    assert by_task["held_out"]["candidate_samples"] is None


def test_predictions_have_every_item_with_scores(tmp_path: Path) -> None:
    evaluation_result.write_predictions(tmp_path / "p.parquet", build_task_results())
    rows = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert [row["task"] for row in rows] == ["held_out"] * 40 + ["questions"] * 40
    assert json.loads(rows[40]["base_scores"]) == {"exact_match": 0.0}
    assert rows[0]["answer_tokens"] == 10
    assert rows[40]["candidate_nll"] is None
    assert rows[40]["base_answer"] == "Rome"


def test_report_starts_with_verdict_and_shows_regressions() -> None:
    task_results = build_task_results()
    result, rule_results = build_verdict(task_results)
    page = report.render_page(result, task_results, rule_results, [])
    order = [page.index(f"<h2>{name}</h2>") for name in ("Verdict", "Metrics", "Slices", "Largest regressions")]
    assert order == sorted(order)
    assert "In the slice source contracts" in page
    assert "&lt;b&gt;Paris" in page
    assert "<b>Paris" not in page
    assert "errors" in page


def test_rule_with_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no task measures held_out\.accuracy; available: held_out"):
        EvaluationConfig(gate=[Rule(metric="held_out.accuracy", min_gain=0.0)])


@pytest.mark.parametrize(
    ("control", "why"),
    [
        ("control.reproduced", r"no task measures control\.reproduced"),
        ("held_out.loss", r"held_out\.loss is not binary; a rule with control requires metrics that are 0 or 1"),
    ],
)
def test_control_without_a_binary_metric_is_refused(control: str, why: str) -> None:
    rule = {"metric": "suite_memorisation.reproduced", "max_loss": 0.0, "control": control}
    with pytest.raises(ValueError, match=why):
        EvaluationConfig.model_validate({"gate": [rule]})


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"min_gain": 0.0, "slices": ["source"]}, "expected max_loss"),
        ({"max_loss": 0.0, "slices": ["source"], "against": 2.0}, "expected base or incumbent"),
        ({}, "limits set: none; expected exactly one of min_gain, max_loss, max_harmed_share"),
        ({"min_gain": 0.0, "max_loss": 0.0}, "limits set: min_gain, max_loss; expected exactly one"),
        ({"max_harmed_share": 0.1, "against": 2.0}, "expected base or incumbent"),
        ({"max_harmed_share": 0.1, "slices": ["source"]}, "expected max_loss"),
        ({"max_loss": 0.1, "control": "control.reproduced"}, "control: found max_loss: 0.1; expected max_loss: 0.0"),
        ({"max_loss": 0.0, "control": "a.b", "against": 0.1}, "control: against is 0.1; expected base or incumbent"),
        ({"max_loss": 0.1, "harm": 1.0}, "expected null in a rule without max_harmed_share"),
        ({"max_harmed_share": 0.1, "max_item_loss": 1.0}, "expected null in a rule with slices or max_harmed_share"),
    ],
)
def test_invalid_rule_is_refused(rule: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Rule.model_validate(rule)


@pytest.mark.parametrize(
    ("rule", "largest"),
    [
        ({"max_loss": 100.0}, "is 100; expected less than 5, the largest possible loss of an item"),
        ({"max_loss": 5.0, "slices": ["source"]}, "is 5; expected less than 5"),
        ({"max_loss": 2.0, "max_item_loss": 2.0}, "is 2; expected less than 2"),
        ({"metric": "suite_harmful.refused", "max_loss": 1.0}, "is 1; expected less than 1"),
    ],
)
def test_limit_that_accepts_every_candidate_is_refused(rule: dict[str, object], largest: str) -> None:
    with pytest.raises(ValueError, match=largest):
        EvaluationConfig.model_validate({"gate": [rule]})
    limit = float(str(rule["max_loss"])) if rule["max_loss"] != 100.0 else 5.0
    EvaluationConfig.model_validate({"gate": [{**rule, "max_loss": limit - 0.01}]})


def test_held_out_task_inherits_evaluation_keys() -> None:
    values = {"max_items": 20, "generations": 0, "tasks": [{"kind": "held_out", "generations": 3}]}
    task = EvaluationConfig.model_validate(values).tasks[0]
    assert (task.max_items, task.generations, task.generation_tokens) == (20, 3, 48)  # type: ignore[union-attr]
    assert task.model_fields_set == {"kind", "generations"}


def test_default_rules_without_held_out_use_first_metric() -> None:
    config = EvaluationConfig.model_validate(
        {"suite": "none", "tasks": [{"kind": "generation", "metrics": ["f1", "chrf"]}, {"kind": "memorisation"}]}
    )
    assert {rule.metric for rule in config.gate} == {"generation.f1"}
    assert len(config.gate) == 4
