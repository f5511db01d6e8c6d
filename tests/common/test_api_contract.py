"""The answers of Kubernetes that the doctor and the launchers rely on: one contract for the stand-ins and for a real API server.

Each test calls the server through tuneline's clients and checks the result and the server's answer. Here the server is the pair of
stand-ins; tests/engines/test_api_contract.py runs the same tests on a real API server with its controllers.
"""

from __future__ import annotations

import copy
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiClient, ApiException, CustomObjectsApi

from components.common.launch import Command
from components.common.launch.kubernetes import job_conditions, job_manifests, kubernetes_client
from components.common.launch.kubernetes.kubernetes_client import (
    RAYJOB,
    TRAINJOB,
    AccessError,
    ConflictError,
    KubernetesClient,
    ResourceKind,
)
from components.common.launch.kubernetes.kubernetes_launcher import WORKLOAD_KINDS
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime.errors import ConfigurationError, EngineMissingError, TunelineError
from pipelines.config.platform_config import Platform
from pipelines.kubeflow.preflight import permission_checks
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.kubeflow.preflight.cluster_api import ClusterApi, ForbiddenError
from tests import job_api, kubernetes_api
from tests.job_api import JobApi, Pod
from tests.kubernetes_api import Json, KubernetesApi, build_object, kubeconfig

