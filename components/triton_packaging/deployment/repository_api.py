"""Client for Triton's repository API: loads and unloads models of a running server, and reports their state.

All requests use gRPC: a load over HTTP occupies one of the few threads that serve HTTP clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError
from components.triton_packaging.triton_server import ModelLoadError, ServerAddress

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

UNLOADED_STATES = ("UNAVAILABLE", "")
UNLOAD_TIMEOUT_SECONDS = 60.0
QUERY_TIMEOUT_SECONDS = 60.0
NOT_FOUND, DEADLINE_EXCEEDED = "StatusCode.NOT_FOUND", "StatusCode.DEADLINE_EXCEEDED"
CONNECTION_STATUSES = ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")  # the server is unreachable, or exits


def get_version_states(server: ServerAddress, model: str) -> dict[str, str]:
    """Return the state of each version of a model: READY, LOADING, UNLOADING or UNAVAILABLE.

    Raises:
        EngineMissingError: the server does not answer.
    """
    from tritonclient.utils import InferenceServerException

    try:
        with _connect(server) as client:
            index = client.get_model_repository_index(client_timeout=QUERY_TIMEOUT_SECONDS)
    except InferenceServerException as error:
        raise _unreachable_error(server, error) from None
    return {each.version: each.state for each in index.models if each.name == model}


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
    from tritonclient.utils import InferenceServerException

    try:
        with _connect(server) as client:
            config = client.get_model_config(model, version, client_timeout=QUERY_TIMEOUT_SECONDS).config
    except InferenceServerException as error:
        if error.status() == NOT_FOUND:
            return ""  # it was unloaded in the meantime
        raise _unreachable_error(server, error) from None
    return str(config.parameters["repository_sha256"].string_value)


def load_model(server: ServerAddress, model: str, version: str, *, timeout: float) -> None:
    """Load a model with its current config.pbtxt, and return when this version is ready.

    Replaced versions answer requests until then.

    Args:
        timeout: seconds for the load request, and again for the version to become ready.

    Raises:
        ModelLoadError: the model does not load, or is not ready in time. Earlier versions remain loaded.
        EngineMissingError: the server does not answer.
    """
    with _report_errors(server, model, "load", timeout), _connect(server) as client:
        client.load_model(model, client_timeout=timeout)
    if not _wait_until(lambda: is_ready(server, model, version), timeout):
        raise ModelLoadError(
            f"{model} version {version} is not ready after {format_count(round(timeout), 'second')}",
            hint="Check the server's log.",
        )


def unload_model(server: ServerAddress, model: str) -> None:
    """Unload all versions of a model; wait up to UNLOAD_TIMEOUT_SECONDS for answers in progress.

    Raises:
        ModelLoadError: the server rejects the request, or does not complete it in time.
        EngineMissingError: the server does not answer.
    """
    timeout = UNLOAD_TIMEOUT_SECONDS
    with _report_errors(server, model, "unload", timeout), _connect(server) as client:
        client.unload_model(model, client_timeout=timeout)
    _wait_until(
        lambda: all(state in UNLOADED_STATES for state in get_version_states(server, model).values()),
        timeout,
    )


def is_unloaded(server: ServerAddress, model: str, version: str) -> bool:
    """Return whether a version is unloaded and has no answers in progress.

    Raises:
        EngineMissingError: the server does not answer.
    """
    return get_version_states(server, model).get(version, "") in UNLOADED_STATES


def _connect(server: ServerAddress) -> InferenceServerClient:
    from tritonclient.grpc import InferenceServerClient

    return InferenceServerClient(server.grpc_url)


@contextmanager
def _report_errors(server: ServerAddress, model: str, action: str, timeout: float) -> Iterator[None]:
    """Convert errors of a load or unload."""
    from tritonclient.utils import InferenceServerException

    try:
        yield
    except InferenceServerException as error:
        if error.status() in CONNECTION_STATUSES:
            raise _unreachable_error(server, error) from None
        if error.status() == DEADLINE_EXCEEDED:
            raise ModelLoadError(
                f"Triton did not {action} {model} within {format_count(round(timeout), 'second')}",
                hint="Raise --timeout.",
            ) from None
        raise ModelLoadError(
            f"Triton did not {action} {model}: {error.message()}", hint="Check the server's log."
        ) from None


def _unreachable_error(server: ServerAddress, error: Exception) -> EngineMissingError:
    return EngineMissingError(
        f"the Triton server at {server.grpc_url} does not answer: {error}",
        hint="Start the server with --model-control-mode=explicit, or correct its address.",
    )


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
