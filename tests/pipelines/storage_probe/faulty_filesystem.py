"""Simulated storage with caches and faults, for both processes of a probe.

python -m tests.pipelines.storage_probe.faulty_filesystem KIND PATH PAIR      the second process, on storage of this kind
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from components.common.runtime.reporters import SilentReporter
from pipelines.operations.storage_probe.participant import ProbePlan
from pipelines.operations.storage_probe.probe_session import ProbeRequest, join
from pipelines.operations.storage_probe.probed_filesystem import Filesystem, LockKind

DELAY = 4.0  # seconds, longer than the limit for prompt visibility
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def make_os_error(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class CachedNames(Filesystem):
    """Caches the names in a folder, as an NFS client does, until this process changes the folder."""

    def __init__(self) -> None:
        self.cache: dict[Path, tuple[float, set[str]]] = {}

    def list_cached_names(self, folder: Path) -> set[str]:
        until, names = self.cache.get(folder, (0.0, set()))
        if time.monotonic() > until:
            names = set(super().names(folder))
            self.cache[folder] = (time.monotonic() + DELAY, names)
        return names

    def check_exists(self, path: Path) -> None:
        if path.name not in self.list_cached_names(path.parent):
            raise make_os_error(errno.ENOENT, path)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            descriptor = super().open(path, flags)
            self.cache.pop(path.parent, None)
            return descriptor
        self.check_exists(path)
        return super().open(path, flags)

    def stat(self, path: Path) -> os.stat_result:
        self.check_exists(path)
        return super().stat(path)

    def names(self, folder: Path) -> list[str]:
        return sorted(self.list_cached_names(folder))

    def refresh(self, folder: Path) -> None:
        super().refresh(folder)
        self.cache.pop(folder, None)

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.cache.pop(target.parent, None)

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.cache.pop(path.parent, None)


class CachedAttributes(Filesystem):
    """Caches a file's attributes."""

    def __init__(self) -> None:
        self.cache: dict[Path, tuple[float, os.stat_result]] = {}

    def stat(self, path: Path) -> os.stat_result:
        until, result = self.cache.get(path, (0.0, None))
        if result is None or time.monotonic() > until:
            result = super().stat(path)
            self.cache[path] = (time.monotonic() + DELAY, result)
        return result


