"""Images: whether the registry has them, asked over the OCI distribution API with the credentials that the nodes would use.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md, and for tokens https://distribution.github.io/distribution/spec/auth/token/
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from urllib.parse import urlencode

from components.common.errors import EngineMissingError
from pipelines.cluster.access import ForbiddenError, within
from pipelines.cluster.look import Look
from pipelines.cluster.secrets import logins, trust
from pipelines.findings import Finding, finding, unchecked

HUB = "registry-1.docker.io"
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
SECONDS = 5.0  # for one call
ALL_WITHIN = 15.0  # seconds, for one image: the call, a token, the call again
FROM_HERE = (
    "The nodes may reach a registry that this machine does not; a pod that waits in ImagePullBackOff says so (kubectl describe pod)."
)
REFERENCE = re.compile(r"(?P<name>[^@]+?)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]*))?(?:@(?P<digest>[a-z0-9]+:[0-9a-f]+))?")


def images(look: Look) -> Iterator[Finding]:
    """One finding an image. Several runtimes may share one."""
    named = look.platform.images
    for image in dict.fromkeys((named.curation, named.training, named.evaluation, named.serving)):
        yield _image(look, image)


def _image(look: Look, image: str) -> Finding:
    title = f"image {image}"
    if look.platform.images.pull_policy == "Never":
        return unchecked(
            title, "images.pull_policy is Never: the nodes must have it already", "Load it on each node that a stage may run on."
        )
    registry, name, reference = parts(image)
    try:
        login, unread = logins(look, look.get("serviceaccounts", look.account)).get(registry), ""
    except ForbiddenError:
        login, unread = None, "the pull secrets may not be read"
    context = trust(look)
    try:
        status = within(ALL_WITHIN, registry, lambda: _status(registry, name, reference, login, context))
    except (EngineMissingError, OSError, ValueError, HTTPException) as error:
        return unchecked(title, f"{registry} does not answer here: {_reason(error)}", FROM_HERE)
    return _told(look, title, registry, status, unread)


def _told(look: Look, title: str, registry: str, status: int, unread: str) -> Finding:
    if status == 200:
        return finding(title, True, f"{registry} has it", "")
    if status == 404 and unread:  # what they say of an image to nobody in particular
        return unchecked(title, f"{registry} does not show it without credentials, and {unread}", "Have somebody look who may read them.")
    if status == 404:
        return finding(
            title, False, f"{registry} does not have it", "Push it there, or correct its name and digest under images in platform.yaml."
        )
    if status in (401, 403) and unread:
        return unchecked(title, f"{registry} asks for credentials, and {unread}", "Have somebody look who may read them.")
    if status in (401, 403):
        make = look.kubectl(
            f"create secret docker-registry NAME --docker-server={registry} --docker-username=USER --docker-password=PASSWORD"
        )
        return finding(
            title,
            False,
            f"{registry} does not give it out: status {status}",
            f"Name a secret that may pull it under images.pull_secrets: {make}",
        )
    return unchecked(title, f"{registry} answers with status {status}", FROM_HERE)


def parts(image: str) -> tuple[str, str, str]:
    """Registry, name there, and tag or digest, as container runtimes read an image's name."""
    first, slash, rest = image.partition("/")
    is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    registry, path = (first, rest) if is_host else ("docker.io", image)
    found = REFERENCE.fullmatch(path)
    if found is None:
        return registry, path, "latest"
    name = found["name"] if "/" in found["name"] or registry != "docker.io" else f"library/{found['name']}"
    return registry, name, found["digest"] or found["tag"] or "latest"


def _status(registry: str, name: str, reference: str, login: tuple[str, str] | None, context: ssl.SSLContext) -> int:
    """What the registry answers to a question for the manifest: 200 where it has it. Raises OSError where it does not answer."""
    host = HUB if registry == "docker.io" else registry
    plain = host.partition(":")[0] in ("localhost", "127.0.0.1")  # as container runtimes do
    address = f"{'http' if plain else 'https'}://{host}/v2/{name}/manifests/{reference}"
    status, challenge = _ask(address, "", context)
    if status != 401:
        return status
    authorization = _authorization(challenge, name, login, context)
    return _ask(address, authorization, context)[0] if authorization else status


def _ask(address: str, authorization: str, context: ssl.SSLContext) -> tuple[int, str]:
    request = urllib.request.Request(address, method="HEAD", headers={"Accept": ", ".join(MANIFESTS)})  # noqa: S310 - http(s) by the caller
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:  # noqa: S310
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers.get("WWW-Authenticate", ""))


def _authorization(challenge: str, name: str, login: tuple[str, str] | None, context: ssl.SSLContext) -> str:
    """What answers a registry's challenge: the login itself, or a token that its authorisation service gives for it."""
    basic = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}" if login else ""
    scheme, _, rest = challenge.partition(" ")
    said = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    if scheme.lower() != "bearer" or not said.get("realm", "").startswith(("http://", "https://")):
        return basic
    query = urlencode({"service": said.get("service", ""), "scope": said.get("scope") or f"repository:{name}:pull"})
    request = urllib.request.Request(f"{said['realm']}?{query}")  # noqa: S310 - http(s), checked above
    if basic:
        request.add_unredirected_header("Authorization", basic)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:  # noqa: S310
            given = json.loads(answer.read())
    except (urllib.error.HTTPError, ValueError):
        return ""
    token = (given.get("token") or given.get("access_token")) if isinstance(given, dict) else ""
    return f"Bearer {token}" if token else ""


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)
    if "CERTIFICATE" in str(cause):
        return "its certificate cannot be verified"
    return str(getattr(cause, "strerror", None) or getattr(error, "message", None) or cause)