TEAM, QUEUE = "team-a", "tiny"
TEAM_PATH, AUTHORIZATION_PATH = f"/api/v1/namespaces/{TEAM}", "/apis/authorization.k8s.io/v1"
KINDS = {"trainjob": TRAINJOB, "rayjob": RAYJOB}
UNINSTALLED = ResourceKind("nothing.example", "v1", "things", "Thing", "Things")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
POD: Json = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "tuneline-doctor-x-", "namespace": TEAM},
    "spec": {
        "serviceAccountName": "tuneline",
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [],
        "containers": [
            {
                "name": "main",
                "image": "tuneline/cpu:1",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    },
}


@dataclass(frozen=True)
class Answer:
    """The server's answer to one call."""

    status: int
    body: Json  # {}: a page

    @property
    def error(self) -> tuple[int, str, str]:
        """HTTP status, reason and message."""
        return self.status, self.body.get("reason", ""), self.body.get("message", "")


def record_answers(client: ApiClient, answers: list[Answer]) -> None:
    """Append all answers to a client to a list."""
    request = client.rest_client.request

    def record(*arguments: Any, **options: Any) -> Any:
        try:
            response = request(*arguments, **options)
        except ApiException as error:
            answers.append(Answer(error.status, read_object(error.body)))
            raise
        answers.append(Answer(response.status, read_object(response.data)))
        return response

    client.rest_client.request = record


def read_object(text: str | bytes) -> Json:
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


@dataclass
class ApiServer(ABC):
    """A server with the restricted namespace team-a, the account tuneline in it, and Kueue, Trainer and KubeRay."""

    user: str = ""  # of the clients
    answers: list[Answer] = field(default_factory=list)

    def connect(self, doctor: Path, launcher: Path) -> None:
        """Connect the clients with kubeconfigs."""
        clients = [kubernetes_client.connect_kubeconfig(str(file))[0] for file in (doctor, launcher)]
        for client in clients:
            record_answers(client, self.answers)
        self.doctor, self.launcher = ClusterApi(clients[0], TEAM), KubernetesClient(clients[1], TEAM)

    @property
    def context(self) -> CheckContext:
        """The input of the doctor's checks."""
        platform = Platform.model_validate({"run": {"service_account": "tuneline"}})
        return CheckContext(self.doctor, platform, TEAM, user=self.user)

    @property
    def error(self) -> tuple[int, str, str]:
        """Status, reason and message of the last answer."""
        return self.answers[-1].error

    @abstractmethod
    def put(self, path: str, obj: Json) -> None:
        """Create an object that the doctor reads."""

    @abstractmethod
    def put_event(self, event: Json) -> None:
        """Create an event that the launchers read."""

    @abstractmethod
    def log_in(self, token: str) -> None:
        """Use a token that the server does not know."""

    @abstractmethod
    def log_in_without_rights(self) -> None:
        """Use an account without rights."""

    @abstractmethod
    def refuse(self, cause: str) -> AbstractContextManager[KubernetesClient]:
        """Make the server refuse jobs for a cause of REFUSALS, and return a client for the namespace."""

    @abstractmethod
    def end_pods(self, job: str, code: int) -> None:
        """End the pods of a running job with an exit code."""

    @abstractmethod
    def exceed_deadline(self, kind: str, job: str) -> None:
        """Let the time of a started job with a deadline pass."""

    @abstractmethod
    def take_quota(self) -> None:
        """Use all quota of the queue for jobs of a higher priority."""

    @abstractmethod
    def free_quota(self) -> None:
        """Undo `take_quota`."""

    @abstractmethod
    def remove_finalizers(self, job: str) -> None:
        """Remove the finalizers of a TrainJob, if it still exists."""


class StandIns(ApiServer):
    """The stand-ins of the doctor's and of the launchers' tests."""

    def __init__(self, kubernetes: KubernetesApi, jobs: JobApi, folder: Path) -> None:
        super().__init__(kubernetes_api.USER)
        self.kubernetes, self.jobs, self.folder = kubernetes, jobs, folder
        self.codes: dict[str, int] = {}
        jobs.works, jobs.admits = [self._run_pods], True
        self.log_in(jobs.token)

    def _run_pods(self, pod: Pod) -> int:
        name = pod.job["metadata"]["name"]
        while name not in self.codes and not pod.stop_requested.wait(0.01):
            pass
        return self.codes.get(name, 137)

    def log_in(self, token: str) -> None:
        files = [
            kubeconfig(self.folder / name, url, token=token)
            for name, url in (("doctor", self.kubernetes.url), ("launcher", self.jobs.url))
        ]
        self.connect(*files)

    def put(self, path: str, obj: Json) -> None:
        self.kubernetes.put(path, obj)

    def put_event(self, event: Json) -> None:
        self.jobs.objects["events"][event["metadata"]["name"]] = event

    def log_in_without_rights(self) -> None:
        read = ("secrets", "nodes", "storageclasses", "namespaces", "clusterqueues", "localqueues", "things")
        self.kubernetes.deny_caller("get list", *read)
        self.kubernetes.deny_caller("create", "pods", "runs", "localsubjectaccessreviews")
        verbs = {"create", "get", "list", "delete"}
        self.jobs.denied = {
            (verb, kind) for verb in verbs for kind in ("trainjobs", "rayjobs", "pods", "events", "workloads")
        }

    @contextmanager
    def refuse(self, cause: str) -> Iterator[KubernetesClient]:
        if cause == "a missing namespace":
            yield KubernetesClient(self.launcher.client, REFUSALS[cause].namespace)
        else:
            self.jobs.refusal = (403, REFUSALS[cause].message)
            yield self.launcher

    def end_pods(self, job: str, code: int) -> None:
        self.codes[job] = code

    def exceed_deadline(self, kind: str, job: str) -> None:
        with self.jobs.lock:
            job_api.set_job_state(self.jobs.objects[f"{kind}s"][job], "expired")

    def take_quota(self) -> None:
        self.jobs.admits = False

    def free_quota(self) -> None:
        self.jobs.admits = True

    def remove_finalizers(self, job: str) -> None:
        if job in self.jobs.objects["trainjobs"]:
            self.jobs.objects["trainjobs"][job]["metadata"]["finalizers"] = []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    account = build_object("ServiceAccount", "tuneline", namespace=TEAM)
    namespace = build_object("Namespace", TEAM, metadata={"labels": RESTRICTED})
    objects = {TEAM_PATH: namespace, f"{TEAM_PATH}/serviceaccounts/tuneline": account}
    kubernetes = KubernetesApi(objects, denied={("pods", "patch", "workflowtaskresults")})
    with kubernetes_api.serving(kubernetes), job_api.serving(JobApi(token=kubernetes.token)) as jobs:
        yield StandIns(kubernetes, jobs, tmp_path)


def build_job(kind: str, name: str, **pods: Any) -> Json:
    """Return the manifest that a launcher creates, with two nodes."""
    runtime = {"runtime": "tuneline"} if kind == "trainjob" else {}
    values = {"image": "tuneline/training:1", "claim": "tuneline", "mount": "/data", "cpu": "1", **runtime, **pods}
    settings = LauncherSettings.model_validate({"kind": kind, "nodes": 2, kind: values})
    build = job_manifests.build_trainjob if kind == "trainjob" else job_manifests.build_rayjob
    return build(settings, Command("components.fine_tuning.worker", ["job.json"], 8, 2), Path("/data/launch"), name)


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Return the first true result."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)
    return result


@dataclass(frozen=True)
class Refusal:
    """A refused creation of the TrainJob `refused`: namespace, the server's message, and the launcher's error with its hint."""

    namespace: str
    message: str
    error: type[Exception]
    text: str
    hint: str = ""
    other_message: str = ""  # of Kueue's webhook, which may answer before Trainer's


TRAINJOBS = "trainjobs.trainer.kubeflow.org"
COUNT = f"count/{TRAINJOBS}"
REFUSALS = {
    "a runtime that does not exist": Refusal(
        TEAM,
        'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.RuntimeRef: Invalid value: '
        '{"name":"nope","apiGroup":"trainer.kubeflow.org","kind":"ClusterTrainingRuntime"}: '
        'ClusterTrainingRuntime.trainer.kubeflow.org "nope" not found: specified clusterTrainingRuntime must be created '
        "before the TrainJob is created",
        ConfigurationError,
        "the cluster rejects the job: .* denied the request: .*nope.* not found",
        "trainjob.runtime",
        "admission webhook \"vtrainjob.kb.io\" denied the request: runtime 'nope' not found",
    ),
    "a missing namespace": Refusal(
        "nowhere",
        'namespaces "nowhere" not found',
        ConfigurationError,
        'no such namespace: namespaces "nowhere" not found',
        "launcher.trainjob.namespace",
    ),
    "a quota": Refusal(
        "team-q",
        f'{TRAINJOBS} "refused" is forbidden: exceeded quota: jobs, requested: {COUNT}=1, used: {COUNT}=0, '
        f"limited: {COUNT}=0",
        AccessError,
        "the quota of the namespace does not allow another job: .* exceeded quota: jobs",
        "ResourceQuota",
    ),
    "a quota without a computed usage": Refusal(
        "team-u",
        f'{TRAINJOBS} "refused" is forbidden: status unknown for quota: jobs, resources: {COUNT}',
        kubernetes_client.RetryableError,
        "the API server has not computed the usage of the quota yet",
    ),
    "a namespace that is being deleted": Refusal(
        "team-t",
        f'{TRAINJOBS} "refused" is forbidden: unable to create new content in namespace team-t because it is being '
        "terminated",
        AccessError,
        "the namespace is being deleted: .*team-t",
        "another namespace",
    ),
}


def change_account(pod: Json) -> None:
    pod["spec"]["serviceAccountName"] = "nobody"


def allow_escalation(pod: Json) -> None:
    pod["spec"]["containers"][0]["securityContext"] = {}


MISSING = {  # API path of a missing object, and the server's message
    "/api/v1/namespaces/nowhere": 'namespaces "nowhere" not found',
    f"{TEAM_PATH}/secrets/x": 'secrets "x" not found',
    "/api/v1/namespaces/nowhere/secrets/x": 'secrets "x" not found',
    "/apis/storage.k8s.io/v1/storageclasses/x": 'storageclasses.storage.k8s.io "x" not found',
    f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{TEAM}/localqueues/x": 'localqueues.kueue.x-k8s.io "x" not found',
}
IN_TEAM, IN_CLUSTER = f'in the namespace "{TEAM}"', "at the cluster scope"
FORBIDDEN = {  # path, and the server's message with the user's name
    TEAM_PATH: f'namespaces "{TEAM}" is forbidden: User "{{}}" cannot get resource "namespaces" in API group "" {IN_TEAM}',
    f"{TEAM_PATH}/secrets/x": f'secrets "x" is forbidden: User "{{}}" cannot get resource "secrets" in API group "" {IN_TEAM}',
    f"{TEAM_PATH}/secrets": f'secrets is forbidden: User "{{}}" cannot list resource "secrets" in API group "" {IN_TEAM}',
    "/api/v1/nodes": f'nodes is forbidden: User "{{}}" cannot list resource "nodes" in API group "" {IN_CLUSTER}',
    "/apis/kueue.x-k8s.io/v1beta2/clusterqueues/x": 'clusterqueues.kueue.x-k8s.io "x" is forbidden: User "{}" cannot get '
    f'resource "clusterqueues" in API group "kueue.x-k8s.io" {IN_CLUSTER}',
    f"/apis/{UNINSTALLED.group}/v1/namespaces/{TEAM}/things": 'things.nothing.example is forbidden: User "{}" cannot list '
    f'resource "things" in API group "nothing.example" {IN_TEAM}',
}
UNINSTALLED_PATHS = [
    f"/apis/{UNINSTALLED.group}{rest}" for rest in ("", "/v1", f"/v1/namespaces/{TEAM}/things", "/v1/things/x")
]
REFUSED_PODS = {
    "missing service account": (
        [change_account, allow_escalation],  # the first error in the server's order is reported
        f'pods "tuneline-doctor-x-" is forbidden: error looking up service account {TEAM}/nobody: serviceaccount "nobody" not found',
    ),
    "pod security": (
        [allow_escalation],
        r'pods "tuneline-doctor-x-\w{5}" is forbidden: violates PodSecurity "restricted:latest": ',
    ),
}


DEADLINE_MESSAGES = {
    "trainjob": "TrainJob exceeded its active deadline",
    "rayjob": r"The RayJob has passed the activeDeadlineSeconds\. StartTime: .* UTC\. ActiveDeadlineSeconds: 2",
}


class ApiContract:
    """The tests; a module provides the fixture `server`."""

    # Access

    def test_unknown_token_is_rejected(self, server: ApiServer) -> None:
        server.log_in("unknown")
        with pytest.raises(AccessError, match="does not accept the credentials: Unauthorized"):
            server.doctor.get("/api/v1/nodes")
        with pytest.raises(AccessError, match="does not accept the credentials: Unauthorized"):
            server.launcher.get(TRAINJOB, "x")
        assert {answer.error for answer in server.answers} == {(401, "Unauthorized", "Unauthorized")}

    def test_user_version_and_api_groups_are_readable_without_rights(self, server: ApiServer) -> None:
        server.log_in_without_rights()
        assert permission_checks.get_user_name(server.context) == server.user
        assert re.match(r"v1\.\d+\.\d+", (server.doctor.get("/version") or {})["gitVersion"])
        kueue = server.doctor.get("/apis/kueue.x-k8s.io") or {}
        assert kueue["preferredVersion"]["groupVersion"] == "kueue.x-k8s.io/v1beta2"
        assert [version["version"] for version in kueue["versions"]] == ["v1beta2", "v1beta1"]
        trainer = server.doctor.get("/apis/trainer.kubeflow.org/v1alpha1") or {}
        names = {resource["name"] for resource in trainer["resources"]}
        assert names >= {"trainjobs", "trainingruntimes", "clustertrainingruntimes"}

    @pytest.mark.parametrize("path", FORBIDDEN)
    def test_forbidden_read_names_user_and_right(self, server: ApiServer, path: str) -> None:
        server.log_in_without_rights()
        with pytest.raises(ForbiddenError):
            server.doctor.get(path)
        assert server.error == (403, "Forbidden", FORBIDDEN[path].format(server.user))

    def test_reviews_tell_the_rights_of_the_caller(self, server: ApiServer) -> None:
        assert permission_checks.has_right(server.context, "create", "", "pods")
        assert server.answers[-1].status == 201
        server.log_in_without_rights()
        assert not permission_checks.has_right(server.context, "create", "", "pods")
        assert permission_checks.list_missing_rights(server.context, [("get", "", "secrets", "x")]) == ["get secrets x"]

    def test_reviews_tell_the_rights_of_the_pods(self, server: ApiServer) -> None:
        rights = permission_checks.POD_RIGHTS[:2]
        missing = permission_checks.list_missing_rights(server.context, rights, as_pods=True)
        assert missing == ["patch workflowtaskresults"]
        server.log_in_without_rights()
        with pytest.raises(ForbiddenError):
            permission_checks.list_missing_rights(server.context, rights, as_pods=True)
        kind, group = "localsubjectaccessreviews", "authorization.k8s.io"
        message = f'{kind}.{group} is forbidden: User "{server.user}" cannot create resource "{kind}" in API group "{group}" {IN_TEAM}'
        assert server.error == (403, "Forbidden", message)

    @pytest.mark.parametrize("verb", ["create", "get", "list", "delete"])
    def test_forbidden_call_of_a_launcher_names_the_right(self, server: ApiServer, verb: str) -> None:
        server.log_in_without_rights()
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: server.launcher.create(TRAINJOB, build_job("trainjob", "x")),
            "get": lambda: server.launcher.get(TRAINJOB, "x"),
            "list": lambda: server.launcher.list_by_label(TRAINJOB, "a=b"),
            "delete": lambda: server.launcher.delete(TRAINJOB, "x"),
        }
        with pytest.raises(AccessError, match=f"no permission to {verb} trainjobs") as raised:
            calls[verb]()
        assert "deploy/components/launcher-trainjob/launcher-rbac.yaml" in raised.value.hint
        target = f'{TRAINJOBS} "x"' if verb in ("get", "delete") else TRAINJOBS
        message = f'{target} is forbidden: User "{server.user}" cannot {verb} resource "trainjobs" in API group "trainer.kubeflow.org" {IN_TEAM}'
        assert server.error == (403, "Forbidden", message)

    def test_forbidden_lists_of_pods_and_events_name_the_right(self, server: ApiServer) -> None:
        server.log_in_without_rights()
        for plural, call in (("pods", server.launcher.list_pods), ("events", server.launcher.list_events)):
            with pytest.raises(AccessError, match=f"no permission to list {plural}"):
                call("a=b" if plural == "pods" else "x")
            message = (
                f'{plural} is forbidden: User "{server.user}" cannot list resource "{plural}" in API group "" {IN_TEAM}'
            )
            assert server.error == (403, "Forbidden", message)

    # Objects that the doctor reads

    @pytest.mark.parametrize("path", MISSING)
    def test_missing_object_has_no_answer(self, server: ApiServer, path: str) -> None:
        assert server.doctor.get(path) is None
        assert server.error == (404, "NotFound", MISSING[path])

    @pytest.mark.parametrize("path", UNINSTALLED_PATHS)
    def test_uninstalled_resource_is_answered_with_a_page(self, server: ApiServer, path: str) -> None:
        assert server.doctor.get(path) is None
        assert server.answers[-1] == Answer(404, {})

    def test_list_has_the_objects_of_one_namespace_without_their_kind(self, server: ApiServer) -> None:
        for name in ("first", "second"):
            server.put(f"{TEAM_PATH}/secrets", kubernetes_api.secret(TEAM, name, key="value"))
        items = server.doctor.list_items(f"{TEAM_PATH}/secrets")
        assert [item["metadata"]["name"] for item in items] == ["first", "second"]
        assert not [item for item in items if "kind" in item or "apiVersion" in item]
        assert server.answers[-1].body["metadata"]["resourceVersion"]
        assert server.doctor.list_items("/api/v1/namespaces/nowhere/secrets") == []
        assert server.answers[-1].status == 200

    # Dry run of pods

    def test_dry_run_names_the_pod_and_creates_nothing(self, server: ApiServer) -> None:
        answer = server.doctor.create(f"{TEAM_PATH}/pods?dryRun=All", POD)
        assert server.answers[-1].status == 201
        assert re.fullmatch(r"tuneline-doctor-x-\w{5}", answer["metadata"]["name"])
        assert answer["metadata"]["uid"]
        assert not answer["spec"].get("schedulingGates")
        assert server.doctor.get(f"{TEAM_PATH}/pods/{answer['metadata']['name']}") is None

    @pytest.mark.parametrize("cause", REFUSED_PODS)
    def test_dry_run_refuses_a_pod(self, server: ApiServer, cause: str) -> None:
        changes, message = REFUSED_PODS[cause]
        pod = copy.deepcopy(POD)
        for change in changes:
            change(pod)
        with pytest.raises(ForbiddenError):
            server.doctor.create(f"{TEAM_PATH}/pods?dryRun=All", pod)
        assert server.error[:2] == (403, "Forbidden")
        assert re.match(message, server.error[2]), server.error

    def test_dry_run_requires_the_right_to_create_pods(self, server: ApiServer) -> None:
        server.log_in_without_rights()
        with pytest.raises(ForbiddenError):
            server.doctor.create(f"{TEAM_PATH}/pods?dryRun=All", POD)
        message = f'pods is forbidden: User "{server.user}" cannot create resource "pods" in API group "" {IN_TEAM}'
        assert server.error == (403, "Forbidden", message)

    def test_kueue_gates_pods_of_a_queue(self, server: ApiServer) -> None:
        pod = copy.deepcopy(POD)
        pod["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": QUEUE}
        answer = server.doctor.create(f"{TEAM_PATH}/pods?dryRun=All", pod)
        assert {"name": "kueue.x-k8s.io/admission"} in answer["spec"]["schedulingGates"]

    # Jobs of the launchers

    @pytest.mark.parametrize("kind", KINDS)
    def test_job_is_created_once_and_found_by_its_label(self, server: ApiServer, kind: str) -> None:
        name, resource = f"created-{kind}", KINDS[kind]
        body = build_job(kind, name)
        body["metadata"]["labels"]["test"] = name
        created = server.launcher.create(resource, body)
        assert server.answers[-1].status == 201
        metadata = created["metadata"]
        assert all(metadata[key] for key in ("uid", "resourceVersion", "creationTimestamp"))
        assert metadata["namespace"] == TEAM
        found = server.launcher.get(resource, name) or {}
        assert found["metadata"]["uid"] == metadata["uid"]
        (listed,) = server.launcher.list_by_label(resource, f"test={name}")
        assert (listed["metadata"]["uid"], listed["kind"]) == (metadata["uid"], resource.kind)
        assert server.launcher.list_by_label(resource, "test=other") == []
        message = f'{resource.plural}.{resource.group} "{name}" already exists'
        with pytest.raises(ConflictError, match=message):
            server.launcher.create(resource, body)
        assert server.error == (409, "AlreadyExists", message)

    @pytest.mark.parametrize("kind", KINDS)
    def test_unknown_field_of_a_job_is_refused(self, server: ApiServer, kind: str) -> None:
        body, resource = build_job(kind, "unknown-field"), KINDS[kind]
        body["spec"]["unknownField"] = 1
        with pytest.raises(ConfigurationError, match="the cluster rejects the job"):
            server.launcher.create(resource, body)
        handled = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
        message = f'{handled}: strict decoding error: unknown field "spec.unknownField"'
        assert server.error == (400, "BadRequest", message)

    @pytest.mark.parametrize("kind", KINDS)
    def test_missing_job_is_neither_read_nor_deleted(self, server: ApiServer, kind: str) -> None:
        resource = KINDS[kind]
        for client in (server.launcher, KubernetesClient(server.launcher.client, "nowhere")):
            assert client.get(resource, "none") is None
            assert server.error == (404, "NotFound", f'{resource.plural}.{resource.group} "none" not found')
            assert not client.delete(resource, "none")
            assert server.error == (404, "NotFound", f'{resource.plural}.{resource.group} "none" not found')
            assert client.list_by_label(resource, "test=none") == []
            assert server.answers[-1].status == 200

    def test_job_of_an_uninstalled_resource_is_refused(self, server: ApiServer) -> None:
        body = {"apiVersion": "nothing.example/v1", "kind": "Thing", "metadata": {"name": "x"}, "spec": {}}
        with pytest.raises(EngineMissingError, match="the cluster has no resource kind Thing") as raised:
            server.launcher.create(UNINSTALLED, body)
        assert "Install Things" in raised.value.hint
        assert server.answers[-1] == Answer(404, {})
        assert server.launcher.get(UNINSTALLED, "x") is None
        assert server.launcher.list_by_label(UNINSTALLED, "a=b") == []
        assert server.answers[-1] == Answer(404, {})

    @pytest.mark.parametrize("cause", REFUSALS)
    def test_refused_job_is_reported_by_its_cause(self, server: ApiServer, cause: str) -> None:
        refusal = REFUSALS[cause]
        body = build_job("trainjob", "refused", runtime="nope" if "runtime" in cause else "tuneline")
        with server.refuse(cause) as client, pytest.raises(refusal.error, match=refusal.text) as raised:
            client.create(TRAINJOB, body)
        assert server.error[2] in (refusal.message, refusal.other_message)
        if isinstance(raised.value, TunelineError):
            assert refusal.hint in raised.value.hint

    def test_events_are_found_by_the_name_of_their_object(self, server: ApiServer) -> None:
        for name in ("one", "two"):
            event = {
                "metadata": {"name": f"event-{name}", "namespace": TEAM},
                "involvedObject": {"name": f"job-{name}", "namespace": TEAM, "kind": "TrainJob"},
                "type": "Warning",
                "reason": "FailedCreate",
                "message": "exceeded quota: gpus",
            }
            server.put_event({"apiVersion": "v1", "kind": "Event", **event})
        (found,) = server.launcher.list_events("job-two")
        assert (found["metadata"]["name"], found["reason"]) == ("event-two", "FailedCreate")

    # Deletion

    @pytest.mark.parametrize("kind", KINDS)
    def test_deleted_job_and_its_pods_disappear(self, server: ApiServer, kind: str) -> None:
        name, resource = f"deleted-{kind}", KINDS[kind]
        server.launcher.create(resource, build_job(kind, name))
        selector = f"{job_manifests.NAME_LABEL}={name}"
        wait_until(lambda: server.launcher.list_pods(selector))
        if kind == "rayjob":  # KubeRay adds its finalizer soon after the creation
            wait_until(lambda: (server.launcher.get(resource, name) or {})["metadata"].get("finalizers"))
        assert server.launcher.delete(resource, name)
        answer = server.answers[-1].body
        if kind == "trainjob":
            assert (answer["kind"], answer["status"]) == ("Status", "Success")
            assert server.launcher.get(resource, name) is None
        else:
            assert answer["metadata"]["deletionTimestamp"]
            wait_until(lambda: server.launcher.get(resource, name) is None)
        if kind == "trainjob":  # Kubernetes collects the parts of a RayJob only 30 s after the installation of KubeRay
            wait_until(lambda: not server.launcher.list_pods(selector))

    def test_name_of_a_job_with_finalizers_is_taken_until_they_end(self, server: ApiServer) -> None:
        name, selector = "finalized", f"{job_manifests.NAME_LABEL}=finalized"
        body = build_job("trainjob", name)
        server.launcher.create(TRAINJOB, {**body, "metadata": {**body["metadata"], "finalizers": ["example.com/keep"]}})
        wait_until(lambda: server.launcher.list_pods(selector))
        assert server.launcher.delete(TRAINJOB, name)
        assert (server.launcher.get(TRAINJOB, name) or {})["metadata"]["deletionTimestamp"]
        with pytest.raises(ConflictError):
            server.launcher.create(TRAINJOB, body)
        message = f'object is being deleted: {TRAINJOBS} "{name}" already exists'
        assert server.error == (409, "AlreadyExists", message)
        server.remove_finalizers(name)
        wait_until(lambda: server.launcher.get(TRAINJOB, name) is None)
        wait_until(lambda: not server.launcher.list_pods(selector))

    def test_job_deleted_in_the_foreground_stays_for_its_pods(self, server: ApiServer) -> None:
        name, location = "foreground", (TRAINJOB.group, TRAINJOB.version, TEAM, TRAINJOB.plural)
        server.launcher.create(TRAINJOB, build_job("trainjob", name))
        wait_until(lambda: server.launcher.list_pods(f"{job_manifests.NAME_LABEL}={name}"))
        delete = CustomObjectsApi(server.launcher.client).delete_namespaced_custom_object  # as a user does
        metadata = delete(*location, name, body={"propagationPolicy": "Foreground"})["metadata"]
        assert metadata["deletionTimestamp"]
        assert metadata["finalizers"] == ["foregroundDeletion"]
        server.remove_finalizers(name)

    # Statuses by the controllers

    @pytest.mark.parametrize("code", [0, 1])
    def test_ended_trainjob_has_the_conditions_of_trainer(self, server: ApiServer, code: int) -> None:
        name = f"ended-{code}"
        server.launcher.create(TRAINJOB, build_job("trainjob", name))
        wait_until(lambda: len(server.launcher.list_pods(f"{job_manifests.NAME_LABEL}={name}")))
        server.end_pods(name, code)
        status = wait_for_conditions(server, TRAINJOB, name)
        restarts = f"jobset failed due to reaching max number of restarts (first failed job: {name}-node-0)"
        failed = ("Failed", "True", "ReachedMaxRestarts", restarts)
        complete = ("Complete", "True", "AllJobsCompleted", "jobset completed successfully")
        assert list_conditions(status) == [failed if code else complete]
        counts = {"active": 0, "ready": 0, "succeeded": int(code == 0), "failed": int(code == 1), "suspended": 0}
        wait_until(lambda: read_job(server, name)["status"]["jobsStatus"] == [{"name": "node", **counts}])

    def test_job_past_its_deadline_has_ended(self, server: ApiServer) -> None:
        for kind, resource in KINDS.items():
            body = build_job(kind, f"expired-{kind}")
            server.launcher.create(resource, {**body, "spec": {**body["spec"], "activeDeadlineSeconds": 2}})
        for kind, resource in KINDS.items():
            name, read = f"expired-{kind}", getattr(job_conditions, f"read_{kind}_status")
            server.exceed_deadline(kind, name)
            wait_until(lambda: read(server.launcher.get(resource, name), None, []).state == "ended")  # noqa: B023
            reason = read(server.launcher.get(resource, name), None, []).reason
            assert re.fullmatch(f"DeadlineExceeded: {DEADLINE_MESSAGES[kind]}", reason), reason

    def test_suspended_jobs_are_waiting(self, server: ApiServer) -> None:
        for kind, resource in KINDS.items():
            body = build_job(kind, f"suspended-{kind}")
            server.launcher.create(resource, {**body, "spec": {**body["spec"], "suspend": True}})
        status = wait_for_conditions(server, TRAINJOB, "suspended-trainjob")
        assert list_conditions(status) == [("Suspended", "True", "Suspended", "TrainJob is suspended")]
        counts = {"name": "node", "active": 0, "ready": 0, "succeeded": 0, "failed": 0, "suspended": 1}
        wait_until(lambda: read_job(server, "suspended-trainjob")["status"].get("jobsStatus") == [counts])

        def read_rayjob() -> Json:  # first, KubeRay reports Suspending
            return wait_for_status(server, RAYJOB, "suspended-rayjob", "jobDeploymentStatus")

        wait_until(lambda: read_rayjob()["jobDeploymentStatus"] == "Suspended")
        assert not read_rayjob().get("jobStatus")

    def test_kueue_admits_and_preempts_a_job(self, server: ApiServer) -> None:
        server.free_quota()
        ignored = server.launcher.create(TRAINJOB, build_job("trainjob", "ignored", queue=QUEUE, priority="nope"))
        created = server.launcher.create(TRAINJOB, build_job("trainjob", "queued", queue=QUEUE, priority="low"))
        assert created["spec"]["suspend"] is True, "Kueue's webhook suspends the job"
        wait_until(lambda: not read_job(server, "queued")["spec"]["suspend"])
        workload = find_workload(server, created)
        admitted = {item["type"]: item["status"] for item in workload["status"]["conditions"]}
        assert (admitted["QuotaReserved"], admitted["Admitted"]) == ("True", "True")
        server.take_quota()
        wait_until(lambda: read_job(server, "queued")["spec"]["suspend"])
        reason = wait_until(lambda: read_reason(server, created, "evicted by Kueue"))
        text = r"evicted by Kueue \(Preempted\): Preempted to accommodate a workload \(UID: .*\) due to prioritization in the ClusterQueue"
        assert re.match(text, reason), reason
        waiting = server.launcher.create(
            TRAINJOB, build_job("trainjob", "waiting", queue=QUEUE, priority="low", cpu="2")
        )
        reason = wait_until(lambda: read_reason(server, waiting, "no quota is reserved yet: "))
        text = r"no quota is reserved yet: couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor any, \d more needed"
        assert re.fullmatch(text, reason), reason
        equal = server.launcher.create(TRAINJOB, build_job("trainjob", "equal", queue=QUEUE, priority="low"))
        assert wait_until(lambda: read_reason(server, equal, "no quota is reserved yet"))
        server.free_quota()
        wait_until(lambda: not read_job(server, "queued")["spec"]["suspend"])
        resumed = ("Suspended", "False", "Resumed", "TrainJob is resumed")
        wait_until(lambda: resumed in list_conditions(read_job(server, "queued").get("status") or {}))
        assert read_job(server, "ignored")["spec"]["suspend"], "its priority class does not exist"
        assert list_workloads(server, ignored) == []


