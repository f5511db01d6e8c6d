"""Runs as a terminal starts them, signals as a terminal sends them, and a look at what is left of a run afterwards."""

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

from components.common import hashing
from pipelines.runs import Run
from tests.pipelines.command import COMMAND, ROOT, environment

RUN = ["run", "-c", "customization.yaml", "--json"]


def start(project: Path, workdir: str, code: Path = ROOT) -> subprocess.Popen[str]:
    """A run that leads a process group of its own, as a shell with job control starts it. It complains into <workdir>.stderr."""
    with (project / f"{workdir}.stderr").open("ab") as err:
        return subprocess.Popen(
            [*COMMAND, *RUN, "--workdir", workdir],
            cwd=project,
            env=environment(code, **{mark(project / workdir): "1"}),
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )


def hear_interrupts() -> None:
    """A shell without job control starts what is in the background, and all it starts, deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def mark(workdir: Path) -> str:
    """A variable in the environment of everything that runs in this workdir, however it was started."""
    return "RUN_IN_" + hashing.digest(str(workdir))[:16]


def left_of(workdir: Path) -> list[str]:
    """The command lines of living processes that work in this workdir."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and mark(workdir) in process.environ():
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            continue
    return found


def wait_until_alone(workdir: Path, seconds: float = 60.0) -> None:
    """Wait until nothing works in the workdir any more."""
    deadline = time.monotonic() + seconds
    while left := left_of(workdir):
        assert time.monotonic() < deadline, f"outlived their run: {left}"
        time.sleep(0.1)


def events(workdir: Path) -> list[dict[str, Any]]:
    """What all runs of a workdir told so far, oldest first."""
    lines = [line for path in sorted(workdir.glob("runs/*/events.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def wait_for(child: subprocess.Popen[str], workdir: Path, reached: Callable[[dict[str, Any]], bool], after: int = 0) -> None:
    """Wait until a run tells an event of this kind; the first `after` events were there before."""
    deadline = time.monotonic() + 300
    while not any(reached(event) for event in events(workdir)[after:]):
        assert child.poll() is None, f"the run ended first: {child.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask_until_stopping(run: Run, ask: Callable[[], None], seconds: float = 120.0) -> None:
    """Send a run a signal, and once more every ten seconds until it has heard: Python loses an interrupt that comes while it forgets an
    object."""
    deadline, asked = time.monotonic() + seconds, 0.0
    while "stopping" not in run.read():
        assert time.monotonic() < deadline
        if time.monotonic() - asked > 10:
            asked = time.monotonic()
            ask()
        time.sleep(0.02)


def signal_group(child: subprocess.Popen[str], number: signal.Signals) -> None:
    """What a terminal does at Ctrl-C: every process of the group gets the signal."""
    os.killpg(child.pid, number)
