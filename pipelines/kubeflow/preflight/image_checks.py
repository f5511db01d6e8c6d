"""Checks that the registries have the images, through the OCI distribution API with the credentials of the nodes.

Specifications: https://github.com/opencontainers/distribution-spec/blob/main/spec.md and, for tokens,
https://distribution.github.io/distribution/spec/auth/token/
"""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlencode

from components.common.reporting.check_findings import CheckResult, check_result, skipped_check
from components.common.runtime.errors import EngineMissingError
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.kubeflow.preflight.cluster_api import ForbiddenError, run_with_timeout
from pipelines.kubeflow.preflight.http_calls import describe_failure, send
from pipelines.kubeflow.preflight.secret_checks import build_trust_context, collect_logins

DOCKER_HUB_HOST = "registry-1.docker.io"
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json"
)
IMAGE_TIMEOUT_SECONDS = 15.0  # for one image: a request, a token request, and the repeated request
UNREACHABLE_HINT = (
    "Check that the nodes can reach the registry; otherwise, pods wait in ImagePullBackOff (kubectl describe pod)."
)
REFERENCE_PATTERN = re.compile(
    r"(?P<name>[^@]+?)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]*))?(?:@(?P<digest>[a-z0-9]+:[0-9a-f]+))?"
)


def check_images(context: CheckContext) -> Iterator[CheckResult]:
    """Check each image once; several stages may use the same image."""
    images = context.platform.images
    for image in dict.fromkeys((images.curation, images.training, images.evaluation, images.serving)):
        yield _check_image(context, image)


def _check_image(context: CheckContext, image: str) -> CheckResult:
    title = f"image {image}"
    if context.platform.images.pull_policy == "Never":
        found = "images.pull_policy is Never; the image must already exist on the nodes"
        return skipped_check(title, found, "Load the image on each node that may run a stage.")
    registry, name, reference = parse_image(image)
    login, unread = None, ""
    try:
        account = context.get("serviceaccounts", context.service_account)
        login = collect_logins(context, account).get(registry)
    except ForbiddenError:
        unread = "the caller may not read the pull secrets"
    ssl_context = build_trust_context(context)
    try:
        status = run_with_timeout(
            IMAGE_TIMEOUT_SECONDS, registry, lambda: _request_manifest(registry, name, reference, login, ssl_context)
        )
    except (EngineMissingError, OSError, ValueError, HTTPException) as error:
        return skipped_check(title, f"{registry} does not answer: {describe_failure(error)}", UNREACHABLE_HINT)
    if status == 200:
        return check_result(title, True, f"available in {registry}", "")
    if status not in (401, 403, 404):
        return skipped_check(title, f"{registry} returned status {status}", UNREACHABLE_HINT)
    if unread:  # registries return 404 to anonymous callers
        problem = "returned status 404 without credentials" if status == 404 else "requires credentials"
        hint = "Run the check as a user who may read the secrets."
        return skipped_check(title, f"{registry} {problem}, and {unread}", hint)
    if status == 404:
        hint = "Push the image, or correct its name and digest under images in platform.yaml."
        return check_result(title, False, f"not found in {registry}", hint)
    command = context.format_kubectl(
        f"create secret docker-registry NAME --docker-server={registry} "
        "--docker-username=USER --docker-password=PASSWORD"
    )
    hint = f"Add a secret that permits the pull to images.pull_secrets in platform.yaml, created with: {command}"
    return check_result(title, False, f"{registry} denies access: status {status}", hint)


def parse_image(image: str) -> tuple[str, str, str]:
    """Return registry, repository, and tag or digest (default: latest) of an image name, as container runtimes do."""
    first, slash, rest = image.partition("/")
    is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    registry, path = (first, rest) if is_host else ("docker.io", image)
    found = REFERENCE_PATTERN.fullmatch(path)
    if found is None:
        return registry, path, "latest"
    name = found["name"] if "/" in found["name"] or registry != "docker.io" else f"library/{found['name']}"
    return registry, name, found["digest"] or found["tag"] or "latest"


def _request_manifest(
    registry: str, name: str, reference: str, login: tuple[str, str] | None, ssl_context: ssl.SSLContext
) -> int:
    """Return the status of a request for the manifest: 200 if it exists. Raises OSError without an answer."""
    host = DOCKER_HUB_HOST if registry == "docker.io" else registry
    scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"  # as container runtimes do
    address = f"{scheme}://{host}/v2/{name}/manifests/{reference}"
    status, _, challenge = send(address, "", ssl_context, method="HEAD", accept=MANIFEST_TYPES)
    if status != 401:
        return status
    # The challenge requires the login itself, or a token of the registry's authorization service.
    authorization = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}" if login else ""
    kind, _, rest = challenge.partition(" ")
    fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    if kind.lower() == "bearer" and fields.get("realm", "").startswith(("http://", "https://")):
        scope = fields.get("scope") or f"repository:{name}:pull"
        query = urlencode({"service": fields.get("service", ""), "scope": scope})
        answer = None
        with suppress(ValueError):
            answer = json.loads(send(f"{fields['realm']}?{query}", authorization, ssl_context)[1])
        token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else ""
        authorization = f"Bearer {token}" if token else ""
    if authorization:
        status, *_ = send(address, authorization, ssl_context, method="HEAD", accept=MANIFEST_TYPES)
    return status
