"""The launcher: a batch job is found again by its name, which is made of its folder's. Where jobs are the tasks of an array, by the array's
name and the task's number, which their folders tell."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from components.common import artifacts, hashing
from components.common.errors import EXIT_INTERRUPTED
from components.common.launch import GOES_ON_BY_ITSELF, OUTCOME, STOP, Command, Seen, SilentError, logs_of_nodes
from components.common.launch.settings import LauncherSettings, shared
from components.common.launch.slurm import script
from components.common.launch.slurm.states import Batch
from components.common.launch.slurm.way import Way

SCRIPT, RECORD, ARRAY = "job.sh", "slurm.json", "array.json"
FORGOTTEN_AFTER = 3  # looks at a job that Slurm no longer knows, before it is said to be gone: what it wrote may come late over NFS
SECONDS_TO_CANCEL = 30.0  # for which a Slurm that does not answer is asked to end a job
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between two calls of a Slurm that does not answer
Answer = TypeVar("Answer")


def name_of(folder: Path) -> str:
    """The name of a folder's job: no other folder's job has it."""
    return f"tuneline-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


@dataclass
class SlurmLauncher:
    """Batch jobs. A job that ends with its work saved queues itself anew (see script.py), so nobody else has to."""

    settings: LauncherSettings
    way: Way
    resumes: int = 0

    @property
    def looks_every(self) -> float:
        """Seconds between two looks: each asks the one controller that everybody asks."""
        return self.settings.looks_every

    def start(self, command: Command, folder: Path) -> SlurmJob:
        """Hand in the job. Where the answer is lost, the job is looked for before another is handed in."""
        folder = shared(folder)
        (folder / STOP).unlink(missing_ok=True)
        (folder / ARRAY).unlink(missing_ok=True)
        (folder / RECORD).unlink(missing_ok=True)
        name = name_of(folder)
        job = self._handed_in(folder, script.options(name, folder, command.nodes, self.settings.slurm), command.nodes)
        return self._recorded(SlurmJob(job, name, folder, folder, self.way, self.settings))

    def start_all(self, commands: Mapping[Path, Command], place: Path, at_once: int) -> dict[Path, SlurmJob]:
        """Hand in jobs, by their folders, as the tasks of one array, of which so many run at once. `place`: the array's own folder."""
        place, folders, (nodes, *_) = shared(place), [shared(folder) for folder in commands], (one.nodes for one in commands.values())
        place.mkdir(parents=True, exist_ok=True)
        name, array = name_of(place / hashing.digest([str(folder) for folder in folders])), f"0-{len(folders) - 1}%{at_once}"
        for number, folder in enumerate(folders):
            (folder / STOP).unlink(missing_ok=True)
            (folder / RECORD).unlink(missing_ok=True)
            artifacts.write_atomically(folder / ARRAY, json.dumps({"name": name, "place": str(place), "task": number}))
        artifacts.write_atomically(script.tasks_of(place, name), "".join(f"{folder}\n" for folder in folders))
        job = self._handed_in(place, script.options(name, place, nodes, self.settings.slurm, array), nodes)
        jobs = [SlurmJob(f"{job}_{number}", name, folder, place, self._way(name), self.settings) for number, folder in enumerate(folders)]
        return dict(zip(commands, map(self._recorded, jobs), strict=True))

    def find(self, folder: Path) -> SlurmJob | None:
        """The folder's job that waits or runs; or that has ended while nobody watched, where it left its outcome."""
        folder = shared(folder)
        name, place, task = _known_by(folder)
        known = [job for job in self._patiently(lambda: self.way.jobs(name)) if not task or job.id.endswith(task)]
        alive, over = [job.id for job in known if not job.is_over], [job.id for job in known if job.is_over]
        way = self._way(name) if task else self.way
        if alive:
            (folder / STOP).unlink(missing_ok=True)  # of an earlier call, whose job did not end for good: now it is to go on
            return self._recorded(SlurmJob(alive[-1], name, folder, place, way, self.settings))
        if _is_worth_telling(folder / OUTCOME):
            job = _recorded_in(folder) or (over[-1] if over else "")
            return SlurmJob(job, name, folder, place, way, self.settings)
        return None

    def _way(self, array: str) -> Shared:
        return shared_way(array, self.way, self.looks_every)

    def _handed_in(self, place: Path, options: dict[str, str], nodes: int) -> str:
        name = options["job-name"]
        artifacts.write_atomically(place / SCRIPT, script.text(options, place, nodes, self.settings))
        known = {job.id for job in self._patiently(lambda: self.way.jobs(name))}
        return self._patiently(lambda: self._submitted_once(name, known, place))

    @staticmethod
    def _recorded(job: SlurmJob) -> SlurmJob:
        artifacts.write_atomically(job.folder / RECORD, json.dumps({"job": job.id}))
        return job

    def _submitted_once(self, name: str, known: set[str], place: Path) -> str:
        """A call that was not answered may have been heard."""
        came = [job.id for job in self.way.jobs(name) if job.id not in known]
        return came[-1].split("_")[0] if came else self.way.submit(place / SCRIPT)

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        return patiently(ask, self.settings.patience_seconds)


