"""Child processes that never outlive what started them.

Without this a run killed with SIGKILL leaves a step behind that still writes checkpoints into the folder the next run resumes from.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends. For Popen's preexec_fn."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def die_with(pid: int) -> None:
    """Kill this process when process `pid` is gone. For a step, whose parent is a shell that outlives the run."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([watched], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-run").start()


def python_environment(**extra: str) -> dict[str, str]:
    """The environment for a Python child: never imports from the working directory, writes UTF-8, unbuffered."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", **extra}


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]
