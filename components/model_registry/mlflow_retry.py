"""Retries of calls to a busy or unreachable MLflow server, with exponential backoff up to a timeout.

Permanent errors (no permission, a read-only database, an invalid name) are raised at once. MLflow's own retries are
disabled, because after a lost response they would repeat the request and create a version twice.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from components.common.reporting.mlflow_tracking import TrackingUnavailableError
from components.common.runtime import url_credentials
from components.common.runtime.environment import patched_environment
from components.common.runtime.errors import ConfigurationError, NotWritableError, RegistryError, TunelineError

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

TIMEOUT_VARIABLE = "TUNELINE_REGISTRY_TIMEOUT_SECONDS"  # total time for a call and its retries
DEFAULT_TIMEOUT_SECONDS = 60.0
MIN_REQUEST_SECONDS = 10.0  # lower limit of MLflow's timeout for one request
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.25, 5.0
TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
# Two processes set the same tag or alias at once: MLflow reads before it inserts, so the later insert fails. Messages of
# SQLite, PostgreSQL and MySQL.
CONFLICT_PATTERN = re.compile(
    r"(UNIQUE constraint failed: |duplicate key value violates unique constraint|Duplicate entry ).*"
    r"(model_version_tag|registered_model_tag|registered_model_alias)",
    re.DOTALL,
)
DENIED_PATTERN = re.compile(r"\b(401|403) Client Error")
READ_ONLY_MESSAGES = ("readonly database", "read-only transaction", "read-only file system", "recovery is in progress")


def get_timeout_seconds() -> float:
    """Return the total time for a call and its retries.

    Raises:
        ConfigurationError: TIMEOUT_VARIABLE is not a number.
    """
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(given) if given else DEFAULT_TIMEOUT_SECONDS
        if math.isnan(seconds):
            raise ValueError
        return max(seconds, 0.0)
    except ValueError:
        raise ConfigurationError(
            f"{TIMEOUT_VARIABLE} is {given!r}; expected a number of seconds",
            hint=f"Set a number, or unset the variable for the default, {DEFAULT_TIMEOUT_SECONDS:.0f} seconds.",
        ) from None


def get_http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of MLflow or of an upload; None for other errors.

    A missing or incomplete response counts as status 503.
    """
    response = getattr(error, "response", None)
    if response is not None:
        return int(response.status_code)
    get_status = getattr(error, "get_http_status_code", None)
    if get_status is not None:
        denied = DENIED_PATTERN.search(str(error))  # a multi-file upload reports the status in its message
        return int(denied[1]) if denied else int(get_status())
    # requests sets `response` to None if the server sent no response.
    is_incomplete = type(error).__name__ == "JSONDecodeError" or hasattr(error, "response")
    return 503 if is_incomplete else None


