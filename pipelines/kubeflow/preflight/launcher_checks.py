"""Checks for a training job that runs as a separate Kubernetes job: operator, runtime, and rights of the step's pod."""

from __future__ import annotations

from collections.abc import Iterator

from components.common.launch.kubernetes.kubernetes_client import ResourceKind
from components.common.launch.kubernetes.pod_settings import PodSettings, TrainJobSettings
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from pipelines.kubeflow.preflight.check_context import RBAC_HINT, CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError
from pipelines.kubeflow.preflight.permission_checks import has_right

JOB_VERBS = ("create", "get", "list", "delete")
STATUS_RIGHTS = (("list", "", "pods"), ("list", "", "events"), ("list", "kueue.x-k8s.io", "workloads"))
LAUNCHER_RBAC_HINT = (
    "Apply deploy/components/launcher/launcher-rbac.yaml with the namespace and the account of the pods."
)


def check_launcher(context: CheckContext) -> Iterator[CheckResult]:
    """Check the requirements of a launcher whose jobs are Kubernetes resources; skip other launchers."""
    launcher = context.platform.launcher
    kind, pods = launcher.entry.resource, launcher.section
    if kind is None or not isinstance(pods, PodSettings):
        return
    group = context.api.get(f"/apis/{kind.group}/{kind.version}") or {}
    is_available = any(resource["name"] == kind.plural for resource in group.get("resources", []))
    resource = f"{kind.plural}.{kind.group}"
    if not is_available:
        hint = f"Install {kind.requirement}, or remove launcher from platform.yaml."
        yield check_result(kind.operator, False, f"the API server has no {resource} {kind.version}", hint)
        return
    yield check_result(kind.operator, True, f"the API server has {resource}", "")
    namespace = pods.namespace or context.namespace
    if isinstance(pods, TrainJobSettings):
        plural, base = f"{pods.runtime_kind.lower()}s", f"/apis/{kind.group}/{kind.version}"
        scope = f"/namespaces/{namespace}" if pods.runtime_kind == "TrainingRuntime" else ""
        path, name = f"{base}{scope}/{plural}", f"runtime {pods.runtime}"
        try:
            exists = bool(context.api.get(f"{path}/{pods.runtime}"))
            names = [] if exists else [item["metadata"]["name"] for item in context.api.list_items(path)]
        except ForbiddenError:
            yield skipped_check(name, f"reading {plural} is forbidden", RBAC_HINT)
        else:
            hint = (
                "Apply deploy/components/runtime/training-runtime.yaml, or correct launcher.trainjob.runtime in "
                f"platform.yaml; existing: {', '.join(sorted(names)) or 'none'}."
            )
            found = "exists" if exists else f"no {pods.runtime_kind} has this name"
            yield check_result(name, exists, found, hint)
    if context.get("serviceaccounts", context.service_account) is not None:
        yield from _check_rights(context, kind, namespace)


def _check_rights(context: CheckContext, kind: ResourceKind, namespace: str) -> Iterator[CheckResult]:
    """Check the rights of the step's pod: those that the launcher needs, and those that add detail to its status."""

    def is_missing(verb: str, group: str, plural: str) -> bool:
        return not has_right(context, verb, group, plural, namespace=namespace, as_pods=True)

    name, account = f"rights to train as {kind.plural}", context.service_account
    try:
        verbs = [verb for verb in JOB_VERBS if is_missing(verb, kind.group, kind.plural)]
        details = [f"{verb} {plural}" for verb, group, plural in STATUS_RIGHTS if is_missing(verb, group, plural)]
    except ForbiddenError:
        yield skipped_check(name, "reviewing another account's access is forbidden", LAUNCHER_RBAC_HINT)
        return
    has_all = f"{account} has all required rights in {namespace}"
    found = f"{account} may not {', '.join(verbs)} {kind.plural} in {namespace}" if verbs else has_all
    yield check_result(name, not verbs, found, LAUNCHER_RBAC_HINT)
    restricted = f"{account} may not {', '.join(details)} in {namespace}; the status of a training job has less detail"
    name, found = "rights to report the status of training jobs", restricted if details else has_all
    yield check_result(name, not details, found, LAUNCHER_RBAC_HINT, needed=False)
