"""A fake cluster that runs jobs: the Kubernetes API server, Kubeflow Trainer, KubeRay, Kueue and the pods.

A real cluster needs etcd, container images and several machines. The fake API server speaks HTTP to the official client:

- objects have a uid and a resourceVersion; a duplicate name is a conflict
- fieldValidation=Strict refuses unknown fields, against the CRD schemas in tests/common/crds
- deletion removes an object at once and leaves pods that still save
- faults: 429 with Retry-After, 5xx, connections that break before or after a call takes effect, timeouts, denied verbs
- no watch requests: launchers poll with GET

One thread acts as the controllers and updates the statuses with the messages of the real ones. A pod is a thread that writes a training's
files into the job's folder; a stop request makes it save and end with exit code 75.
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
CONTROL_INTERVAL_SECONDS = 0.02
JOB_RESOURCES = ("trainjobs", "rayjobs")
REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "AlreadyExists",
    410: "Expired",
}
USER = "system:serviceaccount:team-a:pipeline-runner"
MESSAGES = {
    410: "The provided continue parameter is too old to display a consistent list result",
    429: "the server has received too many requests and has asked us to try again later",
    500: "etcdserver: request timed out",
    503: "the server is currently unable to handle the request",
}


@dataclass
class Fault:
    """A failure of the next `times` calls: an HTTP status, "drop" (call not executed), "lose" (executed, response lost) or "silence".

    `seconds` is the Retry-After of a status or the length of the silence.
    """

    verb: str
    resource: str
    effect: int | str
    times: int = 1
    seconds: float = 0.0
    after: int = 0  # calls that succeed first


@dataclass
class Pod:
    """All pods of a job as one thread that runs `work(pod)`, which returns the exit code."""

    folder: Path
    work: Callable[[Pod], int]
    job: Json = field(default_factory=dict)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    code: int | None = None

    def start(self) -> Pod:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def write_outcome(self, outcome: Json) -> None:
        (self.folder / "outcome.json").write_text(json.dumps(outcome))

    def log_note(self, text: str) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"stage": "fine_tuning", "event": "note", "text": text}) + "\n")

    def _run(self) -> None:
        (self.folder / "outcome.json").unlink(missing_ok=True)
        self.code = self.work(self)


@dataclass
class JobApi:
    """State of the fake cluster and its configurable behaviour."""

    works: list[Callable[[Pod], int]] = field(
        default_factory=list
    )  # programs of the pods, in order of start; the last one repeats
    faults: list[Fault] = field(default_factory=list)
    denied: set[tuple[str, str]] = field(default_factory=set)  # (verb, resource)
    unknown_resources: set[str] = field(default_factory=set)  # resources whose CRD is not installed
    missing_fields: set[str] = field(default_factory=set)  # fields that the installed CRD version lacks
    token: str = "the-cluster-token"
    refusal: tuple[int, str] | None = None  # status and message of every creation
    admits: bool = True  # whether Kueue has quota
    makes_workloads: bool = True  # False: the WorkloadPriorityClass of the jobs does not exist
    can_start: bool = True  # whether pods can be scheduled and pull their image
    stuck_jobs: set[str] = field(default_factory=set)  # jobs whose pods do not end, as on an unreachable node
    url: str = ""
    objects: dict[str, dict[str, Json]] = field(
        default_factory=lambda: {kind: {} for kind in (*JOB_RESOURCES, "workloads", "pods", "events")}
    )
    removed_pods: set[str] = field(default_factory=set)  # jobs whose pods were deleted
    terminating: set[str] = field(default_factory=set)  # jobs whose pods are being deleted and still save
    pod_status: dict[str, Json] = field(default_factory=dict)  # by job, instead of a running pod's
    created: list[str] = field(default_factory=list)
    running: dict[str, Pod] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)  # names of jobs whose pods were started
    calls: list[tuple[str, str]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    version: int = 0

    def job(self) -> Json:
        """Return the only job."""
        (job,) = [item for kind in JOB_RESOURCES for item in self.objects[kind].values()]
        return job

    def left(self) -> list[str]:
        """Return the names of existing jobs and of running pods."""
        return [
            *(name for kind in JOB_RESOURCES for name in self.objects[kind]),
            *(name for name, pod in self.running.items() if pod.code is None),
        ]

    def answer(
        self, verb: str, resource: str, name: str, query: dict[str, list[str]], body: Json | None
    ) -> tuple[int, Json]:
        """Return the HTTP status and the body of a call."""
        self.calls.append((verb, resource))
        if (verb, resource) in self.denied:
            group = {"trainjobs": "trainer.kubeflow.org", "rayjobs": "ray.io", "workloads": "kueue.x-k8s.io"}.get(
                resource, ""
            )
            message = f'{resource}.{group} is forbidden: User "{USER}" cannot {verb} resource "{resource}" in API group "{group}"'
            return _failure(403, f'{message} in the namespace "team-a"')
        if resource in self.unknown_resources:
            return _failure(404, "the server could not find the requested resource")
        collection = self.objects[resource]
        if verb == "list":
            listed = self._list_pods() if resource == "pods" else list(collection.values())
            items = [item for item in listed if _matches_selectors(item, query)]
            return 200, {
                "kind": "List",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items,
            }
        if verb == "create":
            assert body is not None
            if self.refusal:
                return _failure(*self.refusal)
            return self._create(resource, body, strict=query.get("fieldValidation") == ["Strict"])
        if name not in collection:
            return _failure(404, f'{resource} "{name}" not found')
        return (200, collection[name]) if verb == "get" else self._delete(collection[name], body or {})

    def _create(self, resource: str, body: Json, *, strict: bool) -> tuple[int, Json]:
        name = body["metadata"]["name"]
        missing = [*self.missing_fields & body["spec"].keys()]
        problems = [f'unknown field "spec.{key}"' for key in missing] or crds.problems(body)
        if strict and problems:
            return _failure(400, f"{body['kind']} in version cannot be handled: strict decoding error: {problems[0]}")
        if name in self.objects[resource]:
            return _failure(409, f'{resource} "{name}" already exists')
        created_job = json.loads(json.dumps(body))
        self.version += 1
        created_job["metadata"] |= {
            "uid": f"uid-{self.version}",
            "namespace": "team-a",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        if "kueue.x-k8s.io/queue-name" in created_job["metadata"]["labels"]:
            created_job["spec"]["suspend"] = True  # Kueue's webhook
            if self.makes_workloads:
                self._create_workload(created_job)
        self.objects[resource][name] = self._bump_version(created_job)
        self.created.append(name)
        return 201, created_job

    def _create_workload(self, job: Json) -> None:
        metadata = {
            "name": f"job-{job['metadata']['name']}",
            "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]},
        }
        self.objects["workloads"][job["metadata"]["name"]] = {"metadata": metadata, "status": {"conditions": []}}

    def _list_pods(self) -> list[Json]:
        jobs = {name: job for kind in JOB_RESOURCES for name, job in self.objects[kind].items()}
        states = {name: self.pod_status[name] for name in jobs if name in self.pod_status}
        for name, pod in self.running.items():
            if pod.code is None or name in self.stuck_jobs:
                states.setdefault(name, {"phase": "Running"})
                jobs[name] = pod.job
            elif name in jobs and jobs[name]["kind"] == "TrainJob" and name not in self.removed_pods:
                states.setdefault(name, {"phase": "Failed" if pod.code else "Succeeded"})  # until the job is deleted
        deleted = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        metadata = {
            name: {
                "name": f"{name}-node-0-0",
                "labels": _pod_labels(jobs[name]),
                **(deleted if name in self.terminating else {}),
            }
            for name in states
        }
        return [{"metadata": metadata[name], "status": status} for name, status in states.items()]

    def _delete(self, obj: Json, options: Json) -> tuple[int, Json]:
        assert options.get("propagationPolicy") == "Background", (
            "Trainer restarts a job that is deleted in the foreground"
        )
        name = obj["metadata"]["name"]
        del self.objects[f"{obj['kind'].lower()}s"][name]
        self.objects["workloads"].pop(name, None)
        if name in self.running:
            self.running[name].stop_requested.set()
        return 200, obj

    def _bump_version(self, obj: Json) -> Json:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        return obj

    # The controllers

    def reconcile(self) -> None:
        """Run one pass of all controllers over all jobs."""
        for kind in JOB_RESOURCES:
            for name, job in list(self.objects[kind].items()):
                self._reconcile_workload(name, job)
                self._reconcile_job(kind, name, job)

    def _reconcile_workload(self, name: str, job: Json) -> None:
        workload = self.objects["workloads"].get(name)
        if workload is None or _is_finished(job):
            return
        pod = self.running.get(name)
        if self.admits and job["spec"].get("suspend") and (pod is None or pod.code is not None):
            workload["status"] = {
                "conditions": [_condition("QuotaReserved", "QuotaReserved"), _condition("Admitted", "Admitted")]
            }
            job["spec"]["suspend"] = False
            self.running.pop(name, None)
        elif not self.admits and not job["spec"].get("suspend"):
            preempted = _condition(
                "Preempted", "InClusterQueue", "Preempted to accommodate a workload of higher priority"
            )
            workload["status"] = {"conditions": [_condition("Evicted", "Preempted", "Preempted"), preempted]}
            job["spec"]["suspend"] = True
        elif not self.admits and not workload["status"]["conditions"]:
            message = "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu"
            workload["status"] = {
                "conditions": [{**_condition("QuotaReserved", "Pending", message), "status": "False"}]
            }

    def _reconcile_job(self, kind: str, name: str, job: Json) -> None:
        pod = self.running.get(name)
        if job["spec"].get("suspend"):
            if pod:
                pod.stop_requested.set()
            set_job_state(job, "suspended")
        elif pod is None and not _is_finished(job):
            self._start_pod(name, job)
        elif pod and pod.code is not None and not _is_finished(job):
            set_job_state(job, "succeeded" if pod.code == 0 else "failed", f"exit code {pod.code}")
            self._bump_version(job)

    def _start_pod(self, name: str, job: Json) -> None:
        if not self.can_start:
            set_job_state(job, "starting")
            return
        work = self.works[min(len(self.started), len(self.works) - 1)]
        self.started.append(name)
        set_job_state(job, "running")
        self.running[name] = Pod(Path(job["metadata"]["annotations"]["tuneline/folder"]), work, job).start()

    def pod(self, status: Json) -> None:
        """Set the status of the pod of the latest job."""
        self.pod_status[self.created[-1]] = status


def _pod_labels(job: Json) -> Json:
    """Return the labels of the pods that the operator creates from a job."""
    if job["kind"] == "RayJob":
        template = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    else:
        jobs = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        template = jobs[0]["template"]["spec"]["template"]
    labels: Json = template["metadata"]["labels"]
    return labels


def _matches_selectors(obj: Json, query: dict[str, list[str]]) -> bool:
    labels = obj["metadata"].get("labels", {})
    wanted_labels = dict(item.split("=") for item in query.get("labelSelector", []))
    wanted_fields = dict(item.split("=") for item in query.get("fieldSelector", []))
    fields_match = all(obj["involvedObject"]["name"] == value for value in wanted_fields.values())
    return fields_match and all(labels.get(key) == value for key, value in wanted_labels.items())


def _condition(kind: str, reason: str, message: str = "") -> Json:
    return {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def _is_finished(job: Json) -> bool:
    status = job.get("status", {})
    end_conditions = {item["type"] for item in status.get("conditions", []) if item["status"] == "True"} & {
        "Complete",
        "Failed",
    }
    return bool(end_conditions) or status.get("jobDeploymentStatus") in ("Complete", "Failed")


def set_job_state(job: Json, state: str, message: str = "") -> None:
    job["status"] = (_trainjob_status if job["kind"] == "TrainJob" else _rayjob_status)(
        job["metadata"]["name"], state, message
    )


def _trainjob_status(name: str, state: str, message: str) -> Json:
    conditions = {
        "suspended": [_condition("Suspended", "Suspended", "TrainJob is suspended")],
        "succeeded": [_condition("Complete", "AllJobsCompleted", "jobset completed successfully")],
        "failed": [_condition("Failed", "FailedJobs", f"jobset failed due to one or more job failures: {message}")],
    }
    counts = {
        "name": "node",
        "active": 1,
        "ready": int(state == "running"),
        "succeeded": 0,
        "failed": 0,
        "suspended": 0,
    }
    return {"conditions": conditions.get(state, []), "jobsStatus": [counts]}


def _rayjob_status(name: str, state: str, message: str) -> Json:
    deployment_status = {
        "starting": "Initializing",
        "suspended": "Suspended",
        "running": "Running",
        "succeeded": "Complete",
        "failed": "Failed",
    }
    job_status = {"running": "RUNNING", "succeeded": "SUCCEEDED", "failed": "FAILED"}
    reason = (
        {"reason": "AppFailed", "message": f"Job entrypoint command failed with {message}"} if state == "failed" else {}
    )
    cluster = {} if state == "suspended" else {"rayClusterName": f"{name}-raycluster"}
    return {
        "jobDeploymentStatus": deployment_status[state],
        "jobStatus": job_status.get(state, ""),
        **reason,
        **cluster,
    }


def _failure(code: int, message: str) -> tuple[int, Json]:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }
    return code, {**status, "reason": REASONS.get(code, "InternalError")}


@contextmanager
def serving(api: JobApi) -> Iterator[JobApi]:
    """Run the server and the controllers in threads; sets `api.url`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            verb, resource, name = _parse_call(self.command, self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            fault = _take_fault(api, verb, resource)
            if fault and fault.effect == "silence":
                time.sleep(fault.seconds)
            if fault and fault.effect in ("drop", "silence"):
                return self._break_off()
            if fault and isinstance(fault.effect, int):
                return self._send(*_failure(fault.effect, MESSAGES.get(fault.effect, "no")), fault)
            if self.headers.get("Authorization", "").lower() != f"bearer {api.token}".lower():
                return self._send(*_failure(401, "Unauthorized"))
            with api.lock:
                status, answer = api.answer(verb, resource, name, parse_qs(urlsplit(self.path).query), body)
                data = json.loads(json.dumps(answer))
            return self._break_off() if fault else self._send(status, data)

        def _break_off(self) -> None:
            self.close_connection = True

        def _send(self, status: int, answer: Json, fault: Fault | None = None) -> None:
            data = json.dumps(answer).encode()
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
    stopped = threading.Event()

    def run_controllers() -> None:
        while not stopped.wait(CONTROL_INTERVAL_SECONDS):
            with api.lock:
                api.reconcile()

    threads = [
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True),
        threading.Thread(target=run_controllers, daemon=True),
    ]
    for thread in threads:
        thread.start()
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield api
    finally:
        stopped.set()
        for pod in api.running.values():
            pod.stop_requested.set()
        server.shutdown()
        server.server_close()


def _parse_call(method: str, path: str) -> tuple[str, str, str]:
    """Return verb, resource and name of a call."""
    parts = urlsplit(path).path.strip("/").split("/")
    inside = parts[parts.index("namespaces") + 2 :]
    name = inside[1] if len(inside) > 1 else ""
    verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if name else "list")
    return verb, inside[0], name


def _take_fault(api: JobApi, verb: str, resource: str) -> Fault | None:
    with api.lock:
        for fault in api.faults:
            if fault.verb in (verb, "*") and fault.resource in (resource, "*") and fault.times:
                if fault.after:
                    fault.after -= 1
                    return None
                fault.times -= 1
                return fault
    return None
