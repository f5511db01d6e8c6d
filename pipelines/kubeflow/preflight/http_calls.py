"""HTTP calls to the registries and the MLflow server of a run."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

from components.common.runtime.errors import EngineMissingError
from pipelines.kubeflow.preflight.cluster_api import CERTIFICATE_PROBLEM

CALL_TIMEOUT_SECONDS = 5.0  # for one request
MAX_ANSWER_BYTES = 1 << 20


def send(
    address: str, authorization: str, ssl_context: ssl.SSLContext, *, method: str = "GET", accept: str = ""
) -> tuple[int, str, str]:
    """Send a request; the credentials do not follow a redirect.

    Args:
        address: the HTTP or HTTPS URL.
        authorization: value of the header Authorization; "" to send no credentials.
        ssl_context: the trust store for HTTPS.
        method: the HTTP method.
        accept: value of the header Accept; default: no header.

    Returns:
        The status, the text ("" for an error status), and the challenge of the header WWW-Authenticate or "".

    Raises:
        OSError, ValueError, HTTPException: the server does not answer, or the address is invalid.
    """
    headers = {"Accept": accept} if accept else {}
    request = urllib.request.Request(address, method=method, headers=headers)  # noqa: S310 - http(s) by the callers
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_SECONDS, context=ssl_context) as answer:  # noqa: S310
            return int(answer.status), answer.read(MAX_ANSWER_BYTES).decode(errors="replace"), ""
    except urllib.error.HTTPError as error:
        return error.code, "", str(error.headers.get("WWW-Authenticate", ""))


def describe_failure(error: Exception) -> str:
    """Return the reason of a failed call, as text that can follow "SERVER does not answer: "."""
    if isinstance(error, EngineMissingError):
        return error.message.rpartition(" does not answer ")[2]
    cause = getattr(error, "reason", error)
    if "CERTIFICATE" in str(cause):
        return CERTIFICATE_PROBLEM
    return str(getattr(cause, "strerror", None) or getattr(error, "message", None) or cause)
