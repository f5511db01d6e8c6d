"""File system functions, which also work on storage that several hosts mount over NFS."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

READ_ATTEMPTS = 5  # a writer that replaces a file without a pause can make several reads fail in a row
ResultT = TypeVar("ResultT")


def find_nearest_existing_path(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next((candidate for candidate in (path, *path.absolute().parents) if candidate.exists()), Path("/"))


def link_or_copy(source: Path, target: Path) -> None:
    """Create `target` as a hard link to `source`, or as a copy.

    A copy is created if hard links are not supported, or if `source` is not world-readable: a link would share the
    restricted permissions.
    """
    if source.stat().st_mode & stat.S_IROTH:
        try:
            link(source, target)
        except OSError:
            pass  # different file systems, or a file system without hard links
        else:
            return
    shutil.copyfile(source, target)


def read_bytes(path: Path) -> bytes:
    """Read a file that another host may replace at the same time.

    If the file is replaced while it is open, an NFS client without delegations fails with ESTALE: the server no longer
    has the file of this handle (RFC 1813, NFS3ERR_STALE). The path leads to the new file, so the read is repeated.

    Raises:
        OSError: the file cannot be read.
    """
    return retry_stale(path.read_bytes)


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Read a UTF-8 file as `read_bytes` does.

    Raises:
        OSError: the file cannot be read.
    """
    return retry_stale(lambda: path.read_text(encoding="utf-8", errors=errors))


def retry_stale(read: Callable[[], ResultT]) -> ResultT:
    """Call `read`, and call it again if another host has replaced or removed its file or folder; see `read_bytes`.

    Raises:
        OSError: the last call failed.
    """
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return read()


def revalidate(folder: Path) -> None:
    """Make the NFS client check whether a folder has changed.

    An NFS client with default options considers a name missing for up to a minute, unless it opens the folder.
    """
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY))


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder as rename(2) does, and accept a rename that the server has already done.

    An NFS client repeats a call whose answer was lost. A server that has restarted in between does not recognize the
    call, and reports that the source is missing (rename(2) and link(2), section BUGS).

    Raises:
        OSError: the source cannot be renamed.
    """
    before = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        if not _is_same_file(before, target):
            raise


def link(source: Path, target: Path) -> None:
    """Create a hard link as link(2) does, and accept a link that the server has already created; see `rename`.

    Raises:
        FileExistsError: `target` is another file.
        OSError: the link cannot be created.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if not _is_same_file(source.lstat(), target):
            raise


def remove_tree(folder: Path) -> None:
    """Remove a folder with its content if it exists, and accept removals that the server has already done; see `rename`.

    Raises:
        OSError: a file or folder cannot be removed.
    """

    def raise_unless_missing(_: object, path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=raise_unless_missing)
    else:
        shutil.rmtree(folder, onerror=lambda call, path, info: raise_unless_missing(call, path, info[1]))


def _is_same_file(status: os.stat_result, path: Path) -> bool:
    revalidate(path.parent)
    try:
        return os.path.samestat(status, path.lstat())
    except FileNotFoundError:
        return False
