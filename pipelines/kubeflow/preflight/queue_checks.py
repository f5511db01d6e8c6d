"""Checks of Kueue: the LocalQueue of the pods, its ClusterQueue, and the priority class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal

from components.common.launch import JsonObject
from components.common.reporting.check_findings import CheckResult, check_result
from pipelines.kubeflow.preflight.check_context import (
    CheckContext,
    PodDemand,
    collect_demands,
    format_amount,
    parse_amount,
)

KUEUE_PATH = "apis/kueue.x-k8s.io"


def check_queues(context: CheckContext) -> Iterator[CheckResult]:
    """Check the queues and priority classes of all stages."""
    demands = collect_demands(context.platform)
    queues = dict.fromkeys(demand.scheduling.queue for demand in demands if demand.scheduling.queue)
    priorities = dict.fromkeys(demand.scheduling.priority for demand in demands if demand.scheduling.priority)
    if not queues and not priorities:
        return
    group = context.api.get(f"/{KUEUE_PATH}") or {}
    version = str(group.get("preferredVersion", {}).get("groupVersion", "")).replace("kueue.x-k8s.io", KUEUE_PATH)
    if not version:
        hint = "Install Kueue (https://kueue.sigs.k8s.io), or remove queue and priority from platform.yaml."
        yield check_result("Kueue", False, "not installed: the API server has no API group kueue.x-k8s.io", hint)
        return
    for name in queues:
        yield _check_queue(context, version, name, [demand for demand in demands if demand.scheduling.queue == name])
    for name in priorities:
        path = f"/{version}/workloadpriorityclasses"
        exists = context.api.get(f"{path}/{name}") is not None
        existing = _join_names(context.api.list_items(path))
        hint = f"Correct scheduling.priority in platform.yaml; the cluster has: {existing}."
        found = "exists" if exists else "no WorkloadPriorityClass has this name"
        yield check_result(f"priority {name}", exists, found, hint)


def _join_names(objects: Iterable[JsonObject]) -> str:
    return ", ".join(sorted(item["metadata"]["name"] for item in objects)) or "none"


def _check_queue(context: CheckContext, version: str, name: str, demands: list[PodDemand]) -> CheckResult:
    title, local_queue = f"queue {name}", context.get("localqueues", name, version)
    if local_queue is None:
        existing = _join_names(context.api.list_items(context.build_path("localqueues", group=version)))
        hint = f"Create the LocalQueue, or correct scheduling.queue in platform.yaml; the namespace has: {existing}."
        return check_result(title, False, "no LocalQueue has this name", hint)
    cluster_name = str(local_queue["spec"]["clusterQueue"])
    describe = context.format_kubectl(f"describe localqueue {name}")
    hint = f"Ask an administrator of Kueue to fix the queue: {describe}; kubectl describe clusterqueue {cluster_name}"
    cluster_queue = context.api.get(f"/{version}/clusterqueues/{cluster_name}")
    if cluster_queue is None:
        return check_result(title, False, f"ClusterQueue {cluster_name} does not exist", hint)
    if problem := _find_queue_problem(cluster_queue):
        return check_result(title, False, f"ClusterQueue {cluster_name} is not active: {problem}", hint)
    if problem := _find_queue_problem(local_queue):  # also if its ClusterQueue is not active
        return check_result(title, False, f"the LocalQueue is not active: {problem}", hint)
    for demand in demands:
        for resource, amount in demand.amounts.items():
            maximum, key = _compute_maximum(cluster_queue, resource), demand.format_key(resource)
            if maximum is None:
                found = f"ClusterQueue {cluster_name} has no quota for {resource}, requested by {demand.title}"
                hint = f"Add {resource} to the ClusterQueue's resourceGroups, or remove {key} from platform.yaml."
                return check_result(title, False, found, hint)
            if parse_amount(amount) > maximum:  # the pod would wait indefinitely
                limit = format_amount(resource, maximum)
                found = (
                    f"ClusterQueue {cluster_name} admits at most {limit} of {resource}, but {amount} is requested by "
                    f"{demand.title}"
                )
                hint = f"Lower {key} in platform.yaml, or raise the quota."
                return check_result(title, False, found, hint)
    return check_result(title, True, f"active, with the ClusterQueue {cluster_name}", "")


def _find_queue_problem(queue: JsonObject) -> str:
    """Return the reason why a queue admits no workloads, or ""."""
    policy = queue.get("spec", {}).get("stopPolicy", "None")
    if policy != "None":
        return f"stopPolicy is {policy}"
    for condition in queue.get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] != "True":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return ""


def _compute_maximum(queue: JsonObject, name: str) -> Decimal | None:
    """Return the largest quota of a flavor, including its borrowing limit; None if no flavor has the resource."""
    spec = queue["spec"]
    can_borrow = bool(spec.get("cohort") or spec.get("cohortName"))
    amounts = []
    flavors = (flavor for group in spec.get("resourceGroups", []) for flavor in group.get("flavors", []))
    for resource in (item for flavor in flavors for item in flavor.get("resources", []) if item["name"] == name):
        limit = resource.get("borrowingLimit") if can_borrow else "0"
        nominal = parse_amount(resource["nominalQuota"])
        amounts.append(Decimal("Infinity") if limit is None else nominal + parse_amount(limit))
    return max(amounts, default=None)
