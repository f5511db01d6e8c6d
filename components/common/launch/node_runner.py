"""Entry point of a job on each node: `python -P -m components.common.launch.node_runner FOLDER`.

It runs the command of the job folder under torchrun. Kubeflow Trainer's runtime or the launcher sets torchrun's
variables: PET_NODE_RANK is the node's rank, PET_MASTER_ADDR and PET_MASTER_PORT are the rendezvous.
"""

# SIGTERM, or the file `stop` in the folder, makes every process save its work. Exit codes: 0: success; 75: interrupted,
# the work was saved and can resume; 1: failure.

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from components.common.launch import (
    NODES_FOLDER,
    STOP_FILENAME,
    Command,
    JobState,
    get_outcome_filename,
    read_json_object,
)
from components.common.launch.torchrun import Rendezvous, TorchrunJob, TorchrunLauncher
from components.common.runtime import process_control
from components.common.runtime.errors import EXIT_FAILED, EXIT_INTERRUPTED

DEFAULT_MASTER_PORT = 29500  # torchrun's default
STOP_REPEAT_SECONDS = 2.0


def main(folder: Path) -> int:
    """Run this node's processes to their end and return the exit code."""
    command = Command.read(folder)
    node = int(os.environ.get("PET_NODE_RANK") or 0)
    ranks = range(node * command.processes, (node + 1) * command.processes)
    outcomes = [folder / get_outcome_filename(rank) for rank in ranks]
    for outcome in outcomes:
        outcome.unlink(missing_ok=True)  # of the run before a requeue
    rendezvous = None
    if command.nodes > 1:
        port = int(os.environ.get("PET_MASTER_PORT") or DEFAULT_MASTER_PORT)
        rendezvous = Rendezvous(node, os.environ["PET_MASTER_ADDR"], port)
    node_folder = folder / NODES_FOLDER / str(node)
    node_folder.mkdir(parents=True, exist_ok=True)
    stop_requested = threading.Event()
    with process_control.handle_stop_signals(stop_requested):
        job = TorchrunLauncher(rendezvous, ignores_sigterm=True).start(command, node_folder)
        try:
            state = _wait(job, folder, stop_requested)
        finally:
            job.cancel()
    for log in job.list_logs():  # into the log of the pod or the batch job
        if log.exists() and (text := log.read_text(encoding="utf-8", errors="replace").strip()):
            print(f"== {log}\n{text}", file=sys.stderr, flush=True)
    if state == "succeeded":
        return 0
    exit_codes = [read_json_object(outcome).get("exit_code") for outcome in outcomes]
    return EXIT_INTERRUPTED if EXIT_INTERRUPTED in exit_codes else EXIT_FAILED


def _wait(job: TorchrunJob, folder: Path, stop_requested: threading.Event) -> JobState:
    """Return the final state. Repeat stop requests, because a process that is loading misses the first one."""
    next_request = 0.0
    while (state := job.poll().state) == "running":
        if time.monotonic() >= next_request and (stop_requested.is_set() or (folder / STOP_FILENAME).exists()):
            next_request = time.monotonic() + STOP_REPEAT_SECONDS
            job.request_stop()
        time.sleep(0.1)
    return state


if __name__ == "__main__":
    process_control.restrict_new_files()
    sys.exit(main(Path(sys.argv[1])))
