"""What the status of a TrainJob or a RayJob means: pure functions from the cluster's objects to what was seen.

Sources: the conditions of trainer.kubeflow.org/v1alpha1 (Suspended, Complete, Failed) and of a child JobSet's jobs; the deployment and job
status of ray.io/v1; Kueue's conditions of a Workload (QuotaReserved, Admitted, Evicted); a pod's PodScheduled and DisruptionTarget.
"""

from __future__ import annotations

from typing import Any

from components.common.launch import Seen

Json = dict[str, Any]
STARTING = ("ContainerCreating", "PodInitializing")  # the waiting of a container to which nothing has happened
# Why KubeRay gave a job up, where it was not the job: ray-operator/apis/ray/v1/rayjob_types.go.
OF_THE_CLUSTER = (
    "SubmissionFailed",
    "JobDeploymentStatusTransitionGracePeriodExceeded",
    "JobStatusCheckTimeoutExceeded",
    "PreRunningDeadlineExceeded",
)
OUT_OF_TIME = "DeadlineExceeded"


def of_trainjob(job: Json, workload: Json | None, pods: list[Json]) -> Seen:
    """What a TrainJob shows; without `workload` and `pods`, no more than its own status."""
    status = job.get("status") or {}
    ended = {kind: _condition(status, kind) for kind in ("Complete", "Failed")}
    if ended["Complete"]:
        return Seen("succeeded")
    if ended["Failed"]:
        return _failed(str(ended["Failed"].get("reason", "")), str(ended["Failed"].get("message", "")), pods)
    suspended = _condition(status, "Suspended")
    if (job.get("spec") or {}).get("suspend") or suspended:
        return Seen("waiting", _queued(workload) or "it is suspended")
    if any(one.get("ready") or one.get("succeeded") for one in status.get("jobsStatus") or []):
        return Seen("running")
    return _starting(workload, pods)


def of_rayjob(job: Json, workload: Json | None, pods: list[Json]) -> Seen:
    """What a RayJob shows."""
    status = job.get("status") or {}
    deployed, ran = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    message, reason = str(status.get("message", "")), str(status.get("reason", ""))
    if deployed == "Complete" and ran == "SUCCEEDED":
        return Seen("succeeded")
    if ran == "STOPPED" and deployed in ("Complete", "Failed"):
        return Seen("cancelled", message or "it was stopped")
    if deployed in ("Complete", "Failed"):
        return Seen("ended", f"{reason}: {message}") if reason in OF_THE_CLUSTER else _failed(reason, message, pods)
    if (job.get("spec") or {}).get("suspend") or deployed in ("Suspending", "Suspended"):
        return Seen("waiting", _queued(workload) or "it is suspended")
    return Seen("running") if ran == "RUNNING" else _starting(workload, pods)


def _failed(reason: str, message: str, pods: list[Json]) -> Seen:
    """By itself, unless its time was over or one of its pods was taken away."""
    said = ": ".join(filter(None, (reason, message)))
    if reason == OUT_OF_TIME:
        return Seen("ended", said)
    disrupted = next((found for pod in pods if (found := _condition(pod.get("status") or {}, "DisruptionTarget"))), None)
    if disrupted:
        return Seen("ended", f"a pod was taken away: {disrupted.get('reason', '')}: {disrupted.get('message', '')}")
    return Seen("failed", said)


def _queued(workload: Json | None) -> str:
    """What Kueue says of a job that may not run."""
    status = (workload or {}).get("status") or {}
    evicted = _condition(status, "Evicted")
    if evicted:
        cause = _condition(status, "Preempted")
        return f"evicted by Kueue ({evicted.get('reason', '')}): {(cause or evicted).get('message', '')}"
    reserved = next((one for one in status.get("conditions") or [] if one.get("type") == "QuotaReserved"), None)
    if reserved and reserved.get("status") != "True":
        return f"waits for quota: {reserved.get('message', '')}"
    waits = [one for one in status.get("admissionChecks") or [] if one.get("state") != "Ready"]
    return f"waits for the admission check {waits[0].get('name', '')}: {waits[0].get('message', '')}" if waits else ""


def _starting(workload: Json | None, pods: list[Json]) -> Seen:
    """On its way: what its pods wait for."""
    for pod in pods:
        if found := _hindrance(pod):
            return Seen("waiting", f"pod {pod['metadata']['name']}: {found}")
    return Seen("waiting", "its pods start" if pods else _queued(workload) or "its pods are not there yet")


def _hindrance(pod: Json) -> str:
    """Why a pod does not start; "": nothing is in its way."""
    status = pod.get("status") or {}
    scheduled: Json = next((one for one in status.get("conditions") or [] if one.get("type") == "PodScheduled"), {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in STARTING:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""


def _condition(status: Json, kind: str) -> Json:
    """A condition that holds; empty: it does not."""
    return next((one for one in status.get("conditions") or [] if one.get("type") == kind and one.get("status") == "True"), {})
