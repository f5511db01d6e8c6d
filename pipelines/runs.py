"""Runs of a workdir: one folder each, a lock so that two never work in one workdir at once, and how a run is found and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from components.common import artifacts, jobs, liveness, process, progress
from components.common.errors import GOES_ON, InterruptedRunError, TunelineError, UsageError, of_the_machine
from components.common.places import Workdir

SECONDS_TO_SAVE = 60  # a training step may have to end before its checkpoint is written
SECONDS_TO_ANSWER = 15
LOCK, DRAFT, TAKEN = "lock.json", ".lock", ".dead-lock"  # the lock, and how names begin of one not yet taken, and of one taken away
SILENT = 120.0  # seconds without a sign of life after which a run on another machine counts as killed
RESERVED = 256 * 1024  # bytes: MLflow closes its runs, and the run says what happened, in less


@dataclass(frozen=True)
class Run:
    """A run's folder: events.jsonl, logs/ of its steps, run.log, customization.yaml, and run.json, which at the end holds the result."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    @property
    def reserve(self) -> Path:
        """A little space that is given back when the disk is full, so that the run can still say so."""
        return self.folder / progress.RESERVE

    def stage_log(self, stage: str) -> Path:
        """What a stage and its children printed; missing where it did not run."""
        return self.folder / "logs" / f"{stage}.log"

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted (resumable, it saved what it had), or killed (its process is gone without a word)."""
        known = self.read()
        status = str(known.get("status", "running"))
        return "killed" if status == "running" and self.process() is None and not self.elsewhere() else status

    def elsewhere(self) -> str:
        """The machine or container on which this run holds the workdir, where that is another one; "" where it is this, or none."""
        holder = _held(self.folder.parent.parent / LOCK)
        return holder.where if holder and holder.lives and holder.where != liveness.where() and holder.began(self) else ""

    def process(self) -> psutil.Process | None:
        """The living process of this run; None where it is gone, or elsewhere."""
        known = self.read()
        return _alive(known.get("pid"), known.get("process_started")) if known.get("where", liveness.where()) == liveness.where() else None

    def write(self, **values: Any) -> None:
        """Keep facts of the run in run.json, beside those already there."""
        path = self.folder / "run.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        artifacts.write_atomically(path, json.dumps({**known, **values}, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        """What run.json holds; nothing where the run was killed before it wrote it, or it cannot be read: one must not hide the others."""
        try:
            known = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def new_run(workdir: Workdir) -> Run:
    """A new run's folder, named by time so that names sort."""
    folder = workdir.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    run = Run(folder)
    try:
        run.write(status="running", **_me(), started=time.time())
        run.reserve.write_bytes(os.urandom(RESERVED))  # bytes that no file system can compress away
    except OSError:
        shutil.rmtree(folder)
        raise
    return run


def every(workdir: Workdir) -> list[Run]:
    """The runs of a workdir, newest first. Creates nothing."""
    found = [Run(folder) for folder in workdir.runs.glob("*") if folder.is_dir()]
    return sorted(found, key=lambda run: (run.name[:15], run.read().get("started", 0.0)), reverse=True)


def find(workdir: Workdir, name: str) -> Run:
    """The run of this name, or of the one name that begins so; `latest` is the newest. Raises UsageError naming the runs that exist."""
    known = every(workdir)
    if not known:
        raise UsageError(f"there is no run in {workdir.root}", hint="`tuneline run` makes one; or name another with --workdir.")
    if name == "latest":
        return known[0]
    fitting = [run for run in known if run.name.startswith(name)]
    exact = [run for run in fitting if run.name == name]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    there = ", ".join(run.name for run in (fitting or known)[:10]) + (" and older ones" if len(fitting or known) > 10 else "")
    if fitting:
        raise UsageError(f"{name} is the beginning of {len(fitting)} runs: {there}", hint="Give more of the name, or `latest`.")
    raise UsageError(f"there is no run {name} in {workdir.root}; there are: {there}", hint="Give one of these names, or `latest`.")


