"""All preflight checks of a cluster for a platform.yaml. Each failed check has a hint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from components.common.reporting.check_findings import CheckResult, check_result
from components.common.runtime.errors import TunelineError
from pipelines.config.platform_config import Platform
from pipelines.kubeflow.preflight import (
    cluster_api,
    image_checks,
    launcher_checks,
    namespace_checks,
    namespace_limits,
    node_checks,
    permission_checks,
    pod_dry_run,
    queue_checks,
    secret_checks,
    service_checks,
    storage_checks,
)
from pipelines.kubeflow.preflight.check_context import Check, CheckContext, run_check
from pipelines.kubeflow.preflight.cluster_api import ClusterApi
from pipelines.kubeflow.submission import KubeflowServer

MIN_KUBERNETES_VERSION = (1, 29)  # the oldest version in the tests of the pods' schemas
CHECKS: dict[str, Check] = {
    "namespace": namespace_checks.check_namespace,
    "pod security": namespace_checks.check_pod_security,
    "permission to submit": permission_checks.check_submit_rights,
    "service account": namespace_checks.check_service_account,
    "rights of the service account": permission_checks.check_account_rights,
    "claims": storage_checks.check_claims,
    "storage class": storage_checks.check_scratch_class,
    "secrets": secret_checks.check_secrets,
    "config maps": secret_checks.check_config_maps,
    "pull secrets": secret_checks.check_pull_secrets,
    "nodes": node_checks.check_nodes,
    "queue": queue_checks.check_queues,
    "launcher": launcher_checks.check_launcher,
    "limits and quotas": namespace_limits.check_limits,
    pod_dry_run.CHECK_NAME: pod_dry_run.check_pods,
    "MLflow": service_checks.check_mlflow,
    "Kubeflow Pipelines": service_checks.check_kubeflow,
    "images": image_checks.check_images,
}
CLUSTER_SCOPED_CHECKS = ("nodes", "MLflow", "Kubeflow Pipelines")  # checks that do not depend on the namespace


def check_cluster(
    platform: Platform,
    *,
    context: str = "",
    namespace: str = "",
    endpoint: str = "",
    token_file: Path | None = None,
    ca_cert: Path | None = None,
    additional: Mapping[str, Check] | None = None,
) -> list[CheckResult]:
    """Return the results of all checks; if the API server does not answer, one failed result within ten seconds.

    Args:
        platform: the target environment.
        context: context of the kubeconfig; default: the current context.
        namespace: namespace in a multi-user Kubeflow; default: the namespace of the connection.
        endpoint: address of Kubeflow Pipelines; by default, the check of Kubeflow Pipelines is skipped.
        token_file: file with the token for Kubeflow Pipelines.
        ca_cert: PEM file with the CA certificate of Kubeflow Pipelines.
        additional: checks to run after the others, by name; they need no namespace.
    """
    try:
        api = cluster_api.connect(context)
    except TunelineError as error:
        return [check_result("cluster", False, error.message, error.hint)]
    kubeflow = KubeflowServer(endpoint, namespace, token_file, ca_cert) if endpoint else None
    check_context = CheckContext(api, platform, namespace or api.own_namespace, bool(namespace), kubeflow)
    results = [_check_version(api)]
    try:
        check_context.user = permission_checks.get_user_name(check_context)
        found = f"{check_context.user or 'unknown'}, in the namespace {check_context.namespace}"
        results.append(check_result("user", True, found, ""))
        for name, check in {**CHECKS, **(additional or {})}.items():
            is_namespaced = name in CHECKS and name not in CLUSTER_SCOPED_CHECKS
            if "no namespace" in check_context.failed and is_namespaced:
                continue
            for result in run_check(name, check_context, check):
                if result["needed"] and not result["ok"]:
                    check_context.failed.add("no namespace" if name == "namespace" else str(result["name"]))
                results.append(result)
    except TunelineError as error:
        found = f"the remaining checks were skipped: {error.message}"
        results.append(check_result("cluster", False, found, error.hint))
    return results


def _check_version(api: ClusterApi) -> CheckResult:
    try:
        version = str((api.get("/version") or {}).get("gitVersion", ""))
    except TunelineError:
        version = ""
    number = re.match(r"v(\d+)\.(\d+)", version)
    ok = number is None or (int(number[1]), int(number[2])) >= MIN_KUBERNETES_VERSION
    minimum = ".".join(map(str, MIN_KUBERNETES_VERSION))
    hint = f"Update to Kubernetes {minimum} or later; earlier versions are not tested."
    found = f"Kubernetes {version or 'of unknown version'} at {api.address}"
    return check_result("cluster", ok, found, hint, needed=False)
