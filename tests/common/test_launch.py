"""launch.run: relayed events, outcomes, errors, stop requests and cleanup of the job's processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from components.common import launch
from components.common.artifacts.code_digest import ROOT
from components.common.launch import (
    Command,
    DetachedError,
    Job,
    JobEndedError,
    JobState,
    JobStatus,
    LostJobError,
    NotStartedError,
    node_runner,
    torchrun,
)
from components.common.launch.torchrun import TorchrunJob, TorchrunLauncher
from components.common.runtime import process_control
from components.common.runtime.errors import EXIT_INTERRUPTED, InterruptedRunError, TunelineError
from components.common.runtime.reporters import SilentReporter

JOB_MODULE = "tests.common.job_program"


class RecordingReporter:
    """Record all events in order."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def step(self, name: str) -> None:
        self.events.append(("step", name))

    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.events.append(("progress", done, total, unit))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.events.append(("metrics", dict(values), step))

    def note(self, text: str) -> None:
        self.events.append(("note", text))


def build_command(action: str, folder: Path, processes: int = 1) -> Command:
    return Command(JOB_MODULE, [action, str(folder)], processes)


def wait_for_pids(folder: Path, processes: int) -> list[int]:
    """Return the pids of a job's processes and of their children once all have started."""
    files = [folder / f"pids.{rank}" for rank in range(processes)]
    wait_until(lambda: all(file.exists() for file in files), 60)
    return [int(pid) for file in files for pid in file.read_text().split()]


def wait_until(condition: object, seconds: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def list_living(job_pids: list[int]) -> list[int]:
    return [pid for pid in job_pids if is_alive(pid)]


@pytest.fixture
def kill_leftover_processes(tmp_path: Path) -> Iterator[None]:
    """Kill the job's processes even if the test fails."""
    yield
    for file in tmp_path.glob("pids.*"):
        for pid in list_living([int(pid) for pid in file.read_text().split()]):
            os.kill(pid, signal.SIGKILL)


def test_job_events_are_relayed_in_order_and_outcome_is_returned(tmp_path: Path) -> None:
    reporter = RecordingReporter()
    (tmp_path / launch.EVENTS_FILENAME).write_text(
        '{"stage": "fine_tuning", "event": "note", "text": "of an earlier job"}\n'
    )
    (tmp_path / launch.OUTCOME_FILENAME).write_text('{"answer": "of an earlier job"}')
    assert launch.run(TorchrunLauncher(), build_command("report", tmp_path, 2), tmp_path, reporter) == {"answer": 42}
    assert reporter.events == [
        ("step", "loading"),
        ("progress", 1, 3, "steps"),
        ("metrics", {"train_loss": 0.5}, 1),
        ("note", "é of two halves"),
        ("progress", 3, 3, "steps"),
    ]


def test_error_in_job_outcome_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(TunelineError) as raised:
        launch.run(TorchrunLauncher(), build_command("fail", tmp_path), tmp_path, SilentReporter())
    error = raised.value
    assert (error.kind, error.message, error.hint) == ("training", "the loss is nan", "Lower the rate.")
    assert (error.stage, error.exit_code) == ("fine_tuning", 3)


def test_job_without_outcome_is_lost_with_last_log_line(tmp_path: Path) -> None:
    (tmp_path / launch.OUTCOME_FILENAME).write_text('{"answer": "of an earlier job"}')
    with pytest.raises(LostJobError, match=r"ended without an outcome: but this is too much$") as raised:
        launch.run(TorchrunLauncher(), build_command("exit_without_outcome", tmp_path, 2), tmp_path, SilentReporter())
    assert (raised.value.kind, raised.value.exit_code) == ("job_lost", 1)
    assert "to resume" in raised.value.hint


def test_log_of_earlier_job_is_not_reported(tmp_path: Path) -> None:
    log = tmp_path / launch.LOGS_FOLDER / "none_0a1b2c3d" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("but this is too much\n")
    assert log in launch.list_process_logs(tmp_path), "a log where torchrun writes it"
    with pytest.raises(LostJobError) as raised:
        launch.run(TorchrunLauncher(), build_command("exit_silently", tmp_path), tmp_path, SilentReporter())
    assert "too much" not in raised.value.message


@pytest.mark.usefixtures("kill_leftover_processes")
def test_each_process_has_a_log_and_cancel_ends_process_trees(tmp_path: Path) -> None:
    job = TorchrunLauncher().start(build_command("wait", tmp_path, 2), tmp_path)
    try:
        job_pids = wait_for_pids(tmp_path, 2)
        assert job.poll().state == "running"
        launcher_log, *process_logs = job.list_logs()
        assert launcher_log == tmp_path / "torchrun.log"
        assert launcher_log.exists()
        assert [log.read_text().strip() for log in process_logs] == ["process 0 is there", "process 1 is there"]
        assert list_living(job_pids) == job_pids
    finally:
        job.cancel()
    wait_until(lambda: not list_living(job_pids), 5)
    assert job.poll().state == "failed"
    job.cancel()  # cancel is idempotent


def test_logs_are_ordered_by_rank(tmp_path: Path) -> None:
    for rank in range(12):
        folder = tmp_path / launch.LOGS_FOLDER / "none_0a1b2c3d" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").touch()
    exited_process = subprocess.Popen(["true"])
    exited_process.wait()
    assert [
        int(log.parent.name) for log in TorchrunJob(exited_process, exited_process, tmp_path).list_logs()[1:]
    ] == list(range(12))


@pytest.mark.usefixtures("kill_leftover_processes")
def test_cancel_kills_processes_that_ignore_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "CANCEL_TIMEOUT_SECONDS", 1.0)
    job = TorchrunLauncher().start(build_command("ignore_sigterm", tmp_path, 2), tmp_path)
    try:
        job_pids = wait_for_pids(tmp_path, 2)
    finally:
        began = time.monotonic()
        job.cancel()
    assert time.monotonic() - began < 10
    wait_until(lambda: not list_living(job_pids), 5)


