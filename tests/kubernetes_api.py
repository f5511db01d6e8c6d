"""A fake Kubernetes API server; a real one needs etcd and a network.

It stores objects by path and implements lists, Status errors with the messages of k8s.io/apimachinery (pkg/api/errors), access reviews
and pod creation with dryRun=All. A dry run fails like the admission controllers of Kubernetes: unknown fields, violations of the
namespace's Pod Security Standard and missing service accounts. tests/pipelines/preflight/test_doctor.py validates the objects of its
healthy cluster against the strict schemas.
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

from tests import kubernetes_schemas, pod_security

Json = dict[str, Any]
TOKEN = "the-cluster-token"
USER = "ci@example.com"
KUEUE = "/apis/kueue.x-k8s.io"
ADDRESS = re.compile(
    r"^/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>[^/]+)(?:/(?P<name>[^/]+))?$"
)
REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    422: "Invalid",
    500: "InternalError",
}


@dataclass
class KubernetesApi:
    """State of the fake server and its configurable behaviour."""

    objects: dict[str, Json] = field(default_factory=dict)  # by path
    version: str = "v1.34.1"
    token: str = TOKEN
    reviews: bool = True  # whether the caller may create LocalSubjectAccessReviews
    denied: set[tuple[str, str, str]] = field(
        default_factory=set
    )  # (subject, verb, resource); subject is "caller" or "pods"
    unreadable: set[str] = field(default_factory=set)  # kinds that the caller may not get or list
    webhook: Callable[[Json], str] = lambda pod: ""  # the message with which an admission webhook refuses a pod
    kueue_takes_pods: bool = True
    served: dict[str, list[str]] = field(
        default_factory=lambda: {"/apis/trainer.kubeflow.org/v1alpha1": ["trainjobs"]}
    )  # custom resources by API group and version
    silent_about: str = ""  # a resource whose calls time out
    url: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def put(self, path: str, obj: Json) -> None:
        """Store an object in the collection at `path`."""
        self.objects[f"{path}/{obj['metadata']['name']}"] = obj

    def answer(self, method: str, address: str, token: str, body: Json | None) -> tuple[int, Json]:
        """Return the HTTP status and the body for a call."""
        path, query = urlsplit(address).path, parse_qs(urlsplit(address).query)
        self.calls.append((method, path))
        if [token[:7].lower(), token[7:]] != ["bearer ", self.token]:
            return _failure(401, "Unauthorized")
        if path == "/version":
            major, minor = self.version.removeprefix("v").split(".")[:2]
            return 200, {"major": major, "minor": minor, "gitVersion": self.version}
        if method == "POST" and body is not None:
            return self._handle_post(path, query, body)
        return self._handle_get(path)

    def _handle_get(self, path: str) -> tuple[int, Json]:
        if path == KUEUE:
            return self._kueue_api_group()
        if path in self.served:
            return 200, {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "resources": [{"name": name} for name in self.served[path]],
            }
        match = ADDRESS.match(path)
        if match is None:
            return _failure(404, "the server could not find the requested resource")
        kind, namespace = match["kind"], match["namespace"]
        if kind in self.unreadable:
            return _failure(403, _forbidden(kind, match["name"], match["group"] or "", namespace))
        if path in self.objects:
            return 200, self.objects[path]
        if match["name"]:
            return _failure(404, f'{kind}{"." + match["group"] if match["group"] else ""} "{match["name"]}" not found')
        if path.startswith(KUEUE) and not self._has_kueue():
            return _failure(404, "the server could not find the requested resource")
        items = [obj for key, obj in sorted(self.objects.items()) if key.rpartition("/")[0] == path]
        return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    def _has_kueue(self) -> bool:
        return any(path.startswith(KUEUE) for path in self.objects)

    def _kueue_api_group(self) -> tuple[int, Json]:
        if not self._has_kueue():
            return _failure(404, "the server could not find the requested resource")
        served = [
            {"groupVersion": f"kueue.x-k8s.io/{version}", "version": version} for version in ("v1beta2", "v1beta1")
        ]
        return 200, {
            "kind": "APIGroup",
            "apiVersion": "v1",
            "name": "kueue.x-k8s.io",
            "versions": served,
            "preferredVersion": served[0],
        }

    def _handle_post(self, path: str, query: dict[str, list[str]], body: Json) -> tuple[int, Json]:
        kind = path.rpartition("/")[2]
        if kind == "selfsubjectreviews":
            return 201, {**body, "status": {"userInfo": {"username": USER, "groups": ["system:authenticated"]}}}
        if kind in ("selfsubjectaccessreviews", "localsubjectaccessreviews"):
            return self._review(kind, body)
        if kind == "pods" and query.get("dryRun") == ["All"]:
            return self._dry_run_pod(path.split("/")[4], body)
        return _failure(405, "the server does not allow this method on the requested resource")

    def _review(self, kind: str, body: Json) -> tuple[int, Json]:
        if kind.startswith("local") and not self.reviews:
            return _failure(
                403, _forbidden(kind, None, "authorization.k8s.io", body["metadata"]["namespace"], "create")
            )
        attributes = body["spec"]["resourceAttributes"]
        subject = "pods" if kind.startswith("local") else "caller"
        assert kind.startswith("self") or body["spec"]["user"].startswith("system:serviceaccount:"), (
            "a local review names a service account"
        )
        return 201, {
            **body,
            "status": {"allowed": (subject, attributes["verb"], attributes["resource"]) not in self.denied},
        }

    def _dry_run_pod(self, namespace: str, pod: Json) -> tuple[int, Json]:
        if ("caller", "create", "pods") in self.denied:
            return _failure(403, _forbidden("pods", None, "", namespace, "create"))
        named_pod = {**pod, "metadata": {**pod["metadata"], "name": f"{pod['metadata']['generateName']}x7k2p"}}
        problems = kubernetes_schemas.problems(named_pod)
        if problems:
            return _failure(422, f'Pod "{named_pod["metadata"]["name"]}" is invalid: {problems[0]}')
        refusal = self._admission_error(namespace, named_pod)
        if refusal:
            return _failure(403, refusal)
        labels = pod["metadata"].get("labels") or {}
        if self.kueue_takes_pods and "kueue.x-k8s.io/queue-name" in labels:
            named_pod["spec"] = {**pod["spec"], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
        return 201, named_pod

    def _admission_error(self, namespace: str, pod: Json) -> str:
        name, account = pod["metadata"]["name"], pod["spec"]["serviceAccountName"]
        if f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}" not in self.objects:
            return f'pods "{name}" is forbidden: error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        labels = self.objects[f"/api/v1/namespaces/{namespace}"]["metadata"].get("labels") or {}
        violations = (
            pod_security.violations(pod) if labels.get("pod-security.kubernetes.io/enforce") == "restricted" else []
        )
        if violations:
            return f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {violations[0]}'
        refusal = self.webhook(pod)
        return f'admission webhook "pods.example" denied the request: {refusal}' if refusal else ""


def _forbidden(kind: str, name: str | None, group: str, namespace: str | None, verb: str = "") -> str:
    resource = f"{kind}{'.' + group if group else ''}{f' {json.dumps(name)}' if name else ''}"
    scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    return f'{resource} is forbidden: User "{USER}" cannot {verb or ("get" if name else "list")} resource "{kind}" in API group "{group}" {scope}'


def _failure(code: int, message: str) -> tuple[int, Json]:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }
    return code, {**status, "reason": REASONS[code]}


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
            _send(self, status, json.dumps(answer).encode())

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
    version, active = (
        "kueue.x-k8s.io/v1beta2",
        [{"type": "Active", "status": "True", "reason": "Ready", "message": "Can admit new workloads"}],
    )
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