def told(error: BaseException, workdir: Workdir | None = None) -> dict[str, str]:
    """An error as run.json keeps it."""
    if isinstance(error, KeyboardInterrupt):
        error = InterruptedRunError("the run was interrupted", hint=GOES_ON)
    if not isinstance(error, TunelineError):
        error = of_the_machine(error, [workdir.root] if workdir else []) or TunelineError(f"{type(error).__name__}: {error}")
    return error.as_dict()


def stop_steps(run: Run) -> InterruptedRunError:
    """Ask the running step to stop and give it time to save what it has. A second Ctrl-C, and what does not listen, is ended at once.

    Returns the error to end with when every process that this one started is gone.
    """
    process.end_stop()
    try:
        run.write(stopping=time.time())
        steps = [child for child in psutil.Process().children(recursive=True) if _is_step(child)]
        for step in steps:
            with contextlib.suppress(psutil.Error):
                step.terminate()
        hasty = bool(psutil.wait_procs(steps, timeout=SECONDS_TO_SAVE)[1])
    except KeyboardInterrupt:
        process.end_stop()
        hasty = True
    _kill_children()
    if hasty:
        return InterruptedRunError("the run was ended at once, before it had saved its last steps", hint=GOES_ON)
    return InterruptedRunError("the run was interrupted", hint=GOES_ON)


def _is_step(process: psutil.Process) -> bool:
    """kfp's executor or the shell around it. What a step itself started, it ends itself."""
    with contextlib.suppress(psutil.Error):
        return any("kfp.dsl.executor_main" in part for part in process.cmdline())
    return False


def _kill_children() -> None:
    """Children that lose their parent become ours (see process.adopt_orphans), so this ends when none is left anywhere."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=5)


def cancel(run: Run, *, on_wait: Callable[[float], None]) -> None:
    """Ask a run's process to stop, and wait until it and all it started are gone. `on_wait` is called with the seconds waited so far.

    Raises UsageError when the run is not running, and TunelineError when it does not end.
    """
    holder = run.process() if run.state == "running" else None
    if holder is None and run.state == "running" and (where := run.elsewhere()):
        raise UsageError(f"{run.name} runs on {where}, and is cancelled there", hint=f"Run the same command on {where}.")
    if holder is None:
        raise UsageError(f"{run.name} is not running: it is {run.state}", hint="`tuneline status` lists the runs and their states.")
    family = _family(holder)
    began = asked = time.monotonic()
    _ask(holder)
    while family := [member for member in family if _lives(member)]:
        waited = time.monotonic() - began
        if waited > SECONDS_TO_SAVE + 2 * SECONDS_TO_ANSWER:
            raise TunelineError(
                f"process {holder.pid} of {run.name} did not end within {waited:.0f} seconds",
                hint=f"End it at once with: kill -9 {holder.pid}. {GOES_ON}",
            )
        if time.monotonic() - asked > SECONDS_TO_ANSWER and "stopping" not in run.read():
            asked = time.monotonic()
            _ask(holder)  # Python loses an interrupt that comes while it forgets an object
        on_wait(waited)
        time.sleep(0.2)
        family = [*family, *(new for new in _family(holder) if new not in family)]


def _ask(process: psutil.Process) -> None:
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        owner = process.username()
        raise TunelineError(f"process {process.pid} belongs to {owner}", hint=f"Cancel the run as {owner}, or ask them to.") from None


def _family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _lives(process: psutil.Process) -> bool:
    """A killed process stays as a zombie until its parent asks for it, which in a container may be never."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def exclusive(workdir: Workdir) -> Iterator[None]:
    """Hold the workdir for this process. Raises UsageError while another living process holds it.

    The lock is a file with the holder's pid and start time, so a killed holder is recognised, and a reused pid is not taken for it. A
    holder on another machine, or in another container, counts as living while it gives signs of life.
    """
    lock = workdir.root / LOCK
    workdir.root.mkdir(parents=True, exist_ok=True)
    mine = _take(lock)
    _sweep(workdir.root)
    try:
        with liveness.beating(lock):
            yield
    finally:  # of a process that was stopped for long another one may have taken it
        _remove(lock, lambda held: held.read_text(encoding="utf-8") == mine)


