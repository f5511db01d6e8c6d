"""Checks that a node fits the pods of each stage.

The checks use the allocatable resources of the nodes, not the free resources, since a pod waits for a busy node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from components.common.launch import JsonObject
from components.common.launch.kubernetes.pod_scheduling import NodeAffinity, Toleration
from components.common.reporting.check_findings import CheckResult, check_result
from components.common.runtime.counts import format_count
from pipelines.kubeflow.preflight.check_context import (
    CheckContext,
    PodDemand,
    collect_demands,
    format_amount,
    parse_amount,
)

BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
INTEGER_PATTERN = re.compile(r"-?\d+")
Nodes = Sequence[JsonObject]


@dataclass(frozen=True)
class NodeFilter:
    """A condition on a node. `describe` returns the problem and a hint for the nodes that do not meet the condition."""

    accepts: Callable[[JsonObject], bool]
    describe: Callable[[Nodes], tuple[str, str]]


def check_nodes(context: CheckContext) -> Iterator[CheckResult]:
    """Check that a node fits each stage; stages with the same demand, or the same problem, share a result."""
    nodes = context.api.list_items("/api/v1/nodes")
    problems: dict[str, tuple[str, list[str]]] = {}
    for demand in collect_demands(context.platform):
        remaining: Nodes = nodes
        for node_filter in _build_filters(demand):
            accepted = [node for node in remaining if node_filter.accepts(node)]
            if not accepted:
                found, hint = node_filter.describe(remaining)
                problems.setdefault(found, (hint, []))[1].extend(demand.stages)
                break
            remaining = accepted
        else:
            names = ", ".join(sorted(map(_get_name, remaining))[:3])
            found = f"suitable: {names}{', …' if len(remaining) > 3 else ''} ({len(remaining)} of {format_count(len(nodes), 'node')})"
            yield check_result(f"nodes for {demand.title}", True, found, "")
    for found, (hint, stages) in problems.items():
        yield check_result(f"nodes for {', '.join(stages)}", False, found, hint)


def list_reachable_nodes(context: CheckContext) -> set[str]:
    """Return the names of the nodes on which the pods of at least one stage may run.

    Raises:
        ForbiddenError: the caller may not list nodes.
    """
    nodes = context.api.list_items("/api/v1/nodes")
    return {
        _get_name(node)
        for demand in collect_demands(context.platform)
        for node in nodes
        if all(node_filter.accepts(node) for node_filter in _build_filters(demand))
    }


def list_training_nodes(context: CheckContext) -> list[JsonObject]:
    """Return the nodes on which the training's pod may run.

    Raises:
        ForbiddenError: the caller may not list nodes.
    """
    demand = next(demand for demand in collect_demands(context.platform) if "fine_tuning" in demand.stages)
    filters = _build_filters(demand)
    nodes = context.api.list_items("/api/v1/nodes")
    return [node for node in nodes if all(node_filter.accepts(node) for node_filter in filters)]


def _build_filters(demand: PodDemand) -> list[NodeFilter]:
    """Return the conditions in the order of their checks: labels first, capacity last."""
    selector = demand.scheduling.node_selector
    labels = [f"{key}={value}" for key, value in selector.items()]
    label_problem = f"no node has the labels {', '.join(labels)}" if labels else "the cluster has no nodes"
    command = f"kubectl label node NODE {' '.join(labels)}"
    label_hint = f"Label a node ({command}), or correct scheduling.node_selector in platform.yaml."
    required = [condition for condition in demand.scheduling.node_affinity if condition.weight is None]
    conditions = ", ".join(f"{item.key} {item.operator} {' '.join(item.values)}".strip() for item in required)
    affinity_hint = (
        "Correct scheduling.node_affinity in platform.yaml; `kubectl get nodes --show-labels` lists the labels."
    )
    return [
        NodeFilter(
            lambda node: selector.items() <= _get_labels(node).items(),
            lambda _: (label_problem, label_hint),
        ),
        NodeFilter(
            lambda node: all(_is_satisfied(condition, _get_labels(node)) for condition in required),
            lambda nodes: (
                f"no node satisfies {conditions}; checked {format_count(len(nodes), 'node')}",
                affinity_hint,
            ),
        ),
        NodeFilter(
            _is_ready,
            lambda nodes: (
                f"{_join_names(nodes)}: not ready, or cordoned",
                f"Find the reason with kubectl describe node {_get_name(nodes[0])}; "
                "kubectl uncordon NODE makes a cordoned node schedulable.",
            ),
        ),
        _filter_taints(demand),
        *(_filter_amount(demand, name, amount) for name, amount in demand.amounts.items()),
    ]


def _is_satisfied(condition: NodeAffinity, labels: dict[str, str]) -> bool:
    """Evaluate a condition as the scheduler does: a missing label satisfies NotIn."""
    exists, value = condition.key in labels, labels.get(condition.key, "")
    if condition.operator in ("Gt", "Lt"):
        if not INTEGER_PATTERN.fullmatch(value):
            return False
        difference = int(value) - int(condition.values[0])
        return difference > 0 if condition.operator == "Gt" else difference < 0
    is_listed = exists and value in condition.values
    return {"In": is_listed, "NotIn": not is_listed, "Exists": exists, "DoesNotExist": not exists}[condition.operator]


def _is_ready(node: JsonObject) -> bool:
    conditions = {item["type"]: item["status"] for item in node.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True" and not node.get("spec", {}).get("unschedulable")


def _filter_taints(demand: PodDemand) -> NodeFilter:
    tolerations = demand.scheduling.tolerations

    def list_untolerated(node: JsonObject) -> list[JsonObject]:
        taints = [taint for taint in node.get("spec", {}).get("taints") or [] if taint["effect"] in BLOCKING_EFFECTS]
        return [taint for taint in taints if not any(_is_tolerated(toleration, taint) for toleration in tolerations)]

    def describe(nodes: Nodes) -> tuple[str, str]:
        taints = {
            f"{taint['key']}={taint.get('value', '')}:{taint['effect']}".replace("=:", ":")
            for node in nodes
            for taint in list_untolerated(node)
        }
        taint = list_untolerated(nodes[0])[0]
        value = f", value: {taint['value']}" if taint.get("value") else ", operator: Exists"
        keys = f"scheduling.tolerations or resources.{demand.stages[0]}.scheduling.tolerations"
        toleration = f"{{key: {taint['key']}{value}, effect: {taint['effect']}}}"
        found = f"{_join_names(nodes)}: tainted {', '.join(sorted(taints))}, which the pods do not tolerate"
        return found, f"In platform.yaml, add to {keys}: {toleration}"

    return NodeFilter(lambda node: not list_untolerated(node), describe)


def _is_tolerated(toleration: Toleration, taint: JsonObject) -> bool:
    if toleration.effect and toleration.effect != taint["effect"]:
        return False
    if not toleration.key:
        return True
    has_value = toleration.operator == "Exists" or toleration.value == (taint.get("value") or "")
    return toleration.key == taint["key"] and has_value


def _filter_amount(demand: PodDemand, name: str, amount: str) -> NodeFilter:
    def describe(nodes: Nodes) -> tuple[str, str]:
        maximum, names = max(_get_allocatable(node, name) for node in nodes), _join_names(nodes)
        if maximum > 0:
            limit = format_amount(name, maximum)
            found = f"{amount} of {name} is requested, but the largest allocatable amount on {names} is {limit}"
            key = demand.format_key(name)
            hint = (
                f"Lower {key} in platform.yaml to at most {limit}, or select larger nodes in scheduling.node_selector."
            )
            return found, hint
        offered = {
            resource
            for node in nodes
            for resource in node.get("status", {}).get("allocatable", {})
            if "/" in resource and _get_allocatable(node, resource)
        }
        hint = (
            f"Install the device plugin of {name} (the vendor's operator), or correct "
            f"resources.{demand.stages[0]}.accelerator in platform.yaml; "
            f"the nodes offer: {', '.join(sorted(offered)) or 'none'}."
        )
        return f"{names}: no node offers {name}", hint

    return NodeFilter(lambda node: _get_allocatable(node, name) >= parse_amount(amount), describe)


def _get_allocatable(node: JsonObject, name: str) -> Decimal:
    return parse_amount(node.get("status", {}).get("allocatable", {}).get(name, "0"))


def _get_labels(node: JsonObject) -> dict[str, str]:
    return dict(node["metadata"].get("labels") or {})


def _get_name(node: JsonObject) -> str:
    return str(node["metadata"]["name"])


def _join_names(nodes: Nodes) -> str:
    names = sorted(map(_get_name, nodes))
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
