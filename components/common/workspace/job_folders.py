"""Private folders and locks of jobs.

Every job works in its private folder; the next job removes the folders of killed jobs. If several jobs can publish to
the same path, each job builds the result in its private folder and publishes the result by rename.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from components.common.runtime import filesystem
from components.common.runtime.errors import BusyError
from components.common.workspace import liveness

STALE_AFTER_SECONDS = 3600.0  # a folder of another host is stale after this time without a heartbeat
LOCK_STALE_AFTER_SECONDS = 60.0  # the same for a lock that another job waits for
# Locks, which contain the owner tag: of the job that works in a folder, and of the training that writes checkpoints
# there, perhaps on another machine.
LOCK_FILENAME, WRITER_LOCK_FILENAME = "holder", "writer"
OCCUPIED_ERRNOS = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # of a rename to an existing path
ExistingT = TypeVar("ExistingT")


@contextmanager
def private_folder(
    parent: Path, prefix: str, *, mode: int = 0o777, rescue: Callable[[Path], None] = lambda _: None
) -> Iterator[Path]:
    """Create a private folder of this job in `parent`, and remove it at the end. Abandoned folders are removed first.

    Args:
        mode: permissions, less the umask; 0o700 if other users can list `parent`.
        rescue: called with every folder before its removal. If it raises OSError, the folder is not removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_folders(parent, prefix, rescue)
    folder = parent / f"{prefix}.{create_owner_tag()}"
    folder.mkdir(mode=mode, exist_ok=True)  # the name is unique: over NFS, a repeated call finds its own folder
    try:
        with liveness.heartbeat(folder):
            yield folder
    finally:
        _remove(folder, prefix, rescue)


def remove_abandoned_folders(parent: Path, prefix: str, rescue: Callable[[Path], None] = lambda _: None) -> None:
    """Remove the private folders of killed jobs.

    Args:
        rescue: as in `private_folder`.
    """
    for folder in parent.glob(f"{prefix}.*.*.*"):
        if is_abandoned(folder, prefix):
            _remove(folder, prefix, rescue)


