"""The contract of tests/common/test_api_contract.py on a real API server with JobSet, Trainer, KubeRay and Kueue, and the doctor on it.

The cluster has no node, so pods stay pending and the tests set their statuses. It is in the `long` tier because the cluster needs half a
minute to start.
"""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from kubernetes.client import ApiException, CoreV1Api, CustomObjectsApi

from components.common.artifacts.code_digest import ROOT
from components.common.launch.kubernetes import kubernetes_client
from components.common.launch.kubernetes.job_manifests import NAME_LABEL
from components.common.launch.kubernetes.kubernetes_client import TRAINJOB, KubernetesClient
from components.common.reporting.check_findings import CheckResult
from pipelines.kubeflow.preflight import cluster_api, pod_dry_run
from pipelines.kubeflow.preflight.cluster_api import RefusedError
from tests.common.test_api_contract import (
    COUNT,
    POD,
    QUEUE,
    REFUSALS,
    TEAM,
    TEAM_PATH,
    ApiContract,
    ApiServer,
    build_job,
    wait_until,
)
from tests.engines import cluster as cluster_kit
from tests.engines.cluster import REQUIRED, Cluster
from tests.kubernetes_api import Json, build_object
from tests.pipelines.preflight.simulated_cluster import KFP_TOKEN, SimulatedCluster, serve_cluster
from tests.pipelines.preflight.test_doctor import FAULTS, failed_checks
from tests.pipelines.test_platforms import SECURITY_VIOLATIONS

pytestmark = [pytest.mark.long, pytest.mark.cluster, REQUIRED]

KUEUE_CONFIG = """
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
integrations: {frameworks: [trainer.kubeflow.org/trainjob, ray.io/rayjob, pod]}
"""
OBJECTS = """
{apiVersion: v1, kind: Namespace, metadata: {name: team-a, labels: {pod-security.kubernetes.io/enforce: restricted}}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: team-q}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: team-u}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: team-t}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: keep, namespace: team-t, finalizers: [example.com/keep]}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: tuneline, namespace: team-a}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: nobody, namespace: team-q}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: pods, namespace: team-a}
rules: [{apiGroups: [argoproj.io], resources: [workflowtaskresults], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: pods, namespace: team-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: pods}
subjects: [{kind: ServiceAccount, name: tuneline, namespace: team-a}]
---
{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: any}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: all}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
    - coveredResources: [cpu]
      flavors: [{name: any, resources: [{name: cpu, nominalQuota: "4"}]}]
---
{apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {name: tiny, namespace: team-a}, spec: {clusterQueue: all}}
---
{apiVersion: kueue.x-k8s.io/v1beta2, kind: WorkloadPriorityClass, metadata: {name: low}, value: 10}
---
{apiVersion: kueue.x-k8s.io/v1beta2, kind: WorkloadPriorityClass, metadata: {name: high}, value: 100}
---
"""


@pytest.fixture(scope="module")
def api_server() -> Iterator[Cluster]:
    """A cluster without a node."""
    with cluster_kit.running_cluster(Path(os.environ[cluster_kit.KIT_VARIABLE]), node=False) as running:
        (running.folder / "kueue-config.yaml").write_text(KUEUE_CONFIG)
        running.start_controllers("jobset", "trainer", "ray", "kueue")
        runtime = (ROOT / "deploy/components/runtime/training-runtime.yaml").read_text(encoding="utf-8")
        running.kubectl("apply", "--server-side", "-f", "-", text=OBJECTS + runtime)
        running.kubectl("delete", "namespace", "team-t", "--wait=false")
        yield running


