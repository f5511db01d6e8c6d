"""Checks of the servers of a run: MLflow and Kubeflow Pipelines."""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Iterator
from http.client import HTTPException
from urllib.parse import urlsplit

from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from components.common.runtime import url_credentials
from components.common.runtime.errors import TunelineError
from pipelines.kubeflow import submission
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.kubeflow.preflight.cluster_api import (
    CERTIFICATE_PROBLEM,
    ForbiddenError,
    SilentServerError,
    run_with_timeout,
)
from pipelines.kubeflow.preflight.http_calls import describe_failure, send
from pipelines.kubeflow.preflight.secret_checks import build_trust_context, read_secret_value

SERVER_TIMEOUT_SECONDS = 10.0  # for one server
CLUSTER_DOMAINS = (".svc", ".cluster.local")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
EXPERIMENTS_PATH = "/api/2.0/mlflow/experiments/search?max_results=1"
CREDENTIAL_VARIABLES = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
TRACKING_URI_KEY = "mlflow.tracking_uri in platform.yaml"
TOKEN_EXAMPLE = "secrets: {MLFLOW_TRACKING_TOKEN: {name: SECRET, key: KEY}}"
FIRST_STEP_HINT = "Start the run; its first step repeats this check."
MIN_KUBEFLOW_VERSION = (2, 0)
KEY_VERSIONS = {"security": (2, 16), "run.timeout_seconds": (2, 17), "run.keep_seconds": (2, 17)}


def check_mlflow(context: CheckContext) -> Iterator[CheckResult]:
    """Check the tracking server, or the Service of a server that only pods can reach."""
    secret = context.platform.secrets.get("MLFLOW_TRACKING_URI")  # a secret has precedence
    try:
        address = (
            read_secret_value(context, secret.name, secret.key) if secret else context.platform.mlflow.tracking_uri
        )
    except ForbiddenError as error:
        found = f"the address is in a secret that the caller may not read ({error.message})"
        yield skipped_check("MLflow", found, FIRST_STEP_HINT)
        return
    if not address:
        yield check_result("MLflow", True, "a file on the volume, which supports one run at a time", "")
        return
    host = urlsplit(url_credentials.split_credentials(address)[0]).hostname or ""
    if host in LOOPBACK_HOSTS:
        hint = f"Set {TRACKING_URI_KEY} to an address that the pods can reach, for example http://mlflow.mlflow:5000."
        yield check_result("MLflow", False, f"{host} refers to the pod itself, which does not run MLflow", hint)
        return
    if result := _check_service(context, host):
        yield result
        return
    # This machine can reach the server: list its experiments with the credentials of the pods.
    shown, user, password = url_credentials.split_credentials(address)
    authorization, is_readable = "", True
    try:
        authorization = _build_authorization(context, user, password)
    except ForbiddenError:
        is_readable = False
    ssl_context = build_trust_context(context)
    try:
        status, version = run_with_timeout(
            SERVER_TIMEOUT_SECONDS, shown, lambda: _list_experiments(shown.rstrip("/"), authorization, ssl_context)
        )
    except (TunelineError, OSError, ValueError, HTTPException) as error:
        reason = describe_failure(error)
        hint = f"Start MLflow, or correct {TRACKING_URI_KEY}. If only pods can reach the server, the first step of the run checks it."
        if reason == CERTIFICATE_PROBLEM:
            hint = "Set the CA certificate under network.certificates in platform.yaml."
        yield check_result("MLflow", False, f"{shown} does not answer: {reason}", hint)
        return
    if status not in (401, 403):
        found = f"MLflow {version} at {shown}"
        if status != 200:
            answer = "no JSON object" if status == 599 else f"status {status}"
            found = f"{shown} returned {answer}; expected the API of MLflow"
        yield check_result("MLflow", status == 200, found, f"Correct {TRACKING_URI_KEY}.")
    elif not is_readable:
        found = f"{shown} requires credentials, and the caller may not read the secrets"
        yield skipped_check("MLflow", found, FIRST_STEP_HINT)
    elif not authorization and not context.platform.secrets.keys().isdisjoint(CREDENTIAL_VARIABLES):
        found = f"{shown} requires credentials, and their secret is missing or incomplete"
        yield skipped_check("MLflow", found, "Fix the failed checks.")
    else:
        problem = (
            "does not accept the token or password" if authorization else "requires a token, which is not configured"
        )
        hint = f"Renew the credentials in the secret, or add a secret to platform.yaml: {TOKEN_EXAMPLE}"
        yield check_result("MLflow", False, f"{shown} {problem}: status {status}", hint)


