"""A job for the tests: `python hold_often.py FOLDER GO ROUNDS SEED` wants to hold a folder as often as that, once the file GO is there.

Each time it does so in a process of its own, which in every second round ends in the midst of it as if it was killed. Prints a letter a
round: h held, k held and killed, b another one holds it, X it was held by two at once.
"""

import fcntl
import os
import random
import sys
import time
from pathlib import Path

from components.common import jobs
from components.common.errors import BusyError


def hold(folder: Path, killed: bool, seconds: float) -> str:
    """A lock of the kernel's tells whether another one is in there."""
    try:
        with jobs.held(folder), (folder.parent / "inside").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "X"
            time.sleep(seconds)
            fcntl.flock(file, fcntl.LOCK_UN)  # a thread of a process that has ended may keep it for a moment
            if killed:
                os._exit(ord("k"))
            return "h"
    except BusyError:
        return "b"


def rounds(folder: Path, number: int, chance: random.Random) -> str:
    told = ""
    for turn in range(number):
        killed, seconds = turn % 2 == 0, chance.random() * 0.002
        if child := os.fork():
            told += chr(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            os._exit(ord(hold(folder, killed, seconds)))
    return told


if __name__ == "__main__":
    while not Path(sys.argv[2]).exists():
        time.sleep(0.001)
    print(rounds(Path(sys.argv[1]), int(sys.argv[3]), random.Random(int(sys.argv[4]))))
