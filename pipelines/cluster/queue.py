"""Kueue: the queue that the pods wait in, what stands behind it, and the priority."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from pipelines.cluster.access import Json
from pipelines.cluster.look import Demand, Look, amount, demands, told
from pipelines.findings import Finding, finding

GROUP = "apis/kueue.x-k8s.io"


def queues(look: Look) -> Iterator[Finding]:
    """The local queues of all stages, their cluster queues, and the priority classes."""
    asked = demands(look.platform)
    names = dict.fromkeys(one.scheduling.queue for one in asked if one.scheduling.queue)
    priorities = dict.fromkeys(one.scheduling.priority for one in asked if one.scheduling.priority)
    if not names and not priorities:
        return
    version = _version(look)
    if not version:
        hint = "Install Kueue (https://kueue.sigs.k8s.io), or take queue and priority out of platform.yaml."
        yield finding("Kueue", False, "it is not installed here: the API server has no kueue.x-k8s.io", hint)
        return
    for name in names:
        yield _queue(look, version, name, [one for one in asked if one.scheduling.queue == name])
    for name in priorities:
        yield _priority(look, version, name)


def _version(look: Look) -> str:
    """The group and version that the server prefers; empty: none."""
    found = look.api.get(f"/{GROUP}") or {}
    return str(found.get("preferredVersion", {}).get("groupVersion", "")).replace("kueue.x-k8s.io", GROUP)


def _queue(look: Look, version: str, name: str, asked: list[Demand]) -> Finding:
    title, local = f"queue {name}", look.get("localqueues", name, version)
    if local is None:
        there = ", ".join(sorted(one["metadata"]["name"] for one in look.api.items(look.path("localqueues", group=version)))) or "none"
        hint = f"Make it (kind LocalQueue), or correct scheduling.queue in platform.yaml; the namespace has: {there}."
        return finding(title, False, "there is no such LocalQueue", hint)
    behind = str(local["spec"]["clusterQueue"])
    if problem := _inactive(local):
        return finding(title, False, f"the LocalQueue is not active: {problem}", _describe(look, name, behind))
    cluster = look.api.get(f"/{version}/clusterqueues/{behind}")
    if cluster is None or (problem := _inactive(cluster)):
        said = f"its ClusterQueue {behind} {'does not exist' if cluster is None else f'is not active: {problem}'}"
        return finding(title, False, said, _describe(look, name, behind))
    return _room(title, behind, cluster, asked)


def _describe(look: Look, name: str, behind: str) -> str:
    return f"{look.kubectl(f'describe localqueue {name}')}; kubectl describe clusterqueue {behind}: an administrator of Kueue mends it."


def _inactive(queue: Json) -> str:
    """Why a queue takes nothing in; empty where it does."""
    policy = queue.get("spec", {}).get("stopPolicy", "None")
    if policy != "None":
        return f"its stopPolicy is {policy}"
    for one in queue.get("status", {}).get("conditions", []):
        if one["type"] == "Active" and one["status"] != "True":
            return f"{one.get('reason', '')}: {one.get('message', '')}"
    return ""


def _room(title: str, behind: str, cluster: Json, asked: list[Demand]) -> Finding:
    """A pod that asks for a resource the queue does not know, or for more than it ever has, waits for ever."""
    for demand in asked:
        for name, wanted in demand.amounts.items():
            most = _most(cluster, name)
            if most is None:
                hint = f"Have {name} added to the ClusterQueue's resourceGroups, or leave {demand.key(name)} out of platform.yaml."
                return finding(title, False, f"ClusterQueue {behind} has no quota of {name}, which {demand.title} want", hint)
            if amount(wanted) > most:
                hint = f"Lower {demand.key(name)} in platform.yaml, or have the quota raised."
                said = f"ClusterQueue {behind} admits {told(name, most)} of {name} at most; {demand.title} want {wanted}"
                return finding(title, False, said, hint)
    return finding(title, True, f"active, behind it the ClusterQueue {behind}", "")


def _most(cluster: Json, name: str) -> Decimal | None:
    """The most that one flavor gives, with what it may borrow; None where the queue does not cover the resource."""
    spec, found = cluster["spec"], []
    lends = bool(spec.get("cohort") or spec.get("cohortName"))
    for group in spec.get("resourceGroups", []):
        for one in (one for flavor in group.get("flavors", []) for one in flavor.get("resources", []) if one["name"] == name):
            borrowed = one.get("borrowingLimit") if lends else "0"
            found.append(Decimal("Infinity") if borrowed is None else amount(one["nominalQuota"]) + amount(borrowed))
    return max(found, default=None)


def _priority(look: Look, version: str, name: str) -> Finding:
    found = look.api.get(f"/{version}/workloadpriorityclasses/{name}")
    there = ", ".join(sorted(one["metadata"]["name"] for one in look.api.items(f"/{version}/workloadpriorityclasses"))) or "none"
    hint = f"Correct scheduling.priority in platform.yaml; the cluster has: {there}."
    return finding(f"priority {name}", found is not None, "it is there" if found else "there is no such WorkloadPriorityClass", hint)
