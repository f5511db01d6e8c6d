"""Running a stage's command elsewhere: start it, find it again, watch it, cancel it, read its logs.

A launcher is told what to run and where the job's folder is, which lies on storage that the job sees too. The job tells its progress in an
event file there, which is relayed to the stage's reporter, and leaves its outcome in a file; so every launcher is watched in the same way,
and who watches may be killed and started again without the job noticing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from components.common import artifacts, process
from components.common.errors import EXIT_INTERRUPTED, GOES_ON, InterruptedRunError, TunelineError
from components.common.progress import Reporter, event_in, relay

JOB, COMMAND, EVENTS, OUTCOME, WATCHED = "job.json", "command.json", "events.jsonl", "outcome.json", "watched.json"
STOP = "stop"  # a file in the job's folder: it is asked to save its work and end
NODES = "nodes"  # the folder in which each node's processes keep their logs
COMES_WITHIN = 5.0  # seconds after the end of a job in which its outcome may still come
ASKS_EVERY = 5.0  # seconds between two times that a job is asked to stop
LOOKS_EVERY = 0.2  # seconds between two looks at what a running job tells
State = Literal["waiting", "running", "succeeded", "failed", "ended", "cancelled"]
GOES_ON_BY_ITSELF: tuple[State, ...] = ("waiting", "running")


@dataclass(frozen=True)
class Command:
    """What to run: one of our modules with its arguments, in so many processes on each of so many nodes."""

    module: str
    arguments: Sequence[str]
    processes: int = 1
    nodes: int = 1

    def write(self, folder: Path) -> None:
        """Leave it in the job's folder, for whoever starts the processes of a node."""
        artifacts.write_atomically(folder / COMMAND, json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Command:
        """The command of the job in this folder."""
        return Command(**json.loads((folder / COMMAND).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Seen:
    """What a look at a job showed.

    waiting: in a queue, or on its way back into one. running. succeeded. failed: by itself. ended: by the cluster (preempted, evicted, a
    lost node), so that another try may succeed. cancelled: somebody wanted its end. `reason` is in the launcher's own words, "" where it
    says none.
    """

    state: State
    reason: str = ""


@dataclass(frozen=True)
class Stop:
    """An end that is asked for: `asked` has the job save its work, `now` ends it at once. `leave` is an end of the watching alone: a job
    that goes on without this process is left to itself, one that cannot saves its work, and none is begun.

    Signals are heard by the main thread alone. One that has other threads watch jobs passes on to them what it hears.
    """

    asked: threading.Event = field(default_factory=threading.Event)
    now: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)

    @property
    def begins_nothing(self) -> bool:
        """Whether no further job is to be started."""
        return self.asked.is_set() or self.leave.is_set()

    def wanted_of(self, running: Running) -> bool:
        """Whether this job is to save its work and end."""
        return self.asked.is_set() or (self.leave.is_set() and not running.name)


class Running(Protocol):
    """A job that was started."""

    @property
    def name(self) -> str:
        """As people find it there; "" for one that nobody else sees."""

    def look(self) -> Seen:
        """Whether it waits or runs, and how it ended."""

    def stop(self) -> None:
        """Ask it to save its work and end, for good."""

    def cancel(self) -> None:
        """End it now. Once more does no harm, nor after its end."""

    def logs(self) -> list[Path]:
        """A file a process with what it printed."""


class Launcher(Protocol):
    """A way to run a command."""

    @property
    def looks_every(self) -> float:
        """Seconds between two looks at a job's state."""

    @property
    def resumes(self) -> int:
        """How often who watches starts a job again that the cluster ended, or that saved its work and ended with 75."""

    def start(self, command: Command, folder: Path) -> Running:
        """Start the command; `folder` is the job's own, on storage that the job sees too."""

    def find(self, folder: Path) -> Running | None:
        """The job of this folder that an earlier call started, whoever made it, and that runs or left its outcome; None: there is none."""


@runtime_checkable
class StartsTogether(Launcher, Protocol):
    """A launcher whose scheduler takes many jobs in one, and sees by itself that not too many run."""

    def start_all(self, commands: Mapping[Path, Command], place: Path, at_once: int) -> Mapping[Path, Running]:
        """Start commands, by their folders, of which so many run at once. `place`: a folder for what belongs to all of them."""


class LostJobError(TunelineError):
    """A job ended without saying how."""

    kind = "job_lost"


class SilentError(TunelineError):
    """What the job was given to does not answer. The job goes on, and the same call may succeed in a moment."""

    kind = "engine_missing"


class JobEndedError(TunelineError):
    """A job was ended from outside: by somebody, or by the cluster once too often."""

    kind = "job_ended"


class NotBegunError(InterruptedRunError):
    """A job was not started, since an end was asked for first."""


class LeftError(InterruptedRunError):
    """A job is watched no longer. It goes on, and the same call finds it."""


def outcome_of(rank: int) -> str:
    """The file in which a process leaves its outcome; the first one's is the job's."""
    return f"outcome-{rank}.json" if rank else OUTCOME


def run(
    launcher: Launcher, command: Command, folder: Path, reporter: Reporter, stop: Stop | None = None, begun: Running | None = None
) -> dict[str, Any]:
    """Run a command to its end and return the outcome that it left. A job that an earlier call started for this folder is watched further.
    `begun`: one that was just started for it.

    Raises the error that the job wrote down, LostJobError where it left none, JobEndedError where it was ended from outside and may not be
    started again, or SilentError where nobody answers who could tell of it. SIGTERM and Ctrl-C are passed on, so that the job saves its
    work, and raise InterruptedRunError; a second Ctrl-C ends it at once. In another thread than the main one `stop` does what they do, and
    may have the job left to itself, which raises LeftError.
    """
    stop = stop or Stop()
    with process.stopping(stop.asked):
        running = begun or launcher.find(folder)
        if running:
            reporter.note(f"{running.name} {'was started' if begun else 'is there already and is watched further'}")
        for tries_left in reversed(range(launcher.resumes + 1)):
            if stop.begins_nothing and not running:
                raise NotBegunError("it had not begun", hint=GOES_ON)
            running = running or _started(launcher, command, folder, reporter)
            outcome = _watched(launcher, running, folder, reporter, stop, last=not tries_left)
            if outcome is not None:
                return outcome
            running = None
    raise AssertionError("the last try returns or raises")


def _started(launcher: Launcher, command: Command, folder: Path, reporter: Reporter) -> Running:
    make_ready(command, folder)
    try:
        running = launcher.start(command, folder)
    except KeyboardInterrupt:
        if begun := launcher.find(folder):  # its start was heard
            begun.cancel()
        raise
    if running.name:
        reporter.note(f"{running.name} was started")
    return running


def make_ready(command: Command, folder: Path) -> None:
    """Write the command into the folder of its next job, and remove what an earlier one left there to be told."""
    for left in (folder / EVENTS, folder / WATCHED, folder / STOP):
        left.unlink(missing_ok=True)
    forget_outcomes(folder)
    command.write(folder)


def forget_outcomes(folder: Path) -> None:
    """Remove what the processes of an earlier job left in its folder: none of it is this one's."""
    for left in folder.glob("outcome*.json"):
        left.unlink(missing_ok=True)


def _watched(launcher: Launcher, running: Running, folder: Path, reporter: Reporter, stop: Stop, *, last: bool) -> dict[str, Any] | None:
    """The job's outcome once it has ended; None where it may be started again.

    What goes wrong in the watching ends a job that would end with this process anyway. Any other goes on, and is found again: a tracking
    server that is away, or a full disk, must not cost the work of many GPUs.
    """
    try:
        seen = _follow(launcher, running, folder, reporter, stop)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not running.name:
            running.cancel()
        raise
    running.cancel()  # what is left of it
    if seen.state == "succeeded":
        _wait_for(folder / OUTCOME)
    try:
        return _outcome(running, seen, folder)
    except TunelineError as error:
        if stop.wanted_of(running):
            if isinstance(error, (LostJobError, JobEndedError)):
                raise InterruptedRunError("interrupted before there was anything to save", hint=GOES_ON) from None
            raise
        if last or seen.state == "cancelled" or not (seen.state == "ended" or error.exit_code == EXIT_INTERRUPTED):
            raise
        reporter.note(f"{running.name} ended before its work was done ({seen.reason or error.message}); it is started again")
        return None


def _wait_for(outcome: Path) -> None:
    """Over NFS a file is seen a moment after the job has ended that wrote it."""
    until = time.monotonic() + COMES_WITHIN
    while not outcome.exists() and time.monotonic() < until:
        time.sleep(LOOKS_EVERY)


def _follow(launcher: Launcher, running: Running, folder: Path, reporter: Reporter, stop: Stop) -> Seen:
    """Relay the job's events until it has ended and all are told. Each new state is told with its reason."""
    lines, told, asks = _Lines(folder / EVENTS, folder / WATCHED), Seen("running"), _Again(running.stop)
    while True:
        seen = running.look()
        if seen.state not in GOES_ON_BY_ITSELF:
            break
        if seen != told:
            reporter.note(_sentence(running, seen))
            told = seen
        until = time.monotonic() + launcher.looks_every
        while time.monotonic() < until:
            lines.tell(reporter)
            if stop.now.is_set():
                raise KeyboardInterrupt
            if stop.wanted_of(running):
                asks()
            elif stop.leave.is_set():
                raise LeftError(f"{running.name} goes on, and is watched no longer", hint=GOES_ON)
            time.sleep(LOOKS_EVERY)
    lines.tell(reporter)
    return seen


def _sentence(running: Running, seen: Seen) -> str:
    return f"{running.name} {'runs' if seen.state == 'running' else 'waits'}" + (f": {seen.reason}" if seen.reason else "")


class _Again:
    """A call that is made at once and then every few seconds: a job that is just beginning does not hear the first one."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._next = call, 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self._next:
            self._call()
            self._next = time.monotonic() + ASKS_EVERY


class _Lines:
    """The whole lines that were added to a file since it was last looked at, by whoever watched: `place` says how far that was."""

    def __init__(self, path: Path, place: Path) -> None:
        self._path, self._place = path, place
        self._read = int((_read(place) or {}).get("events_told", 0))

    def tell(self, reporter: Reporter) -> None:
        if not self._path.exists():
            return
        if self._path.stat().st_size < self._read:  # the job began anew
            self._read = 0
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        if not whole:
            return
        self._read += len(whole)
        for line in whole.decode().splitlines():
            if event := event_in(line):
                relay(event, reporter)
        artifacts.write_atomically(self._place, json.dumps({"events_told": self._read}))


def _outcome(running: Running, seen: Seen, folder: Path) -> dict[str, Any]:
    """What the job left. Raises the error in it, that of the process which failed by itself before those that only lost it; LostJobError
    or JobEndedError where there is nothing."""
    paths = [folder / OUTCOME, *sorted(folder.glob("outcome-*.json"))]
    outcomes = [left for path in paths if (left := _read(path))]
    failed = sorted((left for left in outcomes if "error" in left), key=lambda left: bool(left["error"]["kind"] == LostJobError.kind))
    outside = f"{running.name} was ended from outside: {seen.reason}" if seen.state in ("ended", "cancelled") else ""
    if failed:
        forget_outcomes(folder)  # it is told now: the next call begins a new job
        raise _as_told(failed[0], outside)
    if outcomes:  # also where the job was ended when its work was done
        return outcomes[0]
    if outside:
        raise JobEndedError(outside, hint=GOES_ON)
    said = last_words(running.logs()) or seen.reason or "it printed nothing"
    raise LostJobError(f"{running.name or 'the job'} in {folder} ended without an outcome: {said}", hint=GOES_ON)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        left: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return left


def _as_told(left: dict[str, Any], outside: str) -> TunelineError:
    """The error that a process left; one that was interrupted knows nothing of who did it."""
    if outside and left["exit_code"] == EXIT_INTERRUPTED:
        left = left | {"error": left["error"] | {"message": f"{outside}; {left['error']['message']}"}}
    if left["error"]["kind"] == LostJobError.kind:
        return LostJobError(left["error"]["message"], hint=left["error"]["hint"])
    return TunelineError.from_dict(left["error"], left["exit_code"])


def last_words(logs: Sequence[Path]) -> str:
    """The last line that any of these logs has, "" where they have none."""
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in logs if path.is_file()]
    said = [text.splitlines()[-1].strip() for text in texts if text]
    return said[-1][:300] if said else ""


def logs_of_nodes(folder: Path) -> list[Path]:
    """What each process of each node wrote to standard error, in the order of nodes and ranks; a node's own log before its processes'."""
    found: list[Path] = []
    for node in sorted((folder / NODES).glob("*"), key=lambda path: int(path.name)):
        found += [node / "torchrun.log", *sorted((node / "logs").rglob("stderr.log"), key=lambda log: int(log.parent.name))]
    return found
