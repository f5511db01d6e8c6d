"""The API server of Kubernetes, as a launcher asks it: through the official client, patiently, and with errors that say what is missing.

A call that failed on the way or at the server (429, 500 and the like, a broken connection, silence) may succeed the next time: that is
UnansweredError. What the server refuses is refused the next time too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from components.common.errors import ConfigurationError, EngineMissingError, TunelineError
from components.common.launch import SilentError

Json = dict[str, Any]
Answer = TypeVar("Answer")
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LONGEST_PAUSE = 30.0  # seconds between two tries
TRANSIENT = (408, 410, 425, 429, 500, 502, 503, 504)  # 410: what was asked about is a state too long ago; the next list is a new one


class AccessError(TunelineError):
    """The API server does not let this caller do this."""

    kind = "access"


class ConflictError(Exception):
    """There is an object of that name."""


class UnansweredError(Exception):
    """No answer, for a reason that may pass. `seconds`: how long the server wants to be left alone."""

    def __init__(self, why: str, seconds: float = 0.0) -> None:
        super().__init__(why)
        self.why, self.seconds = why, seconds


@dataclass(frozen=True)
class Kind:
    """A kind of custom resource."""

    group: str
    version: str
    plural: str
    kind: str
    operator: str  # what a cluster needs to know it


TRAINJOB = Kind("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", "Kubeflow Trainer 2.2 or later")
RAYJOB = Kind("ray.io", "v1", "rayjobs", "RayJob", "KubeRay 1.3 or later")


@dataclass
class Cluster:
    """Calls to one API server, in one namespace. Each is made once; `insist` repeats one."""

    client: Any  # kubernetes.client.ApiClient
    namespace: str
    timeout: float = 20.0  # seconds for one call, so that silence is noticed

    def create(self, kind: Kind, body: Json) -> Json:
        """Make an object; a field that the cluster does not know is refused. Raises ConflictError where its name is taken."""
        made = _answered("create", kind.plural, self._custom(kind, "create_namespaced_custom_object", body, field_validation="Strict"))
        if made is None:
            raise EngineMissingError(f"the cluster knows no {kind.kind}", hint=f"Install {kind.operator}, or choose another launcher.kind.")
        return made

    def get(self, kind: Kind, name: str) -> Json | None:
        """An object; None: there is none."""
        return _answered("get", kind.plural, self._custom(kind, "get_namespaced_custom_object", name))

    def named(self, kind: Kind, labels: str) -> list[Json]:
        """The objects with these labels, in the order of their names."""
        found = _answered("list", kind.plural, self._custom(kind, "list_namespaced_custom_object", label_selector=labels))
        return sorted((found or {}).get("items") or [], key=lambda one: str(one["metadata"]["name"]))

    def delete(self, kind: Kind, name: str) -> bool:
        """Delete an object: it stays until its pods have ended. False: there is none any more."""
        options = {"propagationPolicy": "Foreground"}
        return _answered("delete", kind.plural, self._custom(kind, "delete_namespaced_custom_object", name, body=options)) is not None

    def pods(self, labels: str) -> list[Json]:
        """The pods with these labels."""
        from kubernetes import client

        read = client.CoreV1Api(self.client).list_namespaced_pod
        return _items("pods", lambda: read(self.namespace, label_selector=labels, _request_timeout=self.timeout, _preload_content=False))

    def events(self, name: str) -> list[Json]:
        """The events about the objects of this name."""
        from kubernetes import client

        read, about = client.CoreV1Api(self.client).list_namespaced_event, f"involvedObject.name={name}"
        return _items("events", lambda: read(self.namespace, field_selector=about, _request_timeout=self.timeout, _preload_content=False))

    def _custom(self, kind: Kind, method: str, *arguments: Any, **options: Any) -> Callable[[], Json]:
        from kubernetes import client

        call = getattr(client.CustomObjectsApi(self.client), method)
        where = (kind.group, kind.version, self.namespace, kind.plural)
        return lambda: call(*where, *arguments, _request_timeout=self.timeout, **options)


def connect(namespace: str = "") -> Cluster:
    """The cluster that this pod runs in, or that the kubeconfig names.

    Raises EngineMissingError where there is neither, ConfigurationError for a kubeconfig that cannot be used.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        hint = "pip install -c constraints.txt 'tuneline[pipeline]'"
        raise EngineMissingError("the package kubernetes is not installed", hint=hint) from None
    configuration = client.Configuration()
    try:
        if os.environ.get("KUBECONFIG") or not os.environ.get("KUBERNETES_SERVICE_HOST"):
            own = _from_file(config, configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
            own = OWN_NAMESPACE.read_text(encoding="utf-8").strip()
    except (config.ConfigException, OSError) as error:
        hint = "Run this in a pod of the cluster, or set KUBECONFIG: `kubectl get pods` has to work here."
        raise EngineMissingError(f"no cluster is named here: {error}", hint=hint) from None
    configuration.retries = False  # a call is made once; who wants it repeated says for how long
    return Cluster(client.ApiClient(configuration), namespace or own)


def _from_file(config: Any, configuration: Any) -> str:
    """Read the kubeconfig. Returns its namespace."""
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    config.load_kube_config(files, client_configuration=configuration, persist_config=False)
    _, current = config.list_kube_config_contexts(files)
    return str(current["context"].get("namespace") or "default")


def insist(call: Callable[[], Answer], patience: float, pause: float, say: Callable[[str], None]) -> Answer:
    """The answer to a call that is made again while there is none, for so many seconds. Raises SilentError after them."""
    until, told = time.monotonic() + patience, False
    while True:
        try:
            return call()
        except UnansweredError as error:
            if time.monotonic() >= until:
                raise silent(error, patience) from None
            if not told:
                say(f"{error.why}; it is asked again for {patience:.0f} seconds")
                told = True
            time.sleep(min(max(pause, error.seconds), LONGEST_PAUSE, max(0.0, until - time.monotonic()) + 0.01))
            pause *= 2


def silent(error: UnansweredError, patience: float) -> SilentError:
    """The error of an API server that was asked for long enough."""
    hint = "The job may run on: the same command finds it again. launcher.patience_seconds is how long the server is asked."
    return SilentError(f"{error.why}, also after {patience:.0f} seconds of asking", hint=hint)


def _items(plural: str, call: Callable[[], Any]) -> list[Json]:
    found = _answered("list", plural, lambda: json.loads(call().data))
    return list((found or {}).get("items") or [])


def _answered(verb: str, plural: str, call: Callable[[], Json]) -> Json | None:
    """The server's answer; None: 404."""
    import urllib3.exceptions
    from kubernetes.client import ApiException

    try:
        answer = call()
    except ApiException as error:
        if error.status == 404:
            return None
        raise _refused(verb, plural, error) from None
    except (urllib3.exceptions.HTTPError, HTTPException, OSError, ValueError) as error:
        raise UnansweredError(f"the API server does not answer ({type(error).__name__})") from None
    if not isinstance(answer, dict):
        raise UnansweredError("the API server does not answer as Kubernetes does")
    return answer


def _refused(verb: str, plural: str, error: Any) -> Exception:
    said = _words(error)
    if error.status in TRANSIENT or error.status == 0:
        return UnansweredError(f"the API server answers {error.status}: {said}", _retry_after(error))
    if error.status == 409 and verb == "create":
        return ConflictError(said)
    if error.status == 401:
        return AccessError(
            f"the API server does not accept who is asking: {said}", hint="The login, or the service account's token, has expired."
        )
    if error.status == 403:
        hint = f"The step's service account needs the right to {verb} {plural}: deploy/components/launcher/launcher-rbac.yaml has it."
        return AccessError(f"may not {verb} {plural}: {said}", hint=hint)
    return ConfigurationError(
        f"the cluster does not take the job: {said}", hint="The words are the API server's; the keys are those of `launcher`."
    )


def _words(error: Any) -> str:
    """The server's own words."""
    try:
        said = str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        said = str(error.reason)
    return " ".join(said.split())[:500]


def _retry_after(error: Any) -> float:
    """How many seconds the server wants to be left alone."""
    try:
        return float((error.headers or {}).get("Retry-After") or 0)
    except ValueError:  # a date
        return 0.0
