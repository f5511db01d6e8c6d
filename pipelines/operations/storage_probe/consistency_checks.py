"""Consistency checks: both participants run each step at the same time and return their observations.

A step works below `side.folder_for()`, a folder per participant that exists before the step begins. A step waits for
the partner's paths with `side.wait_for_path`, unless it measures their delay.
"""

# `maker` is the rank that writes while the other rank observes.

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import stat
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipelines.operations.storage_probe.participant import MIB_BYTES, Figures, Participant
from pipelines.operations.storage_probe.probed_filesystem import (
    Filesystem,
    LockKind,
    open_file,
    read_file,
    write_durably,
)

RANKS = (0, 1)
LOCKS_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
POLL_INTERVAL_SECONDS = 0.005  # between two reads of the partner's changes
VERSION_FILE_BYTES = 64 * 1024  # of the file that is replaced repeatedly
DIGEST_BYTES = 32
FSYNC_FILE_BYTES = MIB_BYTES
BLOCK_BYTES = 4096
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
RACE_INTERVAL_SECONDS = 0.01  # between two races for a name
MAX_NAME_BYTES = 255  # the limit of Linux's own file systems
UNUSUAL_NAMES = (
    "colon:", "question?", "asterisk*", "space at the end ", "dot at the end.", "back\\slash", "æøå", "日本語", "e\u0301", "\u00e9",
)  # fmt: skip


def check_filesystem(side: Participant) -> Figures:
    """Report space, inodes, the read-only flag, and the owner and mode of a new file.

    Returns:
        {"free", "size"} in bytes, {"inodes", "free_inodes"} as counts, "read_only", the numeric IDs {"user", "owner",
        "group"}, and the permission bits "mode".
    """
    space = side.fs.space(side.folder)
    file = side.folder_for() / "owner"
    write_durably(side.fs, file, b"0")
    side.fs.chmod(file, 0o600)
    status = side.fs.stat(file)
    return {
        "free": space.f_bavail * space.f_frsize,
        "size": space.f_blocks * space.f_frsize,
        "inodes": space.f_files,
        "free_inodes": space.f_favail,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "user": os.geteuid(),
        "owner": status.st_uid,
        "group": status.st_gid,
        "mode": stat.S_IMODE(status.st_mode),
    }


def check_clock(side: Participant) -> Figures:
    """Measure the offset of the server's clock from this host's clock.

    The modification time of a new file is compared with this host's time before and after the write. Of five
    measurements, the most precise is returned.

    Returns:
        {"offset": the server's time minus this host's time, "within": the uncertainty}, in seconds.
    """
    bounds = []
    for number in range(5):
        file = side.folder_for() / str(number)
        before = side.fs.now()
        write_durably(side.fs, file, b"0")
        modified = side.fs.stat(file).st_mtime
        after = side.fs.now()
        bounds.append(((after - before) / 2, modified - (before + after) / 2))
    within, side.offset = min(bounds)
    return {"offset": side.offset, "within": within}


def check_names(side: Participant) -> Figures:
    """Measure the case sensitivity, the maximum length and the character set of names.

    Returns:
        {"case_sensitive", "longest": the maximum length in bytes, "changed": the unusual names that are changed or
        rejected}.
    """
    folder, fs = side.folder_for(), side.fs

    def is_accepted(name: str) -> bool:
        try:
            write_durably(fs, folder / name, name.encode())
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOENT, errno.EILSEQ):
                return False
            raise
        return name in fs.names(folder) and read_file(fs, folder / name) == name.encode()

    write_durably(fs, folder / "Case", b"upper")
    return {
        "case_sensitive": not _exists(fs, folder / "case"),
        "longest": next((length for length in (MAX_NAME_BYTES, 143, 100, 64) if is_accepted("n" * length)), 0),
        "changed": [name for name in UNUSUAL_NAMES if not is_accepted(name)],
    }


def _exists(fs: Filesystem, path: Path) -> bool:
    try:
        fs.stat(path)
    except FileNotFoundError:
        return False
    return True


