"""A fake cluster that runs jobs: the Kubernetes API server, Kubeflow Trainer, KubeRay, Kueue and the pods.

A real cluster needs etcd, container images and several machines. The fake API server speaks HTTP to the official client:

- objects have a uid and a resourceVersion; a duplicate name is a conflict
- fieldValidation=Strict refuses unknown fields, against the CRD schemas in tests/common/crds
- deletion leaves pods that still save; an object with finalizers, such as KubeRay's, stays until their controllers remove them
- faults: 429 with Retry-After, 5xx, connections that break before or after a call takes effect, timeouts, denied verbs
- no watch requests: launchers poll with GET

One thread acts as the controllers and updates the statuses with the messages of the real ones. A pod is a thread that writes a training's
files into the job's folder; a stop request makes it save and end with exit code 75. The contract in tests/common/test_api_contract.py
compares the answers and the statuses with those of a real API server and its controllers.
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
from tests.kubernetes_api import ADDRESS, PAGE, USER, failure, forbidden, not_found, send_answer

Json = dict[str, Any]
CONTROL_INTERVAL_SECONDS = 0.02
JOB_RESOURCES = ("trainjobs", "rayjobs")
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
NAMESPACE = "team-a"  # the only one
RAY_FINALIZER, FOREGROUND_FINALIZER = "ray.io/rayjob-finalizer", "foregroundDeletion"
RAY_DEADLINE_MESSAGE = "The RayJob has passed the activeDeadlineSeconds. StartTime: 2026-01-01 00:00:00 +0000 UTC. ActiveDeadlineSeconds: 2"
PENDING_MESSAGE = (
    "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor any, 2 more needed"
)
MESSAGES = {
    403: 'User "system:serviceaccount:team-a:tuneline" cannot do this in the namespace "team-a"',
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
    token: str = "the-cluster-token"
    refusal: tuple[int, str] | None = None  # status and message of every creation
    admits: bool = True  # whether Kueue has quota
    priority_classes: set[str] = field(default_factory=lambda: {"batch", "low"})  # Kueue ignores jobs of others
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

    def answer(self, verb: str, path: str, query: dict[str, list[str]], body: Json | None) -> tuple[int, Json | str]:
        """Return the HTTP status and the body of a call."""
        match = ADDRESS.match(path)
        assert match, path
        resource, group, name = match["kind"], match["group"] or "", match["name"] or ""
        self.calls.append((verb, resource))
        if (verb, resource) in self.denied:
            return failure(403, forbidden(USER, verb, resource, group, match["namespace"], name))
        if resource not in self.objects:
            return 404, PAGE
        collection = self.objects[resource] if match["namespace"] == NAMESPACE else {}
        if verb == "list":
            items = [*collection.values(), *(self._list_pods() if resource == "pods" else [])]
            return 200, {
                "kind": "List",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": [item for item in items if _matches_selectors(item, query)],
            }
        if verb == "create":
            assert body is not None
            return self._create(resource, group, match["namespace"], body, query)
        if name not in collection:
            return failure(404, not_found(resource, group, name))
        if verb == "get":
            return 200, collection[name]
        return self.delete(collection[name], (body or {})["propagationPolicy"])

    def _create(
        self, resource: str, group: str, namespace: str, body: Json, query: dict[str, list[str]]
    ) -> tuple[int, Json]:
        name, kind, collection = body["metadata"]["name"], body["kind"], self.objects[resource]
        if query.get("fieldValidation") == ["Strict"] and (problems := crds.problems(body)):
            version = body["apiVersion"].partition("/")[2]
            handled = f'{kind} in version "{version}" cannot be handled as a {kind}'
            return failure(400, f"{handled}: strict decoding error: {', '.join(problems)}")
        if namespace != NAMESPACE:
            return failure(404, not_found("namespaces", "", namespace))
        if self.refusal:
            return failure(*self.refusal)
        if name in collection:
            deleting = "object is being deleted: " if collection[name]["metadata"].get("deletionTimestamp") else ""
            return failure(409, f'{deleting}{resource}.{group} "{name}" already exists')
        created_job = json.loads(json.dumps(body))
        self.version += 1
        created_job["metadata"] |= {
            "uid": f"uid-{self.version}",
            "namespace": NAMESPACE,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        if QUEUE_LABEL in created_job["metadata"]["labels"]:
            created_job["spec"]["suspend"] = True  # Kueue's webhook
        collection[name] = self._bump_version(created_job)
        self.created.append(name)
        return 201, created_job

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

    def delete(self, job: Json, propagation: str) -> tuple[int, Json]:
        """Delete a job. In the foreground, it stays until its pods have ended."""
        metadata = job["metadata"]
        self.objects["workloads"].pop(metadata["name"], None)
        if metadata["name"] in self.running:
            self.running[metadata["name"]].stop_requested.set()
        if propagation == "Foreground":
            metadata.setdefault("finalizers", []).append(FOREGROUND_FINALIZER)
        if metadata.get("finalizers"):
            metadata.setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
            return 200, job
        del self.objects[f"{job['kind'].lower()}s"][metadata["name"]]
        return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

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
        metadata, workloads = job["metadata"], self.objects["workloads"]
        is_known = metadata["labels"].get(PRIORITY_LABEL) in {None, *self.priority_classes}
        if (
            QUEUE_LABEL not in metadata["labels"]
            or not is_known
            or "deletionTimestamp" in metadata
            or _is_finished(job)
        ):
            return
        labels = {"kueue.x-k8s.io/job-uid": metadata["uid"]}
        new = {"metadata": {"name": f"job-{name}", "labels": labels}, "status": {"conditions": []}}
        workload = workloads.setdefault(name, new)
        pod = self.running.get(name)
        if self.admits and job["spec"].get("suspend") and (pod is None or pod.code is not None):
            workload["status"] = {
                "conditions": [_condition("QuotaReserved", "QuotaReserved"), _condition("Admitted", "Admitted")]
            }
            job["spec"]["suspend"] = False
            self.running.pop(name, None)
        elif not self.admits and not job["spec"].get("suspend"):
            cause = "Preempted to accommodate a workload (UID: 1, JobUID: 2) due to prioritization in the ClusterQueue"
            workload["status"] = {
                "conditions": [
                    _condition("QuotaReserved", "Pending", PENDING_MESSAGE, "False"),
                    _condition("Evicted", "Preempted", cause),
                    _condition("Preempted", "InClusterQueue", cause),
                ]
            }
            job["spec"]["suspend"] = True
        elif not self.admits and not workload["status"]["conditions"]:
            workload["status"] = {"conditions": [_condition("QuotaReserved", "Pending", PENDING_MESSAGE, "False")]}

    def _reconcile_job(self, kind: str, name: str, job: Json) -> None:
        pod, finalizers = self.running.get(name), job["metadata"].setdefault("finalizers", [])
        if job["metadata"].get("deletionTimestamp"):
            done = {RAY_FINALIZER, *([FOREGROUND_FINALIZER] if pod is None or pod.code is not None else [])}
            job["metadata"]["finalizers"] = [item for item in finalizers if item not in done]
            if done.issuperset(finalizers):
                del self.objects[kind][name]
            return
        if kind == "rayjobs" and RAY_FINALIZER not in finalizers:
            finalizers.append(RAY_FINALIZER)
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


def _condition(kind: str, reason: str, message: str = "", status: str = "True") -> Json:
    return {
        "type": kind,
        "status": status,
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
    """Set the status of a job: suspended, starting, running, succeeded, failed, or expired (past its deadline)."""
    job["status"] = (_trainjob_status if job["kind"] == "TrainJob" else _rayjob_status)(job, state, message)


def _trainjob_status(job: Json, state: str, message: str) -> Json:
    name, old = job["metadata"]["name"], job.get("status", {}).get("conditions", [])
    restarts = f"jobset failed due to reaching max number of restarts (first failed job: {name}-node-0)"
    conditions = {
        "suspended": [_condition("Suspended", "Suspended", "TrainJob is suspended")],
        "succeeded": [_condition("Complete", "AllJobsCompleted", "jobset completed successfully")],
        "failed": [_condition("Failed", "ReachedMaxRestarts", restarts)],
        "expired": [_condition("Failed", "DeadlineExceeded", "TrainJob exceeded its active deadline")],
    }
    resumed = [_condition("Suspended", "Resumed", "TrainJob is resumed", "False")] if old else []
    counts = {
        "name": "node",
        "active": int(state in ("starting", "running", "expired")),
        "ready": int(state == "running"),
        "succeeded": int(state == "succeeded"),
        "failed": int(state == "failed"),
        "suspended": int(state == "suspended"),
    }
    own = conditions.get(state, [])
    return {"conditions": own if state == "suspended" else [*resumed, *own], "jobsStatus": [counts]}


def _rayjob_status(job: Json, state: str, message: str) -> Json:
    deployment_status = {
        "starting": "Initializing",
        "suspended": "Suspended",
        "running": "Running",
        "succeeded": "Complete",
        "failed": "Failed",
        "expired": "Failed",
    }
    job_status = {"running": "RUNNING", "succeeded": "SUCCEEDED", "failed": "FAILED"}
    reasons = {
        "failed": {"reason": "AppFailed", "message": f"Job entrypoint command failed with {message}"},
        "expired": {"reason": "DeadlineExceeded", "message": RAY_DEADLINE_MESSAGE},
    }
    cluster = {} if state == "suspended" else {"rayClusterName": f"{job['metadata']['name']}-raycluster"}
    return {
        "jobDeploymentStatus": deployment_status[state],
        "jobStatus": job_status.get(state, ""),
        **reasons.get(state, {}),
        **cluster,
    }


@contextmanager
def serving(api: JobApi) -> Iterator[JobApi]:
    """Run the server and the controllers in threads; sets `api.url`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path, match = urlsplit(self.path).path, ADDRESS.match(urlsplit(self.path).path)
            assert match, self.path
            verb = {"POST": "create", "DELETE": "delete"}.get(self.command, "get" if match["name"] else "list")
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            fault = _take_fault(api, verb, match["kind"])
            if fault and fault.effect == "silence":
                time.sleep(fault.seconds)
            if fault and fault.effect in ("drop", "silence"):
                return self._break_off()
            if fault and isinstance(fault.effect, int):
                pause = {"Retry-After": f"{fault.seconds:g}"} if fault.seconds else {}
                answer = PAGE if fault.effect == 404 else failure(fault.effect, MESSAGES[fault.effect])[1]
                return send_answer(self, fault.effect, answer, **pause)
            if self.headers.get("Authorization", "").lower() != f"bearer {api.token}".lower():
                return send_answer(self, *failure(401, "Unauthorized"))
            with api.lock:
                status, answer = api.answer(verb, path, parse_qs(urlsplit(self.path).query), body)
                answer = json.loads(json.dumps(answer))
            return self._break_off() if fault else send_answer(self, status, answer)

        def _break_off(self) -> None:
            self.close_connection = True

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
