"""The one way by which the probe touches the storage, so that tests can put one in its place that is lazy or lies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Literal

LockKind = Literal["fcntl", "flock"]


class Filesystem:
    """The system's own calls; all raise OSError as the system does."""

    def now(self) -> float:
        """This host's clock, in seconds since the epoch."""
        return time.time()

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; new files get mode 0o666 less the umask."""
        return os.open(path, flags, 0o666)

    def close(self, descriptor: int) -> None:
        """On NFS this sends what was written to the server, and tells what went wrong with it."""
        os.close(descriptor)

    def write(self, descriptor: int, data: bytes) -> None:
        """All of the data, at the descriptor's position."""
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None:
        """All of the data at an offset in bytes."""
        os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int) -> bytes:
        """From the descriptor's position to the end of the file."""
        parts = []
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
        return b"".join(parts)

    def read_at(self, descriptor: int, buffer: bytearray, offset: int) -> int:
        """Fill a buffer from an offset in bytes; returns how many bytes came."""
        return os.preadv(descriptor, [buffer], offset)

    def fsync(self, descriptor: int) -> None:
        """Returns when what was written is on stable storage, or should be."""
        os.fsync(descriptor)

    def forget(self, descriptor: int) -> None:
        """Ask the kernel to drop the file's clean pages, so that the next read asks the storage. A wish, not a command."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def stat(self, path: Path) -> os.stat_result:
        """What the name leads to; FileNotFoundError where there is none."""
        return path.stat()

    def status(self, descriptor: int) -> os.stat_result:
        """Of an open file. Opening asks an NFS server, where a look by the name may be answered from what was seen a while ago."""
        return os.fstat(descriptor)

    def names(self, folder: Path) -> list[str]:
        """The folder's listing."""
        return os.listdir(folder)  # noqa: PTH208 - names, not paths: as the storage gives them

    def refresh(self, folder: Path) -> None:
        """Have the host forget what it keeps of the folder's names: a change of it makes an NFS client ask the server again."""
        os.utime(folder)

    def touch(self, path: Path) -> None:
        """Set the time of change to now, by the server's clock."""
        os.utime(path)

    def replace(self, source: Path, target: Path) -> None:
        """rename(2) over what is there."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """A hard link; FileExistsError where the name is taken."""
        target.hardlink_to(source)

    def mkdir(self, path: Path) -> None:
        """A new folder; FileExistsError where the name is taken."""
        path.mkdir()

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def chmod(self, path: Path, mode: int) -> None:
        """Set a file's permissions."""
        path.chmod(mode)

    def space(self, folder: Path) -> os.statvfs_result:
        """Space and inodes, as the storage tells them."""
        return os.statvfs(folder)

    def lock(self, descriptor: int, kind: LockKind) -> bool:
        """Try to lock the whole file for this process alone, without waiting; whether it was got."""
        call = fcntl.lockf if kind == "fcntl" else fcntl.flock
        try:
            call(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX lets fcntl answer either
            return False
        return True

    def unlock(self, descriptor: int, kind: LockKind) -> None:
        """Let go of it."""
        (fcntl.lockf if kind == "fcntl" else fcntl.flock)(descriptor, fcntl.LOCK_UN)


def keep(fs: Filesystem, path: Path, data: bytes) -> None:
    """A file written, forced out and closed."""
    descriptor = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        fs.write(descriptor, data)
        fs.fsync(descriptor)
    finally:
        fs.close(descriptor)


def content(fs: Filesystem, path: Path, *, afresh: bool = False) -> bytes:
    """What a file holds; `afresh`: of what this host keeps in memory of it, as little as may be."""
    descriptor = fs.open(path, os.O_RDONLY)
    try:
        if afresh:
            fs.forget(descriptor)
        return fs.read(descriptor)
    finally:
        fs.close(descriptor)