def is_read_only(error: BaseException) -> bool:
    """Return whether the error reports that MLflow's database is read-only."""
    return any(message in str(error).lower() for message in READ_ONLY_MESSAGES)


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later."""
    status = get_http_status(error)
    return status is not None and (status in TRANSIENT_STATUSES or is_conflict(error)) and not is_read_only(error)


def is_conflict(error: BaseException) -> bool:
    """Return whether another process inserted the same tag or alias at the same moment; a repeated call replaces it."""
    return bool(CONFLICT_PATTERN.search(str(error)))


def retry(call: Callable[[], T], find_created: Callable[[], T | None] = lambda: None) -> T:
    """Return the result of a call to MLflow; retry the call while the server is busy or unreachable.

    Args:
        find_created: returns the object that an earlier attempt created, or None. `retry` calls it before every retry,
            because the response of the earlier attempt may have been lost.

    Raises:
        Exception: the error of the last attempt, if the error is permanent or the timeout has passed.
    """
    end, pause = time.monotonic() + get_timeout_seconds(), MIN_BACKOFF_SECONDS
    while True:
        try:
            with _request_settings():
                return call()
        except Exception as error:
            if not is_transient(error) or time.monotonic() + pause > end:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter spreads the retries of several clients
        pause = min(2 * pause, MAX_BACKOFF_SECONDS)
        found = find_created()
        if found is not None:
            return found


def limit_timeout(seconds: float) -> AbstractContextManager[None]:
    """Limit the timeout of calls within the block to this number of seconds."""
    return patched_environment({TIMEOUT_VARIABLE: f"{min(get_timeout_seconds(), seconds):g}"})


def _request_settings() -> AbstractContextManager[None]:
    """Disable MLflow's retries and limit its request timeout, which MLflow reads from the environment."""
    given = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "")
    timeout = float(given) if given.replace(".", "").isdecimal() else DEFAULT_TIMEOUT_SECONDS
    limit = max(get_timeout_seconds(), MIN_REQUEST_SECONDS)
    return patched_environment(
        {"MLFLOW_HTTP_REQUEST_TIMEOUT": f"{min(timeout, limit):.0f}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    )


class RetryingClient:
    """An MLflow client that retries every call except create_*, which requires `find_created` of `retry`."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name.startswith("create_") or not callable(call):
            return call
        return lambda *given, **named: retry(lambda: call(*given, **named))


def build_user_error(error: BaseException, client: MlflowClient | None = None) -> TunelineError:
    """Convert an error of MLflow to a TunelineError.

    Args:
        client: used to check whether the server still answers read requests.
    """
    whole = str(getattr(error, "message", error)).strip() or type(error).__name__
    first = whole.splitlines()[0]
    address = url_credentials.remove_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if is_read_only(error):
        return NotWritableError(
            f"MLflow at {address} cannot write: its database is read-only",
            hint="Set the tracking URI of the primary server, or make the database writable.",
        )
    if get_http_status(error) == 401:
        return RegistryError(
            f"MLflow at {address} rejected the credentials: {first[:300]}",
            hint="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
        )
    if get_http_status(error) == 403:
        return RegistryError(
            f"MLflow at {address} denied the request: {first[:300]}",
            hint="Request the permission EDIT on the model and its history NAME.history from the server's "
            "administrator; to promote a version a second time, request MANAGE on both.",
        )
    if not is_transient(error):
        return RegistryError(f"MLflow rejected the request: {first}", hint="Check the name and the server's log.")
    matches = ((pattern.search(whole), words) for pattern, words in CONNECTION_FAILURES)
    cause = next((words.format(*match.groups()) for match, words in matches if match), whole[:300])
    attempts = f"still failing after {get_timeout_seconds():.0f} seconds: {cause}"
    is_readable = False
    if client is not None:
        with suppress(Exception), _request_settings():  # the first error is reported
            getattr(client, "_client", client).search_registered_models(max_results=1)
            is_readable = True
    if is_readable:
        return TrackingUnavailableError(
            f"MLflow at {address} answers read requests but not write requests; {attempts}",
            hint="Check in the server's log whether its database is read-only, full or locked.",
        )
    return TrackingUnavailableError(
        f"the MLflow server {address} stopped answering; {attempts}",
        hint=f"Start the server, or raise {TIMEOUT_VARIABLE}; a repeated command registers no version twice.",
    )


CONNECTION_FAILURES = (
    (re.compile(r"too many (\d+) error responses"), "HTTP status {}"),
    (re.compile(r"timed out|timeout exception"), "timeout"),
    (re.compile(r"Connection refused"), "connection refused"),
    (re.compile(r"without response|reset by peer|Connection aborted|IncompleteRead"), "connection closed"),
)


def is_unanswered(error: BaseException) -> bool:
    """Return whether a request had no response, or a response with a transient status.

    Errors raised by MLflow's client have status 500 too, but their messages do not mention a request.
    """
    message = str(error)
    is_request = type(error).__name__ == "RestException" or "API request to" in message or " Server Error" in message
    return is_transient(error) and (is_request or any(pattern.search(message) for pattern, _ in CONNECTION_FAILURES))
