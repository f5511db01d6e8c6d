"""Runs of a workdir: their folders, the lock that allows one run at a time, and functions that find and stop a run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem, process_control, reporters
from components.common.runtime.errors import (
    RESUME_HINT,
    InterruptedRunError,
    TunelineError,
    UsageError,
    translate_system_error,
)
from components.common.workspace import job_folders, liveness
from components.common.workspace.artifact_store import Workdir

STOP_GRACE_SECONDS = 60  # a training step must end before its checkpoint is written
STOP_RESPONSE_SECONDS = 15
LOCK_FILENAME = "lock.json"
LOCK_DRAFT_PREFIX = ".lock"  # of a lock that is being written
REMOVED_LOCK_PREFIX = ".stale-lock"  # of a lock that is being removed
HEARTBEAT_TIMEOUT_SECONDS = 120.0  # without a heartbeat, a run on another machine is considered killed
RESERVE_BYTES = 256 * 1024  # enough to close the MLflow runs and to write run.json
Values = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run's folder: events.jsonl, run.log, logs/ of its steps, customization.yaml and run.json (state and result)."""

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
        """A file that is deleted when the disk is full, so that the run can still record its failure."""
        return self.folder / reporters.RESERVE_FILENAME

    def stage_log(self, stage: str) -> Path:
        """Return the path of the output of a stage and its children; it exists only if the stage ran."""
        return self.folder / "logs" / f"{stage}.log"

    @property
    def state(self) -> str:
        """The state: running, finished, failed, interrupted (resumable) or killed (ended without a record)."""
        status = str(self.read().get("status", "running"))
        return (
            "killed" if status == "running" and self.find_process() is None and not self.find_other_host() else status
        )

    def find_other_host(self) -> str:
        """Return the host of this run if it is active on another machine or in another container, else ""."""
        holder = _read_holder(self.folder.parent.parent / LOCK_FILENAME)
        if holder is None or not holder.is_alive or holder.where == liveness.identify_host():
            return ""
        values = self.read()
        is_own = (values.get("pid"), values.get("where")) == (holder.pid, holder.where)
        return holder.where if is_own else ""

    def find_process(self) -> psutil.Process | None:
        """Return the live process of this run; None if it ended or is on another machine."""
        values = self.read()
        if values.get("where", liveness.identify_host()) != liveness.identify_host():
            return None
        return _find_process(values.get("pid"), values.get("process_started"))

    def update(self, **values: Any) -> None:
        """Set keys of run.json; other keys are unchanged."""
        path = self.folder / "run.json"
        existing = json.loads(filesystem.read_text(path)) if path.exists() else {}
        artifact_folder.write_atomically(path, json.dumps({**existing, **values}, indent=2) + "\n")

    def read(self) -> Values:
        """Return run.json; {} if it is missing or unreadable, so that a damaged run does not hide other runs."""
        try:
            values = json.loads(filesystem.read_text(self.folder / "run.json"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}


def create_run(workdir: Workdir) -> Run:
    """Create the folder of a new run; names sort by time."""
    folder = workdir.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    # An NFS server that restarts repeats a call whose answer was lost: an existing folder of this name is the new one.
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder)
    try:
        run.update(status="running", **_identify_process(), started=time.time())
        run.reserve.write_bytes(os.urandom(RESERVE_BYTES))  # random: a file system could compress other bytes away
    except OSError:
        filesystem.remove_tree(folder)
        raise
    return run


def list_runs(workdir: Workdir) -> list[Run]:
    """Return the runs of a workdir, newest first. Does not create the folder."""
    runs = [Run(folder) for folder in workdir.runs.glob("*") if folder.is_dir()]
    return sorted(runs, key=lambda run: (run.name[:15], run.read().get("started", 0.0)), reverse=True)


