"""Nodes: whether a stage's pod finds one. What a node can give is looked at, not what other pods leave of it: a full node is waited for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from components.common.scheduling import NodeAffinity, Toleration
from pipelines.cluster.access import Json
from pipelines.cluster.look import Demand, Look, amount, demands, told
from pipelines.findings import Finding, finding

REFUSING = ("NoSchedule", "NoExecute")
WHOLE = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Sieve:
    """One condition: what keeps a node, what is said when none is left of those before, and what to do then."""

    keeps: Callable[[Json], bool]
    problem: Callable[[Sequence[Json]], str]
    hint: Callable[[Sequence[Json]], str]


def for_stages(look: Look) -> Iterator[Finding]:
    """One finding for all stages that ask for the same, or lack the same."""
    every = look.api.items("/api/v1/nodes")
    lacking: dict[str, tuple[str, list[str]]] = {}
    for demand in demands(look.platform):
        found, hint = _for(demand, every)
        if hint:
            lacking.setdefault(found, (hint, []))[1].extend(demand.stages)
        else:
            yield finding(f"nodes for {demand.title}", True, found, "")
    for found, (hint, stages) in lacking.items():
        yield finding(f"nodes for {', '.join(stages)}", False, found, hint)


def reachable(look: Look) -> set[str]:
    """The names of the nodes that some pod may land on."""
    every = look.api.items("/api/v1/nodes")
    return {_name(node) for demand in demands(look.platform) for node in every if all(sieve.keeps(node) for sieve in _sieves(demand))}


def _for(demand: Demand, every: Sequence[Json]) -> tuple[str, str]:
    """What was found, and what to do; the latter is empty where a node fits."""
    left = list(every)
    for sieve in _sieves(demand):
        kept = [node for node in left if sieve.keeps(node)]
        if not kept:
            return sieve.problem(left), sieve.hint(left)
        left = kept
    names = ", ".join(sorted(map(_name, left))[:3])
    return f"{len(left)} of {len(every)} fit: {names}{', …' if len(left) > 3 else ''}", ""


def _sieves(demand: Demand) -> list[Sieve]:
    """From what a node is to what it has: the first that leaves none says why."""
    return [
        _labelled(demand),
        _affine(demand),
        _ready(),
        _tolerated(demand),
        *(_has(demand, name, wanted) for name, wanted in demand.amounts.items()),
    ]


def _labelled(demand: Demand) -> Sieve:
    wanted = demand.scheduling.node_selector
    said = ", ".join(f"{key}={value}" for key, value in wanted.items())
    return Sieve(
        lambda node: wanted.items() <= _labels(node).items(),
        lambda _: f"no node has the labels {said}" if said else "the cluster has no nodes",
        lambda _: f"Label one (kubectl label node NODE {said.replace(', ', ' ')}), or correct scheduling.node_selector in platform.yaml.",
    )


def _affine(demand: Demand) -> Sieve:
    required = [one for one in demand.scheduling.node_affinity if one.weight is None]
    said = ", ".join(f"{one.key} {one.operator} {' '.join(one.values)}".strip() for one in required)
    return Sieve(
        lambda node: all(_holds(one, _labels(node)) for one in required),
        lambda left: f"of {len(left)} nodes none satisfies {said}",
        lambda _: "Correct scheduling.node_affinity in platform.yaml; `kubectl get nodes --show-labels` lists what there is.",
    )


def _holds(condition: NodeAffinity, labels: dict[str, str]) -> bool:
    """As the scheduler reads it: a label that is not there satisfies NotIn."""
    there, value = condition.key in labels, labels.get(condition.key, "")
    number = int(value) if WHOLE.fullmatch(value) else None
    return {
        "In": there and value in condition.values,
        "NotIn": value not in condition.values or not there,
        "Exists": there,
        "DoesNotExist": not there,
        "Gt": number is not None and number > int(condition.values[0]) if condition.operator == "Gt" else False,
        "Lt": number is not None and number < int(condition.values[0]) if condition.operator == "Lt" else False,
    }[condition.operator]


def _ready() -> Sieve:
    return Sieve(
        _is_ready,
        lambda left: f"{_names(left)}: not ready, or closed to new pods",
        lambda left: f"kubectl describe node {_name(left[0])} says why; kubectl uncordon NODE opens a closed one.",
    )


def _is_ready(node: Json) -> bool:
    states = {one["type"]: one["status"] for one in node.get("status", {}).get("conditions", [])}
    return states.get("Ready") == "True" and not node.get("spec", {}).get("unschedulable")


def _tolerated(demand: Demand) -> Sieve:
    def untolerated(node: Json) -> list[Json]:
        taints = [one for one in node.get("spec", {}).get("taints") or [] if one["effect"] in REFUSING]
        return [taint for taint in taints if not any(_tolerates(one, taint) for one in demand.scheduling.tolerations)]

    def problem(left: Sequence[Json]) -> str:
        found = {f"{t['key']}={t.get('value', '')}:{t['effect']}".replace("=:", ":") for node in left for t in untolerated(node)}
        return f"{_names(left)}: tainted {', '.join(sorted(found))}, which the pods do not tolerate"

    def hint(left: Sequence[Json]) -> str:
        taint = untolerated(left[0])[0]
        value = f", value: {taint['value']}" if taint.get("value") else ", operator: Exists"
        field = f"resources.{demand.stages[0]}.scheduling.tolerations"
        return f"In platform.yaml, add to scheduling.tolerations or {field}: {{key: {taint['key']}{value}, effect: {taint['effect']}}}"

    return Sieve(lambda node: not untolerated(node), problem, hint)


def _tolerates(one: Toleration, taint: Json) -> bool:
    if one.effect and one.effect != taint["effect"]:
        return False
    if not one.key:
        return True
    return one.key == taint["key"] and (one.operator == "Exists" or one.value == (taint.get("value") or ""))


def _has(demand: Demand, name: str, wanted: str) -> Sieve:
    def problem(left: Sequence[Json]) -> str:
        most = max(_allocatable(node, name) for node in left)
        if most == 0:
            return f"{_names(left)}: none offers {name}"
        return f"{wanted} of {name} wanted; the most that one of {_names(left)} can give is {told(name, most)}"

    def hint(left: Sequence[Json]) -> str:
        most = max(_allocatable(node, name) for node in left)
        if most == 0:
            return (
                f"No such node offers {name}. Install its device plugin (the vendor's operator), or correct "
                f"resources.{demand.stages[0]}.accelerator in platform.yaml; the nodes offer: {_offered(left)}."
            )
        return (
            f"Lower {demand.key(name)} in platform.yaml to {told(name, most)} at most, or choose larger nodes by scheduling.node_selector."
        )

    return Sieve(lambda node: _allocatable(node, name) >= amount(wanted), problem, hint)


def _offered(nodes: Sequence[Json]) -> str:
    """The accelerators that there are."""
    found = {name for node in nodes for name in node.get("status", {}).get("allocatable", {}) if "/" in name and _allocatable(node, name)}
    return ", ".join(sorted(found)) or "none"


def _allocatable(node: Json, name: str) -> Decimal:
    return amount(node.get("status", {}).get("allocatable", {}).get(name, "0"))


def _labels(node: Json) -> dict[str, str]:
    return dict(node["metadata"].get("labels") or {})


def _name(node: Json) -> str:
    return str(node["metadata"]["name"])


def _names(nodes: Sequence[Json]) -> str:
    names = sorted(map(_name, nodes))
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
