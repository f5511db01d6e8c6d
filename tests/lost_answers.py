"""An NFS server whose answers are lost: it has done a call, and the client repeats it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The position of the path that a call creates or removes, and the error of the repeated call.
CALLS = {
    "mkdir": (0, errno.EEXIST),
    "link": (1, errno.EEXIST),
    "symlink": (1, errno.EEXIST),
    "rename": (1, errno.ENOENT),
    "replace": (1, errno.ENOENT),
    "unlink": (0, errno.ENOENT),
    "rmdir": (0, errno.ENOENT),
}


@contextmanager
def lose_answers(folder: Path, calls: Iterable[str] = CALLS) -> Iterator[set[str]]:
    """Make the calls below `folder` report what the repeated call finds; yield the names of these calls."""
    lost: set[str] = set()

    def patch_call(name: str, position: int, error: int) -> None:
        call = getattr(os, name)

        def repeat(*arguments: object, **options: object) -> None:
            parent = options.get("dir_fd")  # of shutil.rmtree
            path = Path("" if parent is None else Path(f"/proc/self/fd/{parent}").readlink(), str(arguments[position]))
            call(*arguments, **options)
            if path.is_relative_to(folder):
                lost.add(name)
                raise OSError(error, os.strerror(error), str(path))

        patch.setattr(os, name, repeat)

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch_call(name, *CALLS[name])
        yield lost
