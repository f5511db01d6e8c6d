"""How late something is seen is told from its own making on, however slow the side is that makes it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipelines.storage import promises
from pipelines.storage.filesystem import Filesystem
from pipelines.storage.meeting import Talk
from pipelines.storage.side import QUICK, Side

LATE, SLOW = 0.8, 0.4  # seconds until a change is seen; of each fsync


class SlowFsync(Filesystem):
    def fsync(self, descriptor: int) -> None:
        if "visibility" in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115 - as the kernel names it
            time.sleep(SLOW)
        super().fsync(descriptor)


class Late(Filesystem):
    """Shows new names, and the new time of a file, after a while."""

    def __init__(self) -> None:
        self.first: dict[Path, os.stat_result] = {}

    def stat(self, path: Path) -> os.stat_result:
        found = super().stat(path)
        is_new = time.time() - found.st_mtime < LATE
        if path.name == "new" and is_new:
            raise FileNotFoundError(path)
        before = self.first.setdefault(path, found)
        return before if path.name == "touched" and is_new else found

    def names(self, folder: Path) -> list[str]:
        return [name for name in super().names(folder) if name != "new" or time.time() - (folder / name).stat().st_mtime >= LATE]


def test_a_slow_side_does_not_make_what_it_makes_look_sooner_seen(tmp_path: Path) -> None:
    (tmp_path / "talk").mkdir()
    (tmp_path / "visibility.0").mkdir()
    both = enumerate((SlowFsync(), Late()))
    sides = [Side(fs, tmp_path, Talk(fs, tmp_path / "talk", rank), QUICK, step="visibility") for rank, fs in both]
    with ThreadPoolExecutor(2) as pool:
        _, seen = pool.map(lambda side: promises._seen(side, 0), sides)
    for kind in ("by_name", "in_listing", "time_of_change"):
        assert LATE - 0.05 < (seen[kind] or 0.0) < LATE + 5.0, seen
