"""What a file system is to keep: each step is gone through by both sides at once, and returns what this one saw.

A step works below `side.room`, a folder for each side that is made before it begins. What the other side made there is waited for with
`side.appears`, except where it is the very thing that is measured.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.storage.filesystem import Filesystem, LockKind, content, keep
from pipelines.storage.side import MIB, Side

BOTH = (0, 1)  # each side in turn does something while the other looks
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LOOK_EVERY = 0.005  # seconds between two looks for what the other side makes
VERSIONS = 64 * 1024  # bytes of a file that is replaced again and again
DIGEST = 32
FORCED = MIB  # bytes that are written and forced out
SMALL = 4096
ROUND = 0.01  # seconds a race for a name
LONGEST_NAME = 255  # bytes, what Linux's own file systems take
STRANGE = ("colon:", "question?", "asterisk*", "space at the end ", "dot at the end.", "back\\slash", "æøå", "日本語", "e\u0301", "\u00e9")


def place(side: Side) -> dict[str, Any]:
    """Space, inodes, whether it is read-only, and who owns what this side makes."""
    space = side.fs.space(side.folder)
    file = side.room() / "owner"
    keep(side.fs, file, b"0")
    side.fs.chmod(file, 0o600)
    found = side.fs.stat(file)
    return {
        "free": space.f_bavail * space.f_frsize,
        "size": space.f_blocks * space.f_frsize,
        "inodes": space.f_files,
        "free_inodes": space.f_favail,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "user": os.geteuid(),
        "owner": found.st_uid,
        "group": found.st_gid,
        "mode": stat.S_IMODE(found.st_mode),
    }


def clock(side: Side) -> dict[str, Any]:
    """How much more the server's clock shows than this host's, by the time of change of new files; the narrowest of five bounds."""
    bounds = []
    for n in range(5):
        before = side.fs.now()
        keep(side.fs, side.room() / str(n), b"0")
        changed = side.fs.stat(side.room() / str(n)).st_mtime
        after = side.fs.now()
        bounds.append(((after - before) / 2, changed - (before + after) / 2))
    within, side.offset = min(bounds)
    return {"offset": side.offset, "within": within}


def names(side: Side) -> dict[str, Any]:
    """Which names can be told apart and come back as they were given."""
    room = side.room()
    keep(side.fs, room / "Case", b"upper")
    return {
        "case_sensitive": not _exists(side.fs, room / "case"),
        "longest": next((n for n in (LONGEST_NAME, 143, 100, 64) if _takes(side.fs, room, "n" * n)), 0),
        "changed": [name for name in STRANGE if not _takes(side.fs, room, name)],
    }


def _takes(fs: Filesystem, room: Path, name: str) -> bool:
    """Whether a file can have this name, and is listed under it."""
    try:
        keep(fs, room / name, name.encode())
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOENT, errno.EILSEQ):
            return False
        raise
    return name in fs.names(room) and content(fs, room / name) == name.encode()


def _exists(fs: Filesystem, path: Path) -> bool:
    try:
        fs.stat(path)
    except FileNotFoundError:
        return False
    return True


def visibility(side: Side) -> dict[str, Any]:
    """Seconds after which this side saw what the other made; None: not at all while it was waited for."""
    return {"patience": side.plan.patience, **{key: value for maker in BOTH for key, value in _seen(side, maker).items()}}


def _seen(side: Side, maker: int) -> dict[str, float | None]:
    """The one side makes a file, lists one, touches one and adds to one; the other has looked before, so that it keeps the old state."""
    room = side.room(maker)
    looks = _looks(side.fs, room)
    if side.rank == maker:
        for name in ("named", "listed"):
            side.fs.mkdir(room / name)
        for name in ("touched", "grown"):
            keep(side.fs, room / name, b"old")
    side.meet(f"made.{maker}")
    if side.rank == maker:
        side.meet(f"looked.{maker}")
        at = _make(side, room)
        side.meet(f"seen.{maker}", at)
        return {}
    for path in (room / "named", room / "listed", room / "touched", room / "grown"):
        side.appears(path)
    for look in looks.values():
        look()
    side.meet(f"looked.{maker}")
    seen = _watched(side, looks)
    at = side.meet(f"seen.{maker}")
    return {name: None if when is None else max(0.0, when - at[name]) for name, when in seen.items()}


def _make(side: Side, room: Path) -> dict[str, float]:
    """Everything that the other side looks for; returns when each was there, by the server's clock: no change waits for another one.

    A name is there when it was made, which waits for no fsync; bytes are when they were forced out.
    """
    time.sleep(0.05)  # the other side looks by now, and a touched file gets another time also where times are coarse
    at = {}
    for kind, folder in (("by_name", "named"), ("in_listing", "listed")):
        descriptor = side.fs.open(room / folder / "new", os.O_WRONLY | os.O_CREAT)
        at[kind] = side.server_time()
        side.fs.close(descriptor)
    side.fs.touch(room / "touched")
    at["time_of_change"] = side.server_time()
    descriptor = side.fs.open(room / "grown", os.O_WRONLY | os.O_APPEND)
    try:
        side.fs.write(descriptor, b" and new")
        side.fs.fsync(descriptor)
        at["added_bytes"] = side.server_time()
    finally:
        side.fs.close(descriptor)
    return at


def _looks(fs: Filesystem, room: Path) -> dict[str, Callable[[], bool]]:
    """By kind of change: whether it is seen. The first look at a time of change only remembers it."""
    before: list[int] = []

    def touched() -> bool:
        before.append(fs.stat(room / "touched").st_mtime_ns)
        return before[-1] != before[0]

    return {
        "by_name": lambda: _exists(fs, room / "named" / "new"),
        "in_listing": lambda: "new" in fs.names(room / "listed"),
        "time_of_change": touched,
        "added_bytes": lambda: content(fs, room / "grown") == b"old and new",
    }


def _watched(side: Side, looks: dict[str, Callable[[], bool]]) -> dict[str, float | None]:
    """When each change was seen, by the server's clock."""
    seen: dict[str, float | None] = dict.fromkeys(looks)
    deadline = time.monotonic() + side.plan.patience
    while time.monotonic() < deadline and None in seen.values():
        for name in [name for name, when in seen.items() if when is None]:
            if looks[name]():
                seen[name] = side.server_time()
        time.sleep(LOOK_EVERY)
    return seen


