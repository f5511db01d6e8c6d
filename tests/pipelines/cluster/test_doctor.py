"""`tuneline doctor -p`: what a cluster lacks, one thing at a time. The API server is a stand-in; the client is the real one."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from kubernetes.config import incluster_config

from components.common.errors import TunelineError
from pipelines.cluster import access, doctor, registry, services, training
from pipelines.cluster.access import Api, ForbiddenError
from pipelines.cluster.look import Look
from pipelines.findings import Finding, all_well
from pipelines.platform import Platform
from tests import kubernetes_api, kubernetes_schemas
from tests.kubernetes_api import KUEUE, Json, KubernetesApi, claim, kubeconfig, named, secret, storage_class
from tests.pipelines.cluster.standing import CORE, RUNTIME, TEAM, Standing, objects, written
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.pipelines.test_submit import certificate

Break = Callable[[Standing], Any]
SECRET_VALUES = (
    "the-mlflow-token",
    "the-hub-token",
    "the-git-key",
    "the-registry-password",
    "the-minio-key",
    "the-cluster-token",
    "the-kubeflow-token",
)
NODES, CLASSES, QUEUES = "/api/v1/nodes", "/apis/storage.k8s.io/v1/storageclasses", f"{KUEUE}/v1beta2"


@dataclass(frozen=True)
class Broken:
    """A cluster with one thing wrong: what the doctor calls it, what it says, and how it is mended."""

    change: Break
    name: str
    found: str
    hint: str


def deny(who: str, verb: str, resource: str) -> Break:
    return lambda place: place.kubernetes.denied.add((who, verb, resource))


def elsewhere(change: Break) -> Break:
    return lambda place: (place.train_elsewhere(), change(place))


def put(kind: str, thing: Json) -> Break:
    return lambda place: place.kubernetes.put(f"{CORE}/{kind}", thing)


def gone(kind: str, name: str) -> Break:
    return lambda place: place.remove(kind, name)


def set_to(path: str, *keys: str, value: Any) -> Break:
    """Change one field of an object."""

    def change(place: Standing) -> None:
        thing = place.thing(path)
        for key in keys[:-1]:
            thing = thing[key]
        thing[keys[-1]] = value

    return change


def each_gpu_node(change: Callable[[Json], Any]) -> Break:
    return lambda place: [change(place.thing(f"{NODES}/{name}")) for name in ("gpu-1", "gpu-2")]


def without_kueue(place: Standing) -> None:
    for path in [path for path in place.kubernetes.objects if path.startswith(KUEUE)]:
        del place.kubernetes.objects[path]


def inside_service(ready: int) -> Break:
    """MLflow as a Service of the cluster with so many pods behind it."""

    def change(place: Standing) -> None:
        place.change(place.outside.mlflow, "http://mlflow.ml:5000")
        where = "/api/v1/namespaces/ml"
        place.kubernetes.put(f"{where}/services", named("Service", "mlflow", namespace="ml", spec={"ports": [{"port": 5000}]}))
        subsets = [{"addresses": [{"ip": f"10.0.0.{n}"} for n in range(1, ready + 1)], "ports": [{"port": 5000}]}] if ready else []
        place.kubernetes.put(f"{where}/endpoints", named("Endpoints", "mlflow", namespace="ml", subsets=subsets))

    return change


def queue_of(**spec: Any) -> Break:
    return lambda place: place.thing(f"{QUEUES}/clusterqueues/gpus")["spec"].update(spec)


INACTIVE = [
    {
        "type": "Active",
        "status": "False",
        "reason": "FlavorNotFound",
        "message": "Can't admit new workloads: references missing ResourceFlavor(s): h100",
    }
]
REFUSED_POD = "images must come from registry.example"
MODES = "deploy/components/powerscale-nfs/volume.yaml"
CLUSTERS: dict[str, Broken] = {
    "the namespace is not there": Broken(
        lambda place: place.kubernetes.objects.pop(CORE), f"namespace {TEAM}", "it does not exist", f"kubectl create namespace {TEAM}"
    ),
    "the namespace is being deleted": Broken(
        set_to(CORE, "status", value={"phase": "Terminating"}), f"namespace {TEAM}", "terminating", "name another one with --namespace"
    ),
    "the namespace enforces what the pods do not say": Broken(
        lambda place: place.change("run_as_non_root: true", "run_as_non_root: null"),
        "pod security",
        "restricted is enforced, and the pods",
        "security: {run_as_user: UID, run_as_non_root: true}",
    ),
    "the service account is not there": Broken(
        gone("serviceaccounts", "tuneline"),
        "service account tuneline",
        "it does not exist",
        f"kubectl -n {TEAM} create serviceaccount tuneline",
    ),
    "nobody knows what a TrainJob is": Broken(
        elsewhere(lambda place: place.kubernetes.served.clear()),
        "Kubeflow Trainer",
        "the API server knows no trainjobs.trainer.kubeflow.org v1alpha1",
        "Have Kubeflow Trainer 2.2 or later installed",
    ),
    "the runtime of the training is not there": Broken(
        elsewhere(lambda place: place.kubernetes.objects.pop(RUNTIME)),
        "runtime tuneline",
        "there is no such ClusterTrainingRuntime",
        "Apply deploy/components/runtime/training-runtime.yaml, or correct launcher.trainjob.runtime in platform.yaml; there is: none.",
    ),
    "the service account may not make TrainJobs": Broken(
        elsewhere(deny("pods", "create", "trainjobs")),
        "rights to train as trainjobs",
        f"tuneline may not create trainjobs in {TEAM}",
        "Apply deploy/components/launcher/launcher-rbac.yaml",
    ),
    "the service account may not write what Argo reads": Broken(
        deny("pods", "patch", "workflowtaskresults"),
        "rights of the service account tuneline",
        "it may not patch workflowtaskresults",
        f"kubectl -n {TEAM} create rolebinding tuneline --clusterrole=kubeflow-edit --serviceaccount={TEAM}:tuneline",
    ),
    "the service account may not read the keys of the artifact store": Broken(
        deny("pods", "get", "secrets"),
        "rights of the service account tuneline",
        "it may not get secrets mlpipeline-minio-artifact",
        "create rolebinding",
    ),
    "the caller may not submit": Broken(
        deny("caller", "create", "runs"),
        "permission to submit",
        "ci@example.com may not create runs",
        "--clusterrole=kubeflow-pipelines-edit --user=ci@example.com",
    ),
    "the claim is not there": Broken(
        gone("persistentvolumeclaims", "tuneline"), "claim tuneline", "it does not exist", f"kubectl -n {TEAM} apply -f volume.yaml"
    ),
    "the further claim is not there": Broken(
        gone("persistentvolumeclaims", "corpus"), "claim corpus", "it does not exist", "correct claims[0].claim in platform.yaml"
    ),
    "the claim is pending": Broken(
        put("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Pending")),
        "claim tuneline",
        "storage class powerscale has not made its volume",
        f"kubectl -n {TEAM} describe pvc tuneline",
    ),
    "the claim's storage class is not there": Broken(
        put("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Pending", storage_class="fast")),
        "claim tuneline",
        "there is no storage class fast",
        "kubectl get storageclass",
    ),
    "the claim has lost its volume": Broken(
        put("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Lost")),
        "claim tuneline",
        "its volume is lost",
        "Restore the PersistentVolume",
    ),
    "the claim is being deleted": Broken(
        set_to(f"{CORE}/persistentvolumeclaims/tuneline", "metadata", "deletionTimestamp", value="2026-01-05T10:00:00Z"),
        "claim tuneline",
        "it is being deleted",
        "get pvc tuneline -w",
    ),
    "the claim is for one node": Broken(
        put("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteOnce")),
        "claim tuneline",
        "one node may mount it, and the pods may land on 3",
        MODES,
    ),
    "the claim is for one pod": Broken(
        put("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteOncePod")),
        "claim tuneline",
        "one pod at a time may mount it",
        MODES,
    ),
    "the volume may only be read": Broken(
        put("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadOnlyMany")), "claim tuneline", "the pods may not write it", MODES
    ),
    "the storage class of the scratch space is not there": Broken(
        lambda place: place.kubernetes.objects.pop(f"{CLASSES}/local-nvme"),
        "storage class local-nvme",
        "it does not exist, and data_curation want scratch",
        "scratch.storage_class wants one of",
    ),
    "a secret is not there": Broken(
        gone("secrets", "hub"), "secret hub", "it does not exist", f"kubectl -n {TEAM} create secret generic hub --from-file=token=FILE"
    ),
    "a mounted secret is not there": Broken(
        gone("secrets", "git-key"), "secret git-key", "it does not exist", "create secret generic git-key --from-file=KEY=FILE"
    ),
    "a secret lacks the key": Broken(
        put("secrets", secret(TEAM, "hub", password="the-hub-token")),
        "secret hub",
        "it has no key token; its keys: password",
        "Correct the key under `secrets`",
    ),
    "a token ends with a line break": Broken(
        put("secrets", secret(TEAM, "hub", token="the-hub-token\n")),
        "secret hub",
        "a line break, which HF_TOKEN would hold too",
        "printf %s VALUE > FILE",
    ),
    "a token is empty": Broken(
        put("secrets", secret(TEAM, "hub", token="")), "secret hub", "its key token is empty", "printf %s VALUE > FILE"
    ),
    "a config map is not there": Broken(
        gone("configmaps", "git-settings"), "config map git-settings", "it does not exist", "create configmap git-settings"
    ),
    "the authorities stand under another key": Broken(
        put("configmaps", named("ConfigMap", "authorities", data={"ca.pem": "x"})),
        "config map authorities",
        "it has no key ca-bundle.crt; its keys: ca.pem",
        "network.certificates.key",
    ),
    "the authorities are none": Broken(
        put("configmaps", named("ConfigMap", "authorities", data={"ca-bundle.crt": "<html>"})),
        "config map authorities",
        "holds no certificates",
        "-----BEGIN CERTIFICATE-----",
    ),
    "the pull secret is of another type": Broken(
        lambda place: [
            place.thing(f"{CORE}/secrets/registry").update(type="Opaque"),
            place.outside.images.clear(),
            place.change("pull_secrets: [registry]", "pull_secrets: [registry], pull_policy: Never"),
        ],
        "pull secret registry",
        "it is of type Opaque",
        f"kubectl -n {TEAM} create secret docker-registry registry",
    ),
    "Kueue is not installed": Broken(without_kueue, "Kueue", "it is not installed here", "take queue and priority out of platform.yaml"),
    "the queue is not there": Broken(
        lambda place: place.change("queue: team-a", "queue: team-b"),
        "queue team-b",
        "there is no such LocalQueue",
        "the namespace has: team-a",
    ),
    "the queue is stopped": Broken(
        set_to(f"{QUEUES}/namespaces/{TEAM}/localqueues/team-a", "spec", "stopPolicy", value="Hold"),
        "queue team-a",
        "its stopPolicy is Hold",
        "describe localqueue team-a",
    ),
    "the cluster queue is not active": Broken(
        set_to(f"{QUEUES}/clusterqueues/gpus", "status", "conditions", value=INACTIVE),
        "queue team-a",
        "ClusterQueue gpus is not active: FlavorNotFound",
        "kubectl describe clusterqueue gpus",
    ),
    "the cluster queue does not know the accelerator": Broken(
        queue_of(
            resourceGroups=[
                {
                    "coveredResources": ["cpu", "memory"],
                    "flavors": [
                        {"name": "f", "resources": [{"name": "cpu", "nominalQuota": "256"}, {"name": "memory", "nominalQuota": "2Ti"}]}
                    ],
                }
            ]
        ),
        "queue team-a",
        "has no quota of nvidia.com/gpu",
        "added to the ClusterQueue's resourceGroups",
    ),
    "the cluster queue never has so many accelerators": Broken(
        queue_of(
            resourceGroups=[
                {
                    "flavors": [
                        {
                            "name": "f",
                            "resources": [
                                {"name": n, "nominalQuota": q} for n, q in (("cpu", "256"), ("memory", "2Ti"), ("nvidia.com/gpu", "4"))
                            ],
                        }
                    ]
                }
            ]
        ),
        "queue team-a",
        "admits 4 of nvidia.com/gpu at most; fine_tuning want 8",
        "Lower resources.fine_tuning.accelerators",
    ),
    "the priority is not there": Broken(
        lambda place: place.change("priority: customization", "priority: urgent"),
        "priority urgent",
        "there is no such WorkloadPriorityClass",
        "the cluster has: customization",
    ),
    "no node has the label": Broken(
        lambda place: place.change("pool: gpu", "pool: h200"),
        "nodes for fine_tuning",
        "no node has the labels pool=h200",
        "kubectl label node NODE pool=h200",
    ),
    "no node satisfies the condition": Broken(
        lambda place: place.change('"79000"', '"99000"'),
        "nodes for fine_tuning",
        "of 2 nodes none satisfies nvidia.com/gpu.memory Gt 99000",
        "scheduling.node_affinity",
    ),
    "the taint is not tolerated": Broken(
        each_gpu_node(lambda one: one["spec"]["taints"].append({"key": "maintenance", "effect": "NoExecute"})),
        "nodes for fine_tuning",
        "tainted maintenance:NoExecute",
        "{key: maintenance, operator: Exists, effect: NoExecute}",
    ),
    "the nodes are closed": Broken(
        each_gpu_node(lambda one: one["spec"].update(unschedulable=True)),
        "nodes for fine_tuning",
        "closed to new pods",
        "kubectl uncordon NODE",
    ),
    "no node has so many accelerators": Broken(
        lambda place: place.change("accelerators: 8", "accelerators: 16"),
        "nodes for fine_tuning",
        "16 of nvidia.com/gpu wanted; the most that one of gpu-1, gpu-2 can give is 8",
        "Lower resources.fine_tuning.accelerators in platform.yaml to 8",
    ),
    "the device plugin is not there": Broken(
        each_gpu_node(lambda one: one["status"]["allocatable"].pop("nvidia.com/gpu")),
        "nodes for fine_tuning",
        "gpu-1, gpu-2: none offers nvidia.com/gpu",
        "Install its device plugin",
    ),
    "no node has so much memory": Broken(
        lambda place: place.change("memory: 64Gi", "memory: 300Gi"),
        "nodes for data_curation",
        "300Gi of memory wanted; the most that one of cpu-1 can give is 256Gi",
        "Lower resources.data_curation.memory in platform.yaml to 256Gi",
    ),
    "a limit range lets a container have less": Broken(
        set_to(f"{CORE}/limitranges/usual", "spec", "limits", value=[{"type": "Container", "max": {"memory": "256Gi"}}]),
        "limit ranges",
        "lets a container have 256Gi of memory, and fine_tuning want 512Gi",
        "Lower resources.fine_tuning.memory in platform.yaml to 256Gi",
    ),
    "a quota grants less": Broken(
        set_to(f"{CORE}/resourcequotas/all", "spec", "hard", value={"requests.nvidia.com/gpu": "4"}),
        "resource quotas",
        "grants 4 of nvidia.com/gpu to the whole namespace",
        "describe resourcequota all",
    ),
    "a quota counts what a stage does not say": Broken(
        lambda place: [
            place.thing(f"{CORE}/resourcequotas/all")["spec"]["hard"].update({"limits.cpu": "100"}),
            place.change('others: {cpu: "1", memory: 4Gi}', "others: {memory: 4Gi}"),
        ],
        "resource quotas",
        "every pod must say how much it wants, and those of others do not",
        "Set resources.others.cpu",
    ),
    "a webhook refuses the pods": Broken(
        lambda place: setattr(place.kubernetes, "webhook", lambda pod: REFUSED_POD),
        "trial of the pods",
        f'admission webhook "pods.example" denied the request: {REFUSED_POD}',
        "Set what is asked for in platform.yaml",
    ),
    "MLflow does not know the token": Broken(
        lambda place: setattr(place.outside, "mlflow_token", "another"),
        "MLflow",
        "does not accept the token or password: status 401",
        "Renew the value in the secret",
    ),
    "MLflow is asked without a token": Broken(
        lambda place: place.change("MLFLOW_TRACKING_TOKEN: {name: mlflow, key: token}, ", ""),
        "MLflow",
        "asks for a token, and none is named: status 401",
        "MLFLOW_TRACKING_TOKEN: {name: SECRET, key: KEY}",
    ),
    "MLflow does not answer": Broken(
        lambda place: place.change(place.outside.mlflow, "http://127.0.0.2:9"),
        "MLflow",
        "http://127.0.0.2:9 does not answer: Connection refused",
        "mlflow.tracking_uri",
    ),
    "what answers is no MLflow": Broken(
        lambda place: setattr(place.outside, "mlflow_answers", (200, "<html>")), "MLflow", "which is no MLflow", "mlflow.tracking_uri"
    ),
    "MLflow is on each pod itself": Broken(
        lambda place: place.change(place.outside.mlflow, "http://localhost:5000"),
        "MLflow",
        "localhost is each pod itself",
        "http://mlflow.mlflow:5000",
    ),
    "MLflow's service has no pods": Broken(inside_service(0), "MLflow", "its Service has 0 ready addresses", "kubectl -n ml get pods"),
    "MLflow's service is not there": Broken(
        lambda place: place.change(place.outside.mlflow, "http://mlflow.ml.svc:5000"),
        "MLflow",
        "there is no Service mlflow in the namespace ml",
        "kubectl get services -A",
    ),
    "Kubeflow is too old for a key": Broken(
        lambda place: setattr(place.kubeflow, "version", "2.16.1"),
        "Kubeflow Pipelines",
        "does not know run.timeout_seconds, run.keep_seconds",
        "Update it to 2.17 or newer, or take run.timeout_seconds and",
    ),
    "Kubeflow is too old": Broken(
        lambda place: setattr(place.kubeflow, "version", "1.8.22"),
        "Kubeflow Pipelines",
        "does not know compiled pipelines",
        "Update it to 2.17 or newer.",
    ),
    "Kubeflow does not know the token": Broken(
        lambda place: setattr(place.kubeflow, "token", "another"),
        "Kubeflow Pipelines",
        "does not accept who is asking",
        "KF_PIPELINES_TOKEN",
    ),
    "Kubeflow has one user": Broken(
        lambda place: setattr(place.kubeflow, "namespaces", ()),
        "Kubeflow Pipelines",
        "takes no namespace",
        "Leave --namespace and KFP_NAMESPACE out",
    ),
    "an image is not in the registry": Broken(
        lambda place: place.outside.images.remove(next(one for one in place.outside.images if one.startswith("triton"))),
        "image ",
        "does not have it",
        "Push it there",
    ),
    "the registry does not know the login": Broken(
        lambda place: [
            setattr(place.outside, "login", "puller:another"),
            place.change("/cuda@", "/cpu@"),
            place.change("/triton@", "/cpu@"),
            place.change("sha256:" + "2" * 64, "sha256:" + "1" * 64),
            place.change("sha256:" + "3" * 64, "sha256:" + "1" * 64),
        ],
        "image ",
        "does not give it out: status 401",
        "images.pull_secrets",
    ),
}


def lacking(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one["needed"] and not one["ok"]]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {one["name"]: one for one in findings}


def test_a_cluster_that_lacks_nothing_is_told_so(place: Standing) -> None:
    findings = place.examine()
    assert [one for one in findings if not one["ok"]] == []
    assert {one["name"] for one in findings} >= {
        "cluster",
        "who is asking",
        "claim tuneline",
        "queue team-a",
        "trial of the pods",
        "Kueue and pods",
        "MLflow",
    }
    found = by_name(findings)
    assert found["cluster"]["found"] == f"Kubernetes v1.34.1 at {place.kubernetes.url}"
    assert found["who is asking"]["found"] == f"ci@example.com, about the namespace {TEAM}"
    assert found["nodes for fine_tuning"]["found"] == "2 of 3 fit: gpu-1, gpu-2"
    assert found["MLflow"]["found"] == f"MLflow 3.17.0 at {place.outside.mlflow}"
    assert found["trial of the pods"]["found"] == "the API server would take all 11"


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_a_cluster_lacks_is_one_finding_that_says_how_it_is_mended(place: Standing, name: str) -> None:
    broken = CLUSTERS[name]
    broken.change(place)
    (found,) = lacking(place.examine())
    assert found["name"].startswith(broken.name), found
    assert broken.found in found["found"], found
    assert broken.hint in found["hint"], found


class RuntimesOf:
    """At the seam: an API server with one runtime in one namespace, or one that does not let anybody read them."""

    def __init__(self, forbidden: bool = False) -> None:
        self._forbidden = forbidden

    def get(self, path: str) -> Json | None:
        if self._forbidden and "trainingruntimes" in path:
            raise ForbiddenError("trainingruntimes: forbidden")
        if path == "/apis/trainer.kubeflow.org/v1alpha1":
            return {"resources": [{"name": "trainjobs"}]}
        return {"kind": "TrainingRuntime"} if path == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/gpus/trainingruntimes/ours" else None

    def items(self, path: str) -> list[Json]:
        return []


def trained_in(api: RuntimesOf, place: Standing, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    place.text += "launcher: {kind: trainjob, trainjob: {namespace: gpus, runtime: ours, runtime_kind: TrainingRuntime}}\n"
    look = Look(cast(Api, api), place.platform, TEAM)
    monkeypatch.setattr(Look, "get", lambda *_: {})
    monkeypatch.setattr(training.permissions, "pods_may", lambda *_, **__: True)
    return by_name(list(training.launcher(look)))


def test_a_runtime_of_a_namespace_is_looked_for_where_the_training_runs(place: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained_in(RuntimesOf(), place, monkeypatch)["runtime ours"]["found"] == "it is there"


def test_a_runtime_that_may_not_be_read_is_not_checked_and_the_rights_are(place: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained_in(RuntimesOf(forbidden=True), place, monkeypatch)
    assert (found["runtime ours"]["found"], found["runtime ours"]["needed"]) == (
        "not checked: reading trainingruntimes is forbidden",
        False,
    )
    assert found["rights to train as trainjobs"]["ok"]


def test_each_broken_cluster_has_its_own_finding_and_remedy() -> None:
    said = {(one.name, one.found) for one in CLUSTERS.values()}
    assert len(said) == len(CLUSTERS) > 20


def test_a_cluster_that_trains_as_it_should_is_told_so_and_one_that_says_less_is_remarked(place: Standing) -> None:
    place.train_elsewhere()
    found = by_name(place.examine())
    assert [found[name]["ok"] for name in ("Kubeflow Trainer", "runtime tuneline", "rights to train as trainjobs")] == [True] * 3
    deny("pods", "list", "events")(place)
    findings = place.examine()
    assert lacking(findings) == []
    assert "may not list events" in by_name(findings)["rights to tell what a training waits for"]["found"]


def test_nothing_that_is_held_in_a_secret_is_told(place: Standing) -> None:
    for change in (lambda: None, lambda: setattr(place.outside, "mlflow_token", "x"), lambda: setattr(place.outside, "login", "a:b")):
        change()
        text = json.dumps(place.examine())
        assert [value for value in SECRET_VALUES if value in text or base64.b64encode(value.encode()).decode() in text] == []


def test_what_may_not_be_looked_at_is_said_and_stops_nothing(place: Standing) -> None:
    place.kubernetes.unreadable = {
        "secrets",
        "nodes",
        "storageclasses",
        "limitranges",
        "clusterqueues",
        "persistentvolumeclaims",
        "services",
    }
    place.kubernetes.reviews = False
    place.kubernetes.denied.add(("caller", "create", "pods"))
    findings = place.examine()
    assert all_well(findings)
    unsaid = {one["name"] for one in findings if not one["ok"]}
    assert unsaid >= {
        "secret hub",
        "pull secret registry",
        "nodes",
        "claims",
        "limits and quotas",
        "queue",
        "trial of the pods",
        "MLflow",
        "rights of the service account tuneline",
    }
    assert all(one["found"].startswith("not checked: ") and one["hint"] for one in findings if not one["ok"])


def test_a_claim_for_one_node_will_do_where_all_pods_land_on_one(place: Standing) -> None:
    place.kubernetes.put(f"{CORE}/persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteOnce"))
    for name in ("cpu-1", "gpu-2"):
        del place.kubernetes.objects[f"{NODES}/{name}"]
    place.thing(f"{NODES}/gpu-1")["spec"] = {}
    findings = place.examine()
    assert lacking(findings) == []
    assert by_name(findings)["claim tuneline"]["found"].endswith("and all pods land on one node")


def test_a_claim_that_waits_for_its_first_pod_is_whole(place: Standing) -> None:
    place.kubernetes.put("/apis/storage.k8s.io/v1/storageclasses", storage_class("powerscale", "WaitForFirstConsumer"))
    place.kubernetes.put(f"{CORE}/persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Pending"))
    assert lacking(place.examine()) == []


def test_an_mlflow_that_only_pods_can_see_is_looked_at_as_a_service(place: Standing) -> None:
    inside_service(2)(place)
    found = by_name(place.examine())["MLflow"]
    assert (found["ok"], found["found"]) == (True, "only pods can see mlflow.ml: its Service has 2 ready addresses")


def test_a_registry_that_this_machine_does_not_reach_is_not_held_against_the_cluster(place: Standing) -> None:
    place.change(place.outside.registry.removeprefix("http://"), "127.0.0.1:9")
    findings = place.examine()
    assert lacking(findings) == []
    images = [one for one in findings if one["name"].startswith("image ")]
    assert len(images) == 3
    assert all("127.0.0.1:9 does not answer here: Connection refused" in one["found"] for one in images)


def test_a_kueue_that_does_not_take_plain_pods_is_remarked(place: Standing) -> None:
    place.kubernetes.kueue_takes_pods = False
    findings = place.examine()
    assert all_well(findings)
    assert "they would pass its queue by" in by_name(findings)["Kueue and pods"]["found"]


def test_a_cohort_may_lend_what_a_queue_lacks(place: Standing) -> None:
    resources = [{"name": name, "nominalQuota": "0"} for name in ("cpu", "memory", "nvidia.com/gpu")]
    queue_of(cohortName="all", resourceGroups=[{"flavors": [{"name": "f", "resources": resources}]}])(place)
    assert lacking(place.examine()) == []


def test_a_kubeflow_for_one_user_is_asked_for_nothing_and_its_own_account_is_looked_at(place: Standing) -> None:
    place.namespace, place.kubeflow.namespaces = "", ()
    place.change("service_account: tuneline", "service_account: ''")
    for path, thing in list(place.kubernetes.objects.items()):
        place.kubernetes.objects[path.replace(f"/namespaces/{TEAM}", "/namespaces/kubeflow")] = thing
    place.kubernetes.put("/api/v1/namespaces/kubeflow/serviceaccounts", named("ServiceAccount", "pipeline-runner"))
    place.kubernetes.denied.add(("caller", "create", "runs"))
    findings = place.examine()
    assert lacking(findings) == []
    assert by_name(findings)["service account pipeline-runner"]["ok"]


def test_a_kubeflow_with_several_users_wants_a_namespace(place: Standing, tmp_path: Path) -> None:
    place.namespace = ""
    kubeconfig(tmp_path / "kubeconfig", place.kubernetes.url, namespace=TEAM)
    (found,) = lacking(place.examine())
    assert (found["name"], found["hint"]) == ("Kubeflow Pipelines", "Give --namespace (or KFP_NAMESPACE): the profile's.")


def granted(rules: list[Json], method: str, path: str) -> bool:
    """Whether rules of RBAC grant a call to the API server."""
    found = kubernetes_api.ADDRESS.match(path)
    if found is None or found["kind"].startswith("selfsubject"):
        return True  # discovery, and what everybody may ask about themselves
    verb = "create" if method == "POST" else "get" if found["name"] else "list"
    if path == CORE:
        found, verb = kubernetes_api.ADDRESS.match(f"/api/v1/namespaces/{TEAM}"), "get"
    kind, group = ("namespaces", "") if path == CORE else (found["kind"], found["group"] or "")
    return any(group in one["apiGroups"] and kind in one["resources"] and verb in one["verbs"] for one in rules)


def test_the_rights_of_the_example_are_those_that_the_doctor_uses_and_no_more(place: Standing) -> None:
    things = list(yaml.safe_load_all((ROOT / "deploy" / "components" / "doctor" / "doctor-rbac.yaml").read_text(encoding="utf-8")))
    assert [problem for thing in things for problem in kubernetes_schemas.problems(thing)] == []
    rules = [rule for thing in things for rule in thing.get("rules", [])]
    inside_service(1)(place)
    place.change("queue: team-a, priority: customization", "queue: team-b, priority: urgent")  # what there is instead is listed
    place.train_elsewhere()
    place.change("runtime: tuneline}", "runtime: another}")
    place.examine()
    place.change("runtime: another}", "runtime: another, runtime_kind: TrainingRuntime}")
    place.examine()
    place.change("queue: team-b, priority: urgent", "queue: team-a, priority: customization")
    place.examine()
    assert [call for call in place.kubernetes.calls if not granted(rules, *call)] == []
    for rule in rules:
        for kind, verb in ((kind, verb) for kind in rule["resources"] for verb in rule["verbs"]):
            fewer = [{**one, "resources": [k for k in one["resources"] if k != kind or verb not in one["verbs"]]} for one in rules]
            assert [call for call in place.kubernetes.calls if not granted(fewer, *call)], f"{verb} {kind} is not needed"


# The stand-in itself


@pytest.mark.parametrize("version", kubernetes_schemas.versions()[-1:])
def test_the_objects_of_the_good_cluster_are_ones_that_kubernetes_has(version: str) -> None:
    core = [thing for thing in objects().values() if not thing["apiVersion"].startswith(("kueue.", "trainer."))]
    assert {thing["kind"] for thing in core} >= {
        "Namespace",
        "Node",
        "Secret",
        "ConfigMap",
        "PersistentVolumeClaim",
        "LimitRange",
        "StorageClass",
    }
    for thing in core:
        found = kubernetes_schemas.problems(thing) + schema_problems(thing, version)
        assert found == [], thing["metadata"]["name"]


def schema_problems(thing: Json, version: str) -> list[str]:
    """The package's files are named after kind, group and version; kubernetes_schemas reads those of the core group."""
    return kubernetes_schemas.schema_problems(thing, version) if thing["apiVersion"] == "v1" else []


