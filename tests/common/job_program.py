"""A program for the tests: `python -m tests.common.job_program ACTION FOLDER` runs ACTION as one process of the job in FOLDER."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from components.common.launch import EVENTS_FILENAME, OUTCOME_FILENAME
from components.common.runtime.errors import InterruptedRunError
from components.common.runtime.reporters import EventLog

RANK = os.environ["RANK"]


def report(folder: Path) -> int:
    """Write events of every kind, one of them in two halves, and an outcome."""
    if RANK == "0":
        events = EventLog(folder / EVENTS_FILENAME, "fine_tuning", seconds_between=0)
        events.step("loading")
        events.progress(1, 3, "steps")
        events.metrics({"train_loss": 0.5}, 1)
        line = (
            json.dumps(
                {"stage": "fine_tuning", "event": "note", "text": "é of two halves"}, ensure_ascii=False
            ).encode()
            + b"\n"
        )
        cut = line.index("é".encode()) + 1
        for half in (line[:cut], line[cut:]):
            with events.path.open("ab", buffering=0) as file:
                file.write(half)
            time.sleep(0.5)
        events.write("of no known kind")
        events.progress(3, 3, "steps")
        write_outcome(folder, {"answer": 42})
    return 0


def fail(folder: Path) -> int:
    """Write an error of the kind `training`."""
    if RANK == "0":
        error = {"stage": "fine_tuning", "kind": "training", "message": "the loss is nan", "hint": "Lower the rate."}
        write_outcome(folder, {"error": error, "exit_code": 3})
    return 3


def exit_without_outcome(folder: Path) -> int:
    """Print an error and exit without an outcome."""
    print("I hold on\nbut this is too much", file=sys.stderr, flush=True)
    return 9


def exit_silently(folder: Path) -> int:
    """Exit without an outcome and without output."""
    return 9


def wait(folder: Path) -> int:
    """Wait for SIGTERM, then take half a second to save."""

    def save(number: int, frame: FrameType | None) -> None:
        time.sleep(0.5)
        (folder / f"saved.{RANK}").touch()
        error = InterruptedRunError("saved after step 7", hint="Go on.")
        if RANK == "0":
            write_outcome(folder, {"error": error.as_dict(), "exit_code": error.exit_code})
        sys.exit(error.exit_code)

    signal.signal(signal.SIGTERM, save)
    return publish_pids_and_sleep(folder)


def count(folder: Path) -> int:
    """Count five times a second up to 50 or the content of the file `goal`; SIGTERM saves, the next start resumes."""
    progress_file, goal_file = folder / "counted", folder / "goal"
    goal = int(goal_file.read_text()) if goal_file.exists() else 50
    counted, starts = map(int, progress_file.read_text().split()) if progress_file.exists() else (0, 0)
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda *_: stop_signals.append(True))
    events = EventLog(folder / EVENTS_FILENAME, "fine_tuning", seconds_between=0)
    while counted < goal and not stop_signals:
        time.sleep(0.2)
        counted += 1
        events.progress(counted, goal, "steps")
        progress_file.write_text(f"{counted} {starts + 1}")
    if counted < goal:
        error = InterruptedRunError(f"saved at {counted}", hint="Go on.")
        write_outcome(folder, {"error": error.as_dict(), "exit_code": error.exit_code})
        return error.exit_code
    write_outcome(folder, {"counted": counted, "starts": starts + 1})
    return 0


def ignore_sigterm(folder: Path) -> int:
    """Run until SIGKILL, ignoring SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return publish_pids_and_sleep(folder)


def publish_pids_and_sleep(folder: Path) -> int:
    """Start a child, write the pids of both and sleep."""
    child = subprocess.Popen(["sleep", "300"])
    print(f"process {RANK} is there", file=sys.stderr, flush=True)
    draft = folder / f"draft.{RANK}"
    draft.write_text(f"{os.getpid()} {child.pid}")
    draft.rename(folder / f"pids.{RANK}")
    time.sleep(300)
    return 1


def write_outcome(folder: Path, outcome: dict[str, object]) -> None:
    (folder / OUTCOME_FILENAME).write_text(json.dumps(outcome))


ACTIONS: dict[str, Callable[[Path], int]] = {
    action.__name__: action
    for action in (report, fail, exit_without_outcome, exit_silently, wait, count, ignore_sigterm)
}

if __name__ == "__main__":
    sys.exit(ACTIONS[sys.argv[1]](Path(sys.argv[2])))