def test_stop_request_before_process_start_stops_job(tmp_path: Path) -> None:
    job = TorchrunLauncher().start(build_command("wait", tmp_path), tmp_path)
    try:
        job.request_stop()
        wait_until(lambda: job.poll().state != "running", 20)
    finally:
        job.cancel()


def test_error_during_watch_ends_local_job(tmp_path: Path) -> None:
    class RecordingLauncher(TorchrunLauncher):
        jobs: list[Job] = []  # noqa: RUF012

        def start(self, command: Command, folder: Path) -> TorchrunJob:
            job = super().start(command, folder)
            self.jobs.append(job)
            return job

    class FailingReporter(SilentReporter):
        def step(self, name: str) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch.run(RecordingLauncher(), build_command("report", tmp_path), tmp_path, FailingReporter())
    assert [job.poll().state for job in RecordingLauncher.jobs] == ["failed"]


WATCHER_PROGRAM = """
import sys
from pathlib import Path
from components.common import launch
from components.common.runtime.errors import TunelineError
from components.common.launch.torchrun import TorchrunLauncher
from components.common.runtime.reporters import SilentReporter
try:
    print(launch.run(TorchrunLauncher(), launch.Command(*sys.argv[1:2], sys.argv[2:4], 2), Path(sys.argv[3]), SilentReporter()))
except TunelineError as error:
    print(error.kind, error.message)
    sys.exit(error.exit_code)
"""


def start_watcher(folder: Path, action: str) -> subprocess.Popen[str]:
    """Start a process that runs a job of two processes and waits for it."""
    arguments = [sys.executable, "-c", WATCHER_PROGRAM, JOB_MODULE, action, str(folder)]
    environment = process_control.build_python_environment(PYTHONPATH=str(ROOT))
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("kill_leftover_processes")
def test_sigterm_to_watcher_makes_all_processes_save(tmp_path: Path) -> None:
    child = start_watcher(tmp_path, "wait")
    job_pids = wait_for_pids(tmp_path, 2)
    child.terminate()
    assert child.communicate(timeout=30)[0].strip() == "interrupted saved after step 7"
    assert child.returncode == EXIT_INTERRUPTED
    assert all((tmp_path / f"saved.{rank}").exists() for rank in range(2)), (
        "each process got SIGTERM and the time to save"
    )
    assert not list_living(job_pids)


def test_stop_file_in_folder_makes_node_save(tmp_path: Path) -> None:
    build_command("wait", tmp_path).write(tmp_path)
    child = subprocess.Popen(
        process_control.build_module_command(node_runner.__name__, str(tmp_path)),
        env=process_control.build_python_environment(PYTHONPATH=str(ROOT)),
    )
    wait_for_pids(tmp_path, 1)
    (tmp_path / launch.STOP_FILENAME).touch()
    assert child.wait(30) == EXIT_INTERRUPTED
    assert (tmp_path / "saved.0").exists()


@pytest.mark.usefixtures("kill_leftover_processes")
def test_job_ends_within_seconds_of_killed_watcher(tmp_path: Path) -> None:
    child = start_watcher(tmp_path, "ignore_sigterm")
    job_pids = wait_for_pids(tmp_path, 2)
    child.kill()
    child.wait()
    wait_until(lambda: not list_living(job_pids), 10)


@dataclass
class RemoteJob:
    """A job, and its launcher, that outlives the watching process and shows the given statuses."""

    folder: Path
    statuses: list[JobStatus]
    name: str = "job 7"
    calls: list[str] = field(default_factory=list)
    poll_interval_seconds: float = 0.0
    max_resumes: int = 0

    def start(self, command: Command, folder: Path) -> RemoteJob:
        self.calls.append("start")
        return self

    def find(self, folder: Path) -> RemoteJob | None:
        return None

    def poll(self) -> JobStatus:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def request_stop(self) -> None:
        self.calls.append("stop")

    def cancel(self) -> None:
        self.calls.append("cancel")

    def list_logs(self) -> list[Path]:
        return []


