"""Before a pod ends: `python -P -m components.common.launch.save SECONDS FOLDER` has the training of this folder save, and waits for it.

A Ray cluster's pods run it as their preStop hook. Kubernetes waits for a hook before it ends the container, and Ray, once it is ended,
would kill the training at once.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress

import psutil

ASKS_EVERY = 5.0  # seconds
TORCHRUN, ENTRY_POINT = "torch.distributed.run", "components.common.launch.ray_nodes"


def main(seconds: float, folder: str) -> None:
    """Ask, again and again, since processes that still load hear nothing; and wait for so many seconds at most."""
    until, next_time = time.monotonic() + seconds, 0.0
    while (there := starters(folder)) and time.monotonic() < until:
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + ASKS_EVERY
            _ask(there)
        time.sleep(0.1)


def _ask(there: list[psutil.Process]) -> None:
    for starter in there:
        with suppress(psutil.NoSuchProcess):
            # torchrun itself would give its processes half a minute; before they are there, there is nothing to save.
            for one in _workers(starter) or [starter]:
                one.send_signal(signal.SIGTERM)


def starters(folder: str) -> list[psutil.Process]:
    """The processes here that others of this job wait for: both name its folder among their arguments."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            words = one.cmdline()
            known = TORCHRUN in words or ENTRY_POINT in words
            if known and any(folder in word for word in words) and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def _workers(starter: psutil.Process) -> list[psutil.Process]:
    return starter.children() if TORCHRUN in starter.cmdline() else []


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
