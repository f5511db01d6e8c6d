"""A simulated cluster that passes every check for a platform.yaml with every key, with its registry, MLflow and Kubeflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import certifi
import yaml

from components.common.artifacts.code_digest import ROOT
from components.common.reporting.check_findings import CheckResult
from pipelines.config import platform_config
from pipelines.config.platform_config import Platform
from pipelines.kubeflow.preflight import cluster_checks
from tests import kfp_api, kubernetes_api
from tests.kfp_api import KfpApi
from tests.kubernetes_api import (
    ExternalServices,
    Json,
    KubernetesApi,
    build_object,
    claim,
    kueue,
    node,
    secret,
    storage_class,
)

TEAM = "team-a"
NAMESPACE_PATH = f"/api/v1/namespaces/{TEAM}"
RUNTIME_PATH = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/tuneline"
DIGESTS = [f"sha256:{digit * 64}" for digit in "1234"]
GPU_TAINTS = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
QUOTAS = {"cpu": "256", "memory": "2Ti", "nvidia.com/gpu": "16"}
KFP_TOKEN = "the-kubeflow-token"
PLATFORM_TEMPLATE = """
images: {{curation: "{registry}/cpu@{0}", training: "{registry}/cuda@{1}", evaluation: "{registry}/cuda@{1}",
  serving: "{registry}/triton@{2}", pull_secrets: [registry], pinned: true}}
volume: {{claim: tuneline, mount: /data}}
claims: [{{claim: corpus, mount: /corpus}}]
scratch: {{storage_class: local-nvme}}
mlflow: {{tracking_uri: "{mlflow}"}}
secrets: {{MLFLOW_TRACKING_TOKEN: {{name: mlflow, key: token}}, HF_TOKEN: {{name: hub, key: token}}}}
secret_files: [{{name: git-key, mount: /etc/git-key}}]
config_files: [{{name: git-settings, mount: /etc/git-settings}}]
network: {{certificates: {{config_map: authorities}}}}
security: {{run_as_user: 20001, run_as_non_root: true}}
scheduling: {{queue: team-a, priority: customization}}
resources:
  data_curation: {{cpu: "16", memory: 64Gi, scratch: 100Gi}}
  fine_tuning: {{cpu: "32", memory: 512Gi, accelerator: nvidia.com/gpu, accelerators: 8, shared_memory: 64Gi, scheduling: &gpu {{
    node_selector: {{pool: gpu}}, tolerations: [{{key: nvidia.com/gpu, operator: Exists}}],
    node_affinity: [{{key: nvidia.com/gpu.memory, operator: Gt, values: ["79000"]}}]}}}}
  evaluation: {{cpu: "8", memory: 128Gi, accelerator: nvidia.com/gpu, scheduling: *gpu}}
  triton_packaging: {{cpu: "8", memory: 128Gi, accelerator: nvidia.com/gpu, scheduling: *gpu}}
  others: {{cpu: "1", memory: 4Gi}}
