"""Control of child processes and signals: children end with their parent, and no stop signal is lost.

Otherwise, a step would outlive a run that is killed with SIGKILL, and write checkpoints to the folder from which the
next run resumes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_STOP_RETRY_SECONDS = 0.1
_GC_THRESHOLD = 10_000  # allocations between two collections; larger values save no more time


def die_with_parent() -> None:
    """Configure the kernel to kill this process when the thread that started it ends. For Popen's preexec_fn."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def die_with_process(pid: int) -> None:
    """Kill this process when process `pid` ends. For a step, whose parent is a shell and not the run."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait_and_kill() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True, name="die-with-run").start()


_GROUP_GUARD = """
import os, select, signal, sys
leader = int(sys.argv[1])
try:
    select.select([os.pidfd_open(leader)], [], [])
    os.killpg(leader, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def start_group_guard(leader: int) -> subprocess.Popen[bytes]:
    """Start a guard process that kills a process group after its leader has ended, and then exits.

    For an engine whose children may outlive it. If Triton is killed, its Python stubs can deadlock. One thread holds
    the GIL and waits for the server. The thread that has detected the server's end waits for the GIL.

    Args:
        leader: PID of the leader, which is also the ID of the group.
    """
    return _start_guard(_GROUP_GUARD, str(leader))


_JOB_GUARD = """
import os, select, signal, sys
leader, variable = int(sys.argv[1]), sys.argv[2].encode()
try:
    select.select([os.pidfd_open(leader)], [], [])
except ProcessLookupError:
    pass
alive = True
while alive:
    alive = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if variable in file.read().split(bytes(1)):
                    os.kill(int(pid), signal.SIGKILL)
                    alive = True
        except OSError:
            pass
"""


def start_job_guard(leader: int, variable: str) -> subprocess.Popen[bytes]:
    """Start a guard process that, after the leader has ended, kills every process with a variable in its environment.

    For children in their own sessions, which `start_group_guard` does not kill.

    Args:
        leader: PID of the leader.
        variable: "NAME=value".
    """
    return _start_guard(_JOB_GUARD, str(leader), variable)


def _start_guard(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", script, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def restrict_new_files() -> None:
    """Create files and folders without permissions for other users; owner and group are as the user's umask says."""
    os.umask(os.umask(0o077) | 0o007)


def relax_garbage_collector() -> None:
    """Collect cyclic garbage less often and not at exit.

    Python's default, one collection per 700 allocations (2,000 in Python 3.13), traverses the imported modules again
    and again, and once more when the interpreter ends. In a process that only imports transformers, peft, kfp and
    MLflow, both took 40% of the CPU time.
    """
    gc.set_threshold(_GC_THRESHOLD)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends first.

    Ctrl-C ends the shell between a run and its step at once, while the step still saves its checkpoint.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def install_stop_handlers(*, once: bool = False) -> None:
    """Raise KeyboardInterrupt in the main thread on SIGTERM and Ctrl-C, unless this process ignores these signals.

    Python discards an exception that is raised in a finalizer or a callback, and some libraries catch every exception
    during their import. The exception is therefore raised again until a handler runs or `acknowledge_stop` is called.

    On any exception other than KeyboardInterrupt, `with subprocess.Popen(...)` would first wait for the child.

    Args:
        once: ignore all signals after the first.
    """

    def stop(*_: object) -> None:
        if once:
            for number in handled:
                signal.signal(number, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, _STOP_RETRY_SECONDS, _STOP_RETRY_SECONDS)
        raise KeyboardInterrupt

    def stop_again(*_: object) -> None:
        current = sys.exc_info()[1]
        while current is not None and not isinstance(current, KeyboardInterrupt):
            current = current.__context__
        if current is None:
            raise KeyboardInterrupt

    def report_unraisable(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)

    handled = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, stop_again)
    sys.unraisablehook = report_unraisable


def acknowledge_stop() -> None:
    """Stop raising KeyboardInterrupt, so that the process can exit with its own exit code.

    dataclasses and torch call exec() with a string. After a KeyboardInterrupt has left this exec(), CPython 3.11 ends
    the process by SIGINT, regardless of handlers and exit code. The next exec() of a string resets that state
    (run_eval_code_obj in pythonrun.c).
    """
    signal.setitimer(signal.ITIMER_REAL, 0)
    exec("")  # noqa: S102 - see above


@contextmanager
def until_signal() -> Iterator[None]:
    """End the block without an error at the first SIGINT or SIGTERM; ignore later signals. For the main thread.

    A shell without job control starts background processes with SIGINT ignored; the block ends on SIGINT nevertheless.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    install_stop_handlers(once=True)
    try:
        yield
    except KeyboardInterrupt:
        acknowledge_stop()
    finally:
        acknowledge_stop()  # a signal can arrive just before the block ends with another error
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def handle_stop_signals(stop_requested: threading.Event, announcement: str = "") -> Iterator[None]:
    """Set `stop_requested` on SIGTERM and Ctrl-C; a second Ctrl-C raises KeyboardInterrupt.

    Has no effect in other threads, because Python delivers signals to the main thread only.

    Args:
        stop_requested: the event that the caller checks, for example after each step.
        announcement: written to standard error at the first signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, _: object) -> None:
        if stop_requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first = not stop_requested.is_set()
        stop_requested.set()
        if announcement and is_first:
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            with suppress(OSError):  # nobody reads, or the disk is full
                os.write(2, f"{announcement}{again}\n".encode())  # a handler may interrupt a write to sys.stderr

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def redirect_output(descriptor: int) -> Iterator[None]:
    """Redirect standard output and standard error of this process and its children to a file descriptor."""

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    flush()
    originals = [(number, os.dup(number)) for number in (1, 2)]
    for number, _ in originals:
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        flush()
        for number, original in originals:
            os.dup2(original, number)
            os.close(original)


def append_to_step_log(log: Path) -> None:
    """In a local run, append a child's log file to the log of the step."""
    if os.environ.get("TUNELINE_EVENTS") and log.exists():
        print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr, end="", flush=True)


def build_python_environment(**extra: str) -> dict[str, str]:
    """Return environment variables for a Python child: safe path, UTF-8 mode and unbuffered output."""
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", **extra}


def build_module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of tuneline with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]
