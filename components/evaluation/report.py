"""The page on which a release owner reads why a candidate was accepted or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.common import report
from components.common.artifacts import Input
from components.evaluation.gate import Ruling
from components.evaluation.measured import ROLES, Measured

SHOWN = 5  # worst items, and answers side by side, a task
TITLES = {"reference": "reference", "base": "base", "candidate": "candidate", "incumbent": "in service"}


def page(result: dict[str, Any], measured: Mapping[str, Measured], ruled: Sequence[Ruling], inputs: Sequence[Input]) -> str:
    """Verdict and reasons first, then the figures with their intervals and slices, where it got worse, and the answers side by side."""
    items = sum(len(task.items) for task in measured.values())
    sections = {
        "Verdict": report.tiles(_tiles(result, measured, items)) + _reasons(result, ruled),
        "Differences the rules look at": _differences(ruled),
        "Metrics": _metrics(result),
        "Slices": _slices(result, measured),
        "Where the candidate got worse": "".join(_worst(name, task) for name, task in measured.items()),
        "Answers side by side": "".join(_answers(task) for task in measured.values()),
        "Made from": report.table(["kind", "digest", "where"], [[i.kind, i.content_sha256, i.uri] for i in inputs]),
    }
    return report.page(
        "Evaluation", f"{result['verdict']}: {items:,} items of {len(measured)} {'task' if len(measured) == 1 else 'tasks'}", sections
    )


def _tiles(result: dict[str, Any], measured: Mapping[str, Measured], items: int) -> dict[str, Any]:
    name, task = next(iter(measured.items()))
    metric = next(iter(task.task.metrics))
    values = result["metrics"][name][metric]
    shown = {f"{metric} of the {TITLES[role]}": values[role] for role in ("base", "candidate") if values[role] is not None}
    if "incumbent" in task.scores or "incumbent" in task.why_not:
        shown[f"{metric} of the model in service"] = values["incumbent"]
    return {"verdict": result["verdict"], "items": items, **shown}


def _reasons(result: dict[str, Any], ruled: Sequence[Ruling]) -> str:
    failed = {ruling.reason for ruling in ruled if not ruling.holds}
    return "".join(report.paragraph(reason, "bad" if reason in failed else "good") for reason in result["reasons"])


def _differences(ruled: Sequence[Ruling]) -> str:
    rows = {f"{_named(r)} against {r.rule.against}": (r.gain.value, r.gain.low, r.gain.high) for r in ruled if r.gain}
    caption = "Gain of the candidate with its 95% interval. Right of zero the candidate is better."
    return report.interval_plot(rows, x="gain", caption=caption) if rows else ""


def _named(ruling: Ruling) -> str:
    return f"{ruling.rule.metric}, worst slice" if ruling.rule.slices else ruling.rule.metric


def _metrics(result: Mapping[str, Any]) -> str:
    rows = []
    for task, by_metric in result["metrics"].items():
        for metric, values in by_metric.items():
            p = result["mcnemar"].get(task, {}).get(metric, {}).get("base", {}).get("p")
            rows.append([f"{task}.{metric}", values["candidate"], values["base"], values["incumbent"], _interval(values), values["n"], p])
    head = ["metric", "candidate", "base", "in service", "95% interval, candidate − base", "items", "McNemar p, against base"]
    return report.table(head if any(row[-1] is not None for row in rows) else head[:-1], _without_empty(rows)) + _figures(result)


def _without_empty(rows: list[list[Any]]) -> list[list[Any]]:
    return rows if any(row[-1] is not None for row in rows) else [row[:-1] for row in rows]


def _interval(values: Mapping[str, Any]) -> str | None:
    return "{:+.4f} to {:+.4f}".format(*values["ci95"]) if values["ci95"] else None


def _figures(result: Mapping[str, Any]) -> str:
    """Counts that no rule compares, such as a judge's errors."""
    rows = [
        [task, role, name, value]
        for task, by_role in result["figures"].items()
        for role, own in by_role.items()
        for name, value in own.items()
        if value is not None
    ]
    return report.table(["task", "model", "count", "value"], rows) if rows else ""


def _slices(result: Mapping[str, Any], measured: Mapping[str, Measured]) -> str:
    """Of each task its first metric: a table, and the gains as intervals where there are any."""
    parts = []
    for task, by_metric in result["slices"].items():
        metric, found = next(iter(by_metric.items()))
        plotted = {s["slice"]: _gain(s, measured[task].metric(metric).better) for s in found if s["ci95"]}
        caption = f"{task}.{metric} by slice: gain over the base with its 95% interval (not corrected for their number). Right is better."
        rows = [[s["slice"], s["candidate"], s["base"], s["incumbent"], _interval(s), s["n"]] for s in found]
        table = report.table([f"{task}.{metric}", "candidate", "base", "in service", "95% interval, candidate − base", "items"], rows)
        parts.append((report.interval_plot(plotted, x="gain", caption=caption) if plotted else "") + table)
    return "".join(parts)


def _gain(found: Mapping[str, Any], better: str) -> tuple[float, float, float]:
    value, (low, high) = found["candidate"] - found["base"], found["ci95"]
    return (value, low, high) if better == "higher" else (-value, -high, -low)


def _worst(name: str, task: Measured) -> str:
    """The items on which the candidate lost most against the model in service, or the base: what was asked, and what each said."""
    metric, other = next(iter(task.task.metrics)), "incumbent" if task.values("incumbent", next(iter(task.task.metrics))) else "base"
    lost = _losses(task, metric, other)
    cards = []
    for index, loss in lost[:SHOWN]:
        item = task.items[index]
        told = {TITLES[role]: _told(task, role, metric, index) for role in ROLES if task.values(role, metric)}
        cards.append(
            report.cards(
                {f"reference of {name}, {item.id[:12]} (worse by {loss:.3g})": item.reference, **told}, asked=item.prompt or item.id
            )
        )
    return "".join(cards)


def _losses(task: Measured, metric: str, other: str) -> list[tuple[int, float]]:
    """(index, how much worse an item's own score is), worst first; only items that got worse."""
    own, others, weights = task.values("candidate", metric), task.values(other, metric), task.weights(metric)
    if not own or not others:
        return []
    sign = 1 if task.metric(metric).better == "lower" else -1
    found = [(i, sign * (a - b) / w) for i, (a, b, w) in enumerate(zip(own, others, weights, strict=True)) if w]
    return sorted((one for one in found if one[1] > 0), key=lambda one: -one[1])


def _told(task: Measured, role: str, metric: str, index: int) -> str:
    answers, weight = task.scores[role].answers, task.weights(metric)[index]
    answer = answers[index] if answers else None
    return f"{metric} {task.values(role, metric)[index] / weight:.4g}" + (f"\n\n{answer}" if answer else "")


def _answers(task: Measured) -> str:
    own = task.scores["candidate"].answers
    chosen = [i for i, answer in enumerate(own) if answer is not None][:SHOWN]
    shown = []
    for index in chosen:
        item, texts = task.items[index], {"reference": task.items[index].reference}
        texts |= {TITLES[role]: str(s.answers[index] or "") for role, s in task.scores.items() if s.answers}
        shown.append(report.cards(texts, asked=item.prompt))
    return "".join(shown)