def _sweep(folder: Path) -> None:
    """Remove the drafts of locks that killed processes left."""
    for prefix in (DRAFT, TAKEN):
        for draft in folder.glob(f"{prefix}.*.*.*"):
            if jobs.is_abandoned(draft, prefix):
                draft.unlink(missing_ok=True)


def _take(lock: Path) -> str:
    """Take the lock; returns what it holds."""
    draft, mine = lock.with_name(f"{DRAFT}.{jobs.mark()}"), json.dumps({**_me(), "token": secrets.token_hex(4)})
    try:
        draft.write_text(mine, encoding="utf-8")
        for _ in range(3):
            with contextlib.suppress(FileExistsError):
                os.link(draft, lock)  # fails where the lock exists, and is whole as soon as it does
                return mine
            holder = _held(lock)
            if holder and holder.lives:
                raise holder.refuses(lock)
            _remove(lock, lambda taken: (held := _held(taken)) is None or not held.lives)
    finally:
        draft.unlink(missing_ok=True)
    raise UsageError(f"{lock} is being taken by other processes", hint="Try again.")


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "process_started": psutil.Process().create_time(), "where": liveness.where()}


def _remove(lock: Path, unwanted: Callable[[Path], bool]) -> None:
    """Take a lock away, unless another process has taken it over since it was judged."""
    private = lock.with_name(f"{TAKEN}.{jobs.mark()}")
    with contextlib.suppress(FileNotFoundError):
        lock.rename(private)
        if not unwanted(private):
            with contextlib.suppress(FileExistsError):
                os.link(private, lock)
        private.unlink()


@dataclass(frozen=True)
class _Holder:
    """Who holds a lock: the process, where it is, and the seconds since its last sign of life."""

    pid: int
    process_started: float
    where: str
    silent: float

    @property
    def lives(self) -> bool:
        """Whether it is running; of one elsewhere, whether it gave a sign of life lately."""
        if self.where == liveness.where():
            return _alive(self.pid, self.process_started) is not None
        return self.silent < SILENT

    def began(self, run: Run) -> bool:
        """Whether a run is this process's."""
        known = run.read()
        return (known.get("pid"), known.get("where")) == (self.pid, self.where)

    def refuses(self, lock: Path) -> UsageError:
        """What another run in the same workdir is told."""
        if self.where == liveness.where():
            hint = "Wait for it, end it with `tuneline cancel latest`, or use another --workdir."
            return UsageError(f"another run (process {self.pid}) works in {lock.parent}", hint=hint)
        hint = f"Wait for it, or use another --workdir. Where it was killed, this works {SILENT:.0f} seconds after its last sign of life."
        said = f"another run (process {self.pid} on {self.where}, {max(self.silent, 0):.0f} seconds after its last sign of life)"
        return UsageError(f"{said} works in {lock.parent}", hint=hint)


def _held(lock: Path) -> _Holder | None:
    """Who holds the lock, dead or alive; None where nobody does, or it says nothing."""
    try:
        held = json.loads(lock.read_text(encoding="utf-8"))
        here = held["where"] == liveness.where()
        return _Holder(held["pid"], held["process_started"], held["where"], 0.0 if here else liveness.silence(lock))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _alive(pid: Any, started: Any) -> psutil.Process | None:
    """The process with this pid that began then, unless it is gone; a reused pid is not taken for it."""
    if not isinstance(pid, int) or not isinstance(started, (int, float)):
        return None
    try:
        process = psutil.Process(pid)
        return process if _lives(process) and abs(process.create_time() - started) < 1 else None
    except (ValueError, psutil.Error):
        return None
