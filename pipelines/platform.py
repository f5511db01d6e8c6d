"""platform.yaml: the cluster a pipeline is compiled for. What Kubeflow can only fix at compile time comes from here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from components.common import addresses, images
from components.common.errors import ConfigurationError
from pipelines.config import read, told

NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HIDDEN = ("secrets", "environment", "mlflow")  # a secret that was put there by mistake is not repeated in the error
# Names of secrets, word by word: TOKENIZERS_PARALLELISM is none, nor is the path of one, nor PWD, the folder one is in.
SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSPHRASE|[A-Z0-9]*(?:PASSWORD|PASSWD|APIKEY))(?:_|$)|_(?:PWD|PASS|KEY)$|_(?:PWD|PASS)_", re.IGNORECASE
)
PLACE = re.compile(r"_(?:FILE|PATH|DIR|URL)$", re.IGNORECASE)
SWITCH = ("", "0", "1", "false", "true", "no", "yes", "off", "on")  # HF_HUB_DISABLE_IMPLICIT_TOKEN: "1" tells nobody anything


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Images(Strict):
    """One image a runtime. Name them by digest where a run must be repeatable."""

    curation: str = Field(images.CURATION, min_length=1, description="Image of data curation and versioning.")
    training: str = Field(images.TRAINING, min_length=1, description="Image of fine-tuning.")
    evaluation: str = Field(images.EVALUATION, min_length=1, description="Image of evaluation, registration and the small steps.")
    serving: str = Field(images.SERVING, min_length=1, description="Image of packaging, with Triton in it.")
    pull_secrets: list[str] = Field([], description="Names of the secrets that the registry asks for.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="When an image is pulled. null: Kubernetes decides (Always for a tag latest, else IfNotPresent)."
    )


class Volume(Strict):
    """The volume that all pods share: raw data, artifact store, checkpoints, data repository."""

    claim: str = Field("tuneline", pattern=NAME, description="Name of an existing PersistentVolumeClaim that many pods may write (RWX).")
    mount: str = Field(
        "/data", pattern=r"^/[^:]*[^:/]$", description="Where the pods see it. Sources and base models are given by this path."
    )
    folder: str = Field(
        "tuneline",
        pattern=r"^[^/:][^:]*$",
        description="Folder on it that holds the artifact store, checkpoints, data repository and converted base models.",
    )

    @property
    def workdir(self) -> str:
        """The work folder as the pods see it."""
        return f"{self.mount}/{self.folder.rstrip('/')}"


class SecretKey(Strict):
    """A value in a Kubernetes secret."""

    name: str = Field(pattern=NAME, description="Name of the secret.")
    key: str = Field(min_length=1, description="Key within it.")


class Mlflow(Strict):
    """The tracking server."""

    tracking_uri: str = Field(
        "", description="Address of the MLflow server, for example http://mlflow.mlflow:5000. Empty: a file on the volume."
    )

    @field_validator("tracking_uri")
    @classmethod
    def _holds_no_password(cls, uri: str) -> str:
        if addresses.holds_password(uri):
            raise ValueError(
                "holds a password; name a secret for MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD under `secrets`, "
                "or one for MLFLOW_TRACKING_URI that holds the whole address"
            )
        return uri


class Toleration(Strict):
    """A taint that the pods may be scheduled in spite of."""

    key: str = Field("", description="Key of the taint. Empty with operator Exists: every taint.")
    operator: Literal["Equal", "Exists"] = Field("Equal", description="Equal compares the value, Exists does not.")
    value: str = Field("", description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(None, description="Effect tolerated. null: all.")
    seconds: int | None = Field(None, ge=0, description="How long a NoExecute taint is tolerated. null: for ever.")

    @model_validator(mode="after")
    def _without_key_all(self) -> Toleration:
        if not self.key and self.operator != "Exists":
            raise ValueError("a toleration without a key needs operator Exists")
        return self


class Scheduling(Strict):
    """Where the pods run. It counts for every pod of the pipeline, those with and those without an accelerator."""

    node_selector: dict[str, str] = Field({}, description="Labels that a node must have, for example {pool: gpu}.")
    tolerations: list[Toleration] = Field([], description="Taints tolerated, for example [{key: nvidia.com/gpu, operator: Exists}].")
    queue: str = Field("", description="Kueue's LocalQueue that the pods wait in (label kueue.x-k8s.io/queue-name). Empty: none.")


class Resources(Strict):
    """What a stage's pod asks for; it gets no more."""

    cpu: str = Field("", pattern=r"^$|^([0-9]*[.])?[0-9]+m?$", description="Cores, for example 4 or 500m. Empty: the namespace's default.")
    memory: str = Field("", pattern=r"^$|^[0-9]+([EPTGMK]i?)?$", description="Memory, for example 16Gi. Empty: the namespace's default.")
    accelerator: str = Field(
        "", description="Resource name, for example nvidia.com/gpu, nvidia.com/mig-1g.10gb or habana.ai/gaudi. Empty: none."
    )
    accelerators: int = Field(1, ge=1, description="How many of it; counts only where `accelerator` is set.")
    shared_memory: str = Field(
        "",
        pattern=r"^$|^[0-9]+([EPTGMK]i?)?$",
        description="Size of /dev/shm, taken from memory, for example 2Gi. Empty: the runtime's 64 MB.",
    )
    timeout_seconds: int = Field(0, ge=0, description="Seconds after which the pod is ended and the step fails. 0: never.")