def rename(side: Side) -> dict[str, Any]:
    """What this side saw of a file that the other replaced again and again: each time the old one or the new one, whole, and never none."""
    return {key: value for maker in BOTH for key, value in _replaced(side, maker).items()}


def _replaced(side: Side, maker: int) -> dict[str, int]:
    path = side.room(maker) / "current"
    if side.rank == maker:
        _replace(side.fs, path, 0)
    side.meet(f"first.{maker}")
    if side.rank != maker:
        side.appears(path)
    side.together(f"begin.{maker}")
    until = time.monotonic() + side.plan.seconds
    if side.rank == maker:
        version = 0
        while time.monotonic() < until:
            version += 1
            _replace(side.fs, path, version)
        side.meet(f"done.{maker}", version)
        return {}
    counts = _read_again(side.fs, path, until)
    return {**counts, "versions": side.meet(f"done.{maker}")}


def _replace(fs: Filesystem, path: Path, version: int) -> None:
    """A whole file with its number and digest, put in the place of the last one by a rename."""
    body = version.to_bytes(8, "big") + os.urandom(256) * ((VERSIONS - 8 - DIGEST) // 256)
    draft = path.with_name("draft")
    keep(fs, draft, hashlib.sha256(body).digest() + body)
    fs.replace(draft, path)


def _read_again(fs: Filesystem, path: Path, until: float) -> dict[str, int]:
    """How often it was read, and what was wrong."""
    counts, last = {"reads": 0, "missing": 0, "torn": 0, "stale": 0, "older": 0}, 0
    while time.monotonic() < until:
        counts["reads"] += 1
        try:
            said = content(fs, path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            counts["missing" if error.errno == errno.ENOENT else "stale"] += 1
            continue
        digest, body = said[:DIGEST], said[DIGEST:]
        if hashlib.sha256(body).digest() != digest:
            counts["torn"] += 1
            continue
        version = int.from_bytes(body[:8], "big")
        counts["older"] += version < last
        last = max(version, last)
    return counts


def fsync(side: Side) -> dict[str, Any]:
    """Whether what was forced out is what both sides read, while the file is open and after it was closed; and how long forcing takes."""
    found = {key: value for maker in BOTH for key, value in _forced(side, maker).items()}
    side.meet("timed")
    return {**found, **_timed(side.fs, side.room())}


def _forced(side: Side, maker: int) -> dict[str, bool]:
    """The side that writes says what it reads of its own after reopening, the other what it reads before and after the file is closed."""
    path = side.room(maker) / "forced"
    if side.rank == maker:
        data = os.urandom(FORCED)
        descriptor = side.fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            side.fs.write(descriptor, data)
            side.fs.fsync(descriptor)
            side.meet(f"forced.{maker}", hashlib.sha256(data).hexdigest())
            side.meet(f"read.{maker}")
        finally:
            side.fs.close(descriptor)
        _force_folder(side.fs, path.parent)
        side.meet(f"closed.{maker}")
        return {"own_reopened": content(side.fs, path, afresh=True) == data}
    digest = side.meet(f"forced.{maker}")
    side.appears(path)
    open_ = _comes_to(side, path, digest)
    side.meet(f"read.{maker}")
    side.meet(f"closed.{maker}")
    return {"others_open": open_, "others_closed": _comes_to(side, path, digest)}


def _comes_to(side: Side, path: Path, digest: str) -> bool:
    """Whether a file's content is this; seen late is no loss, and is told by another step."""
    deadline = time.monotonic() + min(side.plan.patience, 2.0)
    while hashlib.sha256(content(side.fs, path, afresh=True)).hexdigest() != digest:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _force_folder(fs: Filesystem, folder: Path) -> None:
    """Publishing forces the folder's names out too."""
    descriptor = fs.open(folder, os.O_RDONLY)
    try:
        fs.fsync(descriptor)
    finally:
        fs.close(descriptor)


def _timed(fs: Filesystem, room: Path) -> dict[str, float]:
    """Median seconds of writing 4 KiB, and of forcing them out."""
    writes, forces = [], []
    descriptor = fs.open(room / "timed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for _ in range(32):
            began = time.perf_counter()
            fs.write(descriptor, bytes(SMALL))
            written = time.perf_counter()
            fs.fsync(descriptor)
            writes.append(written - began)
            forces.append(time.perf_counter() - written)
    finally:
        fs.close(descriptor)
    return {"write_seconds": statistics.median(writes), "fsync_seconds": statistics.median(forces)}


def exclusive(side: Side) -> dict[str, Any]:
    """Which names this side got, where both try each at the same time: by O_EXCL, by mkdir, by a link."""
    room, fs = side.room(0), side.fs
    draft = side.room() / "draft"
    keep(fs, draft, b"0")
    calls: dict[str, Callable[[Path], None]] = {
        "O_EXCL": lambda path: fs.close(fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)),
        "mkdir": fs.mkdir,
        "link": lambda path: fs.link(draft, path),
    }
    side.appears(room)
    side.together("begin")
    won: dict[str, list[int]] = {kind: [] for kind in calls}
    began, chance = time.monotonic(), random.Random(side.rank)  # noqa: S311 - no secrets
    for n in range(side.plan.rounds):
        # The clocks of two hosts are not told more exactly than that: by chance the one or the other comes first, or both at once.
        time.sleep(max(0.0, began + (n + 0.8 * chance.random()) * ROUND - time.monotonic()))
        for kind, call in calls.items():
            try:
                call(room / f"{kind}.{n}")
            except FileExistsError:
                continue
            won[kind].append(n)
    return {"rounds": side.plan.rounds, "won": won}


def locks(side: Side) -> dict[str, Any]:
    """Whether what one side locks is locked for the other, and free again afterwards; None: there are no locks."""
    kinds: tuple[LockKind, ...] = ("fcntl", "flock")
    return {kind: value for kind in kinds for holder in BOTH if (value := _locked(side, kind, holder)) != "held"}


def _locked(side: Side, kind: LockKind, holder: int) -> dict[str, bool] | str | None:
    """Of the side that tries, what it found; "held" of the other."""
    path, turn = side.room(holder) / kind, f"{kind}.{holder}"
    if side.rank == holder:
        keep(side.fs, path, b"0")
    side.meet(f"{turn}.made")
    side.appears(path)
    descriptor = side.fs.open(path, os.O_RDWR)
    try:
        if side.rank == holder:
            got = _try(side.fs, descriptor, kind)
            side.meet(f"{turn}.held", got)
            side.meet(f"{turn}.tried")
            if got:
                side.fs.unlock(descriptor, kind)
            side.meet(f"{turn}.free")
            return "held"
        held = side.meet(f"{turn}.held")
        second = _try(side.fs, descriptor, kind)
        if second:
            side.fs.unlock(descriptor, kind)
        side.meet(f"{turn}.tried")
        side.meet(f"{turn}.free")
        third = _try(side.fs, descriptor, kind)
    finally:
        side.fs.close(descriptor)
    return None if None in (held, second, third) else {"excluded": not second, "freed": bool(third)}


def _try(fs: Filesystem, descriptor: int, kind: LockKind) -> bool | None:
    try:
        return fs.lock(descriptor, kind)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise


def deleted(side: Side) -> dict[str, Any]:
    """Whether a file that this side has open can still be read when the other has deleted it."""
    return {key: value for reader in BOTH for key, value in _read_deleted(side, reader).items()}


def _read_deleted(side: Side, reader: int) -> dict[str, bool]:
    maker = 1 - reader
    path = side.room(maker) / "deleted"
    if side.rank == maker:
        keep(side.fs, path, bytes(FORCED))
        side.meet(f"made.{maker}")
        side.meet(f"open.{maker}")
        side.fs.unlink(path)
        side.meet(f"gone.{maker}")
        return {}
    side.meet(f"made.{maker}")
    side.appears(path)
    descriptor = side.fs.open(path, os.O_RDONLY)
    try:
        side.fs.read_at(descriptor, bytearray(SMALL), 0)
        side.meet(f"open.{maker}")
        side.meet(f"gone.{maker}")
        side.fs.forget(descriptor)
        side.fs.read_at(descriptor, bytearray(SMALL), FORCED - SMALL)
        return {"readable": True}
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return {"readable": False}
    finally:
        side.fs.close(descriptor)
