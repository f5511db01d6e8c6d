"""A stand-in for the API server of Kubeflow Pipelines: none is on PyPI, and the real one needs a cluster.

It answers the calls that kfp's client and command make, at the same addresses, with the same JSON, and refuses what the real server
refuses (kubeflow/pipelines, backend/src/apiserver: server/run_server.go, server/api_converter.go, template/v2_template.go): a run
without a name or of an unknown experiment, with neither or both of specification and version, with a specification that the protocol
buffers do not know, with a parameter that is unknown, missing or of another type. It records what it was sent. A run goes through the
states of `script`, one a look at it.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Json = dict[str, Any]
BASE = "/apis/v2beta1"
CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14}
CREATED = "2026-01-05T10:00:00Z"
KINDS: dict[str, tuple[type, ...]] = {
    "NUMBER_DOUBLE": (int, float),
    "NUMBER_INTEGER": (int, float),  # the real server checks no more than "a number"
    "STRING": (str,),
    "BOOLEAN": (bool,),
    "LIST": (list,),
    "STRUCT": (dict,),
}


class RefusedError(Exception):
    """An answer that is an error, with the server's words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class State:
    """What one look at a run finds: its state, its tasks' states, and the words of those that failed."""

    state: str
    tasks: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass
class Call:
    """A request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        """The body as JSON."""
        return dict(json.loads(self.body))


@dataclass
class KfpApi:
    """The server's memory, and what a test tells it to do."""

    token: str | None = None  # asked for when set
    namespaces: tuple[str, ...] = ()  # several users' namespaces; none: one user's installation
    script: list[State] = field(default_factory=lambda: [State("PENDING"), State("RUNNING"), State("SUCCEEDED")])
    faults: list[tuple[str, int, str]] = field(default_factory=list)  # (path, status, body), each answered once
    version: str = "2.17.0"
    login_page: bool = False  # what stands before the API answers everything with a page of HTML
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    experiments: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    pipelines: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)

    def answer(self, call: Call) -> Json:
        """What the server says to a call. Raises RefusedError."""
        self.calls.append(call)
        for fault in self.faults:
            if fault[0] in call.path:
                self.faults.remove(fault)
                raise RefusedError(fault[1], fault[2])
        if self.token and call.headers.get("authorization") != f"Bearer {self.token}":
            raise RefusedError(401, "Unauthenticated: Request header error: there is no user identity header.")
        return self._route(call, call.method, call.path.removeprefix(BASE))

    def _route(self, call: Call, method: str, path: str) -> Json:
        if (method, path) == ("GET", "/healthz"):
            return {"commit_sha": "unknown", "tag_name": self.version, "multi_user": bool(self.namespaces)}
        if (method, path) == ("GET", "/experiments"):
            return self._list_experiments(call)
        if (method, path) == ("POST", "/experiments"):
            return self._create_experiment(call.json)
        if (method, path) == ("POST", "/runs"):
            return self._create_run(call.json)
        if method == "GET" and path.startswith("/runs/"):
            return self._get_run(path.removeprefix("/runs/"))
        if (method, path) == ("GET", "/pipelines"):
            return self._list_pipelines(call)
        if (method, path) == ("POST", "/pipelines/upload"):
            return self._upload(call)
        if (method, path) == ("POST", "/pipelines/upload_version"):
            return self._upload_version(call)
        raise RefusedError(404, "Not Found")

    def _list_experiments(self, call: Call) -> Json:
        namespace = self._namespace(call.query.get("namespace", ""), "list")
        found = [e for e in self.experiments.values() if e["display_name"] == _asked(call) and e["namespace"] == namespace]
        return {"experiments": found, "total_size": len(found)}

    def _create_experiment(self, body: Json) -> Json:
        name, namespace = body.get("display_name"), self._namespace(body.get("namespace") or "", "create")
        if not isinstance(name, str) or not name:
            raise RefusedError(
                400, "Failed to create a new experiment: Invalid input error: Experiment name is empty. Please specify a valid name"
            )
        made = {"experiment_id": _id(), "display_name": name, "namespace": namespace, "created_at": CREATED, "storage_state": "AVAILABLE"}
        self.experiments[made["experiment_id"]] = made
        return made

    def _namespace(self, namespace: str, verb: str) -> str:
        if self.namespaces and not namespace:
            raise RefusedError(400, "Invalid input error: In multi-user mode, an experiment cannot have an empty namespace")
        if not self.namespaces and namespace:
            raise RefusedError(400, "Invalid input error: In single-user mode, an experiment cannot have a namespace")
        if self.namespaces and namespace not in self.namespaces:
            attributes = f"ResourceAttributes{{Namespace:{namespace},Verb:{verb},Group:pipelines.kubeflow.org,Resource:experiments}}"
            raise RefusedError(403, f"PermissionDenied: User 'ci@example.com' is not authorized with reason:  (request: &{attributes})")
        return namespace

    def _create_run(self, body: Json) -> Json:
        prefix = "Failed to create a new run: "
        name, experiment = body.get("display_name"), body.get("experiment_id")
        if not isinstance(name, str) or not name:
            raise RefusedError(400, f"{prefix}Invalid input error: The run name is empty. Please specify a valid name")
        if experiment not in self.experiments:
            raise RefusedError(404, f"{prefix}ResourceNotFoundError: Experiment {experiment} not found")
        given = (body.get("runtime_config") or {}).get("parameters") or {}
        _check_parameters(self._spec_of(body, prefix), given, prefix)
        made = {key: body[key] for key in ("display_name", "experiment_id", "runtime_config", "service_account") if body.get(key)}
        made |= {"run_id": _id(), "created_at": CREATED, "storage_state": "AVAILABLE", "state": "PENDING"}
        self.runs[made["run_id"]] = made
        return made

    def _spec_of(self, body: Json, prefix: str) -> Json:
        given, version = body.get("pipeline_spec"), body.get("pipeline_version_reference")
        if bool(given) == bool(version):
            raise RefusedError(400, f"{prefix}Invalid input error: a run needs either a pipeline specification or a pipeline version")
        if version:
            found = self.versions.get(version.get("pipeline_version_id", ""))
            if found is None or found["pipeline_id"] != version.get("pipeline_id"):
                raise RefusedError(404, f"{prefix}ResourceNotFoundError: PipelineVersion {version.get('pipeline_version_id')} not found")
            return dict(found["pipeline_spec"])
        if not isinstance(given, dict):
            raise RefusedError(400, f"{prefix}proto: syntax error: unexpected token for google.protobuf.Struct")
        if "pipeline_spec" in given:
            return _checked(given["pipeline_spec"], given.get("platform_spec"), prefix)
        return _checked(given, None, prefix)

    def _get_run(self, run_id: str) -> Json:
        if run_id not in self.runs:
            raise RefusedError(404, f"Failed to get a run: ResourceNotFoundError: Run {run_id} not found")
        seen = self.looks.get(run_id, 0)
        self.looks[run_id] = seen + 1
        now = self.script[min(seen, len(self.script) - 1)]
        tasks = [
            {"run_id": run_id, "task_id": name, "display_name": name, "state": state, **_status(now.errors.get(name, ""))}
            for name, state in now.tasks.items()
        ]
        return {**self.runs[run_id], "state": now.state, "run_details": {"task_details": tasks}, **_status(now.error)}

    def _list_pipelines(self, call: Call) -> Json:
        found = [p for p in self.pipelines.values() if p["display_name"] == _asked(call)]
        return {"pipelines": found, "total_size": len(found)}

    def _upload(self, call: Call) -> Json:
        spec, name = _uploaded(call), call.query.get("name", "")
        if any(p["display_name"] == name for p in self.pipelines.values()):
            raise RefusedError(
                409, f"Failed to create a pipeline: Already exist error: The name {name} already exist. Please specify a new name"
            )
        made = {"pipeline_id": _id(), "display_name": name, "created_at": CREATED}
        self.pipelines[made["pipeline_id"]] = made
        self._keep_version(made["pipeline_id"], name, spec)
        return made

    def _upload_version(self, call: Call) -> Json:
        if call.query.get("pipelineid") not in self.pipelines:
            raise RefusedError(
                404, f"Failed to create a pipeline version: ResourceNotFoundError: Pipeline {call.query.get('pipelineid')} not found"
            )
        return self._keep_version(call.query["pipelineid"], call.query.get("name", ""), _uploaded(call))

    def _keep_version(self, pipeline_id: str, name: str, spec: Json) -> Json:
        made = {
            "pipeline_version_id": _id(),
            "pipeline_id": pipeline_id,
            "display_name": name,
            "created_at": CREATED,
            "pipeline_spec": spec,
        }
        self.versions[made["pipeline_version_id"]] = made
        return made


