"""Triton's repository API: telling a running server to load and unload models, and seeing what became of it."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from components.common.errors import EngineMissingError
from components.triton_packaging.server import DIRECT, ModelLoadError, get_json

READY, GONE = "READY", ("UNAVAILABLE", "")
SILENCE = (OSError, ValueError, http.client.HTTPException)  # how a server that is away, or dies in the middle of an answer, is told
PACKAGE = "repository_sha256"  # parameter of config.pbtxt: the package that a model was laid out from


@dataclass(frozen=True)
class Address:
    """Where a server answers: http is a URL, grpc is HOST:PORT."""

    http_url: str
    grpc_url: str


def states(server: Address, model: str) -> dict[str, str]:
    """The state of each version of a model that the server knows: READY, LOADING, UNLOADING, UNAVAILABLE.

    Raises EngineMissingError when the server does not answer.
    """
    try:
        index = get_json(f"{server.http_url}/v2/repository/index", method="POST")
    except SILENCE as error:
        raise _silent(server, error) from None
    return {str(each.get("version", "")): str(each.get("state", "")) for each in index if each["name"] == model}


def is_served(server: Address, model: str, version: str) -> bool:
    """Whether this version of a model answers."""
    return states(server, model).get(version) == READY


def loaded_from(server: Address, model: str, version: str) -> str:
    """The digest of the package that a model's version was loaded from; "" where it does not answer or does not say."""
    if not is_served(server, model, version):
        return ""
    try:
        config = get_json(f"{server.http_url}/v2/models/{model}/versions/{version}/config")
    except urllib.error.HTTPError:
        return ""  # it has just gone
    except SILENCE as error:
        raise _silent(server, error) from None
    return str(config.get("parameters", {}).get(PACKAGE, {}).get("string_value", ""))


def load(server: Address, model: str, version: str, *, timeout: float) -> None:
    """Load a model as its config.pbtxt says now, and return when this version answers; the versions it replaces answer until then.

    Raises ModelLoadError with the server's own words; what answered before still does.
    """
    _post(server, model, "load", timeout)
    if not _until(lambda: is_served(server, model, version), timeout):
        raise ModelLoadError(f"{model} version {version} did not become ready", hint="See the server's log.")


def unload(server: Address, model: str, *, timeout: float = 60.0) -> bool:
    """Unload all versions of a model. Returns whether they were gone within so many seconds: answers under way are waited for."""
    _post(server, model, "unload", timeout)
    return _until(lambda: all(state in GONE for state in states(server, model).values()), timeout)


def is_gone(server: Address, model: str, version: str) -> bool:
    """Whether a version is not loaded any more, its last answers given."""
    return states(server, model).get(version, "") in GONE


def _post(server: Address, model: str, what: str, timeout: float) -> None:
    request = urllib.request.Request(  # noqa: S310
        f"{server.http_url}/v2/repository/models/{model}/{what}", data=b"{}", method="POST", headers={"Content-Type": "application/json"}
    )
    try:
        with DIRECT.open(request, timeout=timeout) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", errors="replace")
        raise ModelLoadError(f"Triton did not {what} {model}: {said}", hint="The server's log names the cause.") from None
    except TimeoutError:
        raise ModelLoadError(f"Triton did not {what} {model} within {timeout:.0f} seconds", hint="Give --timeout more.") from None
    except SILENCE as error:
        raise _silent(server, error) from None


def _silent(server: Address, error: Exception) -> EngineMissingError:
    return EngineMissingError(
        f"the Triton server at {server.http_url} does not answer: {error}", hint="Start it in explicit mode: --model-control-mode=explicit."
    )


def _until(done: Any, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if done():
            return True
        time.sleep(0.1)
    return bool(done())