class RealServer(ApiServer):
    """The API server of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__("admin")
        self.cluster = cluster
        admin = cluster.folder / "admin.kubeconfig"
        self.connect(admin, admin)
        self.admin, self.jobs = self.doctor, self.launcher  # the administrator's, for the preparation of a test

    def log_in(self, token: str) -> None:
        file = self.cluster.folder / "token.kubeconfig"
        config = json.loads((self.cluster.folder / "admin.kubeconfig").read_text())
        config["users"][0]["user"] = {"token": token}
        file.write_text(yaml.safe_dump(config))
        self.connect(file, file)

    def log_in_without_rights(self) -> None:
        self.log_in(self.cluster.kubectl("-n", "team-q", "create", "token", "nobody").strip())
        self.user = "system:serviceaccount:team-q:nobody"

    def put(self, path: str, obj: Json) -> None:
        self.admin.create(path, obj)

    def put_event(self, event: Json) -> None:
        self.put(f"{TEAM_PATH}/events", event)

    @contextmanager
    def refuse(self, cause: str) -> Iterator[KubernetesClient]:
        client = KubernetesClient(self.launcher.client, REFUSALS[cause].namespace)
        if "quota" not in cause:
            yield client
            return
        controller_manager = int((self.cluster.folder / "kcm.pid").read_text())
        os.kill(controller_manager, signal.SIGSTOP)  # it computes the usage of new resource kinds only after 30 s
        try:
            counts = {COUNT: "0", "count/configmaps": "0"}
            used = {} if cause == "a quota without a computed usage" else counts
            body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "jobs"}, "spec": {"hard": counts}}
            self.put(f"/api/v1/namespaces/{client.namespace}/resourcequotas", body)
            status = {"status": {"hard": counts, "used": used}}
            CoreV1Api(self.jobs.client).patch_namespaced_resource_quota_status("jobs", client.namespace, status)
            wait_until(lambda: self._applies_quota(client.namespace))
            yield client
        finally:
            os.kill(controller_manager, signal.SIGCONT)

    def _applies_quota(self, namespace: str) -> bool:
        """Return whether the API server applies the quota; it accepts objects until its cache has it."""
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "x-"}}
        try:
            self.admin.create(f"/api/v1/namespaces/{namespace}/configmaps?dryRun=All", body)
        except cluster_api.ForbiddenError:
            return True
        return False

    def end_pods(self, job: str, code: int) -> None:
        terminated = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        container = {"name": "node", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
        status = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{**container, "state": terminated}],
        }
        pods = wait_until(lambda: len(found := self.jobs.list_pods(f"{NAME_LABEL}={job}")) == 2 and found)
        for pod in pods[:1] if code else pods:  # the others of a failed job are deleted
            CoreV1Api(self.jobs.client).patch_namespaced_pod_status(pod["metadata"]["name"], TEAM, {"status": status})

    def exceed_deadline(self, kind: str, job: str) -> None:
        """Do nothing: the deadline is 2 s."""

    def take_quota(self) -> None:
        self.jobs.create(TRAINJOB, build_job("trainjob", "urgent", queue=QUEUE, priority="high", cpu="2"))

    def free_quota(self) -> None:
        self.jobs.delete(TRAINJOB, "urgent")

    def remove_finalizers(self, job: str) -> None:
        location = (TRAINJOB.group, TRAINJOB.version, TEAM, TRAINJOB.plural, job)
        patch = {"metadata": {"finalizers": None}}
        with suppress(ApiException):
            CustomObjectsApi(self.jobs.client).patch_namespaced_custom_object(*location, patch)


@pytest.fixture
def server(api_server: Cluster, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    monkeypatch.setattr("pipelines.kubeflow.preflight.cluster_api.READ_TIMEOUT_SECONDS", 60.0)  # of a busy machine
    return RealServer(api_server)


class TestKubernetes(ApiContract):
    """The contract of a real API server."""


# Pods that the doctor's stand-in does not validate


def dry_run(server: ApiServer, change: Callable[[Json], None]) -> None:
    pod = copy.deepcopy(POD)
    pod["spec"]["containers"][0]["volumeMounts"] = []
    change(pod["spec"])
    server.doctor.create(f"{TEAM_PATH}/pods?dryRun=All", pod)


def test_invalid_pod_is_refused(server: ApiServer) -> None:
    mount = {"name": "none", "mountPath": "/x"}
    with pytest.raises(RefusedError):
        dry_run(server, lambda spec: spec["containers"][0]["volumeMounts"].append(mount))
    assert server.error[:2] == (422, "Invalid")
    with pytest.raises(RefusedError, match="cannot be handled as a Pod"):
        dry_run(server, lambda spec: spec.update(nodeName=5))
    assert server.error[:2] == (400, "BadRequest")


@pytest.mark.parametrize(("change", "violation"), SECURITY_VIOLATIONS)
def test_admission_controller_refuses_what_the_fast_check_refuses(
    server: ApiServer, change: Callable[[Json], None], violation: str
) -> None:
    """tests/pod_security.py against the admission controller."""
    with pytest.raises(cluster_api.ForbiddenError, match='violates PodSecurity "restricted:latest"'):
        dry_run(server, change)


# The doctor on the objects of its simulated cluster

RIGHTS = """
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: kubeflow, namespace: team-a}
rules:
  - {apiGroups: [argoproj.io], resources: [workflowtaskresults], verbs: [create, patch]}
  - {apiGroups: [""], resources: [configmaps, secrets], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: kubeflow, namespace: team-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubeflow}
