"""Folders of one process each: nobody else uses them, and what a killed process left is swept by the next."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common import jobs, models

DEAD = 4194303  # above the largest pid that Linux gives


def leave(parent: Path, prefix: str, pid: int | str, host: str = "") -> Path:
    """A folder as a process leaves it that is killed."""
    folder = parent / f"{prefix}.{host or socket.gethostname()}.{pid}.0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "half").write_text("written")
    return folder


def test_a_folder_is_one_s_own_while_it_is_used_and_gone_afterwards(tmp_path: Path) -> None:
    with jobs.private_folder(tmp_path / "new", "work", mode=0o700) as one, jobs.private_folder(tmp_path / "new", "work") as other:
        assert one != other
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        (one / "file").write_text("x")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_goes_with_an_error_too_and_one_that_was_renamed_stays(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), jobs.private_folder(tmp_path, "work"):
        raise ZeroDivisionError
    with jobs.private_folder(tmp_path, "work") as folder:
        folder.rename(tmp_path / "done")
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_folders_of_dead_processes_are_swept_and_those_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{zombie.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    for gone in (DEAD, zombie.pid):
        leave(tmp_path, "work", gone)
    old = leave(tmp_path, "work", DEAD, host="other.machine")
    os.utime(old, (0, 0))
    kept = {
        leave(tmp_path, "work", os.getppid()),
        leave(tmp_path, "work", os.getpid()),
        leave(tmp_path, "work", DEAD, host="another.machine"),
        leave(tmp_path, "mine", DEAD),
    }
    jobs.sweep(tmp_path, "work")
    zombie.wait()
    assert set(tmp_path.iterdir()) == kept


@pytest.mark.model
def test_what_a_killed_conversion_left_in_the_cache_is_swept_by_the_next(tmp_path: Path) -> None:
    leave(tmp_path, ".converting", DEAD)
    with pytest.raises(Exception, match="none"):
        models._convert(tmp_path / "none.gguf", tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []
