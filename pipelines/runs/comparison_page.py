"""HTML page of a comparison of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.common.reporting import html_report
from components.common.runtime.reporters import format_number
from pipelines.steps.stage_names import STAGE_LABELS

Json = Mapping[str, Any]
MAX_ANSWER_CHARACTERS = 1000
ROUNDING_ERROR = 1e-12  # of a mean of scores
MAX_PLOTTED_POINTS = 500  # per line; more do not change a plot of this width


def render_comparison(comparison: Json) -> str:
    """Return the page for the object of `run_comparison.compare_runs`."""
    names = [run["run"] for run in comparison["runs"]]
    return html_report.render_page(
        f"Comparison of {len(names)} runs", f"reference: {names[0]}", render_sections(comparison)
    )


def render_sections(comparison: Json) -> dict[str, str]:
    """Return the HTML of the page's sections by heading; a section may be empty."""
    runs = comparison["runs"]
    names = [run["run"] for run in runs]
    parameters = [[key, *map(format_parameter, values)] for key, values in comparison["parameters"].items()]
    return {
        "Limits": "".join(html_report.render_paragraph(text, "bad") for text in comparison["warnings"]),
        "Runs": html_report.render_table(RUN_HEAD, list_run_rows(runs)),
        "Parameters": html_report.render_table(["parameter", *names], parameters)
        if parameters
        else html_report.render_paragraph("The configurations are equal.", "soft"),
        "Data": html_report.render_table(["rows", *names], list_data_rows(runs)),
        "Training": _plot_curves(runs),
        "Metrics": _render_metrics(comparison),
        "Gate": "".join(_render_gate(run) for run in runs),
        "Duration": html_report.render_table(["seconds", *names], list_stage_rows(runs)),
        "Answers": "".join(_render_answers(answer, names) for answer in comparison["answers"]),
    }


RUN_HEAD = ["run", "state", "verdict", "model", "steps", "last training loss", "validation loss", "seconds"]


def list_run_rows(runs: Sequence[Json]) -> list[list[object]]:
    """Return one row of RUN_HEAD for each run."""
    rows: list[list[object]] = []
    for run in runs:
        model = run["model"] or {}
        verdict = run["verdict"] or (run["evaluation"] or {}).get("verdict")
        version = f"{run['model_name']} version {run['model_version']}" if run["model_version"] else None
        figures = [model.get(name) for name in ("steps", "train_loss", "validation_loss")]
        rows.append([run["run"], run["state"], verdict, version, *figures, run["seconds"]])
    return rows


def list_data_rows(runs: Sequence[Json]) -> list[list[object]]:
    """Return the rows by outcome and by split, and the digests: a name, and one value for each run."""
    counts = [_count_rows(run["dataset"]) if run["dataset"] else None for run in runs]
    names = dict.fromkeys(name for one in counts for name in one or ())
    rows: list[list[object]] = [
        [name, *(None if one is None else one.get(name, 0) for one in counts)] for name in names
    ]
    digests = [run["dataset"] and run["dataset"]["sha256"] for run in runs]
    equal = [digest == digests[0] if digest and digests[0] else None for digest in digests]
    return [*rows, ["equal to the first run", *equal], ["digest", *(digest and digest[:12] for digest in digests)]]


def _count_rows(dataset: Json) -> dict[str, int]:
    rows = dataset["rows"]
    return {
        "in": rows["in"],
        "kept": rows["kept"],
        "quarantined": rows["quarantined"],
        **{f"rejected: {reason}": count for reason, count in rows["rejected"].items()},
        **{f"{split} split": count for split, count in dataset["splits"].items()},
    }


def list_stage_rows(runs: Sequence[Json]) -> list[list[object]]:
    """Return the seconds of each stage: its label, and a number, `cached`, another state or None for each run."""
    by_run = [{stage["name"]: stage for stage in run["stages"]} for run in runs]
    rows: list[list[object]] = []
    for name, label in STAGE_LABELS.items():
        stages = [stages.get(name) for stages in by_run]
        if any(stages):
            rows.append([label, *(_describe_duration(stage) for stage in stages)])
    return [*rows, ["whole run", *(run["seconds"] for run in runs)]]


def _describe_duration(stage: Json | None) -> object:
    if stage is None:
        return None
    return float(stage["seconds"]) if stage["state"] == "finished" else stage["state"]


