"""A cluster that lacks nothing for a platform.yaml which names everything, with all that stands around it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import certifi
import yaml

from pipelines import platform
from pipelines.cluster import doctor
from pipelines.findings import Finding
from pipelines.platform import Platform
from tests import kfp_api, kubernetes_api
from tests.kfp_api import KfpApi
from tests.kubernetes_api import Json, KubernetesApi, Outside, claim, kueue, named, node, secret, storage_class

TEAM = "team-a"
CORE = f"/api/v1/namespaces/{TEAM}"
RUNTIME = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/tuneline"
DIGESTS = [f"sha256:{digit * 64}" for digit in "1234"]
GPU = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
QUOTAS = {"cpu": "256", "memory": "2Ti", "nvidia.com/gpu": "16"}
KFP_TOKEN = "the-kubeflow-token"
FILE = """
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
class Standing:
    """A cluster, what is around it, and the platform that describes both. A test breaks one thing."""

    kubernetes: KubernetesApi
    outside: Outside
    kubeflow: KfpApi
    text: str
    namespace: str = TEAM

    @property
    def platform(self) -> Platform:
        """The platform.yaml as it is read."""
        return Platform.model_validate(yaml.safe_load(self.text))

    def change(self, old: str, new: str) -> None:
        """Change the platform.yaml."""
        assert old in self.text
        self.text = self.text.replace(old, new)

    def train_elsewhere(self) -> None:
        """Have the training run as a TrainJob."""
        self.text += "launcher: {kind: trainjob, trainjob: {runtime: tuneline}}\n"

    def remove(self, kind: str, name: str) -> None:
        """Take an object out of the namespace."""
        del self.kubernetes.objects[f"{CORE}/{kind}/{name}"]

    def thing(self, path: str) -> Json:
        """An object, to be changed."""
        return self.kubernetes.objects[path]

    def examine(self) -> list[Finding]:
        """What the doctor finds."""
        return doctor.examine(self.platform, named=self.namespace, endpoint=self.kubeflow.url)


def authority() -> str:
    """One of the authorities that everybody trusts, as PEM."""
    mark = "-----END CERTIFICATE-----"
    return Path(certifi.where()).read_text(encoding="utf-8").partition(mark)[0] + mark


def objects() -> dict[str, Json]:
    """Everything that is in the cluster, by path."""
    login = json.dumps({"auths": {"127.0.0.1": {"username": "puller", "password": "the-registry-password"}}})
    inside = {
        "serviceaccounts": [named("ServiceAccount", "tuneline", namespace=TEAM)],
        "persistentvolumeclaims": [claim(TEAM, "tuneline", "ReadWriteMany"), claim(TEAM, "corpus", "ReadOnlyMany")],
        "secrets": [
            secret(TEAM, "mlflow", token="the-mlflow-token"),
            secret(TEAM, "hub", token="the-hub-token"),
            secret(TEAM, "git-key", key="the-git-key\n"),
            secret(TEAM, "registry", "kubernetes.io/dockerconfigjson", __dockerconfigjson=login),
            secret(TEAM, "mlpipeline-minio-artifact", accesskey="minio", secretkey="the-minio-key"),
        ],
        "configmaps": [
            named("ConfigMap", "git-settings", namespace=TEAM, data={"known_hosts": "git.example ssh-ed25519 AAAA"}),
            named("ConfigMap", "authorities", namespace=TEAM, data={"ca-bundle.crt": authority()}),
        ],
        "limitranges": [named("LimitRange", "usual", namespace=TEAM, spec={"limits": [{"type": "Container", "max": {"memory": "1Ti"}}]})],
        "resourcequotas": [named("ResourceQuota", "all", namespace=TEAM, spec={"hard": {"requests.nvidia.com/gpu": "16", "pods": "100"}})],
    }
    found = {f"{CORE}/{kind}/{one['metadata']['name']}": one for kind, things in inside.items() for one in things}
    restricted = {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    found[CORE] = named("Namespace", TEAM, metadata=restricted, status={"phase": "Active"})
    for one in (storage_class("powerscale"), storage_class("local-nvme", "WaitForFirstConsumer")):
        found[f"/apis/storage.k8s.io/v1/storageclasses/{one['metadata']['name']}"] = one
    gpus = {"pool": "gpu", "nvidia.com/gpu.memory": "81559"}
    for one in (
        node("cpu-1", cpu="64", memory="256Gi"),
        node("gpu-1", gpus, GPU, cpu="128", memory="2000Gi", nvidia__gpu="8"),
        node("gpu-2", gpus, GPU, cpu="128", memory="2000Gi", nvidia__gpu="8"),
    ):
        found[f"/api/v1/nodes/{one['metadata']['name']}"] = one
    found[RUNTIME] = named("ClusterTrainingRuntime", "tuneline", "trainer.kubeflow.org/v1alpha1")
    return found | kueue(TEAM, "team-a", "customization", QUOTAS)


@contextmanager
def standing() -> Iterator[Standing]:
    """The whole cluster in threads of this process."""
    kubernetes, outside = KubernetesApi(objects()), Outside()
    kubeflow = KfpApi(token=KFP_TOKEN, namespaces=(TEAM,))
    with ExitStack() as stack:
        stack.enter_context(kubernetes_api.serving(kubernetes))
        stack.enter_context(kubernetes_api.surroundings(outside))
        stack.enter_context(kfp_api.serving(kubeflow))
        host = outside.registry.removeprefix("http://")
        auths: dict[str, Any] = {"auths": {host: {"username": "puller", "password": "the-registry-password"}}}
        kubernetes.put(f"{CORE}/secrets", secret(TEAM, "registry", "kubernetes.io/dockerconfigjson", __dockerconfigjson=json.dumps(auths)))
        outside.images = {f"{name}/{digest}" for name, digest in zip(("cpu", "cuda", "triton"), DIGESTS, strict=False)}
        yield Standing(kubernetes, outside, kubeflow, FILE.format(*DIGESTS, registry=host, mlflow=outside.mlflow))


def written(place: Standing, folder: Path) -> Path:
    """The platform.yaml as a file, as `tuneline doctor -p` reads it."""
    file = folder / "platform.yaml"
    file.write_text(place.text)
    platform.load(file)
    return file
