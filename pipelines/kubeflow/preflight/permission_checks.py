"""Checks of the caller's rights to submit runs, and of the rights of the pods' service account."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from components.common.launch import JsonObject
from components.common.launch.kubernetes.pod_scheduling import drop_empty
from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError, RefusedError

KUBEFLOW_GROUP = "pipelines.kubeflow.org"
# Rights as verb, group, resource, name.
SUBMIT_RIGHTS = (
    ("create", KUBEFLOW_GROUP, "runs", ""),
    ("get", KUBEFLOW_GROUP, "runs", ""),
    ("create", KUBEFLOW_GROUP, "experiments", ""),
    ("list", KUBEFLOW_GROUP, "experiments", ""),
)
ARGO_GROUP = "argoproj.io"
STORE_SECRET = "mlpipeline-minio-artifact"
# Rights that Kubeflow's launcher and Argo's executor require in each pod.
POD_RIGHTS = (
    ("create", ARGO_GROUP, "workflowtaskresults", ""),
    ("patch", ARGO_GROUP, "workflowtaskresults", ""),
    ("get", "", "configmaps", "kfp-launcher"),
)


def get_user_name(context: CheckContext) -> str:
    """Return the caller's user name on the server; "" before Kubernetes 1.28."""
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        answer = context.api.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    except (ForbiddenError, RefusedError):
        return ""
    return str(answer.get("status", {}).get("userInfo", {}).get("username", ""))


def has_right(
    context: CheckContext,
    verb: str,
    group: str,
    resource: str,
    name: str = "",
    *,
    namespace: str = "",
    as_pods: bool = False,
) -> bool:
    """Return whether the caller, or the pods' service account, has a right in a namespace.

    Args:
        context: the cluster and the platform.
        verb: the verb of the right, such as "create".
        group: the API group; "" for the core group.
        resource: the plural resource name.
        name: the object's name; default: all objects.
        namespace: default: the run's namespace.
        as_pods: review the access of the pods' service account instead of the caller's.

    Raises:
        ForbiddenError: the caller may not review another account's access.
    """
    account = f"system:serviceaccount:{context.namespace}:{context.service_account}"
    namespace = namespace or context.namespace
    location = {"namespace": namespace, "group": group, "resource": resource, "name": name}
    spec: JsonObject = {"resourceAttributes": drop_empty({**location, "verb": verb})}
    kind, path, metadata = "SelfSubjectAccessReview", "", {}
    if as_pods and context.user != account:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{context.namespace}", "system:authenticated"]
        spec |= {"user": account, "groups": groups}
        kind, path, metadata = "LocalSubjectAccessReview", f"namespaces/{namespace}/", {"namespace": namespace}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
    answer = context.api.create(f"/apis/authorization.k8s.io/v1/{path}{kind.lower()}s", body)
    return bool(answer.get("status", {}).get("allowed"))


def list_missing_rights(
    context: CheckContext, rights: Iterable[tuple[str, str, str, str]] = POD_RIGHTS, *, as_pods: bool = False
) -> list[str]:
    """Return the rights that the caller, or the pods' service account, lacks in the run's namespace.

    Args:
        context: the cluster and the platform.
        rights: tuples of verb, API group, resource and object name; default: the rights of each pod.
        as_pods: review the access of the pods' service account instead of the caller's.

    Returns:
        The missing rights as texts, such as "create runs".

    Raises:
        ForbiddenError: the caller may not review another account's access.
    """
    return [
        f"{verb} {resource} {name}".strip()
        for verb, group, resource, name in rights
        if not has_right(context, verb, group, resource, name, as_pods=as_pods)
    ]


def check_submit_rights(context: CheckContext) -> Iterator[CheckResult]:
    """Check the user's rights in a multi-user Kubeflow; a single-user Kubeflow requires no rights."""
    name, user = "permission to submit", context.user or "the caller"
    if not context.is_multi_user:
        yield check_result(
            name, True, "not required by a single-user Kubeflow; --namespace selects a multi-user Kubeflow", ""
        )
        return
    missing = list_missing_rights(context, SUBMIT_RIGHTS)
    bind = context.format_kubectl("create rolebinding tuneline-submit --clusterrole=kubeflow-pipelines-edit")
    hint = f"Ask an administrator to run: {bind} --user={context.user or 'USER'}"
    found = f"{user} may not {', '.join(missing)}" if missing else f"{user} may submit in {context.namespace}"
    yield check_result(name, not missing, found, hint)


def check_account_rights(context: CheckContext) -> Iterator[CheckResult]:
    """Check the rights that Kubeflow's launcher and Argo's executor need in each pod, as the pods' service account."""
    account, namespace = context.service_account, context.namespace
    name = f"rights of the service account {account}"
    if context.get("serviceaccounts", account) is None:
        return  # reported by another check
    try:
        has_store_secret = context.get("secrets", STORE_SECRET) is not None
    except ForbiddenError:
        has_store_secret = False
    rights = [*POD_RIGHTS, *([("get", "", "secrets", STORE_SECRET)] if has_store_secret else [])]
    try:
        missing = list_missing_rights(context, rights, as_pods=True)
    except ForbiddenError:
        command = f"auth can-i create workflowtaskresults.argoproj.io --as=system:serviceaccount:{namespace}:{account}"
        hint = f"Ask an administrator to run: {context.format_kubectl(command)}"
        yield skipped_check(name, "the caller may not review the access of another account", hint)
        return
    role = "--clusterrole=kubeflow-edit" if context.is_multi_user else "--role=pipeline-runner"
    bind = context.format_kubectl(f"create rolebinding {account} {role} --serviceaccount={namespace}:{account}")
    found = f"may not {', '.join(missing)}" if missing else "all rights that Kubeflow's launcher requires"
    yield check_result(name, not missing, found, f"Bind the role of Kubeflow's own account: {bind}")
