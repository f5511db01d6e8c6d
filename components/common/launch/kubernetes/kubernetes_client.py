"""Access to the API server of Kubernetes: connection, own namespace, error texts, and the calls of the launchers.

Failures in transit or at the server (a broken connection, a timeout, 429, 5xx) raise RetryableError, and `retry`
repeats such calls.
"""

# The preflight checks of a cluster (pipelines.kubeflow.preflight) use the same connection functions with their own
# timeouts.

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from components.common.launch import UnresponsiveError
from components.common.launch.kubernetes.pod_scheduling import JsonObject
from components.common.runtime.errors import ConfigurationError, EngineMissingError, TunelineError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, ApiException, Configuration

Answer = TypeVar("Answer")
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MAX_RETRY_INTERVAL_SECONDS = 30.0
RETRYABLE_STATUSES = (408, 410, 425, 429, 500, 502, 503, 504)  # 410: the list's resource version expired
MAX_MESSAGE_CHARACTERS = 500
LIMITS_NAME = "tuneline-launcher-limits"  # ConfigMap of deploy/components/launcher-policies


class AccessError(TunelineError):
    """A server does not permit the call."""

    kind = "access"


class ConflictError(Exception):
    """An object of this name already exists."""


class RetryableError(Exception):
    """A transient failure of a call. `retry_after_seconds` is the pause that the server requests."""

    def __init__(self, reason: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_seconds = reason, retry_after_seconds


@dataclass(frozen=True)
class ResourceKind:
    """A kind of custom resource, and the operator that provides it."""

    group: str
    version: str
    plural: str
    kind: str
    operator: str
    operator_version: str = ""

    @property
    def requirement(self) -> str:
        """The operator with its minimum version, for messages."""
        return f"{self.operator} {self.operator_version} or later" if self.operator_version else self.operator


TRAINJOB = ResourceKind("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", "Kubeflow Trainer", "2.2")
RAYJOB = ResourceKind("ray.io", "v1", "rayjobs", "RayJob", "KubeRay", "1.3")


# Connection


def require_package() -> None:
    """Raise EngineMissingError if the package kubernetes is not installed."""
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        hint = "Run: pip install -c constraints.txt 'tuneline[pipeline]'"
        raise EngineMissingError("the package kubernetes is not installed", hint=hint) from None


def get_kubeconfig_files() -> str:
    """Return the kubeconfig files that kubectl would read, joined by the path separator."""
    return os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


def connect_kubeconfig(files: str, context: str = "") -> tuple[ApiClient, str]:
    """Return a client for a context of kubeconfig files, and the context's namespace or "".

    Args:
        files: paths of the files, joined by the path separator.
        context: name of the context. Empty: the current context.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    contexts, current = config.list_kube_config_contexts(files)
    config.load_kube_config(files, context=context or None, client_configuration=configuration, persist_config=False)
    chosen = next((entry for entry in contexts if entry["name"] == context), current)
    return _build_client(configuration), str(chosen["context"].get("namespace") or "")


def connect_pod() -> tuple[ApiClient, str]:
    """Return a client for the service account of this pod and the pod's namespace, or ""."""
    from kubernetes import client, config

    configuration = client.Configuration()
    config.load_incluster_config(client_configuration=configuration)
    namespace = NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else ""
    return _build_client(configuration), namespace


def _build_client(configuration: Configuration) -> ApiClient:
    from kubernetes import client

    configuration.retries = False  # urllib3 would try an unreachable server four times; the callers retry
    return client.ApiClient(configuration)


def read_server_message(error: ApiException) -> str:
    """Return the API server's message of a failed call, on one line."""
    try:
        message = str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        if "CERTIFICATE" in str(error.reason):
            return "its certificate cannot be verified"
        message = str(error.reason)
    return shorten(message)


def shorten(text: str) -> str:
    """Return a text on one line, cut to MAX_MESSAGE_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[:MAX_MESSAGE_CHARACTERS]}…"


# Calls of the launchers


@dataclass
class KubernetesClient:
    """A client for one API server and one namespace. Methods send each request once; use `retry` to repeat a call.

    Methods raise RetryableError for a transient failure and AccessError if the credentials or the permissions do not
    suffice. They raise ConfigurationError if the API server rejects the request.
    """

    client: ApiClient
    namespace: str
    timeout_seconds: float = 20.0  # for one call

    def create(self, kind: ResourceKind, body: JsonObject) -> JsonObject:
        """Create an object; the API server rejects unknown fields.

        Raises:
            ConflictError: an object of this name already exists.
            EngineMissingError: the cluster does not have the resource kind.
        """
        created = self._call("create", kind, body, field_validation="Strict")
        if created is None:
            raise EngineMissingError(
                f"the cluster has no resource kind {kind.kind}",
                hint=f"Install {kind.requirement}, or choose another launcher.kind.",
            )
        return created

    def get(self, kind: ResourceKind, name: str) -> JsonObject | None:
        """Return an object, or None if it does not exist."""
        return self._call("get", kind, name)

    def list_by_label(self, kind: ResourceKind, selector: str) -> list[JsonObject]:
        """Return the objects that a label selector matches, sorted by name."""
        items = (self._call("list", kind, label_selector=selector) or {}).get("items") or []
        return sorted(items, key=lambda item: str(item["metadata"]["name"]))

    def delete(self, kind: ResourceKind, name: str) -> bool:
        """Delete an object; its pods end within their grace period. Return False if it does not exist.

        A foreground deletion would keep the object until the pods have ended, but Kubeflow Trainer 2.3 then creates the
        deleted JobSet of the object again, and the training starts once more.
        """
        return self._call("delete", kind, name, body={"propagationPolicy": "Background"}) is not None

    def list_pods(self, selector: str) -> list[JsonObject]:
        """Return the pods that a label selector matches."""
        return self._list_core("pods", "list_namespaced_pod", label_selector=selector)

    def list_events(self, name: str) -> list[JsonObject]:
        """Return the events of the objects with this name."""
        return self._list_core("events", "list_namespaced_event", field_selector=f"involvedObject.name={name}")

    def _list_core(self, plural: str, method: str, **selector: str) -> list[JsonObject]:
        from kubernetes import client

        read = getattr(client.CoreV1Api(self.client), method)
        options = {**selector, "_request_timeout": self.timeout_seconds, "_preload_content": False}
        answer = _call("list", plural, lambda: json.loads(read(self.namespace, **options).data))
        return list((answer or {}).get("items") or [])

    def _call(self, verb: str, kind: ResourceKind, *arguments: object, **options: object) -> JsonObject | None:
        from kubernetes import client

        method = getattr(client.CustomObjectsApi(self.client), f"{verb}_namespaced_custom_object")
        location = (kind.group, kind.version, self.namespace, kind.plural)
        options["_request_timeout"] = self.timeout_seconds
        return _call(verb, kind.plural, lambda: method(*location, *arguments, **options))


def connect(namespace: str = "") -> KubernetesClient:
    """Connect to the kubeconfig's cluster if KUBECONFIG is set or outside a pod, else to the cluster of this pod.

    Args:
        namespace: namespace of the calls. Empty: the namespace of the kubeconfig or the pod, or `default`.

    Raises:
        EngineMissingError: the package kubernetes is not installed, or no cluster is configured.
    """
    require_package()
    from kubernetes.config import ConfigException

    try:
        if os.environ.get("KUBECONFIG") or not os.environ.get("KUBERNETES_SERVICE_HOST"):
            client, own_namespace = connect_kubeconfig(get_kubeconfig_files())
        else:
            client, own_namespace = connect_pod()
    except (ConfigException, OSError) as error:
        hint = "Run the command in a pod of the cluster, or set KUBECONFIG so that `kubectl get pods` works."
        raise EngineMissingError(f"no Kubernetes cluster is configured: {error}", hint=hint) from None
    return KubernetesClient(client, namespace or own_namespace or "default")


def retry(
    call: Callable[[], Answer], timeout_seconds: float, interval_seconds: float, notify: Callable[[str], None]
) -> Answer:
    """Repeat a call while it raises RetryableError, with exponential backoff; report the first failure to `notify`.

    Args:
        call: the call.
        timeout_seconds: time after which a failure is final.
        interval_seconds: first pause; doubles after each failure, up to 30 seconds.
        notify: receives the text of the report.

    Raises:
        UnresponsiveError: the calls failed for `timeout_seconds`.
    """
    deadline, is_reported = time.monotonic() + timeout_seconds, False
    while True:
        try:
            return call()
        except RetryableError as error:
            if time.monotonic() >= deadline:
                raise build_unresponsive_error(error, timeout_seconds) from None
            if not is_reported:
                notify(f"{error.reason}; retrying for {timeout_seconds:.0f} seconds")
                is_reported = True
            pause = max(interval_seconds, error.retry_after_seconds)
            remaining = max(0.0, deadline - time.monotonic()) + 0.01
            time.sleep(min(pause, MAX_RETRY_INTERVAL_SECONDS, remaining))
            interval_seconds *= 2


def build_unresponsive_error(error: RetryableError, timeout_seconds: float) -> UnresponsiveError:
    """Return the error for an API server that failed for the whole timeout."""
    hint = "Rerun the command to find the job, which may still run, or increase launcher.patience_seconds."
    return UnresponsiveError(f"{error.reason}; still failing after {timeout_seconds:.0f} seconds", hint=hint)


def _call(verb: str, plural: str, call: Callable[[], object]) -> JsonObject | None:
    """Return the server's answer, or None on 404."""
    import urllib3.exceptions
    from kubernetes.client import ApiException

    try:
        answer = call()
    except ApiException as error:
        message = read_server_message(error)
        if error.status == 404:
            if message.startswith("namespaces "):
                hint = "Create the namespace, or correct launcher.trainjob.namespace or launcher.rayjob.namespace."
                raise ConfigurationError(f"the cluster has no such namespace: {message}", hint=hint) from None
            return None
        if error.status in RETRYABLE_STATUSES or error.status == 0:
            pause_seconds = 0.0
            with suppress(ValueError):  # Retry-After may be a date
                pause_seconds = float((error.headers or {}).get("Retry-After") or 0)
            raise RetryableError(f"the API server returned {error.status}: {message}", pause_seconds) from None
        if error.status == 409 and verb == "create":
            raise ConflictError(message) from None
        if error.status == 401:
            hint = "Renew the login or the service account's token."
            raise AccessError(f"the API server does not accept the credentials: {message}", hint=hint) from None
        if error.status == 403 and "status unknown for quota" in message:  # of a quota that was just created
            raise RetryableError(f"the API server has not computed the usage of the quota yet: {message}") from None
        if error.status == 403:
            raise _sort_refusal(verb, plural, message) from None
        hint = "Correct the matching key in the section launcher of platform.yaml."
        if "ValidatingAdmissionPolicy" in message:
            hint += f" The ConfigMap {LIMITS_NAME} of the namespace lists the allowed values."
        raise ConfigurationError(f"the cluster rejects the job: {message}", hint=hint) from None
    except (urllib3.exceptions.HTTPError, HTTPException, OSError, ValueError) as error:
        raise RetryableError(f"the API server does not answer ({type(error).__name__})") from None
    if not isinstance(answer, dict):
        raise RetryableError(
            f"the API server's answer is of type {type(answer).__name__}; expected a Kubernetes object"
        )
    return answer


def _sort_refusal(verb: str, plural: str, message: str) -> TunelineError:
    """Return the error for a response 403, whose cause only the text of the API server tells."""
    if "denied the request" in message:  # a webhook, such as Trainer's for a runtime that does not exist, or a policy
        hint = "Correct the matching key in the section launcher of platform.yaml, such as trainjob.runtime."
        return ConfigurationError(f"the cluster rejects the job: {message}", hint=hint)
    if "exceeded quota" in message:
        hint = "Delete finished jobs of the namespace, or request a larger ResourceQuota, then run the same command again to resume."
        return AccessError(f"the quota of the namespace does not allow another job: {message}", hint=hint)
    if "is being terminated" in message:
        hint = "Choose another namespace, or wait for the deletion and create the namespace again."
        return AccessError(f"the namespace is being deleted: {message}", hint=hint)
    hint = (
        f"Apply deploy/components/launcher-{plural.removesuffix('s')}/launcher-rbac.yaml, which grants the step's service "
        f"account the right to {verb} {plural}."
    )
    return AccessError(f"no permission to {verb} {plural}: {message}", hint=hint)
