"""Storage that is lazy or lies on purpose, in both processes of a probe.

python -m tests.pipelines.storage.lying KIND PATH PAIR      the second process, on storage of this kind
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from components.common.progress import Silent
from pipelines.storage.filesystem import Filesystem, LockKind
from pipelines.storage.probe import Asked, join
from pipelines.storage.side import Plan

DELAY = 4.0  # seconds, more than what is taken for prompt
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def refuse(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class LazyNames(Filesystem):
    """Keeps what a folder held for a while, as an NFS client does, and asks again when this process changed the folder."""

    def __init__(self) -> None:
        self.kept: dict[Path, tuple[float, set[str]]] = {}

    def snapshot(self, folder: Path) -> set[str]:
        until, names = self.kept.get(folder, (0.0, set()))
        if time.monotonic() > until:
            names = set(super().names(folder))
            self.kept[folder] = (time.monotonic() + DELAY, names)
        return names

    def look(self, path: Path) -> None:
        if path.name not in self.snapshot(path.parent):
            raise refuse(errno.ENOENT, path)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            found = super().open(path, flags)
            self.kept.pop(path.parent, None)
            return found
        self.look(path)
        return super().open(path, flags)

    def stat(self, path: Path) -> os.stat_result:
        self.look(path)
        return super().stat(path)

    def names(self, folder: Path) -> list[str]:
        return sorted(self.snapshot(folder))

    def refresh(self, folder: Path) -> None:
        super().refresh(folder)
        self.kept.pop(folder, None)

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.kept.pop(target.parent, None)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.kept.pop(path.parent, None)


class LazyTimes(Filesystem):
    """Keeps a file's attributes for a while, whatever others do."""

    def __init__(self) -> None:
        self.kept: dict[Path, tuple[float, os.stat_result]] = {}

    def stat(self, path: Path) -> os.stat_result:
        until, found = self.kept.get(path, (0.0, None))
        if found is None or time.monotonic() > until:
            found = super().stat(path)
            self.kept[path] = (time.monotonic() + DELAY, found)
        return found


class TornRename(Filesystem):
    """Copies over what is there."""

    def replace(self, source: Path, target: Path) -> None:
        data = source.read_bytes()
        with target.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            time.sleep(0.002)
            file.write(data[len(data) // 2 :])


class GapRename(Filesystem):
    """Removes what is there first."""

    def replace(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        time.sleep(0.002)
        source.rename(target)


class LostFsync(Filesystem):
    """Says that all was forced out, and keeps half of what is large to itself."""

    def write(self, descriptor: int, data: bytes) -> None:
        super().write(descriptor, data[: len(data) // 2] if len(data) >= 1 << 20 else data)

    def fsync(self, descriptor: int) -> None:
        pass


class ReadOnly(Filesystem):
    """Is remounted read-only in the middle of the probe."""

    gone = False

    def writes(self, path: Path) -> None:
        self.gone = self.gone or path.name.startswith("rename.")
        if self.gone:
            raise refuse(errno.EROFS, path)

    def open(self, path: Path, flags: int) -> int:
        if flags & WRITING:
            self.writes(path)
        return super().open(path, flags)

    def mkdir(self, path: Path) -> None:
        self.writes(path)
        super().mkdir(path)

    def refresh(self, folder: Path) -> None:
        self.writes(folder)
        super().refresh(folder)


class Quota(Filesystem):
    """Has room for small files, and for no large one."""

    def write(self, descriptor: int, data: bytes) -> None:
        if len(data) > 3 << 20:
            raise refuse(errno.EDQUOT)
        super().write(descriptor, data)


class QuotaElsewhere(Quota):
    """The same for the second process alone."""

    def write(self, descriptor: int, data: bytes) -> None:
        call = Quota.write if __name__ == "__main__" else Filesystem.write
        call(self, descriptor, data)


class NoInodes(Filesystem):
    """Has room, and no inode for the large files."""

    def open(self, path: Path, flags: int) -> int:
        if path.name.startswith("large.") and flags & os.O_CREAT:
            raise refuse(errno.ENOSPC, path)
        return super().open(path, flags)

    def space(self, folder: Path) -> os.statvfs_result:
        found = list(super().space(folder))
        found[5:8] = [1000, 0, 0]  # f_files, f_ffree, f_favail
        return os.statvfs_result(found)


class SharedLocks(Filesystem):
    """Gives every lock to everybody, as local locks do on two hosts."""

    def lock(self, descriptor: int, kind: LockKind) -> bool:
        return True

    def unlock(self, descriptor: int, kind: LockKind) -> None:
        pass


class NoLocks(Filesystem):
    """Has no lock service."""

    def lock(self, descriptor: int, kind: LockKind) -> bool:
        raise refuse(errno.ENOLCK)


class Shifted(Filesystem):
    """Tells other times of change, or another owner."""

    seconds, owner = 0.0, -1

    def stat(self, path: Path) -> os.stat_result:
        return self.shifted(super().stat(path))

    def status(self, descriptor: int) -> os.stat_result:
        return self.shifted(super().status(descriptor))

    def shifted(self, found: os.stat_result) -> os.stat_result:
        shifted = {name: getattr(found, name) for name in ("st_mode", "st_gid", "st_mtime_ns")}
        owner = found.st_uid if self.owner < 0 else self.owner
        return SimpleNamespace(**shifted, st_uid=owner, st_mtime=found.st_mtime + self.seconds)  # type: ignore[return-value]


class WrongServerClock(Shifted):
    seconds = 90.0


class Squashed(Shifted):
    owner = 65534


class WrongHostClock(Filesystem):
    """One host's clock is five seconds off: that of the second process."""

    def now(self) -> float:
        return super().now() + (5 if __name__ == "__main__" else 0)


class Careless(Filesystem):
    """Gives a name to whoever asks."""

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags & ~os.O_EXCL)

    def mkdir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def link(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        super().link(source, target)


class OneCase(Filesystem):
    """Knows no upper case."""

    def stat(self, path: Path) -> os.stat_result:
        found = next((p for p in path.parent.iterdir() if p.name.lower() == path.name.lower()), path)
        return super().stat(found)


class Stale(Filesystem):
    """Forgets an open file that was deleted, as an NFS server does."""

    def read_at(self, descriptor: int, buffer: bytearray, offset: int) -> int:
        if not os.fstat(descriptor).st_nlink:
            raise refuse(errno.ESTALE)
        return super().read_at(descriptor, buffer, offset)


class Deserter(Filesystem):
    """Not a lie: the second process is gone in the middle."""

    def mkdir(self, path: Path) -> None:
        if __name__ == "__main__" and path.name.startswith("rename."):
            sys.exit("killed for memory")
        super().mkdir(path)


KINDS = {kind.__name__: kind for kind in (
    Filesystem, LazyNames, LazyTimes, TornRename, GapRename, LostFsync, ReadOnly, Quota, QuotaElsewhere, NoInodes, SharedLocks,
    NoLocks, WrongServerClock, Squashed, WrongHostClock, Careless, OneCase, Stale, Deserter,
)}  # fmt: skip


def asked(path: Path, pair: str, rank: int, plan: Plan | None = None, wait: float = 60.0) -> Asked:
    """A side of a small probe."""
    return Asked(path, pair, rank, plan or Plan(patience=8.0, seconds=0.2, size=4 << 20, rounds=20, fio=False), wait)


if __name__ == "__main__":
    join(asked(Path(sys.argv[2]), sys.argv[3], 1), Silent(), KINDS[sys.argv[1]]())
