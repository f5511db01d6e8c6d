"""`tuneline status`, `logs`, `open` and `cancel`: the local runs of a workdir."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common.runtime import process_control
from components.common.runtime.counts import format_count
from components.common.runtime.errors import UsageError
from components.common.runtime.terminal import escape_controls
from components.common.workspace.artifact_store import Workdir
from pipelines.cli.application import (
    DEFAULT_WORKDIR_PATH,
    JsonOption,
    WorkdirOption,
    app,
    open_reporter,
    print_result,
    print_text,
)
from pipelines.cli.tables import format_curve

if TYPE_CHECKING:
    from pipelines.runs.run_folder import Run

RUN_HELP = "Name or name prefix of a run, `latest`, or the folder of a run or of a workdir (its newest run)."
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
STATUS_INTERVAL_SECONDS = 10.0


@app.command()
def status(
    name: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Default: list all runs."),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of runs to list.")] = 20,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Follow RUN until it ends; without RUN, the latest run.")
    ] = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """List the runs of the workdir, or show the progress, stage results and error of one run."""
    from pipelines.runs import run_costs, run_folder, run_status

    work = Workdir(workdir.absolute())
    runs = run_folder.list_runs(work)
    if not name and not (watch and runs):
        rows = [run_status.summarize_run(run) for run in runs[:limit]]
        lines = [_format_row(row) for row in rows] or [
            f"no runs in {workdir} yet; start a run with `tuneline run` (single stages, such as `tuneline finetune`, are not listed)"
        ]
        if len(runs) > len(rows):
            lines.append(f"and {format_count(len(runs) - len(rows), 'older run')}; --limit lists more")
        print_result({"workdir": str(work.root), "runs": rows}, as_json, lines)
        return
    run = run_folder.find_run(work, name or "latest")
    if watch:
        with _stop_on_interrupt():
            _watch(run, quiet=as_json)
    detail = {**run_status.describe_run(run), "cost": run_costs.summarize_costs(run)}
    print_result(detail, as_json, _format_detail(detail))


@app.command()
def logs(
    name: RunArgument,
    stage: Annotated[
        str,
        typer.Argument(
            metavar="[STAGE]",
            help="Stage, such as fine-tune, or `run` for the local runner's log. Default: all stages.",
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until the run ends.")] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="Number of lines to print from the end of each log. 0: all.")
    ] = 0,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Print the logs of a run's stages."""
    if follow and as_json:
        raise UsageError(
            "--follow cannot be combined with --json, which prints one object", hint="Omit --follow or --json."
        )
    from pipelines.runs import run_folder, run_status

    run = run_folder.find_run(Workdir(workdir.absolute()), name)
    if follow:
        current = ""
        with _stop_on_interrupt():
            for log, text in run_status.follow_logs(run, stage, lines):
                if log.stage != current:
                    print(f"== {log.stage} ({log.path})")
                    current = log.stage
                print_text(text, end="")
        return
    objects, output = [], []
    for log in run_status.list_logs(run, stage):
        content = log.read_lines(lines or None)
        objects.append({"stage": log.stage, "path": str(log.path) if log.path else None, "lines": content})
        if log.path is None:
            output.append(f"== {log.stage}: {log.reason}")
        else:
            output += [f"== {log.stage} ({log.path})", *(content or ["(no output)"])]
    print_result({"run": run.name, "logs": objects}, as_json, output)


@app.command()
def cancel(name: RunArgument, workdir: WorkdirOption = DEFAULT_WORKDIR_PATH, as_json: JsonOption = False) -> None:
    """Stop a run, and wait until it has saved its work and all its processes have ended."""
    from pipelines.runs import run_folder, run_status

    run = run_folder.find_run(Workdir(workdir.absolute()), name)
    with open_reporter(run.name, as_json) as reporter:
        before = run_status.summarize_run(run)
        if before["state"] == "running":
            reporter.step(f"stopping {run.name} ({before['progress']}); waiting for the run to save its work")
        run_folder.cancel_run(run, on_wait=lambda seconds: reporter.progress(int(seconds), None, "seconds"))
    now = run_status.describe_run(run)
    reason = f": {now['error']['message']}" if now["error"] else ""
    lines = (
        [f"{now['run']} finished before it could be stopped"]
        if now["state"] == "finished"
        else [
            f"{now['run']} is {now['state']} ({now['progress']}){reason}",
            "To resume it, run the same `tuneline run` command again.",
        ]
    )
    print_result({"run": run.name, "state": now["state"], "stage": now["stage"]}, as_json, lines)


