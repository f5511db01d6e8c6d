"""The launchers `trainjob` and `rayjob`: a training as a TrainJob of Kubeflow Trainer or a RayJob of KubeRay.

The launcher finds a job by its label, and deletes the object of an ended job; the outcome is in the job folder. With a
queue, Kueue may suspend a job and resume it later: the new pods resume from the last checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar

from components.common.artifacts import artifact_folder
from components.common.launch import (
    OUTCOME_FILENAME,
    Command,
    JobStatus,
    JsonObject,
    delete_outcomes,
    list_node_logs,
    read_json_object,
)
from components.common.launch.kubernetes import job_conditions, job_manifests, kubernetes_client
from components.common.launch.kubernetes.job_manifests import FOLDER_ANNOTATION, JOB_LABEL
from components.common.launch.kubernetes.kubernetes_client import RAYJOB, KubernetesClient, ResourceKind, RetryableError
from components.common.launch.launcher_settings import LauncherSettings, resolve_folder
from components.common.launch.ray import ray_entrypoint
from components.common.runtime.errors import BusyError, TunelineError

Answer = TypeVar("Answer")
ATTEMPTS_FILENAME = "tries.json"
WORKLOAD_KINDS = tuple(
    ResourceKind("kueue.x-k8s.io", version, "workloads", "Workload", "Kueue") for version in ("v1beta2", "v1beta1")
)
DELETE_TIMEOUT_SECONDS = 60.0  # for deleting an ended job


class Attempts(TypedDict):
    """The content of ATTEMPTS_FILENAME: the number of jobs, and the names of kept jobs whose outcome was read."""

    count: int
    read: list[str]


def log(text: str) -> None:
    """Print a line to the step's log, for calls without a reporter."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class KubernetesLauncher:
    """The launchers `trainjob` and `rayjob`."""

    settings: LauncherSettings
    client: KubernetesClient
    poll_interval_seconds: float
    max_resumes: int

    @property
    def kind(self) -> ResourceKind:
        """The resource of this launcher's jobs.

        Raises:
            TypeError: the settings select another launcher.
        """
        if self.settings.entry.resource is None:
            raise TypeError(f"launcher.kind is {self.settings.kind}; expected trainjob or rayjob")
        return self.settings.entry.resource

    def start(self, command: Command, folder: Path) -> KubernetesJob:
        """Start a job after the folder's earlier jobs have ended, because two jobs would write to the same folder.

        Raises:
            ConfigurationError: the settings or the manifest are invalid.
            AccessError: the service account lacks a right.
            BusyError: an earlier job does not end within its grace period plus the retry timeout.
            EngineMissingError: the cluster has no such resource kind.
            UnresponsiveError: the API server does not answer.
        """
        job_manifests.check_settings(self.settings, folder)
        self._wait_for_others(folder)
        delete_outcomes(folder)  # of jobs that ended while this call waited
        ray_entrypoint.reset_folder(folder)
        key = job_manifests.compute_job_key(self.settings, folder)
        build = job_manifests.build_rayjob if self.kind is RAYJOB else job_manifests.build_trainjob
        while True:
            attempt = 1 + max([_read_attempts(folder)["count"], *map(_get_attempt, self._list_jobs(folder))])
            name = job_manifests.build_job_name(key, attempt)
            body, is_created = build(self.settings, command, folder, name), True
            try:
                self.retry(partial(self.client.create, self.kind, body))
            except kubernetes_client.ConflictError:  # perhaps created by a call whose answer was lost
                existing = self.retry(partial(self.client.get, self.kind, name))
                is_created = bool(existing and _belongs_to(existing, folder) and not _is_deleting(existing))
            _record_attempt(folder, count=attempt)
            if is_created:
                return KubernetesJob(name, self, folder)

    def find(self, folder: Path) -> KubernetesJob | None:
        """Return the folder's newest job that is not being deleted and whose outcome was not read, or None.

        Raises:
            ConfigurationError: the settings are invalid.
            UnresponsiveError: the API server did not answer for the retry timeout of the settings.
        """
        job_manifests.check_settings(self.settings, folder)
        read = _read_attempts(folder)["read"]
        names = [job["metadata"]["name"] for job in self._list_jobs(folder) if not _is_deleting(job)]
        unread = [name for name in names if name not in read]
        return KubernetesJob(unread[-1], self, folder) if unread else None

    def retry(self, call: Callable[[], Answer]) -> Answer:
        """Repeat a call while it raises RetryableError, within the retry timeout of the settings.

        Raises:
            UnresponsiveError: the API server did not answer for the retry timeout.
        """
        return kubernetes_client.retry(call, self.settings.patience_seconds, self.poll_interval_seconds, log)

    def _list_jobs(self, folder: Path) -> list[JsonObject]:
        """Return the jobs of this folder, the newest last."""
        selector = f"{JOB_LABEL}={job_manifests.compute_job_key(self.settings, folder)}"
        jobs = self.retry(lambda: self.client.list_by_label(self.kind, selector))
        return sorted((job for job in jobs if _belongs_to(job, folder)), key=_get_attempt)

    def _wait_for_others(self, folder: Path) -> None:
        """Wait for jobs that are being deleted, for at most their grace period plus the retry timeout."""
        save_seconds = job_manifests.get_pod_settings(self.settings).save_seconds + job_manifests.EXIT_GRACE_SECONDS
        deadline, is_logged = time.monotonic() + save_seconds + self.settings.patience_seconds, False
        while deleting := [job["metadata"]["name"] for job in self._list_jobs(folder) if _is_deleting(job)]:
            if time.monotonic() > deadline:
                command = f"kubectl describe {self.kind.plural} {deleting[0]}"
                hint = f"Run `{command}` for the cause, often an unreachable node."
                limit = f"{save_seconds + self.settings.patience_seconds:.0f} s"
                raise BusyError(f"{deleting[0]} is being deleted, but has not ended within {limit}", hint=hint)
            if not is_logged:
                log(f"{deleting[0]} is still being deleted; the next job starts afterwards")
                is_logged = True
            time.sleep(self.poll_interval_seconds)


