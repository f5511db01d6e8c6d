"""File system calls of the probe. Tests substitute a file system with delayed visibility or faults."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

LockKind = Literal["fcntl", "flock"]


class Filesystem:
    """System calls of this host. All methods raise OSError if the system call fails."""

    def now(self) -> float:
        """Return this host's clock, in seconds since the epoch."""
        return time.time()

    def open(self, path: Path, flags: int) -> int:
        """Open a file and return its descriptor; new files get mode 0o666 less the umask."""
        return os.open(path, flags, 0o666)

    def close(self, descriptor: int) -> None:
        """Close a descriptor. On NFS this flushes the writes and reports their errors."""
        os.close(descriptor)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of the data at the descriptor's position."""
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None:
        """Write the data at an offset in bytes."""
        os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int) -> bytes:
        """Read from the descriptor's position to the end of the file."""
        parts = []
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
        return b"".join(parts)

    def read_at(self, descriptor: int, buffer: bytearray, offset: int) -> int:
        """Fill a buffer from an offset in bytes and return the number of bytes read."""
        return os.preadv(descriptor, [buffer], offset)

    def fsync(self, descriptor: int) -> None:
        """Flush the file's writes to stable storage."""
        os.fsync(descriptor)

    def drop_cache(self, descriptor: int) -> None:
        """Advise the kernel to drop the file's clean pages, so that the next read reaches the storage."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def stat(self, path: Path) -> os.stat_result:
        """Return the status of a path."""
        return path.stat()

    def fstat(self, descriptor: int) -> os.stat_result:
        """Return the status of an open file.

        Opening a file revalidates its attributes with the NFS server; `stat` may return cached attributes.
        """
        return os.fstat(descriptor)

    def names(self, folder: Path) -> list[str]:
        """List the names in a folder."""
        return os.listdir(folder)  # noqa: PTH208 - names as the storage returns them

    def refresh(self, folder: Path) -> None:
        """Set the folder's modification time to now, by the server's clock. List the folder to see new names."""
        os.utime(folder)

    def touch(self, path: Path) -> None:
        """Set the modification time to now, by the server's clock."""
        os.utime(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over an existing target (rename(2))."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link; raises FileExistsError if the target exists."""
        target.hardlink_to(source)

    def mkdir(self, path: Path) -> None:
        """Create a folder; raises FileExistsError if it exists."""
        path.mkdir()

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def chmod(self, path: Path, mode: int) -> None:
        """Set a file's permissions."""
        path.chmod(mode)

    def space(self, folder: Path) -> os.statvfs_result:
        """Return the space and inodes that the storage reports."""
        return os.statvfs(folder)

    def lock(self, descriptor: int, kind: LockKind) -> bool:
        """Try to lock the whole file exclusively, without waiting; return whether it succeeded."""
        call = fcntl.lockf if kind == "fcntl" else fcntl.flock
        try:
            call(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX permits both for fcntl
            return False
        return True

    def unlock(self, descriptor: int, kind: LockKind) -> None:
        """Release the lock."""
        (fcntl.lockf if kind == "fcntl" else fcntl.flock)(descriptor, fcntl.LOCK_UN)


@contextmanager
def open_file(fs: Filesystem, path: Path, flags: int) -> Iterator[int]:
    """Open a file for the duration of the context. An error on closing is suppressed if the context raised."""
    descriptor = fs.open(path, flags)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            fs.close(descriptor)
        raise
    fs.close(descriptor)


def write_durably(fs: Filesystem, path: Path, data: bytes) -> None:
    """Write a file, flush it to stable storage and close it."""
    with open_file(fs, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        fs.write(descriptor, data)
        fs.fsync(descriptor)


def read_file(fs: Filesystem, path: Path, *, drop_cache: bool = False) -> bytes:
    """Read a whole file. `drop_cache`: advise the kernel to drop its cached pages first."""
    with open_file(fs, path, os.O_RDONLY) as descriptor:
        if drop_cache:
            fs.drop_cache(descriptor)
        return fs.read(descriptor)
