"""Whether what a process left is still in use: by the process itself where it can be looked at, elsewhere by its signs of life.

A process can be looked at on its own machine only, and in its own container: another machine may have the same name (a clone, pods on the
host's network), and in every pod the first process has the number 1. So a process is named by where it is as well; and what it holds
(a folder, a lock) gives a sign of life while it is held: its time of change is set again and again.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

BEAT = 15.0  # seconds between two signs of life


@cache
def where() -> str:
    """The machine, as it was started the last time, and in it the container: its name, a hyphen, and 8 hexadecimal digits."""
    told = []
    with suppress(OSError):
        told.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        told.append(str(Path("/proc/self/ns/pid").readlink()))
    return f"{socket.gethostname()}-{hashlib.sha256(' '.join(told).encode()).hexdigest()[:8]}"


def name(pid: int | None = None) -> str:
    """What a process is called here: its number, a hyphen, and when it began, since numbers are used again. This one without `pid`."""
    pid = pid or os.getpid()
    return f"{pid}-{(_stat(pid) or ['', ''])[1]}"


def is_gone(named: str) -> bool:
    """Whether a process of here has ended; a killed one may stay as a zombie until its parent asks for it."""
    pid, _, began = named.partition("-")
    found = _stat(int(pid))
    if found is None:
        return not psutil.pid_exists(int(pid))  # it is there, and hidden from us, where /proc is mounted with hidepid
    return found[0] in "ZX" or found[1] != began


def _stat(pid: int) -> list[str] | None:
    """A process's state, and when it began in ticks since the machine did; None where it cannot be seen. See proc(5)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last where /proc hides what is another user's
        return None
    return [words[0], words[19]]


@contextmanager
def beating(path: Path) -> Iterator[None]:
    """Give signs of life at a file or folder, by a thread, as long as it is held."""

    def beat() -> None:
        with suppress(OSError):
            os.utime(path)

    with repeating(beat, BEAT):
        yield


@contextmanager
def repeating(call: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call something again and again, so many seconds apart, by a thread, as long as this lasts. It may not raise."""
    done = threading.Event()
    threading.Thread(target=_repeat, args=(call, seconds, done), daemon=True, name="sign-of-life").start()
    try:
        yield
    finally:
        done.set()


def _repeat(call: Callable[[], object], seconds: float, done: threading.Event) -> None:
    while not done.wait(seconds):
        call()


def silence(path: Path) -> float:
    """Seconds since the last sign of life. Raises FileNotFoundError."""
    return now(path.parent) - path.stat().st_mtime


def now(folder: Path) -> float:
    """The time in seconds since 1970 by the clock of a folder's file server, since those of machines differ: the folder is told to have
    changed now. Where that is not permitted it is this machine's."""
    try:
        os.utime(folder)
        return folder.stat().st_mtime
    except OSError:
        return time.time()