def find_run(workdir: Workdir, name: str) -> Run:
    """Return a run.

    Args:
        workdir: the workdir in which names are looked up.
        name: the run's name, a unique prefix of it, `latest`, the path of a run's folder, or the path of a workdir, which
            stands for its newest run.

    Raises:
        UsageError: no run or several runs match; the message contains the names.
    """
    path = Path(name).absolute()
    if (path / "run.json").is_file():
        return Run(path)
    if Workdir(path).runs.is_dir():
        workdir, name = Workdir(path), "latest"
    runs = list_runs(workdir)
    missing = f"run {name} does not exist in {workdir.root}"
    if not runs:
        raise UsageError(missing, hint="Start a run with `tuneline run`, or choose another --workdir.")
    if name == "latest":
        return runs[0]
    matches = [run for run in runs if run.name.startswith(name)]
    found = [run for run in matches if run.name == name] or matches
    if len(found) == 1:
        return found[0]
    candidates = matches or runs
    names = ", ".join(run.name for run in candidates[:10]) + (" and older runs" if len(candidates) > 10 else "")
    if matches:
        raise UsageError(
            f"{name} is the prefix of {len(matches)} runs: {names}", hint="Use a longer prefix, or `latest`."
        )
    raise UsageError(f"{missing}; existing runs: {names}", hint="Use one of these names, or `latest`.")


def describe_error(error: BaseException, workdir: Workdir | None = None) -> dict[str, str]:
    """Return the JSON object of an error for run.json."""
    if isinstance(error, KeyboardInterrupt):
        error = InterruptedRunError("the run was interrupted", hint=RESUME_HINT)
    if not isinstance(error, TunelineError):
        known = translate_system_error(error, [workdir.root] if workdir else [])
        error = known or TunelineError(f"{type(error).__name__}: {error}")
    return error.as_dict()


def stop_steps(run: Run) -> InterruptedRunError:
    """Stop the running steps, and wait while they save their work; a second Ctrl-C or the timeout kills them.

    Returns:
        The error to raise. All descendants of this process have ended.
    """
    process_control.acknowledge_stop()
    try:
        run.update(stopping=time.time())
        # kfp's executor and its shell; a step stops its own children
        steps = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("kfp.dsl.executor_main" in part for part in child.cmdline()):
                    steps.append(child)
                    child.terminate()
        killed = bool(psutil.wait_procs(steps, timeout=STOP_GRACE_SECONDS)[1])
    except KeyboardInterrupt:
        process_control.acknowledge_stop()
        killed = True
    # Orphans become children of this process (process_control.adopt_orphans), so no descendant is left after this loop.
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=5)
    message = "the run was killed before it saved its last steps" if killed else "the run was interrupted"
    return InterruptedRunError(message, hint=RESUME_HINT)


def cancel_run(run: Run, *, on_wait: Callable[[float], None]) -> None:
    """Stop a run's process and wait until it and its descendants have ended.

    Args:
        on_wait: Called at each poll with the seconds waited so far.

    Raises:
        UsageError: the run is not running on this machine.
        TunelineError: the process does not end in time.
    """
    state = run.state
    holder = run.find_process() if state == "running" else None
    if holder is None:
        if state == "running" and (where := run.find_other_host()):
            raise UsageError(
                f"{run.name} runs on {where}, not on this machine", hint=f"Run the same command on {where}."
            )
        raise UsageError(
            f"{run.name} is not running; its state is {run.state}",
            hint="Run `tuneline status` to list the states of all runs.",
        )
    family = _list_family(holder)
    started = signalled = time.monotonic()
    _terminate(holder)
    while family := [member for member in family if _is_alive(member)]:
        waited = time.monotonic() - started
        if waited > STOP_GRACE_SECONDS + 2 * STOP_RESPONSE_SECONDS:
            raise TunelineError(
                f"process {holder.pid} of {run.name} did not end within {waited:.0f} seconds",
                hint=f"Kill the process with: kill -9 {holder.pid}",
            )
        if time.monotonic() - signalled > STOP_RESPONSE_SECONDS and "stopping" not in run.read():
            signalled = time.monotonic()
            _terminate(holder)  # Python drops a KeyboardInterrupt that is raised inside a destructor
        on_wait(waited)
        time.sleep(0.2)
        family = [*family, *(new for new in _list_family(holder) if new not in family)]


def _terminate(process: psutil.Process) -> None:
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        owner = process.username()
        raise TunelineError(
            f"cannot stop process {process.pid}, which belongs to {owner}", hint=f"Cancel the run as {owner}."
        ) from None


