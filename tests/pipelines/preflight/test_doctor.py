"""`tuneline doctor -p` against a simulated API server with one fault at a time; the Kubernetes client is real."""

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
from typing import Any

import pytest
import yaml
from kubernetes.config import incluster_config

from components.common.reporting.check_findings import CheckResult, all_passed, check_result
from components.common.runtime.errors import TunelineError
from pipelines.config.customization_config import Customization
from pipelines.config.platform_config import Platform
from pipelines.kubeflow.preflight import cluster_api, cluster_checks, image_checks, service_checks
from pipelines.kubeflow.preflight.check_context import CheckContext
from pipelines.planning import fit_checks
from tests import kubernetes_api, kubernetes_schemas
from tests.kubernetes_api import KUEUE, Json, KubernetesApi, build_object, claim, kubeconfig, secret, storage_class
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.pipelines.preflight.simulated_cluster import (
    NAMESPACE_PATH,
    RUNTIME_PATH,
    TEAM,
    SimulatedCluster,
    build_objects,
    write_platform,
)
from tests.pipelines.test_submit import write_certificate

Fault = Callable[[SimulatedCluster], Any]
SECRET_VALUES = (
    "the-mlflow-token",
    "the-hub-token",
    "the-git-key",
    "the-registry-password",
    "the-minio-key",
    "the-cluster-token",
    "the-kubeflow-token",
)
NODES_PATH, STORAGE_CLASSES_PATH, QUEUES_PATH = (
    "/api/v1/nodes",
    "/apis/storage.k8s.io/v1/storageclasses",
    f"{KUEUE}/v1beta2",
)


@dataclass(frozen=True)
class FaultCase:
    """A fault of a cluster, and the name, message and hint of the check that must report it."""

    inject: Fault
    check: str
    message: str
    hint: str


def deny(subject: str, verb: str, resource: str) -> Fault:
    return lambda cluster: cluster.kubernetes.denied.add((subject, verb, resource))


def with_trainjob(fault: Fault) -> Fault:
    return lambda cluster: (cluster.use_trainjob(), fault(cluster))


def put_object(kind: str, item: Json) -> Fault:
    return lambda cluster: cluster.kubernetes.put(f"{NAMESPACE_PATH}/{kind}", item)


def delete_object(kind: str, name: str) -> Fault:
    return lambda cluster: cluster.remove(kind, name)


def set_field(path: str, *keys: str, value: Any) -> Fault:
    """Change one field of an object."""

    def change(cluster: SimulatedCluster) -> None:
        item = cluster.get_object(path)
        for key in keys[:-1]:
            item = item[key]
        item[keys[-1]] = value

    return change


def change_gpu_nodes(change: Callable[[Json], Any]) -> Fault:
    return lambda cluster: [change(cluster.get_object(f"{NODES_PATH}/{name}")) for name in ("gpu-1", "gpu-2")]


def uninstall(group: str) -> Fault:
    return lambda cluster: cluster.kubernetes.api_groups.pop(group)


def use_mlflow_service(ready: int) -> Fault:
    """Run MLflow as a Service of the cluster with this number of ready pods."""

    def change(cluster: SimulatedCluster) -> None:
        cluster.edit_platform(cluster.external.mlflow, "http://mlflow.ml:5000")
        namespace_path = "/api/v1/namespaces/ml"
        cluster.kubernetes.put(
            f"{namespace_path}/services",
            build_object("Service", "mlflow", namespace="ml", spec={"ports": [{"port": 5000}]}),
        )
        subsets = (
            [{"addresses": [{"ip": f"10.0.0.{n}"} for n in range(1, ready + 1)], "ports": [{"port": 5000}]}]
            if ready
            else []
        )
        cluster.kubernetes.put(
            f"{namespace_path}/endpoints", build_object("Endpoints", "mlflow", namespace="ml", subsets=subsets)
        )

    return change


def set_quotas(flavor: str = "default", cohort: str = "", **quotas: str) -> Fault:
    """Replace the quotas of the ClusterQueue; the accelerator's key is `gpu`."""
    names = {name: "nvidia.com/gpu" if name == "gpu" else name for name in quotas}
    resources = [{"name": names[name], "nominalQuota": quota} for name, quota in quotas.items()]
    flavors = [{"name": flavor, "resources": resources}]
    group = {"coveredResources": [*names.values()], "flavors": flavors}
    spec = {"resourceGroups": [group], **({"cohortName": cohort} if cohort else {})}
    return lambda cluster: cluster.get_object(f"{QUEUES_PATH}/clusterqueues/gpus")["spec"].update(spec)


def use_missing_flavor(cluster: SimulatedCluster) -> None:
    """Kueue then sets the conditions of both queues."""
    set_quotas("h100", cpu="256", memory="2Ti", gpu="16")(cluster)
    set_field(f"{QUEUES_PATH}/clusterqueues/gpus", "status", "conditions", value=INACTIVE_CONDITIONS)(cluster)
    conditions = [{**INACTIVE_CONDITIONS[0], "reason": "ClusterQueueIsInactive", "message": "Can't submit"}]
    set_field(f"{QUEUES_PATH}/namespaces/{TEAM}/localqueues/team-a", "status", value={"conditions": conditions})(
        cluster
    )


