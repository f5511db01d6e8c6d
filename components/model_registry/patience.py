"""Patience with a tracking server that is busy or away for a moment: asked again, later and later, up to a limit.

What it refuses (no permission, a read-only database, a wrong name) is told at once. MLflow's own retries are off meanwhile: they would send
a request anew whose answer was lost, and so make a version twice.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from components.common import addresses
from components.common.errors import ConfigurationError, NotWritableError, RegistryError, TunelineError
from components.common.tracking import TrackingLostError

T = TypeVar("T")

VARIABLE = "TUNELINE_REGISTRY_PATIENCE"  # seconds that a call to the registry is tried again for, in all
SECONDS = 60.0
SHORTEST_REQUEST = 10.0  # seconds that a busy server has at least
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds
PASSING = (408, 429, 500, 502, 503, 504)
REFUSED = re.compile(r"\b(401|403) Client Error")
READ_ONLY = ("readonly database", "read-only transaction", "read-only file system", "recovery is in progress")


def limit() -> float:
    """Seconds that a call is tried again for, in all. Raises ConfigurationError where the environment names no number."""
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else SECONDS
        if math.isnan(seconds):
            raise ValueError
        return max(seconds, 0.0)
    except ValueError:
        raise ConfigurationError(f"{VARIABLE} is {given!r}, not a number of seconds", hint=f"Leave it out for {SECONDS:.0f}.") from None


def status(error: BaseException) -> int | None:
    """The HTTP status that an error of MLflow, or of an upload, stands for; None for an error of another kind.

    No answer at all, or one that breaks off, counts as 503.
    """
    answer = getattr(error, "response", None)
    if answer is not None:
        return int(answer.status_code)
    asked = getattr(error, "get_http_status_code", None)
    if asked is not None:
        refused = REFUSED.search(str(error))  # an upload of several files says what each was answered, and is itself of no kind
        return int(refused[1]) if refused else int(asked())
    broken_off = type(error).__name__ == "JSONDecodeError" or hasattr(error, "response")  # the latter: requests without an answer
    return 503 if broken_off else None


def is_read_only(error: BaseException) -> bool:
    """Whether the database behind MLflow takes no writes."""
    return any(sign in str(error).lower() for sign in READ_ONLY)


def passes(error: BaseException) -> bool:
    """Whether the same call may work in a moment."""
    return status(error) in PASSING and not is_read_only(error)


def again(call: Callable[[], T], look: Callable[[], T | None] = lambda: None) -> T:
    """What a call to MLflow returns. It is tried again while the server is busy or away, until the limit; then its last error is raised.

    `look` finds what an earlier try made whose answer was lost: it is asked before every new try, so that nothing is made twice.
    """
    end, pause = time.monotonic() + limit(), FIRST_PAUSE
    while True:
        try:
            with _requests():
                return call()
        except Exception as error:
            if not passes(error) or time.monotonic() + pause > end:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that those who wait do not all come back at once
        pause = min(2 * pause, LONGEST_PAUSE)
        found = look()
        if found is not None:
            return found


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Have calls within the block be tried again for so many seconds at most, where the environment does not say less."""
    with _environment({VARIABLE: f"{min(limit(), seconds):g}"}):
        yield


@contextmanager
def _requests() -> Iterator[None]:
    """MLflow reads from its environment how often and how long it tries, at every request."""
    with _environment({"MLFLOW_HTTP_REQUEST_TIMEOUT": f"{_timeout():.0f}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}):
        yield


@contextmanager
def _environment(names: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _timeout() -> float:
    """Seconds for one request: what the environment says, and hardly longer than all tries together."""
    given = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "")
    return min(float(given) if given.replace(".", "").isdecimal() else SECONDS, max(limit(), SHORTEST_REQUEST))


class Patient:
    """An MLflow client whose calls are tried again. What creates something is not: `again` with a look does that."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name.startswith("create_") or not callable(call):
            return call
        return lambda *given, **named: again(lambda: call(*given, **named))


def told(error: BaseException, client: Any = None) -> TunelineError:
    """An error of MLflow as people are told it: who refused, why, what to do. `client` is asked whether the server can still be read."""
    whole = str(getattr(error, "message", error)).strip() or type(error).__name__
    first = whole.splitlines()[0]
    address = addresses.without_password(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if is_read_only(error):
        return NotWritableError(
            f"MLflow at {address} keeps nothing: its database is read-only", hint="Name the primary server, or make the database writable."
        )
    if status(error) in (401, 403):
        return _no_permission(address, first, signed_in=status(error) == 403)
    if not passes(error):
        return RegistryError(f"MLflow refused: {first}", hint="Check the name, your permissions and the server's log.")
    if client is not None and _reads(client):
        return TrackingLostError(
            f"MLflow at {address} answers and keeps nothing, also after {limit():.0f} seconds of trying: {_cause(whole)}",
            hint="Look into the server's log: its database is read-only, full or locked. Then run the same command again.",
        )
    return TrackingLostError(
        f"the MLflow server {address} stopped answering, also after {limit():.0f} seconds of trying: {_cause(whole)}",
        hint=f"Start it again, then run the same command again: nothing is registered twice. {VARIABLE} is how long to try.",
    )


CAUSES = (
    (re.compile(r"too many (\d+) error responses"), "it answers {}"),
    (re.compile(r"timed out|timeout exception"), "it does not answer in time"),
    (re.compile(r"Connection refused"), "nobody listens there"),
    (re.compile(r"without response|reset by peer|Connection aborted|IncompleteRead"), "it breaks the connection off"),
)


def _cause(message: str) -> str:
    """What lies under the libraries' words for a call without an answer; other messages as they are, at most 300 characters."""
    for pattern, words in CAUSES:
        found = pattern.search(message)
        if found:
            return words.format(*found.groups())
    return message[:300]


def is_unanswered(error: BaseException) -> bool:
    """Whether a request of the library got no answer, or one of 5xx. What MLflow finds wrong by itself has status 500 too, and no request
    in its words."""
    said = str(error)
    asked = type(error).__name__ == "RestException" or "API request to" in said or " Server Error" in said
    return passes(error) and (asked or any(pattern.search(said) for pattern, _ in CAUSES))


def _no_permission(address: str, first: str, *, signed_in: bool) -> RegistryError:
    if signed_in:
        return RegistryError(
            f"MLflow at {address} does not permit this: {first[:300]}",
            hint="Ask its administrator for the permission EDIT on the model and on its history, NAME.history (MANAGE to re-promote).",
        )
    return RegistryError(
        f"MLflow at {address} does not know you: {first[:300]}",
        hint="Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
    )


def _reads(client: Any) -> bool:
    try:
        with _requests():
            getattr(client, "_client", client).search_registered_models(max_results=1)
    except Exception:  # whatever it is, it was told already
        return False
    return True
