"""Commands that run elsewhere: what they tell is told here, how they end is how the call ends, and nothing of them outlives it."""

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

from components.common import launch, process
from components.common.errors import EXIT_INTERRUPTED, InterruptedRunError, TunelineError
from components.common.hashing import ROOT
from components.common.launch import Command, JobEndedError, LeftError, LostJobError, NotBegunError, Running, Seen, State, node, torchrun
from components.common.launch.torchrun import LocalJob, TorchRun
from components.common.progress import Silent

JOB = "tests.common.launched"


class Recorder:
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def step(self, name: str) -> None:
        self.told.append(("step", name))

    def progress(self, done: int, total: int | None, unit: str) -> None:
        self.told.append(("progress", done, total, unit))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.told.append(("metrics", dict(values), step))

    def note(self, text: str) -> None:
        self.told.append(("note", text))


def command(what: str, folder: Path, processes: int = 1) -> Command:
    return Command(JOB, [what, str(folder)], processes)


def pids(folder: Path, processes: int) -> list[int]:
    """The numbers of a waiting job's processes and of their children, once all are there."""
    files = [folder / f"pids.{rank}" for rank in range(processes)]
    wait_until(lambda: all(file.exists() for file in files), 60)
    return [int(pid) for file in files for pid in file.read_text().split()]


def wait_until(reached: object, seconds: float) -> None:
    assert callable(reached)
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def living(numbers: list[int]) -> list[int]:
    return [pid for pid in numbers if lives(pid)]


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[None]:
    """A test that fails leaves no process of its job either."""
    yield
    for file in tmp_path.glob("pids.*"):
        for pid in living([int(pid) for pid in file.read_text().split()]):
            os.kill(pid, signal.SIGKILL)


def test_what_a_job_tells_is_told_here_in_order_and_its_outcome_is_returned(tmp_path: Path) -> None:
    reporter = Recorder()
    (tmp_path / launch.EVENTS).write_text('{"stage": "fine_tuning", "event": "note", "text": "of an earlier job"}\n')
    (tmp_path / launch.OUTCOME).write_text('{"answer": "of an earlier job"}')
    assert launch.run(TorchRun(), command("tell", tmp_path, 2), tmp_path, reporter) == {"answer": 42}
    assert reporter.told == [
        ("step", "loading"),
        ("progress", 1, 3, "steps"),
        ("metrics", {"train_loss": 0.5}, 1),
        ("note", "é of two halves"),
        ("progress", 3, 3, "steps"),
    ]


def test_an_error_that_a_job_wrote_down_is_raised_here_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(TunelineError) as raised:
        launch.run(TorchRun(), command("fail", tmp_path), tmp_path, Silent())
    error = raised.value
    assert (error.kind, error.message, error.hint) == ("training", "the loss is nan", "Lower the rate.")
    assert (error.stage, error.exit_code) == ("fine_tuning", 3)


def test_a_job_that_ends_without_an_outcome_is_lost_and_its_last_words_are_told(tmp_path: Path) -> None:
    (tmp_path / launch.OUTCOME).write_text('{"answer": "of an earlier job"}')
    with pytest.raises(LostJobError, match=r"ended without an outcome: but this is too much$") as raised:
        launch.run(TorchRun(), command("vanish", tmp_path, 2), tmp_path, Silent())
    assert (raised.value.kind, raised.value.exit_code) == ("job_lost", 1)
    assert "goes on" in raised.value.hint


def test_the_words_of_an_earlier_job_are_not_taken_for_the_last_of_this_one(tmp_path: Path) -> None:
    for what in ("vanish", "vanish_silently"):
        with pytest.raises(LostJobError) as raised:
            launch.run(TorchRun(), command(what, tmp_path), tmp_path, Silent())
    assert "too much" not in raised.value.message


@pytest.mark.usefixtures("ended")
def test_there_is_a_log_for_each_process_and_cancel_ends_them_all_and_their_children(tmp_path: Path) -> None:
    job = TorchRun().start(command("wait", tmp_path, 2), tmp_path)
    try:
        numbers = pids(tmp_path, 2)
        assert job.look().state == "running"
        own, *logs = job.logs()
        assert own == tmp_path / "torchrun.log"
        assert own.exists()
        assert [log.read_text().strip() for log in logs] == ["process 0 is there", "process 1 is there"]
        assert living(numbers) == numbers
    finally:
        job.cancel()
    wait_until(lambda: not living(numbers), 5)
    assert job.look().state == "failed"
    job.cancel()  # once more does no harm