INACTIVE_CONDITIONS = [
    {
        "type": "Active",
        "status": "False",
        "reason": "FlavorNotFound",
        "message": "Can't admit new workloads: references missing ResourceFlavor(s): h100",
    }
]
WEBHOOK_MESSAGE = "images must come from registry.example"
VOLUME_EXAMPLE = "deploy/components/powerscale-nfs/volume.yaml"
FAULTS: dict[str, FaultCase] = {
    "namespace missing": FaultCase(
        lambda cluster: cluster.remove_namespace(),
        f"namespace {TEAM}",
        "does not exist",
        f"kubectl create namespace {TEAM}",
    ),
    "namespace terminating": FaultCase(
        set_field(NAMESPACE_PATH, "status", value={"phase": "Terminating"}),
        f"namespace {TEAM}",
        "terminating",
        "Set --namespace to another namespace",
    ),
    "pod security violated": FaultCase(
        lambda cluster: cluster.edit_platform("run_as_non_root: true", "run_as_non_root: null"),
        "pod security",
        "restricted is enforced, but the pods",
        "security: {run_as_user: UID, run_as_non_root: true}",
    ),
    "service account missing": FaultCase(
        delete_object("serviceaccounts", "tuneline"),
        "service account tuneline",
        "does not exist",
        f"kubectl -n {TEAM} create serviceaccount tuneline",
    ),
    "Kubeflow Trainer not installed": FaultCase(
        with_trainjob(uninstall("trainer.kubeflow.org")),
        "Kubeflow Trainer",
        "the API server has no trainjobs.trainer.kubeflow.org v1alpha1",
        "Install Kubeflow Trainer 2.2 or later",
    ),
    "training runtime missing": FaultCase(
        with_trainjob(lambda cluster: cluster.kubernetes.objects.pop(RUNTIME_PATH)),
        "runtime tuneline",
        "no ClusterTrainingRuntime has this name",
        "Apply deploy/components/runtime/training-runtime.yaml, or correct launcher.trainjob.runtime in platform.yaml; existing: none.",
    ),
    "runtime gives jobs in a queue less time than they need to save": FaultCase(
        with_trainjob(
            set_field(
                RUNTIME_PATH,
                "spec",
                "template",
                "spec",
                "replicatedJobs",
                value=[{"name": "node", "template": {"spec": {"template": {"spec": {}}}}}],
            )
        ),
        "grace period of the runtime tuneline",
        "30 s; required: 210 s (180 s of save_seconds, and 30 s to exit)",
        "Set terminationGracePeriodSeconds of the runtime tuneline to 210 or more",
    ),
    "service account may not create TrainJobs": FaultCase(
        with_trainjob(deny("pods", "create", "trainjobs")),
        "rights to manage trainjobs",
        f"tuneline may not create trainjobs in {TEAM}",
        "Apply deploy/components/launcher-trainjob/launcher-rbac.yaml",
    ),
    "service account may not write task results": FaultCase(
        deny("pods", "patch", "workflowtaskresults"),
        "rights of the service account tuneline",
        "may not patch workflowtaskresults",
        f"kubectl -n {TEAM} create rolebinding tuneline --clusterrole=kubeflow-edit --serviceaccount={TEAM}:tuneline",
    ),
    "service account may not read artifact store keys": FaultCase(
        deny("pods", "get", "secrets"),
        "rights of the service account tuneline",
        "may not get secrets mlpipeline-minio-artifact",
        "create rolebinding",
    ),
    "caller may not submit": FaultCase(
        deny("caller", "create", "runs"),
        "permission to submit",
        "ci@example.com may not create runs",
        "--clusterrole=kubeflow-pipelines-edit --user=ci@example.com",
    ),
    "claim missing": FaultCase(
        delete_object("persistentvolumeclaims", "tuneline"),
        "claim tuneline",
        "does not exist",
        f"kubectl -n {TEAM} apply -f volume.yaml",
    ),
    "additional claim missing": FaultCase(
        delete_object("persistentvolumeclaims", "corpus"),
        "claim corpus",
        "does not exist",
        "correct claims[0].claim in platform.yaml",
    ),
    "claim pending": FaultCase(
        put_object("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Pending")),
        "claim tuneline",
        "storage class powerscale has not created the volume",
        f"kubectl -n {TEAM} describe pvc tuneline",
    ),
    "storage class of claim missing": FaultCase(
        put_object(
            "persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Pending", storage_class="fast")
        ),
        "claim tuneline",
        "the storage class fast does not exist",
        "kubectl get storageclass",
    ),
    "volume of claim lost": FaultCase(
        put_object("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Lost")),
        "claim tuneline",
        "the volume is lost",
        "Restore the PersistentVolume",
    ),
    "claim terminating": FaultCase(
        set_field(
            f"{NAMESPACE_PATH}/persistentvolumeclaims/tuneline",
            "metadata",
            "deletionTimestamp",
            value="2026-01-05T10:00:00Z",
        ),
        "claim tuneline",
        "being deleted",
        "get pvc tuneline -w",
    ),
    "claim ReadWriteOnce": FaultCase(
        put_object("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteOnce")),
        "claim tuneline",
        "only one node can mount it, and the pods may run on 3 nodes",
        VOLUME_EXAMPLE,
    ),
    "claim ReadWriteOncePod": FaultCase(
        put_object("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteOncePod")),
        "claim tuneline",
        "only one pod at a time can mount it",
        VOLUME_EXAMPLE,
    ),
    "claim ReadOnlyMany": FaultCase(
        put_object("persistentvolumeclaims", claim(TEAM, "tuneline", "ReadOnlyMany")),
        "claim tuneline",
        "the pods cannot write to it",
        VOLUME_EXAMPLE,
    ),
    "scratch storage class missing": FaultCase(
        lambda cluster: cluster.kubernetes.objects.pop(f"{STORAGE_CLASSES_PATH}/local-nvme"),
        "storage class local-nvme",
        "does not exist, and data_curation request scratch volumes",
        "scratch.storage_class in platform.yaml to a class from",
    ),
    "secret missing": FaultCase(
        delete_object("secrets", "hub"),
        "secret hub",
        "does not exist",
        f"kubectl -n {TEAM} create secret generic hub --from-file=token=FILE",
    ),
    "secret of MLflow missing": FaultCase(
        delete_object("secrets", "mlflow"),
        "secret mlflow",
        "does not exist",
        f"kubectl -n {TEAM} create secret generic mlflow --from-file=token=FILE",
    ),
    "mounted secret missing": FaultCase(
        delete_object("secrets", "git-key"),
        "secret git-key",
        "does not exist",
        "create secret generic git-key --from-file=KEY=FILE",
    ),
    "secret without key": FaultCase(
        put_object("secrets", secret(TEAM, "hub", password="the-hub-token")),
        "secret hub",
        "no key token; existing keys: password",
        "Correct the key under `secrets`",
    ),
    "token with line break": FaultCase(
        put_object("secrets", secret(TEAM, "hub", token="the-hub-token\n")),
        "secret hub",
        "a line break, which HF_TOKEN would contain too",
        "printf %s VALUE > FILE",
    ),
    "token empty": FaultCase(
        put_object("secrets", secret(TEAM, "hub", token="")),
        "secret hub",
        "key token is empty",
        "printf %s VALUE > FILE",
    ),
    "secret of a notification missing": FaultCase(
        lambda cluster: cluster.edit_platform(
            "mlflow: {", "notifications: [{url: {name: notify, key: chat}}]\nmlflow: {"
        ),
        "secret notify",
        "does not exist",
        "create secret generic notify --from-file=chat=FILE",
    ),
    "config map missing": FaultCase(
        delete_object("configmaps", "git-settings"),
        "config map git-settings",
        "does not exist",
        "create configmap git-settings",
    ),
    "CA certificates under another key": FaultCase(
        put_object("configmaps", build_object("ConfigMap", "authorities", data={"ca.pem": "x"})),
        "config map authorities",
        "no key ca-bundle.crt; existing keys: ca.pem",
        "network.certificates.key",
    ),
    "CA certificates invalid": FaultCase(
        put_object("configmaps", build_object("ConfigMap", "authorities", data={"ca-bundle.crt": "<html>"})),
        "config map authorities",
        "contains no certificates",
        "-----BEGIN CERTIFICATE-----",
    ),
    "pull secret of another type": FaultCase(
        lambda cluster: [
            cluster.get_object(f"{NAMESPACE_PATH}/secrets/registry").update(type="Opaque"),
            cluster.external.images.clear(),
            cluster.edit_platform("pull_secrets: [registry]", "pull_secrets: [registry], pull_policy: Never"),
        ],
        "pull secret registry",
        "type is Opaque",
        f"kubectl -n {TEAM} create secret docker-registry registry",
    ),
    "Kueue not installed": FaultCase(
        uninstall("kueue.x-k8s.io"),
        "Kueue",
        "not installed: the API server",
        "remove queue and priority from platform.yaml",
    ),
    "queue missing": FaultCase(
        lambda cluster: cluster.edit_platform("queue: team-a", "queue: team-b"),
        "queue team-b",
        "no LocalQueue has this name",
        "the namespace has: team-a",
    ),
    "queue stopped": FaultCase(
        set_field(f"{QUEUES_PATH}/namespaces/{TEAM}/localqueues/team-a", "spec", "stopPolicy", value="Hold"),
        "queue team-a",
        "stopPolicy is Hold",
        "describe localqueue team-a",
    ),
    "cluster queue inactive": FaultCase(
        use_missing_flavor,
        "queue team-a",
        "ClusterQueue gpus is not active: FlavorNotFound",
        "kubectl describe clusterqueue gpus",
    ),
    "cluster queue without accelerator quota": FaultCase(
        set_quotas(cpu="256", memory="2Ti"),
        "queue team-a",
        "has no quota for nvidia.com/gpu",
        "to the ClusterQueue's resourceGroups",
    ),
    "cluster queue quota too small": FaultCase(
        set_quotas(cpu="256", memory="2Ti", gpu="4"),
        "queue team-a",
        "admits at most 4 of nvidia.com/gpu, but 8 is requested by fine_tuning",
        "Lower resources.fine_tuning.accelerators",
    ),
    "priority class missing": FaultCase(
        lambda cluster: cluster.edit_platform("priority: customization", "priority: urgent"),
        "priority urgent",
        "no WorkloadPriorityClass has this name",
        "the cluster has: customization",
    ),
    "no node with label": FaultCase(
        lambda cluster: cluster.edit_platform("pool: gpu", "pool: h200"),
        "nodes for fine_tuning",
        "no node has the labels pool=h200",
        "kubectl label node NODE pool=h200",
    ),
    "no node with affinity": FaultCase(
        lambda cluster: cluster.edit_platform('"79000"', '"99000"'),
        "nodes for fine_tuning",
        "no node satisfies nvidia.com/gpu.memory Gt 99000; checked 2 nodes",
        "scheduling.node_affinity",
    ),
    "taint not tolerated": FaultCase(
        change_gpu_nodes(lambda node: node["spec"]["taints"].append({"key": "maintenance", "effect": "NoExecute"})),
        "nodes for fine_tuning",
        "tainted maintenance:NoExecute",
        "{key: maintenance, operator: Exists, effect: NoExecute}",
    ),
    "nodes cordoned": FaultCase(
        change_gpu_nodes(lambda node: node["spec"].update(unschedulable=True)),
        "nodes for fine_tuning",
        "cordoned",
        "kubectl uncordon NODE",
    ),
    "too few accelerators per node": FaultCase(
        lambda cluster: cluster.edit_platform("accelerators: 8", "accelerators: 16"),
        "nodes for fine_tuning",
        "16 of nvidia.com/gpu is requested, but the largest allocatable amount on gpu-1, gpu-2 is 8",
        "Lower resources.fine_tuning.accelerators in platform.yaml to at most 8",
    ),
    "device plugin missing": FaultCase(
        change_gpu_nodes(lambda node: node["status"]["allocatable"].pop("nvidia.com/gpu")),
        "nodes for fine_tuning",
        "gpu-1, gpu-2: no node offers nvidia.com/gpu",
        "Install the device plugin of nvidia.com/gpu",
    ),
    "too little memory per node": FaultCase(
        lambda cluster: cluster.edit_platform("memory: 64Gi", "memory: 300Gi"),
        "nodes for data_curation",
        "300Gi of memory is requested, but the largest allocatable amount on cpu-1 is 256Gi",
        "Lower resources.data_curation.memory in platform.yaml to at most 256Gi",
    ),
    "limit range exceeded": FaultCase(
        set_field(
            f"{NAMESPACE_PATH}/limitranges/usual",
            "spec",
            "limits",
            value=[{"type": "Container", "max": {"memory": "256Gi"}}],
        ),
        "limit ranges",
        "allows a container at most 256Gi of memory, but 512Gi is requested by fine_tuning",
        "Lower resources.fine_tuning.memory in platform.yaml to 256Gi",
    ),
    "resource quota exceeded": FaultCase(
        set_field(f"{NAMESPACE_PATH}/resourcequotas/all", "spec", "hard", value={"requests.nvidia.com/gpu": "4"}),
        "resource quotas",
        "grants 4 of nvidia.com/gpu to the whole namespace",
        "describe resourcequota all",
    ),
    "resource quota needs a missing request": FaultCase(
        lambda cluster: [
            cluster.get_object(f"{NAMESPACE_PATH}/resourcequotas/all")["spec"]["hard"].update({"limits.cpu": "100"}),
            cluster.edit_platform('others: {cpu: "1", memory: 4Gi}', "others: {memory: 4Gi}"),
        ],
        "resource quotas",
        "requires a request in every pod, but the pods of others have no request",
        "Set resources.others.cpu",
    ),
    "webhook denies pods": FaultCase(
        lambda cluster: setattr(cluster.kubernetes, "webhook", lambda pod: WEBHOOK_MESSAGE),
        "pod dry run",
        f'admission webhook "pods.example" denied the request: {WEBHOOK_MESSAGE}',
        "Set the required values in platform.yaml",
    ),
    "MLflow token invalid": FaultCase(
        lambda cluster: setattr(cluster.external, "mlflow_token", "another"),
        "MLflow",
        "does not accept the token or password: status 401",
        "Renew the credentials in the secret",
    ),
    "MLflow token missing": FaultCase(
        lambda cluster: cluster.edit_platform("MLFLOW_TRACKING_TOKEN: {name: mlflow, key: token}, ", ""),
        "MLflow",
        "requires a token, which is not configured: status 401",
        "MLFLOW_TRACKING_TOKEN: {name: SECRET, key: KEY}",
    ),
    "MLflow unreachable": FaultCase(
        lambda cluster: cluster.edit_platform(cluster.external.mlflow, "http://127.0.0.2:9"),
        "MLflow",
        "http://127.0.0.2:9 does not answer: Connection refused",
        "mlflow.tracking_uri",
    ),
    "MLflow address of another server": FaultCase(
        lambda cluster: setattr(cluster.external, "mlflow_answers", (200, "<html>")),
        "MLflow",
        "expected the API of MLflow",
        "mlflow.tracking_uri",
    ),
    "MLflow on localhost": FaultCase(
        lambda cluster: cluster.edit_platform(cluster.external.mlflow, "http://localhost:5000"),
        "MLflow",
        "localhost refers to the pod itself",
        "http://mlflow.mlflow:5000",
    ),
    "MLflow service without pods": FaultCase(
        use_mlflow_service(0), "MLflow", "its Service has 0 ready addresses", "kubectl -n ml get pods"
    ),
    "MLflow service missing": FaultCase(
        lambda cluster: cluster.edit_platform(cluster.external.mlflow, "http://mlflow.ml.svc:5000"),
        "MLflow",
        "the namespace ml has no Service mlflow",
        "kubectl get services -A",
    ),
    "Kubeflow too old for a key": FaultCase(
        lambda cluster: setattr(cluster.kubeflow, "version", "2.16.1"),
        "Kubeflow Pipelines",
        "does not support run.timeout_seconds, run.keep_seconds",
        "Update Kubeflow Pipelines to 2.17 or later, or remove run.timeout_seconds and",
    ),
    "Kubeflow too old": FaultCase(
        lambda cluster: setattr(cluster.kubeflow, "version", "1.8.22"),
        "Kubeflow Pipelines",
        "does not support compiled pipelines",
        "Update Kubeflow Pipelines to 2.17 or later.",
    ),
    "Kubeflow token invalid": FaultCase(
        lambda cluster: setattr(cluster.kubeflow, "token", "another"),
        "Kubeflow Pipelines",
        "does not accept the credentials",
        "KF_PIPELINES_TOKEN",
    ),
    "single-user Kubeflow with namespace": FaultCase(
        lambda cluster: setattr(cluster.kubeflow, "namespaces", ()),
        "Kubeflow Pipelines",
        "the server is in single-user mode, and the namespace ",
        "Remove --namespace and KFP_NAMESPACE",
    ),
    "image missing": FaultCase(
        lambda cluster: cluster.external.images.remove(
            next(image for image in cluster.external.images if image.startswith("triton"))
        ),
        "image ",
        "not found in ",
        "Push the image",
    ),
    "registry login invalid": FaultCase(
        lambda cluster: [
            setattr(cluster.external, "login", "puller:another"),
            cluster.edit_platform("/cuda@", "/cpu@"),
            cluster.edit_platform("/triton@", "/cpu@"),
            cluster.edit_platform("sha256:" + "2" * 64, "sha256:" + "1" * 64),
            cluster.edit_platform("sha256:" + "3" * 64, "sha256:" + "1" * 64),
        ],
        "image ",
        "denies access: status 401",
        "images.pull_secrets",
    ),
}


