"""Start and signal runs as a terminal does, and list the processes that a run leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from components.common.artifacts import hashing
from pipelines.runs.run_folder import Run
from tests.pipelines.command import COMMAND, ROOT, environment

RUN = ["run", "-c", "customization.yaml", "--json"]


def start(project: Path, workdir: str, code: Path = ROOT, **extra: str) -> subprocess.Popen[str]:
    """Start a run in its own process group, as a shell with job control does; its stderr goes to <workdir>.stderr."""
    with (project / f"{workdir}.stderr").open("ab") as err:
        return subprocess.Popen(
            [*COMMAND, *RUN, "--workdir", workdir],
            cwd=project,
            env=environment(code, **{marker_variable(project / workdir): "1"}, **extra),
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )


def hear_interrupts() -> None:
    """Restore the default SIGINT handler: a shell without job control starts background processes with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def marker_variable(workdir: Path) -> str:
    """Return the environment variable that marks every process of this workdir."""
    return "RUN_IN_" + hashing.digest(str(workdir))[:16]


def left_of(workdir: Path) -> list[str]:
    """Return the command lines of live processes of this workdir."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and marker_variable(workdir) in process.environ():
                commands.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            continue
    return commands


def wait_until_alone(workdir: Path, seconds: float = 60.0) -> None:
    """Wait until no process uses the workdir."""
    deadline = time.monotonic() + seconds
    while remaining := left_of(workdir):
        assert time.monotonic() < deadline, f"processes outlived their run: {remaining}"
        time.sleep(0.1)


def events(workdir: Path) -> list[dict[str, Any]]:
    """Return the events of all runs of a workdir, oldest first."""
    lines = [line for path in sorted(workdir.glob("runs/*/events.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def wait_for(
    child: subprocess.Popen[str], workdir: Path, condition: Callable[[dict[str, Any]], bool], after: int = 0
) -> None:
    """Wait for an event that satisfies `condition`; the first `after` events are ignored."""
    deadline = time.monotonic() + 300
    while not any(condition(event) for event in events(workdir)[after:]):
        assert child.poll() is None, f"the run ended first: {child.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def signal_until_stopping(run: Run, send_signal: Callable[[], None], seconds: float = 120.0) -> None:
    """Signal a run every ten seconds until it stops: Python drops an interrupt that arrives inside a destructor."""
    deadline, last_signal = time.monotonic() + seconds, 0.0
    while "stopping" not in run.read():
        assert time.monotonic() < deadline
        if time.monotonic() - last_signal > 10:
            last_signal = time.monotonic()
            send_signal()
        time.sleep(0.02)


def signal_group(child: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal every process of the group, as a terminal does at Ctrl-C."""
    os.killpg(child.pid, number)