class TornRename(Filesystem):
    """Replaces by overwriting the target."""

    def replace(self, source: Path, target: Path) -> None:
        data = source.read_bytes()
        with target.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            time.sleep(0.002)
            file.write(data[len(data) // 2 :])


class GapRename(Filesystem):
    """Removes the target before the rename."""

    def replace(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        time.sleep(0.002)
        source.rename(target)


class LostFsync(Filesystem):
    """Reports a successful flush, and loses half of large writes."""

    def write(self, descriptor: int, data: bytes) -> None:
        super().write(descriptor, data[: len(data) // 2] if len(data) >= 1 << 20 else data)

    def fsync(self, descriptor: int) -> None:
        pass


class ReadOnly(Filesystem):
    """Becomes read-only during the probe."""

    is_read_only = False

    def check_writable(self, path: Path) -> None:
        self.is_read_only = self.is_read_only or path.name.startswith("rename.")
        if self.is_read_only:
            raise make_os_error(errno.EROFS, path)

    def open(self, path: Path, flags: int) -> int:
        if flags & WRITE_FLAGS:
            self.check_writable(path)
        return super().open(path, flags)

    def mkdir(self, path: Path) -> None:
        self.check_writable(path)
        super().mkdir(path)

    def refresh(self, folder: Path) -> None:
        self.check_writable(folder)
        super().refresh(folder)


class Quota(Filesystem):
    """Has space for small files only."""

    def write(self, descriptor: int, data: bytes) -> None:
        if len(data) > 3 << 20:
            raise make_os_error(errno.EDQUOT)
        super().write(descriptor, data)


class PartnerQuota(Quota):
    """Has space for small files only in the second process."""

    def write(self, descriptor: int, data: bytes) -> None:
        call = Quota.write if __name__ == "__main__" else Filesystem.write
        call(self, descriptor, data)


class NoInodes(Filesystem):
    """Has space, but no inodes for the large files."""

    def open(self, path: Path, flags: int) -> int:
        if path.name.startswith("large.") and flags & os.O_CREAT:
            raise make_os_error(errno.ENOSPC, path)
        return super().open(path, flags)

    def space(self, folder: Path) -> os.statvfs_result:
        fields = list(super().space(folder))
        fields[5:8] = [1000, 0, 0]  # f_files, f_ffree, f_favail
        return os.statvfs_result(fields)


class LocalLocks(Filesystem):
    """Grants every lock to both processes, as local locks do on two hosts."""

    def lock(self, descriptor: int, kind: LockKind) -> bool:
        return True

    def unlock(self, descriptor: int, kind: LockKind) -> None:
        pass


class NoLocks(Filesystem):
    """Has no lock service."""

    def lock(self, descriptor: int, kind: LockKind) -> bool:
        raise make_os_error(errno.ENOLCK)


class ChangedStat(Filesystem):
    """Reports other modification times, or another owner."""

    seconds, owner = 0.0, -1

    def stat(self, path: Path) -> os.stat_result:
        return self.change_stat(super().stat(path))

    def fstat(self, descriptor: int) -> os.stat_result:
        return self.change_stat(super().fstat(descriptor))

    def change_stat(self, result: os.stat_result) -> os.stat_result:
        fields = {name: getattr(result, name) for name in ("st_mode", "st_gid", "st_mtime_ns")}
        owner = result.st_uid if self.owner < 0 else self.owner
        return SimpleNamespace(**fields, st_uid=owner, st_mtime=result.st_mtime + self.seconds)  # type: ignore[return-value]


class WrongServerClock(ChangedStat):
    seconds = 90.0


class SquashedOwner(ChangedStat):
    owner = 65534


class WrongHostClock(Filesystem):
    """Shifts the clock of the second process by five seconds."""

    def now(self) -> float:
        return super().now() + (5 if __name__ == "__main__" else 0)


class NonExclusiveCreation(Filesystem):
    """Grants every exclusive creation."""

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags & ~os.O_EXCL)

    def mkdir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def link(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        super().link(source, target)


class CaseInsensitive(Filesystem):
    """Ignores case in names."""

    def stat(self, path: Path) -> os.stat_result:
        result = next((p for p in path.parent.iterdir() if p.name.lower() == path.name.lower()), path)
        return super().stat(result)


class StaleHandle(Filesystem):
    """Loses an open file that was deleted, as an NFS server does."""

    def read_at(self, descriptor: int, buffer: bytearray, offset: int) -> int:
        if not os.fstat(descriptor).st_nlink:
            raise make_os_error(errno.ESTALE)
        return super().read_at(descriptor, buffer, offset)


class ExitingPartner(Filesystem):
    """Not a fault of storage: the second process ends during the probe."""

    def mkdir(self, path: Path) -> None:
        if __name__ == "__main__" and path.name.startswith("rename."):
            sys.exit("killed for memory")
        super().mkdir(path)


KINDS = {kind.__name__: kind for kind in (
    Filesystem, CachedNames, CachedAttributes, TornRename, GapRename, LostFsync, ReadOnly, Quota, PartnerQuota, NoInodes, LocalLocks,
    NoLocks, WrongServerClock, SquashedOwner, WrongHostClock, NonExclusiveCreation, CaseInsensitive, StaleHandle, ExitingPartner,
)}  # fmt: skip


def build_request(path: Path, pair: str, rank: int, plan: ProbePlan | None = None, wait: float = 60.0) -> ProbeRequest:
    """Describe one side of a small probe."""
    return ProbeRequest(
        path,
        pair,
        rank,
        plan or ProbePlan(visibility_timeout=8.0, seconds=0.2, size=4 << 20, rounds=20, fio=False),
        wait,
    )


if __name__ == "__main__":
    join(build_request(Path(sys.argv[2]), sys.argv[3], 1), SilentReporter(), KINDS[sys.argv[1]]())
