"""Read access to a cluster's API server for the preflight checks, with short timeouts.

Objects are plain JSON, so that all kinds, including Kueue's, are read in the same way. After one call without an
answer, all further calls fail immediately.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from components.common.launch import JsonObject
from components.common.launch.kubernetes import kubernetes_client
from components.common.launch.kubernetes.kubernetes_client import AccessError
from components.common.runtime.errors import ConfigurationError, EngineMissingError, TunelineError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Answer = TypeVar("Answer")
CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS = 2.0, 3.0  # for one call
FIRST_CALL_TIMEOUT_SECONDS = 5.0  # includes the name lookup and the credential plugin of the kubeconfig
DEFAULT_NAMESPACE = "kubeflow"  # of the pods in a single-user Kubeflow Pipelines
CERTIFICATE_PROBLEM = "its certificate cannot be verified"
KUBECONFIG_HINT = "Make `kubectl version` work on this machine: set KUBECONFIG, choose --context, or renew your login."


class SilentServerError(EngineMissingError):
    """A server does not answer in time."""


class ForbiddenError(AccessError):
    """The API server accepts the credentials, but does not permit the call."""


class RefusedError(TunelineError):
    """The API server rejects an object."""


class ClusterApi:
    """A client for one API server. It caches answers, so that all checks use the same state of the cluster."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.client, self.own_namespace = client, namespace
        self.address = str(client.configuration.host)
        self._answers: dict[str, JsonObject | None] = {}
        self._error: EngineMissingError | None = None

    def get(self, path: str) -> JsonObject | None:
        """Return the object or list at an API path, or None if the path does not exist.

        Raises:
            ForbiddenError: the caller lacks the right.
            AccessError: the server does not accept the credentials.
            RefusedError: the server rejects the call.
            EngineMissingError: the server does not answer.
        """
        if path not in self._answers:
            self._answers[path] = self._call("GET", path, None)
        return self._answers[path]

    def list_items(self, path: str) -> list[JsonObject]:
        """Return the items of the list at an API path; empty if the path does not exist. Raises the errors of `get`."""
        return list((self.get(path) or {}).get("items", []))

    def create(self, path: str, body: JsonObject) -> JsonObject:
        """Post a review, or an object with ?dryRun=All, and return the server's answer.

        Raises:
            RefusedError: the server rejects the object.
            ForbiddenError: the caller lacks the right.
            AccessError: the server does not accept the credentials.
            EngineMissingError: the server does not answer.
        """
        answer = self._call("POST", path, body)
        if answer is None:
            message = f"POST {path.partition('?')[0]} failed on {self.address}: 404 Not Found"
            raise RefusedError(message, hint="Check the namespace and the API version.")
        return answer

    def _call(self, method: str, path: str, body: JsonObject | None) -> JsonObject | None:
        import urllib3.exceptions
        from kubernetes.client import ApiException

        if self._error:
            raise self._error
        try:
            answer = self.client.call_api(
                path,
                method,
                body=body,
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                _request_timeout=(CONNECT_TIMEOUT_SECONDS, READ_TIMEOUT_SECONDS),
            )
        except ApiException as error:
            message = kubernetes_client.read_server_message(error)
            match error.status:
                case 404:
                    return None
                case 401:
                    message = f"{self.address} does not accept the credentials: {message}"
                    raise AccessError(
                        message,
                        hint="Log in to the cluster again, and check that `kubectl version` works on this machine.",
                    ) from None
                case 403:
                    raise ForbiddenError(message) from None
                case 0:  # no answer
                    message = f"{self.address} does not answer: {message}"
                    raise EngineMissingError(message, hint=KUBECONFIG_HINT) from None
            raise RefusedError(message) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cause = str(getattr(error, "reason", None) or error)
            reason = kubernetes_client.shorten(re.sub(r"^\[Errno \d+\] ", "", cause.rpartition(": ")[2]))
            problem = f"does not answer: {CERTIFICATE_PROBLEM if 'CERTIFICATE' in cause else reason}"
        else:
            if isinstance(answer, dict):
                return answer
            problem = f"returned {type(answer).__name__}; expected a JSON object of the API of Kubernetes"
        self._error = EngineMissingError(f"{self.address} {problem}", hint=KUBECONFIG_HINT)
        raise self._error


def connect(context: str = "") -> ClusterApi:
    """Connect to the API server of the kubeconfig or of this pod's cluster, and check that the server answers.

    Args:
        context: context of the kubeconfig; default: the current context.

    Raises:
        ConfigurationError: the kubeconfig is invalid.
        EngineMissingError: no cluster is configured, or the server does not answer.
        AccessError: the server does not accept the credentials.
    """
    kubernetes_client.require_package()  # imported outside of the timeout, since this takes seconds on a busy machine
    files = [path for path in map(Path, kubernetes_client.get_kubeconfig_files().split(os.pathsep)) if path.is_file()]

    def connect_now() -> ClusterApi:
        return _connect_kubeconfig(files, context) if context or files else connect_in_cluster()

    return run_with_timeout(FIRST_CALL_TIMEOUT_SECONDS, "the cluster", connect_now)


def connect_in_cluster() -> ClusterApi:
    """Connect to the API server of this pod's cluster as the pod's service account.

    Raises:
        EngineMissingError: this is not a pod with a service account token, or the server does not answer.
        AccessError: the server does not accept the credentials.
    """
    from kubernetes.config import ConfigException

    try:
        client, namespace = kubernetes_client.connect_pod()
    except ConfigException:
        message = "no cluster is configured: no kubeconfig exists, and the command does not run in a pod with a service account token"
        raise EngineMissingError(message, hint=KUBECONFIG_HINT) from None
    return _require_answer(client, namespace)


def run_with_timeout(seconds: float, server: str, work: Callable[[], Answer]) -> Answer:
    """Run `work` with a timeout and return its result; the timeout also covers name lookups.

    Args:
        seconds: the timeout.
        server: name of the server that `work` calls, for the error.
        work: the function to run in a thread.

    Raises:
        EngineMissingError: `work` took longer than `seconds`.
    """
    stdout = sys.stdout  # an abandoned thread may have redirected it
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if futures.wait([future], seconds).not_done:
        sys.stdout = stdout
        raise SilentServerError(f"{server} does not answer within {seconds:g} s", hint=KUBECONFIG_HINT)
    return future.result()


def _connect_kubeconfig(files: list[Path], context: str) -> ClusterApi:
    names = os.pathsep.join(map(str, files))
    try:
        for path in files:  # checked here, because the client library's errors quote the file, which may contain a key
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                raise ValueError(f"{path} is not YAML{f': line {mark.line + 1}' if mark else ''}") from None
            except UnicodeDecodeError:
                raise ValueError(f"{path} is not UTF-8 text") from None
            if not isinstance(content, dict) or not isinstance(content.get("clusters"), list):
                raise ValueError(f"{path} contains no list of clusters")
        client, namespace = kubernetes_client.connect_kubeconfig(names, context)
    except Exception as error:  # the loader of the client library raises errors of many classes for an invalid file
        hint = "Correct the kubeconfig, or choose another file with KUBECONFIG or another context with --context."
        reason = kubernetes_client.shorten(str(error))
        message = f"the kubeconfig {names or '(no file exists)'} cannot be used: {reason}"
        raise ConfigurationError(message, hint=hint) from None
    return _require_answer(client, namespace)


def _require_answer(client: ApiClient, namespace: str) -> ClusterApi:
    api = ClusterApi(client, namespace or DEFAULT_NAMESPACE)
    with contextlib.suppress(ForbiddenError):  # a server that forbids the call has answered
        api.get("/version")
    return api
