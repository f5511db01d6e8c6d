"""The sections `launcher.trainjob` and `launcher.rayjob` of platform.yaml: the pods of a training run on Kubernetes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from components.common.launch.kubernetes.pod_scheduling import (
    MOUNT_PATH_PATTERN,
    SUB_PATH_PATTERN,
    Claim,
    NodeAffinity,
    StrictModel,
    Toleration,
)

NAME_PATTERN = r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
RESOURCE_PATTERN = r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
QUANTITY_PATTERN = r"^$|^[0-9]+([EPTGMK]i?)?$"
CPU_PATTERN = r"^$|^([0-9]*[.])?[0-9]+m?$"
LABEL_PREFIX = "tuneline/"  # of the labels and annotations by which the launcher finds a job


class PodSettings(StrictModel):
    """The pods of a training run, one per node.

    In a Kubeflow step, empty values default to those of the step's pod (platform.yaml).
    """

    namespace: str = Field(
        "",
        pattern=NAME_PATTERN,
        description="Namespace of the job. Empty: the namespace of the step's pod or of the kubeconfig.",
    )
    image: str = Field("", description="Image of the pods. Empty: images.training.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None,
        description="Image pull policy of a RayJob; a TrainJob uses the policy of its runtime. null: "
        "images.pull_policy, or the default of Kubernetes.",
    )
    pull_secrets: list[str] = Field([], description="Names of the image pull secrets. Empty: images.pull_secrets.")
    accelerator: str = Field(
        "",
        pattern=RESOURCE_PATTERN,
        description="Accelerator of the nodes, for example nvidia.com/gpu or habana.ai/gaudi. Empty: no accelerator.",
    )
    accelerators: int = Field(8, ge=1, description="Number of accelerators per node; used if `accelerator` is set.")
    cpu: str = Field("", pattern=CPU_PATTERN, description="CPU cores per node. Empty: the namespace's default.")
    memory: str = Field(
        "", pattern=QUANTITY_PATTERN, description="Memory per node, for example 900Gi. Empty: the namespace's default."
    )
    resources: dict[str, str] = Field({}, description="Additional resources per node, for example {rdma/hca: '8'}.")
    shared_memory: str = Field(
        "", pattern=QUANTITY_PATTERN, description="Size of /dev/shm, counted as memory. Empty: the runtime's default."
    )
    claim: str = Field(
        "",
        pattern=NAME_PATTERN,
        description="PersistentVolumeClaim that the step and the pods share. Empty: volume.claim, with volume.mount and "
        "volume.sub_path instead of `mount` and `sub_path`.",
    )
    mount: str = Field(
        "/data", pattern=MOUNT_PATH_PATTERN, description="Mount path of the claim, the same as in the step."
    )
    sub_path: str = Field(
        "", pattern=SUB_PATH_PATTERN, description="Folder of the claim to mount. Empty: the whole claim."
    )
    claims: list[Claim] = Field(
        [],
        description="Additional volumes, for example of the base models, at the same mount paths as in the step. "
        "Empty: the platform's `claims`.",
    )
    queue: str = Field(
        "",
        description="LocalQueue of Kueue (label kueue.x-k8s.io/queue-name). Empty: the queue of the step's pod, or no queue.",
    )
    priority: str = Field(
        "",
        description="WorkloadPriorityClass of Kueue (label kueue.x-k8s.io/priority-class). Empty: the class of the step's pod. "
        "Without a class, Kueue uses the priority of the pods, by default 0.",
    )
    service_account: str = Field(
        "",
        pattern=NAME_PATTERN,
        description="Service account of the pods. Empty: the default of the runtime or the namespace.",
    )
    node_selector: dict[str, str] = Field(
        {}, description="Required labels of the nodes, for example {pool: gpu}. Empty: those of the step's pod."
    )
    tolerations: list[Toleration] = Field(
        [],
        description="Tolerations of node taints, for example [{key: nvidia.com/gpu, operator: Exists}]. Empty: those of "
        "the step's pod.",
    )
    node_affinity: list[NodeAffinity] = Field(
        [], description="Conditions on the labels of nodes. Empty: those of the step's pod."
    )
    labels: dict[str, str] = Field(
        {}, description="Labels of the job and its pods, for example {team: search}. Empty: those of the step's pod."
    )
    annotations: dict[str, str] = Field(
        {},
        description="Annotations of the pods, for example {k8s.v1.cni.cncf.io/networks: rdma} for a second network "
        "through Multus. Empty: those of the step's pod.",
    )
    run_as_user: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="User ID of the containers; on NFS, the folder's owner. null: security.run_as_user, or the user set in "
        "the image.",
    )
    run_as_group: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Group ID of the containers. null: security.run_as_group. If both are null: the group set in the image, "
        "or 0 if run_as_user is set.",
    )
    capabilities: list[str] = Field(
        [],
        description="Linux capabilities to add, for example [IPC_LOCK] for RDMA. Added capabilities violate the "
        "restricted Pod Security Standard.",
    )
    save_seconds: int = Field(
        180,
        ge=10,
        description="Grace period in seconds for training to save a checkpoint after a pod is evicted or the job is stopped. "
        "A TrainJob with a queue uses the grace period of its runtime.",
    )
    deadline_seconds: int = Field(
        0, ge=0, description="Time limit of a job in seconds, after which a new job resumes training. 0: no limit."
    )
    keep: bool = Field(
        False, description="Keep the object of an ended job for inspection. A cancelled job is always deleted."
    )

    @field_validator("labels", "annotations")
    @classmethod
    def _reject_own_keys(cls, values: dict[str, str]) -> dict[str, str]:
        for key in values:
            if key.startswith(LABEL_PREFIX):
                raise ValueError(f"{key}: keys that begin with {LABEL_PREFIX} are reserved")
        return values

    @model_validator(mode="after")
    def _check_mounts(self) -> Self:
        mounts = [*([self.mount] if self.claim else []), *(claim.mount for claim in self.claims)]
        for mount in mounts:
            if mounts.count(mount) > 1:
                raise ValueError(
                    f"{mount} is the mount path of two or more claims; expected a separate path for each claim"
                )
        return self


class TrainJobSettings(PodSettings):
    """A TrainJob of Kubeflow Trainer 2.2 or later."""

    runtime: str = Field(
        "torch-distributed",
        pattern=NAME_PATTERN,
        min_length=1,
        description="Name of the runtime, see docs/how-to/trainjob.md.",
    )
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime", description="Kind of the runtime. TrainingRuntime: a runtime in the job's namespace."
    )


class RayJobSettings(PodSettings):
    """A RayJob of KubeRay 1.3 or later: a Ray cluster for one training run. The head runs no training process."""

    ray_version: str = Field(
        "", description="Version of Ray in the image, for example 2.60.0. Empty: no rayVersion in the manifest."
    )
    head_cpu: str = Field("1", pattern=CPU_PATTERN, description="CPU cores of the head.")
    head_memory: str = Field("4Gi", pattern=QUANTITY_PATTERN, description="Memory of the head.")
    keep_seconds: int = Field(
        300,
        ge=0,
        description="Seconds until KubeRay deletes the cluster of an ended job if the monitoring step has also ended.",
    )
