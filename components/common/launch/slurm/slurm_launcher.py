"""The launcher `slurm`: a training run as a batch job, or the recipes of a sweep as the tasks of a job array.

The launcher finds a batch job by its name, a digest of the job folder. The folder of an array's task contains a record
of the array and the task.
"""

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

from components.common.artifacts import artifact_folder, hashing
from components.common.launch import (
    ACTIVE_STATES,
    OUTCOME_FILENAME,
    STOP_FILENAME,
    Command,
    JobStatus,
    UnresponsiveError,
    list_node_logs,
    read_json_object,
)
from components.common.launch.launcher_settings import LauncherSettings, resolve_folder
from components.common.launch.slurm import batch_script
from components.common.launch.slurm.job_records import JobRecord
from components.common.launch.slurm.slurm_client import SlurmClient
from components.common.runtime import filesystem
from components.common.runtime.errors import EXIT_INTERRUPTED

SCRIPT_FILENAME, RECORD_FILENAME, ARRAY_FILENAME = "job.sh", "slurm.json", "array.json"
MAX_UNKNOWN_POLLS = 3  # without a record of the job in Slurm; its outcome may become visible late over NFS
CANCEL_TIMEOUT_SECONDS = 30.0
RETRY_INTERVALS_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)  # the last interval repeats
Answer = TypeVar("Answer")


def build_job_name(folder: Path) -> str:
    """Return the name of a folder's job, unique to the folder."""
    return f"tuneline-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


@dataclass
class SlurmLauncher:
    """Launcher of batch jobs. The batch script requeues a job that saved its work; `launch.run` does not restart it."""

    settings: LauncherSettings
    client: SlurmClient
    max_resumes: int = 0

    @property
    def poll_interval_seconds(self) -> float:
        """Seconds between two polls; all users share one controller."""
        return self.settings.looks_every

    def start(self, command: Command, folder: Path) -> SlurmJob:
        """Submit a batch job. After a lost answer, search for the job before submitting it again.

        Raises:
            ConfigurationError: the site's batch script template is invalid.
            RefusedError: Slurm rejects the job.
            UnresponsiveError: Slurm did not answer for the retry timeout of the settings.
        """
        folder = resolve_folder(folder)
        for name in (STOP_FILENAME, ARRAY_FILENAME, RECORD_FILENAME):
            (folder / name).unlink(missing_ok=True)
        name = build_job_name(folder)
        options = batch_script.build_options(name, folder, command.nodes, self.settings.slurm)
        job = self._submit(folder, options, command.nodes)
        return _record(SlurmJob(job, name, folder, folder, self.client, self.settings))

    def start_all(
        self, commands: Mapping[Path, Command], array_folder: Path, max_parallel: int
    ) -> dict[Path, SlurmJob]:
        """Submit commands as the tasks of one array.

        Args:
            commands: the commands by job folder, all for the same number of nodes.
            array_folder: folder of the batch script, the list of tasks and the logs of the array.
            max_parallel: maximum number of tasks that run at once.

        Returns:
            The jobs by job folder.

        Raises:
            ConfigurationError: the site's batch script template is invalid.
            RefusedError: Slurm rejects the array.
            UnresponsiveError: Slurm did not answer for the retry timeout of the settings.
        """
        array_folder, folders = resolve_folder(array_folder), [resolve_folder(folder) for folder in commands]
        nodes = next(iter(commands.values())).nodes
        array_folder.mkdir(parents=True, exist_ok=True)
        name = build_job_name(array_folder / hashing.digest([str(folder) for folder in folders]))
        for task, folder in enumerate(folders):
            for filename in (STOP_FILENAME, RECORD_FILENAME):
                (folder / filename).unlink(missing_ok=True)
            record = json.dumps({"name": name, "place": str(array_folder), "task": task})
            artifact_folder.write_atomically(folder / ARRAY_FILENAME, record)
        tasks = "".join(f"{folder}\n" for folder in folders)
        artifact_folder.write_atomically(batch_script.get_tasks_path(array_folder, name), tasks)
        array = f"0-{len(folders) - 1}%{max_parallel}"
        options = batch_script.build_options(name, array_folder, nodes, self.settings.slurm, array)
        job = self._submit(array_folder, options, nodes)
        client = share_client(name, self.client, self.poll_interval_seconds)
        return {
            key: _record(SlurmJob(f"{job}_{task}", name, folder, array_folder, client, self.settings))
            for task, (key, folder) in enumerate(zip(commands, folders, strict=True))
        }

    def find(self, folder: Path) -> SlurmJob | None:
        """Return the folder's active job, or an ended job with an unread outcome, else None.

        Raises:
            RefusedError: Slurm rejects the call.
            UnresponsiveError: Slurm did not answer for the retry timeout of the settings.
        """
        folder = resolve_folder(folder)
        try:
            array = json.loads(filesystem.read_text(folder / ARRAY_FILENAME))
            name, log_folder, suffix = array["name"], Path(array["place"]), f"_{array['task']}"
            client: SlurmClient | SharedClient = share_client(name, self.client, self.poll_interval_seconds)
        except FileNotFoundError:
            name, log_folder, suffix, client = build_job_name(folder), folder, "", self.client
        known = [job for job in self._retry(lambda: self.client.list_jobs(name)) if job.id.endswith(suffix)]
        if active := [job.id for job in known if not job.has_ended]:
            (folder / STOP_FILENAME).unlink(missing_ok=True)  # of an earlier call whose job did not end
            return _record(SlurmJob(active[-1], name, folder, log_folder, client, self.settings))
        outcome = read_json_object(folder / OUTCOME_FILENAME)
        if not outcome or outcome.get("exit_code") == EXIT_INTERRUPTED:  # running the command again resumes the work
            return None
        try:
            job_id = str(json.loads(filesystem.read_text(folder / RECORD_FILENAME))["job"])
        except FileNotFoundError:  # the submitting process was killed before it recorded the id
            job_id = known[-1].id if known else ""
        return SlurmJob(job_id, name, folder, log_folder, client, self.settings)

    def _submit(self, folder: Path, options: dict[str, str], nodes: int) -> str:
        """Write the batch script and submit it; return the job's id."""
        script, name = folder / SCRIPT_FILENAME, options["job-name"]
        artifact_folder.write_atomically(script, batch_script.render_script(options, folder, nodes, self.settings))
        known = {job.id for job in self._retry(lambda: self.client.list_jobs(name))}

        def submit_once() -> str:
            new = [job.id for job in self.client.list_jobs(name) if job.id not in known]
            return new[-1].split("_")[0] if new else self.client.submit(script)

        return self._retry(submit_once)

    def _retry(self, call: Callable[[], Answer]) -> Answer:
        return retry(call, self.settings.patience_seconds)


