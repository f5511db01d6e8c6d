"""Jobs that run a stage's command: starting, finding, watching and stopping them, and reading their logs.

A launcher starts a command in a job folder on shared storage. In this folder, the job appends events to an event file
and writes its result to an outcome file.
"""

# Jobs of all launchers are therefore watched in the same way, and the watching process can be restarted.

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem, process_control
from components.common.runtime.errors import EXIT_INTERRUPTED, RESUME_HINT, InterruptedRunError, TunelineError
from components.common.runtime.reporters import Reporter, parse_event, relay_event

JsonObject = dict[str, Any]
JOB_FILENAME, COMMAND_FILENAME = "job.json", "command.json"
EVENTS_FILENAME, OUTCOME_FILENAME = "events.jsonl", "outcome.json"
RELAY_STATE_FILENAME = "watched.json"  # offset up to which the event file has been relayed
STOP_FILENAME = "stop"  # if the file exists, the job saves its work and ends
NODES_FOLDER, LOGS_FOLDER = "nodes", "logs"  # one folder per node, with the logs of its processes
OUTCOME_TIMEOUT_SECONDS = 5.0  # an outcome file on NFS may become visible this long after the job's end
STOP_REPEAT_SECONDS = 5.0
POLL_INTERVAL_SECONDS = 0.2  # between two reads of the event file
JobState = Literal["waiting", "running", "succeeded", "failed", "ended", "cancelled"]
ACTIVE_STATES: tuple[JobState, ...] = ("waiting", "running")