def test_logs_are_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    for rank in range(12):
        folder = tmp_path / torchrun.LOGS / "none_0a1b2c3d" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").touch()
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert [int(log.parent.name) for log in LocalJob(gone, gone, tmp_path).logs()[1:]] == list(range(12))


@pytest.mark.usefixtures("ended")
def test_cancel_ends_processes_that_are_deaf_to_a_friendly_word_and_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "PATIENCE", 1.0)
    job = TorchRun().start(command("deaf", tmp_path, 2), tmp_path)
    try:
        numbers = pids(tmp_path, 2)
    finally:
        began = time.monotonic()
        job.cancel()
    assert time.monotonic() - began < 10
    wait_until(lambda: not living(numbers), 5)


def test_a_job_that_is_asked_to_stop_before_its_processes_are_there_stops_too(tmp_path: Path) -> None:
    job = TorchRun().start(command("wait", tmp_path), tmp_path)
    try:
        job.stop()
        wait_until(lambda: job.look().state != "running", 20)
    finally:
        job.cancel()


def test_what_goes_wrong_while_a_job_is_watched_ends_it(tmp_path: Path) -> None:
    class Watched(TorchRun):
        jobs: list[Running] = []  # noqa: RUF012

        def start(self, command: Command, folder: Path) -> LocalJob:
            job = super().start(command, folder)
            self.jobs.append(job)
            return job

    class Broken(Silent):
        def step(self, name: str) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch.run(Watched(), command("tell", tmp_path), tmp_path, Broken())
    assert [job.look().state for job in Watched.jobs] == ["failed"]


WAITING = """
import sys
from pathlib import Path
from components.common import launch
from components.common.errors import TunelineError
from components.common.launch.torchrun import TorchRun
from components.common.progress import Silent
try:
    print(launch.run(TorchRun(), launch.Command(*sys.argv[1:2], sys.argv[2:4], 2), Path(sys.argv[3]), Silent()))
except TunelineError as error:
    print(error.kind, error.message)
    sys.exit(error.exit_code)
"""


def waiting(folder: Path, what: str) -> subprocess.Popen[str]:
    """A process that runs a job of two and waits for it."""
    arguments = [sys.executable, "-c", WAITING, JOB, what, str(folder)]
    environment = process.python_environment(PYTHONPATH=str(ROOT))
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("ended")
def test_sigterm_to_who_waits_is_passed_on_and_what_the_processes_saved_is_told(tmp_path: Path) -> None:
    child = waiting(tmp_path, "wait")
    numbers = pids(tmp_path, 2)
    child.terminate()
    assert child.communicate(timeout=30)[0].strip() == "interrupted saved after step 7"
    assert child.returncode == EXIT_INTERRUPTED
    assert all((tmp_path / f"saved.{rank}").exists() for rank in range(2)), "each process was asked, and had the time to save"
    assert not living(numbers)


def test_a_node_hears_of_a_stop_by_a_file_in_the_folder(tmp_path: Path) -> None:
    command("wait", tmp_path).write(tmp_path)
    child = subprocess.Popen(process.module_command(node.__name__, str(tmp_path)), env=process.python_environment(PYTHONPATH=str(ROOT)))
    pids(tmp_path, 1)
    (tmp_path / launch.STOP).touch()
    assert child.wait(30) == EXIT_INTERRUPTED
    assert (tmp_path / "saved.0").exists()


@pytest.mark.usefixtures("ended")
def test_a_job_ends_within_seconds_of_who_waits_for_it_even_when_that_is_killed(tmp_path: Path) -> None:
    child = waiting(tmp_path, "deaf")
    numbers = pids(tmp_path, 2)
    child.kill()
    child.wait()
    wait_until(lambda: not living(numbers), 10)


@dataclass
class Elsewhere:
    """A job that goes on without who watches: it is as it is told to be."""

    folder: Path
    seen: list[Seen]
    name: str = "job 7"
    asked: list[str] = field(default_factory=list)
    looks_every: float = 0.0
    resumes: int = 0

    def start(self, command: Command, folder: Path) -> Elsewhere:
        self.asked.append("start")
        return self

    def find(self, folder: Path) -> Elsewhere | None:
        return None

    def look(self) -> Seen:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]

    def stop(self) -> None:
        self.asked.append("stop")

    def cancel(self) -> None:
        self.asked.append("cancel")

    def logs(self) -> list[Path]:
        return []


class Outcomes(Elsewhere):
    """Leaves an outcome as soon as it is looked at."""

    def look(self) -> Seen:
        (self.folder / launch.OUTCOME).write_text(self.name)
        return super().look()