def _check_service(context: CheckContext, host: str) -> CheckResult | None:
    """Check the Service and endpoints of a server inside the cluster; return None for a host outside the cluster."""
    name, _, rest = host.removesuffix(".cluster.local").removesuffix(".svc").partition(".")
    namespace, is_inside = rest or context.namespace, not rest or host.endswith(CLUSTER_DOMAINS)
    if "." in namespace:
        return None
    services = f"/api/v1/namespaces/{namespace}"
    try:
        if context.api.get(f"{services}/services/{name}") is None:
            found = f"the namespace {namespace} has no Service {name}"
            hint = f"Correct {TRACKING_URI_KEY}; kubectl get services -A lists all services."
            return check_result("MLflow", False, found, hint) if is_inside else None
        endpoints = context.api.get(f"{services}/endpoints/{name}") or {}
    except ForbiddenError as error:
        found = f"only pods can reach {host}: {error.message}"
        return skipped_check("MLflow", found, FIRST_STEP_HINT) if is_inside else None
    ready = sum(len(subset.get("addresses") or []) for subset in endpoints.get("subsets") or [])
    hint = f"Check MLflow's pods: kubectl -n {namespace} get pods; kubectl -n {namespace} describe service {name}"
    found = f"only pods can reach {host}: its Service has {ready} ready {'address' if ready == 1 else 'addresses'}"
    return check_result("MLflow", ready > 0, found, hint)


def _build_authorization(context: CheckContext, user: str, password: str) -> str:
    """Return the Authorization header that MLflow's client would send, or ""."""
    platform = context.platform
    values = {
        name: read_secret_value(context, secret.name, secret.key)
        for name, secret in platform.secrets.items()
        if name in CREDENTIAL_VARIABLES
    }
    user = values.get("MLFLOW_TRACKING_USERNAME") or platform.environment.get("MLFLOW_TRACKING_USERNAME") or user
    password = values.get("MLFLOW_TRACKING_PASSWORD") or password
    if user and password:
        return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    token = values.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else ""


def _list_experiments(address: str, authorization: str, ssl_context: ssl.SSLContext) -> tuple[int, str]:
    """Return the status of an experiment search (599: the answer is not a JSON object) and the server's version."""
    status, text, _ = send(address + EXPERIMENTS_PATH, authorization, ssl_context)
    if status != 200:
        return status, ""
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        return 599, ""
    _, version, _ = send(f"{address}/version", authorization, ssl_context)
    return status, version.strip() if re.fullmatch(r"\s*\d[\w.]*\s*", version) else "of unknown version"


def check_kubeflow(context: CheckContext) -> Iterator[CheckResult]:
    """Check that Kubeflow Pipelines answers, is single- or multi-user as configured, and supports the used keys."""
    title, server = "Kubeflow Pipelines", context.kubeflow
    if server is None:
        hint = f"Set --endpoint (or KFP_ENDPOINT): {submission.ENDPOINT_HINT}."
        yield skipped_check(title, "no endpoint is configured", hint)
        return
    try:
        health = run_with_timeout(SERVER_TIMEOUT_SECONDS, server.address, lambda: submission.get_health(server))
    except TunelineError as error:
        is_silent = isinstance(error, SilentServerError)
        hint = f"Check --endpoint and the network: {submission.ENDPOINT_HINT}." if is_silent else error.hint
        yield check_result(title, False, submission.mask_values(error.message, server.sent_credentials), hint)
        return
    if bool(health.get("multi_user")) != context.is_multi_user:
        found, hint = (
            "the server is in multi-user mode, and no namespace is set",
            "Set --namespace (or KFP_NAMESPACE) to the profile's namespace.",
        )
        if context.is_multi_user:
            found = f"the server is in single-user mode, and the namespace {context.namespace} is set"
            hint = "Remove --namespace and KFP_NAMESPACE, also for `tuneline submit`."
        yield check_result(title, False, found, hint)
        return
    found = f"{health.get('tag_name') or 'unknown'} at {server.address}"
    number = re.match(r"v?(\d+)\.(\d+)", found)
    if not number:
        yield check_result(title, True, f"at {server.address}; its version is unknown", "")
        return
    version, platform = (int(number[1]), int(number[2])), context.platform
    used = {
        "security": bool(platform.security.model_dump(exclude_none=True)),
        "run.timeout_seconds": bool(platform.run.timeout_seconds),
        "run.keep_seconds": platform.run.keep_seconds is not None,
    }
    required = {"compiled pipelines": MIN_KUBEFLOW_VERSION}
    required |= {key: minimum for key, minimum in KEY_VERSIONS.items() if used[key]}
    unsupported = {key: minimum for key, minimum in required.items() if version < minimum}
    newest = max(unsupported.values(), default=MIN_KUBEFLOW_VERSION)
    if unsupported:
        found += f", which does not support {', '.join(unsupported)}"
    alternative = (
        f", or remove {' and '.join(unsupported)} from platform.yaml" if version >= MIN_KUBEFLOW_VERSION else ""
    )
    yield check_result(
        title, not unsupported, found, f"Update Kubeflow Pipelines to {newest[0]}.{newest[1]} or later{alternative}."
    )
