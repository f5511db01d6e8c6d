"""Checks for a training job that runs as a separate Kubernetes job: operator, runtime, and rights of the step's pod."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from components.common.launch import JsonObject
from components.common.launch.kubernetes.job_manifests import EXIT_GRACE_SECONDS, TRAINER_CONTAINER, get_pod_settings
from components.common.launch.kubernetes.kubernetes_client import LIMITS_NAME, ResourceKind
from components.common.launch.kubernetes.pod_settings import PodSettings, TrainJobSettings
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from pipelines.config.platform_config import Platform
from pipelines.definition import pod_spec
from pipelines.kubeflow.preflight.check_context import RBAC_HINT, CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError
from pipelines.kubeflow.preflight.permission_checks import has_right
from pipelines.steps import step_launcher

DEFAULT_GRACE_SECONDS = 30  # of Kubernetes
JOB_VERBS = ("create", "get", "list", "delete")
STATUS_RIGHTS = (("list", "", "pods"), ("list", "", "events"), ("list", "kueue.x-k8s.io", "workloads"))
LAUNCHER_RBAC_HINT = (
    "Apply deploy/components/launcher-{kind}/launcher-rbac.yaml with the namespace and the account of the pods."
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
            runtime = context.api.get(f"{path}/{pods.runtime}")
            names = [] if runtime else [item["metadata"]["name"] for item in context.api.list_items(path)]
        except ForbiddenError:
            yield skipped_check(name, f"reading {plural} is forbidden", RBAC_HINT)
        else:
            hint = (
                "Apply deploy/components/runtime/training-runtime.yaml, or correct launcher.trainjob.runtime in "
                f"platform.yaml; existing: {', '.join(sorted(names)) or 'none'}."
            )
            found = "exists" if runtime else f"no {pods.runtime_kind} has this name"
            yield check_result(name, bool(runtime), found, hint)
            own = context.platform.resources.fine_tuning.scheduling
            queues = (pods.queue, context.platform.scheduling.queue, own.queue if own else "")
            if runtime and any(queues):
                yield _check_grace_period(runtime, pods)
    limits = context.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{LIMITS_NAME}")
    if limits is not None:
        yield from check_limits(context.platform, limits, namespace)
    if context.get("serviceaccounts", context.service_account) is not None:
        yield from _check_rights(context, kind, namespace)


def _check_grace_period(runtime: dict[str, Any], pods: TrainJobSettings) -> CheckResult:
    """Check the grace period of a runtime, which jobs in a queue have; see `job_manifests.build_trainjob`."""
    seconds = [
        job["template"]["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
        for job in (runtime.get("spec") or {}).get("template", {}).get("spec", {}).get("replicatedJobs", [])
        if job["name"] == TRAINER_CONTAINER
    ]
    needed, given = pods.save_seconds + EXIT_GRACE_SECONDS, min(seconds, default=DEFAULT_GRACE_SECONDS)
    found = (
        f"{given} s; required: {needed} s ({pods.save_seconds} s of save_seconds, and {EXIT_GRACE_SECONDS} s to exit)"
    )
    hint = (
        f"Set terminationGracePeriodSeconds of the runtime {pods.runtime} to {needed} or more: queued jobs use the "
        "runtime's value."
    )
    return check_result(f"grace period of the runtime {pods.runtime}", given >= needed, found, hint)


def check_limits(platform: Platform, limits: JsonObject, namespace: str) -> Iterator[CheckResult]:
    """Check that the limits of a namespace's launcher allow the pods of the training.

    Args:
        platform: the content of platform.yaml, with a launcher whose jobs are Kubernetes resources.
        limits: the ConfigMap that deploy/components/launcher-policies reads.
        namespace: the namespace of the jobs.
    """
    scheduling = pod_spec.merge_scheduling(platform.scheduling, platform.resources.fine_tuning.scheduling)
    pods = get_pod_settings(step_launcher.resolve_launcher(platform, scheduling))
    used = {
        "images": [pods.image],
        "claims": [pods.claim, *(claim.claim for claim in pods.claims)],
        "serviceAccounts": [pods.service_account or "default"],
        "pullSecrets": pods.pull_secrets,
        "capabilities": pods.capabilities,
        "labels": [f"{key}={value}" for key, value in pods.labels.items()],
        "annotations": [f"{key}={value}" for key, value in pods.annotations.items()],
    }
    if isinstance(pods, TrainJobSettings):
        used["runtimes"] = [f"{pods.runtime_kind}/{pods.runtime}"]
    allowed = {key: str((limits.get("data") or {}).get(key, "")).split("\n") for key in used}
    missing = [f"{value} ({key})" for key, values in used.items() for value in values if value not in allowed[key]]
    found = f"not in {LIMITS_NAME}: {', '.join(missing)}" if missing else f"all values are in {LIMITS_NAME}"
    hint = (
        f"Ask an administrator to list the values in the ConfigMap {LIMITS_NAME} in {namespace}, or correct "
        "platform.yaml."
    )
    yield check_result("limits of the launcher", not missing, found, hint)


def _check_rights(context: CheckContext, kind: ResourceKind, namespace: str) -> Iterator[CheckResult]:
    """Check the rights of the step's pod: those that the launcher needs, and those that add detail to its status."""

    def is_missing(verb: str, group: str, plural: str) -> bool:
        return not has_right(context, verb, group, plural, namespace=namespace, as_pods=True)

    name, account = f"rights to manage {kind.plural}", context.service_account
    hint = LAUNCHER_RBAC_HINT.format(kind=kind.kind.lower())
    try:
        verbs = [verb for verb in JOB_VERBS if is_missing(verb, kind.group, kind.plural)]
        details = [f"{verb} {plural}" for verb, group, plural in STATUS_RIGHTS if is_missing(verb, group, plural)]
    except ForbiddenError:
        yield skipped_check(name, "the caller may not review the access of another account", hint)
        return
    has_all = f"{account} has all required rights in {namespace}"
    found = f"{account} may not {', '.join(verbs)} {kind.plural} in {namespace}" if verbs else has_all
    yield check_result(name, not verbs, found, hint)
    missing = f"{account} may not {', '.join(details)} in {namespace}"
    restricted = f"{missing}, so the status of training jobs has less detail"
    name, found = "rights to report the status of training jobs", restricted if details else has_all
    yield check_result(name, not details, found, hint, needed=False)
