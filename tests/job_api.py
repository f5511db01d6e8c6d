"""A stand-in for a cluster that runs jobs: the API server of Kubernetes, Kubeflow Trainer, KubeRay, Kueue and the pods.

A real one needs etcd, container images and several machines. The API server is one over HTTP, asked by the official client: objects have
a uid and a resourceVersion, a taken name is a conflict, unknown fields are refused where the caller wants that (fieldValidation=Strict,
against the schemas of the CRDs in tests/common/crds), foreground deletion leaves an object until its pods have ended, and a test can have
it answer 429 with Retry-After, 500 and the like, break connections off before or after a call is carried out, keep silent, or refuse a
verb. There is no watch: a launcher asks with plain GETs. One thread stands in for the controllers and moves the statuses, in the words that
the real ones use. A pod is a thread that leaves in the job's folder what a training leaves there (asked to end, it saves: exit code 75).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests import crds

Json = dict[str, Any]
TURN = 0.02  # seconds between two looks of the controllers
OWNED = ("trainjobs", "rayjobs")
REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Expired"}
USER = "system:serviceaccount:team-a:pipeline-runner"
WORDS = {
    410: "The provided continue parameter is too old to display a consistent list result",
    429: "the server has received too many requests and has asked us to try again later",
    500: "etcdserver: request timed out",
    503: "the server is currently unable to handle the request",
}


@dataclass
class Fault:
    """What goes wrong with a call, so many times: an HTTP status, or "drop" (nothing is done), "lose" (done, but the answer is lost), or
    "silence" for `seconds`."""

    verb: str
    resource: str
    what: int | str
    times: int = 1
    seconds: float = 0.0
    after: int = 0  # calls that go well before


@dataclass
class Pod:
    """The pods of a job as one training. `work` is called with it and returns the exit code."""

    folder: Path
    work: Callable[[Pod], int]
    job: Json = field(default_factory=dict)
    asked: threading.Event = field(default_factory=threading.Event)
    code: int | None = None

    def start(self) -> Pod:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def leave(self, outcome: Json) -> None:
        (self.folder / "outcome.json").write_text(json.dumps(outcome))

    def tell(self, text: str) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"stage": "fine_tuning", "event": "note", "text": text}) + "\n")

    def _run(self) -> None:
        (self.folder / "outcome.json").unlink(missing_ok=True)
        self.code = self.work(self)


@dataclass
class JobApi:
    """The cluster's memory, and what a test tells it to do."""

    works: list[Callable[[Pod], int]] = field(default_factory=list)  # of the pods, in turn; the last for all further ones
    faults: list[Fault] = field(default_factory=list)
    denied: set[tuple[str, str]] = field(default_factory=set)  # (verb, resource)
    unknown: set[str] = field(default_factory=set)  # resources that the cluster does not know
    old_fields: set[str] = field(default_factory=set)  # that the cluster's version of the CRD does not have
    token: str = "the-cluster-token"
    admits: bool = True  # whether Kueue has quota
    starts: bool = True  # whether pods find a node and an image
    holds: set[str] = field(default_factory=set)  # jobs whose pods do not end: a node that does not answer
    url: str = ""
    objects: dict[str, dict[str, Json]] = field(default_factory=lambda: {kind: {} for kind in (*OWNED, "workloads", "pods", "events")})
    created: list[str] = field(default_factory=list)
    running: dict[str, Pod] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)  # the jobs of the pods that were started
    calls: list[tuple[str, str]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    version: int = 0

    def job(self) -> Json:
        """The only job."""
        (job,) = [one for kind in OWNED for one in self.objects[kind].values()]
        return job

    def left(self) -> list[str]:
        """The jobs that are there, and the pods that run."""
        return [*(name for kind in OWNED for name in self.objects[kind]), *(name for name, pod in self.running.items() if pod.code is None)]

    def answer(self, verb: str, resource: str, name: str, query: dict[str, list[str]], body: Json | None) -> tuple[int, Json]:
        """Status and body."""
        self.calls.append((verb, resource))
        if (verb, resource) in self.denied:
            group = {"trainjobs": "trainer.kubeflow.org", "rayjobs": "ray.io", "workloads": "kueue.x-k8s.io"}.get(resource, "")
            said = f'{resource}.{group} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in API group "{group}"'
            return _failure(403, f'{said} in the namespace "team-a"')
        if resource in self.unknown:
            return _failure(404, "the server could not find the requested resource")
        there = self.objects[resource]
        if verb == "list":
            items = [one for one in there.values() if _selected(one, query)]
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}, "items": items}
        if verb == "create":
            assert body is not None
            return self._create(resource, body, strict=query.get("fieldValidation") == ["Strict"])
        if name not in there:
            return _failure(404, f'{resource} "{name}" not found')
        return (200, there[name]) if verb == "get" else self._delete(there[name], body or {})

    def _create(self, resource: str, body: Json, *, strict: bool) -> tuple[int, Json]:
        name = body["metadata"]["name"]
        unknown = [*self.old_fields & body["spec"].keys()]
        problems = [f'unknown field "spec.{key}"' for key in unknown] or crds.problems(body)
        if strict and problems:
            return _failure(400, f"{body['kind']} in version cannot be handled: strict decoding error: {problems[0]}")
        if name in self.objects[resource]:
            return _failure(409, f'{resource} "{name}" already exists')
        made = json.loads(json.dumps(body))
        self.version += 1
        made["metadata"] |= {"uid": f"uid-{self.version}", "namespace": "team-a", "creationTimestamp": "2026-01-01T00:00:00Z"}
        if "kueue.x-k8s.io/queue-name" in made["metadata"]["labels"]:
            made["spec"]["suspend"] = True  # Kueue's webhook
            self._workload(made)
        self.objects[resource][name] = self._changed(made)
        self.created.append(name)
        return 201, made

    def _workload(self, job: Json) -> None:
        metadata = {"name": f"job-{job['metadata']['name']}", "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}}
        self.objects["workloads"][job["metadata"]["name"]] = {"metadata": metadata, "status": {"conditions": []}}

    def _delete(self, thing: Json, options: Json) -> tuple[int, Json]:
        assert options.get("propagationPolicy") == "Foreground", "an object whose pods still write may not be gone"
        if "deletionTimestamp" not in thing["metadata"]:
            thing["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z", "finalizers": ["foregroundDeletion"]}
            self._changed(thing)
        return 200, thing

    def _changed(self, thing: Json) -> Json:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        return thing

    # The controllers

    def turn(self) -> None:
        """One look of all controllers at all jobs."""
        for kind in OWNED:
            for name, job in list(self.objects[kind].items()):
                self._kueue(name, job)
                self._controlled(kind, name, job)

    def _kueue(self, name: str, job: Json) -> None:
        workload = self.objects["workloads"].get(name)
        if workload is None or "deletionTimestamp" in job["metadata"] or _is_done(job):
            return
        pod = self.running.get(name)
        if self.admits and job["spec"].get("suspend") and (pod is None or pod.code is not None):
            workload["status"] = {"conditions": [_condition("QuotaReserved", "QuotaReserved"), _condition("Admitted", "Admitted")]}
            job["spec"]["suspend"] = False
            self.running.pop(name, None)
        elif not self.admits and not job["spec"].get("suspend"):
            preempted = _condition("Preempted", "InClusterQueue", "Preempted to accommodate a workload of higher priority")
            workload["status"] = {"conditions": [_condition("Evicted", "Preempted", "Preempted"), preempted]}
            job["spec"]["suspend"] = True
        elif not self.admits and not workload["status"]["conditions"]:
            said = "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu"
            workload["status"] = {"conditions": [{**_condition("QuotaReserved", "Pending", said), "status": "False"}]}

    def _controlled(self, kind: str, name: str, job: Json) -> None:
        pod = self.running.get(name)
        if "deletionTimestamp" in job["metadata"]:
            if pod:
                pod.asked.set()
            if (pod is None or pod.code is not None) and name not in self.holds:
                del self.objects[kind][name]
                self.objects["workloads"].pop(name, None)
        elif job["spec"].get("suspend"):
            if pod:
                pod.asked.set()
            _state(job, "suspended")
        elif pod is None and not _is_done(job):
            self._started(name, job)
        elif pod and pod.code is not None and not _is_done(job):
            _state(job, "succeeded" if pod.code == 0 else "failed", f"exit code {pod.code}")
            self._changed(job)

    def _started(self, name: str, job: Json) -> None:
        if not self.starts:
            _state(job, "starting")
            return
        work = self.works[min(len(self.started), len(self.works) - 1)]
        self.started.append(name)
        _state(job, "running")
        self.running[name] = Pod(Path(job["metadata"]["annotations"]["tuneline/folder"]), work, job).start()

    def pod(self, status: Json) -> None:
        """A pod as the API server shows it, of whatever job there is."""
        labels = {"jobset.sigs.k8s.io/jobset-name": self.created[-1], "ray.io/cluster": f"{self.created[-1]}-raycluster"}
        self.objects["pods"]["pod"] = {"metadata": {"name": f"{self.created[-1]}-node-0-0", "labels": labels}, "status": status}


def _selected(thing: Json, query: dict[str, list[str]]) -> bool:
    labels = thing["metadata"].get("labels", {})
    wanted = dict(one.split("=") for one in query.get("labelSelector", []))
    about = dict(one.split("=") for one in query.get("fieldSelector", []))
    right = all(thing["involvedObject"]["name"] == value for value in about.values())
    return right and all(labels.get(key) == value for key, value in wanted.items())


def _condition(kind: str, reason: str, message: str = "") -> Json:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def _is_done(job: Json) -> bool:
    status = job.get("status", {})
    ended = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"} & {"Complete", "Failed"}
    return bool(ended) or status.get("jobDeploymentStatus") in ("Complete", "Failed")


def _state(job: Json, state: str, message: str = "") -> None:
    job["status"] = (_of_trainjob if job["kind"] == "TrainJob" else _of_rayjob)(job["metadata"]["name"], state, message)


def _of_trainjob(name: str, state: str, message: str) -> Json:
    conditions = {
        "suspended": [_condition("Suspended", "Suspended", "TrainJob is suspended")],
        "succeeded": [_condition("Complete", "AllJobsCompleted", "jobset completed successfully")],
        "failed": [_condition("Failed", "FailedJobs", f"jobset failed due to one or more job failures: {message}")],
    }
    counts = {"name": "node", "active": 1, "ready": int(state == "running"), "succeeded": 0, "failed": 0, "suspended": 0}
    return {"conditions": conditions.get(state, []), "jobsStatus": [counts]}


def _of_rayjob(name: str, state: str, message: str) -> Json:
    deployed = {"starting": "Initializing", "suspended": "Suspended", "running": "Running", "succeeded": "Complete", "failed": "Failed"}
    ran = {"running": "RUNNING", "succeeded": "SUCCEEDED", "failed": "FAILED"}
    reason = {"reason": "AppFailed", "message": f"Job entrypoint command failed with {message}"} if state == "failed" else {}
    cluster = {} if state == "suspended" else {"rayClusterName": f"{name}-raycluster"}
    return {"jobDeploymentStatus": deployed[state], "jobStatus": ran.get(state, ""), **reason, **cluster}


def _failure(code: int, message: str) -> tuple[int, Json]:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}
    return code, {**status, "reason": REASONS.get(code, "InternalError")}