def _list_family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not: in a container, its parent may never reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def lock_workdir(workdir: Workdir) -> Iterator[None]:
    """Hold the workdir's lock for this process.

    The lock is a file with the holder's pid and start time, so a killed holder is recognized even if its pid is reused.
    A holder on another machine, or in another container, is considered alive while its heartbeat continues.

    Raises:
        UsageError: another live process holds the lock.
    """
    lock = workdir.root / LOCK_FILENAME
    workdir.root.mkdir(parents=True, exist_ok=True)
    draft = lock.with_name(f"{LOCK_DRAFT_PREFIX}.{job_folders.create_owner_tag()}")
    content = json.dumps({**_identify_process(), "token": secrets.token_hex(4)})
    try:
        draft.write_text(content, encoding="utf-8")
        for _ in range(3):
            try:
                filesystem.link(draft, lock)  # atomic: fails if the lock exists, and never exposes a partial file
                break
            except FileExistsError:
                holder = _read_holder(lock)
                if holder and holder.is_alive:
                    process = f"process {holder.pid}"
                    hint = "Wait for the run, cancel it with `tuneline cancel latest`, or use another --workdir."
                    if holder.where != liveness.identify_host():
                        seconds = max(holder.seconds_since_heartbeat, 0)
                        process += f" on {holder.where}, last heartbeat {seconds:.0f} seconds ago"
                        hint = (
                            "Wait for the run, or use another --workdir; the lock of a killed run expires "
                            f"{HEARTBEAT_TIMEOUT_SECONDS:.0f} seconds after its last heartbeat."
                        )
                    raise UsageError(f"another run ({process}) holds {workdir.root}", hint=hint) from None
                _remove_lock(lock, lambda taken: (other := _read_holder(taken)) is None or not other.is_alive)
        else:
            raise UsageError(
                f"cannot lock {workdir.root}: other processes compete for {lock}", hint="Run the command again."
            )
    finally:
        draft.unlink(missing_ok=True)
    for prefix in (LOCK_DRAFT_PREFIX, REMOVED_LOCK_PREFIX):  # left by killed processes
        for path in workdir.root.glob(f"{prefix}.*.*.*"):
            if job_folders.is_abandoned(path, prefix):
                path.unlink(missing_ok=True)
    try:
        with liveness.heartbeat(lock):
            yield
    finally:  # if this process was suspended for long, another one may have taken the lock
        _remove_lock(lock, lambda taken: filesystem.read_text(taken) == content)


def _identify_process() -> Values:
    return {"pid": os.getpid(), "process_started": psutil.Process().create_time(), "where": liveness.identify_host()}


def _remove_lock(lock: Path, is_unwanted: Callable[[Path], bool]) -> None:
    """Remove a lock, unless another process has taken it since it was checked."""
    private = lock.with_name(f"{REMOVED_LOCK_PREFIX}.{job_folders.create_owner_tag()}")
    with contextlib.suppress(FileNotFoundError):
        filesystem.rename(lock, private)
        if not is_unwanted(private):
            with contextlib.suppress(FileExistsError):
                filesystem.link(private, lock)
        private.unlink()


@dataclass(frozen=True)
class _LockHolder:
    """The process that holds a lock. On another machine, it is considered alive while its heartbeat is recent."""

    pid: int
    where: str
    is_alive: bool
    seconds_since_heartbeat: float


def _read_holder(lock: Path) -> _LockHolder | None:
    """Return the holder of a lock, alive or not; None if the lock is missing or unreadable."""
    try:
        values = json.loads(filesystem.read_text(lock))
        pid, started, where = values["pid"], values["process_started"], values["where"]
        if where == liveness.identify_host():
            return _LockHolder(pid, where, _find_process(pid, started) is not None, 0.0)
        seconds = liveness.seconds_since_heartbeat(lock)
        return _LockHolder(pid, where, seconds < HEARTBEAT_TIMEOUT_SECONDS, seconds)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_process(pid: object, started: object) -> psutil.Process | None:
    """Return the live process with this pid and start time; a reused pid has another start time."""
    if not isinstance(pid, int) or not isinstance(started, (int, float)):
        return None
    try:
        process = psutil.Process(pid)
        return process if _is_alive(process) and abs(process.create_time() - started) < 1 else None
    except (ValueError, psutil.Error):
        return None
