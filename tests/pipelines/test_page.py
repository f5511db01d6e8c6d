"""The comparison section, the summary and the warnings of the run report."""

from __future__ import annotations

from typing import Any

import pytest

from components.common.gate_rules import describe_outcome
from pipelines.steps import report_page, report_summary


def test_rule_over_slices_has_its_own_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, Any] = {}

    def plot(rows: dict[str, Any], **_: Any) -> str:
        shown.update(rows)
        return ""

    monkeypatch.setattr(report_page.html_report, "plot_intervals", plot)
    rule = {"metric": "loss", "against": "base", "holds": True, "reason": "It is better."}
    overall = {**rule, "gain": [0.5, 0.4, 0.6]}  # the format of earlier releases, without slices
    slices = {**rule, "slices": ["source"], "holds": False, "gain": [-0.2, -0.3, -0.1]}
    report_page._render_comparison({"rules": [overall, slices], "metrics": {}})
    assert shown == {"loss against base": (0.5, 0.4, 0.6), "loss, worst slice against base": (-0.2, -0.3, -0.1)}


NO_INCUMBENT = {"metric": "held_out.loss", "against": "incumbent", "holds": True, "gain": None, "reason": "None."}


def build_record(gain: list[float], **training: Any) -> dict[str, Any]:
    rule = {"metric": "held_out.loss", "against": "base", "holds": gain[1] > 0, "gain": gain, "reason": "A gain."}
    suite = {"metric": "suite_harmful.refused", "against": "base", "holds": True, "gain": gain, "reason": "Safe."}
    figures = {"epochs": 0.5, "steps": 40, "best_step": 10, "rows_seen": 60}
    figures |= {"validation_loss": 2.0, "validation_loss_before": 3.0}
    values = {"candidate": 2.0, "base": 2.5, "incumbent": None, "n": 40}
    return {
        "training": {**figures, "rows": {"train": 120, "truncated": 0, "without_answer": 0}, **training},
        "revision": {"tag": "dataset-v3"},
        "evaluation": {"metrics": {"held_out": {"loss": values}}, "rules": [rule, suite, NO_INCUMBENT]},
        "package": {"proof": {"matched": 4}},
        "data": {"rows": {"quarantined": 0}, "evaluation_sets": {}},
    }


@pytest.mark.parametrize(
    ("gain", "comparison"),
    [
        ([0.5, 0.4, 0.6], "is better than that of the base model (2 vs. 2.5, 40 items)"),
        ([-0.5, -0.6, -0.4], "is worse than that of the base model (2 vs. 2.5, 40 items)"),
        ([0.1, -0.2, 0.4], "does not differ significantly from that of the base model (2 vs. 2.5, 40 items)"),
    ],
)
def test_summary_has_three_sentences(gain: list[float], comparison: str) -> None:
    assert report_summary.summarize(build_record(gain)) == [
        "Trained for 0.5 epochs on 60 of 120 rows (50%) of dataset-v3; the weights are from step 10, "
        "which has the lowest validation loss.",
        f"The candidate's loss on held-out text {comparison}.",
        "Not measured: the difference from an earlier version, because no incumbent exists.",
    ]


@pytest.mark.parametrize(
    ("rule", "unjudged"),
    [
        ({"gain": None, "max_harmed_share": 0.1}, ""),
        ({"slices": ["source"]}, ""),
        ({"against": "incumbent"}, " No rule compares them."),
    ],
)
def test_summary_without_an_overall_gain_states_whether_a_rule_compares(rule: dict[str, Any], unjudged: str) -> None:
    record = build_record([0.5, 0.4, 0.6])
    record["evaluation"]["rules"][0] |= rule
    sentence = f"The candidate's loss on held-out text and that of the base model: 2 vs. 2.5, 40 items.{unjudged}"
    assert report_summary.summarize(record)[1] == sentence


def test_warnings_state_what_limits_the_result() -> None:
    healthy = build_record([0.5, 0.4, 0.6], epochs=1.0, rows_seen=120)
    assert report_summary.list_warnings(healthy) == []
    rows = {"train": 120, "truncated": 7, "without_answer": 2}
    limited = build_record([-0.5, -0.6, -0.4], validation_loss=4.0, rows=rows)
    limited["package"] = {"proof": None, "unproven_because": "glibc is older than 2.35"}
    limited["data"] = {"rows": {"quarantined": 3}, "evaluation_sets": {"arc.jsonl": {"unsearchable": 1}}}
    assert report_summary.list_warnings(limited) == [
        "At least one rule of the gate failed. The Verdict section lists the failed rules.",
        "The package is not proven: glibc is older than 2.35. Its promotion requires --force and --reason.",
        "Training used 50% of the rows. Unless training stopped early, set fine_tuning.max_steps to null and "
        "fine_tuning.epochs to at least 1 to train on all rows.",
        "The validation loss rose from 3 to 4 during training.",
        "7 training rows were truncated to the maximum length.",
        "2 rows were skipped. The training report states the reason.",
        "3 records were quarantined. The dataset's quarantine.jsonl lists the reasons.",
        "Decontamination cannot search the training data for the questions of some items of arc.jsonl.",
    ]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"holds": True, "gain": None, "p": None, "harmed_items": None}, "not applicable"),
        ({"holds": True, "gain": None, "p": None, "harmed_items": 0}, "passed"),
        ({"holds": True, "gain": None, "p": 0.4}, "passed"),
        ({"holds": True, "gain": [0.5, 0.4, 0.6]}, "passed"),
        ({"holds": False, "gain": None}, "failed"),
    ],
)
def test_rule_without_a_comparison_is_not_applicable(result: dict[str, Any], outcome: str) -> None:
    assert describe_outcome(result) == outcome


def test_sources_beyond_ten_are_left_to_the_lineage() -> None:
    sources = [{"uri": f"doc{number}.md", "sha256": f"{number:064d}"} for number in range(12)]
    data = {
        "rows": {"in": 12, "kept": 12, "rejected": {}, "quarantined": 0},
        "splits": {"train": 10, "validation": 1, "test": 1},
        "sources": sources,
        "evaluation_sets": {},
        "dropped": [],
        "unreadable": [],
    }
    page = report_page._render_data(data)
    assert "doc9.md" in page
    assert "doc10.md" not in page
    assert "The lineage below lists 2 more sources." in page


def test_missing_answers_are_explained_by_the_objective() -> None:
    assert "evaluation.generations sets the number" in report_page._render_answers([], "sft")
    assert "rows of plain text contain no questions" in report_page._render_answers([], "text")
    answer = {"prompt": "Why?", "reference": "So.", "base_answer": "No.", "candidate_answer": "Yes."}
    page = report_page._render_answers([answer], "sft")
    assert all(text in page for text in answer.values())
