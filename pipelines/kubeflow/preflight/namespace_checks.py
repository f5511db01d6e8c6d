"""Checks of the runs' namespace: its existence, its Pod Security Standard, and the service account."""

from __future__ import annotations

from collections.abc import Iterator

from components.common.reporting.check_findings import CheckResult, check_result
from pipelines.kubeflow.preflight.check_context import CheckContext

POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"


def check_namespace(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the namespace exists; a run does not create it."""
    namespace = context.api.get(f"/api/v1/namespaces/{context.namespace}")
    name = f"namespace {context.namespace}"
    if namespace is None:
        create = f"kubectl create namespace {context.namespace}"
        hint = f"Set --namespace to an existing namespace, or create the missing namespace: {create}"
        yield check_result(name, False, "does not exist", hint)
        return
    phase = namespace.get("status", {}).get("phase", "Active")
    yield check_result(
        name,
        phase == "Active",
        phase.lower(),
        f"Set --namespace to another namespace; {context.namespace} is being deleted.",
    )


def check_pod_security(context: CheckContext) -> Iterator[CheckResult]:
    """Check that platform.yaml meets the enforced Pod Security Standard; Kubeflow sets the other fields of each pod."""
    namespace = context.api.get(f"/api/v1/namespaces/{context.namespace}") or {}
    level = (namespace.get("metadata", {}).get("labels") or {}).get(POD_SECURITY_LABEL, "none")
    ok = level != "restricted" or context.platform.security.run_as_non_root is True
    found = f"{level} is enforced" if level != "none" else "no level is enforced"
    hint = (
        "Set security: {run_as_user: UID, run_as_non_root: true} in platform.yaml, "
        "with the UID of the owner of the volume's folder."
    )
    yield check_result("pod security", ok, found if ok else f"{found}, but the pods do not set runAsNonRoot", hint)


def check_service_account(context: CheckContext) -> Iterator[CheckResult]:
    """Check that the service account of the pods exists."""
    account = context.service_account
    exists = context.get("serviceaccounts", account) is not None
    hint = (
        "Create the account with the role of Kubeflow's own account "
        f"({context.format_kubectl(f'create serviceaccount {account}')}), or correct run.service_account in "
        "platform.yaml."
    )
    yield check_result(f"service account {account}", exists, "exists" if exists else "does not exist", hint)
