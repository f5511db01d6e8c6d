"""Runs of this machine: what they do, what they print, and how to stop one."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.common import process
from components.common.errors import UsageError
from components.common.places import Workdir
from pipelines.cli.app import HERE, AsJson, WorkdirOption, app, reporting, show

if TYPE_CHECKING:
    from pipelines.runs import Run
    from pipelines.status import Log

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, the beginning of it, or `latest`.")]
SECONDS_BETWEEN_LINES = 10.0


@app.command()
def status(
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's name, the beginning of it, or `latest`; none: all runs.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="List so many runs at most.")] = 20,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Keep showing a run (the latest by default) until it ends.")] = False,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """List the runs of the workdir, or say how far one is, what its stages came to and what failed."""
    from pipelines import runs
    from pipelines import status as look

    work = Workdir(workdir.absolute())
    if not name and not (watch and runs.every(work)):
        found = runs.every(work)
        rows = [look.overview(run) for run in found[:limit]]
        show({"workdir": str(work.root), "runs": rows}, as_json, _listed(rows, len(found), workdir))
        return
    run = runs.find(work, name or "latest")
    if watch:
        with _until_stopped():
            _watch(run, quiet=as_json)
    found_out = look.detail(run)
    show(found_out, as_json, _told(found_out))


@app.command()
def logs(
    name: RunName,
    stage: Annotated[
        str, typer.Argument(metavar="[STAGE]", help="A stage, such as fine-tune; `run` is the run's own log; none: all stages.")
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is printed until the run ends.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="The last so many lines of each log. 0: all of them.")] = 0,
    workdir: WorkdirOption = HERE,
    as_json: AsJson = False,
) -> None:
    """Print what the stages of a run and their engines printed."""
    if follow and as_json:
        raise UsageError("--follow does not go with --json, which prints one object", hint="Leave one of them out.")
    from pipelines import runs
    from pipelines import status as look

    run = runs.find(Workdir(workdir.absolute()), name)
    if follow:
        _follow(run, stage, lines)
        return
    found = look.logs(run, stage)
    texts = {log.stage: log.lines(lines or None) for log in found}
    objects = [{"stage": log.stage, "path": str(log.path) if log.path else None, "lines": texts[log.stage]} for log in found]
    show({"run": run.name, "logs": objects}, as_json, [line for log in found for line in _shown(log, texts[log.stage])])


@app.command()
def cancel(name: RunName, workdir: WorkdirOption = HERE, as_json: AsJson = False) -> None:
    """Ask a run to stop, and wait until it has saved its work and everything it started has ended."""
    from pipelines import runs
    from pipelines import status as look

    run = runs.find(Workdir(workdir.absolute()), name)
    with reporting(run.name, as_json) as reporter:
        before = look.overview(run)
        if before["state"] == "running":
            reporter.step(f"stopping in {before['progress']}, which saves what it has")
        runs.cancel(run, on_wait=lambda seconds: reporter.progress(int(seconds), None, "seconds"))
    now = look.overview(run)
    show({"run": run.name, "state": now["state"], "stage": now["stage"]}, as_json, _stopped(now))


def _stopped(now: dict[str, Any]) -> list[str]:
    if now["state"] == "finished":
        return [f"{now['run']} finished before it could be stopped"]
    return [f"{now['run']} is {now['state']} ({now['progress']})", "The same `tuneline run` goes on from there."]


def _listed(rows: list[dict[str, Any]], there_are: int, workdir: Any) -> list[str]:
    if not rows:
        return [f"there is no run in {workdir} yet; `tuneline run` makes one"]
    older = [f"and {there_are - len(rows)} older; --limit shows more"] if there_are > len(rows) else []
    return [*(_line(row) for row in rows), *older]


def _line(row: dict[str, Any]) -> str:
    """A run in a line: what came of it, or where it is or stopped."""
    came = f"{row['verdict']}, {row['model_name']} version {row['model_version']}" if row["state"] == "finished" else row["progress"]
    seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
    return f"{row['run']:<20}  {row['state']:<11} {seconds:>8}  {came}"


def _told(found: dict[str, Any]) -> list[str]:
    out = [_line(found), ""]
    out += [f"  {stage['name']:<18} {stage['state']:<9}{_cost(stage)}".rstrip() for stage in found["stages"]]
    error = found["error"]
    if error:
        where = f"{error['stage']}: " if error.get("stage") else ""
        out += ["", f"{where}{error['message']}", *([f"  {error['hint']}"] if error.get("hint") else [])]
    elif found["state"] == "killed":
        out += ["", "its process was killed; the same `tuneline run` goes on from where it stopped"]
    out += ["", *([f"report: {found['report']}"] if found["report"] else [])]
    return [*out, f"logs:   tuneline logs {found['run']}   (in {found['logs']})"]


def _cost(stage: dict[str, Any]) -> str:
    return "" if stage["cached"] else f"{stage['seconds']:8.1f} s"


def _watch(run: Run, *, quiet: bool) -> None:
    """One line that is written anew on a terminal; elsewhere a line when the part of the work changes, and every ten seconds."""
    from pipelines import status as look

    live = sys.stderr.isatty()
    part, said = "", 0.0
    for now in look.watch(run):
        changed, since = now["progress"].partition(",")[0] != part, time.monotonic() - said
        if quiet or not (live or changed or since >= SECONDS_BETWEEN_LINES):
            continue
        part, said = now["progress"].partition(",")[0], time.monotonic()
        line = _line(now)[: shutil.get_terminal_size().columns - 1] if live else _line(now)  # a line that wraps is not taken back
        print(f"\r\x1b[2K{line}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)
    if live and not quiet:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _shown(log: Log, lines: list[str]) -> list[str]:
    if log.path is None:
        return [f"== {log.stage}: {log.why}"]
    return [f"== {log.stage} ({log.path})", *(lines or ["(it printed nothing)"])]


def _follow(run: Run, stage: str, lines: int) -> None:
    from pipelines import status as look

    last = None
    with _until_stopped():
        for log, text in look.follow(run, stage, lines):
            if log.stage != last:
                print(f"== {log.stage} ({log.path})")
                last = log.stage
            print(text, end="", flush=True)


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Ctrl-C ends the looking on, not the run."""
    try:
        yield
    except KeyboardInterrupt:
        process.end_stop()
        print("the run goes on", file=sys.stderr)