def failed_checks(findings: list[CheckResult]) -> list[CheckResult]:
    return [finding for finding in findings if finding["needed"] and not finding["ok"]]


def index_by_name(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding["name"]: finding for finding in findings}


def test_complete_cluster_passes_all_checks(cluster: SimulatedCluster) -> None:
    findings = cluster.run_checks()
    assert [finding for finding in findings if not finding["ok"]] == []
    assert {finding["name"] for finding in findings} >= {
        "cluster",
        "user",
        "claim tuneline",
        "queue team-a",
        "pod dry run",
        "Kueue and pods",
        "MLflow",
    }
    by_name = index_by_name(findings)
    assert by_name["cluster"]["found"] == f"Kubernetes v1.34.1 at {cluster.kubernetes.url}"
    assert by_name["user"]["found"] == f"ci@example.com, in the namespace {TEAM}"
    assert by_name["nodes for fine_tuning"]["found"] == "suitable: gpu-1, gpu-2 (2 of 3 nodes)"
    assert by_name["MLflow"]["found"] == f"MLflow 3.17.0 at {cluster.external.mlflow}"
    assert by_name["pod dry run"]["found"] == "the API server accepts all 12 pods"


def test_customization_is_compared_with_the_gpus_of_the_nodes(cluster: SimulatedCluster) -> None:
    tuning = {"base_model": "hf://meta-llama/Llama-3.1-8B", "adaptation": "full", "processes": 8, "strategy": "fsdp2"}
    (check,) = fit_checks.build_cluster_checks(Customization.load(fine_tuning=tuning)).values()
    findings = index_by_name(list(check(CheckContext(cluster_api.connect(), cluster.platform, TEAM))))
    assert "of 79.6 GiB per GPU" in findings["GPU memory for fine_tuning"]["found"]  # the label of the nodes
    assert findings["GPUs for fine_tuning"]["found"].startswith("8 of 8 per node")
    assert findings["memory for triton_packaging"]["hint"].startswith("Lower resources.triton_packaging.memory")


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_one_finding_with_a_hint(cluster: SimulatedCluster, name: str) -> None:
    case = FAULTS[name]
    case.inject(cluster)
    (finding,) = failed_checks(cluster.run_checks())
    assert finding["name"].startswith(case.check), finding
    assert case.message in finding["found"], finding
    assert case.hint in finding["hint"], finding


