"""The API server of Kubernetes: where it is, as whom it is asked, and what it answers.

Answers are plain JSON, so that every kind is asked in one way, those of Kueue among them. No call waits for long: once one got no answer in
time, none is made any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from components.common.errors import ConfigurationError, EngineMissingError, TunelineError
from pipelines.submitting import AccessError

Json = dict[str, Any]
Answer = TypeVar("Answer")
CONNECT_WITHIN, ANSWER_WITHIN = 2.0, 3.0  # seconds, for one call
FIRST_WITHIN = 5.0  # seconds until the first answer: with the name's look-up and whatever program gives the credentials
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
USUAL_NAMESPACE = "kubeflow"  # where Kubeflow Pipelines for one user runs its pods
HOW_TO_REACH = "`kubectl version` has to work here: set KUBECONFIG, choose --context, or renew your login."


class ForbiddenError(AccessError):
    """The API server knows who asks, and does not answer this."""


class RefusedError(TunelineError):
    """The API server does not take an object."""


class Api:
    """Calls to one API server. What was read is kept: one look at the cluster is one picture of it."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client, self.own_namespace = client, namespace
        self.address = str(client.configuration.host)
        self._seen: dict[str, Json | None] = {}
        self._silent: EngineMissingError | None = None

    def get(self, path: str) -> Json | None:
        """An object or a list; None where there is none. Raises ForbiddenError, and EngineMissingError where nobody answers."""
        if path not in self._seen:
            self._seen[path] = self._call("GET", path, None)
        return self._seen[path]

    def items(self, path: str) -> list[Json]:
        """What a list holds; nothing where the kind is unknown."""
        return list((self.get(path) or {}).get("items", []))

    def create(self, path: str, body: Json) -> Json:
        """The server's answer to a review, or to an object with ?dryRun=All. Raises RefusedError where it does not take it."""
        answer = self._call("POST", path, body)
        if answer is None:
            raise RefusedError(f"{path.partition('?')[0]} is not there")
        return answer

    def _call(self, method: str, path: str, body: Json | None) -> Json | None:
        import urllib3.exceptions
        from kubernetes.client import ApiException

        if self._silent:
            raise self._silent
        try:
            answer = self.client.call_api(
                path, method, body=body, header_params={"Accept": "application/json"}, auth_settings=["BearerToken"],
                response_type="object", _return_http_data_only=True, _request_timeout=(CONNECT_WITHIN, ANSWER_WITHIN),
            )  # fmt: skip
        except ApiException as error:
            if error.status == 404:
                return None
            raise self._told(error) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._silent = EngineMissingError(f"{self.address} does not answer: {_reason(error)}", hint=HOW_TO_REACH)
            raise self._silent from None
        if not isinstance(answer, dict):
            self._silent = EngineMissingError(
                f"{self.address} does not answer as Kubernetes does, but with a page or a text", hint=HOW_TO_REACH
            )
            raise self._silent
        return answer

    def _told(self, error: Any) -> TunelineError:
        """What the server refused, as an error for people."""
        said = _said(error)
        if error.status == 401:
            return AccessError(f"{self.address} does not accept who is asking: {said}", hint=f"The login has expired. {HOW_TO_REACH}")
        if error.status == 403:
            return ForbiddenError(said)
        if error.status == 0:
            return EngineMissingError(f"{self.address} does not answer: {said}", hint=HOW_TO_REACH)
        return RefusedError(said)


def connect(context: str = "") -> Api:
    """The API server of the kubeconfig, or of the cluster that this pod runs in, once it has answered.

    Raises ConfigurationError for a kubeconfig that cannot be used, EngineMissingError where there is none or no server answers, AccessError
    where it does not accept who is asking.
    """
    try:
        import kubernetes  # noqa: F401 - reading it takes a busy machine seconds, which are not the server's
    except ImportError:
        hint = "pip install -c constraints.txt 'tuneline[pipeline]'"
        raise EngineMissingError("the package kubernetes is not installed", hint=hint) from None
    return within(FIRST_WITHIN, "the cluster", lambda: _answering(_from_file(context) if context or _files() else _from_pod()))


def of_this_pod() -> Api:
    """The API server of the cluster that this pod runs in, asked as the pod's account. Raises as `connect` does."""
    return _answering(_from_pod())


def within(seconds: float, who: str, work: Callable[[], Answer]) -> Answer:
    """The result of `work`, or EngineMissingError after so many seconds: looking up a name cannot be given a time-out."""
    screen = sys.stdout  # what is given up may have turned it aside, as kfp is kept from printing
    done: list[Answer] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        sys.stdout = screen
        raise EngineMissingError(f"{who} does not answer within {seconds:g} seconds", hint=HOW_TO_REACH)
    return done[0]


def _answering(api: Api) -> Api:
    """The first call. That it is not allowed is an answer too."""
    with contextlib.suppress(ForbiddenError):
        api.get("/version")
    return api


def _files() -> list[Path]:
    """The kubeconfig files that are there."""
    named = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return [path for path in map(Path, named.split(os.pathsep)) if path.is_file()]


def _from_file(context: str) -> Api:
    from kubernetes import client, config

    files = os.pathsep.join(map(str, _files()))
    configuration = client.Configuration()
    try:
        for path in _files():
            _check(path)
        contexts, current = config.list_kube_config_contexts(files)
        config.load_kube_config(files, context=context or None, client_configuration=configuration, persist_config=False)
    except Exception as error:  # the loader takes a file apart as it is: what fails in it is one of many kinds
        hint = f"Mend the file, or give --context one of its contexts. {HOW_TO_REACH}"
        raise ConfigurationError(f"the kubeconfig {files or '(none is there)'} cannot be used: {_words(str(error))}", hint=hint) from None
    chosen = next((one for one in contexts if one["name"] == context), current)
    return Api(_client(configuration), str(chosen["context"].get("namespace") or USUAL_NAMESPACE))


def _check(path: Path) -> None:
    """Raise ValueError for a file that is no kubeconfig, without a word of what stands in it: it may be a key."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"it is not YAML{f': line {mark.line + 1}' if mark else ''}") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None
    if not isinstance(read, dict) or not isinstance(read.get("clusters"), list):
        raise ValueError("it names no clusters")


def _from_pod() -> Api:
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        raise EngineMissingError(
            "no cluster is named: there is no kubeconfig, and this is no pod with a service account's token", hint=HOW_TO_REACH
        ) from None
    namespace = OWN_NAMESPACE.read_text(encoding="utf-8").strip() if OWN_NAMESPACE.exists() else USUAL_NAMESPACE
    return Api(_client(configuration), namespace)


def _client(configuration: Any) -> Any:
    from kubernetes import client

    configuration.retries = False  # urllib3 would ask a dead server four times
    return client.ApiClient(configuration)


def _reason(error: BaseException) -> str:
    cause = getattr(error, "reason", None) or error
    if "CERTIFICATE" in str(cause):
        return "its certificate cannot be verified"
    return _words(re.sub(r"^\[Errno \d+\] ", "", str(cause).rpartition(": ")[2]))


def _said(error: Any) -> str:
    """The server's own words."""
    try:
        return _words(str(json.loads(error.body)["message"]))
    except (KeyError, TypeError, ValueError):
        return "its certificate cannot be verified" if "CERTIFICATE" in str(error.reason) else _words(str(error.reason))


def _words(text: str, characters: int = 500) -> str:
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[:characters]}…"