@dataclass(frozen=True)
class Command:
    """A module of this package to run with arguments, as `processes` processes on each of `nodes` nodes."""

    module: str
    arguments: Sequence[str]
    processes: int = 1
    nodes: int = 1

    def write(self, folder: Path) -> None:
        """Write the command to the job folder, where each node reads it."""
        artifact_folder.write_atomically(folder / COMMAND_FILENAME, json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Command:
        """Read the command of the job in this folder."""
        return Command(**json.loads(filesystem.read_text(folder / COMMAND_FILENAME)))


@dataclass(frozen=True)
class JobStatus:
    """The state of a job according to its scheduler.

    Attributes:
        state: waiting (queued or requeued), running, succeeded, failed (error of the job), ended (by the cluster, such
            as preemption, eviction or a lost node; another attempt may succeed) or cancelled (by a user).
        reason: the scheduler's message, or empty.
    """

    state: JobState
    reason: str = ""


@dataclass(frozen=True)
class StopRequest:
    """Stop requests from the main thread, which receives the signals, to the threads that watch jobs.

    Attributes:
        save_requested: the job saves its work and ends.
        kill_requested: the job is cancelled immediately.
        detach_requested: watching ends and no further job starts; a job that cannot outlive this process saves.
    """

    save_requested: threading.Event = field(default_factory=threading.Event)
    kill_requested: threading.Event = field(default_factory=threading.Event)
    detach_requested: threading.Event = field(default_factory=threading.Event)

    @property
    def is_start_blocked(self) -> bool:
        """Whether no further job may start."""
        return self.save_requested.is_set() or self.detach_requested.is_set()

    def should_stop(self, job: Job) -> bool:
        """Return whether this job has to save its work and end."""
        return self.save_requested.is_set() or (self.detach_requested.is_set() and not job.name)


class Job(Protocol):
    """A started job."""

    @property
    def name(self) -> str:
        """The name that users see in the scheduler; empty for a job that ends with this process."""

    def poll(self) -> JobStatus:
        """Return the current status."""

    def request_stop(self) -> None:
        """Request that the job saves its work and ends without being requeued."""

    def cancel(self) -> None:
        """Cancel the job immediately. Idempotent; does nothing if the job has ended."""

    def list_logs(self) -> list[Path]:
        """Return the paths of the logs of the job's processes."""


class Launcher(Protocol):
    """Interface of the launchers, which run a command as a job."""

    @property
    def poll_interval_seconds(self) -> float:
        """Seconds between two polls of a job."""

    @property
    def max_resumes(self) -> int:
        """Maximum number of restarts by `run` of a job that the cluster ended or that saved its work (exit code 75)."""

    def start(self, command: Command, folder: Path) -> Job:
        """Start the command. `folder` is the job folder, on storage that is shared with the job."""

    def find(self, folder: Path) -> Job | None:
        """Return the folder's job from an earlier process if it is active or has an outcome, else None."""


@runtime_checkable
class ArrayLauncher(Launcher, Protocol):
    """A launcher that submits many jobs in one request and limits the number of jobs that run at once."""

    def start_all(self, commands: Mapping[Path, Command], array_folder: Path, max_parallel: int) -> Mapping[Path, Job]:
        """Start several commands in one request.

        Args:
            commands: the commands by job folder.
            array_folder: folder of the files that the jobs share.
            max_parallel: maximum number of jobs that run at once.

        Returns:
            The started jobs by job folder.
        """


@runtime_checkable
class LocalLauncher(Launcher, Protocol):
    """A launcher on the machine of the step, whose concurrent jobs share the accelerators of the machine."""

    def with_environment(self, environment: Mapping[str, str]) -> Launcher:
        """Return a launcher whose processes also get these variables, such as those that select accelerators."""


class LostJobError(TunelineError):
    """A job ended without an outcome."""

    kind = "job_lost"


class UnresponsiveError(TunelineError):
    """The scheduler does not answer. The job may continue, and a repeated call may succeed."""

    kind = "engine_missing"


class JobEndedError(TunelineError):
    """A user cancelled the job, or the cluster ended it and no restarts are left."""

    kind = "job_ended"


class NotStartedError(InterruptedRunError):
    """A job was not started because a stop was requested first."""


class DetachedError(InterruptedRunError):
    """Watching stopped, but the job continues; a repeated call finds the job."""


def get_outcome_filename(rank: int) -> str:
    """Return the name of a process's outcome file. The file of rank 0 is the job's outcome."""
    return f"outcome-{rank}.json" if rank else OUTCOME_FILENAME


def run(
    launcher: Launcher,
    command: Command,
    folder: Path,
    reporter: Reporter,
    stop: StopRequest | None = None,
    started: Job | None = None,
) -> JsonObject:
    """Run a command as a job and return its outcome. If the folder already has a job, watch that job.

    SIGTERM and Ctrl-C make the job save its work; a second Ctrl-C cancels the job. In other threads, `stop` has this
    effect.

    Args:
        launcher: starts and finds the job.
        command: the command to run.
        folder: the job folder.
        reporter: receives the job's events.
        stop: stop requests from another thread.
        started: the job, if the caller has just started it.

    Returns:
        The JSON object in the job's outcome file.

    Raises:
        TunelineError: the error that the job wrote to its outcome.
        LostJobError: the job left no outcome.
        JobEndedError: a user cancelled the job, or the cluster ended it and no restarts are left.
        UnresponsiveError: the scheduler did not answer within its timeout.
        InterruptedRunError: a stop was requested; NotStartedError before the start, DetachedError if the job continues.
        KeyboardInterrupt: a second Ctrl-C or `stop` requested that the job is cancelled.
    """
    stop = stop or StopRequest()
    with process_control.handle_stop_signals(stop.save_requested):
        job = started or launcher.find(folder)
        if job:
            reporter.note(f"{job.name} {'was started' if started else 'already exists; watching it'}")
        resumes_left = launcher.max_resumes
        while True:
            if not job:
                if stop.is_start_blocked:
                    raise NotStartedError("the job was not started: a stop was requested", hint=RESUME_HINT)
                prepare_folder(command, folder)
                try:
                    job = launcher.start(command, folder)
                except KeyboardInterrupt:
                    if found := launcher.find(folder):  # the scheduler had accepted the job
                        found.cancel()
                    raise
                if job.name:
                    reporter.note(f"{job.name} was started")
            outcome = _watch(launcher, job, folder, reporter, stop, is_last=resumes_left <= 0)
            if outcome is not None:
                return outcome
            job, resumes_left = None, resumes_left - 1


def prepare_folder(command: Command, folder: Path) -> None:
    """Write the command to the folder of its next job and delete the files of an earlier job."""
    for name in (EVENTS_FILENAME, RELAY_STATE_FILENAME, STOP_FILENAME):
        (folder / name).unlink(missing_ok=True)
    delete_outcomes(folder)
    command.write(folder)


def delete_outcomes(folder: Path) -> None:
    """Delete the outcome files of an earlier job."""
    for path in folder.glob("outcome*.json"):
        path.unlink(missing_ok=True)


def _watch(
    launcher: Launcher, job: Job, folder: Path, reporter: Reporter, stop: StopRequest, *, is_last: bool
) -> JsonObject | None:
    """Return the job's outcome once it has ended, or None if it may be restarted."""
    try:
        status = _follow(launcher, job, folder, reporter, stop)
    except BaseException as error:
        # After an error of this process, such as a full disk, a job with a name continues; the next call finds it.
        if isinstance(error, KeyboardInterrupt) or not job.name:
            job.cancel()
        raise
    job.cancel()  # ends remaining processes
    if status.state == "succeeded":
        deadline = time.monotonic() + OUTCOME_TIMEOUT_SECONDS
        while not (folder / OUTCOME_FILENAME).exists() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_SECONDS)
    try:
        return _collect_outcome(job, status, folder)
    except TunelineError as error:
        if stop.should_stop(job):
            if isinstance(error, (LostJobError, JobEndedError)):
                raise InterruptedRunError("interrupted before the job had work to save", hint=RESUME_HINT) from None
            raise
        is_lost = isinstance(error, (LostJobError, JobEndedError))  # else the training stated its own error
        may_resume = error.kind == InterruptedRunError.kind or (status.state == "ended" and is_lost)
        if is_last or status.state == "cancelled" or not may_resume:
            raise
        reporter.note(
            f"{job.name} ended before its work was complete ({status.reason or error.message}); restarting it"
        )
        return None