@dataclass
class SharedClient:
    """Client that the watchers of an array's tasks share; it caches the list of jobs for `seconds`."""

    client: SlurmClient
    seconds: float
    _jobs: list[JobRecord] = field(default_factory=list)
    _error: UnresponsiveError | None = None
    _expires_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def list_jobs(self, name: str) -> list[JobRecord]:
        """Return the cached list of jobs, or raise the cached error; call the client if the cache has expired.

        Errors are cached too: otherwise the watchers would wait for the timeout one after another.

        Raises:
            UnresponsiveError: Slurm did not answer the last call.
        """
        with self._lock:
            if time.monotonic() >= self._expires_at:
                try:
                    self._jobs, self._error = self.client.list_jobs(name), None
                except UnresponsiveError as error:
                    self._error = error
                self._expires_at = time.monotonic() + self.seconds
            if self._error:
                raise UnresponsiveError(self._error.message, hint=self._error.hint)
            return self._jobs

    def list_accounted(self, job: str) -> list[JobRecord]:
        """Return the client's accounting records of a job."""
        return self.client.list_accounted(job)

    def cancel(self, job: str, signal: str = "") -> None:
        """Cancel a job, or send its steps a signal, through the client."""
        self.client.cancel(job, signal)


_shared_clients: WeakValueDictionary[str, SharedClient] = WeakValueDictionary()  # kept alive by the jobs that use them