def use_namespaced_runtime(cluster: SimulatedCluster) -> None:
    cluster.platform_text += (
        "launcher: {kind: trainjob, trainjob: {namespace: gpus, runtime: ours, runtime_kind: TrainingRuntime}}\n"
    )
    runtime = {**cluster.get_object(RUNTIME_PATH), "kind": "TrainingRuntime", "metadata": {"name": "ours"}}
    cluster.kubernetes.put("/apis/trainer.kubeflow.org/v1alpha1/namespaces/gpus/trainingruntimes", runtime)


def test_namespaced_runtime_is_found_in_the_training_namespace(cluster: SimulatedCluster) -> None:
    use_namespaced_runtime(cluster)
    assert index_by_name(cluster.run_checks())["runtime ours"]["found"] == "exists"


def test_unreadable_runtime_is_not_checked(cluster: SimulatedCluster) -> None:
    use_namespaced_runtime(cluster)
    cluster.kubernetes.deny_caller("get list", "trainingruntimes")
    findings = index_by_name(cluster.run_checks())
    assert (findings["runtime ours"]["found"], findings["runtime ours"]["needed"]) == (
        "not checked: reading trainingruntimes is forbidden",
        False,
    )
    assert findings["rights to manage trainjobs"]["ok"]


def test_each_fault_has_a_different_finding() -> None:
    findings = {(case.check, case.message) for case in FAULTS.values()}
    assert len(findings) == len(FAULTS) > 20


