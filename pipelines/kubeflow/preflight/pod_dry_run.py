"""Dry run of each pod: the API server validates it (dryRun=All) and creates nothing.

The dry run detects problems that no other check covers: admission webhooks, quotas with scopes, and security policies.
"""

from __future__ import annotations

from collections.abc import Iterator

from components.common.launch import JsonObject
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from pipelines.config.platform_config import Platform
from pipelines.kubeflow.preflight import kubeflow_pods, permission_checks
from pipelines.kubeflow.preflight.check_context import RBAC_HINT, CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError, RefusedError

CHECK_NAME = "pod dry run"
KUEUE_GATE = "kueue.x-k8s.io/admission"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUOTA_MESSAGE = "exceeded quota"  # temporary: Argo Workflows creates the pod again when other pods have ended
# If one of these checks failed, the dry run would only report the same cause.
PREREQUISITE_CHECKS = ("namespace", "service account", "pod security", "limit ranges", "resource quotas")


def check_pods(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the API server accepts every pod of the pipeline as Kubeflow creates it."""
    if failed := sorted(name for name in context.failed if name.startswith(PREREQUISITE_CHECKS)):
        yield skipped_check(CHECK_NAME, f"depends on {', '.join(failed)}", "Fix the failed checks.")
        return
    if not permission_checks.has_right(context, "create", "", "pods"):
        found = f"{context.user or 'the caller'} may not create pods in {context.namespace}"
        yield skipped_check(CHECK_NAME, found, RBAC_HINT)
        return
    accepted: list[JsonObject] = []
    for name, pod in build_pods(context.platform).items():
        metadata = {key: value for key, value in pod["metadata"].items() if key != "name"}
        metadata |= {"generateName": f"tuneline-doctor-{name}-", "namespace": context.namespace}
        body = {**pod, "metadata": metadata, "spec": {**pod["spec"], "serviceAccountName": context.service_account}}
        try:
            accepted.append(context.api.create(f"{context.build_path('pods')}?dryRun=All", body))
        except (ForbiddenError, RefusedError) as error:
            hint = (
                "Set the required values in platform.yaml (scheduling.labels, images, security, resources), "
                "or contact the owner of the policy."
            )
            is_required = QUOTA_MESSAGE not in error.message
            found = f"the pod of {name} is rejected: {error.message}"
            yield check_result(CHECK_NAME, False, found, hint, needed=is_required)
            return
    yield check_result(CHECK_NAME, True, f"the API server accepts all {len(accepted)} pods", "")
    yield from _check_gates(accepted)


def _check_gates(pods: list[JsonObject]) -> Iterator[CheckResult]:
    """Check that Kueue holds queued pods; it manages plain pods only if it is configured for them."""
    queued = [pod for pod in pods if QUEUE_LABEL in (pod["metadata"].get("labels") or {})]
    if not queued:
        return
    gates = ([gate["name"] for gate in pod["spec"].get("schedulingGates", [])] for pod in queued)
    is_managed = all(KUEUE_GATE in names for names in gates)
    bypass = "Kueue does not manage the pods, so they would bypass its queue"
    found = "Kueue gates the pods until it admits them" if is_managed else bypass
    hint = "Add `pod` to integrations.frameworks in Kueue's configuration, and the namespace to the managed namespaces."
    yield check_result("Kueue and pods", is_managed, found, hint, needed=False)


def build_pods(platform: Platform) -> dict[str, JsonObject]:
    """Return every pod of the pipeline by step, as Kubeflow creates it for this platform."""
    from pipelines.config.customization_config import Customization
    from pipelines.definition import compilation

    return kubeflow_pods.build_pods(compilation.compile_pipeline(Customization(), platform))