@app.command("open")
def open_report(
    name: RunArgument = "latest",
    browser: Annotated[bool, typer.Option("--browser", help="Open the report in the default web browser.")] = False,
    workdir: WorkdirOption = DEFAULT_WORKDIR_PATH,
    as_json: JsonOption = False,
) -> None:
    """Print the URL of a run's report, and the MLflow tracking URI or, without a tracking server, the `mlflow ui` command."""
    from pipelines.runs import run_folder, run_status

    run = run_folder.find_run(Workdir(workdir.absolute()), name)
    report = run_status.describe_run(run)["report"]
    if report is None:
        others = (
            one for one in run_folder.list_runs(Workdir(workdir.absolute())) if run_status.describe_run(one)["report"]
        )
        newest = next(others, None)
        alternative = f" The newest run with a report is {newest.name}." if newest else ""
        raise UsageError(
            f"{run.name} has no report: its state is {run.state}",
            hint=f"Run `tuneline status {run.name}` for its error, or `tuneline logs {run.name}` for its logs.{alternative}",
        )
    values = run.read()
    tracking_uri, mlflow_run = str(values.get("tracking_uri")), values.get("mlflow_run_id")
    is_server = tracking_uri.startswith(("http://", "https://"))
    command = None if is_server else shlex.join(["mlflow", "ui", "--backend-store-uri", tracking_uri])
    url = Path(report).absolute().as_uri()
    if browser:
        webbrowser.open(url)
    result = {"run": run.name, "report": report, "url": url, "mlflow_ui": command}
    result |= {"tracking_uri": tracking_uri, "mlflow_run_id": mlflow_run}
    print_result(result, as_json, [f"report: {url}", f"MLflow run {mlflow_run}: {command or tracking_uri}"])


def _format_row(row: dict[str, Any]) -> str:
    """Format a run as one line, with its result or its progress."""
    outcome = row["progress"]
    if row["state"] == "finished":
        outcome = f"{row['verdict']}, {row['model_name']} version {row['model_version']}"
    seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
    return f"{row['run']:<20}  {row['state']:<11} {seconds:>8}  {outcome}"


def _format_detail(detail: dict[str, Any]) -> list[str]:
    from pipelines.runs.run_costs import format_costs

    lines = [_format_row(detail), ""]
    for stage in detail["stages"]:
        seconds = "" if stage["cached"] else f"{stage['seconds']:8.1f} s"
        lines.append(f"  {stage['name']:<18} {stage['state']:<9}{seconds}".rstrip())
    if error := detail["error"]:
        where = f"{error['stage']}: " if error.get("stage") else ""
        lines += ["", f"{where}{error['message']}", *([f"  {error['hint']}"] if error.get("hint") else [])]
    elif detail["state"] == "killed":
        lines += ["", "the run's process was killed; to resume the run, run the same `tuneline run` command again"]
    lines += ["", f"cost: {format_costs(detail['cost'])}"]
    lines += [*([f"report: {detail['report']}"] if detail["report"] else [])]
    return [*lines, f"logs:   tuneline logs {detail['run']}   (in {detail['logs']})"]


def _watch(run: Run, *, quiet: bool) -> None:
    """Show the progress: one updated line with the loss curve on a terminal, else a line per step and every ten seconds."""
    from pipelines.runs import run_status

    is_terminal = sys.stderr.isatty()
    step, printed_at = "", 0.0
    for now in run_status.watch_run(run):
        current_step = now["progress"].partition(",")[0]
        is_due = current_step != step or time.monotonic() - printed_at >= STATUS_INTERVAL_SECONDS
        if quiet or not (is_terminal or is_due):
            continue
        step, printed_at, line = current_step, time.monotonic(), escape_controls(_format_row(now))
        if is_terminal and now["stage"] == "fine_tuning" and (curve := format_curve(run_status.read_losses(run))):
            line += f"  loss {curve}"
        if is_terminal:  # a wrapped line could not be overwritten
            line = f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}"
        print(line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    if is_terminal and not quiet:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


@contextmanager
def _stop_on_interrupt() -> Iterator[None]:
    """End the output on Ctrl-C; the run continues."""
    try:
        yield
    except KeyboardInterrupt:
        process_control.acknowledge_stop()
        print("the run continues", file=sys.stderr)
