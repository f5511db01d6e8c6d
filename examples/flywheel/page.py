"""The page of the flywheel, and the summary that `--json` prints. Every figure comes from the results of the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from typing import Any

from components.common.reporting import html_report
from examples.flywheel.steps import (
    ANSWER_TOKENS,
    FIRST_WHOLE_DAY,
    LAST_CLEAN_DAY,
    LAST_DAY,
    LAST_FEEDBACK_DAY,
    MODEL_NAME,
    SHADOW_DAY,
)

Json = dict[str, Any]
MAX_ANSWER_CHARACTERS = 400


def summarize(steps: Mapping[str, Json]) -> Json:
    """Return the figures of the story. Days are numbers of simulated days, counted from 1."""
    results = {name: each["result"] for name, each in steps.items()}
    first, later, cycle, end = (
        results[name] for name in ("serve_first_version", "serve_next_version", "retrain", "promote")
    )
    shadow = results["serve_shadow"]
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
        "questions": sum(each["answers"] for each in (first, shadow, later)),
        "captured": sum(each["captured"] for each in (first, shadow, later)),
        **checks,
        "corrections": first["corrections"],
        "training_rows": cycle["export"]["conversations"],
        "held_back_rows": cycle["export"]["held_back"],
        "reasons": cycle["reasons"],
        "comparison": cycle["comparison"],
        "shadow_comparison": end["shadow"]["comparison"],
        "decision": end["decision"],
        "reason": end["reason"],
        "seconds": {name: each["seconds"] for name, each in steps.items()},
    }


def describe(summary: Json) -> str:
    """Return the story in a few sentences."""
    first, following = summary["first_version"], summary["next_version"]
    held_back, shadow = summary["comparison"], summary["shadow_comparison"]
    return (
        f"Version {first} answered simulated users, whose questions shifted to another part of Python's standard library on "
        f"day {LAST_CLEAN_DAY + 1}. The drift check raised an alarm on day {summary['find_drift']['alarm_day']}. "
        f"{summary['corrections']} corrected answers yielded {summary['training_rows']} training rows for version {following}. "
        f"On {held_back['pairs']} held-back questions, version {following} was {held_back['decision']} in the "
        f"comparison with version {first}. On {shadow['pairs']} live questions that it answered as a shadow, "
        f"version {following} was {shadow['decision']}. Version {following} was {summary['decision']}. "
        f"After that, the drift check raised {'an' if summary['check_again']['alarm'] else 'no'} alarm against the new "
        "reference."
    )


def render(steps: Mapping[str, Json]) -> str:
    """Return the page."""
    summary = summarize(steps)
    tiles = {
        "questions answered": summary["questions"],
        "day of the alarm": summary["find_drift"]["alarm_day"],
        "corrections": summary["corrections"],
        "gain in chrF (scale 0 to 1)": float(summary["shadow_comparison"]["mean_difference"]),
        "minutes": round(sum(summary["seconds"].values()) / 60),
    }
    versions = [f"version {summary[name]}" for name in ("first_version", "next_version")]
    tests = {"held-back questions": summary["comparison"], "live questions (shadow)": summary["shadow_comparison"]}
    comparison = html_report.plot_intervals(
        {name: (test["mean_difference"], test["low"], test["high"]) for name, test in tests.items()},
        x=f"difference in chrF against the correction, {versions[1]} − {versions[0]} (−1 to 1)",
        caption="Mean over the users with its 95% confidence sequence, which is valid after any number of pairs.",
    )
    for each in steps["promote"]["result"]["answers"]:
        texts = (each.get(name) or "" for name in ("reference", "incumbent_answer", "candidate_answer"))
        cards = dict(zip(("correction", *versions), (text[:MAX_ANSWER_CHARACTERS] for text in texts), strict=True))
        comparison += html_report.render_cards(cards, prompt=each["prompt"])
    seconds = {name.replace("_", " "): float(value) for name, value in summary["seconds"].items()}
    sections = {
        "Result": html_report.render_paragraph(describe(summary)) + html_report.render_tiles(tiles),
        "Timeline": _plot_evidence(summary) + _render_events(summary, steps["prepare"]["result"]["rows"]),
        "Comparison": comparison,
        "Duration": html_report.plot_bars(seconds, x="seconds", caption="Duration of each step on this machine."),
        "Simulated parts": html_report.render_paragraph(
            "Users, editors and days are simulated. The gateway captured the requests with this machine's clock; the "
            "rows were then copied to the simulated days. A model of this size learns the form of the corrections, but few of their facts. "
            f"Answers are truncated after {ANSWER_TOKENS} tokens."
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
    lines["alarm threshold"] = ([min(days), max(days)], [math.log10(summary["find_drift"]["threshold"])] * 2)
    caption = "Evidence of drift (e-value) after each day. At the threshold, the check raises an alarm."
    return html_report.plot_lines(lines, x="simulated day", y="log10 of the e-value", caption=caption)


def _render_events(summary: Json, first_rows: int) -> str:
    drift, again = summary["find_drift"], summary["check_again"]
    held_back, shadow = summary["comparison"], summary["shadow_comparison"]
    tested, last = min(drift["e_values"]), max(drift["e_values"])
    alarm = f"e-value {drift['e_values'][drift['alarm_day']]:.3g}; the threshold is {drift['threshold']:g}"
    peak = (
        f"highest e-value {max(again['e_values'].values()):.3g} against the new reference, days {FIRST_WHOLE_DAY}–"
        f"{LAST_FEEDBACK_DAY}"
    )
    events = {
        f"before day 1: version {summary['first_version']}": f"trained on {first_rows} questions about text and data",
        f"days 1–{tested - 1}: reference": f"{drift['reference']['prompts']} captured questions about text and data",
        f"days {tested}–{last}: traffic": f"questions about networks and concurrency from day {LAST_CLEAN_DAY + 1} on",
        f"day {drift['alarm_day']}: alarm": alarm,
        f"day {last}: feedback": f"{summary['corrections']} answers corrected by editors",
        f"day {last}: retraining": f"trigger: {'; '.join(summary['reasons'])}",
        f"day {last}: export": f"{summary['training_rows']} rows to train on, {summary['held_back_rows']} held back",
        f"day {last}: comparison": f"{held_back['decision']} on held-back questions: {_describe_test(held_back)}",
        f"day {SHADOW_DAY}: shadow": f"version {summary['next_version']} answers copies of the questions: "
        f"{shadow['decision']}, {_describe_test(shadow)}",
        f"day {SHADOW_DAY}: {summary['decision']}": summary["reason"],
        f"day {LAST_DAY}: traffic": f"answered by version {summary['next_version']}",
        f"day {LAST_DAY}: {'alarm' if again['alarm'] else 'no alarm'}": peak,
    }
    return html_report.render_facts({event: (text, "") for event, text in events.items()})


def _describe_test(test: Json) -> str:
    return f"decided after {test['decided_after']} of {test['pairs']} pairs"