def list_folder(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder; an empty list if another job has just removed the folder."""
    try:
        return filesystem.retry_stale(lambda: sorted(folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(folder: Path, prefix: str, rescue: Callable[[Path], None]) -> None:
    try:
        rescue(folder)
    except OSError:
        return  # the content could not be restored: the next job retries
    # A process that still writes below the old path (the partner of a probe) must not keep the folder from being
    # removed; if this process is killed here, the new name is an abandoned folder like any other.
    removed = folder.with_name(f"{prefix}.{create_owner_tag()}")
    with suppress(OSError):
        filesystem.rename(folder, removed)
    shutil.rmtree(removed if removed.exists() else folder, ignore_errors=True)


def move_into_place(
    source: Path, target: Path, find_existing: Callable[[], ExistingT | None], aside: Path
) -> ExistingT | None:
    """Move a finished folder to a path to which other jobs may move folders at the same time.

    An existing folder that has to be replaced is moved below `aside` first. The path always contains the old or the new
    folder, except between the two renames.

    Args:
        find_existing: returns the existing result at `target` if it does not have to be replaced, else None.

    Returns:
        The result of `find_existing`, or None if `source` was moved.

    Raises:
        OSError: `source` cannot be moved, for a reason other than an existing `target`.
    """
    while True:
        try:
            filesystem.rename(source, target)  # never replaces a folder that is not empty
        except OSError as error:
            if error.errno not in OCCUPIED_ERRNOS:
                raise
        else:
            return None
        if existing := find_existing():
            return existing
        move_aside(target, aside)


def move_aside(folder: Path, aside: Path) -> Path:
    """Move a folder to a unique parent folder below `aside`, and return the new path.

    The path does not exist if another job has moved the folder first.
    """
    parent = aside / secrets.token_hex(4)
    parent.mkdir(parents=True, exist_ok=True)  # see private_folder
    with suppress(FileNotFoundError):  # another job has moved the folder
        filesystem.rename(folder, parent / folder.name)
    return parent / folder.name


def create_owner_tag() -> str:
    """Return a new tag "<host>.<process>.<8 hexadecimal digits>" for names of files and folders."""
    return f"{liveness.identify_host()}.{liveness.identify_process()}.{secrets.token_hex(4)}"


def is_abandoned(path: Path, prefix: str) -> bool:
    """Return whether the owner of <prefix>.<owner tag> has ended, or has sent no heartbeat for STALE_AFTER_SECONDS."""
    return _is_owner_stopped(path.name.removeprefix(f"{prefix}."), path, STALE_AFTER_SECONDS)


def _is_owner_stopped(owner: str, path: Path, stale_after_seconds: float) -> bool:
    """Return whether an owner on this host has ended, or the heartbeat of an owner on another host is stale."""
    host, process = owner.rsplit(".", 2)[:2]
    if host == liveness.identify_host():
        return liveness.is_process_gone(process)
    try:
        return liveness.seconds_since_heartbeat(path) > stale_after_seconds
    except OSError:
        return False  # the owner has just removed the path, or the path cannot be read


@contextmanager
def folder_lock(
    folder: Path, filename: str = LOCK_FILENAME, *, wait_seconds: float = 0.0
) -> Iterator[Callable[[], None]]:
    """Lock a folder exclusively, across hosts. The lock of a stopped job is taken over.

    The lock of an owner on another host is polled until the owner sends a heartbeat, or has sent no heartbeat for
    LOCK_STALE_AFTER_SECONDS.

    Args:
        folder: the folder to lock.
        filename: name of the lock; a folder may have several.
        wait_seconds: time to wait for a running owner.

    Yields:
        A function that raises BusyError once another job has taken the lock over, because this process was paused or
        could not reach the folder. A process calls it before it writes.

    Raises:
        BusyError: another job holds the lock.
    """
    lock, tag, deadline = folder / filename, create_owner_tag(), time.monotonic() + wait_seconds
    draft = folder / f".{filename}.{tag}"
    draft.write_text(tag, encoding="utf-8")
    try:
        while not _try_link(draft, lock):
            owner = _read_owner(lock)
            if owner and _is_owner_alive(lock, owner):
                if time.monotonic() < deadline:
                    time.sleep(1)
                    continue
                host, process = owner.rsplit(".", 2)[:2]
                raise BusyError(
                    f"process {process.partition('-')[0]} on {host.rpartition('-')[0]} has locked {folder}",
                    hint="Rerun the command after that process has ended.",
                )
            with _flock(folder):
                _remove_stale_lock(lock, owner)
        draft.unlink(missing_ok=True)
        for path in folder.glob(f".{filename}.*.*.*"):
            if is_abandoned(path, f".{filename}"):
                path.unlink(missing_ok=True)

        def verify() -> None:
            # A second reading, because NFS reports a stale file once after a lock was replaced.
            if tag not in (_read_owner(lock), _read_owner(lock)):
                raise BusyError(
                    f"another process has taken over {folder}, because this process sent no heartbeat "
                    f"for {LOCK_STALE_AFTER_SECONDS:.0f} seconds; this process stops writing",
                    hint="Wait for the other process; it continues from the last checkpoint.",
                )

        with liveness.heartbeat(lock):
            yield verify
    finally:
        draft.unlink(missing_ok=True)
        with suppress(FileNotFoundError), _flock(folder):  # the job may have removed the folder
            if _read_owner(lock) == tag:
                lock.unlink(missing_ok=True)


def is_locked(folder: Path) -> bool:
    """Return whether a job holds the lock and has not stopped; see STALE_AFTER_SECONDS for other hosts."""
    owners = {lock: _read_owner(lock) for lock in (folder / LOCK_FILENAME, folder / WRITER_LOCK_FILENAME)}
    return any(owner and not _is_owner_stopped(owner, lock, STALE_AFTER_SECONDS) for lock, owner in owners.items())


@contextmanager
def _flock(folder: Path) -> Iterator[None]:
    """Lock a folder with flock(2) on this host. Errors are ignored, because NFS may not support flock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_link(draft: Path, lock: Path) -> bool:
    """Create the lock with its content by link(2), which is atomic even on NFS; return False if the lock exists."""
    try:
        filesystem.link(draft, lock)
    except FileExistsError:
        return False
    return True


def _read_owner(lock: Path) -> str:
    try:
        return filesystem.read_text(lock)
    except OSError:
        return ""


def _is_owner_alive(lock: Path, owner: str) -> bool:
    """Return whether the owner of a lock is running; for an owner on another host, wait for a heartbeat."""
    try:
        first = lock.stat().st_mtime_ns
        while _read_owner(lock) == owner and not _is_owner_stopped(owner, lock, LOCK_STALE_AFTER_SECONDS):
            if owner.startswith(f"{liveness.identify_host()}.") or lock.stat().st_mtime_ns != first:
                return True
            time.sleep(1)
    except FileNotFoundError:
        pass  # the lock was just released
    return False


def _remove_stale_lock(lock: Path, owner: str) -> None:
    """Remove the lock of a stopped job, and restore it if another job has taken it over since the check."""
    if not owner or _read_owner(lock) != owner:
        return  # the lock was just released
    private = lock.with_name(f".{lock.name}.{create_owner_tag()}")
    with suppress(FileNotFoundError):
        filesystem.rename(lock, private)
        if _read_owner(private) != owner:
            _try_link(private, lock)
        private.unlink()
