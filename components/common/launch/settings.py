"""Where the training runs: the `launcher` of platform.yaml."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from components.common import addresses
from components.common.errors import ConfigurationError, UsageError
from components.common.launch.pods import Pods, RayJob, TrainJob

Kind = Literal["process", "slurm", "trainjob", "rayjob", "ray"]
ENVIRONMENT = "TUNELINE_LAUNCHER"  # where a step finds these settings, as JSON
USER = r"^[A-Za-z0-9._@-]*$"
TIME = r"^$|^(\d+-)?\d+(:\d+){0,2}$"


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Container(Strict):
    """A container around each node's processes of a Slurm job."""

    engine: Literal["none", "pyxis", "apptainer"] = Field(
        "none",
        description="pyxis: srun's own options (with Enroot). apptainer: apptainer exec around the command. none: no container.",
    )
    image: str = Field("", description="The image as the engine names it, for example registry.example#team/tuneline:1.")
    mounts: list[str] = Field([], description="Folders that it sees, as FROM:TO; the workdir's file system must be among them.")

    @model_validator(mode="after")
    def _has_an_image(self) -> Container:
        if self.engine != "none" and not self.image:
            raise ValueError(f"engine {self.engine} needs an image")
        return self


class Slurm(Strict):
    """A batch job of Slurm. Empty values are left to the site's defaults."""

    partition: str = Field("", description="Partition (sbatch --partition).")
    account: str = Field("", description="Account that the time is charged to (--account).")
    qos: str = Field("", description="Quality of service (--qos).")
    gres: str = Field("", description="Accelerators a node (--gres), for example gpu:h100:8.")
    constraint: str = Field("", description="Features that the nodes must have (--constraint).")
    cpus: int = Field(0, ge=0, description="Cores a node for the training (--cpus-per-task). 0: the site's default.")
    memory: str = Field("", description="Memory a node (--mem), for example 900G. Empty: the site's default.")
    time_limit: str = Field("", pattern=TIME, description="Time limit (--time), [days-]hours:minutes:seconds. Empty: the partition's.")
    save_seconds: int = Field(
        180,
        ge=10,
        lt=65536,
        description="Seconds before the time limit at which the training is asked to save, and is queued anew (--signal).",
    )
    reservation: str = Field("", description="Reservation (--reservation).")
    dependency: str = Field(
        "",
        description="What must have happened to other jobs first (--dependency), for example afterok:1234. A job for which that can no "
        "longer come is ended (--kill-on-invalid-dep=yes) and told of.",
    )
    options: list[str] = Field([], description="Further lines of #SBATCH, for example [--exclusive, --mail-type=FAIL].")
    setup: list[str] = Field([], description="Shell commands before the training, for example [module load cuda/12.8].")
    template: str = Field("", description="A batch script of the site's own, see docs/slurm.md. Empty: the one that comes with tuneline.")
    container: Container = Field(Container(), description="A container around the processes.")
    ssh: str = Field("", description="Host on which Slurm's programs run, as ssh names it, where they are not here. Empty: here.")
    rest: str = Field(
        "", description="slurmrestd's address, for example https://slurm.example:6820, where neither the programs nor a login node are."
    )
    rest_user: str = Field("", pattern=USER, description="User of Slurm to be there. Empty: the one that the token names.")
    rest_token_file: str = Field(
        "", description="File that holds the token, read anew with every call. Empty: the variable SLURM_JWT holds it, by a secret."
    )

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: list[str]) -> list[str]:
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is no option of sbatch: it begins with -")
        return options

    @field_validator("rest")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address and not address.startswith(("http://", "https://")):
            raise ValueError("wants slurmrestd's address, https://HOST:6820")
        if addresses.holds_password(address):
            raise ValueError("holds a password; slurmrestd takes a token: SLURM_JWT, by a secret, or rest_token_file")
        return address.rstrip("/")

    @model_validator(mode="after")
    def _has_one_way(self) -> Slurm:
        if self.ssh and self.rest:
            raise ValueError("ssh and rest are two ways to the same Slurm: name one")
        return self


class Ray(Strict):
    """A Ray cluster that is there, and what of each of its nodes the training takes."""

    address: str = Field("", description="Its dashboard, for example http://head:8265. A token comes from RAY_AUTH_TOKEN, never from here.")
    cpus: int = Field(0, ge=0, description="Cores that the training reserves and uses on each node. 0: one a process is reserved.")
    accelerator: str = Field(
        "",
        description="What each process takes one of: nvidia.com/gpu, amd.com/gpu, habana.ai/gaudi, or the name of a resource of Ray "
        "(GPU, HPU). Empty: nothing, it computes on processors.",
    )
    resources: dict[str, float] = Field(
        {}, description="Further resources of Ray that a node must have, for example {accelerator_type:H100: 0.001}."
    )
    wait_seconds: float = Field(
        3600.0, ge=0, description="Seconds for which it waits for its nodes, at the start and after one was lost. 0: as long as it takes."
    )

    @field_validator("address")
    @classmethod
    def _is_a_dashboard(cls, address: str) -> str:
        if address and not address.startswith(("http://", "https://")):
            raise ValueError("wants the dashboard's address, http://HOST:8265 or https://HOST, not that of Ray itself (port 6379 or 10001)")
        if addresses.holds_password(address):
            raise ValueError("holds a password; Ray's own guard are tokens: RAY_AUTH_TOKEN, by a secret")
        return address.rstrip("/")

    @property
    def accelerator_resource(self) -> str:
        """The accelerator by Ray's own name of the resource: what Kubernetes calls a GPU, or a part of one, is a GPU."""
        if self.accelerator.startswith("nvidia.com/") or self.accelerator.endswith("/gpu"):
            return "GPU"
        return {"habana.ai/gaudi": "HPU"}.get(self.accelerator, self.accelerator)


