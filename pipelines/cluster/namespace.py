"""The namespace of the runs: whether it is there, what it enforces, and the service account in it."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.cluster.look import Look
from pipelines.findings import Finding, finding

ENFORCED = "pod-security.kubernetes.io/enforce"


def exists(look: Look) -> Iterator[Finding]:
    """The namespace, which a run does not make."""
    found = look.api.get(f"/api/v1/namespaces/{look.namespace}")
    name = f"namespace {look.namespace}"
    if found is None:
        hint = f"Name the right one with --namespace, or make it: kubectl create namespace {look.namespace}"
        yield finding(name, False, "it does not exist", hint)
        return
    phase = found.get("status", {}).get("phase", "Active")
    yield finding(name, phase == "Active", phase.lower(), "It is being deleted: name another one with --namespace.")


def pod_security(look: Look) -> Iterator[Finding]:
    """The Pod Security Standard that the namespace enforces, against what platform.yaml says. Kubeflow says the rest in each pod."""
    found = look.api.get(f"/api/v1/namespaces/{look.namespace}") or {}
    level = (found.get("metadata", {}).get("labels") or {}).get(ENFORCED, "none")
    ok = level != "restricted" or look.platform.security.run_as_non_root is True
    hint = "In platform.yaml: security: {run_as_user: UID, run_as_non_root: true}, with the UID that owns the volume's folder."
    said = f"{level} is enforced" if level != "none" else "nothing is enforced"
    yield finding("pod security", ok, said if ok else f"{said}, and the pods would not say that they do not run as root", hint)


def service_account(look: Look) -> Iterator[Finding]:
    """The account that the pods run as."""
    found = look.get("serviceaccounts", look.account)
    hint = (
        f"{look.kubectl(f'create serviceaccount {look.account}')}, with the role that Kubeflow's own account has; "
        "or name another one under run.service_account in platform.yaml."
    )
    yield finding(f"service account {look.account}", found is not None, "it is there" if found else "it does not exist", hint)
