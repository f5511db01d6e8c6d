"""preStop hook of a Ray cluster's pods: `python -P -m components.common.launch.ray.pre_stop_hook SECONDS FOLDER`.

The hook requests that the folder's training saves its work, and waits until the training ends. Kubernetes sends SIGTERM
to the container after the hook; on SIGTERM, Ray kills the training immediately.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress

import psutil

STOP_REPEAT_SECONDS = 5.0
TORCHRUN_MODULE, ENTRYPOINT_MODULE = "torch.distributed.run", "components.common.launch.ray.ray_entrypoint"


def main(seconds: float, folder: str) -> None:
    """Send SIGTERM until the training ends, for at most `seconds`; processes that are loading miss the first signal."""
    deadline, next_request = time.monotonic() + seconds, 0.0
    while (parents := find_parent_processes(folder)) and time.monotonic() < deadline:
        if time.monotonic() >= next_request:
            next_request = time.monotonic() + STOP_REPEAT_SECONDS
            for parent in parents:
                with suppress(psutil.NoSuchProcess):
                    # After a SIGTERM, torchrun would kill its workers within half a minute.
                    workers = parent.children() if TORCHRUN_MODULE in parent.cmdline() else []
                    for process in workers or [parent]:
                        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)


def find_parent_processes(folder: str) -> list[psutil.Process]:
    """Return the job's torchrun and entry point processes on this machine; the folder is one of their arguments."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            is_parent = TORCHRUN_MODULE in arguments or ENTRYPOINT_MODULE in arguments
            is_match = is_parent and any(folder in argument for argument in arguments)
            if is_match and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