def test_the_stand_in_refuses_a_pod_as_the_real_server_does(place: Standing) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "x-"}, "spec": {"container": []}}
    token = f"Bearer {place.kubernetes.token}"
    status, said = place.kubernetes.answer(
        "POST", f"{CORE}/pods?dryRun=All", token, {**pod, "spec": {"nodeName": 5, "containers": [], "volumes": [], "initContainers": []}}
    )
    assert (status, said["reason"]) == (422, "Invalid")
    assert place.kubernetes.answer("GET", f"{CORE}/secrets/nothing", token, None)[1]["message"] == 'secrets "nothing" not found'
    assert place.kubernetes.answer("GET", CORE, "Bearer x", None)[0] == 401


# Where no cluster answers


def told(cwd: Path, **extra: str) -> Finding:
    """The one finding of a cluster that cannot be asked, from the shell."""
    inherited = environment(HOME=str(cwd), **extra)
    inherited.pop("KUBERNETES_SERVICE_HOST", None)
    command = [*COMMAND, "doctor", "-p", "platform.yaml", "--json"]
    done = subprocess.run(command, cwd=cwd, env=inherited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    (found,) = answer["findings"]
    assert not answer["ok"]
    return dict(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "platform.yaml").write_text("volume: {claim: tuneline}\n")
    return tmp_path


def test_a_cluster_that_nobody_listens_for_is_said(folder: Path) -> None:
    file = kubeconfig(folder / "kubeconfig", "https://127.0.0.1:9")
    found = told(cwd=folder, KUBECONFIG=str(file))
    assert found["found"] == "https://127.0.0.1:9 does not answer: Connection refused"
    assert "set KUBECONFIG, choose --context" in found["hint"]


def test_a_cluster_that_swallows_what_it_is_sent_is_said_in_ten_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        began = time.monotonic()
        found = only(monkeypatch, kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{silent.getsockname()[1]}"))
        seconds = time.monotonic() - began
    assert "does not answer" in found["found"]
    assert seconds < 10


def test_a_program_for_credentials_that_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kubeconfig(folder / "kubeconfig", "https://127.0.0.1:9")
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sleep", "args": ["20"], "interactiveMode": "Never"}
    file.write_text(file.read_text().replace("token: the-cluster-token", f"exec: {json.dumps(run)}"))
    monkeypatch.setattr(access, "FIRST_WITHIN", 1.0)
    assert only(monkeypatch, file)["found"] == "the cluster does not answer within 1 seconds"


def only(monkeypatch: pytest.MonkeyPatch, file: Path, context: str = "") -> Finding:
    """The one finding with this kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (found,) = doctor.examine(Platform(), context=context)
    assert not all_well([found])
    assert found["hint"]
    return found


def test_a_cluster_that_stops_answering_is_no_cluster_that_lacks_nothing(place: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ANSWER_WITHIN", 0.2)
    place.kubernetes.silent_about = "nodes"
    (found,) = lacking(place.examine())
    assert found["name"] == "cluster"
    assert found["found"].startswith(f"nothing more could be looked at: {place.kubernetes.url} does not answer: ")


def test_a_kubeflow_that_swallows_what_it_is_sent_leaves_the_screen_as_it_was(
    place: Standing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "ALL_WITHIN", 1.0)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        place.kubeflow.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (found,) = lacking(place.examine())
        print("seen")
    assert (found["name"], capsys.readouterr().out) == ("Kubeflow Pipelines", "seen\n")
    assert "does not answer within 1 seconds" in found["found"]
    assert "--endpoint" in found["hint"]


def test_a_token_that_has_expired_is_said(place: Standing, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(monkeypatch, kubeconfig(folder / "old", place.kubernetes.url, token="yesterday"))
    assert found["found"] == f"{place.kubernetes.url} does not accept who is asking: Unauthorized"
    assert "expired" in found["hint"]


def test_no_kubeconfig_at_all_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "no cluster is named: there is no kubeconfig, and this is no pod with a service account's token"
    assert only(monkeypatch, folder / "nothing")["found"] == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "it is not YAML: line 1"),
        ("token: the-cluster-token\n\tx", "it is not YAML: line 2"),
        ("[]", "it names no clusters"),
        ("clusters: []\ncontexts: []\nusers: []\n", "kube-config"),
        ("clusters: [{name: a, cluster: the-cluster-token}]\ncontexts: 5\nusers: []\ncurrent-context: a\n", "cannot be used"),
        ("", "it names no clusters"),
    ],
)
def test_a_kubeconfig_that_is_none_is_said_without_a_word_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    file = folder / "kubeconfig"
    file.write_text(content)
    found = only(monkeypatch, file)
    assert found["found"].startswith(f"the kubeconfig {file} cannot be used: ")
    assert said in found["found"]
    assert "the-cluster-token" not in json.dumps(found)


def test_a_context_that_is_not_there_is_said(place: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(monkeypatch, tmp_path / "kubeconfig", "production")
    assert "production" in found["found"]
    assert "--context" in found["hint"]


def test_in_a_pod_its_own_account_is_asked_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = certificate(tmp_path / "server.pem")
    (tmp_path / "token").write_text("the-cluster-token")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for name, value in (("TOKEN", "token"), ("CERT", "server.pem")):
        monkeypatch.setattr(incluster_config, f"SERVICE_{name}_FILENAME", str(tmp_path / value))
    with kubernetes_api.serving(KubernetesApi(objects()), pem) as api:
        api.token = "the-cluster-token"
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        found = access.connect()
        assert (found.address, found.own_namespace) == (api.url, "kubeflow")
        api.token = "renewed"
        with pytest.raises(TunelineError, match="does not accept who is asking"):
            found.get("/api/v1/nodes")


def test_people_are_told_line_by_line_and_the_exit_code_says_it(place: Standing, tmp_path: Path) -> None:
    written(place, tmp_path)
    place.remove("secrets", "hub")
    settings = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "KF_PIPELINES_TOKEN": "the-kubeflow-token"}
    command = [*COMMAND, "doctor", "-p", "platform.yaml", "--namespace", TEAM, "--endpoint", place.kubeflow.url]
    done = subprocess.run(command, cwd=tmp_path, env=environment(**settings), capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    place_of = lines.index("MISSING  secret hub: it does not exist")
    assert lines[place_of + 1] == f"         Make it: kubectl -n {TEAM} create secret generic hub --from-file=token=FILE"
    assert "ok       claim tuneline: ReadWriteMany, 10Ti, Bound" in lines


def test_a_cluster_that_lacks_nothing_ends_the_command_with_0(place: Standing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pipelines.cli.main import app

    arguments = ["-p", str(written(place, tmp_path)), "--namespace", TEAM, "--endpoint", place.kubeflow.url]
    assert app(["doctor", *arguments, "--json"], standalone_mode=False) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert all(set(one) == {"name", "ok", "needed", "found", "hint"} for one in said["findings"])


def test_options_about_a_cluster_want_a_platform(folder: Path) -> None:
    command = [*COMMAND, "doctor", "--context", "a", "--json"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout)["error"]["kind"]) == (2, "usage")


@contextmanager
def no_web_server() -> Iterator[str]:
    """Something that listens and speaks no HTTP, as a database or ssh does; yields host and port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.2", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.2:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("address", ["http://{other}", "http://127.0.0.2:a-port", "http://127.0.0.2:9/a path"])
def test_an_mlflow_that_is_no_web_server_is_one_finding_and_the_others_stay(place: Standing, address: str) -> None:
    with no_web_server() as other:
        place.change(place.outside.mlflow, address.format(other=other))
        (found,) = lacking(place.examine())
    assert found["name"] == "MLflow"
    assert "does not answer" in found["found"]


def test_a_registry_that_speaks_no_http_is_said_and_not_held_against_the_cluster(place: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_status", lambda *_: http.client.HTTPConnection("r:a-port"))
    findings = place.examine()
    assert lacking(findings) == []
    assert len([one for one in findings if "does not answer here: nonnumeric port" in one["found"]]) == 3


MALFORMED = {
    "no JSON": b"user:password",
    "no text": b"\xff\xfe",
    "no registries": b'{"auths": null}',
    "a list": b'[{"auths": {}}]',
    "a login that is a text": b'{"auths": {"registry": "the-registry-password"}}',
    "a login that is no base64": b'{"auths": {"registry": {"auth": "x"}}}',
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_pull_secret_that_docker_did_not_write_is_a_finding_and_the_others_stay(place: Standing, kind: str) -> None:
    place.thing(f"{CORE}/secrets/registry")["data"] = {".dockerconfigjson": base64.b64encode(MALFORMED[kind]).decode()}
    findings = place.examine()
    found = by_name(findings)["pull secret registry"]
    assert (found["ok"], found["found"]) == (False, "its key .dockerconfigjson cannot be read: it is not what docker writes")
    assert "create secret docker-registry registry" in found["hint"]
    assert "Kubeflow Pipelines" in by_name(findings)
    assert "the-registry-password" not in json.dumps(findings)


def test_a_page_in_the_place_of_the_api_server_is_said(place: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kubeconfig(tmp_path / "page", place.outside.mlflow, token=place.outside.mlflow_token)
    found = only(monkeypatch, file)
    assert "does not answer as Kubernetes does" in found["found"]


def test_an_image_that_is_not_shown_to_nobody_is_not_held_to_be_missing(place: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    place.kubernetes.unreadable = {"secrets"}
    monkeypatch.setattr(registry, "_status", lambda *_: 404)
    images = [one for one in place.examine() if one["name"].startswith("image ")]
    assert {(one["needed"], one["ok"]) for one in images} == {(False, False)}
    assert "not checked: " in images[0]["found"]
    assert "the pull secrets may not be read" in images[0]["found"]
