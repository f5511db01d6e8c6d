"""A fake Kubernetes API server for the doctor: it answers in milliseconds.

It stores objects by path and implements lists, access reviews, and pod creation with dryRun=All, which fails for a missing service
account, a violation of the restricted Pod Security Standard, and a webhook. Requests are not validated. The contract in
tests/common/test_api_contract.py compares these answers with those of a real API server, on which tests/engines/test_api_contract.py
runs the doctor.
"""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests import pod_security

Json = dict[str, Any]
TOKEN = "the-cluster-token"
USER = "ci@example.com"
KUEUE = "/apis/kueue.x-k8s.io"
ADDRESS = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[^/]+)(?:/(?P<name>[^/]+))?$"
)
PAGE = "404 page not found\n"  # the answer for an API group or a custom resource that is not installed
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
}
TRAINER_RESOURCES = ("trainjobs", "trainingruntimes", "clustertrainingruntimes")


@dataclass
class KubernetesApi:
    """State of the fake server and its configurable behaviour."""

    objects: dict[str, Json] = field(default_factory=dict)  # by path
    version: str = "v1.34.1"
    token: str = TOKEN
    denied: set[tuple[str, str, str]] = field(
        default_factory=set
    )  # (subject, verb, resource); subject is "caller" or "pods"
    webhook: Callable[[Json], str] = lambda pod: ""  # the message with which an admission webhook refuses a pod
    kueue_takes_pods: bool = True
    api_groups: dict[str, list[str]] = field(
        default_factory=lambda: {"trainer.kubeflow.org": ["v1alpha1"], "kueue.x-k8s.io": ["v1beta2", "v1beta1"]}
    )  # served versions of the installed custom resources, the preferred one first
    silent_about: str = ""  # a resource whose calls time out
    url: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def put(self, path: str, obj: Json) -> None:
        """Store an object in the collection at `path`."""
        self.objects[f"{path}/{obj['metadata']['name']}"] = obj

    def deny_caller(self, verbs: str, *resources: str) -> None:
        """Deny verbs, separated by spaces, on resources to the caller."""
        self.denied |= {("caller", verb, resource) for verb in verbs.split() for resource in resources}

    def answer(self, method: str, address: str, token: str, body: Json | None) -> tuple[int, Json | str]:
        """Return the HTTP status and the body for a call."""
        path, query = urlsplit(address).path, parse_qs(urlsplit(address).query)
        self.calls.append((method, path))
        if [token[:7].lower(), token[7:]] != ["bearer ", self.token]:
            return failure(401, "Unauthorized")
        if path == "/version":
            major, minor = self.version.removeprefix("v").split(".")[:2]
            return 200, {"major": major, "minor": minor, "gitVersion": self.version}
        match = ADDRESS.match(path)
        if match is None:
            return self._discover(path)
        kind, group, namespace = match["kind"], match["group"] or "", match["namespace"] or ""
        verb = "create" if method == "POST" else "get" if match["name"] else "list"
        if ("caller", verb, kind) in self.denied:
            return failure(403, forbidden(USER, verb, kind, group, namespace, match["name"]))
        if body is not None:
            return self._review(kind, body) if kind.endswith("reviews") else self._dry_run_pod(namespace, query, body)
        is_builtin = not group or group.endswith(".k8s.io")
        if not is_builtin and group not in self.api_groups:
            return 404, PAGE
        if path in self.objects:
            return 200, self.objects[path]
        if match["name"]:
            return failure(404, not_found(kind, group, match["name"]))
        items = [obj for key, obj in sorted(self.objects.items()) if key.rpartition("/")[0] == path]
        if is_builtin:
            items = [{key: value for key, value in obj.items() if key not in ("kind", "apiVersion")} for obj in items]
        return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    def _discover(self, path: str) -> tuple[int, Json | str]:
        """Return an API group, or the resources of a version."""
        group, _, version = path.removeprefix("/apis/").partition("/")
        if group not in self.api_groups:
            return 404, PAGE
        if version:
            resources = [{"name": name} for name in TRAINER_RESOURCES]
            return 200, {"kind": "APIResourceList", "groupVersion": f"{group}/{version}", "resources": resources}
        versions = [{"groupVersion": f"{group}/{name}", "version": name} for name in self.api_groups[group]]
        return 200, {"kind": "APIGroup", "name": group, "versions": versions, "preferredVersion": versions[0]}

    def _review(self, kind: str, body: Json) -> tuple[int, Json]:
        if kind == "selfsubjectreviews":
            return 201, {**body, "status": {"userInfo": {"username": USER, "groups": ["system:authenticated"]}}}
        attributes = body["spec"]["resourceAttributes"]
        subject = "pods" if kind.startswith("local") else "caller"
        assert kind.startswith("self") or body["spec"]["user"].startswith("system:serviceaccount:"), (
            "a local review names a service account"
        )
        return 201, {
            **body,
            "status": {"allowed": (subject, attributes["verb"], attributes["resource"]) not in self.denied},
        }

    def _dry_run_pod(self, namespace: str, query: dict[str, list[str]], pod: Json) -> tuple[int, Json]:
        assert (query, pod["kind"]) == ({"dryRun": ["All"]}, "Pod"), "the doctor creates nothing"
        prefix, account = pod["metadata"]["generateName"], pod["spec"]["serviceAccountName"]
        name, refusal = f"{prefix}x7k2p", ""
        if f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}" not in self.objects:
            name = prefix  # this check precedes the generation of the name
            refusal = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        else:
            labels = self.objects[f"/api/v1/namespaces/{namespace}"]["metadata"].get("labels") or {}
            is_restricted = labels.get("pod-security.kubernetes.io/enforce") == "restricted"
            if is_restricted and (violations := pod_security.violations(pod)):
                refusal = f'violates PodSecurity "restricted:latest": {violations[0]}'
        if refusal:
            return failure(403, f'pods "{name}" is forbidden: {refusal}')
        if refusal := self.webhook(pod):
            return failure(403, f'admission webhook "pods.example" denied the request: {refusal}')
        answer = {**pod, "metadata": {**pod["metadata"], "name": name, "uid": "uid-1"}}
        if self.kueue_takes_pods and "kueue.x-k8s.io/queue-name" in (pod["metadata"].get("labels") or {}):
            answer["spec"] = {**pod["spec"], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
        return 201, answer


def not_found(resource: str, group: str, name: str) -> str:
    """Return the API server's message for a missing object."""
    return f'{resource}{"." + group if group else ""} "{name}" not found'


def forbidden(user: str, verb: str, resource: str, group: str, namespace: str, name: str | None) -> str:
    """Return the API server's message for a call without the right; `name` is that of the object or empty."""
    target = f"{resource}{'.' + group if group else ''}{f' {json.dumps(name)}' if name else ''}"
    namespace = str(name) if resource == "namespaces" else namespace
    scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    return f'{target} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API group "{group}" {scope}'


def failure(code: int, message: str) -> tuple[int, Json]:
    """Return an HTTP status and the object Status with a message."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    return code, {**status, "reason": REASONS.get(code, "InternalError"), "code": code}


@contextmanager
def serving(api: KubernetesApi, certificate: Path | None = None) -> Iterator[KubernetesApi]:
    """Run the server in a thread and set `api.url`. `certificate`: a PEM file with key and certificate for TLS."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if api.silent_about and f"/{api.silent_about}" in self.path:
                time.sleep(1)
            with lock:
                status, answer = api.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            send_answer(self, status, answer)

        do_GET = do_POST = _answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with _listening(Handler, certificate=certificate) as url:
        api.url = url
        yield api


@contextmanager
def _listening(
    handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1", certificate: Path | None = None
) -> Iterator[str]:
    server = ThreadingHTTPServer((host, 0), handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def send_answer(handler: BaseHTTPRequestHandler, status: int, answer: Json | str, **headers: str) -> None:
    """Send a JSON object or a page."""
    is_page = isinstance(answer, str)
    body = answer if isinstance(answer, str) else json.dumps(answer)
    _send(handler, status, body.encode(), "text/plain; charset=utf-8" if is_page else "application/json", **headers)


def _send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json", **headers: str
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def kubeconfig(file: Path, url: str, *, token: str = TOKEN, namespace: str = "") -> Path:
    """Write a kubeconfig with one context, `test`."""
    context = {"cluster": "test", "user": "me", **({"namespace": namespace} if namespace else {})}
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": {"server": url}}],
                "users": [{"name": "me", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": context}],
                "current-context": "test",
            }
        )
    )
    return file


# Services outside the cluster


@dataclass
class ExternalServices:
    """Fake MLflow server and container registry with authentication, as used by the doctor."""

    mlflow: str = ""
    registry: str = ""
    mlflow_token: str = "the-mlflow-token"
    login: str = "puller:the-registry-password"
    images: set[str] = field(default_factory=set)  # name/digest
    mlflow_answers: tuple[int, str] = (200, '{"experiments": []}')

    def ask_mlflow(self, path: str, authorization: str) -> tuple[int, str]:
        """Return the status and body of MLflow's response."""
        if authorization != f"Bearer {self.mlflow_token}":
            return 401, "You are not authenticated."
        return (200, "3.17.0") if path == "/version" else self.mlflow_answers

    def ask_registry(self, handler: BaseHTTPRequestHandler) -> None:
        """Serve tokens on /token and manifests on /v2/<name>/manifests/<reference>."""
        authorization = handler.headers.get("Authorization", "")
        if handler.path.startswith("/token"):
            is_known = authorization == f"Basic {base64.b64encode(self.login.encode()).decode()}"
            _send(handler, 200 if is_known else 401, json.dumps({"token": "pull-token"} if is_known else {}).encode())
        elif authorization != "Bearer pull-token":
            challenge = f'Bearer realm="{self.registry}/token",service="registry",scope="repository:x:pull"'
            _send(handler, 401, b"{}", WWW_Authenticate=challenge)
        else:
            name, _, reference = handler.path.removeprefix("/v2/").partition("/manifests/")
            _send(handler, 200 if f"{name}/{reference}" in self.images else 404, b"{}")


@contextmanager
def serve_external_services(outside: ExternalServices) -> Iterator[ExternalServices]:
    """Run MLflow and the registry in threads. MLflow listens on 127.0.0.2, since 127.0.0.1 in a pod is the pod itself."""

    class Mlflow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = outside.ask_mlflow(self.path.partition("?")[0], self.headers.get("Authorization", ""))
            _send(self, status, text.encode())

        def log_message(self, *_: object) -> None: ...

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            outside.ask_registry(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with _listening(Mlflow, "127.0.0.2") as outside.mlflow, _listening(Registry) as outside.registry:
        yield outside


# Objects of a healthy cluster


def build_object(kind: str, name: str, api_version: str = "v1", namespace: str = "", **rest: Any) -> Json:
    """Build an object of a kind."""
    metadata = {"name": name, **({"namespace": namespace} if namespace else {}), **rest.pop("metadata", {})}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}


def secret(namespace: str, name: str, kind: str = "Opaque", **values: str) -> Json:
    """Build a secret; in keys, `_` becomes `-` and `__` becomes a dot."""
    data = {
        key.replace("__", ".").replace("_", "-"): base64.b64encode(value.encode()).decode()
        for key, value in values.items()
    }
    return build_object("Secret", name, namespace=namespace, type=kind, data=data)


def claim(
    namespace: str, name: str, *modes: str, size: str = "10Ti", storage_class: str = "powerscale", phase: str = "Bound"
) -> Json:
    """Build a persistent volume claim, bound by default."""
    bound_status = {"capacity": {"storage": size}, "accessModes": list(modes)} if phase == "Bound" else {}
    spec = {"accessModes": list(modes), "storageClassName": storage_class, "resources": {"requests": {"storage": size}}}
    return build_object(
        "PersistentVolumeClaim", name, namespace=namespace, spec=spec, status={"phase": phase, **bound_status}
    )


def storage_class(name: str, binding: str = "Immediate") -> Json:
    """Build a storage class."""
    return build_object("StorageClass", name, "storage.k8s.io/v1", provisioner="csi.example", volumeBindingMode=binding)


def node(name: str, labels: dict[str, str] | None = None, taints: list[Json] | None = None, **allocatable: str) -> Json:
    """Build a ready node; the keyword nvidia__gpu becomes nvidia.com/gpu."""
    resources = {
        "pods": "110",
        **{key.replace("nvidia__gpu", "nvidia.com/gpu"): amount for key, amount in allocatable.items()},
    }
    status = {"allocatable": resources, "capacity": resources, "conditions": [{"type": "Ready", "status": "True"}]}
    spec = {"taints": [dict(taint) for taint in taints]} if taints else {}
    return build_object(
        "Node", name, metadata={"labels": {"kubernetes.io/hostname": name, **(labels or {})}}, spec=spec, status=status
    )


def minimal_objects(namespace: str = "kubeflow") -> dict[str, Json]:
    """Return the objects, by path, for a platform.yaml that names only the claim `tuneline`, in single-user Kubeflow."""
    base = f"/api/v1/namespaces/{namespace}"
    return {
        base: build_object("Namespace", namespace, status={"phase": "Active"}),
        f"{base}/serviceaccounts/pipeline-runner": build_object(
            "ServiceAccount", "pipeline-runner", namespace=namespace
        ),
        f"{base}/persistentvolumeclaims/tuneline": claim(namespace, "tuneline", "ReadWriteMany"),
        "/api/v1/nodes/node-1": node("node-1", cpu="16", memory="64Gi"),
    }


def kueue(namespace: str, queue: str, priority: str, quotas: dict[str, str]) -> dict[str, Json]:
    """Return a local queue, its cluster queue and a priority class, by path."""
    version = "kueue.x-k8s.io/v1beta2"
    condition = {"type": "Active", "status": "True", "reason": "Ready", "message": "Can admit new workloads"}
    active = [{**condition, "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    flavor = {
        "name": "default",
        "resources": [{"name": name, "nominalQuota": amount} for name, amount in quotas.items()],
    }
    group = {"coveredResources": list(quotas), "flavors": [flavor]}
    base = f"{KUEUE}/v1beta2"
    return {
        f"{base}/namespaces/{namespace}/localqueues/{queue}": build_object(
            "LocalQueue", queue, version, namespace, spec={"clusterQueue": "gpus"}, status={"conditions": active}
        ),
        f"{base}/clusterqueues/gpus": build_object(
            "ClusterQueue", "gpus", version, spec={"resourceGroups": [group]}, status={"conditions": active}
        ),
        f"{base}/workloadpriorityclasses/{priority}": build_object(
            "WorkloadPriorityClass", priority, version, value=1000, description=""
        ),
    }
