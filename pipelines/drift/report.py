"""The HTML page of a drift check. It shows captured prompts, so it has the mode and the group of captured files."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.common.reporting import html_report
from components.common.runtime.counts import format_count
from pipelines.capture import traffic_files
from pipelines.drift import alarm
from pipelines.drift.new_prompts import FAR_SHARE, Cluster

FILENAME = "drift.html"
MAX_EXAMPLE_CHARACTERS = 400
MAX_ROWS = 60  # of the table of windows
PANEL_TITLES = {
    "log_characters": "length (log of the number of characters)",
    "other_language": "other language",
    "refused": "refused",
    "cut": "truncated at the token limit",
    "failed": "failed",
    "aborted": "aborted by the client",
}


def write_report(
    folder: Path, result: Mapping[str, Any], clusters: Sequence[Cluster], far_share: float, group_id: int
) -> Path:
    """Write the page into a folder, and return its path. An earlier page is replaced.

    Args:
        folder: output folder; created for the owner and the group.
        result: the JSON result of the check.
        clusters: examples of new prompts.
        far_share: share of the compared prompts that are far from the reference.
        group_id: group that may read captured traffic; -1 for the user's group.
    """
    traffic_files.make_folder(folder, folder, group_id)
    page = _render(result, clusters, far_share)
    path = folder / FILENAME
    traffic_files.replace_file(path, lambda temporary: _write(temporary, page, group_id))
    return path


def _write(path: Path, text: str, group_id: int) -> None:
    if group_id >= 0:
        os.chown(path, -1, group_id)  # before the text, so that no other group can read it
    path.write_text(text, encoding="utf-8")


def _render(result: Mapping[str, Any], clusters: Sequence[Cluster], far_share: float) -> str:
    windows = result["windows"]
    sections = {
        "Verdict": _render_verdict(result),
        "Timeline": _plot_timeline(windows),
        "Windows": _render_windows(windows),
        "Traffic figures": _render_panels(windows),
        "New prompts": _render_examples(clusters, far_share),
        "Method": _render_method(result),
    }
    subtitle = f"{result['model']}: {windows[0]['from'][:10]} to {windows[-1]['to'][:10]}, reference {result['reference']['name']}"
    return html_report.render_page("Drift of captured prompts", subtitle, sections)


def _render_verdict(result: Mapping[str, Any]) -> str:
    windows = result["windows"]
    if result["alarm"]:
        first = windows[result["alarm_window"] - 1]
        verdict = f"Alarm: prompts have changed. The e-value reached {alarm.THRESHOLD:g} in the window that ends {first['to'][:16].replace('T', ' ')} UTC."
        text = html_report.render_paragraph(verdict, "bad")
    else:
        text = html_report.render_paragraph("No alarm: the evidence of a change is below the alarm threshold.", "good")
    tiles = {
        "current e-value": float(windows[-1]["e_value"]),
        "alarm threshold": alarm.THRESHOLD,
        "windows": len(windows),
        "prompts tested": sum(each["n"] for each in windows),
        "reference prompts": result["reference"]["prompts"],
    }
    notes = "".join(html_report.render_paragraph(f"Limitation: {each}.", "soft") for each in result["limitations"])
    return text + html_report.render_tiles(tiles) + notes


def _plot_timeline(windows: Sequence[Mapping[str, Any]]) -> str:
    numbers = list(range(1, len(windows) + 1))
    e_values = [math.log10(each["e_value"]) for each in windows]
    line = [math.log10(alarm.THRESHOLD)] * len(windows)
    timeline = html_report.plot_lines(
        {"e-value": (numbers, e_values), "alarm": (numbers, line)},
        x="window",
        y="log10 of the e-value",
        caption="Evidence of drift after each window. After the evidence reaches the alarm line, the alarm persists.",
    )
    p_values = {
        name.replace("_", " "): (numbers, [-math.log10(each["tests"][name]["p"]) for each in windows])
        for name in windows[0]["tests"]
    }
    tests = html_report.plot_lines(
        p_values,
        x="window",
        y="−log10 of p",
        caption="−log10 of the p-value of each window; 2 corresponds to p = 0.01. Only the combined test counts for the alarm.",
    )
    return timeline + tests


def _render_windows(windows: Sequence[Mapping[str, Any]]) -> str:
    names = list(windows[0]["tests"])
    head = [
        "window",
        "from",
        "to",
        "prompts",
        "e-value",
        *(f"p {name.replace('_', ' ')}" for name in names),
        "versions",
    ]
    first = max(0, len(windows) - MAX_ROWS)
    rows = [
        [
            number,
            each["from"][:16].replace("T", " "),
            each["to"][:16].replace("T", " "),
            each["n"],
            float(each["e_value"]),
            *(float(each["tests"][name]["p"]) for name in names),
            ", ".join(each["versions"]),
        ]
        for number, each in enumerate(windows[first:], first + 1)
    ]
    return html_report.render_table(head, rows)


def _render_panels(windows: Sequence[Mapping[str, Any]]) -> str:
    """Show the figures of the latest window beside the reference. They raise no alarm."""
    latest = windows[-1]
    languages = ", ".join(f"{name} {count}" for name, count in [*latest["languages"].items()][:8])
    text = html_report.render_paragraph(f"Languages of the latest window: {languages}.")
    if not latest["panels"]:
        return text
    panels = {PANEL_TITLES.get(name, name.replace("_", " ")): panel for name, panel in latest["panels"].items()}
    intervals = {name: (panel["difference"], *panel["ci95"]) for name, panel in panels.items()}
    rows = [
        [name, float(each["reference"]), float(each["value"]), float(each["difference"]), *map(float, each["ci95"])]
        for name, each in panels.items()
    ]
    head = ["figure", "reference", "latest window", "difference", "95% CI: lower", "upper"]
    caption = "Differences of the latest window from the reference, with 95% confidence intervals. These differences do not affect the alarm."
    return (
        text
        + html_report.plot_intervals(intervals, x="difference", caption=caption)
        + html_report.render_table(head, rows)
    )


def _render_examples(clusters: Sequence[Cluster], far_share: float) -> str:
    text = html_report.render_paragraph(
        f"{far_share:.1%} of the compared prompts are far from all reference prompts; {FAR_SHARE:.0%} is expected without drift. "
        "Personal data was redacted when the prompts were captured."
    )
    for number, cluster in enumerate(clusters, 1):
        text += html_report.render_paragraph(f"Group {number}: {format_count(cluster.size, 'prompt')}")
        cards = {
            f"{prompt.id}, {prompt.day}": prompt.text[:MAX_EXAMPLE_CHARACTERS]
            + ("…" if len(prompt.text) > MAX_EXAMPLE_CHARACTERS else "")
            for prompt in cluster.examples
        }
        text += html_report.render_cards(cards)
    return text


def _render_method(result: Mapping[str, Any]) -> str:
    return html_report.render_paragraph(
        f"Each window is compared with the reference and all earlier windows by a permutation test on whitened principal "
        f"components of the {result['embeddings']} embeddings. The e-value combines the evidence of all windows. Without drift, the "
        f"probability that the e-value ever reaches {alarm.THRESHOLD:g} is at most {alarm.ALPHA:.0%}. This bound requires "
        "that prompts of the same window are no more alike than prompts of different windows. "
        f"tuneline divides the combined statistic of each window by {result['inflation']:.2f}: the mean ratio of this "
        "statistic in reference windows to that in random windows, or 1 if the ratio is below 1 or no reference window exists."
    )