def test_trainjob_checks_pass_and_missing_event_rights_are_noted(cluster: SimulatedCluster) -> None:
    cluster.use_trainjob()
    by_name = index_by_name(cluster.run_checks())
    assert [by_name[name]["ok"] for name in ("Kubeflow Trainer", "runtime tuneline", "rights to manage trainjobs")] == [
        True
    ] * 3
    deny("pods", "list", "events")(cluster)
    findings = cluster.run_checks()
    assert failed_checks(findings) == []
    assert "may not list events" in index_by_name(findings)["rights to report the status of training jobs"]["found"]


def test_findings_contain_no_secret_values(cluster: SimulatedCluster) -> None:
    for change in (
        lambda: None,
        lambda: setattr(cluster.external, "mlflow_token", "x"),
        lambda: setattr(cluster.external, "login", "a:b"),
    ):
        change()
        text = json.dumps(cluster.run_checks())
        assert [
            value for value in SECRET_VALUES if value in text or base64.b64encode(value.encode()).decode() in text
        ] == []


def test_unreadable_objects_are_reported_as_not_checked(cluster: SimulatedCluster) -> None:
    cluster.kubernetes.deny_caller(
        "get list",
        "secrets",
        "nodes",
        "storageclasses",
        "limitranges",
        "clusterqueues",
        "persistentvolumeclaims",
        "services",
    )
    cluster.kubernetes.deny_caller("create", "localsubjectaccessreviews", "pods")
    findings = cluster.run_checks()
    assert all_passed(findings)
    unchecked = {finding["name"] for finding in findings if not finding["ok"]}
    assert unchecked >= {
        "secret hub",
        "pull secret registry",
        "nodes",
        "claims",
        "limits and quotas",
        "queue",
        "pod dry run",
        "MLflow",
        "rights of the service account tuneline",
    }
    assert all(
        finding["found"].startswith("not checked: ") and finding["hint"] for finding in findings if not finding["ok"]
    )


