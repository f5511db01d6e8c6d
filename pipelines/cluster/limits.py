"""What the namespace allows a pod and all pods together: LimitRange and ResourceQuota."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.cluster.access import Json
from pipelines.cluster.look import Demand, Look, amount, demands
from pipelines.findings import Finding, finding

Limit = tuple[str, str]


def limits(look: Look) -> Iterator[Finding]:
    """One finding a kind: a pod outside these limits is refused when it is made."""
    ranges = look.api.items(look.path("limitranges"))
    quotas = [one for one in look.api.items(look.path("resourcequotas")) if not _scoped(one)]
    asked = demands(look.platform)
    yield _told("limit ranges", len(ranges), next((said for demand in asked for said in _outside(ranges, demand, look)), None))
    found = next((said for demand in asked for said in _beyond(quotas, ranges, demand, look)), None)
    yield _told("resource quotas", len(quotas), found)


def _told(name: str, count: int, problem: Limit | None) -> Finding:
    said, hint = problem or (f"{count or 'none'}{', and each pod keeps within' if count else ''}", "")
    return finding(name, problem is None, said, hint)


def _scoped(quota: Json) -> bool:
    """A quota for some pods only, by their priority class or deadline, is left to the trial of the pods."""
    return bool(quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))


def _outside(ranges: list[Json], demand: Demand, look: Look) -> Iterator[Limit]:
    """What of a stage's pod is more or less than a LimitRange lets a container or a pod have."""
    for one in ranges:
        for rule in (rule for rule in one["spec"]["limits"] if rule["type"] in ("Container", "Pod")):
            for name, wanted in demand.amounts.items():
                yield from _against(rule, name, wanted, demand, one["metadata"]["name"], look)


def _against(rule: Json, name: str, wanted: str, demand: Demand, called: str, look: Look) -> Iterator[Limit]:
    kind = rule["type"].lower()
    most, least = rule.get("max", {}).get(name), rule.get("min", {}).get(name)
    describe = look.kubectl(f"describe limitrange {called}")
    if most is not None and amount(wanted) > amount(most):
        said = f"LimitRange {called} lets a {kind} have {most} of {name}, and {demand.title} want {wanted}"
        yield said, f"Lower {demand.key(name)} in platform.yaml to {most}, or have the limit raised: {describe}"
    if least is not None and amount(wanted) < amount(least):
        said = f"LimitRange {called} wants a {kind} to have {least} of {name} at least, and {demand.title} want {wanted}"
        yield said, f"Raise {demand.key(name)} in platform.yaml to {least}, or have the limit lowered: {describe}"


def _beyond(quotas: list[Json], ranges: list[Json], demand: Demand, look: Look) -> Iterator[Limit]:
    """What a quota never grants: one pod more than the whole namespace may have, or a pod that does not say what it wants."""
    for quota in quotas:
        called, hard = quota["metadata"]["name"], quota["spec"].get("hard", {})
        for name in ("cpu", "memory", demand.resources.accelerator):
            keys = [key for key in (f"requests.{name}", f"limits.{name}", name) if name and key in hard]
            for key in keys:
                yield from _granted(look, demand, name, hard[key], called, given=_has_default(ranges, name))


def _granted(look: Look, demand: Demand, name: str, most: str, called: str, *, given: bool) -> Iterator[Limit]:
    wanted = demand.amounts.get(name)
    describe = look.kubectl(f"describe resourcequota {called}")
    if wanted is None and not given:
        said = f"ResourceQuota {called} counts {name}, so every pod must say how much it wants, and those of {demand.title} do not"
        yield said, f"Set {demand.key(name)} in platform.yaml."
    if wanted is not None and amount(wanted) > amount(most):
        said = f"ResourceQuota {called} grants {most} of {name} to the whole namespace, and {demand.title} want {wanted}"
        yield said, f"Lower {demand.key(name)} in platform.yaml, or have the quota raised: {describe}"


def _has_default(ranges: list[Json], name: str) -> bool:
    """A LimitRange may say for a container what it does not say itself."""
    return any(name in rule.get("default", {}) for one in ranges for rule in one["spec"]["limits"] if rule["type"] == "Container")
