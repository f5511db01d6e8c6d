"""A fake API server of Kubeflow Pipelines; the real one needs a cluster.

It implements the endpoints of kfp's client and CLI with the same JSON, records all calls and refuses what the real server refuses
(kubeflow/pipelines, backend/src/apiserver: server/run_server.go, server/api_converter.go, template/v2_template.go):

- a run without a name or of an unknown experiment
- a run with neither or both of specification and version
- a specification with fields that the protocol buffers do not define
- a parameter that is unknown, missing or of the wrong type

Each poll of a run returns the next state of `script`.
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
    "NUMBER_INTEGER": (int, float),  # the real server only checks for a number
    "STRING": (str,),
    "BOOLEAN": (bool,),
    "LIST": (list,),
    "STRUCT": (dict,),
}


class RefusedError(Exception):
    """An error response with the message of the real server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class State:
    """A run as returned by one poll: its state, the states of its tasks and the errors of failed ones."""

    state: str
    tasks: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass
class Call:
    """A recorded request."""

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
    """State of the fake server and its configurable behaviour."""

    token: str | None = None  # required token, if set
    namespaces: tuple[str, ...] = ()  # namespaces in multi-user mode; empty in single-user mode
    script: list[State] = field(default_factory=lambda: [State("PENDING"), State("RUNNING"), State("SUCCEEDED")])
    faults: list[tuple[str, int, str]] = field(default_factory=list)  # (path, status, body), each answered once
    version: str = "2.17.0"
    login_page: bool = False  # an authentication proxy answers all calls with HTML
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    experiments: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    pipelines: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)
    poll_counts: dict[str, int] = field(default_factory=dict)

    def answer(self, call: Call) -> Json:
        """Return the response to a call. Raises RefusedError."""
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
        matches = [
            e
            for e in self.experiments.values()
            if e["display_name"] == _filtered_name(call) and e["namespace"] == namespace
        ]
        return {"experiments": matches, "total_size": len(matches)}

    def _create_experiment(self, body: Json) -> Json:
        name, namespace = body.get("display_name"), self._namespace(body.get("namespace") or "", "create")
        if not isinstance(name, str) or not name:
            raise RefusedError(
                400,
                "Failed to create a new experiment: Invalid input error: Experiment name is empty. Please specify a valid name",
            )
        experiment = {
            "experiment_id": _id(),
            "display_name": name,
            "namespace": namespace,
            "created_at": CREATED,
            "storage_state": "AVAILABLE",
        }
        self.experiments[experiment["experiment_id"]] = experiment
        return experiment

    def _namespace(self, namespace: str, verb: str) -> str:
        if self.namespaces and not namespace:
            raise RefusedError(
                400, "Invalid input error: In multi-user mode, an experiment cannot have an empty namespace"
            )
        if not self.namespaces and namespace:
            raise RefusedError(400, "Invalid input error: In single-user mode, an experiment cannot have a namespace")
        if self.namespaces and namespace not in self.namespaces:
            attributes = f"ResourceAttributes{{Namespace:{namespace},Verb:{verb},Group:pipelines.kubeflow.org,Resource:experiments}}"
            raise RefusedError(
                403, f"PermissionDenied: User 'ci@example.com' is not authorized with reason:  (request: &{attributes})"
            )
        return namespace

    def _create_run(self, body: Json) -> Json:
        prefix = "Failed to create a new run: "
        name, experiment = body.get("display_name"), body.get("experiment_id")
        if not isinstance(name, str) or not name:
            raise RefusedError(400, f"{prefix}Invalid input error: The run name is empty. Please specify a valid name")
        if experiment not in self.experiments:
            raise RefusedError(404, f"{prefix}ResourceNotFoundError: Experiment {experiment} not found")
        parameters = (body.get("runtime_config") or {}).get("parameters") or {}
        _check_parameters(self._resolve_spec(body, prefix), parameters, prefix)
        run = {
            key: body[key]
            for key in ("display_name", "experiment_id", "runtime_config", "service_account")
            if body.get(key)
        }
        run |= {"run_id": _id(), "created_at": CREATED, "storage_state": "AVAILABLE", "state": "PENDING"}
        self.runs[run["run_id"]] = run
        return run

    def _resolve_spec(self, body: Json, prefix: str) -> Json:
        spec, version = body.get("pipeline_spec"), body.get("pipeline_version_reference")
        if bool(spec) == bool(version):
            raise RefusedError(
                400, f"{prefix}Invalid input error: a run needs either a pipeline specification or a pipeline version"
            )
        if version:
            pipeline_version = self.versions.get(version.get("pipeline_version_id", ""))
            if pipeline_version is None or pipeline_version["pipeline_id"] != version.get("pipeline_id"):
                raise RefusedError(
                    404,
                    f"{prefix}ResourceNotFoundError: PipelineVersion {version.get('pipeline_version_id')} not found",
                )
            return dict(pipeline_version["pipeline_spec"])
        if not isinstance(spec, dict):
            raise RefusedError(400, f"{prefix}proto: syntax error: unexpected token for google.protobuf.Struct")
        if "pipeline_spec" in spec:
            return _validate_spec(spec["pipeline_spec"], spec.get("platform_spec"), prefix)
        return _validate_spec(spec, None, prefix)

    def _get_run(self, run_id: str) -> Json:
        if run_id not in self.runs:
            raise RefusedError(404, f"Failed to get a run: ResourceNotFoundError: Run {run_id} not found")
        polls = self.poll_counts.get(run_id, 0)
        self.poll_counts[run_id] = polls + 1
        current = self.script[min(polls, len(self.script) - 1)]
        tasks = [
            {
                "run_id": run_id,
                "task_id": name,
                "display_name": name,
                "state": state,
                **_status(current.errors.get(name, "")),
            }
            for name, state in current.tasks.items()
        ]
        return {
            **self.runs[run_id],
            "state": current.state,
            "run_details": {"task_details": tasks},
            **_status(current.error),
        }

    def _list_pipelines(self, call: Call) -> Json:
        matches = [p for p in self.pipelines.values() if p["display_name"] == _filtered_name(call)]
        return {"pipelines": matches, "total_size": len(matches)}

    def _upload(self, call: Call) -> Json:
        spec, name = _parse_upload(call), call.query.get("name", "")
        if any(p["display_name"] == name for p in self.pipelines.values()):
            raise RefusedError(
                409,
                f"Failed to create a pipeline: Already exist error: The name {name} already exist. Please specify a new name",
            )
        pipeline = {"pipeline_id": _id(), "display_name": name, "created_at": CREATED}
        self.pipelines[pipeline["pipeline_id"]] = pipeline
        self._add_version(pipeline["pipeline_id"], name, spec)
        return pipeline

    def _upload_version(self, call: Call) -> Json:
        if call.query.get("pipelineid") not in self.pipelines:
            raise RefusedError(
                404,
                f"Failed to create a pipeline version: ResourceNotFoundError: Pipeline {call.query.get('pipelineid')} not found",
            )
        return self._add_version(call.query["pipelineid"], call.query.get("name", ""), _parse_upload(call))

    def _add_version(self, pipeline_id: str, name: str, spec: Json) -> Json:
        version = {
            "pipeline_version_id": _id(),
            "pipeline_id": pipeline_id,
            "display_name": name,
            "created_at": CREATED,
            "pipeline_spec": spec,
        }
        self.versions[version["pipeline_version_id"]] = version
        return version


