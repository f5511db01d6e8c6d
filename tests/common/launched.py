"""A job for the tests: `python -m tests.common.launched WHAT FOLDER` does WHAT as one process of a job whose folder this is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from components.common.errors import InterruptedRunError
from components.common.launch import EVENTS, OUTCOME
from components.common.progress import Events

RANK = os.environ["RANK"]


def tell(folder: Path) -> int:
    """Events of every kind, one of them written in two halves, and an outcome."""
    if RANK == "0":
        events = Events(folder / EVENTS, "fine_tuning", seconds_between=0)
        events.step("loading")
        events.progress(1, 3, "steps")
        events.metrics({"train_loss": 0.5}, 1)
        line = json.dumps({"stage": "fine_tuning", "event": "note", "text": "é of two halves"}, ensure_ascii=False).encode() + b"\n"
        cut = line.index("é".encode()) + 1
        for half in (line[:cut], line[cut:]):
            with events.path.open("ab", buffering=0) as file:
                file.write(half)
            time.sleep(0.5)
        events.write("of no known kind")
        events.progress(3, 3, "steps")
        leave(folder, {"answer": 42})
    return 0


def fail(folder: Path) -> int:
    """An error of a kind of its own."""
    if RANK == "0":
        error = {"stage": "fine_tuning", "kind": "training", "message": "the loss is nan", "hint": "Lower the rate."}
        leave(folder, {"error": error, "exit_code": 3})
    return 3


def vanish(folder: Path) -> int:
    """No outcome, but last words."""
    print("I hold on\nbut this is too much", file=sys.stderr, flush=True)
    return 9


def vanish_silently(folder: Path) -> int:
    """Neither an outcome nor a word."""
    return 9


def wait(folder: Path) -> int:
    """Until SIGTERM; then it takes a moment to save."""

    def save(number: int, frame: FrameType | None) -> None:
        time.sleep(0.5)
        (folder / f"saved.{RANK}").touch()
        error = InterruptedRunError("saved after step 7", hint="Go on.")
        if RANK == "0":
            leave(folder, {"error": error.as_dict(), "exit_code": error.exit_code})
        sys.exit(error.exit_code)

    signal.signal(signal.SIGTERM, save)
    return be(folder)


def count(folder: Path) -> int:
    """Five times a second up to 50, or what the file `goal` says, from where it was when it was asked to save."""
    place, named = folder / "counted", folder / "goal"
    goal = int(named.read_text()) if named.exists() else 50
    counted, starts = map(int, place.read_text().split()) if place.exists() else (0, 0)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    events = Events(folder / EVENTS, "fine_tuning", seconds_between=0)
    while counted < goal and not asked:
        time.sleep(0.2)
        counted += 1
        events.progress(counted, goal, "steps")
        place.write_text(f"{counted} {starts + 1}")
    if counted < goal:
        error = InterruptedRunError(f"saved at {counted}", hint="Go on.")
        leave(folder, {"error": error.as_dict(), "exit_code": error.exit_code})
        return error.exit_code
    leave(folder, {"counted": counted, "starts": starts + 1})
    return 0


def deaf(folder: Path) -> int:
    """For ever, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return be(folder)


def be(folder: Path) -> int:
    """Be there with a child of its own, and tell both numbers."""
    child = subprocess.Popen(["sleep", "300"])
    print(f"process {RANK} is there", file=sys.stderr, flush=True)
    draft = folder / f"draft.{RANK}"
    draft.write_text(f"{os.getpid()} {child.pid}")
    draft.rename(folder / f"pids.{RANK}")
    time.sleep(300)
    return 1


def leave(folder: Path, outcome: dict[str, object]) -> None:
    (folder / OUTCOME).write_text(json.dumps(outcome))


WHAT: dict[str, Callable[[Path], int]] = {one.__name__: one for one in (tell, fail, vanish, vanish_silently, wait, count, deaf)}

if __name__ == "__main__":
    sys.exit(WHAT[sys.argv[1]](Path(sys.argv[2])))
