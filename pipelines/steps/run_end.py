"""The end of a Kubeflow run, successful or not: its page and the notifications.

The records of the steps decide whether the run succeeded. Kubeflow's state of a run is unreliable: it remains RUNNING if a
pod did not start, and FAILED after a successful retry.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.reporting import html_report
from components.common.runtime.reporters import Reporter, format_number
from components.common.workspace import step_records
from pipelines.config.platform_config import RunEvent
from pipelines.steps.notifications import send_notifications

KILLED = {
    "message": "The step ended without an error message: its pod was killed (memory, eviction, timeout), or the volume was full.",
    "hint": "Read the step's log and its pod: kubectl describe pod.",
}
UNREADABLE = {"message": "The record of the step cannot be read.", "hint": "Read the step's log, and check the volume."}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunEnd:
    """The end of a run.

    Attributes:
        events: the events that notifications are configured for.
        title: one line for people.
        sentences: error and action, or the reasons of the verdict.
        links: addresses by name.
        outputs: result of the last customization: digests, revision and verdict; empty after a failure.
    """

    events: list[RunEvent]
    title: str
    sentences: list[str]
    links: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


def report_end(state: str, settings: Mapping[str, Any], reporter: Reporter, page: Path) -> RunEnd:
    """Write the page about the end of the run, and send the notifications.

    Args:
        state: state of the run in Kubeflow, for the page.
        settings: {"ui": address of the Kubeflow Pipelines UI or "", "notifications": see `send_notifications`,
            "last_steps": titles of the steps that end a successful run}.
        reporter: receives the end and the result of each notification.
        page: HTML file for the Kubeflow UI.
    """
    records, run = step_records.read_records(), os.environ.get(step_records.RUN_VARIABLE, "")
    end = describe_end(state, records, settings["last_steps"])
    if settings["ui"]:
        end.links["Kubeflow run"] = f"{settings['ui'].rstrip('/')}/#/runs/details/{run}"
    lines = [*end.sentences, *(f"{name}: {address}" for name, address in end.links.items()), f"Kubeflow run ID: {run}"]
    results = send_notifications(settings["notifications"], end.events, f"tuneline: {end.title}", "\n".join(lines))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_end(end, records, run, results), encoding="utf-8")
    reporter.note(end.title)
    for name, result in results.items():
        reporter.note(f"notification {name}: {result}")
    return end


def describe_end(state: str, records: Sequence[Record], last_steps: Sequence[str]) -> RunEnd:
    """Return the end of a run: a failure unless its last steps have finished, or a refusal ended a chain."""
    finished = {record["step"]: record["result"] for record in records if record["status"] == "finished"}
    results = list(finished.values())
    if set(last_steps) <= finished.keys() or any(result.get("verdict") == "refused" for result in results):
        for result in reversed(results):
            if "verdict" in result:
                return _describe_verdict(result)
            if "to" in result:
                title = f"{result['name']} version {result['to']}: promoted to {result['alias']}"
                before = f"The previous version was {result['from']}." if result["from"] else "The alias is new."
                return RunEnd(["promoted"], title, [before])
    unsuccessful = [record for record in records if record["status"] != "finished"]
    if unsuccessful:
        failed = max(unsuccessful, key=lambda record: record["status"] == "failed")
        error = failed.get("error") or (UNREADABLE if failed["status"] == "unreadable" else KILLED)
        return RunEnd(["failed"], f"{failed['step']}: failed", [error["message"], error["hint"]])
    reason = f"No step reported an error. Kubeflow's state of the run is {state}. A pod may not have started."
    return RunEnd(["failed"], "the run failed", [reason, "Read the events: kubectl get events."])


def _describe_verdict(result: Record) -> RunEnd:
    model, events = result["registered"], [result["verdict"]]
    title = f"{model['name']} version {model['version']}: {result['verdict']}"
    if result["verdict"] == "accepted" and "champion" in model["aliases"]:
        events, title = [*events, "promoted"], f"{title} and promoted to champion"
    links = {f"MLflow {name}": address for name, address in result["links"].items() if address}
    return RunEnd(events, title, list(dict.fromkeys(result["reasons"])), links, dict(result))


def render_end(end: RunEnd, records: Sequence[Record], run: str, notifications: Mapping[str, str]) -> str:
    """Return the page about the end of a run."""
    is_bad = {"failed", "refused"} & set(end.events)
    style = "bad" if is_bad else "" if end.events == ["unchanged"] else "good"
    steps = [
        [
            record["step"],
            "ended without a result" if record["status"] == "running" else record["status"],
            "yes" if record.get("cached") else "no",
            format_number(record["seconds"]) if "seconds" in record else "unknown",
        ]
        for record in records
    ]
    sections = {
        "Result": "".join(html_report.render_paragraph(text, style) for text in end.sentences if text),
        "Steps": html_report.render_table(["step", "status", "from the store", "seconds"], steps) if steps else "",
        "Notifications": html_report.render_table(["service", "result"], [list(item) for item in notifications.items()])
        if notifications
        else "",
    }
    links = html_report.render_facts({name: (address, address) for name, address in end.links.items()})
    return html_report.render_page(end.title, f"Kubeflow run {run}", sections, links)
