"""Runs of a workdir: one folder each, and a lock so that two never work in one workdir at once."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from components.common import artifacts
from components.common.errors import UsageError
from components.common.places import Workdir


@dataclass(frozen=True)
class Run:
    """A run's folder: events.jsonl, run.log, customization.yaml, and run.json, which at the end holds the result."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    def write(self, **values: Any) -> None:
        """Keep facts of the run in run.json, beside those already there."""
        path = self.folder / "run.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        artifacts.write_atomically(path, json.dumps({**known, **values}, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        """What run.json holds."""
        path = self.folder / "run.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def new_run(workdir: Workdir) -> Run:
    """A new run's folder, named by time so that names sort."""
    folder = workdir.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    run = Run(folder)
    run.write(status="running", pid=os.getpid(), started=time.time())
    return run


@contextlib.contextmanager
def exclusive(workdir: Workdir) -> Iterator[None]:
    """Hold the workdir for this process. Raises UsageError while another living process holds it.

    The lock is a file with the holder's pid and start time, so a killed holder is recognised, and a reused pid is not taken for it.
    """
    lock = workdir.root / "lock.json"
    workdir.root.mkdir(parents=True, exist_ok=True)
    _take(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _take(lock: Path) -> None:
    mine = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    draft = lock.with_name(f".lock.{os.getpid()}")
    draft.write_text(json.dumps(mine), encoding="utf-8")
    try:
        for _ in range(3):
            with contextlib.suppress(FileExistsError):
                os.link(draft, lock)  # fails where the lock exists, and is whole as soon as it does
                return
            holder = _holder(lock)
            if holder is not None:
                raise UsageError(
                    f"another run (process {holder}) works in {lock.parent}",
                    hint="Wait for it, end it, or use another --workdir.",
                )
            _remove_dead(lock)
    finally:
        draft.unlink(missing_ok=True)
    raise UsageError(f"{lock} is being taken by other processes", hint="Try again.")


def _remove_dead(lock: Path) -> None:
    """Take a dead process's lock away, unless another process has taken it over since it was judged."""
    private = lock.with_name(f".dead-lock.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        lock.rename(private)
        if _holder(private) is not None:
            with contextlib.suppress(FileExistsError):
                os.link(private, lock)
        private.unlink()


def _holder(lock: Path) -> int | None:
    """The pid of the living process that holds the lock."""
    try:
        held = json.loads(lock.read_text(encoding="utf-8"))
        process = psutil.Process(held["pid"])
        # A killed process stays as a zombie until its parent asks for it, which in a container may be never.
        alive = process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - held["started"]) < 1
        return int(held["pid"]) if alive else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None