def build_metric_table(comparison: Json) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the metrics.

    Each run has a column with its candidate's value and one with the interval of candidate − base. From the second run
    on, a third column has the difference from the first run's candidate and its interval.
    """
    head = ["metric", "items", "base"]
    for number, run in enumerate(comparison["runs"]):
        head += [run["run"], "− base (95% CI)", *(["− first (95% CI)"] if number else [])]
    rows = []
    for task, by_metric in comparison["metrics"].items():
        for metric, values in by_metric.items():
            known = [value for value in values if value]
            counts = dict.fromkeys(str(value["n"]) for value in known)
            bases = dict.fromkeys(format_metric(value["base"]) for value in known)
            row = [f"{task}.{metric}", " / ".join(counts), " / ".join(bases)]
            for number, value in enumerate(values):
                row += _format_metric(value)[: 3 if number else 2]
            rows.append(row)
    return head, rows


def _format_metric(value: Json | None) -> list[str]:
    """Return the candidate's value, the interval of candidate − base, and the difference to the first run."""
    if value is None:
        return ["–"] * 3
    interval = format_interval(value["ci95"]) if value["ci95"] else "–"
    if (difference := value["difference"]) is None:
        return [format_metric(value["candidate"]), interval, "–"]
    text = f"{format_difference(difference['value'])} ({format_interval(difference['ci95'])})"
    return [format_metric(value["candidate"]), interval, text]


def format_interval(bounds: Sequence[float]) -> str:
    """Return an interval as text."""
    low, high = map(format_difference, bounds)
    return f"{low} to {high}"


def format_difference(value: float) -> str:
    """Return a difference of metrics with its sign and three significant digits; rounding errors are 0."""
    return "0" if abs(value) < ROUNDING_ERROR else f"{value:+.3g}"


def format_metric(value: float | None) -> str:
    """Return a metric's value with four significant digits."""
    return "–" if value is None else format_number(value)


def format_parameter(value: object) -> str:
    """Return a value of the configuration as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plot_curves(runs: Sequence[Json]) -> str:
    plots = ""
    for name in ("train_loss", "validation_loss"):
        series = {}
        for run in runs:
            points = [(line["step"], line[name]) for line in run["curve"] if name in line]
            points = points[:: max(1, len(points) // MAX_PLOTTED_POINTS)]
            if points:
                series[run["run"]] = ([x for x, _ in points], [y for _, y in points])
        if series:
            title = "Training loss" if name == "train_loss" else "Validation loss"
            caption = f"{title} by optimizer step, as defined by each run's objective."
            plots += html_report.plot_lines(series, x="optimizer step", y="loss", caption=caption)
    return plots


def _render_metrics(comparison: Json) -> str:
    if not comparison["metrics"]:
        return html_report.render_paragraph("No run has an evaluation.", "soft")
    names = [run["run"] for run in comparison["runs"]]
    note = (
        "Columns of each run: the candidate's value and the 95% confidence interval of candidate − base. If the items are the "
        "same, later runs also show the difference from the first run's candidate with its 95% interval (paired bootstrap). "
        "The intervals are not corrected for multiple comparisons."
    )
    table = html_report.render_table(*build_metric_table(comparison))
    intervals = {
        f"{names[number]}: {task}.{metric}": (difference["value"], *difference["ci95"])
        for task, by_metric in comparison["metrics"].items()
        for metric, values in list(by_metric.items())[:1]  # metrics of one task have different scales
        for number, value in enumerate(values)
        if value and (difference := value["difference"])
    }
    plot = ""
    if intervals:
        caption = f"First metric of each task: difference from {names[0]} with its 95% confidence interval."
        plot = html_report.plot_intervals(intervals, x="difference", caption=caption)
    return html_report.render_paragraph(note, "soft") + table + plot


def _render_gate(run: Json) -> str:
    evaluation = run["evaluation"]
    if evaluation is None:
        return html_report.render_paragraph(f"{run['run']}: no evaluation", "soft")
    outcomes = dict.fromkeys(evaluation["not_applicable"], "not applicable")
    outcomes |= dict.fromkeys(evaluation["failed"], "failed")
    rows = [[outcomes.get(reason, "passed"), reason] for reason in evaluation["reasons"]]
    is_accepted = not evaluation["failed"]
    heading = html_report.render_paragraph(f"{run['run']}: {evaluation['verdict']}", "good" if is_accepted else "bad")
    return heading + html_report.render_table(["rule", "finding"], rows)


def _render_answers(answer: Json, names: Sequence[str]) -> str:
    texts = {
        "reference": answer["reference"],
        "base": answer["base"],
        **dict(zip(names, answer["answers"], strict=True)),
    }
    shown = {title: shorten(text, MAX_ANSWER_CHARACTERS) for title, text in texts.items() if text}
    return html_report.render_cards(shown, prompt=shorten(answer["prompt"], MAX_ANSWER_CHARACTERS))


def shorten(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, and an ellipsis if it was longer."""
    return text if len(text) <= limit else text[:limit] + " …"
