"""Private folders of a process and the removal of folders that killed processes left behind."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from components.common.artifacts.code_digest import ROOT
from components.common.models import model_loading
from components.common.workspace import job_folders, liveness

DEAD_PROCESS = "4194303-1"  # above the largest pid that Linux gives


def create_abandoned_folder(parent: Path, prefix: str, process: str, host: str = "") -> Path:
    """Create a folder as a killed process leaves it."""
    folder = parent / f"{prefix}.{host or liveness.identify_host()}.{process}.0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "half").write_text("written")
    return folder


def test_private_folders_are_distinct_and_removed_at_exit(tmp_path: Path) -> None:
    with (
        job_folders.private_folder(tmp_path / "new", "work", mode=0o700) as first,
        job_folders.private_folder(tmp_path / "new", "work") as second,
    ):
        assert first != second
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        (first / "file").write_text("x")
    assert list((tmp_path / "new").iterdir()) == []


def test_private_folder_is_removed_on_error_and_kept_if_renamed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), job_folders.private_folder(tmp_path, "work"):
        raise ZeroDivisionError
    with job_folders.private_folder(tmp_path, "work") as folder:
        folder.rename(tmp_path / "done")
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_private_folder_is_removed_while_another_process_writes_into_it(tmp_path: Path) -> None:
    """Removed file by file, the folder would keep what the writer adds between two removals."""

    def write_files(folder: Path, started: threading.Event) -> None:
        with suppress(FileNotFoundError):
            for number in itertools.count():
                (folder / f"{number}.txt").touch()
                started.set()

    for _ in range(5):
        started = threading.Event()
        with job_folders.private_folder(tmp_path, "job") as folder:
            (folder / "result").mkdir()
            writer = threading.Thread(target=write_files, args=(folder / "result", started))
            writer.start()
            started.wait()
        writer.join()
        assert list(tmp_path.iterdir()) == []


def set_heartbeat_age(seconds: float, path: Path) -> Path:
    """Set the last heartbeat to `seconds` ago and return the path."""
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_only_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{zombie.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    for process in (
        DEAD_PROCESS,
        liveness.identify_process(zombie.pid),
        f"{os.getpid()}-1",
        f"{os.getppid()}-1",
    ):  # the last two have reused pids
        create_abandoned_folder(tmp_path, "work", process)
    kept_folders = {
        set_heartbeat_age(10**6, create_abandoned_folder(tmp_path, "work", liveness.identify_process(os.getppid()))),
        set_heartbeat_age(10**6, create_abandoned_folder(tmp_path, "work", liveness.identify_process())),
        create_abandoned_folder(tmp_path, "mine", DEAD_PROCESS),
    }
    job_folders.remove_abandoned_folders(tmp_path, "work")
    zombie.wait()
    assert set(tmp_path.iterdir()) == kept_folders


def test_stale_folders_of_other_hosts_are_removed(tmp_path: Path) -> None:
    machine = liveness.identify_host().rpartition("-")[0]
    for host in ("other.machine-0a1b2c3d", f"{machine}-0a1b2c3d"):
        set_heartbeat_age(
            job_folders.STALE_AFTER_SECONDS + 60,
            create_abandoned_folder(tmp_path, "work", liveness.identify_process(), host),
        )
    kept_folders = {
        set_heartbeat_age(
            job_folders.STALE_AFTER_SECONDS - 60, create_abandoned_folder(tmp_path, "work", DEAD_PROCESS, host)
        )
        for host in ("another-0a1b2c3d", f"{machine}-3d2c1b0a")
    }
    job_folders.remove_abandoned_folders(tmp_path, "work")
    assert set(tmp_path.iterdir()) == kept_folders


def test_private_folder_has_heartbeat(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
    with job_folders.private_folder(tmp_path, "work") as folder:
        set_heartbeat_age(10**6, folder)
        began = time.monotonic()
        while liveness.seconds_since_heartbeat(folder) > 5:
            assert time.monotonic() - began < 30
            time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_hidden_process_counts_as_alive(monkeypatch) -> None:
    def raise_permission_error(path: Path, **_: object) -> str:
        raise PermissionError(path)

    process = liveness.identify_process(os.getppid())
    monkeypatch.setattr(Path, "read_text", raise_permission_error)
    assert not liveness.is_process_gone(process)
    assert liveness.is_process_gone(DEAD_PROCESS)


def test_heartbeat_age_is_read_on_read_only_file_system(tmp_path: Path, monkeypatch) -> None:
    original_utime = os.utime

    def refuse_current_time(path: Path, *times: object) -> None:
        if not times:
            raise OSError(errno.EROFS, "Read-only file system")
        original_utime(path, *times)

    monkeypatch.setattr(os, "utime", refuse_current_time)
    (tmp_path / "lock").touch()
    assert 90 < liveness.seconds_since_heartbeat(set_heartbeat_age(100, tmp_path / "lock")) < 110
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_equal_pid_in_other_container_is_another_process(tmp_path: Path) -> None:
    program = (
        "from components.common.workspace import liveness; print(liveness.identify_host(), liveness.identify_process())"
    )
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if result.returncode:
        pytest.skip(f"no namespaces here: {result.stderr.strip()}")
    host, process = result.stdout.split()
    assert process.startswith("1-")
    assert host != liveness.identify_host()
    assert host.rpartition("-")[0] == liveness.identify_host().rpartition("-")[0]


@pytest.mark.model
def test_next_conversion_removes_folder_of_killed_one(tmp_path: Path) -> None:
    create_abandoned_folder(tmp_path, ".converting", DEAD_PROCESS)
    with pytest.raises(Exception, match="none"):
        model_loading._convert(tmp_path / "none.gguf", tmp_path / "converted")
    assert list(tmp_path.iterdir()) == []
