"""Client for Triton's repository API: loads and unloads models of a running server, and reports their state."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from components.common.runtime.errors import EngineMissingError
from components.triton_packaging.triton_server import URL_OPENER, ModelLoadError, ServerAddress, get_json

UNLOADED_STATES = ("UNAVAILABLE", "")
UNLOAD_TIMEOUT_SECONDS = 60.0
# Raised if the server is unreachable, or exits while it responds.
CONNECTION_ERRORS = (OSError, ValueError, http.client.HTTPException)


def get_version_states(server: ServerAddress, model: str) -> dict[str, str]:
    """Return the state of each version of a model: READY, LOADING, UNLOADING or UNAVAILABLE.

    Raises:
        EngineMissingError: the server does not answer.
    """
    try:
        index = get_json(f"{server.http_url}/v2/repository/index", method="POST")
    except CONNECTION_ERRORS as error:
        raise _unreachable_error(server, error) from None
    return {str(each.get("version", "")): str(each.get("state", "")) for each in index if each["name"] == model}


def is_ready(server: ServerAddress, model: str, version: str) -> bool:
    """Return whether this version of a model is ready.

    Raises:
        EngineMissingError: the server does not answer.
    """
    return get_version_states(server, model).get(version) == "READY"


def get_loaded_package(server: ServerAddress, model: str, version: str) -> str:
    """Return the digest of the package that a version was loaded from; "" if it is not ready or has no digest.

    The digest is the parameter repository_sha256 of config.pbtxt.

    Raises:
        EngineMissingError: the server does not answer.
    """
    if not is_ready(server, model, version):
        return ""
    try:
        config = get_json(f"{server.http_url}/v2/models/{model}/versions/{version}/config")
    except urllib.error.HTTPError:
        return ""  # it was unloaded in the meantime
    except CONNECTION_ERRORS as error:
        raise _unreachable_error(server, error) from None
    return str(config.get("parameters", {}).get("repository_sha256", {}).get("string_value", ""))


def load_model(server: ServerAddress, model: str, version: str, *, timeout: float) -> None:
    """Load a model with its current config.pbtxt, and return when this version is ready.

    Replaced versions answer requests until then.

    Args:
        timeout: seconds for the load request, and again for the version to become ready.

    Raises:
        ModelLoadError: the model does not load, or is not ready in time. Earlier versions remain loaded.
        EngineMissingError: the server does not answer.
    """
    _post(server, model, "load", timeout)
    if not _wait_until(lambda: is_ready(server, model, version), timeout):
        raise ModelLoadError(
            f"{model} version {version} is not ready after {timeout:.0f} seconds", hint="Check the server's log."
        )


def unload_model(server: ServerAddress, model: str) -> None:
    """Unload all versions of a model; wait up to UNLOAD_TIMEOUT_SECONDS for answers in progress.

    Raises:
        ModelLoadError: the server rejects the request, or does not complete it in time.
        EngineMissingError: the server does not answer.
    """
    _post(server, model, "unload", UNLOAD_TIMEOUT_SECONDS)
    _wait_until(
        lambda: all(state in UNLOADED_STATES for state in get_version_states(server, model).values()),
        UNLOAD_TIMEOUT_SECONDS,
    )


def is_unloaded(server: ServerAddress, model: str, version: str) -> bool:
    """Return whether a version is unloaded and has no answers in progress.

    Raises:
        EngineMissingError: the server does not answer.
    """
    return get_version_states(server, model).get(version, "") in UNLOADED_STATES


def _post(server: ServerAddress, model: str, action: str, timeout: float) -> None:
    request = urllib.request.Request(  # noqa: S310
        f"{server.http_url}/v2/repository/models/{model}/{action}",
        data=b"{}",
        method="POST",
        headers={"Content-Type": "application/json"},
    )
    try:
        with URL_OPENER.open(request, timeout=timeout) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        message = error.read().decode("utf-8", errors="replace")
        raise ModelLoadError(f"Triton did not {action} {model}: {message}", hint="Check the server's log.") from None
    except TimeoutError:
        raise ModelLoadError(
            f"Triton did not {action} {model} within {timeout:.0f} seconds", hint="Raise --timeout."
        ) from None
    except CONNECTION_ERRORS as error:
        raise _unreachable_error(server, error) from None


def _unreachable_error(server: ServerAddress, error: Exception) -> EngineMissingError:
    return EngineMissingError(
        f"the Triton server at {server.http_url} does not answer: {error}",
        hint="Start the server with --model-control-mode=explicit, or correct its address.",
    )


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
