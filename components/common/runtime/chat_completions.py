"""Requests to OpenAI-compatible chat endpoints: sending, delays between retries, and errors without the API key.

The key is sent in a header and does not appear in messages or logs. Redirects are not followed, because they could
send the key to another server.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from components.common.runtime import http_client
from components.common.runtime.errors import ConfigurationError

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
REQUEST_ERROR_STATUSES = frozenset({400, 413, 422})  # possibly specific to the request, such as too long
INITIAL_BACKOFF_SECONDS = 0.5  # doubled with each retry
MAX_BACKOFF_SECONDS = 20.0  # also the limit for Retry-After
MAX_RESPONSE_BYTES = 4 << 20
MAX_ERROR_CHARACTERS = 200  # of the endpoint's error text


def post(base_url: str, key: str, body: Mapping[str, object], timeout_seconds: float) -> Any:
    """Send a request and return the JSON value of the response.

    Args:
        base_url: the URL without /chat/completions, http or https.
        key: the API key; "" for no key.
        body: the request.
        timeout_seconds: the timeout of the connection and of each read.

    Raises:
        urllib.error.HTTPError: the status is not 2xx.
        OSError, http.client.HTTPException: the endpoint does not answer.
        ValueError: the response is not JSON.
    """
    url = base_url.rstrip("/") + "/chat/completions"
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    # The settings of the callers allow only the schemes http and https.
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with http_client.build_opener(url).open(request, timeout=timeout_seconds) as response:
        content = response.read(MAX_RESPONSE_BYTES)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the response is nested too deeply") from None


def describe_status(error: urllib.error.HTTPError, key: str) -> str:
    """Return the status and the start of the error's text, without the key, and close the response."""
    text = ""
    with contextlib.suppress(OSError, HTTPException, ValueError):
        text = error.read(MAX_RESPONSE_BYTES).decode("utf-8", "replace")
    error.close()
    if key:  # removed before the text is cut, which could split the key
        text = text.replace(key, "[key]")
    text = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:MAX_ERROR_CHARACTERS]
    return f"HTTP {error.code}{f': {text}' if text else ''}"


def describe_failure(error: Exception) -> str:
    """Return the type of a failed request's error, and the system's message. Another text may contain the key."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    message = f": {os.strerror(cause.errno)}" if isinstance(cause, OSError) and cause.errno else ""
    if isinstance(cause, socket.gaierror):  # its numbers are not those of the system's errors
        message = f": {cause.strerror}"
    return type(cause).__name__ + message


def compute_backoff(attempt: int, error: urllib.error.HTTPError | None = None) -> float:
    """Return the delay in seconds after a failed attempt, counted from 0: doubled each time, at least Retry-After."""
    requested = 0.0
    if error is not None:
        with contextlib.suppress(ValueError):
            requested = float(error.headers.get("Retry-After", "0"))
    return min(max(INITIAL_BACKOFF_SECONDS * 2.0**attempt, requested), MAX_BACKOFF_SECONDS)


def read_api_key(variable: str, setting: str, step: str) -> str:
    """Return the API key in an environment variable; "" for an empty name.

    Args:
        variable: the name of the variable.
        setting: the key of the configuration that names it.
        step: the step that needs it, for the hint.

    Raises:
        ConfigurationError: the variable is not set.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigurationError(
            f"{setting}: the environment variable {variable} is not set",
            hint=f"Set {variable} in the environment of the {step}.",
        )
    return key
