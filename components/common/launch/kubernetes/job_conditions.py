"""Job status of a TrainJob or a RayJob, computed from its Kubernetes objects by pure functions.

The status of a TrainJob comes from its conditions (Suspended, Complete, Failed) and the status of its JobSet's jobs.
The status of a RayJob comes from its deployment status and job status.
"""

# API versions: trainer.kubeflow.org/v1alpha1 and ray.io/v1. The reasons come from Kueue's conditions of a Workload
# (QuotaReserved, Admitted, Evicted), and from a pod's conditions PodScheduled and DisruptionTarget.

from __future__ import annotations

from components.common.launch import JobState, JobStatus, JsonObject

STARTING_REASONS = ("ContainerCreating", "PodInitializing")  # normal reasons of a waiting container
PODS_STARTING, PODS_MISSING = "the pods are starting", "the pods do not exist yet"
# Failure reasons of KubeRay that the job did not cause: ray-operator/apis/ray/v1/rayjob_types.go.
CLUSTER_FAILURE_REASONS = (
    "SubmissionFailed",
    "JobDeploymentStatusTransitionGracePeriodExceeded",
    "JobStatusCheckTimeoutExceeded",
    "PreRunningDeadlineExceeded",
)
DEADLINE_REASON = "DeadlineExceeded"
# JobSet's reason where deploy/components/runtime ends a job because Kubernetes disrupted a pod.
DISRUPTION_REASON = "FailJobSetFailurePolicyAction"


def read_trainjob_status(job: JsonObject, workload: JsonObject | None, pods: list[JsonObject]) -> JobStatus:
    """Return the status of a TrainJob; `workload` (Kueue's) and `pods` provide the reason why a job waits."""
    status = job.get("status") or {}
    if _find_condition(status, "Complete"):
        return JobStatus("succeeded")
    if failed := _find_condition(status, "Failed"):
        return _read_failure(str(failed.get("reason", "")), str(failed.get("message", "")))
    if (job.get("spec") or {}).get("suspend") or _find_condition(status, "Suspended"):
        return JobStatus("waiting", _read_queue_reason(workload) or "the job is suspended")
    if any(child.get("ready") or child.get("succeeded") for child in status.get("jobsStatus") or []):
        return JobStatus("running")
    return _read_start(workload, pods)


def read_rayjob_status(job: JsonObject, workload: JsonObject | None, pods: list[JsonObject]) -> JobStatus:
    """Return the status of a RayJob; `workload` (Kueue's) and `pods` provide the reason why a job waits."""
    status = job.get("status") or {}
    deployment_status, job_status = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    message, reason = str(status.get("message", "")), str(status.get("reason", ""))
    if deployment_status in ("Complete", "Failed"):
        if deployment_status == "Complete" and job_status == "SUCCEEDED":
            return JobStatus("succeeded")
        if job_status == "STOPPED":
            return JobStatus("cancelled", message or "the job was stopped")
        if reason in CLUSTER_FAILURE_REASONS:
            return JobStatus("ended", f"{reason}: {message}")
        return _read_failure(reason, message)
    if (job.get("spec") or {}).get("suspend") or deployment_status in ("Suspending", "Suspended"):
        return JobStatus("waiting", _read_queue_reason(workload) or "the job is suspended")
    return JobStatus("running") if job_status == "RUNNING" else _read_start(workload, pods)


def _read_failure(reason: str, message: str) -> JobStatus:
    """Return "failed", or "ended" if the job exceeded its deadline or its runtime reports a disrupted pod."""
    state: JobState = "ended" if reason in (DEADLINE_REASON, DISRUPTION_REASON) else "failed"
    return JobStatus(state, ": ".join(filter(None, (reason, message))))


def has_pod_ended(pod: JsonObject) -> bool:
    """Return whether all containers of a pod have ended."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def has_failed_by_itself(pod: JsonObject) -> bool:
    """Return whether a pod failed that nobody removed."""
    is_removed = bool(pod["metadata"].get("deletionTimestamp") or find_disruption(pod))
    return (pod.get("status") or {}).get("phase") == "Failed" and not is_removed


def find_disruption(pod: JsonObject) -> str:
    """Return why Kubernetes removes a pod (eviction, preemption, taint, node shutdown), or ""."""
    disruption = _find_condition(pod.get("status") or {}, "DisruptionTarget")
    return f"the pod {pod['metadata']['name']} was disrupted: {_format_reason(disruption)}" if disruption else ""


def find_lost_node(pod: JsonObject) -> str:
    """Return a sentence about a running pod whose node has had no heartbeat (by default, for 50 seconds), or ""."""
    status = pod.get("status") or {}
    # The node controller changes only the condition Ready; a kubelet changes both, unless the pod has readiness gates.
    is_lost = _find_condition(status, "Ready", "False") and _find_condition(status, "ContainersReady")
    node, name = (pod.get("spec") or {}).get("nodeName", ""), pod["metadata"]["name"]
    return f"the node {node} of the pod {name} is not ready" if is_lost else ""


def find_memory_kill(pod: JsonObject) -> str:
    """Return a sentence about a container that exceeded its memory limit, or ""."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        if ((container.get("state") or {}).get("terminated") or {}).get("reason") == "OOMKilled":
            return (
                f"the container {container.get('name', '')} of the pod {pod['metadata']['name']} exceeded its memory "
                "limit (OOMKilled)"
            )
    return ""


def _read_queue_reason(workload: JsonObject | None) -> str:
    """Return the reason why Kueue does not admit a job, or ""."""
    status = (workload or {}).get("status") or {}
    if evicted := _find_condition(status, "Evicted"):
        cause = _find_condition(status, "Preempted") or evicted
        return f"evicted by Kueue ({evicted.get('reason', '')}): {cause.get('message', '')}"
    reserved = _find_condition(status, "QuotaReserved", "True", "False", "Unknown")
    if workload and reserved.get("status") != "True":
        # Kueue 0.19 writes no condition if an equal workload waits already.
        return ": ".join(filter(None, ("no quota is reserved yet", str(reserved.get("message", "")))))
    for check in status.get("admissionChecks") or []:
        if check.get("state") != "Ready":
            return f"the admission check {check.get('name', '')} is not ready: {check.get('message', '')}"
    return ""


def _read_start(workload: JsonObject | None, pods: list[JsonObject]) -> JobStatus:
    """Return "waiting" with the reason why the pods are not running yet; "running" once a pod has ended."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status") or {}
        if unscheduled := _find_condition(status, "PodScheduled", "False"):
            return JobStatus("waiting", f"pod {name}: {_format_reason(unscheduled)}")
        for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") and waiting["reason"] not in STARTING_REASONS:
                return JobStatus("waiting", f"pod {name}: {_format_reason(waiting)}")
    if any(map(has_pod_ended, pods)):
        return JobStatus("running", "a pod has ended")
    return JobStatus("waiting", PODS_STARTING if pods else _read_queue_reason(workload) or PODS_MISSING)


def _format_reason(condition: JsonObject) -> str:
    return f"{condition.get('reason', '')}: {condition.get('message', '')}"


def _find_condition(status: JsonObject, kind: str, *values: str) -> JsonObject:
    """Return the condition of a type if its status is one of the values (default: True), else an empty mapping."""
    conditions: list[JsonObject] = status.get("conditions") or []
    expected = values or ("True",)
    return next((item for item in conditions if item.get("type") == kind and item.get("status") in expected), {})