run: {{service_account: tuneline, timeout_seconds: 86400, keep_seconds: 600000}}
"""


@dataclass
class SimulatedCluster:
    """A cluster, the services outside it, and the platform.yaml for both; each test injects one fault."""

    kubernetes: KubernetesApi
    external: ExternalServices
    kubeflow: KfpApi
    platform_text: str
    namespace: str = TEAM

    @property
    def platform(self) -> Platform:
        """The parsed platform.yaml."""
        return Platform.model_validate(yaml.safe_load(self.platform_text))

    def edit_platform(self, old: str, new: str) -> None:
        """Replace text in the platform.yaml."""
        assert old in self.platform_text
        self.platform_text = self.platform_text.replace(old, new)

    def use_trainjob(self) -> None:
        """Run the training as a TrainJob."""
        self.platform_text += "launcher: {kind: trainjob, trainjob: {runtime: tuneline}}\n"

    def remove(self, kind: str, name: str) -> None:
        """Remove an object from the namespace."""
        del self.kubernetes.objects[f"{NAMESPACE_PATH}/{kind}/{name}"]

    def remove_namespace(self) -> None:
        """Remove the namespace with its objects."""
        for path in [path for path in self.kubernetes.objects if f"/namespaces/{TEAM}/" in f"{path}/"]:
            del self.kubernetes.objects[path]

    def get_object(self, path: str) -> Json:
        """Return the stored object, which a test may change in place."""
        return self.kubernetes.objects[path]

    def run_checks(self) -> list[CheckResult]:
        """Run the checks of `tuneline doctor`."""
        return cluster_checks.check_cluster(self.platform, namespace=self.namespace, endpoint=self.kubeflow.url)


def read_ca_certificate() -> str:
    """Return one public CA certificate as PEM."""
    end_marker = "-----END CERTIFICATE-----"
    return Path(certifi.where()).read_text(encoding="utf-8").partition(end_marker)[0] + end_marker


def build_objects() -> dict[str, Json]:
    """Return all objects of the cluster by path."""
    login = json.dumps({"auths": {"127.0.0.1": {"username": "puller", "password": "the-registry-password"}}})
    namespaced = {
        "serviceaccounts": [build_object("ServiceAccount", "tuneline", namespace=TEAM)],
        "persistentvolumeclaims": [claim(TEAM, "tuneline", "ReadWriteMany"), claim(TEAM, "corpus", "ReadOnlyMany")],
        "secrets": [
            secret(TEAM, "mlflow", token="the-mlflow-token"),
            secret(TEAM, "hub", token="the-hub-token"),
            secret(TEAM, "git-key", key="the-git-key\n"),
            secret(TEAM, "registry", "kubernetes.io/dockerconfigjson", __dockerconfigjson=login),
            secret(TEAM, "mlpipeline-minio-artifact", accesskey="minio", secretkey="the-minio-key"),
        ],
        "configmaps": [
            build_object(
                "ConfigMap", "git-settings", namespace=TEAM, data={"known_hosts": "git.example ssh-ed25519 AAAA"}
            ),
            build_object("ConfigMap", "authorities", namespace=TEAM, data={"ca-bundle.crt": read_ca_certificate()}),
        ],
        "limitranges": [
            build_object(
                "LimitRange",
                "usual",
                namespace=TEAM,
                spec={"limits": [{"type": "Container", "max": {"memory": "1Ti"}}]},
            )
        ],
        "resourcequotas": [
            build_object(
                "ResourceQuota", "all", namespace=TEAM, spec={"hard": {"requests.nvidia.com/gpu": "16", "pods": "100"}}
            )
        ],
    }
    by_path = {
        f"{NAMESPACE_PATH}/{kind}/{item['metadata']['name']}": item
        for kind, items in namespaced.items()
        for item in items
    }
    restricted = {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    by_path[NAMESPACE_PATH] = build_object("Namespace", TEAM, metadata=restricted, status={"phase": "Active"})
    for item in (storage_class("powerscale"), storage_class("local-nvme", "WaitForFirstConsumer")):
        by_path[f"/apis/storage.k8s.io/v1/storageclasses/{item['metadata']['name']}"] = item
    gpus = {"pool": "gpu", "nvidia.com/gpu.memory": "81559"}
    for item in (
        node("cpu-1", cpu="64", memory="256Gi"),
        node("gpu-1", gpus, GPU_TAINTS, cpu="128", memory="2000Gi", nvidia__gpu="8"),
        node("gpu-2", gpus, GPU_TAINTS, cpu="128", memory="2000Gi", nvidia__gpu="8"),
    ):
        by_path[f"/api/v1/nodes/{item['metadata']['name']}"] = item
    runtime = yaml.safe_load((ROOT / "deploy/components/runtime/training-runtime.yaml").read_text(encoding="utf-8"))
    by_path[RUNTIME_PATH] = build_object("ClusterTrainingRuntime", "tuneline", "trainer.kubeflow.org/v1alpha1")
    by_path[RUNTIME_PATH]["spec"] = runtime["spec"]
    return by_path | kueue(TEAM, "team-a", "customization", QUOTAS)


@contextmanager
def serve_cluster() -> Iterator[SimulatedCluster]:
    """Run the cluster and its services in threads of this process."""
    kubernetes, external = KubernetesApi(build_objects()), ExternalServices()
    kubeflow = KfpApi(token=KFP_TOKEN, namespaces=(TEAM,))
    with ExitStack() as stack:
        stack.enter_context(kubernetes_api.serving(kubernetes))
        stack.enter_context(kubernetes_api.serve_external_services(external))
        stack.enter_context(kfp_api.serving(kubeflow))
        host = external.registry.removeprefix("http://")
        auths: dict[str, Any] = {"auths": {host: {"username": "puller", "password": "the-registry-password"}}}
        kubernetes.put(
            f"{NAMESPACE_PATH}/secrets",
            secret(TEAM, "registry", "kubernetes.io/dockerconfigjson", __dockerconfigjson=json.dumps(auths)),
        )
        external.images = {f"{name}/{digest}" for name, digest in zip(("cpu", "cuda", "triton"), DIGESTS, strict=False)}
        yield SimulatedCluster(
            kubernetes, external, kubeflow, PLATFORM_TEMPLATE.format(*DIGESTS, registry=host, mlflow=external.mlflow)
        )


def write_platform(cluster: SimulatedCluster, folder: Path) -> Path:
    """Write the platform.yaml for `tuneline doctor -p`, and check that it loads."""
    file = folder / "platform.yaml"
    file.write_text(cluster.platform_text)
    platform_config.load_platform(file)
    return file
