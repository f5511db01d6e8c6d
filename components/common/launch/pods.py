"""What the pods of a training on Kubernetes ask for: the sections `trainjob` and `rayjob` of a launcher's settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from components.common.scheduling import Claim, NodeAffinity, Toleration

NAME = r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
RESOURCE = r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
SIZE = r"^$|^[0-9]+([EPTGMK]i?)?$"
CPU = r"^$|^([0-9]*[.])?[0-9]+m?$"
OWN = "tuneline/"  # the labels and annotations by which a job is found again begin so


class Pods(BaseModel):
    """The pods of a training, one a node. What is empty is as platform.yaml says it for the pod of the step, where it says it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    namespace: str = Field("", pattern=NAME, description="Namespace of the job. Empty: that of the step's pod, or of the kubeconfig.")
    image: str = Field("", description="Image of the pods. Empty: images.training.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="When the image is pulled (only a RayJob can say so; a TrainJob's runtime does). null: Kubernetes decides."
    )
    pull_secrets: list[str] = Field([], description="Names of the secrets that the registry asks for.")
    accelerator: str = Field(
        "", pattern=RESOURCE, description="Accelerator of the nodes, for example nvidia.com/gpu or habana.ai/gaudi. Empty: none."
    )
    accelerators: int = Field(8, ge=1, description="How many of it a node; counts only where `accelerator` is set.")
    cpu: str = Field("", pattern=CPU, description="Cores a node. Empty: the namespace's default.")
    memory: str = Field("", pattern=SIZE, description="Memory a node, for example 900Gi. Empty: the namespace's default.")
    resources: dict[str, str] = Field({}, description="Further resources a node, for example {rdma/hca: '8'}.")
    shared_memory: str = Field("", pattern=SIZE, description="Size of /dev/shm, taken from memory. Empty: what the runtime gives.")
    claim: str = Field("", pattern=NAME, description="PersistentVolumeClaim that the step and the pods share. Empty: volume.claim.")
    mount: str = Field("/data", pattern=r"^/[^:]*[^:/]$", description="Where the pods see it: at the same place as the step does.")
    sub_path: str = Field("", pattern=r"^([^/:][^:]*)?$", description="Folder of the claim that is mounted. Empty: all of it.")
    claims: list[Claim] = Field(
        [], description="Further volumes, such as that of the base models, at the same places as in the step. Empty: claims."
    )
    queue: str = Field("", description="Kueue's LocalQueue that the job waits in (label kueue.x-k8s.io/queue-name). Empty: none.")
    priority: str = Field(
        "", description="Kueue's WorkloadPriorityClass (label kueue.x-k8s.io/priority-class). Empty: the queue's default."
    )
    service_account: str = Field("", pattern=NAME, description="Service account of the pods. Empty: the runtime's, or the namespace's.")
    node_selector: dict[str, str] = Field({}, description="Labels that a node must have, for example {pool: gpu}.")
    tolerations: list[Toleration] = Field([], description="Taints tolerated, for example [{key: nvidia.com/gpu, operator: Exists}].")
    node_affinity: list[NodeAffinity] = Field([], description="Conditions on nodes.")
    labels: dict[str, str] = Field({}, description="Labels of the job and its pods, for example {team: search}.")
    annotations: dict[str, str] = Field(
        {}, description="Annotations of the pods, for example {k8s.v1.cni.cncf.io/networks: rdma} for a second network through Multus."
    )
    run_as_user: int | None = Field(
        None, ge=1, le=2**31 - 1, description="User id; on NFS the one that owns the folder. null: the image's."
    )
    run_as_group: int | None = Field(None, ge=0, le=2**31 - 1, description="Group id. null: the image's.")
    capabilities: list[str] = Field(
        [],
        description="Capabilities that are added, for example [IPC_LOCK] where RDMA may not lock memory otherwise. With any, the pods do "
        "not pass the restricted Pod Security Standard.",
    )
    save_seconds: int = Field(
        180, ge=10, description="Seconds that a training has to save when its pod is evicted or its job is stopped; then it is killed."
    )
    deadline_seconds: int = Field(0, ge=0, description="Seconds that a job may run; then it ends, and a new one goes on. 0: no end.")
    keep: bool = Field(False, description="true: the object of an ended job stays, for a look at it. A cancelled one never does.")

    @field_validator("labels", "annotations")
    @classmethod
    def _are_not_ours(cls, said: dict[str, str]) -> dict[str, str]:
        for key in said:
            if key.startswith(OWN):
                raise ValueError(f"{key}: keys that begin with {OWN} are those by which a job is found again")
        return said

    @model_validator(mode="after")
    def _have_a_place_each(self) -> Self:
        places = [*([self.mount] if self.claim else []), *(one.mount for one in self.claims)]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(f"{place} is where two claims are mounted")
        return self


class TrainJob(Pods):
    """A TrainJob of Kubeflow Trainer 2.2 or later."""

    runtime: str = Field("torch-distributed", pattern=NAME, min_length=1, description="Name of the runtime, see docs/trainjob.md.")
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime", description="TrainingRuntime: one of the namespace's own."
    )


class RayJob(Pods):
    """A RayJob of KubeRay 1.3 or later: a Ray cluster of its own, whose head computes nothing."""

    ray_version: str = Field("", description="Version of Ray in the image, for example 2.60.0. Empty: unsaid.")
    head_cpu: str = Field("1", pattern=CPU, description="Cores of the head.")
    head_memory: str = Field("4Gi", pattern=SIZE, description="Memory of the head.")
    keep_seconds: int = Field(
        300, ge=0, description="Seconds after which an ended job's cluster is removed by KubeRay, where nobody is left to do it at once."
    )
