"""Folder locks: mutual exclusion, takeover of stale locks and the error that names the holder.

The test marked `long` runs eight contending processes for up to two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from components.common.artifacts.code_digest import ROOT
from components.common.runtime import process_control
from components.common.runtime.errors import BusyError
from components.common.workspace import job_folders, liveness

CONTENDER = Path(__file__).with_name("lock_contender.py")
DEAD_PROCESS = "4194303-1"  # above the largest pid that Linux gives
OTHER_HOST = "other.machine-0a1b2c3d"
HOLDER_PROGRAM = """
import sys, time
from pathlib import Path
from components.common.workspace import job_folders
with job_folders.folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


@contextmanager
def lock_in_child(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock of the folder in a child process."""
    environment = process_control.build_python_environment(PYTHONPATH=str(ROOT))
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER_PROGRAM, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.wait()


def list_entries(folder: Path) -> list[str]:
    """List a folder, including the lock and hidden files of its holder."""
    return sorted(path.name for path in folder.iterdir())


def list_visible_entries(folder: Path) -> list[str]:
    return [name for name in list_entries(folder) if not name.startswith(".")]


def write_lock(folder: Path, host: str, process: str, seconds_ago: float = 0.0) -> Path:
    """Write a lock of another job with its last heartbeat `seconds_ago`."""
    lock = folder / job_folders.LOCK_FILENAME
    lock.write_text(f"{host}.{process}.0a1b2c3d", encoding="utf-8")
    os.utime(lock, (time.time() - seconds_ago,) * 2)
    return lock


def test_busy_folder_error_names_process_and_host(tmp_path: Path) -> None:
    with lock_in_child(tmp_path) as child:
        before = list_entries(tmp_path)
        with pytest.raises(BusyError) as error, job_folders.folder_lock(tmp_path):
            pytest.fail("two jobs hold the lock")
        machine = liveness.identify_host().rpartition("-")[0]
        assert error.value.message == f"process {child.pid} on {machine} has locked {tmp_path}"
        assert error.value.hint == "Rerun the command after that process has ended."
        with pytest.raises(BusyError), job_folders.folder_lock(tmp_path):
            pytest.fail("two jobs hold the lock")
        assert list_entries(tmp_path) == before, "a refused job adds and removes nothing"


def test_second_lock_in_same_process_is_refused(tmp_path: Path) -> None:
    with (
        job_folders.folder_lock(tmp_path),
        pytest.raises(BusyError, match=f"process {os.getpid()} "),
        job_folders.folder_lock(tmp_path),
    ):
        pytest.fail("two jobs hold the lock")
    assert list_entries(tmp_path) == []


def test_lock_of_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    with lock_in_child(tmp_path) as child:
        child.kill()
        child.wait()
        assert list_visible_entries(tmp_path) == [job_folders.LOCK_FILENAME]
        began = time.monotonic()
        with job_folders.folder_lock(tmp_path):
            assert time.monotonic() - began < 5
            assert liveness.identify_process() in (tmp_path / job_folders.LOCK_FILENAME).read_text()
    assert list_visible_entries(tmp_path) == []


def test_files_beside_lock_of_killed_process_are_removed(tmp_path: Path) -> None:
    with lock_in_child(tmp_path) as child:
        child.kill()
        child.wait()
        with job_folders.folder_lock(tmp_path):
            pass
    assert list_entries(tmp_path) == []


def test_lock_with_reused_pid_is_taken_over(tmp_path: Path) -> None:
    write_lock(tmp_path, liveness.identify_host(), f"{os.getppid()}-1")
    with job_folders.folder_lock(tmp_path):
        pass
    assert list_entries(tmp_path) == []


def test_lock_of_other_host_with_heartbeat_is_kept(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, OTHER_HOST, "17-4711")
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.wait(0.2):
            os.utime(lock)

    heartbeat = threading.Thread(target=beat)
    heartbeat.start()
    try:
        with (
            pytest.raises(BusyError, match=r"^process 17 on other\.machine has locked"),
            job_folders.folder_lock(tmp_path),
        ):
            pytest.fail("two jobs hold the lock")
    finally:
        stopped.set()
        heartbeat.join()
    assert list_entries(tmp_path) == [job_folders.LOCK_FILENAME]
    assert lock.read_text() == f"{OTHER_HOST}.17-4711.0a1b2c3d"


def test_stale_lock_of_other_host_is_taken_over(tmp_path: Path) -> None:
    write_lock(tmp_path, OTHER_HOST, DEAD_PROCESS, seconds_ago=job_folders.LOCK_STALE_AFTER_SECONDS + 5)
    with job_folders.folder_lock(tmp_path):
        assert OTHER_HOST not in (tmp_path / job_folders.LOCK_FILENAME).read_text()
    assert list_entries(tmp_path) == []


def test_lock_of_other_host_is_taken_over_after_stale_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folders, "LOCK_STALE_AFTER_SECONDS", 3.0)
    write_lock(tmp_path, OTHER_HOST, DEAD_PROCESS)
    began = time.monotonic()
    with job_folders.folder_lock(tmp_path):
        assert 2.5 < time.monotonic() - began < 10
    assert list_entries(tmp_path) == []


def test_lock_of_other_container_ignores_local_pids(tmp_path: Path) -> None:
    other_container = f"{liveness.identify_host().rpartition('-')[0]}-0a1b2c3d"
    lock = write_lock(tmp_path, other_container, DEAD_PROCESS)
    heartbeat = threading.Timer(0.5, os.utime, [lock])
    heartbeat.start()
    with pytest.raises(BusyError), job_folders.folder_lock(tmp_path):
        pytest.fail("two jobs hold the lock")
    heartbeat.join()


def test_lock_released_during_wait_is_acquired(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, OTHER_HOST, DEAD_PROCESS)
    release = threading.Timer(0.5, lock.unlink)
    release.start()
    with job_folders.folder_lock(tmp_path):
        assert OTHER_HOST not in lock.read_text()
    release.join()
    assert list_entries(tmp_path) == []


def test_lock_writes_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_INTERVAL_SECONDS", 0.02)
    with job_folders.folder_lock(tmp_path):
        lock = tmp_path / job_folders.LOCK_FILENAME
        os.utime(lock, (1, 1))
        deadline = time.monotonic() + 30
        while lock.stat().st_mtime < 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_lock_is_released_at_exit_and_on_error(tmp_path: Path) -> None:
    with job_folders.folder_lock(tmp_path):
        assert list_visible_entries(tmp_path) == [job_folders.LOCK_FILENAME]
    assert list_entries(tmp_path) == []
    with pytest.raises(ZeroDivisionError), job_folders.folder_lock(tmp_path):
        raise ZeroDivisionError
    assert list_entries(tmp_path) == []


def test_job_that_lost_its_lock_keeps_lock_of_successor(tmp_path: Path) -> None:
    with job_folders.folder_lock(tmp_path):
        lock = write_lock(tmp_path, OTHER_HOST, "17-4711")  # its heartbeat was stale and another host took over
    assert lock.exists()


@pytest.mark.long
def test_concurrent_contenders_never_share_lock_despite_kills(tmp_path: Path) -> None:
    folder, go = tmp_path / "held", tmp_path / "go"
    folder.mkdir()
    environment = process_control.build_python_environment(PYTHONPATH=str(ROOT))
    command = [sys.executable, str(CONTENDER), str(folder), str(go), "60"]
    contenders = [
        subprocess.Popen([*command, str(seed)], env=environment, stdout=subprocess.PIPE, text=True) for seed in range(8)
    ]
    time.sleep(1)
    go.touch()
    letters = "".join(contender.communicate(timeout=120)[0].strip() for contender in contenders)
    assert [contender.returncode for contender in contenders] == [0] * 8
    assert len(letters) == 8 * 60
    assert {"h", "k", "b"} <= set(letters), "all outcomes occur: locked, killed with the lock, busy"
    assert "X" not in letters
    with job_folders.folder_lock(folder):
        pass
    assert list_visible_entries(folder) == []


def test_takeover_race_of_three_jobs_yields_one_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs find the same dead lock; one takes it over, the other moves the new lock away, and a third job arrives."""
    lock = write_lock(tmp_path, liveness.identify_host(), DEAD_PROCESS)
    original_is_gone, original_rename, competing_locks = liveness.is_process_gone, Path.rename, ExitStack()

    def is_gone_after_takeover(process: str) -> bool:
        monkeypatch.setattr(liveness, "is_process_gone", original_is_gone)
        is_gone = original_is_gone(process)
        lock.unlink()
        competing_locks.enter_context(job_folders.folder_lock(tmp_path))  # the competing job was faster
        return is_gone

    def rename_with_third_job(path: Path, target: Path) -> Path:
        moved = original_rename(path, target)
        if path == lock:
            with pytest.raises(BusyError):
                competing_locks.enter_context(job_folders.folder_lock(tmp_path))  # the third job
        return moved

    monkeypatch.setattr(liveness, "is_process_gone", is_gone_after_takeover)
    monkeypatch.setattr(Path, "rename", rename_with_third_job)
    with competing_locks, pytest.raises(BusyError), job_folders.folder_lock(tmp_path):
        pytest.fail("two jobs hold the lock")


def test_paused_owner_learns_that_its_lock_was_taken_over(tmp_path: Path) -> None:
    with job_folders.folder_lock(tmp_path, "writer") as verify:
        verify()
        (tmp_path / "writer").write_text("other-host.1-1.00000000")  # the successor waited for the stale period
        with pytest.raises(BusyError, match=r"another process has taken over .* this process stops writing"):
            verify()
    assert (tmp_path / "writer").read_text() == "other-host.1-1.00000000"


def test_lock_of_running_owner_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "writer"
    lock.write_text(job_folders.create_owner_tag())
    monkeypatch.setattr(job_folders.time, "sleep", lambda _: lock.unlink())  # the owner ends during the wait
    with job_folders.folder_lock(tmp_path, "writer", wait_seconds=5):
        assert lock.exists()


def test_lock_is_held_although_the_answer_of_the_file_server_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client repeats link(2), and the server finds the lock of the first call."""
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    with job_folders.folder_lock(tmp_path) as verify:
        verify()
    assert list(tmp_path.iterdir()) == []