def _id() -> str:
    return str(uuid.uuid4())


def _status(message: str) -> Json:
    return {"error": {"code": 2, "message": message}} if message else {}


def _asked(call: Call) -> str:
    """The name that a list is filtered by."""
    predicate = json.loads(call.query["filter"])["predicates"][0]
    assert (predicate["operation"], predicate["key"]) in ((1, "display_name"), ("EQUALS", "display_name")), predicate
    return str(predicate["stringValue"])


def _uploaded(call: Call) -> Json:
    found = re.search(rb'name="uploadfile"; filename="[^"]+"\r\n.*?\r\n\r\n(.*?)\r\n--', call.body, re.DOTALL)
    if found is None:
        raise RefusedError(400, "Failed to upload a pipeline: Failed to read the form field uploadfile")
    documents = list(yaml.safe_load_all(found[1]))
    return _checked(documents[0], documents[1] if len(documents) > 1 else None, "Failed to upload a pipeline: ")


def _checked(spec: Json, platform: Json | None, prefix: str) -> Json:
    """A specification that the protocol buffers know every field of, the Kubernetes part too."""
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes
    from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline

    try:
        parsed = json_format.ParseDict(spec, pipeline.PipelineSpec())
        json_format.ParseDict(platform or {}, pipeline.PlatformSpec())
        executors = (platform or {}).get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {})
        for executor in executors.values():
            json_format.ParseDict(executor, kubernetes.KubernetesExecutorConfig())
    except json_format.ParseError as error:
        raise RefusedError(400, f"{prefix}Invalid input error: invalid v2 pipeline spec: {error}") from None
    if parsed.schema_version != "2.1.0":
        raise RefusedError(
            400, f"{prefix}KFP only supports schema version 2.1.0, but the pipeline spec has version {parsed.schema_version}"
        )
    if not parsed.pipeline_info.name or not parsed.HasField("root"):
        raise RefusedError(400, f"{prefix}Invalid input error: invalid v2 pipeline spec: name or root component is empty")
    return spec