def test_read_write_once_claim_passes_if_all_pods_share_a_node(cluster: SimulatedCluster) -> None:
    cluster.kubernetes.put(f"{NAMESPACE_PATH}/persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteOnce"))
    for name in ("cpu-1", "gpu-2"):
        del cluster.kubernetes.objects[f"{NODES_PATH}/{name}"]
    cluster.get_object(f"{NODES_PATH}/gpu-1")["spec"] = {}
    findings = cluster.run_checks()
    assert failed_checks(findings) == []
    assert index_by_name(findings)["claim tuneline"]["found"].endswith("and all pods run on one node")


def test_pending_claim_that_waits_for_its_first_consumer_passes(cluster: SimulatedCluster) -> None:
    cluster.kubernetes.put(
        "/apis/storage.k8s.io/v1/storageclasses", storage_class("powerscale", "WaitForFirstConsumer")
    )
    cluster.kubernetes.put(
        f"{NAMESPACE_PATH}/persistentvolumeclaims", claim(TEAM, "tuneline", "ReadWriteMany", phase="Pending")
    )
    assert failed_checks(cluster.run_checks()) == []


def test_cluster_internal_mlflow_is_checked_by_its_service(cluster: SimulatedCluster) -> None:
    use_mlflow_service(2)(cluster)
    finding = index_by_name(cluster.run_checks())["MLflow"]
    assert (finding["ok"], finding["found"]) == (
        True,
        "only pods can reach mlflow.ml: its Service has 2 ready addresses",
    )


def test_unreachable_image_registry_does_not_fail_the_doctor(cluster: SimulatedCluster) -> None:
    cluster.edit_platform(cluster.external.registry.removeprefix("http://"), "127.0.0.1:9")
    findings = cluster.run_checks()
    assert failed_checks(findings) == []
    images = [finding for finding in findings if finding["name"].startswith("image ")]
    assert len(images) == 3
    assert all("127.0.0.1:9 does not answer: Connection refused" in finding["found"] for finding in images)


def test_kueue_without_plain_pod_support_is_noted(cluster: SimulatedCluster) -> None:
    cluster.kubernetes.kueue_takes_pods = False
    findings = cluster.run_checks()
    assert all_passed(findings)
    assert "they would bypass its queue" in index_by_name(findings)["Kueue and pods"]["found"]


def test_queue_may_borrow_quota_from_its_cohort(cluster: SimulatedCluster) -> None:
    set_quotas(cohort="all", cpu="0", memory="0", gpu="0")(cluster)
    assert failed_checks(cluster.run_checks()) == []


def test_single_user_kubeflow_uses_the_pipeline_runner_account(cluster: SimulatedCluster) -> None:
    cluster.namespace, cluster.kubeflow.namespaces = "", ()
    cluster.edit_platform("service_account: tuneline", "service_account: ''")
    for path, item in list(cluster.kubernetes.objects.items()):
        cluster.kubernetes.objects[path.replace(f"/namespaces/{TEAM}", "/namespaces/kubeflow")] = item
    cluster.kubernetes.put(
        "/api/v1/namespaces/kubeflow/serviceaccounts", build_object("ServiceAccount", "pipeline-runner")
    )
    cluster.kubernetes.denied.add(("caller", "create", "runs"))
    findings = cluster.run_checks()
    assert failed_checks(findings) == []
    assert index_by_name(findings)["service account pipeline-runner"]["ok"]


def test_multi_user_kubeflow_requires_a_namespace(cluster: SimulatedCluster, tmp_path: Path) -> None:
    cluster.namespace = ""
    kubeconfig(tmp_path / "kubeconfig", cluster.kubernetes.url, namespace=TEAM)
    (finding,) = failed_checks(cluster.run_checks())
    assert (finding["name"], finding["hint"]) == (
        "Kubeflow Pipelines",
        "Set --namespace (or KFP_NAMESPACE) to the profile's namespace.",
    )


def is_granted(rules: list[Json], method: str, path: str) -> bool:
    """Whether the RBAC rules grant a call to the API server."""
    match = kubernetes_api.ADDRESS.match(path)
    if match is None or match["kind"].startswith("selfsubject"):
        return True  # discovery and self reviews need no rights
    verb = "create" if method == "POST" else "get" if match["name"] else "list"
    if path == NAMESPACE_PATH:
        match, verb = kubernetes_api.ADDRESS.match(f"/api/v1/namespaces/{TEAM}"), "get"
    kind, group = ("namespaces", "") if path == NAMESPACE_PATH else (match["kind"], match["group"] or "")
    return any(group in rule["apiGroups"] and kind in rule["resources"] and verb in rule["verbs"] for rule in rules)


def test_example_rbac_grants_exactly_the_rights_of_the_doctor(cluster: SimulatedCluster) -> None:
    manifests = list(
        yaml.safe_load_all((ROOT / "deploy" / "components" / "doctor" / "doctor-rbac.yaml").read_text(encoding="utf-8"))
    )
    assert [problem for manifest in manifests for problem in kubernetes_schemas.problems(manifest)] == []
    rules = [rule for manifest in manifests for rule in manifest.get("rules", [])]
    use_mlflow_service(1)(cluster)
    cluster.edit_platform(
        "queue: team-a, priority: customization", "queue: team-b, priority: urgent"
    )  # the doctor lists the existing ones
    cluster.use_trainjob()
    cluster.edit_platform("runtime: tuneline}", "runtime: another}")
    cluster.run_checks()
    cluster.edit_platform("runtime: another}", "runtime: another, runtime_kind: TrainingRuntime}")
    cluster.run_checks()
    cluster.edit_platform("queue: team-b, priority: urgent", "queue: team-a, priority: customization")
    cluster.run_checks()
    assert [call for call in cluster.kubernetes.calls if not is_granted(rules, *call)] == []
    for rule in rules:
        for kind, verb in ((kind, verb) for kind in rule["resources"] for verb in rule["verbs"]):
            fewer = [
                {**other, "resources": [k for k in other["resources"] if k != kind or verb not in other["verbs"]]}
                for other in rules
            ]
            assert [call for call in cluster.kubernetes.calls if not is_granted(fewer, *call)], (
                f"{verb} {kind} is not needed"
            )