def _id() -> str:
    return str(uuid.uuid4())


def _status(message: str) -> Json:
    return {"error": {"code": 2, "message": message}} if message else {}


def _filtered_name(call: Call) -> str:
    """Return the display name that a list call filters by."""
    predicate = json.loads(call.query["filter"])["predicates"][0]
    assert (predicate["operation"], predicate["key"]) in ((1, "display_name"), ("EQUALS", "display_name")), predicate
    return str(predicate["stringValue"])


def _parse_upload(call: Call) -> Json:
    upload = re.search(rb'name="uploadfile"; filename="[^"]+"\r\n.*?\r\n\r\n(.*?)\r\n--', call.body, re.DOTALL)
    if upload is None:
        raise RefusedError(400, "Failed to upload a pipeline: Failed to read the form field uploadfile")
    documents = list(yaml.safe_load_all(upload[1]))
    return _validate_spec(documents[0], documents[1] if len(documents) > 1 else None, "Failed to upload a pipeline: ")


def _validate_spec(spec: Json, platform: Json | None, prefix: str) -> Json:
    """Refuse a specification with fields that the protocol buffers do not define, including the Kubernetes part."""
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes
    from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline

    try:
        parsed = json_format.ParseDict(spec, pipeline.PipelineSpec())
        json_format.ParseDict(platform or {}, pipeline.PlatformSpec())
        executors = (
            (platform or {}).get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {})
        )
        for executor in executors.values():
            json_format.ParseDict(executor, kubernetes.KubernetesExecutorConfig())
    except json_format.ParseError as error:
        raise RefusedError(400, f"{prefix}Invalid input error: invalid v2 pipeline spec: {error}") from None
    if parsed.schema_version != "2.1.0":
        raise RefusedError(
            400,
            f"{prefix}KFP only supports schema version 2.1.0, but the pipeline spec has version {parsed.schema_version}",
        )
    if not parsed.pipeline_info.name or not parsed.HasField("root"):
        raise RefusedError(
            400, f"{prefix}Invalid input error: invalid v2 pipeline spec: name or root component is empty"
        )
    return spec


def _check_parameters(spec: Json, values: Json, prefix: str) -> None:
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    message_prefix = f"{prefix}Failed to create a run: invalid pipeline job inputs: Invalid input error: "
    for name, parameter in declared.items():
        if name not in values:
            if not parameter.get("isOptional") and "defaultValue" not in parameter:
                raise RefusedError(
                    400,
                    f"{message_prefix}parameter {name} is not optional, yet has neither default value nor user provided value",
                )
            continue
        kind = parameter["parameterType"]
        if not isinstance(values[name], KINDS[kind]) or (isinstance(values[name], bool) and kind != "BOOLEAN"):
            raise RefusedError(
                400,
                f"{message_prefix}input parameter {name} requires type {kind}, but the parameter value is not of that type",
            )
    unknown = sorted(set(values) - set(declared))
    if unknown:
        raise RefusedError(
            400, f"{message_prefix}parameter(s) provided are not required by pipeline: {', '.join(unknown)}"
        )


@contextmanager
def serving(api: KfpApi, certificate: Path | None = None) -> Iterator[KfpApi]:
    """Run the server in a thread and set `api.url`. `certificate`: a PEM file with key and certificate for TLS."""
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
                    status, answer = 200, api.answer(Call(self.command, address.path, query, headers, body))
                except RefusedError as error:
                    detail = {
                        "@type": "type.googleapis.com/google.rpc.Status",
                        "code": CODES[error.status],
                        "message": error.message,
                    }
                    status = error.status
                    answer = {
                        "error": error.message,
                        "code": CODES[status],
                        "message": error.message,
                        "details": [detail],
                    }
            self._send(status, json.dumps(answer).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer  # noqa: N815 - names required by http.server

        def log_message(self, *_: object) -> None:
            pass

    return Handler