class Stages(Strict):
    """Resources a stage."""

    data_curation: Resources = Field(Resources(), description="Reading and deduplicating: memory grows with the text.")
    fine_tuning: Resources = Field(Resources(), description="Training.")
    evaluation: Resources = Field(Resources(), description="Measuring the candidate, its base and the model in service.")
    triton_packaging: Resources = Field(Resources(), description="Packaging, and proving it in a Triton server.")
    others: Resources = Field(Resources(), description="The small steps: resolve, data_versioning, registration, promotion, report.")


class Platform(Strict):
    """A cluster."""

    images: Images = Field(Images(), description="The images the pods run, and how they are pulled.")
    volume: Volume = Field(Volume(), description="The volume that all pods share.")
    mlflow: Mlflow = Field(Mlflow(), description="Tracking and registry.")
    secrets: dict[str, SecretKey] = Field(
        {},
        description="Environment variables from secrets, for example {MLFLOW_TRACKING_TOKEN: {name: mlflow, key: token}}; "
        "also MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, HF_TOKEN, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY. A secret may hold "
        "a whole address with its password, for MLFLOW_TRACKING_URI or HTTPS_PROXY; it wins over the same variable given elsewhere.",
    )
    environment: dict[str, str] = Field(
        {}, description="Other environment variables of every pod, for example {HTTPS_PROXY: http://proxy:3128}."
    )
    scheduling: Scheduling = Field(Scheduling(), description="Where the pods run.")
    resources: Stages = Field(Stages(), description="What each stage's pod asks for.")

    @field_validator("secrets", "environment")
    @classmethod
    def _names_are_variables(cls, named: dict[str, object]) -> dict[str, object]:
        for name in named:
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"{name} is no name of an environment variable")
        return named

    @field_validator("environment")
    @classmethod
    def _holds_no_secret(cls, named: dict[str, str]) -> dict[str, str]:
        for name, value in named.items():
            if SECRET.search(name) and not PLACE.search(name) and value.strip().lower() not in SWITCH:
                raise ValueError(f"{name} would stand in the pipeline for all to read; name its secret and key under `secrets`")
            if addresses.holds_password(value):
                raise ValueError(
                    f"{name} holds an address with a password, which would stand in the pipeline for all to read; "
                    "name a secret and key under `secrets` that hold the whole address"
                )
        return named


def load(path: Path) -> Platform:
    """The platform in a YAML file. Raises ConfigurationError naming the file, the field, what was found and what is allowed."""
    try:
        return Platform.model_validate(read(path))
    except ValidationError as error:
        hint = "docs/kubeflow.md explains the keys; `tuneline init` writes a commented file."
        raise ConfigurationError(told(error, str(path), Platform, hidden=HIDDEN), hint=hint) from None