def check_visibility(side: Participant) -> Figures:
    """Measure the delays until the partner's changes are visible.

    Returns:
        {"by_name", "in_listing", "time_of_change", "added_bytes"} in seconds, or None for a change that is not visible
        within the timeout; "patience": the timeout in seconds.
    """
    delays = [_measure_visibility(side, maker) for maker in RANKS]
    return {"patience": side.plan.visibility_timeout, **delays[0], **delays[1]}


def _measure_visibility(side: Participant, maker: int) -> dict[str, float | None]:
    """Measure the delay of each of the maker's changes: two new files, a modification time and appended bytes."""
    fs, folder = side.fs, side.folder_for(maker)
    if side.rank == maker:
        for name in ("named", "listed"):
            fs.mkdir(folder / name)
        for name in ("touched", "grown"):
            write_durably(fs, folder / name, b"old")
        side.exchange(f"made.{maker}")
        side.exchange(f"baseline_read.{maker}")
        # Each change has its own server time, so that a slow change does not distort the other delays. The delay of a
        # name begins at its creation, without fsync; the delay of bytes begins after their fsync.
        time.sleep(0.05)  # the partner begins to poll, and coarse modification times differ from those of the creation
        times = {}
        for kind, name in (("by_name", "named"), ("in_listing", "listed")):
            with open_file(fs, folder / name / "new", os.O_WRONLY | os.O_CREAT):
                times[kind] = side.server_time()
        fs.touch(folder / "touched")
        times["time_of_change"] = side.server_time()
        with open_file(fs, folder / "grown", os.O_WRONLY | os.O_APPEND) as descriptor:
            fs.write(descriptor, b" and new")
            fs.fsync(descriptor)
            times["added_bytes"] = side.server_time()
        side.exchange(f"changes.{maker}", times)
        return {}
    side.exchange(f"made.{maker}")
    for name in ("named", "listed", "touched", "grown"):
        side.wait_for_path(folder / name)
    touched_before = fs.stat(folder / "touched").st_mtime_ns
    is_visible: dict[str, Callable[[], bool]] = {
        "by_name": lambda: _exists(fs, folder / "named" / "new"),
        "in_listing": lambda: "new" in fs.names(folder / "listed"),
        "time_of_change": lambda: fs.stat(folder / "touched").st_mtime_ns != touched_before,
        "added_bytes": lambda: read_file(fs, folder / "grown") == b"old and new",
    }
    for check in is_visible.values():  # the first read fills the client's caches
        check()
    side.exchange(f"baseline_read.{maker}")
    visible_at: dict[str, float | None] = dict.fromkeys(is_visible)

    def watch_until(end: float) -> None:
        while side.server_time() < end and None in visible_at.values():
            for kind, check in is_visible.items():
                if visible_at[kind] is None and check():
                    visible_at[kind] = side.server_time()
            time.sleep(POLL_INTERVAL_SECONDS)

    watch_until(side.server_time() + side.plan.visibility_timeout)
    made_at = side.exchange(f"changes.{maker}")
    watch_until(max(made_at.values()) + side.plan.visibility_timeout)  # the maker may have made its changes late
    return {
        name: None if seconds is None else max(0.0, seconds - made_at[name]) for name, seconds in visible_at.items()
    }


