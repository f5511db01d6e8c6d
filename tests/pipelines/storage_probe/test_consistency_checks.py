"""The delay of a change is measured from the change itself, regardless of the speed of the writer."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipelines.operations.storage_probe import consistency_checks
from pipelines.operations.storage_probe.participant import QUICK_PLAN, Participant
from pipelines.operations.storage_probe.probed_filesystem import Filesystem
from pipelines.operations.storage_probe.rendezvous import MessageChannel

VISIBILITY_DELAY_SECONDS, FSYNC_SECONDS = 0.8, 0.4


class SlowFsync(Filesystem):
    def fsync(self, descriptor: int) -> None:
        if "visibility" in os.readlink(f"/proc/self/fd/{descriptor}"):  # noqa: PTH115 - as the kernel names it
            time.sleep(FSYNC_SECONDS)
        super().fsync(descriptor)


class DelayedVisibility(Filesystem):
    """Shows new names, and the new time of a file, after a delay."""

    def __init__(self) -> None:
        self.first: dict[Path, os.stat_result] = {}

    def stat(self, path: Path) -> os.stat_result:
        result = super().stat(path)
        is_new = time.time() - result.st_mtime < VISIBILITY_DELAY_SECONDS
        if path.name == "new" and is_new:
            raise FileNotFoundError(path)
        previous = self.first.setdefault(path, result)
        return previous if path.name == "touched" and is_new else result

    def names(self, folder: Path) -> list[str]:
        return [
            name
            for name in super().names(folder)
            if name != "new" or time.time() - (folder / name).stat().st_mtime >= VISIBILITY_DELAY_SECONDS
        ]


def test_slow_writer_does_not_shorten_the_measured_delay(tmp_path: Path) -> None:
    (tmp_path / "talk").mkdir()
    (tmp_path / "visibility.0").mkdir()
    filesystems = enumerate((SlowFsync(), DelayedVisibility()))
    sides = [
        Participant(fs, tmp_path, MessageChannel(fs, tmp_path / "talk", rank), QUICK_PLAN, step="visibility")
        for rank, fs in filesystems
    ]
    with ThreadPoolExecutor(2) as pool:
        _, measured = pool.map(lambda side: consistency_checks._measure_visibility(side, 0), sides)
    for kind in ("by_name", "in_listing", "time_of_change"):
        assert VISIBILITY_DELAY_SECONDS - 0.05 < (measured[kind] or 0.0) < VISIBILITY_DELAY_SECONDS + 5.0, measured