@dataclass
class KubernetesJob:
    """A started TrainJob or RayJob."""

    name: str
    launcher: KubernetesLauncher
    folder: Path
    _status: JobStatus = field(default_factory=lambda: JobStatus("waiting"))
    _unresponsive_since: float | None = None
    _unreadable: set[str] = field(default_factory=set)  # resources that the service account may not read
    _uid: str = ""

    def poll(self) -> JobStatus:
        """Return the current status; while the API server does not answer, the last known status.

        Raises:
            UnresponsiveError: the API server did not answer for the retry timeout of the settings.
        """
        try:
            job = self.launcher.client.get(self.launcher.kind, self.name)
            self._unresponsive_since = None
            self._status = self._read_status(job)
        except RetryableError as error:
            now, timeout_seconds = time.monotonic(), self.launcher.settings.patience_seconds
            self._unresponsive_since = self._unresponsive_since or now
            if now - self._unresponsive_since >= timeout_seconds:
                raise kubernetes_client.build_unresponsive_error(error, timeout_seconds) from None
            return JobStatus(self._status.state, f"{error.reason}; retrying for {timeout_seconds:.0f} seconds")
        return self._status

    def request_stop(self) -> None:
        """Delete the job. Its pods receive SIGTERM and have the grace period to save.

        Raises:
            UnresponsiveError: the API server did not answer for the retry timeout of the settings.
        """
        if self.launcher.kind is RAYJOB:
            ray_entrypoint.request_stop(self.folder, "save")  # so that lost nodes are not replaced
        self.launcher.retry(lambda: self.launcher.client.delete(self.launcher.kind, self.name))

    def cancel(self) -> None:
        """Delete the job, or keep it if it has ended and `keep` is set. A failed deletion is logged, not raised."""
        launcher = self.launcher
        has_ended = self._status.state in ("succeeded", "failed", "ended")
        if has_ended and job_manifests.get_pod_settings(launcher.settings).keep:
            _record_attempt(self.folder, read=self.name)
            return
        timeout_seconds = min(DELETE_TIMEOUT_SECONDS, launcher.settings.patience_seconds)
        delete = partial(launcher.client.delete, launcher.kind, self.name)
        try:
            kubernetes_client.retry(delete, timeout_seconds, launcher.poll_interval_seconds, log)
        except TunelineError as error:
            command = f"kubectl delete {launcher.kind.plural} {self.name} -n {launcher.client.namespace}"
            log(f"{self.name} could not be deleted: {error.message}. Delete it with: {command}")

    def list_logs(self) -> list[Path]:
        """Return the paths of the logs of torchrun and of each process's standard error, ordered by node and rank."""
        return list_node_logs(self.folder)

    def _read_status(self, job: JsonObject | None) -> JobStatus:
        if job is None or (self._uid and job["metadata"].get("uid") != self._uid):
            return self._read_deleted_status()
        self._uid = str(job["metadata"].get("uid", ""))
        is_ray = self.launcher.kind is RAYJOB
        read = job_conditions.read_rayjob_status if is_ray else job_conditions.read_trainjob_status
        status = read(job, None, [])
        if _is_deleting(job):
            if status.state in ("succeeded", "failed"):
                return status
            return JobStatus("running", "the job is being deleted; its pods are saving their work")
        if status.state == "failed":
            return read(job, None, self._list_pods(job))
        if status.state == "waiting":
            pods = self._list_pods(job)
            status = read(job, self._find_workload(), pods)
            is_suspended = (job.get("spec") or {}).get("suspend")
            if status.state == "waiting" and not pods and not is_suspended and (warning := self._find_warning()):
                return JobStatus("waiting", warning)
        return status

    def _read_deleted_status(self) -> JobStatus:
        """Return "succeeded" if the training wrote a result before its object was deleted."""
        outcome = read_json_object(self.folder / OUTCOME_FILENAME) or {"error": {}}
        return JobStatus("cancelled", "the job was deleted") if "error" in outcome else JobStatus("succeeded")

    def _find_workload(self) -> JsonObject | None:
        """Return Kueue's Workload of this job, or None."""
        if not job_manifests.get_pod_settings(self.launcher.settings).queue:
            return None
        selector = f"kueue.x-k8s.io/job-uid={self._uid}"
        for kind in WORKLOAD_KINDS:
            list_workloads = partial(self.launcher.client.list_by_label, kind, selector)
            if workloads := self._read_if_permitted(kind.version, list_workloads):
                return workloads[-1]
        return None

    def _list_pods(self, job: JsonObject) -> list[JsonObject]:
        selector = f"jobset.sigs.k8s.io/jobset-name={self.name}"
        if self.launcher.kind is RAYJOB:
            cluster = (job.get("status") or {}).get("rayClusterName")
            if not cluster:
                return []
            selector = f"ray.io/cluster={cluster}"
        return self._read_if_permitted("pods", partial(self.launcher.client.list_pods, selector))

    def _find_warning(self) -> str:
        """Return the newest warning about the job, or about the JobSet of the same name."""
        events = self._read_if_permitted("events", partial(self.launcher.client.list_events, self.name))
        warnings = [event for event in events if event.get("type") == "Warning"]
        if not warnings:
            return ""
        newest = max(warnings, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
        return f"{newest.get('reason', '')}: {newest.get('message', '')}"

    def _read_if_permitted(self, resource: str, read: Callable[[], list[JsonObject]]) -> list[JsonObject]:
        """Return the result of `read`, or an empty list without permission; do not repeat a forbidden read."""
        if resource in self._unreadable:
            return []
        try:
            return read()
        except TunelineError:
            self._unreadable.add(resource)
            return []


def connect_launcher(settings: LauncherSettings) -> KubernetesLauncher:
    """Return the launcher for the configured cluster.

    Raises:
        EngineMissingError: no cluster is configured.
    """
    client = kubernetes_client.connect(job_manifests.get_pod_settings(settings).namespace)
    return KubernetesLauncher(settings, client, settings.looks_every, settings.resumes)


def _belongs_to(job: JsonObject, folder: Path) -> bool:
    return (job["metadata"].get("annotations") or {}).get(FOLDER_ANNOTATION) == str(resolve_folder(folder))


def _get_attempt(job: JsonObject) -> int:
    return int(str(job["metadata"]["name"]).rpartition("-")[2])


def _is_deleting(job: JsonObject) -> bool:
    return bool(job["metadata"].get("deletionTimestamp"))


def _read_attempts(folder: Path) -> Attempts:
    content = read_json_object(folder / ATTEMPTS_FILENAME)
    return {"count": content.get("count", 0), "read": content.get("read", [])}


def _record_attempt(folder: Path, *, count: int = 0, read: str = "") -> None:
    attempts = _read_attempts(folder)
    updated = {"count": max(count, attempts["count"]), "read": [*attempts["read"], *([read] if read else [])]}
    artifact_folder.write_atomically(folder / ATTEMPTS_FILENAME, json.dumps(updated))