def check_rename(side: Participant) -> Figures:
    """Count incorrect reads of a file that the partner replaces repeatedly: each read must return a whole version.

    Returns:
        {"reads", "missing", "torn", "stale", "older"}: the numbers of all reads and of incorrect reads; "versions": the
        number of versions that the partner wrote.
    """
    counts = {"reads": 0, "missing": 0, "torn": 0, "stale": 0, "older": 0}
    for maker in RANKS:
        path, version = side.folder_for(maker) / "current", 0
        if side.rank == maker:
            _replace_version(side.fs, path, version)
        side.exchange(f"first.{maker}")
        if side.rank != maker:
            side.wait_for_path(path)
        side.synchronize(f"begin.{maker}")
        deadline = time.monotonic() + side.plan.seconds
        if side.rank == maker:
            while time.monotonic() < deadline:
                version += 1
                _replace_version(side.fs, path, version)
            side.exchange(f"done.{maker}", version)
            continue
        while time.monotonic() < deadline:
            counts["reads"] += 1
            try:
                data = read_file(side.fs, path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                counts["missing" if error.errno == errno.ENOENT else "stale"] += 1
                continue
            digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != digest:
                counts["torn"] += 1
                continue
            read = int.from_bytes(body[:8], "big")
            counts["older"] += read < version
            version = max(read, version)
        counts["versions"] = side.exchange(f"done.{maker}")
    return counts


def _replace_version(fs: Filesystem, path: Path, version: int) -> None:
    """Write the next version (digest, number, random bytes) to a draft and rename it over the previous version."""
    body = version.to_bytes(8, "big") + os.urandom(256) * ((VERSION_FILE_BYTES - 8 - DIGEST_BYTES) // 256)
    draft = path.with_name("draft")
    write_durably(fs, draft, hashlib.sha256(body).digest() + body)
    fs.replace(draft, path)


def check_fsync(side: Participant) -> Figures:
    """Check that both participants read flushed data before and after the file is closed, and measure fsync times.

    Returns:
        {"others_open", "others_closed", "own_reopened"}: whether the read data equals the flushed data;
        {"write_seconds", "fsync_seconds"}: the median times for 4 KiB.
    """
    fs, results = side.fs, {}
    for maker in RANKS:
        path = side.folder_for(maker) / "forced"
        if side.rank == maker:
            data = os.urandom(FSYNC_FILE_BYTES)
            with open_file(fs, path, NEW_FILE_FLAGS) as descriptor:
                fs.write(descriptor, data)
                fs.fsync(descriptor)
                side.exchange(f"forced.{maker}", hashlib.sha256(data).hexdigest())
                side.exchange(f"read.{maker}")
            with open_file(fs, path.parent, os.O_RDONLY) as descriptor:  # publication flushes the folder too
                fs.fsync(descriptor)
            side.exchange(f"closed.{maker}")
            results["own_reopened"] = read_file(fs, path, drop_cache=True) == data
        else:
            digest = side.exchange(f"forced.{maker}")
            side.wait_for_path(path)
            results["others_open"] = _wait_for_digest(side, path, digest)
            side.exchange(f"read.{maker}")
            side.exchange(f"closed.{maker}")
            results["others_closed"] = _wait_for_digest(side, path, digest)
    side.exchange("timed")
    writes, flushes = [], []
    with open_file(fs, side.folder_for() / "timed", NEW_FILE_FLAGS) as descriptor:
        for _ in range(32):
            start = time.perf_counter()
            fs.write(descriptor, bytes(BLOCK_BYTES))
            written = time.perf_counter()
            fs.fsync(descriptor)
            writes.append(written - start)
            flushes.append(time.perf_counter() - written)
    return {**results, "write_seconds": statistics.median(writes), "fsync_seconds": statistics.median(flushes)}


def _wait_for_digest(side: Participant, path: Path, digest: str) -> bool:
    """Return whether a file has this digest within two seconds; `check_visibility` measures longer delays."""
    deadline = time.monotonic() + min(side.plan.visibility_timeout, 2.0)
    while hashlib.sha256(read_file(side.fs, path, drop_cache=True)).hexdigest() != digest:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def check_exclusive_creation(side: Participant) -> Figures:
    """Race for names with the partner, by O_EXCL, mkdir and hard link; report the names that this participant won.

    Returns:
        {"rounds", "won": {"O_EXCL", "mkdir", "link"}}; "won" has the list of won rounds for each kind.
    """
    folder, fs = side.folder_for(0), side.fs
    draft = side.folder_for() / "draft"
    write_durably(fs, draft, b"0")
    attempts: dict[str, Callable[[Path], None]] = {
        "O_EXCL": lambda path: fs.close(fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)),
        "mkdir": fs.mkdir,
        "link": lambda path: fs.link(draft, path),
    }
    side.wait_for_path(folder)
    side.synchronize("begin")
    won: dict[str, list[int]] = {kind: [] for kind in attempts}
    start, jitter = time.monotonic(), random.Random(side.rank)  # noqa: S311 - not for secrets
    for number in range(side.plan.rounds):
        # The hosts are not synchronized more precisely than this interval. With random delays, each host is first in
        # some rounds, and both start at the same time in others.
        time.sleep(max(0.0, start + (number + 0.8 * jitter.random()) * RACE_INTERVAL_SECONDS - time.monotonic()))
        for kind, attempt in attempts.items():
            with suppress(FileExistsError):
                attempt(folder / f"{kind}.{number}")
                won[kind].append(number)
    return {"rounds": side.plan.rounds, "won": won}


def check_locks(side: Participant) -> Figures:
    """Check for each kind of lock whether the partner's lock excludes this participant and is released.

    Returns:
        {"fcntl", "flock"}, each {"excluded", "freed"}, or None for an unsupported kind.
    """
    fs = side.fs
    results: Figures = {}
    kinds: tuple[LockKind, ...] = ("fcntl", "flock")
    for kind, holder in itertools.product(kinds, RANKS):
        path, turn = side.folder_for(holder) / kind, f"{kind}.{holder}"
        if side.rank == holder:
            write_durably(fs, path, b"0")
        side.exchange(f"{turn}.made")
        side.wait_for_path(path)
        with open_file(fs, path, os.O_RDWR) as descriptor:
            if side.rank == holder:
                is_held = _try_lock(fs, descriptor, kind)
                side.exchange(f"{turn}.held", is_held)
                side.exchange(f"{turn}.tried")
                if is_held:
                    fs.unlock(descriptor, kind)
                side.exchange(f"{turn}.free")
                continue
            is_held = side.exchange(f"{turn}.held")
            while_held = _try_lock(fs, descriptor, kind)
            if while_held:
                fs.unlock(descriptor, kind)
            side.exchange(f"{turn}.tried")
            side.exchange(f"{turn}.free")
            after_release = _try_lock(fs, descriptor, kind)
        is_supported = None not in (is_held, while_held, after_release)
        results[kind] = {"excluded": not while_held, "freed": after_release} if is_supported else None
    return results


def _try_lock(fs: Filesystem, descriptor: int, kind: LockKind) -> bool | None:
    """Return whether the lock was acquired; None if the storage does not support this kind."""
    try:
        return fs.lock(descriptor, kind)
    except OSError as error:
        if error.errno in LOCKS_UNSUPPORTED_ERRNOS:
            return None
        raise


def check_read_after_delete(side: Participant) -> Figures:
    """Check whether this participant can still read an open file that its partner deleted.

    Returns:
        {"readable": whether the read succeeded}.
    """
    fs, is_readable = side.fs, True
    for maker in reversed(RANKS):
        path = side.folder_for(maker) / "deleted"
        if side.rank == maker:
            write_durably(fs, path, bytes(FSYNC_FILE_BYTES))
            side.exchange(f"made.{maker}")
            side.exchange(f"open.{maker}")
            fs.unlink(path)
            side.exchange(f"deleted.{maker}")
            continue
        side.exchange(f"made.{maker}")
        side.wait_for_path(path)
        with open_file(fs, path, os.O_RDONLY) as descriptor:
            try:
                fs.read_at(descriptor, bytearray(BLOCK_BYTES), 0)
                side.exchange(f"open.{maker}")
                side.exchange(f"deleted.{maker}")
                fs.drop_cache(descriptor)
                fs.read_at(descriptor, bytearray(BLOCK_BYTES), FSYNC_FILE_BYTES - BLOCK_BYTES)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                is_readable = False
    return {"readable": is_readable}