def _follow(launcher: Launcher, job: Job, folder: Path, reporter: Reporter, stop: StopRequest) -> JobStatus:
    """Return the job's final status; until the job ends, relay its events and note each change of its status."""
    events, noted, next_request = _EventRelay(folder), JobStatus("running"), 0.0
    while (status := job.poll()).state in ACTIVE_STATES:
        if status != noted:
            verb = "is running" if status.state == "running" else "is waiting"
            reporter.note(f"{job.name} {verb}" + (f": {status.reason}" if status.reason else ""))
            noted = status
        next_poll = time.monotonic() + launcher.poll_interval_seconds
        while time.monotonic() < next_poll:
            events.relay_new(reporter)
            if stop.kill_requested.is_set():
                raise KeyboardInterrupt
            if stop.should_stop(job):
                if time.monotonic() >= next_request:  # repeated: a job that is starting misses the first request
                    job.request_stop()
                    next_request = time.monotonic() + STOP_REPEAT_SECONDS
            elif stop.detach_requested.is_set():
                raise DetachedError(f"{job.name} continues and is no longer monitored", hint=RESUME_HINT)
            time.sleep(POLL_INTERVAL_SECONDS)
    events.relay_new(reporter)
    return status


class _EventRelay:
    """Relay of a job's event file that reports each line once, even if the watching process was restarted."""

    def __init__(self, folder: Path) -> None:
        self._events, self._state = folder / EVENTS_FILENAME, folder / RELAY_STATE_FILENAME
        self._offset = int(read_json_object(self._state).get("events_told", 0))

    def relay_new(self, reporter: Reporter) -> None:
        """Relay the complete lines that were appended since the last call."""
        if not self._events.exists():
            return
        if self._events.stat().st_size < self._offset:  # a restarted job truncated the file
            self._offset = 0
        with self._events.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        if not newline:
            return
        self._offset += len(complete) + 1
        for line in complete.decode().splitlines():
            if event := parse_event(line):
                relay_event(event, reporter)
        artifact_folder.write_atomically(self._state, json.dumps({"events_told": self._offset}))


def _collect_outcome(job: Job, status: JobStatus, folder: Path) -> JsonObject:
    """Return the job's outcome, or raise its error; prefer an error with a cause to the report of a lost process."""
    paths = [folder / OUTCOME_FILENAME, *sorted(folder.glob("outcome-*.json"))]
    outcomes = list(filter(None, map(read_json_object, paths)))
    failures = [outcome for outcome in outcomes if "error" in outcome]
    failures.sort(key=lambda outcome: outcome["error"]["kind"] == LostJobError.kind)
    cause = f"{job.name} was terminated externally: {status.reason}" if status.state in ("ended", "cancelled") else ""
    if failures:
        delete_outcomes(folder)  # the next call starts a new job
        error, exit_code = failures[0]["error"], failures[0]["exit_code"]
        if error["kind"] == LostJobError.kind:
            raise LostJobError(error["message"], hint=error["hint"])
        if cause and exit_code == EXIT_INTERRUPTED:  # the outcome does not contain the cause of the interruption
            error = error | {"message": f"{cause}; {error['message']}"}
        raise TunelineError.from_dict(error, exit_code)
    if outcomes:  # also if the job was ended after its work was done
        return outcomes[0]
    if cause:
        raise JobEndedError(cause, hint=RESUME_HINT)
    reason = read_last_log_line(job.list_logs()) or status.reason or "the logs are empty"
    raise LostJobError(f"{job.name or 'the job'} in {folder} ended without an outcome: {reason}", hint=RESUME_HINT)


def read_json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file, or an empty object if the file is missing or incomplete."""
    try:
        content: JsonObject = json.loads(filesystem.read_text(path))
    except (OSError, ValueError):
        return {}
    return content


def read_last_log_line(logs: Sequence[Path]) -> str:
    """Return the last line of the last non-empty log, truncated to 300 characters; "" if all logs are empty."""
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in logs if path.is_file()]
    lines = [text.splitlines()[-1].strip() for text in texts if text]
    return lines[-1][:300] if lines else ""


def list_process_logs(folder: Path) -> list[Path]:
    """Return the paths of torchrun's log and of each process's standard error, by rank.

    Args:
        folder: the folder of one node.
    """
    return [
        folder / "torchrun.log",
        *sorted((folder / LOGS_FOLDER).rglob("stderr.log"), key=lambda log: int(log.parent.name)),
    ]


def list_node_logs(folder: Path) -> list[Path]:
    """Return the paths of the logs of all nodes of a job, by node and rank.

    Args:
        folder: the job folder.
    """
    nodes = sorted((folder / NODES_FOLDER).glob("*"), key=lambda path: int(path.name))
    return [log for node in nodes for log in list_process_logs(node)]
