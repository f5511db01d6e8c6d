"""The launchers `trainjob` and `rayjob`: a training run as a TrainJob of Kubeflow Trainer or a RayJob of KubeRay.

The launcher finds a job and its pods by their labels, and deletes the object of an ended job; the outcome is in the job
folder. With a queue, Kueue may suspend a job and resume it later: the new pods resume from the last checkpoint.
"""

# A deletion in the background removes the object at once and leaves pods that still save.
# So a job ends when its pods have ended, and the next job starts after the pods of all earlier jobs.

from __future__ import annotations

import json
import math
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
from components.common.launch.kubernetes.job_manifests import FOLDER_ANNOTATION, JOB_LABEL, NAME_LABEL
from components.common.launch.kubernetes.kubernetes_client import (
    RAYJOB,
    AccessError,
    KubernetesClient,
    ResourceKind,
    RetryableError,
)
from components.common.launch.launcher_settings import LauncherSettings, resolve_folder
from components.common.launch.ray import ray_entrypoint
from components.common.runtime.errors import BusyError, TunelineError

Answer = TypeVar("Answer")
ATTEMPTS_FILENAME = "tries.json"
WORKLOAD_KINDS = tuple(
    ResourceKind("kueue.x-k8s.io", version, "workloads", "Workload", "Kueue") for version in ("v1beta2", "v1beta1")
)
WORKLOADS = "workloads"
QUEUE_TIMEOUT_SECONDS = 10.0  # for Kueue to create the Workload of a job
DELETE_TIMEOUT_SECONDS = 60.0  # for deleting an ended job
# An API server that has just started refuses calls for seconds, until it has read all roles and their bindings.
MAX_REFUSED_SECONDS, REPEAT_REFUSED_SECONDS = 60.0, 10.0


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

    @property
    def grace_seconds(self) -> float:
        """Seconds that a pod has to save and exit."""
        return job_manifests.get_pod_settings(self.settings).save_seconds + job_manifests.EXIT_GRACE_SECONDS

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

    def list_active_pods(self, selector: str) -> list[JsonObject] | None:
        """Return the pods of a label selector that have not ended, or None without permission."""
        try:
            pods = self.client.list_pods(selector)
        except AccessError:
            return None
        return [pod for pod in pods if not job_conditions.has_pod_ended(pod)]

    def _wait_for_others(self, folder: Path) -> None:
        """Wait for pods of earlier jobs, and for jobs that are being deleted, up to grace period plus retry timeout."""
        timeout_seconds = self.grace_seconds + self.settings.patience_seconds
        deadline, is_logged = time.monotonic() + timeout_seconds, False
        selector = f"{JOB_LABEL}={job_manifests.compute_job_key(self.settings, folder)}"
        while True:
            jobs = self._list_jobs(folder)
            names = [job["metadata"]["name"] for job in jobs]
            waiting = [f"{self.kind.plural} {job['metadata']['name']}" for job in jobs if _is_deleting(job)]
            waiting += [
                f"pods {pod['metadata']['name']}"
                for pod in self.retry(partial(self.list_active_pods, selector)) or []
                if pod["metadata"]["labels"].get(NAME_LABEL) not in names or _is_deleting(pod)  # of a kept job
            ]
            if not waiting:
                return
            kind, name = waiting[0].split()
            if time.monotonic() > deadline:
                hint = f"Run `kubectl describe {kind} {name}` to find the cause, often an unreachable node."
                raise BusyError(
                    f"{name} is being deleted, but has not terminated within {timeout_seconds:.0f} s", hint=hint
                )
            if not is_logged:
                log(f"{name} is still being deleted; the next job starts afterwards")
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
    _deleted_since: float | None = None
    _unqueued_since: float | None = None
    _refused_since: float | None = None
    _unreadable: dict[str, float] = field(default_factory=dict)  # when the API server refused to list a resource
    _uid: str = ""
    _pods: set[str] = field(default_factory=set)  # names of the pods that exist or existed
    _disruption: str = ""  # the first removal of a pod by the cluster or a user
    _lost_nodes: dict[str, str] = field(default_factory=dict)  # why a node may be lost, or "", by the name of its pod
    _has_failed_pod: bool = False  # a pod failed by itself, before any was removed

    def poll(self) -> JobStatus:
        """Return the current status; while the API server does not answer or refuses the call, the last known status.

        Raises:
            UnresponsiveError: the API server did not answer for the retry timeout of the settings.
            AccessError: the service account has no right to read the job, or no longer for MAX_REFUSED_SECONDS.
        """
        try:
            job = self.launcher.client.get(self.launcher.kind, self.name)
            self._status = self._read_status(job)
            self._unresponsive_since = self._refused_since = None
        except AccessError as error:
            self._refused_since = self._refused_since or time.monotonic()
            if not self._uid or time.monotonic() - self._refused_since >= MAX_REFUSED_SECONDS:
                raise
            return JobStatus(self._status.state, f"{error.message}; retrying for {MAX_REFUSED_SECONDS:.0f} seconds")
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
        if status.state == "succeeded":
            return status
        pods = self._list_pods()
        if status.state in ("running", "failed"):
            return self._record_disruption(status, pods)
        if status.state == "waiting":
            workload = self._find_workload()
            status = read(job, workload, pods or [])
            if (job.get("spec") or {}).get("suspend"):
                self._pods, self._disruption = set(), ""  # Kueue removed the pods, and will create new ones
                self._lost_nodes = {}
                settings = job_manifests.get_pod_settings(self.launcher.settings)
                if not settings.queue or workload or WORKLOADS in self._unreadable:
                    self._unqueued_since = None
                    return status
                self._unqueued_since = self._unqueued_since or time.monotonic()
                if time.monotonic() - self._unqueued_since > QUEUE_TIMEOUT_SECONDS:
                    rest = (
                        f" and the WorkloadPriorityClass {settings.priority} exist" if settings.priority else " exists"
                    )
                    reason = f"Kueue has not queued the job; check that the LocalQueue {settings.queue}{rest}"
                    return JobStatus("waiting", reason)
            else:
                disrupted = self._record_disruption(status, pods)  # the pods may run before the job's status says so
                if status.state == "waiting":
                    if status.reason not in (job_conditions.PODS_STARTING, job_conditions.PODS_MISSING):
                        return status
                    if warning := self._find_warning(job):
                        return JobStatus("waiting", warning)
                return disrupted if disrupted.reason else status
        return status

    def _record_disruption(self, status: JobStatus, pods: list[JsonObject] | None) -> JobStatus:
        """Remember why a pod was removed; after a failure, return "ended" if this was the cause.

        The conditions of evicted pods are read while the job runs, because Kubernetes deletes these pods. Once a pod has
        failed by itself, the removal of the others is a consequence.
        """
        self._lost_nodes |= {pod["metadata"]["name"]: job_conditions.find_lost_node(pod) for pod in pods or []}
        if pods is not None and not self._disruption:
            names = {pod["metadata"]["name"] for pod in pods}
            self._has_failed_pod = self._has_failed_pod or any(map(job_conditions.has_failed_by_itself, pods))
            causes = [*filter(None, map(job_conditions.find_disruption, pods))]
            # KubeRay deletes the pods of every ended RayJob.
            if not self._has_failed_pod and not (status.state == "failed" and self.launcher.kind is RAYJOB):
                removed = {pod["metadata"]["name"] for pod in pods if _is_deleting(pod)} | (self._pods - names)
                causes += [f"the pod {name} was deleted" for name in sorted(removed)]
            self._disruption = next(iter(causes), "")
            self._pods |= names
        cause = self._disruption or next(filter(None, self._lost_nodes.values()), "")
        if status.state == "failed":
            if kill := next(filter(None, map(job_conditions.find_memory_kill, pods or [])), ""):
                return JobStatus("failed", kill)
            return JobStatus("ended", cause) if cause else status
        return JobStatus("running", cause)

    def _read_deleted_status(self) -> JobStatus:
        """Return "running" while pods still save, then "succeeded" if the training wrote a result.

        Pods on an unreachable node never end, so they are awaited for their grace period plus the retry timeout. Without
        permission to list pods, they are given their grace period, unless they write an outcome earlier.
        """
        self._deleted_since = self._deleted_since or time.monotonic()
        seconds, grace_seconds = time.monotonic() - self._deleted_since, self.launcher.grace_seconds
        pods = self.launcher.list_active_pods(f"{NAME_LABEL}={self.name}")
        outcome = read_json_object(self.folder / OUTCOME_FILENAME)
        may_save = not outcome and seconds < grace_seconds if pods is None else bool(pods)
        if may_save and seconds < grace_seconds + self.launcher.settings.patience_seconds:
            return JobStatus("running", "the job was deleted; its pods are saving their work")
        outcome = outcome or {"error": {}}
        return JobStatus("cancelled", "the job was deleted") if "error" in outcome else JobStatus("succeeded")

    def _find_workload(self) -> JsonObject | None:
        """Return Kueue's Workload of this job, or None."""
        if not job_manifests.get_pod_settings(self.launcher.settings).queue:
            return None
        selector = f"kueue.x-k8s.io/job-uid={self._uid}"
        for kind in WORKLOAD_KINDS:
            list_workloads = partial(self.launcher.client.list_by_label, kind, selector)
            if workloads := self._read_if_possible(WORKLOADS, list_workloads):
                return workloads[-1]
        return None

    def _list_pods(self) -> list[JsonObject] | None:
        """Return the pods of the job, or None if they cannot be read."""
        return self._read_if_possible("pods", partial(self.launcher.client.list_pods, f"{NAME_LABEL}={self.name}"))

    def _find_warning(self, job: JsonObject) -> str:
        """Return the newest event about the job or the objects that create its pods if it is a warning, else ""."""
        # A TrainJob and its JobSet have the same name; a RayJob has a RayCluster.
        children = (f"{self.name}-{job_manifests.TRAINER_CONTAINER}-0", (job.get("status") or {}).get("rayClusterName"))
        events = [
            event
            for name in filter(None, (self.name, *children))
            for event in self._read_if_possible("events", partial(self.launcher.client.list_events, name)) or []
        ]

        def get_order(event: JsonObject) -> tuple[str, bool]:
            """Return the time in whole seconds, and whether the event is a warning, which counts as later in its second."""
            last = (event.get("series") or {}).get("lastObservedTime") or event.get("lastTimestamp")
            return str(last or event.get("eventTime") or "")[:19], event.get("type") == "Warning"

        newest = max(events, key=get_order, default={})
        is_warning = newest.get("type") == "Warning"
        return f"{newest.get('reason', '')}: {newest.get('message', '')}" if is_warning else ""

    def _read_if_possible(self, resource: str, read: Callable[[], list[JsonObject]]) -> list[JsonObject] | None:
        """Return the result of `read`, or None; rarely repeat a refused read. The job's own status never needs it."""
        if time.monotonic() < self._unreadable.get(resource, -math.inf) + REPEAT_REFUSED_SECONDS:
            return None
        try:
            result = read()
        except RetryableError:
            return None
        except TunelineError:
            self._unreadable[resource] = time.monotonic()
            return None
        self._unreadable.pop(resource, None)
        return result


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
