"""One node's part of a job: `python -P -m components.common.launch.node FOLDER`.

Every launcher starts this on each node, and this starts torchrun with the command in the job's folder. Which node it is, and where the
nodes meet, it reads from PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT: the variables of torchrun itself, which Kubeflow Trainer's
runtime injects and which the other launchers set. SIGTERM goes on to every process, which saves its work; torchrun itself would kill them
after half a minute. The file `stop` in the folder asks for the same, where no signal comes through. Exit code: 0, 75 where the work was
saved and can go on, or 1.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from components.common import process
from components.common.errors import EXIT_FAILED, EXIT_INTERRUPTED
from components.common.launch import NODES, STOP, Command, outcome_of
from components.common.launch.torchrun import LocalJob, Rendezvous, TorchRun

PORT = 29500  # torchrun's own
ASKS_EVERY = 2.0  # seconds between two times that the processes are asked to stop


def main(folder: Path) -> int:
    """Run this node's processes to their end."""
    command = Command.read(folder)
    node = int(os.environ.get("PET_NODE_RANK") or 0)
    ranks = range(node * command.processes, (node + 1) * command.processes)
    _forget(folder, ranks)
    own = folder / NODES / str(node)
    own.mkdir(parents=True, exist_ok=True)
    asked = threading.Event()
    with process.stopping(asked):
        job = TorchRun(_meeting(command, node), deaf=True).start(command, own)
        try:
            succeeded = _wait(job, lambda: asked.is_set() or (folder / STOP).exists())
        finally:
            job.cancel()
    _show(job)
    return 0 if succeeded else EXIT_INTERRUPTED if _is_saved(folder, ranks) else EXIT_FAILED


def _forget(folder: Path, ranks: range) -> None:
    """Remove what this node's processes left when the job ran before: a requeued one begins as a new one does."""
    for rank in ranks:
        (folder / outcome_of(rank)).unlink(missing_ok=True)


def _meeting(command: Command, node: int) -> Rendezvous | None:
    if command.nodes == 1:
        return None
    return Rendezvous(node, os.environ["PET_MASTER_ADDR"], int(os.environ.get("PET_MASTER_PORT") or PORT))


def _wait(job: LocalJob, asked: Callable[[], bool]) -> bool:
    """Whether the processes succeeded. They are asked to stop when this one is, and again: before they train they hear nothing."""
    next_time = 0.0
    while (seen := job.look()).state == "running":
        if time.monotonic() >= next_time and asked():
            next_time = time.monotonic() + ASKS_EVERY
            job.stop()
        time.sleep(0.1)
    return seen.state == "succeeded"


def _show(job: LocalJob) -> None:
    """What the processes printed, for the log of the pod or the batch job."""
    for log in job.logs():
        if log.exists() and (text := log.read_text(encoding="utf-8", errors="replace").strip()):
            print(f"== {log}\n{text}", file=sys.stderr, flush=True)


def _is_saved(folder: Path, ranks: range) -> bool:
    """Whether one of this node's processes says that its work can go on."""
    for rank in ranks:
        try:
            left = json.loads((folder / outcome_of(rank)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if left.get("exit_code") == EXIT_INTERRUPTED:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