# The objects of the simulated cluster


@pytest.mark.parametrize("version", kubernetes_schemas.versions()[-1:])
def test_objects_of_the_simulated_cluster_match_the_schemas(version: str) -> None:
    core_objects = [
        item for item in build_objects().values() if not item["apiVersion"].startswith(("kueue.", "trainer."))
    ]
    assert {item["kind"] for item in core_objects} >= {
        "Namespace",
        "Node",
        "Secret",
        "ConfigMap",
        "PersistentVolumeClaim",
        "LimitRange",
        "StorageClass",
    }
    for item in core_objects:
        problems = kubernetes_schemas.problems(item) + schema_problems(item, version)
        assert problems == [], item["metadata"]["name"]


def schema_problems(item: Json, version: str) -> list[str]:
    """Check an object of the core group; kubernetes_schemas reads only the schemas of that group."""
    return kubernetes_schemas.schema_problems(item, version) if item["apiVersion"] == "v1" else []


# Unreachable clusters


def run_doctor(cwd: Path, **extra: str) -> CheckResult:
    """Run the doctor in a shell and return its only finding."""
    inherited = environment(HOME=str(cwd), **extra)
    inherited.pop("KUBERNETES_SERVICE_HOST", None)
    command = [*COMMAND, "doctor", "-p", "platform.yaml", "--json"]
    process = subprocess.run(command, cwd=cwd, env=inherited, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "Traceback" not in process.stderr
    answer = json.loads(process.stdout)
    (finding,) = answer["findings"]
    assert not answer["ok"]
    return dict(finding)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "platform.yaml").write_text("volume: {claim: tuneline}\n")
    return tmp_path


def test_refused_connection_is_reported(folder: Path) -> None:
    file = kubeconfig(folder / "kubeconfig", "https://127.0.0.1:9")
    finding = run_doctor(cwd=folder, KUBECONFIG=str(file))
    assert finding["found"] == "https://127.0.0.1:9 does not answer: Connection refused"
    assert "set KUBECONFIG, choose --context" in finding["hint"]


def test_silent_server_is_reported_within_ten_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        start = time.monotonic()
        finding = check_connection(
            monkeypatch, kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{server.getsockname()[1]}")
        )
        seconds = time.monotonic() - start
    assert "does not answer" in finding["found"]
    assert seconds < 10


def test_hanging_credential_plugin_times_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kubeconfig(folder / "kubeconfig", "https://127.0.0.1:9")
    run = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sleep",
        "args": ["20"],
        "interactiveMode": "Never",
    }
    file.write_text(file.read_text().replace("token: the-cluster-token", f"exec: {json.dumps(run)}"))
    monkeypatch.setattr(cluster_api, "FIRST_CALL_TIMEOUT_SECONDS", 1.0)
    assert check_connection(monkeypatch, file)["found"] == "the cluster does not answer within 1 s"


def check_connection(monkeypatch: pytest.MonkeyPatch, file: Path, context: str = "") -> CheckResult:
    """Return the only finding with this kubeconfig, a failed one."""
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (finding,) = cluster_checks.check_cluster(Platform(), context=context)
    assert not all_passed([finding])
    assert finding["hint"]
    return finding


def test_server_that_stops_answering_fails_the_doctor(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_api, "READ_TIMEOUT_SECONDS", 0.2)
    cluster.kubernetes.silent_about = "nodes"
    (finding,) = failed_checks(cluster.run_checks())
    assert finding["name"] == "cluster"
    assert finding["found"].startswith(f"the remaining checks were skipped: {cluster.kubernetes.url} does not answer: ")


def test_silent_kubeflow_is_reported_and_stdout_still_works(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_checks, "SERVER_TIMEOUT_SECONDS", 1.0)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        cluster.kubeflow.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (finding,) = failed_checks(cluster.run_checks())
        print("seen")
    assert (finding["name"], capsys.readouterr().out) == ("Kubeflow Pipelines", "seen\n")
    assert "does not answer within 1 s" in finding["found"]
    assert "--endpoint" in finding["hint"]