def _check_parameters(spec: Json, given: Json, prefix: str) -> None:
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    words = f"{prefix}Failed to create a run: invalid pipeline job inputs: Invalid input error: "
    for name, parameter in declared.items():
        if name not in given:
            if not parameter.get("isOptional") and "defaultValue" not in parameter:
                raise RefusedError(400, f"{words}parameter {name} is not optional, yet has neither default value nor user provided value")
            continue
        kind = parameter["parameterType"]
        if not isinstance(given[name], KINDS[kind]) or (isinstance(given[name], bool) and kind != "BOOLEAN"):
            raise RefusedError(400, f"{words}input parameter {name} requires type {kind}, but the parameter value is not of that type")
    extra = sorted(set(given) - set(declared))
    if extra:
        raise RefusedError(400, f"{words}parameter(s) provided are not required by pipeline: {', '.join(extra)}")


@contextmanager
def serving(api: KfpApi, certificate: Path | None = None) -> Iterator[KfpApi]:
    """Run the server in a thread; its address is in `url`. `certificate`: a PEM file with key and certificate, to speak TLS."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(api))
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    api.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()


def _handler(api: KfpApi) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            address = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            if api.login_page:
                self._send(200, b"<!DOCTYPE html><title>Log in to your account</title>", "text/html")
                return
            with lock:
                try:
                    status, found = 200, api.answer(Call(self.command, address.path, query, headers, body))
                except RefusedError as error:
                    told = {"@type": "type.googleapis.com/google.rpc.Status", "code": CODES[error.status], "message": error.message}
                    status = error.status
                    found = {"error": error.message, "code": CODES[status], "message": error.message, "details": [told]}
            self._send(status, json.dumps(found).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    return Handler
