"""Who is asking, who the pods are, and whether both may do what they have to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.cluster.access import ForbiddenError, Json, RefusedError
from pipelines.cluster.look import Look
from pipelines.findings import Finding, finding, unchecked

KUBEFLOW = "pipelines.kubeflow.org"
TO_SUBMIT = (
    ("create", KUBEFLOW, "runs"),
    ("get", KUBEFLOW, "runs"),
    ("create", KUBEFLOW, "experiments"),
    ("list", KUBEFLOW, "experiments"),
)
ARGO = "argoproj.io"
STORE_SECRET = "mlpipeline-minio-artifact"  # noqa: S105 - its name: the keys of Kubeflow's own artifact store
OF_THE_PODS = (
    ("create", ARGO, "workflowtaskresults", ""),
    ("patch", ARGO, "workflowtaskresults", ""),
    ("get", "", "configmaps", "kfp-launcher"),
)


def who(look: Look) -> str:
    """The name that the server knows the caller by; empty where it does not say (before Kubernetes 1.28)."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        answer = look.api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    except (ForbiddenError, RefusedError):
        return ""
    return str(answer.get("status", {}).get("userInfo", {}).get("username", ""))


def may(look: Look, verb: str, group: str, resource: str, name: str = "", namespace: str = "") -> bool:
    """Whether the caller may do this, in the run's namespace or another."""
    spec = {"resourceAttributes": _attributes(look, verb, group, resource, name, namespace)}
    return _allowed(look, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "SelfSubjectAccessReview", spec)


def lacking(look: Look) -> list[str]:
    """What the caller may not do of what Kubeflow's launcher and Argo's executor do in each pod."""
    return [_right(one) for one in OF_THE_PODS if not may(look, *one)]


def _right(one: tuple[str, str, str, str]) -> str:
    verb, _, resource, name = one
    return f"{verb} {resource} {name}".strip()


def to_submit(look: Look) -> Iterator[Finding]:
    """Kubeflow with several users asks Kubernetes whether the user may; Kubeflow for one user asks nobody."""
    name = "permission to submit"
    if not look.shared:
        yield finding(name, True, "not asked for by a Kubeflow for one user; --namespace says that it has several", "")
        return
    refused = [f"{verb} {resource}" for verb, group, resource in TO_SUBMIT if not may(look, verb, group, resource)]
    bind = look.kubectl("create rolebinding tuneline-submit --clusterrole=kubeflow-pipelines-edit")
    hint = f"Have an administrator run: {bind} --user={look.user or 'USER'}"
    yield finding(name, not refused, f"{look.user or 'the caller'} may not {', '.join(refused)}" if refused else _is(look), hint)


def _is(look: Look) -> str:
    return f"{look.user or 'the caller'} may in {look.namespace}"


def of_the_account(look: Look) -> Iterator[Finding]:
    """What Kubeflow's launcher and Argo's executor do in each pod, as the pod's account."""
    name = f"rights of the service account {look.account}"
    if look.get("serviceaccounts", look.account) is None:
        return  # told already
    rights = [*OF_THE_PODS, *([("get", "", "secrets", STORE_SECRET)] if _has_store_secret(look) else [])]
    try:
        refused = [_right(one) for one in rights if not pods_may(look, *one)]
    except ForbiddenError:
        check = look.kubectl(
            f"auth can-i create workflowtaskresults.argoproj.io --as=system:serviceaccount:{look.namespace}:{look.account}"
        )
        yield unchecked(name, "reviewing another account's access is forbidden", f"Have an administrator ask: {check}")
        return
    role = "--clusterrole=kubeflow-edit" if look.shared else "--role=pipeline-runner"
    bind = look.kubectl(f"create rolebinding {look.account} {role} --serviceaccount={look.namespace}:{look.account}")
    hint = f"Bind the role that Kubeflow's own account has: {bind}"
    yield finding(name, not refused, f"it may not {', '.join(refused)}" if refused else "as Kubeflow's launcher needs", hint)


def _has_store_secret(look: Look) -> bool:
    """Where the artifact store is another, with other credentials, nobody reads this one."""
    try:
        return look.get("secrets", STORE_SECRET) is not None
    except ForbiddenError:
        return False


def pods_may(look: Look, verb: str, group: str, resource: str, name: str = "", namespace: str = "") -> bool:
    """Whether the account of the pods may do this, in the run's namespace or another. Raises ForbiddenError where that may not be asked."""
    full = f"system:serviceaccount:{look.namespace}:{look.account}"
    if look.user == full:
        return may(look, verb, group, resource, name, namespace)
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{look.namespace}", "system:authenticated"]
    spec = {"resourceAttributes": _attributes(look, verb, group, resource, name, namespace), "user": full, "groups": groups}
    within = namespace or look.namespace  # a local review is about the namespace that it is made in
    path = f"/apis/authorization.k8s.io/v1/namespaces/{within}/localsubjectaccessreviews"
    return _allowed(look, path, "LocalSubjectAccessReview", spec, within)


def _attributes(look: Look, verb: str, group: str, resource: str, name: str, namespace: str) -> dict[str, Any]:
    said = {"namespace": namespace or look.namespace, "verb": verb, "group": group, "resource": resource, "name": name}
    return {key: value for key, value in said.items() if value}


def _allowed(look: Look, path: str, kind: str, spec: Json, namespace: str = "") -> bool:
    metadata = {"namespace": namespace} if namespace else {}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
    return bool(look.api.create(path, body).get("status", {}).get("allowed"))