def test_expired_token_is_reported(cluster: SimulatedCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check_connection(monkeypatch, kubeconfig(folder / "old", cluster.kubernetes.url, token="yesterday"))
    assert finding["found"] == f"{cluster.kubernetes.url} does not accept the credentials: Unauthorized"
    assert "Log in to the cluster again" in finding["hint"]


def test_missing_kubeconfig_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "no cluster is configured: no kubeconfig exists, and the command does not run in a pod with a service account token"
    assert check_connection(monkeypatch, folder / "nothing")["found"] == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not YAML: line 1"),
        ("token: the-cluster-token\n\tx", "is not YAML: line 2"),
        ("[]", "contains no list of clusters"),
        ("clusters: []\ncontexts: []\nusers: []\n", "kube-config"),
        (
            "clusters: [{name: a, cluster: the-cluster-token}]\ncontexts: 5\nusers: []\ncurrent-context: a\n",
            "cannot be used",
        ),
        ("", "contains no list of clusters"),
    ],
)
def test_invalid_kubeconfig_is_reported_without_its_content(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    file = folder / "kubeconfig"
    file.write_text(content)
    finding = check_connection(monkeypatch, file)
    assert finding["found"].startswith(f"the kubeconfig {file} cannot be used: ")
    assert message in finding["found"]
    assert "the-cluster-token" not in json.dumps(finding)


def test_unknown_context_is_reported(
    cluster: SimulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = check_connection(monkeypatch, tmp_path / "kubeconfig", "production")
    assert "production" in finding["found"]
    assert "--context" in finding["hint"]


def test_pod_connects_with_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = write_certificate(tmp_path / "server.pem")
    (tmp_path / "token").write_text("the-cluster-token")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for name, value in (("TOKEN", "token"), ("CERT", "server.pem")):
        monkeypatch.setattr(incluster_config, f"SERVICE_{name}_FILENAME", str(tmp_path / value))
    with kubernetes_api.serving(KubernetesApi(build_objects()), pem) as api:
        api.token = "the-cluster-token"
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        connection = cluster_api.connect()
        assert (connection.address, connection.own_namespace) == (api.url, "kubeflow")
        api.token = "renewed"
        with pytest.raises(TunelineError, match="does not accept the credentials"):
            connection.get("/api/v1/nodes")


def test_text_output_lists_findings_and_exits_1(cluster: SimulatedCluster, tmp_path: Path) -> None:
    write_platform(cluster, tmp_path)
    cluster.remove("secrets", "hub")
    settings = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "KF_PIPELINES_TOKEN": "the-kubeflow-token"}
    command = [*COMMAND, "doctor", "-p", "platform.yaml", "--namespace", TEAM, "--endpoint", cluster.kubeflow.url]
    process = subprocess.run(
        command, cwd=tmp_path, env=environment(**settings), capture_output=True, text=True, timeout=60, check=False
    )
    lines = process.stdout.splitlines()
    assert process.returncode == 1
    index = lines.index("MISSING  secret hub: does not exist")
    assert (
        lines[index + 1]
        == f"         Create the secret: kubectl -n {TEAM} create secret generic hub --from-file=token=FILE"
    )
    assert "ok       claim tuneline: ReadWriteMany, 10Ti, Bound" in lines


def test_finding_that_a_run_does_not_need_is_a_warning() -> None:
    from pipelines.cli.application import format_check

    result = check_result("nodes", False, "1 of 4 GPUs is idle", "Request 3.", needed=False)
    assert format_check(result) == "warning  nodes: 1 of 4 GPUs is idle\n         Request 3."


def test_complete_cluster_exits_0(
    cluster: SimulatedCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.cli.main import app

    arguments = ["-p", str(write_platform(cluster, tmp_path)), "--namespace", TEAM, "--endpoint", cluster.kubeflow.url]
    assert app(["doctor", *arguments, "--json"], standalone_mode=False) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert all(set(finding) == {"name", "ok", "needed", "found", "hint"} for finding in report["findings"])


def test_cluster_options_require_a_platform(folder: Path) -> None:
    command = [*COMMAND, "doctor", "--context", "a", "--json"]
    process = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, json.loads(process.stdout)["error"]["kind"]) == (2, "usage")


@contextmanager
def serve_ssh_banner() -> Iterator[str]:
    """Serve a protocol other than HTTP, and yield host and port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.2", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.2:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("address", ["http://{other}", "http://127.0.0.2:a-port", "http://127.0.0.2:9/a path"])
def test_invalid_mlflow_address_has_one_finding(cluster: SimulatedCluster, address: str) -> None:
    with serve_ssh_banner() as host:
        cluster.edit_platform(cluster.external.mlflow, address.format(other=host))
        (finding,) = failed_checks(cluster.run_checks())
    assert finding["name"] == "MLflow"
    assert "does not answer" in finding["found"]


def test_non_http_image_registry_does_not_fail_the_doctor(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_checks, "_request_manifest", lambda *_: http.client.HTTPConnection("r:a-port"))
    findings = cluster.run_checks()
    assert failed_checks(findings) == []
    assert len([finding for finding in findings if "does not answer: nonnumeric port" in finding["found"]]) == 3


MALFORMED_PULL_SECRETS = {
    "no JSON": b"user:password",
    "no text": b"\xff\xfe",
    "no registries": b'{"auths": null}',
    "a list": b'[{"auths": {}}]',
    "a login that is a text": b'{"auths": {"registry": "the-registry-password"}}',
    "a login that is no base64": b'{"auths": {"registry": {"auth": "x"}}}',
}


@pytest.mark.parametrize("kind", MALFORMED_PULL_SECRETS)
def test_malformed_pull_secret_has_one_finding(cluster: SimulatedCluster, kind: str) -> None:
    cluster.get_object(f"{NAMESPACE_PATH}/secrets/registry")["data"] = {
        ".dockerconfigjson": base64.b64encode(MALFORMED_PULL_SECRETS[kind]).decode()
    }
    findings = cluster.run_checks()
    finding = index_by_name(findings)["pull secret registry"]
    assert (finding["ok"], finding["found"]) == (
        False,
        "key .dockerconfigjson is not in the format of Docker's config.json",
    )
    assert "create secret docker-registry registry" in finding["hint"]
    assert "Kubeflow Pipelines" in index_by_name(findings)
    assert "the-registry-password" not in json.dumps(findings)


def test_server_other_than_kubernetes_is_reported(
    cluster: SimulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kubeconfig(tmp_path / "page", cluster.external.mlflow, token=cluster.external.mlflow_token)
    finding = check_connection(monkeypatch, file)
    assert "expected a JSON object of the API of Kubernetes" in finding["found"]


def test_private_image_is_not_checked_without_readable_pull_secrets(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kubernetes.deny_caller("get", "secrets")
    monkeypatch.setattr(image_checks, "_request_manifest", lambda *_: 404)
    images = [finding for finding in cluster.run_checks() if finding["name"].startswith("image ")]
    assert {(finding["needed"], finding["ok"]) for finding in images} == {(False, False)}
    assert "not checked: " in images[0]["found"]
    assert "the caller may not read the pull secrets" in images[0]["found"]
