"""The servers that a run talks to: MLflow, and Kubeflow Pipelines."""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from urllib.parse import urlsplit

from components.common import addresses
from components.common.errors import EngineMissingError, TunelineError
from pipelines import submitting
from pipelines.cluster.access import ForbiddenError, Json, within
from pipelines.cluster.look import Look
from pipelines.cluster.secrets import masked, trust, value_of
from pipelines.findings import Finding, finding, unchecked
from pipelines.platform import Platform

SECONDS = 5.0  # for one call
ALL_WITHIN = 10.0  # seconds, for one server
INSIDE = (".svc", ".cluster.local")
HERE = ("localhost", "127.0.0.1", "::1")
LIST = "/api/2.0/mlflow/experiments/search?max_results=1"
CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
WHERE_SAID = "mlflow.tracking_uri in platform.yaml"
TOKEN = "secrets: {MLFLOW_TRACKING_TOKEN: {name: SECRET, key: KEY}}"  # noqa: S105 - how a secret is named
OLDEST = (2, 0)
NEEDS = {"security": (2, 16), "run.timeout_seconds": (2, 17), "run.keep_seconds": (2, 17)}


def mlflow(look: Look) -> Iterator[Finding]:
    """The tracking server as the pods will find it, as far as that can be seen from here."""
    try:
        address = _tracking(look)
    except ForbiddenError as error:
        yield unchecked(
            "MLflow", f"its address is in a secret that may not be read ({error.message})", "The pipeline's first step asks it."
        )
        return
    if not address:
        yield finding("MLflow", True, "a file on the volume, which serves one run at a time", "")
        return
    host = urlsplit(addresses.split(address)[0]).hostname or ""
    if host in HERE:
        hint = f"Set {WHERE_SAID} to an address that the pods can see, for example http://mlflow.mlflow:5000."
        yield finding("MLflow", False, f"{host} is each pod itself, where no MLflow runs", hint)
        return
    yield _service(look, host) or _asked(look, address)


def _tracking(look: Look) -> str:
    """The tracking server's address; one in a secret wins. Empty: none."""
    held = look.platform.secrets.get("MLFLOW_TRACKING_URI")
    return value_of(look, held.name, held.key) if held else look.platform.mlflow.tracking_uri


def _service(look: Look, host: str) -> Finding | None:
    """A server that only pods can see, by its Service and what stands behind it; None for a host outside the cluster."""
    name, _, rest = host.removesuffix(".cluster.local").removesuffix(".svc").partition(".")
    namespace = rest or look.namespace
    if "." in namespace:
        return None
    try:
        found = look.api.get(f"/api/v1/namespaces/{namespace}/services/{name}")
        if found is None:
            return _no_service(name, namespace) if host.endswith(INSIDE) or not rest else None
        behind = look.api.get(f"/api/v1/namespaces/{namespace}/endpoints/{name}") or {}
    except ForbiddenError as error:
        inside = host.endswith(INSIDE) or not rest
        return unchecked("MLflow", f"only pods can see {host}: {error.message}", "The pipeline's first step asks it.") if inside else None
    ready = sum(len(one.get("addresses") or []) for one in behind.get("subsets") or [])
    hint = f"Start it: kubectl -n {namespace} get pods; kubectl -n {namespace} describe service {name}"
    said = f"only pods can see {host}: its Service has {ready} ready {'address' if ready == 1 else 'addresses'}"
    return finding("MLflow", ready > 0, said, hint)


def _no_service(name: str, namespace: str) -> Finding:
    return finding(
        "MLflow", False, f"there is no Service {name} in the namespace {namespace}",
        f"Correct {WHERE_SAID}; kubectl get services -A lists what there is.",
    )  # fmt: skip


def _asked(look: Look, address: str) -> Finding:
    """A server that this machine can see too, asked for an experiment with the credentials of the pods."""
    shown, user, password = addresses.split(address)
    try:
        given = _credentials(look, user, password)
    except ForbiddenError:
        given = None
    context = trust(look)
    try:
        status, version = within(ALL_WITHIN, shown, lambda: _experiments(shown.rstrip("/"), given or {}, context))
    except (TunelineError, OSError, ValueError, HTTPException) as error:
        hint = f"Start it, or correct {WHERE_SAID}. Where only pods can see it, the pipeline's first step says whether they do."
        return finding("MLflow", False, f"{shown} does not answer: {_reason(error)}", hint)
    if status in (401, 403) and given is None:
        return unchecked("MLflow", f"{shown} asks who is there, and the secrets may not be read", "The pipeline's first step asks it.")
    if status in (401, 403):
        why = "does not accept the token or password" if given else "asks for a token, and none is named"
        hint = f"Renew the value in the secret that platform.yaml names; where none is named: {TOKEN}"
        return finding("MLflow", False, f"{shown} {why}: status {status}", hint)
    return finding(
        "MLflow",
        status == 200,
        f"MLflow {version} at {shown}" if status == 200 else f"{shown} answers with status {status}, which is no MLflow",
        f"Correct {WHERE_SAID}.",
    )


