"""File system functions: nearest existing path, and hard links with a fallback to copies."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path


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
            target.hardlink_to(source)
        except OSError:
            pass  # different file systems, or a file system without hard links
        else:
            return
    shutil.copyfile(source, target)
