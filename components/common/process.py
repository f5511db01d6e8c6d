"""Child processes that never outlive what started them.

Without this a run killed with SIGKILL leaves a step behind that still writes checkpoints into the folder the next run resumes from.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_AGAIN_SECONDS = 0.1  # between two times that a stop is raised which nothing has handled yet


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


_GUARD = """
import os, select, signal, sys
leader = int(sys.argv[1])
try:
    select.select([os.pidfd_open(leader)], [], [])
    os.killpg(leader, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def guard_group(leader: int) -> subprocess.Popen[bytes]:
    """Start a guard that kills what is left of a process group as soon as its leader is gone, however that ends, and then ends itself.

    For an engine whose own children may outlive it: Triton's python stubs wait for ever where a kill hits their server at a bad moment
    (the one thread holds Python's lock and waits for the server, the other has seen it die and waits for the lock).
    """
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(leader)]
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


_JOB_GUARD = """
import os, select, signal, sys
leader, mark = int(sys.argv[1]), sys.argv[2].encode()
try:
    select.select([os.pidfd_open(leader)], [], [])
except ProcessLookupError:
    pass
left = True
while left:
    left = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(bytes(1)):
                    os.kill(int(pid), signal.SIGKILL)
                    left = True
        except OSError:
            pass
"""


def guard_job(leader: int, mark: str) -> subprocess.Popen[bytes]:
    """As guard_group, for a leader whose children lead sessions of their own: all that have this variable in their environment."""
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", "-c", _JOB_GUARD, str(leader), mark]
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends first, so that none is lost sight of. For a run: Ctrl-C ends the
    shell between it and a step at once, while the step still saves what it has."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hear_stops(*, once: bool = False) -> None:
    """SIGTERM and Ctrl-C raise KeyboardInterrupt in the main thread, where this process is not deaf to them; with `once`, the first alone.

    An exception that comes while a finalizer or a callback runs is printed by Python and forgotten, and some libraries catch whatever comes
    while they import. So it is raised again and again, until it is being handled, and no more once `end_stop` was called.

    KeyboardInterrupt and no class of our own: on any other exception, subprocess.Popen (a `with`) waits for its child before it goes on.
    """

    def stop(*_: object) -> None:
        if once:
            for number in heard:
                signal.signal(number, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise KeyboardInterrupt

    def stop_again(*_: object) -> None:
        if not _is_stopping(sys.exc_info()[1]):
            raise KeyboardInterrupt

    def tell(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)

    heard = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, stop_again)
    sys.unraisablehook = tell


def _is_stopping(handled: BaseException | None) -> bool:
    """Whether an interruption is being handled, or what came of one."""
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    return handled is not None


def end_stop() -> None:
    """An interruption has come where it is answered: it is not raised again, and the process may end with a code of its own.

    Once a KeyboardInterrupt has left the exec() of a string (dataclasses and torch are made so), CPython 3.11 ends the process by SIGINT,
    whatever caught it and whatever it exits with. The next string that is executed takes that back (run_eval_code_obj in pythonrun.c).
    """
    signal.setitimer(signal.ITIMER_REAL, 0)
    exec("")  # noqa: S102 - see above


@contextmanager
def stopping(asked: threading.Event, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """SIGTERM and Ctrl-C set `asked` and call `then`, instead of ending this process; a second Ctrl-C raises KeyboardInterrupt.

    Only the main thread hears signals: in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()
        then()

    previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def output_to(descriptor: int) -> Iterator[None]:
    """Send standard output and standard error of this process, and of the children it starts, to a file."""
    _flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    for number, _ in kept:
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        _flush()
        for number, before in kept:
            os.dup2(before, number)
            os.close(before)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def keep_in_step_log(log: Path) -> None:
    """Add what a child wrote into a file of its own to the log of the step, where this process is one of a run on this machine."""
    if os.environ.get("TUNELINE_EVENTS") and log.exists():
        print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr, end="", flush=True)


def python_environment(**extra: str) -> dict[str, str]:
    """The environment for a Python child: never imports from the working directory, writes UTF-8, unbuffered."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", **extra}


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]
