"""The delay of a change is measured from the change itself, regardless of the speed of the writer."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from pipelines.operations.storage_probe import consistency_checks
from pipelines.operations.storage_probe.participant import QUICK_PLAN, Figures, Participant, ProbePlan
from pipelines.operations.storage_probe.probed_filesystem import Filesystem
from pipelines.operations.storage_probe.rendezvous import MessageChannel

VISIBILITY_DELAY_SECONDS, FSYNC_SECONDS, VISIBILITY_TIMEOUT_SECONDS = 0.8, 0.4, 0.3


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


class LateWriter(Filesystem):
    """Creates its files later than the partner waits for a change."""

    def open(self, path: Path, flags: int) -> int:
        if path.name == "new":
            time.sleep(2 * VISIBILITY_TIMEOUT_SECONDS)
        return super().open(path, flags)


def measure_visibility(folder: Path, plan: ProbePlan, *filesystems: Filesystem) -> Figures:
    """Return what the second side measures of the changes of the first."""
    (folder / "talk").mkdir()
    (folder / "visibility.0").mkdir()
    sides = [
        Participant(fs, folder, MessageChannel(fs, folder / "talk", rank), plan, step="visibility")
        for rank, fs in enumerate(filesystems)
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda side: consistency_checks._measure_visibility(side, 0), sides))[1]


def test_change_that_the_partner_makes_late_is_measured_from_the_change(tmp_path: Path) -> None:
    plan = replace(QUICK_PLAN, visibility_timeout=VISIBILITY_TIMEOUT_SECONDS)
    measured = measure_visibility(tmp_path, plan, LateWriter(), Filesystem())
    assert None not in measured.values(), measured


def test_slow_writer_does_not_shorten_the_measured_delay(tmp_path: Path) -> None:
    measured = measure_visibility(tmp_path, QUICK_PLAN, SlowFsync(), DelayedVisibility())
    for kind in ("by_name", "in_listing", "time_of_change"):
        assert VISIBILITY_DELAY_SECONDS - 0.05 < (measured[kind] or 0.0) < VISIBILITY_DELAY_SECONDS + 5.0, measured
