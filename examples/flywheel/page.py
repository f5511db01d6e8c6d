"""The page of the flywheel, and the summary that `--json` prints. Every figure comes from the results of the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from typing import Any

from components.common.reporting import html_report
from examples.flywheel.steps import LAST_CLEAN_DAY, MODEL_NAME

Json = dict[str, Any]
MAX_ANSWER_CHARACTERS = 400


def summarize(steps: Mapping[str, Json]) -> Json:
    """Return the figures of the story. Days are numbers of simulated days, counted from 1."""
    results = {name: each["result"] for name, each in steps.items()}
    first, later, cycle = (results[name] for name in ("serve_first_version", "serve_next_version", "retrain"))
    first_day = date.fromisoformat(results["prepare"]["first_day"])
    checks = {}
    for name in ("find_drift", "check_again"):
        check = results[name]
        days = [(date.fromisoformat(window["from"][:10]) - first_day).days + 1 for window in check["windows"]]
        alarm_day = days[check["alarm_window"] - 1] if check["alarm"] else None
        e_values = {day: window["e_value"] for day, window in zip(days, check["windows"], strict=True)}
        shown = {key: check[key] for key in ("alarm", "threshold", "reference")}
        checks[name] = {**shown, "alarm_day": alarm_day, "e_values": e_values}
    return {
        "first_version": first["version"],
        "next_version": later["version"],
        "questions": first["answers"] + later["answers"],
        "captured": first["captured"] + later["captured"],
        **checks,
        "corrections": results["give_feedback"]["corrections"],
        "training_rows": cycle["export"]["conversations"],
        "held_back_rows": cycle["export"]["held_back"],
        **{key: cycle[key] for key in ("reasons", "comparison", "decision", "reason")},
        "seconds": {name: each["seconds"] for name, each in steps.items()},
    }


def describe(summary: Json) -> str:
    """Return the story in four sentences."""
    first, following, test = summary["first_version"], summary["next_version"], summary["comparison"]
    return (
        "Users' questions moved to another part of Python's standard library. "
        f"The drift check raised an alarm on day {summary['find_drift']['alarm_day']}. "
        f"{summary['corrections']} corrected answers gave {summary['training_rows']} rows for version {following}, which is "
        f"{test['decision']} than version {first} on {summary['held_back_rows']} held-back questions, and was "
        f"{summary['decision']}. "
        f"The following days raise {'an' if summary['check_again']['alarm'] else 'no'} alarm against the new reference."
    )


def render(steps: Mapping[str, Json]) -> str:
    """Return the page."""
    summary, cycle = summarize(steps), steps["retrain"]["result"]
    test = summary["comparison"]
    tiles = {
        "questions answered": summary["questions"],
        "day of the alarm": summary["find_drift"]["alarm_day"],
        "corrections": summary["corrections"],
        "gain in chrF, from 0 to 1": float(test["mean_difference"]),
        "minutes": round(sum(summary["seconds"].values()) / 60),
    }
    versions = [f"version {summary[name]}" for name in ("first_version", "next_version")]
    interval = {f"{versions[1]} − {versions[0]}": (test["mean_difference"], test["low"], test["high"])}
    comparison = html_report.plot_intervals(
        interval,
        x="difference in chrF to the corrections, from −1 to 1",
        caption="Mean over the held-back users, and the interval that holds at all times together with 95%.",
    )
    for each in cycle["answers"]:
        texts = (each[name] or "" for name in ("reference", "incumbent_answer", "candidate_answer"))
        cards = dict(zip(("correction", *versions), (text[:MAX_ANSWER_CHARACTERS] for text in texts), strict=True))
        comparison += html_report.render_cards(cards, prompt=each["prompt"])
    seconds = {name.replace("_", " "): float(value) for name, value in summary["seconds"].items()}
    sections = {
        "Result": html_report.render_paragraph(describe(summary)) + html_report.render_tiles(tiles),
        "Timeline": _plot_evidence(summary) + _render_events(summary, steps["prepare"]["result"]["rows"]),
        "Comparison on held-back questions": comparison,
        "Duration": html_report.plot_bars(seconds, x="seconds", caption="Duration of each step on this machine."),
        "Simulated parts": html_report.render_paragraph(
            "Users, editors and days are simulated. The gateway captured with the clock of this machine; the rows were "
            "then copied to the simulated days. A model of this size learns the form of the corrections, few facts."
        ),
    }
    return html_report.render_page("The flywheel", f"{MODEL_NAME}, {versions[0]} to {versions[1]}", sections)


def _plot_evidence(summary: Json) -> str:
    checks = {"against the first days": summary["find_drift"], "against the new days": summary["check_again"]}
    lines = {
        name: ([*check["e_values"]], [math.log10(value) for value in check["e_values"].values()])
        for name, check in checks.items()
    }
    days = [day for days, _ in lines.values() for day in days]
    lines["alarm"] = ([min(days), max(days)], [math.log10(summary["find_drift"]["threshold"])] * 2)
    caption = "Evidence of drift after each day. Above the line, the check raises an alarm."
    return html_report.plot_lines(lines, x="simulated day", y="log10 of the e-value", caption=caption)


def _render_events(summary: Json, first_rows: int) -> str:
    drift, again, test = summary["find_drift"], summary["check_again"], summary["comparison"]
    (tested, last), (tested_again, end) = ([min(each["e_values"]), max(each["e_values"])] for each in (drift, again))
    alarm = f"e-value {drift['e_values'][drift['alarm_day']]:.3g}; the threshold is {drift['threshold']:g}"
    peak = f"highest e-value {max(again['e_values'].values()):.3g} against {again['reference']['name']}"
    events = {
        f"before day 1: version {summary['first_version']}": f"trained on {first_rows} questions about text and data",
        f"days 1–{tested - 1}: reference": f"{drift['reference']['prompts']} captured questions about text and data",
        f"days {tested}–{last}: traffic": f"from day {LAST_CLEAN_DAY + 1} on about networks and concurrency",
        f"day {drift['alarm_day']}: alarm": alarm,
        f"day {last}: feedback": f"{summary['corrections']} answers corrected by editors",
        f"day {last}: retraining": f"trigger: {'; '.join(summary['reasons'])}",
        f"day {last}: export": f"{summary['training_rows']} rows to train on, {summary['held_back_rows']} held back",
        f"day {last}: comparison": f"{test['decision']} after {test['decided_after']} of {test['pairs']} pairs",
        f"day {last}: {summary['decision']}": summary["reason"],
        f"days {tested_again}–{end}: traffic": f"answered by version {summary['next_version']}",
        f"day {end}: {'alarm' if again['alarm'] else 'no alarm'}": peak,
    }
    return html_report.render_facts({event: (text, "") for event, text in events.items()})
