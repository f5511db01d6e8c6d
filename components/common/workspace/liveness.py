"""Liveness of processes: checked directly on this host, and by heartbeats on other hosts.

A process can be checked directly only on its own machine and in its own container. The host's ID includes the boot and
the container: host names are not unique (cloned machines, pods with host networking), and PIDs repeat in pods.
"""

# The owner of a folder or lock renews its modification time from a thread: the heartbeat.

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

HEARTBEAT_INTERVAL_SECONDS = 15.0


@cache
def identify_host() -> str:
    """Return "<host name>-<8 hexadecimal digits>"; the digits identify the boot and the container."""
    ids = []
    with suppress(OSError):
        ids.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        ids.append(str(Path("/proc/self/ns/pid").readlink()))
    return f"{socket.gethostname()}-{hashlib.sha256(' '.join(ids).encode()).hexdigest()[:8]}"


def identify_process(pid: int | None = None) -> str:
    """Return "<pid>-<start time>" of a process, because PIDs are reused. Default: this process."""
    pid = pid or os.getpid()
    return f"{pid}-{(_read_state_and_start(pid) or ['', ''])[1]}"


def is_process_gone(process_id: str) -> bool:
    """Return whether a process of this host has ended. A zombie has ended.

    Args:
        process_id: "<pid>-<start time>", as returned by `identify_process`.
    """
    pid, _, started = process_id.partition("-")
    current = _read_state_and_start(int(pid))
    if current is None:
        return not psutil.pid_exists(int(pid))  # the process may be hidden: /proc mounted with hidepid
    return current[0] in "ZX" or current[1] != started


def _read_state_and_start(pid: int) -> list[str] | None:
    """Return state and start time (ticks since boot) of a process, see proc(5); None if the process is not visible."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # PermissionError: /proc mounted with hidepid
        return None
    return [words[0], words[19]]


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Renew the modification time of a file or folder from a thread within the block."""

    def beat() -> None:
        with suppress(OSError):
            os.utime(path)

    with call_periodically(beat, HEARTBEAT_INTERVAL_SECONDS):
        yield


@contextmanager
def call_periodically(call: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call a function from a thread at this interval within the block. The function must not raise."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            call()

    threading.Thread(target=repeat, daemon=True, name="heartbeat").start()
    try:
        yield
    finally:
        done.set()


def seconds_since_heartbeat(path: Path) -> float:
    """Return the seconds since the last heartbeat.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    return get_file_server_time(path.parent) - path.stat().st_mtime


def get_file_server_time(folder: Path) -> float:
    """Return the time (seconds since 1970) by the clock of a folder's file server; clocks of machines differ.

    Sets the folder's modification time to the current time and reads it back. Returns this machine's time if the
    modification time cannot be set.
    """
    try:
        os.utime(folder)
        return folder.stat().st_mtime
    except OSError:
        return time.time()
