"""The section `launcher.slurm` of platform.yaml."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from components.common.launch.kubernetes.pod_scheduling import StrictModel
from components.common.runtime import url_credentials

USER_PATTERN = r"^[A-Za-z0-9._@-]*$"
TIME_LIMIT_PATTERN = r"^$|^(\d+-)?\d+(:\d+){0,2}$"


class ContainerSettings(StrictModel):
    """The container of each node's processes."""

    engine: Literal["none", "pyxis", "apptainer"] = Field(
        "none",
        description="Container engine. pyxis: srun's container options (with Enroot). apptainer: `apptainer exec`. "
        "none: no container.",
    )
    image: str = Field(
        "",
        description="Image in the engine's notation, for example registry.example#team/tuneline:1. Empty: no image; "
        "allowed only if engine is none.",
    )
    mounts: list[str] = Field(
        [], description="Bind mounts, as SOURCE:TARGET. Include the file system that contains the workdir."
    )

    @model_validator(mode="after")
    def _check_image(self) -> Self:
        if self.engine != "none" and not self.image:
            raise ValueError(f"image is empty; engine {self.engine} requires an image")
        return self


class SlurmSettings(StrictModel):
    """A batch job of Slurm. Empty values select the site's defaults."""

    partition: str = Field("", description="Partition (sbatch --partition). Empty: the site's default.")
    account: str = Field("", description="Account that is charged for the job (--account). Empty: the user's default.")
    qos: str = Field("", description="Quality of service (--qos). Empty: the site's default.")
    gres: str = Field(
        "", description="Accelerators per node (--gres), for example gpu:h100:8. Empty: no accelerator is requested."
    )
    constraint: str = Field("", description="Required features of the nodes (--constraint). Empty: no constraint.")
    cpus: int = Field(0, ge=0, description="Cores per node for training (--cpus-per-task). 0: the site's default.")
    memory: str = Field("", description="Memory per node (--mem), for example 900G. Empty: the site's default.")
    time_limit: str = Field(
        "",
        pattern=TIME_LIMIT_PATTERN,
        description="Time limit (--time), as [days-]hours:minutes:seconds. Empty: the partition's default.",
    )
    save_seconds: int = Field(
        180,
        ge=10,
        lt=65536,
        description="Seconds between the signal to save a checkpoint (--signal) and the time limit. Slurm then requeues "
        "the job.",
    )
    reservation: str = Field("", description="Reservation (--reservation). Empty: no reservation.")
    dependency: str = Field(
        "",
        description="Condition on other jobs (--dependency), for example afterok:1234. A job whose condition can no "
        "longer be met is terminated (--kill-on-invalid-dep=yes) and reported. Empty: no dependency.",
    )
    options: list[str] = Field(
        [],
        description="Additional options of sbatch, one per #SBATCH line, for example [--exclusive, --mail-type=FAIL].",
    )
    setup: list[str] = Field([], description="Shell commands before training, for example [module load cuda/12.8].")
    template: str = Field(
        "", description="Batch script template of the site, see docs/how-to/slurm.md. Empty: the built-in template."
    )
    container: ContainerSettings = Field(ContainerSettings(), description="Container of the training processes.")
    ssh: str = Field(
        "", description="Login node that runs Slurm's commands, as a host name for ssh. Empty: this machine."
    )
    rest: str = Field(
        "",
        description="Address of slurmrestd, for example https://slurm.example:6820. Empty: use Slurm's commands.",
    )
    rest_user: str = Field(
        "", pattern=USER_PATTERN, description="Slurm user of the REST calls. Empty: the user in the token."
    )
    rest_token_file: str = Field(
        "",
        description="File with the token, read again for every call. Empty: the variable SLURM_JWT, set from a secret.",
    )

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: list[str]) -> list[str]:
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is not an option of sbatch; expected one line that begins with -")
        return options

    @field_validator("rest")
    @classmethod
    def _check_rest(cls, address: str) -> str:
        if address and not address.startswith(("http://", "https://")):
            # The message does not contain the value, which may contain a password.
            raise ValueError("is not the address of slurmrestd; expected http://HOST:6820 or https://HOST:6820")
        if url_credentials.contains_password(address):
            raise ValueError(
                "contains a password; expected an address without credentials; set the token in SLURM_JWT (from a "
                "secret) or in rest_token_file"
            )
        return address.rstrip("/")

    @model_validator(mode="after")
    def _check_connection(self) -> Self:
        if self.ssh and self.rest:
            raise ValueError(f"ssh is {self.ssh}, but rest is also set; expected only one of the two keys")
        return self