class FinishingJob(RemoteJob):
    """A job that writes its outcome at the first poll."""

    def poll(self) -> JobStatus:
        (self.folder / launch.OUTCOME_FILENAME).write_text(self.name)
        return super().poll()


def test_error_during_watch_leaves_remote_job_running(tmp_path: Path) -> None:
    class FailingReporter(SilentReporter):
        def note(self, text: str) -> None:
            if "is running" in text:
                raise OSError("no tracking server")

    job = RemoteJob(tmp_path, [JobStatus("running", "on node 1")])
    with pytest.raises(OSError, match="no tracking server"):
        launch.run(job, Command(JOB_MODULE, []), tmp_path, FailingReporter())
    assert job.calls == ["start"]


def test_kill_request_takes_precedence_over_save_request(tmp_path: Path) -> None:
    job, stop = RemoteJob(tmp_path, [JobStatus("running")], poll_interval_seconds=0.1), launch.StopRequest()
    stop.save_requested.set()
    stop.kill_requested.set()
    with pytest.raises(KeyboardInterrupt):
        launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter(), stop, started=job)
    assert job.calls == ["cancel"]


def request_detach() -> launch.StopRequest:
    """Return the stop request that watchers get after the failure of another job."""
    stop = launch.StopRequest()
    stop.detach_requested.set()
    return stop


def test_detach_leaves_remote_job_running(tmp_path: Path) -> None:
    class RunningJob(RemoteJob):
        def find(self, folder: Path) -> RemoteJob | None:
            return self

    job = RunningJob(tmp_path, [JobStatus("running", "on node 1")], poll_interval_seconds=0.1)
    with pytest.raises(DetachedError, match="job 7 continues and is no longer monitored"):
        launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter(), request_detach())
    assert job.calls == []


def test_detach_makes_local_job_save(tmp_path: Path) -> None:
    class SavingJob(RemoteJob):
        def request_stop(self) -> None:
            super().request_stop()
            saved = {"error": InterruptedRunError("saved after step 7").as_dict(), "exit_code": EXIT_INTERRUPTED}
            (self.folder / launch.OUTCOME_FILENAME).write_text(json.dumps(saved))
            self.statuses = [JobStatus("failed")]

    job, stop = (
        SavingJob(tmp_path, [JobStatus("running")], name="", poll_interval_seconds=0.1, max_resumes=2),
        request_detach(),
    )
    with pytest.raises(TunelineError, match="saved after step 7") as raised:
        launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter(), stop, started=job)
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert job.calls == ["stop", "cancel"], "the job is not restarted"


def test_detach_starts_no_job(tmp_path: Path) -> None:
    job = RemoteJob(tmp_path, [JobStatus("running")])
    with pytest.raises(NotStartedError):
        launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter(), request_detach())
    assert job.calls == []


@pytest.mark.parametrize("state", ["cancelled", "ended"])
def test_outcome_of_ended_job_is_returned(state: JobState, tmp_path: Path) -> None:
    job = FinishingJob(tmp_path, [JobStatus(state, "TIMEOUT")], name='{"answer": 42}')
    assert launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter()) == {"answer": 42}


def test_stop_file_of_earlier_job_is_removed(tmp_path: Path) -> None:
    (tmp_path / launch.STOP_FILENAME).touch()
    launch.run(
        FinishingJob(tmp_path, [JobStatus("succeeded")], name='{"answer": 42}'),
        Command(JOB_MODULE, []),
        tmp_path,
        SilentReporter(),
    )
    assert not (tmp_path / launch.STOP_FILENAME).exists()


@pytest.mark.parametrize(("state", "starts"), [("cancelled", 1), ("ended", 3)])
def test_ended_job_is_restarted_and_cancelled_job_is_not(state: JobState, starts: int, tmp_path: Path) -> None:
    job = RemoteJob(tmp_path, [JobStatus(state, "so it is")], max_resumes=2)
    with pytest.raises(JobEndedError, match="job 7 was terminated externally: so it is"):
        launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter())
    assert job.calls.count("start") == starts


def test_interrupted_start_cancels_the_job(tmp_path: Path) -> None:
    class SubmittedJob(RemoteJob):
        def start(self, command: Command, folder: Path) -> RemoteJob:
            super().start(command, folder)
            raise KeyboardInterrupt

        def find(self, folder: Path) -> RemoteJob | None:
            return self if self.calls else None

    job = SubmittedJob(tmp_path, [JobStatus("running")])
    with pytest.raises(KeyboardInterrupt):
        launch.run(job, Command(JOB_MODULE, []), tmp_path, SilentReporter())
    assert job.calls == ["start", "cancel"]
