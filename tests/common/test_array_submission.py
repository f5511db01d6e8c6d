"""Jobs of several threads that are submitted as one array."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.common.launch import Command, JobStatus, NotStartedError, StopRequest, UnresponsiveError
from components.common.launch.array_submission import ArraySubmission


class FakeJob:
    """A started job."""

    def __init__(self, name: str) -> None:
        self.name = name

    def poll(self) -> JobStatus:
        return JobStatus("running")

    def request_stop(self) -> None: ...

    def cancel(self) -> None: ...

    def list_logs(self) -> list[Path]:
        return []


class FakeArrayLauncher:
    """Record the started folders; run nothing."""

    poll_interval_seconds = 0.1
    max_resumes = 0

    def __init__(self, running_names: tuple[str, ...] = (), error: Exception | None = None) -> None:
        self.started: list[list[str]] = []
        self._running_names, self._error = running_names, error

    def start(self, command: Command, folder: Path) -> FakeJob:
        raise AssertionError("alone")

    def find(self, folder: Path) -> FakeJob | None:
        return FakeJob(folder.name) if folder.name in self._running_names else None

    def start_all(self, commands: Mapping[Path, Command], parent: Path, at_once: int) -> dict[Path, FakeJob]:
        self.started.append(sorted(folder.name for folder in commands))
        if self._error:
            raise self._error
        return {folder: FakeJob(folder.name) for folder in commands}


def submit_all(
    tmp_path: Path, launcher: FakeArrayLauncher, names: str, stop: StopRequest | None = None, expected: str = ""
) -> tuple[ArraySubmission, list[object]]:
    submission = ArraySubmission({*(expected or names)}, tmp_path, 2, stop or StopRequest())

    def start(name: str) -> object:
        (tmp_path / name).mkdir()
        try:
            job = submission.start(name, launcher, Command("module", []), tmp_path / name)
        except Exception as error:
            return error
        return job and job.name

    with ThreadPoolExecutor(8) as pool:
        return submission, list(pool.map(start, names))


def test_one_submission_starts_all_jobs(tmp_path: Path) -> None:
    launcher = FakeArrayLauncher()
    assert submit_all(tmp_path, launcher, "abcd")[1] == ["a", "b", "c", "d"]
    assert launcher.started == [["a", "b", "c", "d"]]


def test_running_job_is_not_started_again(tmp_path: Path) -> None:
    launcher = FakeArrayLauncher(running_names=("b",))
    assert submit_all(tmp_path, launcher, "abc")[1] == ["a", None, "c"]
    assert launcher.started == [["a", "c"]]


def test_submission_does_not_wait_for_withdrawn_member(tmp_path: Path) -> None:
    launcher = FakeArrayLauncher()
    submission = ArraySubmission({"a", "b"}, tmp_path, 2, StopRequest())
    (tmp_path / "a").mkdir()
    threading.Timer(0.3, submission.withdraw, ["b"]).start()
    job = submission.start("a", launcher, Command("module", []), tmp_path / "a")
    assert job is not None
    assert launcher.started == [["a"]]


def test_failed_start_is_tried_once_and_reported_to_all_members(tmp_path: Path) -> None:
    launcher = FakeArrayLauncher(error=UnresponsiveError("nobody answers"))
    assert {str(failure) for failure in submit_all(tmp_path, launcher, "abc")[1]} == {"nobody answers"}
    assert len(launcher.started) == 1


@pytest.mark.parametrize("event", ["save_requested", "detach_requested"])
def test_stop_request_ends_wait_without_start(event: str, tmp_path: Path) -> None:
    launcher, stop = FakeArrayLauncher(), StopRequest()
    threading.Timer(0.3, getattr(stop, event).set).start()
    results = submit_all(tmp_path, launcher, "ab", stop, expected="abc")[1]
    assert [type(result) for result in results] == [NotStartedError] * 2
    assert launcher.started == []