subjects: [{kind: ServiceAccount, name: tuneline, namespace: team-a}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: submit, namespace: team-a}
rules: [{apiGroups: [pipelines.kubeflow.org], resources: [runs, experiments], verbs: [create, get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: submit, namespace: team-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: submit}
subjects: [{kind: User, name: ci@example.com}]
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: doctor, namespace: team-q}}
---
"""
DOCTOR_FAULTS = (
    "service account missing",
    "training runtime missing",
    "claim missing",
    "additional claim missing",
    "scratch storage class missing",
    "secret missing",
    "secret of MLflow missing",
    "mounted secret missing",
    "secret without key",
    "secret of a notification missing",
    "config map missing",
    "cluster queue inactive",
    "cluster queue without accelerator quota",
    "cluster queue quota too small",
    "no node with label",
    "no node with affinity",
    "taint not tolerated",
    "nodes cordoned",
    "too few accelerators per node",
    "too little memory per node",
    "queue missing",
    "queue stopped",
    "priority class missing",
    "limit range exceeded",
    "resource quota exceeded",
    "resource quota needs a missing request",
)


@pytest.fixture(scope="module")
def simulated(api_server: Cluster) -> Iterator[SimulatedCluster]:
    """The simulated cluster with the objects of its stand-in on the API server, for the account of the example RBAC."""
    parts = ("doctor/doctor-rbac.yaml", "launcher-trainjob/launcher-rbac.yaml")
    rights = RIGHTS + "\n---\n".join((ROOT / "deploy/components" / part).read_text(encoding="utf-8") for part in parts)
    user, account = "kind: User, name: ci@example.com", "kind: ServiceAccount, name: doctor, namespace: team-q"
    rights = rights.replace(f"apiGroup: rbac.authorization.k8s.io, {user}", user).replace(user, account)
    api_server.kubectl("apply", "-f", "-", text=rights)
    config = json.loads((api_server.folder / "admin.kubeconfig").read_text())
    config["users"][0]["user"] = {"token": api_server.kubectl("-n", "team-q", "create", "token", "doctor").strip()}
    (api_server.folder / "doctor.kubeconfig").write_text(yaml.safe_dump(config))
    with serve_cluster() as simulated, pytest.MonkeyPatch.context() as patch:
        simulated.use_trainjob()
        pods = pod_dry_run.build_pods(simulated.platform)
        patch.setattr(pod_dry_run, "build_pods", lambda platform: pods)
        flavor = build_object("ResourceFlavor", "default", "kueue.x-k8s.io/v1beta2")
        apply(api_server, [flavor, *simulated.kubernetes.objects.values()])
        yield simulated


def apply(cluster: Cluster, objects: list[Json]) -> None:
    """Create or change objects, and set the status of nodes and claims, which have no controllers here."""
    items = [{key: value for key, value in item.items() if key != "status"} for item in objects]
    items.sort(key=lambda item: item["kind"] != "Namespace")
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)
    set_status(cluster, objects)


def set_status(cluster: Cluster, items: list[Json]) -> None:
    core = CoreV1Api(kubernetes_client.connect_kubeconfig(str(cluster.folder / "admin.kubeconfig"))[0])
    for item in items:
        name, status = item["metadata"]["name"], {"status": item.get("status")}
        if item["kind"] == "Node":
            core.patch_node_status(name, status)
        elif item["kind"] == "PersistentVolumeClaim":
            core.patch_namespaced_persistent_volume_claim_status(name, item["metadata"]["namespace"], status)


@pytest.fixture
def doctor(
    api_server: Cluster, simulated: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[CheckResult]]:
    """Run the doctor on the API server."""
    nodes = [copy.deepcopy(item) for item in simulated.kubernetes.objects.values() if item["kind"] == "Node"]
    for node in nodes:  # without a sign of life for 50 s, a node is no longer ready
        node["status"]["conditions"][0]["lastHeartbeatTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    set_status(api_server, nodes)
    monkeypatch.setattr(cluster_api, "FIRST_CALL_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(cluster_api, "READ_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", KFP_TOKEN)
    monkeypatch.setenv("KUBECONFIG", str(api_server.folder / "doctor.kubeconfig"))
    return simulated.run_checks


def test_doctor_passes_all_checks_with_the_example_rights(
    doctor: Callable[[], list[CheckResult]],
) -> None:
    # Kueue activates the queues, and the node controller the nodes.
    findings = wait_until(lambda: (found := doctor()) and all(finding["ok"] for finding in found) and found)
    names = {finding["name"] for finding in findings}
    assert names >= {"pod dry run", "Kueue and pods", "queue team-a", "rights to manage trainjobs", "MLflow"}


@pytest.mark.parametrize("name", DOCTOR_FAULTS)
def test_doctor_finds_a_fault(
    api_server: Cluster, simulated: SimulatedCluster, doctor: Callable[[], list[CheckResult]], name: str
) -> None:
    case, objects, text = FAULTS[name], copy.deepcopy(simulated.kubernetes.objects), simulated.platform_text
    case.inject(simulated)
    changed = {path: item for path, item in simulated.kubernetes.objects.items() if item != objects.get(path)}
    removed = {path: item for path, item in objects.items() if path not in simulated.kubernetes.objects}
    try:
        if changed:
            apply(api_server, list(changed.values()))
        for item in removed.values():
            namespace = item["metadata"].get("namespace", "default")
            api_server.kubectl("-n", namespace, "delete", item["kind"], item["metadata"]["name"])
        (finding,) = wait_until(lambda: len(found := failed_checks(doctor())) == 1 and found)
    finally:
        if changed or removed:
            apply(api_server, [objects[path] for path in (*changed, *removed)])
        simulated.kubernetes.objects, simulated.platform_text = objects, text
    assert finding["name"].startswith(case.check), finding
    assert case.message in finding["found"], finding
    assert case.hint in finding["hint"], finding