@dataclass
class Shared:
    """A way to Slurm on which the watchers of an array's tasks ask together: one answer is for all of them within a moment."""

    way: Way
    seconds: float
    _known: list[Batch] = field(default_factory=list)
    _silence: SilentError | None = None
    _until: float = 0.0
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def jobs(self, name: str) -> list[Batch]:
        """As the way's; no older than those seconds. So is its silence, or each watcher would wait for it in turn."""
        with self._asking:
            if time.monotonic() >= self._until:
                self._ask(name)
                self._until = time.monotonic() + self.seconds
            if self._silence:
                raise SilentError(self._silence.message, hint=self._silence.hint)
            return self._known

    def submit(self, script: Path) -> str:
        """As the way's."""
        return self.way.submit(script)

    def _ask(self, name: str) -> None:
        try:
            self._known, self._silence = self.way.jobs(name), None
        except SilentError as error:
            self._silence = error

    def accounted(self, job: str) -> list[Batch]:
        """As the way's."""
        return self.way.accounted(job)

    def cancel(self, job: str, signal: str = "") -> None:
        """As the way's."""
        self.way.cancel(job, signal)


_ways: WeakValueDictionary[str, Shared] = WeakValueDictionary()  # each is kept by the jobs that ask on it


def shared_way(array: str, way: Way, seconds: float) -> Shared:
    """The one way on which everybody in this process asks for this array."""
    return _ways.setdefault(array, Shared(way, seconds))


def _known_by(folder: Path) -> tuple[str, Path, str]:
    """The name of the folder's job in Slurm, where it logs, and how its id ends: "" unless it is one of an array's tasks."""
    try:
        told = json.loads((folder / ARRAY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return name_of(folder), folder, ""
    return told["name"], Path(told["place"]), f"_{told['task']}"


def _recorded_in(folder: Path) -> str:
    """The id of the folder's last job; "" where who handed it in was killed before it could write it down."""
    try:
        return str(json.loads((folder / RECORD).read_text(encoding="utf-8"))["job"])
    except FileNotFoundError:
        return ""


def _is_worth_telling(outcome: Path) -> bool:
    """Whether there is one that nobody has read; one that says "saved, run it again" is what running it again is for."""
    try:
        return bool(json.loads(outcome.read_text(encoding="utf-8")).get("exit_code") != EXIT_INTERRUPTED)
    except (OSError, ValueError):
        return False


def patiently(ask: Callable[[], Answer], seconds: float) -> Answer:
    """Ask until there is an answer. Raises SilentError with what was said last when the time is over."""
    until, pauses = time.monotonic() + seconds, iter(PAUSES)
    while True:
        try:
            return ask()
        except SilentError as error:
            pause = next(pauses, PAUSES[-1])
            if time.monotonic() + pause > until:
                hint = "Ask the site whether Slurm is up. A job that was handed in goes on; the same command watches it further."
                raise SilentError(f"Slurm has not answered for {seconds:.0f} s: {error.message}", hint=hint) from None
            time.sleep(pause)


@dataclass
class SlurmJob:
    """A batch job, or a task of an array. `id`: "" where only its outcome is left. `place`: where Slurm writes its log."""

    id: str
    job_name: str
    folder: Path
    place: Path
    way: Way
    settings: LauncherSettings
    _silent_since: float | None = None
    _unknown: int = 0
    _last: Seen = field(default_factory=lambda: Seen("waiting"))

    @property
    def name(self) -> str:
        """As people find it in squeue."""
        return f"Slurm job {self.id}".strip()

    def look(self) -> Seen:
        """What the controller says, or the accounting, or what the job left. Raises SilentError after `patience_seconds` of silence."""
        try:
            known = self._known()
        except SilentError as error:
            return self._silence(error)
        self._silent_since = None
        self._last = known.seen if known else self._forgotten()
        return self._last

    def stop(self) -> None:
        """Ask the training to save, without waiting for a silent Slurm: who asks does so again. It is not queued anew after that."""
        (self.folder / STOP).touch()
        if self._last.state == "running":
            with suppress(SilentError):
                self.way.cancel(self.id, "TERM")
        else:
            self.cancel()

    def cancel(self) -> None:
        """End the job, unless it has ended."""
        if self.id and self._last.state in GOES_ON_BY_ITSELF:
            (self.folder / STOP).touch()
            patiently(lambda: self.way.cancel(self.id), min(self.settings.patience_seconds, SECONDS_TO_CANCEL))

    def logs(self) -> list[Path]:
        """The batch script's log, then those of the processes."""
        return [self.place / f"slurm-{self.id}.log", *logs_of_nodes(self.folder)]

    def _known(self) -> Batch | None:
        if not self.id:
            return None
        found = [job for job in self.way.jobs(self.job_name) if job.id == self.id] or self.way.accounted(self.id)
        return found[0] if found else None

    def _silence(self, error: SilentError) -> Seen:
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > self.settings.patience_seconds:
            raise error
        return Seen(self._last.state, f"Slurm does not answer ({error.message})")

    def _forgotten(self) -> Seen:
        """Without accounting a job is forgotten some minutes after its end (MinJobAge)."""
        self._unknown += 1
        if (self.folder / OUTCOME).exists():
            return Seen("succeeded", "Slurm has forgotten it; it left its outcome")
        if self._unknown < FORGOTTEN_AFTER:
            return Seen("running", "Slurm does not know it any more")
        return Seen("ended", "Slurm does not know it any more, and it left no outcome")
