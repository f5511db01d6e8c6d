"""`tuneline costs`: the recorded cost of the runs of one or several workdirs."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from components.common.runtime.errors import UsageError
from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import DEFAULT_WORKDIR_PATH, JsonOption, app, print_result

Grouping = Literal["run", "team", "model", "month"]


@app.command()
def costs(
    by: Annotated[Grouping, typer.Option("--by", help="Property by which to group the runs.")] = "run",
    since: Annotated[
        str, typer.Option("--since", metavar="DATE", help="First day to include, YYYY-MM-DD. Default: all days.")
    ] = "",
    platform: Annotated[
        Path | None,
        typer.Option(
            "-p",
            "--platform",
            readable=False,
            help="platform.yaml with the prices and power to apply to all runs. Default: the values that each run recorded.",
        ),
    ] = None,
    workdirs: Annotated[
        list[Path],
        typer.Option("--workdir", envvar="TUNELINE_WORKDIR", help="Folder with the runs. Repeatable."),
    ] = [DEFAULT_WORKDIR_PATH],  # noqa: B006 - typer never modifies it
    as_json: JsonOption = False,
) -> None:
    """Show time, energy and cost of the recorded runs, including interrupted and failed runs."""
    started = 0.0
    if since:
        try:
            started = datetime.datetime.strptime(since, "%Y-%m-%d").timestamp()
        except ValueError:
            message = f"--since is {since!r}; expected a day as YYYY-MM-DD"
            raise UsageError(message, hint="For example: --since 2026-11-01.") from None
    from pipelines.config.platform_config import load_platform
    from pipelines.runs import run_costs, run_folder

    rates = load_platform(platform).cost_rates if platform else None
    folders = list({path.resolve(): path.absolute() for path in workdirs}.values())  # each counts once
    runs = [run for folder in folders for run in run_folder.list_runs(Workdir(folder))]
    selected = [run for run in runs if run_costs.read_start(run) >= started]
    groups = run_costs.group_costs(selected, by, rates, time.time())
    print_result(
        {"by": by, "since": since or None, "workdirs": list(map(str, folders)), "costs": groups},
        as_json,
        lambda: _format_groups(groups, by, since),
    )


def _format_groups(groups: list[dict[str, Any]], by: str, since: str) -> list[str]:
    """Return a table; an unknown figure is a dash."""
    if not groups:
        return [f"no recorded runs since {since}" if since else "no recorded runs; start a run with `tuneline run`"]
    table = [[by, "runs", "hours", "CPU-hours", "GPU-hours", "kWh", "GiB-days", "cost"]]
    for group in groups:
        amounts = [group[name] for name in ("hours", "cpu_hours", "gpu_hours", "kwh", "gib_days")]
        cost = "–" if group["cost"] is None else f"{group['cost']:.2f} {group['currency']}".rstrip()
        marks = ("" if group["complete"] else " +") + (" *" if group["unpriced"] else "")
        shown = ["–" if amount is None else f"{amount:.4g}" for amount in amounts]
        table.append([group["key"] or "(none)", str(group["runs"]), *shown, cost + marks])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    if any(not group["complete"] for group in groups):
        lines.append("+ lower bound: CPU and GPU time of killed and running steps is not known")
    if unpriced := sorted({name.replace("_", " ") for group in groups for name in group["unpriced"]}):
        lines.append(f"* excludes {', '.join(unpriced)}: the price is not known")
    if any(group["energy"] == "estimated" for group in groups):
        lines.append("energy is estimated from power and time if no counter measured it")
    return lines
