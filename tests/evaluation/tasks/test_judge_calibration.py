"""Calibration of a judge on labelled pairs: agreement, biases, invalid files, and gate rules without enough agreement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from components.common.gate_rules import Rule
from components.common.runtime import chat_completions
from components.common.runtime.errors import ConfigurationError, InputError
from components.evaluation import promotion_gate
from components.evaluation.config import EvaluationConfig
from components.evaluation.task_interface import Scores
from components.evaluation.task_results import TaskResult
from components.evaluation.tasks import file_digests, judge_calibration
from components.evaluation.tasks.judge import Judge, JudgeTask
from components.evaluation.tasks.judge_calibration import Judgement, LabelledPair
from tests.evaluation.task_builders import build_items
from tests.evaluation.tasks.fake_engines import build_context
from tests.evaluation.tasks.judge_server import MODEL_NAME, FakeJudge, build_judgement, longer_is_better, serve_judge
from tests.tiny import tiny_tokenizer

PAIR_COUNT = 40


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_completions, "INITIAL_BACKOFF_SECONDS", 0.0)


def build_rows(labels: Sequence[str] = ("a", "b")) -> list[dict[str, Any]]:
    """Build labelled pairs; the longer answer is A in every even row and B in every odd row."""
    rows = []
    for number in range(PAIR_COUNT):
        answers = [f"Answer {number} with many words.", f"Answer {number}."]
        label = labels[number % len(labels)]
        rows.append({"prompt": f"Question {number}?", "answers": answers[:: 1 - 2 * (number % 2)], "label": label})
    return rows


def write_pairs(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def calibrate(folder: Path, judge: FakeJudge, rows: Sequence[dict[str, Any]], **settings: Any) -> dict[str, float]:
    values = {"calibration": write_pairs(folder, rows), "base_url": judge.url, "model": MODEL_NAME, "retries": 0}
    task = JudgeTask(Judge.model_validate({**values, **settings}))
    return task.measure_calibration(build_context(tiny_tokenizer()))


def test_judge_that_agrees_with_all_labels(tmp_path: Path) -> None:
    with serve_judge() as judge:
        figures = calibrate(tmp_path, judge, build_rows())
    assert len(judge.requests) == 2 * PAIR_COUNT
    assert (figures["accuracy"], figures["kappa"]) == (1.0, 1.0)
    # No resample disagrees. 40 pairs show an accuracy above 0.928 with 95% confidence; half of them agree by chance.
    assert figures["kappa_bound"] == pytest.approx(2 * 0.05 ** (1 / PAIR_COUNT) - 1)
    assert figures["kappa_low"] == pytest.approx(2 * figures["accuracy_low"] - 1)
    assert figures["accuracy_low"] == pytest.approx(0.025 ** (1 / PAIR_COUNT))
    assert (figures["order_flips"], figures["prefers_first"]) == (0.0, 0.5)
    assert (figures["prefers_longer"], figures["labels_prefer_longer"]) == (1.0, 1.0)


def test_position_bias_is_measured(tmp_path: Path) -> None:
    with serve_judge(lambda first, second: build_judgement("Verdict: A")) as judge:
        figures = calibrate(tmp_path, judge, build_rows(("a", "b", "tie", "b")))
    assert (figures["order_flips"], figures["prefers_first"]) == (1.0, 1.0)
    assert figures["accuracy"] == 0.25  # every contradiction is a tie
    assert figures["kappa"] == 0.0
    assert "kappa is 0.00" in judge_calibration.find_problem(figures, 0.0)


def test_length_bias_is_compared_with_labels(tmp_path: Path) -> None:
    with serve_judge() as judge:
        figures = calibrate(tmp_path, judge, build_rows(("a", "b", "b", "a")))
    assert (figures["prefers_longer"], figures["labels_prefer_longer"]) == (1.0, 0.5)
    assert (figures["accuracy"], figures["kappa"]) == (0.5, 0.0)


def test_missing_judgements_are_disagreements(tmp_path: Path) -> None:
    def decide(first: str, second: str) -> Any:
        return (503, "busy") if "Answer 7" in first and "many" in first else longer_is_better(first, second)

    with serve_judge(decide) as judge:
        figures = calibrate(tmp_path, judge, build_rows())
    assert (figures["errors"], figures["unanswered"]) == (1.0, 1.0)
    assert figures["accuracy"] == 1 - 1 / PAIR_COUNT
    assert figures["kappa"] < 1.0


def test_kappa_equals_published_example() -> None:
    # 50 grant proposals and two readers: en.wikipedia.org/wiki/Cohen's_kappa, "Simple example".
    assert judge_calibration.compute_kappa(np.array([[[20.0, 5.0], [10.0, 15.0]]])) == pytest.approx([0.4])
    assert judge_calibration.compute_kappa(np.array([[[7.0, 0.0], [0.0, 0.0]]])) == [0.0], "one category shows nothing"


def test_interval_of_kappa_covers_its_value() -> None:
    generator, truth = np.random.default_rng(0), 0.6
    covered = above = 0
    for seed in range(50):
        labels = generator.choice(["a", "b"], 100)
        agrees = generator.random(100) < 0.8  # kappa 0.6 with two equally frequent labels
        verdicts = np.where(agrees, labels, np.where(labels == "a", "b", "a"))
        judgements: list[tuple[Judgement, Judgement]] = [
            ("first", "second") if verdict == "a" else ("second", "first") for verdict in verdicts
        ]
        pairs = [LabelledPair([], ("x", "y"), str(label)) for label in labels]
        figures = judge_calibration.measure(pairs, judgements, seed)
        covered += figures["kappa_low"] <= truth <= figures["kappa_high"]
        above += figures["kappa_bound"] > truth
    assert covered >= 44
    assert above <= 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": ["one"]}, "expected two different strings"),
        ({"answers": ["same", "same "]}, "expected two different strings"),
        ({"label": "c"}, "has 'c' in label; expected a, b or tie"),
        ({"prompt": None}, "has no text in prompt"),
    ],
)
def test_invalid_row_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = build_rows()
    rows[3] |= change
    with pytest.raises(InputError, match=r"labels\.jsonl:4: the row ") as error:
        judge_calibration.read_pairs(write_pairs(tmp_path, rows), "prompt")
    assert message in error.value.message


@pytest.mark.parametrize("order", [1, -1])
def test_repeated_pair_is_refused(tmp_path: Path, order: int) -> None:
    rows = build_rows()
    rows[5] = {**rows[3], "answers": [f" {text}\n" for text in rows[3]["answers"]][::order], "label": "tie"}
    with pytest.raises(InputError, match=r"labels\.jsonl:6: the row repeats the pair at .*labels\.jsonl:4"):
        judge_calibration.read_pairs(write_pairs(tmp_path, rows), "prompt")


def test_too_few_pairs_and_single_label_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 29 labelled pairs; expected at least 30"):
        judge_calibration.read_pairs(write_pairs(tmp_path, build_rows()[:29]), "prompt")
    with pytest.raises(InputError, match=r"no pair of .* has the label b"):
        judge_calibration.read_pairs(write_pairs(tmp_path, build_rows(("a", "tie"))), "prompt")


def test_invalid_calibration_fails_before_any_model_is_loaded(tmp_path: Path) -> None:
    settings = {"base_url": "http://127.0.0.1:9/v1", "model": MODEL_NAME}
    task = JudgeTask(Judge(calibration=write_pairs(tmp_path, build_rows()[:3]), **settings))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has 3 labelled pairs"):
        task.items(build_context(tiny_tokenizer()))
    missing = Judge(calibration=str(tmp_path / "none.jsonl"), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"evaluation\.tasks\[0\]\.calibration"):
        file_digests.digest_task_files([missing])


def test_calibration_is_part_of_the_identity(tmp_path: Path) -> None:
    plain = Judge(base_url="https://judge.example/v1", model=MODEL_NAME)
    assert not {"calibration", "min_kappa"} & set(plain.model_dump())
    calibrated = Judge(**plain.model_dump(), calibration=write_pairs(tmp_path, build_rows()), min_kappa=0.5)
    assert calibrated.model_dump()["min_kappa"] == 0.5
    before = file_digests.digest_task_files([calibrated])
    write_pairs(tmp_path, build_rows(("b", "a")))
    assert file_digests.digest_task_files([calibrated]) != before


def test_limit_of_the_agreement_cannot_be_lowered() -> None:
    with pytest.raises(ValidationError, match=r"greater than or equal to 0\.4"):
        Judge(base_url="https://judge.example/v1", model=MODEL_NAME, min_kappa=0.39)


GATE = [{"metric": "judge.win_rate", "against": "base", "max_loss": 0.1}]
JUDGE = {"kind": "judge", "base_url": "https://judge.example/v1", "model": MODEL_NAME}


@pytest.mark.parametrize("changes", [{"tasks": [JUDGE], "gate": GATE}, {"tasks": [JUDGE]}])
def test_rule_on_a_judge_without_calibration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"a rule uses judge\.win_rate, but the judge's calibration is empty"):
        EvaluationConfig.model_validate(changes)


def test_judge_without_rule_needs_no_calibration() -> None:
    assert EvaluationConfig.model_validate({"tasks": [{"kind": "held_out"}, JUDGE]}).tasks[1].name == "judge"
    EvaluationConfig.model_validate({"tasks": [{**JUDGE, "calibration": "labels.jsonl"}], "gate": GATE})


@pytest.mark.parametrize(
    ("calibration", "min_kappa", "reason"),
    [
        ({}, 0.4, "The gate cannot use judge.win_rate: the judge has no calibration."),
        (
            {"pairs": 80.0, "kappa": 0.62, "kappa_bound": 0.47},
            0.5,
            "Cohen's kappa is 0.62, with 0.47 as its lower bound at 95% confidence",
        ),
        ({"pairs": 80.0, "kappa": 0.62, "kappa_bound": 0.47}, 0.45, "judge.win_rate is 0.2000 better than the base"),
    ],
)
def test_gate_refuses_rule_on_a_judge_that_disagrees(
    calibration: dict[str, float], min_kappa: float, reason: str
) -> None:
    config = EvaluationConfig.model_validate(
        {"tasks": [{**JUDGE, "calibration": "labels.jsonl", "min_kappa": min_kappa}], "bootstrap_samples": 1000}
    )
    config.gate = [Rule.model_validate({**GATE[0], "max_loss": 0.3})]
    values = [0.5, 1.0, 0.5, 1.0, 0.5] * 8
    scores = {"candidate": Scores({"win_rate": values}), "base": Scores({"win_rate": [0.5] * len(values)})}
    task = JudgeTask(Judge.model_validate(config.tasks[0].model_dump()))
    result = TaskResult(task, build_items(len(values)), scores, {}, "0" * 64, calibration=calibration)
    (rule_result,) = promotion_gate.evaluate_rules({"judge": result}, False, config, seed=1)
    assert reason in rule_result.reason
    assert rule_result.passed == (min_kappa == 0.45)