class LauncherSettings(Strict):
    """Where the training runs, and on how many nodes."""

    kind: Kind = Field(
        "process",
        description="process: on the machine of the step. slurm: a batch job. trainjob: Kubeflow Trainer. rayjob: KubeRay. "
        "ray: a Ray cluster that is there, by its address.",
    )
    nodes: int = Field(1, ge=1, description="Nodes that share the training; fine_tuning.processes is divided among them evenly.")
    threads: int = Field(
        0, ge=0, description="CPU threads a process computes with, elsewhere than here. 0: the node's cores, shared by its processes."
    )
    resumes: int = Field(
        10, ge=0, description="How often a training that was preempted, evicted or out of time goes on from its last checkpoint."
    )
    looks_every: float = Field(5.0, ge=0.1, description="Seconds between two looks at a job that waits or runs.")
    patience_seconds: float = Field(
        3600.0,
        ge=0,
        description="Seconds for which a scheduler or API server that is silent is asked again; the job runs on meanwhile.",
    )
    python: str = Field("", description="The interpreter that has tuneline, as the nodes see it. Empty: the image's, or this one's path.")
    environment: dict[str, str] = Field({}, description="Variables for the training elsewhere, for example {NCCL_SOCKET_IFNAME: ib0}.")
    slurm: Slurm = Field(Slurm(), description="What a batch job asks for; counts only with kind slurm.")
    trainjob: TrainJob = Field(TrainJob(), description="What a TrainJob's pods ask for; counts only with kind trainjob.")
    ray: Ray = Field(Ray(), description="The Ray cluster, and what it takes of its nodes; counts only with kind ray.")
    rayjob: RayJob = Field(RayJob(), description="What a RayJob's pods ask for; counts only with kind rayjob.")

    @field_validator("environment")
    @classmethod
    def _is_not_the_launchers(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if name.startswith("PET_"):
                raise ValueError(f"{name}: the variables of torchrun (PET_…) are set by the launcher")
        return environment

    @model_validator(mode="after")
    def _fits(self) -> LauncherSettings:
        if self.kind == "process" and self.nodes > 1:
            raise ValueError("kind process is one machine: nodes must be 1")
        if self.kind == "ray" and not self.ray.address:
            raise ValueError("kind ray wants ray.address, the cluster's dashboard: http://HOST:8265")
        return self

    def arithmetic(self) -> dict[str, Any]:
        """What the last bits of a result depend on, as far as it is said here: part of a training's key, in the place of this machine's own
        device and threads."""
        asked = {
            "slurm": {"gres": self.slurm.gres, "constraint": self.slurm.constraint, "cpus": self.slurm.cpus},
            "trainjob": _hardware(self.trainjob),
            "rayjob": _hardware(self.rayjob),
            "ray": self.ray.model_dump(include={"accelerator", "cpus", "resources"}),
        }
        return {"launcher": self.kind, "nodes": self.nodes, "threads": self.threads, **asked.get(self.kind, {})}


def _hardware(pods: Pods) -> dict[str, Any]:
    return pods.model_dump(include={"accelerator", "cpu", "node_selector", "node_affinity"})


def from_environment() -> LauncherSettings:
    """The settings that a step was given; without any, processes on this machine. Raises ConfigurationError."""
    try:
        return LauncherSettings.model_validate_json(os.environ.get(ENVIRONMENT) or "{}")
    except ValidationError as error:
        raise ConfigurationError(f"{ENVIRONMENT}: {_told(error)}", hint="It is JSON of the keys of platform.yaml's launcher.") from None


def of_kind(settings: LauncherSettings, kind: str) -> LauncherSettings:
    """The same with another kind. Raises UsageError for one that there is not, or that does not go with the rest."""
    try:
        return LauncherSettings.model_validate(settings.model_dump() | {"kind": kind})
    except ValidationError as error:
        raise UsageError(f"--launcher {kind}: {_told(error)}", hint=f"There are {', '.join(get_args(Kind))}.") from None


def _told(error: ValidationError) -> str:
    return "; ".join(": ".join([".".join(map(str, one["loc"])), one["msg"]]).strip(": ") for one in error.errors())


def as_environment(settings: LauncherSettings) -> dict[str, str]:
    """The variable in which a step finds them."""
    return {ENVIRONMENT: json.dumps(settings.model_dump(mode="json", exclude_defaults=True), sort_keys=True)}


def shared(folder: Path) -> Path:
    """A job's folder as all nodes name it: without links, which may lead elsewhere there."""
    return folder.resolve()
