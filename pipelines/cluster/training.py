"""What a training needs that the step hands on to the cluster: the operator, its runtime, and the rights of the step's pod."""

from __future__ import annotations

from collections.abc import Iterator

from components.common.launch.cluster import RAYJOB, TRAINJOB, Kind
from components.common.launch.pods import Pods, TrainJob
from pipelines.cluster import permissions
from pipelines.cluster.access import ForbiddenError
from pipelines.cluster.look import RULES as LOOKING
from pipelines.cluster.look import Look
from pipelines.findings import Finding, finding, unchecked

KINDS = {"trainjob": TRAINJOB, "rayjob": RAYJOB}
VERBS = ("create", "get", "list", "delete")
TELLING = (("list", "", "pods"), ("list", "", "events"), ("list", "kueue.x-k8s.io", "workloads"))
RULES = "Apply deploy/components/launcher/launcher-rbac.yaml with the namespace and the account of the pods."


def launcher(look: Look) -> Iterator[Finding]:
    """Where platform.yaml has the training run as a TrainJob or a RayJob. Other launchers ask nothing of the cluster."""
    said = look.platform.launcher
    kind = KINDS.get(said.kind)
    if kind is None:
        return
    there = look.api.get(f"/apis/{kind.group}/{kind.version}")
    knows = there is not None and any(one["name"] == kind.plural for one in there.get("resources", []))
    yield finding(
        kind.operator.partition(" 2")[0].partition(" 1")[0],
        knows,
        f"the API server knows {kind.plural}.{kind.group}"
        if knows
        else f"the API server knows no {kind.plural}.{kind.group} {kind.version}",
        f"Have {kind.operator} installed, or take launcher out of platform.yaml.",
    )
    if knows and said.kind == "trainjob":
        yield _runtime(look, kind, said.trainjob)
    namespace = _namespace(look, getattr(said, said.kind))
    if knows and look.get("serviceaccounts", look.account) is not None:
        yield from _rights(look, kind, namespace)


def _namespace(look: Look, said: Pods) -> str:
    """Where the training's pods are."""
    return said.namespace or look.namespace


def _runtime(look: Look, kind: Kind, said: TrainJob) -> Finding:
    plural, base = f"{said.runtime_kind.lower()}s", f"apis/{kind.group}/{kind.version}"
    namespaced = said.runtime_kind == "TrainingRuntime"
    every = f"/{base}/namespaces/{_namespace(look, said)}/{plural}" if namespaced else f"/{base}/{plural}"
    name = f"runtime {said.runtime}"
    try:
        if look.api.get(f"{every}/{said.runtime}"):
            return finding(name, True, "it is there", "")
        there = ", ".join(sorted(one["metadata"]["name"] for one in look.api.items(every))) or "none"
    except ForbiddenError:
        return unchecked(name, f"reading {plural} is forbidden", LOOKING)
    hint = (
        f"Apply deploy/components/runtime/training-runtime.yaml, or correct launcher.trainjob.runtime in platform.yaml; there is: {there}."
    )
    return finding(name, False, f"there is no such {said.runtime_kind}", hint)


def _rights(look: Look, kind: Kind, namespace: str) -> Iterator[Finding]:
    """What the launcher does as the account of the step's pod, and what it only tells more with."""
    name, telling = f"rights to train as {kind.plural}", "rights to tell what a training waits for"
    try:
        refused = [verb for verb in VERBS if not permissions.pods_may(look, verb, kind.group, kind.plural, namespace=namespace)]
        silent = [
            f"{verb} {plural}"
            for verb, group, plural in TELLING
            if not permissions.pods_may(look, verb, group, plural, namespace=namespace)
        ]
    except ForbiddenError:
        yield unchecked(name, "reviewing another account's access is forbidden", RULES)
        return
    said = f"{look.account} may not {', '.join(refused)} {kind.plural} in {namespace}"
    yield finding(name, not refused, said if refused else f"{look.account} may in {namespace}", RULES)
    said = f"{look.account} may not {', '.join(silent)} in {namespace}: a training runs, and says less"
    yield finding(telling, not silent, said if silent else f"{look.account} may in {namespace}", RULES, needed=False)