def read_job(server: ApiServer, name: str) -> Json:
    return server.launcher.get(TRAINJOB, name) or {}


def wait_for_status(server: ApiServer, resource: ResourceKind, name: str, key: str) -> Json:
    """Return the status once it has the key."""

    def read() -> Json:
        status: Json = (server.launcher.get(resource, name) or {}).get("status") or {}
        return status if status.get(key) else {}

    return dict(wait_until(read))


def wait_for_conditions(server: ApiServer, resource: ResourceKind, name: str) -> Json:
    return wait_for_status(server, resource, name, "conditions")


def list_conditions(status: Json) -> list[tuple[str, str, str, str]]:
    return [(item["type"], item["status"], item["reason"], item["message"]) for item in status.get("conditions") or []]


def list_workloads(server: ApiServer, job: Json) -> list[Json]:
    return server.launcher.list_by_label(WORKLOAD_KINDS[0], f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}")


def find_workload(server: ApiServer, job: Json) -> Json:
    """Return Kueue's Workload of a job with its conditions."""

    def find() -> Json:
        workloads = list_workloads(server, job)
        return next((item for item in workloads if item.get("status", {}).get("conditions")), {})

    return dict(wait_until(find))


def read_reason(server: ApiServer, job: Json, start: str) -> str:
    """Return the reason why a job waits if it has this beginning."""
    current, workload = read_job(server, job["metadata"]["name"]), find_workload(server, job)
    reason = job_conditions.read_trainjob_status(current, workload, []).reason
    return reason if reason.startswith(start) else ""


class TestStandIns(ApiContract):
    """The contract of the stand-ins."""