@contextmanager
def serving(api: JobApi) -> Iterator[JobApi]:
    """Run the server and the controllers; the address is in `url`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            verb, resource, name = _asked(self.command, self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            fault = _faulty(api, verb, resource)
            if fault and fault.what == "silence":
                time.sleep(fault.seconds)
            if fault and fault.what in ("drop", "silence"):
                return self._break_off()
            if fault and isinstance(fault.what, int):
                return self._send(*_failure(fault.what, WORDS.get(fault.what, "no")), fault)
            if self.headers.get("Authorization", "").lower() != f"bearer {api.token}".lower():
                return self._send(*_failure(401, "Unauthorized"))
            with api.lock:
                status, said = api.answer(verb, resource, name, parse_qs(urlsplit(self.path).query), body)
                data = json.loads(json.dumps(said))
            return self._break_off() if fault else self._send(status, data)

        def _break_off(self) -> None:
            self.close_connection = True

        def _send(self, status: int, said: Json, fault: Fault | None = None) -> None:
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if fault and fault.seconds:
                self.send_header("Retry-After", f"{fault.seconds:g}")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    over = threading.Event()

    def control() -> None:
        while not over.wait(TURN):
            with api.lock:
                api.turn()

    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True), threading.Thread(target=control, daemon=True)]
    for thread in threads:
        thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        over.set()
        for pod in api.running.values():
            pod.asked.set()
        server.shutdown()
        server.server_close()


def _asked(method: str, path: str) -> tuple[str, str, str]:
    """Verb, resource and name of a call."""
    parts = urlsplit(path).path.strip("/").split("/")
    inside = parts[parts.index("namespaces") + 2 :]
    name = inside[1] if len(inside) > 1 else ""
    verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if name else "list")
    return verb, inside[0], name


def _faulty(api: JobApi, verb: str, resource: str) -> Fault | None:
    with api.lock:
        for fault in api.faults:
            if fault.verb in (verb, "*") and fault.resource in (resource, "*") and fault.times:
                if fault.after:
                    fault.after -= 1
                    return None
                fault.times -= 1
                return fault
    return None
