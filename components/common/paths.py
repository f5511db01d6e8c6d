"""Paths of which only a beginning may exist, and files that need not lie twice."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path


def existing(path: Path) -> Path:
    """The path, or what is there of the way to it."""
    return next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows one and others may read the file already; else a copy.

    A link shares its permissions with the original, whose owner may have had reasons for them.
    """
    if source.stat().st_mode & stat.S_IROTH:
        try:
            target.hardlink_to(source)
        except OSError:
            pass  # another file system, or one without links: a copy serves as well
        else:
            return
    shutil.copyfile(source, target)