def test_what_goes_wrong_in_watching_leaves_a_job_that_goes_on_by_itself(tmp_path: Path) -> None:
    class Broken(Silent):
        def note(self, text: str) -> None:
            if "runs" in text:
                raise OSError("no tracking server")

    job = Elsewhere(tmp_path, [Seen("running", "on node 1")])
    with pytest.raises(OSError, match="no tracking server"):
        launch.run(job, Command(JOB, []), tmp_path, Broken())
    assert job.asked == ["start"]


def test_a_second_wish_to_end_is_heard_before_the_job_is_asked_to_save(tmp_path: Path) -> None:
    job, stop = Elsewhere(tmp_path, [Seen("running")], looks_every=0.1), launch.Stop()
    stop.asked.set()
    stop.now.set()
    with pytest.raises(KeyboardInterrupt):
        launch.run(job, Command(JOB, []), tmp_path, Silent(), stop, begun=job)
    assert job.asked == ["cancel"]


def leaving() -> launch.Stop:
    """What watchers are told when another's work ended in an error."""
    stop = launch.Stop()
    stop.leave.set()
    return stop


def test_a_watcher_that_is_to_leave_leaves_alone_a_job_that_goes_on_by_itself(tmp_path: Path) -> None:
    class Found(Elsewhere):
        def find(self, folder: Path) -> Elsewhere | None:
            return self

    job = Found(tmp_path, [Seen("running", "on node 1")], looks_every=0.1)
    with pytest.raises(LeftError, match="job 7 goes on, and is watched no longer"):
        launch.run(job, Command(JOB, []), tmp_path, Silent(), leaving())
    assert job.asked == []


def test_a_watcher_that_is_to_leave_has_a_job_save_that_would_end_with_it(tmp_path: Path) -> None:
    class Saves(Elsewhere):
        def stop(self) -> None:
            super().stop()
            saved = {"error": InterruptedRunError("saved after step 7").as_dict(), "exit_code": EXIT_INTERRUPTED}
            (self.folder / launch.OUTCOME).write_text(json.dumps(saved))
            self.seen = [Seen("failed")]

    job, stop = Saves(tmp_path, [Seen("running")], name="", looks_every=0.1, resumes=2), leaving()
    with pytest.raises(TunelineError, match="saved after step 7") as raised:
        launch.run(job, Command(JOB, []), tmp_path, Silent(), stop, begun=job)
    assert raised.value.exit_code == EXIT_INTERRUPTED
    assert job.asked == ["stop", "cancel"], "and it is not started again"


def test_a_watcher_that_is_to_leave_begins_nothing(tmp_path: Path) -> None:
    job = Elsewhere(tmp_path, [Seen("running")])
    with pytest.raises(NotBegunError):
        launch.run(job, Command(JOB, []), tmp_path, Silent(), leaving())
    assert job.asked == []


@pytest.mark.parametrize("state", ["cancelled", "ended"])
def test_work_that_was_done_when_its_job_was_ended_counts(state: State, tmp_path: Path) -> None:
    job = Outcomes(tmp_path, [Seen(state, "TIMEOUT")], name='{"answer": 42}')
    assert launch.run(job, Command(JOB, []), tmp_path, Silent()) == {"answer": 42}


def test_a_job_knows_nothing_of_the_stop_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / launch.STOP).touch()
    launch.run(Outcomes(tmp_path, [Seen("succeeded")], name='{"answer": 42}'), Command(JOB, []), tmp_path, Silent())
    assert not (tmp_path / launch.STOP).exists()


@pytest.mark.parametrize(("state", "starts"), [("cancelled", 1), ("ended", 3)])
def test_a_job_is_started_again_where_the_cluster_ended_it_and_not_where_somebody_did(state: State, starts: int, tmp_path: Path) -> None:
    job = Elsewhere(tmp_path, [Seen(state, "so it is")], resumes=2)
    with pytest.raises(JobEndedError, match="job 7 was ended from outside: so it is"):
        launch.run(job, Command(JOB, []), tmp_path, Silent())
    assert job.asked.count("start") == starts


def test_a_start_that_is_broken_off_by_force_leaves_no_job_behind(tmp_path: Path) -> None:
    class Heard(Elsewhere):
        def start(self, command: Command, folder: Path) -> Elsewhere:
            super().start(command, folder)
            raise KeyboardInterrupt

        def find(self, folder: Path) -> Elsewhere | None:
            return self if self.asked else None

    job = Heard(tmp_path, [Seen("running")])
    with pytest.raises(KeyboardInterrupt):
        launch.run(job, Command(JOB, []), tmp_path, Silent())
    assert job.asked == ["start", "cancel"]
