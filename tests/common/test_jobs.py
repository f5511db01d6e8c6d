"""Folders of one process each: nobody else uses them, and what a killed process left is swept by the next."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.common import jobs, liveness, models
from components.common.hashing import ROOT

DEAD = "4194303-1"  # above the largest pid that Linux gives


def leave(parent: Path, prefix: str, process: str, where: str = "") -> Path:
    """A folder as a process leaves it that is killed."""
    folder = parent / f"{prefix}.{where or liveness.where()}.{process}.0a1b2c3d"
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


def ago(seconds: float, path: Path) -> Path:
    """The same, with its last sign of life then."""
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_folders_of_dead_processes_are_swept_and_those_of_the_living_stay_however_old(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{zombie.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    for gone in (DEAD, liveness.name(zombie.pid), f"{os.getpid()}-1", f"{os.getppid()}-1"):  # the last two numbers are used again
        leave(tmp_path, "work", gone)
    kept = {
        ago(10**6, leave(tmp_path, "work", liveness.name(os.getppid()))),
        ago(10**6, leave(tmp_path, "work", liveness.name())),
        leave(tmp_path, "mine", DEAD),
    }
    jobs.sweep(tmp_path, "work")
    zombie.wait()
    assert set(tmp_path.iterdir()) == kept


def test_folders_of_other_machines_and_containers_are_swept_when_they_give_no_sign_of_life(tmp_path: Path) -> None:
    host = liveness.where().rpartition("-")[0]
    for where in ("other.machine-0a1b2c3d", f"{host}-0a1b2c3d"):
        ago(jobs.SILENT + 60, leave(tmp_path, "work", liveness.name(), where))
    kept = {ago(jobs.SILENT - 60, leave(tmp_path, "work", DEAD, where)) for where in ("another-0a1b2c3d", f"{host}-3d2c1b0a")}
    jobs.sweep(tmp_path, "work")
    assert set(tmp_path.iterdir()) == kept


def test_a_folder_gives_signs_of_life_while_it_is_used_whatever_is_written_below_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(liveness, "BEAT", 0.02)
    with jobs.private_folder(tmp_path, "work") as folder:
        ago(10**6, folder)
        began = time.monotonic()
        while liveness.silence(folder) > 5:
            assert time.monotonic() - began < 30
            time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_hidden_is_alive_as_long_as_it_has_its_number(monkeypatch) -> None:
    def hidden(path: Path, **_: object) -> str:
        raise PermissionError(path)

    named = liveness.name(os.getppid())
    monkeypatch.setattr(Path, "read_text", hidden)
    assert not liveness.is_gone(named)
    assert liveness.is_gone(DEAD)


def test_silence_is_told_where_nothing_may_be_written(tmp_path: Path, monkeypatch) -> None:
    real = os.utime

    def refused(path: Path, *times: object) -> None:
        if not times:
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, *times)

    monkeypatch.setattr(os, "utime", refused)
    (tmp_path / "lock").touch()
    assert 90 < liveness.silence(ago(100, tmp_path / "lock")) < 110
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_process_in_another_container_with_the_same_number_does_not_count_as_this_one(tmp_path: Path) -> None:
    program = "from components.common import liveness; print(liveness.where(), liveness.name())"
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    told = subprocess.run(apart, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if told.returncode:
        pytest.skip(f"no namespaces here: {told.stderr.strip()}")
    where, process = told.stdout.split()
    assert process.startswith("1-")
    assert where != liveness.where()
    assert where.rpartition("-")[0] == liveness.where().rpartition("-")[0]


@pytest.mark.model
def test_what_a_killed_conversion_left_in_the_cache_is_swept_by_the_next(tmp_path: Path) -> None:
    leave(tmp_path, ".converting", DEAD)
    with pytest.raises(Exception, match="none"):
        models._convert(tmp_path / "none.gguf", tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []
