"""What an evaluation writes down, and the page it is read from."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from components.evaluation import gate, report, result
from components.evaluation.config import EvaluationConfig, Rule
from components.evaluation.measured import Measured
from components.evaluation.task import Scores
from tests.evaluation.making import RIGHT, Numbers, items, losses

CONFIG = EvaluationConfig(bootstrap_samples=1000)
SOURCES = ["tickets"] * 20 + ["contracts"] * 20


def asked() -> dict[str, Measured]:
    base = [30.0 + i % 7 for i in range(40)]
    candidate = [v - 6 + i % 3 for i, v in enumerate(base[:20])] + [v + 4 + i % 3 for i, v in enumerate(base[20:])]
    held_out = losses({"candidate": candidate, "base": base}, [10] * 40, source=SOURCES)
    right = Scores({"exact_match": [1.0] * 25 + [0.0] * 15}, answers=["<b>Paris</b>"] * 40)
    wrong = Scores({"exact_match": [0.0] * 10 + [1.0] * 20 + [0.0] * 10}, answers=["Rome"] * 40, figures={"errors": 2.0})
    questions = Measured(Numbers("questions", RIGHT), items(40, source=SOURCES), {"candidate": right, "base": wrong}, {}, "1" * 64)
    return {"held_out": held_out, "questions": questions}


def judged(measured: dict[str, Measured]) -> tuple[dict[str, object], list[gate.Ruling]]:
    ruled = gate.rulings(measured, False, CONFIG.model_copy(update={"gate": CONFIG.gate}), 1)
    return result.result(measured, ruled, CONFIG, 1, unchanged=False), ruled


def test_every_metric_has_its_models_its_interval_and_its_n() -> None:
    found = judged(asked())[0]["metrics"]
    assert found["questions"]["exact_match"] == {  # type: ignore[index]
        "candidate": 0.625, "base": 0.5, "incumbent": None, "ci95": pytest.approx([-0.05, 0.3], abs=0.03), "n": 40,
    }  # fmt: skip
    assert set(found["held_out"]) == {"loss", "perplexity"}  # type: ignore[index]


def test_right_and_wrong_come_with_mcnemar_and_losses_do_not() -> None:
    found = judged(asked())[0]["mcnemar"]
    assert found == {"questions": {"exact_match": {"base": {"only_candidate": 10, "only_other": 5, "p": pytest.approx(0.3018, abs=1e-4)}}}}


def test_slices_show_where_it_got_worse() -> None:
    slices = {one["slice"]: one for one in judged(asked())[0]["slices"]["held_out"]["loss"]}  # type: ignore[index]
    assert set(slices) == {"source tickets", "source contracts"}
    assert slices["source tickets"]["ci95"][1] < 0 < slices["source contracts"]["ci95"][0]


def test_a_value_that_is_no_number_is_written_as_none_and_the_file_stays_json() -> None:
    measured = {"held_out": losses({"candidate": [float("nan")] * 12, "base": [1.0] * 12}, [1] * 12)}
    found = result.result(measured, gate.rulings(measured, False, CONFIG, 1), CONFIG, 1, unchanged=False)
    assert json.loads(json.dumps(found, allow_nan=False))["metrics"]["held_out"]["loss"]["candidate"] is None
    assert found["verdict"] == "refused"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_written_as_none_and_not_shown(value: float) -> None:
    measured = asked()
    measured["questions"].scores["base"] = Scores({"exact_match": [0.0] * 40}, figures={"lm_eval_acc": value, "errors": 2.0})
    found, ruled = judged(measured)
    assert json.loads(json.dumps(found, allow_nan=False))["figures"]["questions"]["base"] == {"lm_eval_acc": None, "errors": 2.0}
    shown = report.page(found, measured, ruled, [])
    assert "errors" in shown
    assert "lm_eval_acc" not in shown


def test_predictions_hold_every_item_of_every_task_with_its_scores(tmp_path: Path) -> None:
    result.write_predictions(tmp_path / "p.parquet", asked())
    rows = parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert [row["task"] for row in rows] == ["held_out"] * 40 + ["questions"] * 40
    assert json.loads(rows[40]["base_scores"]) == {"exact_match": 0.0}
    assert rows[0]["answer_tokens"] == 10
    assert rows[40]["candidate_nll"] is None
    assert rows[40]["base_answer"] == "Rome"


def test_the_page_says_the_verdict_first_and_shows_the_worst_items_with_what_was_answered() -> None:
    measured = asked()
    found, ruled = judged(measured)
    page = report.page(found, measured, ruled, [])
    order = [page.index(f"<h2>{name}</h2>") for name in ("Verdict", "Metrics", "Slices", "Where the candidate got worse")]
    assert order == sorted(order)
    assert "In the slice source contracts" in page
    assert "&lt;b&gt;Paris" in page
    assert "<b>Paris" not in page
    assert "errors" in page


def test_a_rule_names_what_no_task_measures() -> None:
    with pytest.raises(ValueError, match="is measured by no task; there are held_out"):
        EvaluationConfig(gate=[Rule(metric="held_out.accuracy", min_gain=0.0)])


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"min_gain": 0.0, "slices": ["source"]}, "takes max_loss"),
        ({"max_loss": 0.0, "slices": ["source"], "against": 2.0}, "compares with base or incumbent"),
        ({}, "either min_gain or max_loss"),
        ({"min_gain": 0.0, "max_loss": 0.0}, "either min_gain or max_loss"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rule: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Rule.model_validate(rule)


def test_a_held_out_task_follows_the_evaluation_in_what_it_does_not_say_itself() -> None:
    values = {"max_items": 20, "generations": 0, "tasks": [{"kind": "held_out", "generations": 3}]}
    task = EvaluationConfig.model_validate(values).tasks[0]
    assert (task.max_items, task.generations, task.generation_tokens) == (20, 3, 48)  # type: ignore[union-attr]
    assert task.model_fields_set == {"kind", "generations"}


def test_without_a_held_out_task_the_default_rules_are_about_the_first_metric_of_the_first_task() -> None:
    config = EvaluationConfig.model_validate({"tasks": [{"kind": "generation", "metrics": ["f1", "chrf"]}, {"kind": "memorisation"}]})
    assert {rule.metric for rule in config.gate} == {"generation.f1"}
    assert len(config.gate) == 4
