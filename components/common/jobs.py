"""Private folders for jobs: every job works in a folder of its own, and what a killed job left is swept up by the next.

What several jobs may want to put in the same place is made in such a folder and then settled there by a rename.
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

from components.common import liveness
from components.common.errors import BusyError

SILENT = 3600.0  # seconds without a sign of life after which a folder's owner on another machine, or in another container, counts as dead
QUIET = 60.0  # the same for who holds a folder that another job waits for; a sign of life comes every 15 seconds
HOLDER = "holder"  # the file in a held folder that says whose it is
OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what a rename says of a place that is taken
Kept = TypeVar("Kept")


def _nothing(_: Path) -> None:
    """There is nothing to rescue in most folders."""


@contextmanager
def private_folder(parent: Path, prefix: str, *, mode: int = 0o777, rescue: Callable[[Path], None] = _nothing) -> Iterator[Path]:
    """A new folder in `parent` that no other process uses, removed at the end. Folders of dead processes with this prefix go first.

    `mode` is its permissions, less the umask: 0o700 where other users can look into `parent`. `rescue` is given every folder right
    before it is removed; where it raises OSError the folder stays.
    """
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent, prefix, rescue)
    folder = parent / f"{prefix}.{mark()}"
    folder.mkdir(mode=mode)
    try:
        with liveness.beating(folder):
            yield folder
    finally:
        _remove(folder, rescue)


def sweep(parent: Path, prefix: str, rescue: Callable[[Path], None] = _nothing) -> None:
    """Remove the folders that jobs left which were killed before they could."""
    for folder in parent.glob(f"{prefix}.*.*.*"):
        if is_abandoned(folder, prefix):
            _remove(folder, rescue)


def listed(folder: Path) -> list[Path]:
    """What lies in a folder, sorted; nothing where another job has just removed it."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(folder: Path, rescue: Callable[[Path], None]) -> None:
    try:
        rescue(folder)
    except OSError:
        return  # what is in it could not be saved: the next one tries again
    shutil.rmtree(folder, ignore_errors=True)


def settle(made: Path, home: Path, kept: Callable[[], Kept | None], aside: Path) -> Kept | None:
    """Move a finished folder to a place where other jobs may put theirs at the same time. Returns what `kept` says may stay there instead.

    What may not stay is moved below `aside` right before, so that the place holds the old or the new one, and neither for the moment
    between two renames only.
    """
    while not _is_moved(made, home):
        if found := kept():
            return found
        put_aside(home, aside)
    return None


def put_aside(home: Path, aside: Path) -> Path:
    """Move a folder to a new place below `aside`, under its own name. Returns where it is then, if no other job was first."""
    place = aside / secrets.token_hex(4)
    place.mkdir(parents=True)
    with suppress(FileNotFoundError):  # another job was first
        home.rename(place / home.name)
    return place / home.name


def _is_moved(made: Path, home: Path) -> bool:
    """A rename replaces no folder that holds something."""
    try:
        made.rename(home)
    except OSError as error:
        if error.errno not in OCCUPIED:
            raise
        return False
    return True


def mark() -> str:
    """What tells from a file's or a folder's name who made it: where, which process, and digits of its own."""
    return f"{liveness.where()}.{liveness.name()}.{secrets.token_hex(4)}"


def is_abandoned(path: Path, prefix: str) -> bool:
    """Whether the owner of <prefix>.<mark> is dead; elsewhere, whether it was silent for long."""
    return _is_dead(path.name.removeprefix(f"{prefix}."), path, SILENT)


def _is_dead(owner: str, path: Path, silent: float) -> bool:
    """Whether the owner with this mark is dead; elsewhere, whether what it holds had no sign of life for so many seconds."""
    where, process = owner.rsplit(".", 2)[:2]
    if where == liveness.where():
        return liveness.is_gone(process)
    try:
        return liveness.silence(path) > silent
    except OSError:
        return False  # its owner just removed it, or nothing may be removed here


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder in which one job at a time may work, on whichever machine; the hold of a dead one is taken over.

    Raises BusyError where another job holds it. One of another machine is watched first: until it gives a sign of life, or has given none
    for QUIET seconds.
    """
    hold, mine = folder / HOLDER, mark()
    draft = folder / f".{HOLDER}.{mine}"
    draft.write_text(mine, encoding="utf-8")
    try:
        while not _is_linked(draft, hold):
            owner = _owner(hold)
            if owner and _lives(hold, owner):
                raise _busy(folder, owner)
            with _alone(folder):
                _take_away(hold, owner)
        draft.unlink()
        _sweep_drafts(folder)
        with liveness.beating(hold):
            yield
    finally:
        draft.unlink(missing_ok=True)
        with suppress(FileNotFoundError), _alone(folder):  # its work done, the job may have removed the folder
            if _owner(hold) == mine:
                hold.unlink(missing_ok=True)


def is_held(folder: Path) -> bool:
    """Whether a living job holds a folder; of one on another machine, whether it gave a sign of life within SILENT seconds."""
    hold = folder / HOLDER
    owner = _owner(hold)
    return bool(owner) and not _is_dead(owner, hold, SILENT)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """For a look and what follows from it, without another job in between. Where folders cannot be locked (NFS) it is the moment that
    has to suffice."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep_drafts(folder: Path) -> None:
    for path in folder.glob(f".{HOLDER}.*.*.*"):
        if is_abandoned(path, f".{HOLDER}"):
            path.unlink(missing_ok=True)


def _is_linked(draft: Path, hold: Path) -> bool:
    """A link is made only where nothing is, and what it names is whole at once, on NFS too."""
    try:
        os.link(draft, hold)
    except FileExistsError:
        return False
    return True


def _owner(hold: Path) -> str:
    try:
        return hold.read_text(encoding="utf-8")
    except OSError:
        return ""


def _lives(hold: Path, owner: str) -> bool:
    """Whether the owner of a hold is alive, waited for where it is elsewhere."""
    try:
        first = hold.stat().st_mtime_ns
        while _owner(hold) == owner and not _is_dead(owner, hold, QUIET):
            if owner.startswith(f"{liveness.where()}.") or hold.stat().st_mtime_ns != first:
                return True
            time.sleep(1)
    except FileNotFoundError:
        pass  # it just let go
    return False


def _take_away(hold: Path, owner: str) -> None:
    """Remove a dead job's hold, and put it back where another job has taken it over since it was judged."""
    if not owner or _owner(hold) != owner:
        return  # it just let go
    private = hold.with_name(f".{HOLDER}.{mark()}")
    with suppress(FileNotFoundError):
        hold.rename(private)
        if _owner(private) != owner:
            _is_linked(private, hold)
        private.unlink()


def _busy(folder: Path, owner: str) -> BusyError:
    where, process = owner.rsplit(".", 2)[:2]
    who = f"process {process.partition('-')[0]} on {where.rpartition('-')[0]}"
    return BusyError(f"{who} works in {folder} right now", hint="Wait until it has ended, or end it; then run the same command again.")
