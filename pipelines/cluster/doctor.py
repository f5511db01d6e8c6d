"""What a cluster lacks for a platform.yaml, found before a GPU is taken; each finding says how to mend it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from components.common.errors import TunelineError
from pipelines.cluster import (
    access,
    admission,
    limits,
    namespace,
    nodes,
    permissions,
    queue,
    registry,
    secrets,
    services,
    storage,
    training,
)
from pipelines.cluster.access import Api
from pipelines.cluster.look import Check, Look, checked
from pipelines.findings import Finding, finding
from pipelines.platform import Platform
from pipelines.submitting import Server

OLDEST = (1, 29)  # the oldest Kubernetes whose schemas the pods are checked against
CHECKS: dict[str, Check] = {
    "namespace": namespace.exists,
    "pod security": namespace.pod_security,
    "permission to submit": permissions.to_submit,
    "service account": namespace.service_account,
    "rights of the service account": permissions.of_the_account,
    "claims": storage.claims,
    "storage class": storage.scratch_class,
    "secrets": secrets.secrets,
    "config maps": secrets.config_maps,
    "pull secrets": secrets.pull_secrets,
    "nodes": nodes.for_stages,
    "queue": queue.queues,
    "launcher": training.launcher,
    "limits and quotas": limits.limits,
    "trial of the pods": admission.trial,
    "MLflow": services.mlflow,
    "Kubeflow Pipelines": services.kubeflow,
    "images": registry.images,
}
WITHOUT_NAMESPACE = ("nodes", "MLflow", "Kubeflow Pipelines")  # the rest of the questions are about what is in it


def examine(
    platform: Platform,
    *,
    context: str = "",
    named: str = "",
    endpoint: str = "",
    token_file: Path | None = None,
    ca_cert: Path | None = None,
) -> list[Finding]:
    """Findings as `tuneline doctor` gives them. `named` is the namespace that `tuneline submit` would be given.

    Where no API server answers, that is the one finding, within ten seconds.
    """
    try:
        api = access.connect(context)
    except TunelineError as error:
        return [finding("cluster", False, error.message, error.hint)]
    kubeflow = Server(endpoint, named, token_file, ca_cert) if endpoint else None
    look = Look(api, platform, named or api.own_namespace, bool(named), kubeflow)
    return [_cluster(api), *_answered(look)]


def _answered(look: Look) -> Iterator[Finding]:
    """Everything else, as long as the server answers."""
    try:
        yield from checked("who is asking", look, _named)
        yield from _all(look)
    except TunelineError as error:
        yield finding("cluster", False, f"nothing more could be looked at: {error.message}", error.hint)


def _cluster(api: Api) -> Finding:
    try:
        version = str((api.get("/version") or {}).get("gitVersion", ""))
    except TunelineError:
        version = ""
    number = re.match(r"v(\d+)\.(\d+)", version)
    ok = number is None or (int(number[1]), int(number[2])) >= OLDEST
    hint = f"Pods are checked against Kubernetes {OLDEST[0]}.{OLDEST[1]} and later; update it, or try at your own risk."
    return finding("cluster", ok, f"Kubernetes {version or 'of unknown version'} at {api.address}", hint, needed=False)


def _named(look: Look) -> Iterator[Finding]:
    look.user = permissions.who(look)
    yield finding("who is asking", True, f"{look.user or 'somebody'}, about the namespace {look.namespace}", "")


def _all(look: Look) -> Iterator[Finding]:
    for name, check in CHECKS.items():
        if "no namespace" in look.failed and name not in WITHOUT_NAMESPACE:
            continue
        for one in checked(name, look, check):
            if one["needed"] and not one["ok"]:
                look.failed.add("no namespace" if name == "namespace" else str(one["name"]))
            yield one