def share_client(array: str, client: SlurmClient, seconds: float) -> SharedClient:
    """Return the client that all watchers of this array in this process share.

    Args:
        array: the array's job name in Slurm.
        client: calls Slurm if the array has no shared client yet.
        seconds: validity of the cached list of jobs, in seconds.
    """
    return _shared_clients.setdefault(array, SharedClient(client, seconds))


def _record(job: SlurmJob) -> SlurmJob:
    artifact_folder.write_atomically(job.folder / RECORD_FILENAME, json.dumps({"job": job.id}))
    return job


def retry(call: Callable[[], Answer], timeout_seconds: float) -> Answer:
    """Repeat a call while it raises UnresponsiveError.

    Raises:
        UnresponsiveError: the calls failed for `timeout_seconds`.
    """
    deadline, intervals = time.monotonic() + timeout_seconds, iter(RETRY_INTERVALS_SECONDS)
    while True:
        try:
            return call()
        except UnresponsiveError as error:
            interval = next(intervals, RETRY_INTERVALS_SECONDS[-1])
            if time.monotonic() + interval > deadline:
                hint = "Rerun the command when Slurm is available again; a submitted job continues."
                message = f"Slurm has not answered for {timeout_seconds:.0f} s: {error.message}"
                raise UnresponsiveError(message, hint=hint) from None
            time.sleep(interval)


@dataclass
class SlurmJob:
    """A batch job, or a task of an array. `id` is empty if only the outcome exists. Slurm logs to `log_folder`."""

    id: str
    job_name: str
    folder: Path
    log_folder: Path
    client: SlurmClient | SharedClient
    settings: LauncherSettings
    _unresponsive_since: float | None = None
    _unknown_polls: int = 0
    _last: JobStatus = field(default_factory=lambda: JobStatus("waiting"))

    @property
    def name(self) -> str:
        """The job's id, as in squeue."""
        return f"Slurm job {self.id}".strip()

    def poll(self) -> JobStatus:
        """Return the status from the controller, the accounting or the outcome.

        While Slurm does not answer, return the last known status.

        Raises:
            UnresponsiveError: Slurm did not answer for the retry timeout of the settings.
        """
        try:
            records = [job for job in self.client.list_jobs(self.job_name) if job.id == self.id] if self.id else []
            if self.id and not records:
                records = self.client.list_accounted(self.id)
        except UnresponsiveError as error:
            now = time.monotonic()
            self._unresponsive_since = self._unresponsive_since or now
            if now - self._unresponsive_since > self.settings.patience_seconds:
                raise
            return JobStatus(self._last.state, f"Slurm does not answer ({error.message})")
        self._unresponsive_since = None
        if records:
            self._last = records[0].status
            return self._last
        # Without accounting, Slurm deletes the record of a job minutes after its end (MinJobAge).
        self._unknown_polls += 1
        if (self.folder / OUTCOME_FILENAME).exists():
            self._last = JobStatus("succeeded", "Slurm has no record of the job, but its outcome is stored")
        elif self._unknown_polls < MAX_UNKNOWN_POLLS:
            self._last = JobStatus("running", "Slurm has no record of the job")
        else:
            self._last = JobStatus("ended", "Slurm has no record of the job, and no outcome is stored")
        return self._last

    def request_stop(self) -> None:
        """Request once that the training saves and ends without being requeued; the caller repeats the request.

        Raises:
            UnresponsiveError: the job waits, and cancelling the job failed because Slurm did not answer.
        """
        (self.folder / STOP_FILENAME).touch()
        if self._last.state == "running":
            with suppress(UnresponsiveError):
                self.client.cancel(self.id, "TERM")
        else:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the job if it is active.

        Raises:
            UnresponsiveError: Slurm did not answer for the retry timeout of the settings, at most 30 seconds.
        """
        if self.id and self._last.state in ACTIVE_STATES:
            (self.folder / STOP_FILENAME).touch()
            timeout_seconds = min(self.settings.patience_seconds, CANCEL_TIMEOUT_SECONDS)
            retry(lambda: self.client.cancel(self.id), timeout_seconds)

    def list_logs(self) -> list[Path]:
        """Return the paths of the logs of the batch script and of the processes."""
        return [self.log_folder / f"slurm-{self.id}.log", *list_node_logs(self.folder)]
