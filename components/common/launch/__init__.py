"""Running a stage's command elsewhere: start it, watch it, cancel it, read its logs.

A launcher is told what to run and where the job's folder is. The job tells its progress in an event file there, which is relayed to the
stage's reporter, and leaves its outcome in a file; so every launcher is watched in the same way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from components.common import process
from components.common.errors import GOES_ON, InterruptedRunError, TunelineError
from components.common.progress import Reporter, event_in, relay

JOB, EVENTS, OUTCOME = "job.json", "events.jsonl", "outcome.json"
LOOKS_EVERY = 0.2  # seconds between two looks at a running job
State = Literal["running", "succeeded", "failed"]


@dataclass(frozen=True)
class Command:
    """What to run: one of our modules with its arguments, in so many processes."""

    module: str
    arguments: Sequence[str]
    processes: int = 1


class Running(Protocol):
    """A job that was started."""

    def state(self) -> State:
        """Whether it runs, and how it ended."""

    def stop(self) -> None:
        """Ask it to save its work and end."""

    def cancel(self) -> None:
        """End it now."""

    def logs(self) -> list[Path]:
        """A file a process with what it printed."""


class Launcher(Protocol):
    """A way to run a command."""

    def start(self, command: Command, folder: Path) -> Running:
        """Start the command; `folder` is the job's own, on storage that the job sees too."""


class LostJobError(TunelineError):
    """A job ended without saying how."""

    kind = "job_lost"


def outcome_of(rank: int) -> str:
    """The file in which a process leaves its outcome; the first one's is the job's."""
    return f"outcome-{rank}.json" if rank else OUTCOME


def run(launcher: Launcher, command: Command, folder: Path, reporter: Reporter) -> dict[str, Any]:
    """Run a command to its end and return the outcome that it left.

    Raises the error that the job wrote down, or LostJobError. SIGTERM and Ctrl-C are passed on, so that the job saves its work, and raise
    InterruptedRunError; a second Ctrl-C ends it at once.
    """
    for left in (folder / EVENTS, *folder.glob("outcome*.json")):
        left.unlink(missing_ok=True)
    running, asked = launcher.start(command, folder), threading.Event()
    try:
        with process.stopping(asked, running.stop):
            _follow(running, folder / EVENTS, reporter)
    finally:
        running.cancel()
    try:
        return _outcome(running, folder)
    except LostJobError:
        if asked.is_set():
            raise InterruptedRunError("interrupted before there was anything to save", hint=GOES_ON) from None
        raise


def _follow(running: Running, events: Path, reporter: Reporter) -> None:
    """Relay the job's events until it has ended and all are told."""
    lines = _Lines(events)
    while running.state() == "running":
        lines.tell(reporter)
        time.sleep(LOOKS_EVERY)
    lines.tell(reporter)


class _Lines:
    """The whole lines that were added to a file since it was last looked at."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def tell(self, reporter: Reporter) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            if event := event_in(line):
                relay(event, reporter)


def _outcome(running: Running, folder: Path) -> dict[str, Any]:
    """What the job left. Raises the error in it, that of the process which failed by itself before those that only lost it; LostJobError
    where there is nothing."""
    outcomes = [left for path in (folder / OUTCOME, *sorted(folder.glob("outcome-*.json"))) if (left := _read(path))]
    failed = sorted((left for left in outcomes if "error" in left), key=lambda left: bool(left["error"]["kind"] == LostJobError.kind))
    if failed:
        raise _as_told(failed[0])
    if not outcomes:
        raise LostJobError(f"the job in {folder} ended without an outcome: {_last_words(running)}", hint=GOES_ON)
    return outcomes[0]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        left: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return left


def _as_told(left: dict[str, Any]) -> TunelineError:
    if left["error"]["kind"] == LostJobError.kind:
        return LostJobError(left["error"]["message"], hint=left["error"]["hint"])
    return TunelineError.from_dict(left["error"], left["exit_code"])


def _last_words(running: Running) -> str:
    """The last line that any of the job's processes printed."""
    said = [
        text.splitlines()[-1].strip() for path in running.logs() if (text := path.read_text(encoding="utf-8", errors="replace").strip())
    ]
    return said[-1][:300] if said else "it printed nothing"
