"""The page on which a release owner reads why a candidate was accepted or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.common import report
from components.common.artifacts import Input
from components.evaluation.gate import Ruling
from components.evaluation.items import Item
from components.evaluation.scoring import Scores


def page(
    result: dict[str, Any], scores: Mapping[str, Scores], items: Sequence[Item], ruled: Sequence[Ruling], inputs: Sequence[Input]
) -> str:
    """Verdict and reasons first, then the figures with their intervals, then the answers side by side."""
    mood = "bad" if result["verdict"] == "refused" else "good"
    loss = result["metrics"]["held_out"]["loss"]
    figures = {"verdict": result["verdict"], "held-out items": result["items"], "answer tokens": result["answer_tokens"]}
    figures |= {f"loss of the {role}": loss[role] for role in scores}
    sections = {
        "Verdict": report.tiles(figures) + "".join(report.paragraph(reason, mood) for reason in result["reasons"]),
        "Differences": _differences(ruled),
        "Metrics": _metrics(result["metrics"]),
        "Answers side by side": _answers(scores, items),
        "Made from": report.table(["kind", "digest", "where"], [[i.kind, i.content_sha256, i.uri] for i in inputs]),
    }
    return report.page("Evaluation", f"{result['verdict']}: {result['items']:,} held-out items", sections)


def _differences(ruled: Sequence[Ruling]) -> str:
    rows = {f"{r.rule.metric} against {r.rule.against}": (r.gain.value, r.gain.low, r.gain.high) for r in ruled if r.gain}
    if not rows:
        return ""
    caption = "Gain of the candidate with its interval. Right of zero the candidate is better."
    return report.interval_plot(rows, x="gain", caption=caption)


def _metrics(metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = []
    for task, by_metric in metrics.items():
        for metric, values in by_metric.items():
            interval = "{:+.4f} to {:+.4f}".format(*values["ci95"]) if values["ci95"] else None
            rows.append([f"{task}.{metric}", values["candidate"], values["base"], values["incumbent"], interval, values["n"]])
    return report.table(["metric", "candidate", "base", "in service", "95% interval, candidate − base", "items"], rows)


def _answers(scores: Mapping[str, Scores], items: Sequence[Item]) -> str:
    generated = [item for item in items if item.id in scores["candidate"].answers]
    rows = [[item.prompt, item.reference, *(scores[role].answers.get(item.id, "") for role in scores)] for item in generated]
    return report.table(["prompt", "reference", *scores], rows) if rows else ""
