"""Private folders for jobs: every job works in a folder of its own, and what a killed job left is swept up by the next."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ABANDONED_AFTER = 7 * 24 * 3600.0  # seconds: for folders of other machines, whose processes cannot be looked at


@contextmanager
def private_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder in `parent` that no other process uses, removed at the end. Folders of dead processes with this prefix go first.

    `mode` is its permissions, less the umask: 0o700 where other users can look into `parent`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent, prefix)
    folder = parent / f"{prefix}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
    folder.mkdir(mode=mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path, prefix: str) -> None:
    """Remove the folders that jobs left which were killed before they could."""
    for folder in parent.glob(f"{prefix}.*.*.*"):
        if _abandoned(folder, prefix):
            shutil.rmtree(folder, ignore_errors=True)


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a killed one may stay as a zombie until its parent asks for it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _abandoned(folder: Path, prefix: str) -> bool:
    host, pid = folder.name.removeprefix(f"{prefix}.").rsplit(".", 2)[:2]
    if host == socket.gethostname() and pid.isdecimal():
        return _is_gone(int(pid))
    try:
        return time.time() - folder.stat().st_mtime > ABANDONED_AFTER
    except FileNotFoundError:
        return False  # its owner just removed it