def _credentials(look: Look, user: str, password: str) -> dict[str, str]:
    """The header that MLflow's client would send."""
    values = {name: value_of(look, one.name, one.key) for name, one in look.platform.secrets.items() if name in CREDENTIALS}
    token = values.get("MLFLOW_TRACKING_TOKEN", "")
    user = values.get("MLFLOW_TRACKING_USERNAME") or look.platform.environment.get("MLFLOW_TRACKING_USERNAME") or user
    password = values.get("MLFLOW_TRACKING_PASSWORD") or password
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _experiments(address: str, headers: dict[str, str], context: ssl.SSLContext) -> tuple[int, str]:
    """The status of a list of experiments, 599 where it is none, and the server's version."""
    status, text = _get(address + LIST, headers, context)
    if status == 200 and not _is_object(text):
        return 599, ""
    _, version = _get(f"{address}/version", headers, context) if status == 200 else (0, "")
    return status, version.strip() if re.fullmatch(r"\s*\d[\w.]*\s*", version) else "of unknown version"


def _get(address: str, headers: dict[str, str], context: ssl.SSLContext) -> tuple[int, str]:
    request = urllib.request.Request(address)  # noqa: S310 - http or https, else it is said to be no address
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:  # noqa: S310
            return int(answer.status), answer.read(1 << 20).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def kubeflow(look: Look) -> Iterator[Finding]:
    """Kubeflow Pipelines: whether it answers, knows as many users as are meant, and is as new as the keys that are used."""
    server = look.kubeflow
    if server is None:
        hint = f"Give --endpoint (or KFP_ENDPOINT): {submitting.IN_CLUSTER}."
        yield unchecked("Kubeflow Pipelines", "no endpoint is named", hint)
        return
    try:
        said = within(ALL_WITHIN, server.address, lambda: submitting.health(server))
    except TunelineError as error:
        hint = error.hint if not error.message.endswith("seconds") else f"Check --endpoint and the network: {submitting.IN_CLUSTER}."
        yield finding("Kubeflow Pipelines", False, masked(error.message, server.used), hint)
        return
    yield _users(look, bool(said.get("multi_user"))) or _new_enough(look.platform, said, server.address)


def _users(look: Look, several: bool) -> Finding | None:
    if several == look.shared:
        return None
    if several:
        return finding(
            "Kubeflow Pipelines",
            False,
            "it has several users, and no namespace was named",
            "Give --namespace (or KFP_NAMESPACE): the profile's.",
        )
    said = "it has one user, and takes no namespace"
    return finding("Kubeflow Pipelines", False, said, "Leave --namespace and KFP_NAMESPACE out, here and in `tuneline submit`.")


def _new_enough(platform: Platform, said: Json, address: str) -> Finding:
    version = str(said.get("tag_name") or "unknown")
    number = re.match(r"v?(\d+)\.(\d+)", version)
    if not number:
        return finding("Kubeflow Pipelines", True, f"at {address}; its version is not told", "")
    has = int(number[1]), int(number[2])
    lacking = [key for key, needs in _used(platform).items() if has < needs]
    newest = max((NEEDS.get(key, OLDEST) for key in lacking), default=OLDEST)
    without = f", or take {' and '.join(lacking)} out of platform.yaml" if has >= OLDEST else ""
    hint = f"Update it to {newest[0]}.{newest[1]} or newer{without}."
    told = f"{version} at {address}"
    return finding("Kubeflow Pipelines", not lacking, f"{told}, which does not know {', '.join(lacking)}" if lacking else told, hint)


def _used(platform: Platform) -> dict[str, tuple[int, int]]:
    """The keys that are used and the version that each needs."""
    run, security = platform.run, platform.security.model_dump(exclude_none=True)
    used = {"security": bool(security), "run.timeout_seconds": bool(run.timeout_seconds), "run.keep_seconds": run.keep_seconds is not None}
    return {"compiled pipelines": OLDEST} | {key: NEEDS[key] for key, is_used in used.items() if is_used}


def _reason(error: Exception) -> str:
    if isinstance(error, EngineMissingError):
        return error.message.rpartition(" does not answer ")[2]
    cause = getattr(error, "reason", error)
    if "CERTIFICATE" in str(cause):
        return "its certificate cannot be verified; name the authority under network.certificates"
    return str(getattr(cause, "strerror", None) or cause)
