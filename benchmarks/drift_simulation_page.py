"""The page of the drift simulation, docs/reference/benchmarks-drift.md, and its plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import beta

from benchmarks.drift_simulation import (
    AFTER,
    ALIKE_PROMPTS,
    ALIKE_SHARE,
    CHANGE,
    HORIZON,
    REFERENCE_WINDOWS,
    SLOW_FROM,
    SLOW_SHARE,
    SLOW_TO,
    SYNTHETIC_WIDTH,
    SYNTHETIC_WINDOW,
    WINDOW,
    Runs,
)
from benchmarks.page import made_with, met, table_of
from pipelines.drift import alarm

GOAL_WINDOWS = 3
GOAL_CASES = ("far, 10%", "language, 10%")

HEAD = """# Drift check, simulated

`make bench-drift` writes this page. It simulates how often `tuneline traffic drift` raises an alarm without drift, and how many
windows the command needs to detect drift. [Statistics](../explanation/statistics.md#drift-check) describes the method.

Prompts are drawn at random, with replacement, from {texts}.
Embeddings are mean input embeddings of the demo's model ({embedding_ms:.2f} ms of CPU time per prompt). The reference has
{reference} windows of {window} prompts. Drift begins after {change} clean windows. A run ends with the alarm, or {after} windows after the drift begins.

- **demo**: the demo's questions, drawn before the drift
- **near**: the demo's questions, about other Python packages
- **far**: instructions about other topics
- **language**: texts in other languages
- **slow**: the share of near prompts grows from 0 after window {slow_from} to {slow_share:.0%} in window {slow_to}
- **alike**: no drift, but {alike_share:.0%} of each window comes from {alike_prompts} similar questions, as from one user or event
- **synthetic**: {width} columns drawn from Student's t with 4 degrees of freedom, in windows of {small}; drift shifts two columns by 4
"""

LIMITS = """## Limits

- There are few runs: the standard error of a share is up to 50% divided by the square root of the number of runs.
- The guarantee without drift is a theorem for independent prompts; the simulation checks the code. The guarantee does not hold for similar prompts from one source.
- A far topic differs more from the demo's questions than most changes in real traffic.
- Drift to a near topic is hard to detect, because the questions have few forms and differ only in names.
- Tested with one embedding model, one reference size and one window size.
"""


def write_page(results: Mapping[str, Runs], path: Path, facts: dict[str, Any]) -> None:
    """Write the page and its plot."""
    _plot(results, path.parent / "images" / "benchmarks-drift.svg")
    clean = [runs for name, runs in results.items() if runs.change is None and "alike" not in name]
    alarms, count = sum(runs.count_false_alarms() for runs in clean), sum(len(runs.alarms) for runs in clean)
    texts = ", ".join(f"{number:,} {name}" for name, number in facts["texts"].items())
    head = HEAD.format(
        texts=f"these numbers of distinct texts: {texts}",
        embedding_ms=facts["embedding_ms"],
        reference=REFERENCE_WINDOWS,
        window=WINDOW,
        change=CHANGE,
        after=AFTER,
        slow_from=SLOW_FROM,
        slow_share=SLOW_SHARE,
        slow_to=SLOW_TO,
        alike_share=ALIKE_SHARE,
        alike_prompts=ALIKE_PROMPTS,
        width=SYNTHETIC_WIDTH,
        small=SYNTHETIC_WINDOW,
    )
    goals = [
        f"Goal: at most {alarm.ALPHA:.0%} of the clean runs raise an alarm within {HORIZON} windows: "
        f"{met(alarms <= alarm.ALPHA * count)} ({alarms} of {count} runs; the 95% upper bound of the rate is "
        f"{beta.ppf(0.95, alarms + 1, count - alarms):.0%}).\n"
    ]
    for name in GOAL_CASES:
        if name in results:
            delays = results[name].get_delays()
            soon = sum(delay <= GOAL_WINDOWS for delay in delays)
            total = len(results[name].alarms)
            goals.append(
                f'Goal: drift of the case "{name}" is detected within'
                f" {GOAL_WINDOWS} windows in at least 90% of the runs: "
                f"{met(soon >= 0.9 * total)} ({soon} of {total} runs).\n"
            )
    parts = [
        head,
        made_with(facts),
        f"CPU time: {facts['seconds']:.0f} seconds.\n",
        "\n".join(goals),
        "## Without drift\n",
        _show_clean(results),
        "Inflation is the divisor of the test statistic, estimated from the windows of the reference.\n",
        "## With drift\n",
        _show_drift(results),
        "![alarms by window after the change](images/benchmarks-drift.svg)\n",
        LIMITS,
    ]
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _show_clean(results: Mapping[str, Runs]) -> str:
    rows = [
        [
            name,
            str(len(runs.alarms)),
            str(runs.windows),
            f"{runs.count_false_alarms()} ({runs.count_false_alarms() / len(runs.alarms):.0%})",
            f"{np.mean(np.array(runs.p_values) <= 0.05):.1%}",
            f"{np.mean(np.array(runs.p_values) <= 0.01):.1%}",
            f"{np.mean(runs.inflations):.2f}",
        ]
        for name, runs in results.items()
        if runs.change is None
    ]
    head = ["case", "runs", "windows", "runs with an alarm", "windows with p ≤ 0.05", "p ≤ 0.01", "mean inflation"]
    return table_of(head, rows)


def _show_drift(results: Mapping[str, Runs]) -> str:
    rows = []
    for name, runs in results.items():
        if runs.change is not None:
            delays, total = runs.get_delays(), len(runs.alarms)
            shares = [f"{sum(delay <= limit for delay in delays) / total:.0%}" for limit in (2, GOAL_WINDOWS, 5)]
            missed = sum(found is None for found in runs.alarms)
            middle = f"{median(delays):g}" if delays else "–"
            rows.append([name, str(total), *shares, middle, str(missed), str(runs.count_false_alarms())])
    head = [
        "case",
        "runs",
        "detected within 2 windows",
        "within 3",
        "within 5",
        "median windows",
        "missed",
        "alarm before the drift",
    ]
    return table_of(head, rows)


def _plot(results: Mapping[str, Runs], path: Path) -> None:
    """Write the share of runs with an alarm by the number of windows after the change as an SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, runs in results.items():
        if runs.change is not None and "slow" not in name:
            delays = np.array(runs.get_delays())
            shares = [float((delays <= limit).sum()) / len(runs.alarms) * 100 for limit in range(AFTER + 1)]
            axes.plot(range(AFTER + 1), shares, marker="o", markersize=3, label=name)
    axes.set_xlabel("windows after the change")
    axes.set_ylabel("runs with an alarm, %")
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
