"""A program for the tests: `python lock_contender.py FOLDER GO ROUNDS SEED` locks a folder ROUNDS times once the file GO exists.

Each round runs in a child process, which exits without cleanup in every second round, as if killed. Prints one letter per round:
h locked, k locked and killed, b busy, X two processes held the lock at once.
"""

import fcntl
import os
import random
import sys
import time
from pathlib import Path

from components.common.runtime.errors import BusyError
from components.common.workspace import job_folders


def try_lock(folder: Path, dies: bool, seconds: float) -> str:
    """Lock the folder; a kernel lock detects a second holder."""
    try:
        with job_folders.folder_lock(folder), (folder.parent / "inside").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "X"
            time.sleep(seconds)
            fcntl.flock(file, fcntl.LOCK_UN)  # a thread of an exited process may keep it for a moment
            if dies:
                os._exit(ord("k"))
            return "h"
    except BusyError:
        return "b"


def contend(folder: Path, round_count: int, rng: random.Random) -> str:
    letters = ""
    for round_number in range(round_count):
        dies, seconds = round_number % 2 == 0, rng.random() * 0.002
        if child := os.fork():
            letters += chr(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            os._exit(ord(try_lock(folder, dies, seconds)))
    return letters


if __name__ == "__main__":
    while not Path(sys.argv[2]).exists():
        time.sleep(0.001)
    print(contend(Path(sys.argv[1]), int(sys.argv[3]), random.Random(int(sys.argv[4]))))
