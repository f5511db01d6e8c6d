"""platform.yaml: the cluster a pipeline is compiled for. What Kubeflow can only fix at compile time comes from here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from components.common import addresses, buckets, images
from components.common.errors import ConfigurationError
from components.common.launch.settings import LauncherSettings
from components.common.scheduling import LABEL, MOUNT, Claim, NodeAffinity, Toleration
from pipelines.config import read, told

NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
SIZE = r"^$|^[0-9]+([EPTGMK]i?)?$"
RESOURCE = r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # of a label or an annotation
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HIDDEN = (
    "secrets",
    "environment",
    "mlflow",
    "network",
    "store",
    "launcher",
)  # a secret that was put there by mistake is not repeated in the error
# Names of secrets, word by word: TOKENIZERS_PARALLELISM is none, nor is the path of one, nor PWD, the folder one is in.
SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSPHRASE|[A-Z0-9]*(?:PASSWORD|PASSWD|APIKEY))(?:_|$)|_(?:PWD|PASS|KEY)$|_(?:PWD|PASS)_", re.IGNORECASE
)
PLACE = re.compile(r"_(?:FILE|PATH|DIR|URL)$", re.IGNORECASE)
SHARED_MEMORY = ("shared-memory", "/dev/shm")  # noqa: S108 - a volume's name, and where it is mounted
SCRATCH = "scratch"
CERTIFICATES = "/etc/tuneline/certificates"
# What Kubeflow's own volumes in every pod are called, and where they are.
OCCUPIED = ("kfp-launcher", "gcs-scratch", "s3-scratch", "minio-scratch", "dot-local-scratch", "dot-cache-scratch", "dot-config-scratch")
OCCUPIED_PATHS = ("/kfp-launcher", "/gcs", "/s3", "/minio", "/.local", "/.cache", "/.config", "/kfp-workspace", "/proc", "/sys", "/dev")
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
    pinned: bool = Field(False, description="true: an image that is not named by digest (name@sha256:…) is refused.")

    @model_validator(mode="after")
    def _by_digest(self) -> Images:
        for name in ("curation", "training", "evaluation", "serving") if self.pinned else ():
            if not DIGEST.search(getattr(self, name)):
                raise ValueError(f"images.pinned wants images by digest; {name} is {getattr(self, name)}, without @sha256:<64 digits>")
        return self


class Volume(Strict):
    """The volume that all pods share: raw data, artifact store, checkpoints, data repository."""

    claim: str = Field("tuneline", pattern=LABEL, description="Name of an existing PersistentVolumeClaim that many pods may write (RWX).")
    sub_path: str = Field("", pattern=r"^([^/:][^:]*)?$", description="Folder of the claim that is mounted. Empty: all of it.")
    mount: str = Field("/data", pattern=MOUNT, description="Where the pods see it. Sources and base models are given by this path.")
    folder: str = Field(
        "tuneline",
        pattern=r"^[^/:][^:]*$",
        description="Folder on it that holds the artifact store, checkpoints, data repository and converted base models.",
    )

    @property
    def workdir(self) -> str:
        """The work folder as the pods see it."""
        return f"{self.mount}/{self.folder.rstrip('/')}"


class Files(Strict):
    """A secret or a config map whose keys are files in a folder."""

    name: str = Field(
        pattern=LABEL, description="Name of the secret or config map: letters, digits and -, as Kubeflow names the volume after it."
    )
    mount: str = Field(pattern=MOUNT, description="Folder in which each key is a file.")


class SecretKey(Strict):
    """A value in a Kubernetes secret."""

    name: str = Field(pattern=NAME, description="Name of the secret.")
    key: str = Field(min_length=1, description="Key within it.")


class Mlflow(Strict):
    """The tracking server."""

    tracking_uri: str = Field(
        "", description="Address of the MLflow server, for example http://mlflow.mlflow:5000. Empty: a file on the volume."
    )

    ui: str = Field("", description="Address at which a browser finds MLflow, where that is another one: for the links in the Kubeflow UI.")

    @field_validator("tracking_uri", "ui")
    @classmethod
    def _holds_no_password(cls, uri: str) -> str:
        if addresses.holds_password(uri):
            raise ValueError(
                "holds a password; name a secret for MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD under `secrets`, "
                "or one for MLFLOW_TRACKING_URI that holds the whole address"
            )
        return uri


class Certificates(Strict):
    """The authorities that the pods trust: a PEM file in a config map or a secret."""

    config_map: str = Field("", pattern=f"^$|{LABEL}", description="Name of the config map that holds the file.")
    secret: str = Field("", pattern=f"^$|{LABEL}", description="Name of the secret that holds it, instead of a config map.")
    key: str = Field(
        "ca-bundle.crt",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Key of the file. It replaces the image's authorities, so it holds all that are trusted, public ones as well.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Certificates:
        if self.config_map and self.secret:
            raise ValueError("name a config_map or a secret, not both")
        return self

    @property
    def name(self) -> str:
        """The config map or secret; empty: the image's own authorities."""
        return self.config_map or self.secret

    @property
    def path(self) -> str:
        """The file as the pods see it."""
        return f"{CERTIFICATES}/{self.key}"


class Network(Strict):
    """The way out of the cluster."""

    http_proxy: str = Field("", description="Proxy for http, for example http://proxy:3128. One with a password goes under `secrets`.")
    https_proxy: str = Field("", description="Proxy for https.")
    no_proxy: list[str] = Field(
        ["localhost", "127.0.0.1", ".svc", ".cluster.local"],
        description="Hosts that are asked directly; counts only where a proxy is set. Kubeflow's and MLflow's services must be among them.",
    )
    certificates: Certificates = Field(Certificates(), description="The authorities that the pods trust.")

    @field_validator("http_proxy", "https_proxy")
    @classmethod
    def _holds_no_password(cls, proxy: str) -> str:
        if addresses.holds_password(proxy):
            raise ValueError(
                "holds a password; name a secret and key for HTTP_PROXY or HTTPS_PROXY under `secrets` that hold the whole address"
            )
        return proxy


class Security(Strict):
    """Who the containers run as. Kubeflow adds the rest: no privilege escalation, no capabilities, the runtime's seccomp profile."""

    run_as_user: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="User id; on NFS the one that owns the volume's folder. null: the image's, or the administrator's.",
    )
    run_as_group: int | None = Field(None, ge=0, le=2**31 - 1, description="Group id. null: the image's.")
    run_as_non_root: bool | None = Field(
        None,
        description="true: an image that would run as root is not started; the restricted Pod Security Standard asks for it. null: unsaid.",
    )


class Scheduling(Strict):
    """Where the pods run. It counts for every pod of the pipeline, those with and those without an accelerator."""

    node_selector: dict[str, str] = Field({}, description="Labels that a node must have, for example {pool: gpu}.")
    tolerations: list[Toleration] = Field([], description="Taints tolerated, for example [{key: nvidia.com/gpu, operator: Exists}].")
    node_affinity: list[NodeAffinity] = Field(
        [], description="Conditions on nodes, for example [{key: nvidia.com/gpu.memory, operator: Gt, values: ['70000']}]."
    )
    queue: str = Field("", description="Kueue's LocalQueue that the pods wait in (label kueue.x-k8s.io/queue-name). Empty: none.")
    priority: str = Field(
        "", description="Kueue's WorkloadPriorityClass (label kueue.x-k8s.io/priority-class). Empty: the queue's default."
    )
    labels: dict[str, str] = Field({}, description="Other labels of the pods, for example {team: search}.")
    annotations: dict[str, str] = Field(
        {}, description="Annotations of the pods, for example {k8s.v1.cni.cncf.io/networks: rdma} for a second network."
    )

    @field_validator("node_selector", "labels", "annotations")
    @classmethod
    def _keys_are_some(cls, named: dict[str, str]) -> dict[str, str]:
        for key in named:
            if not KEY.fullmatch(key):
                raise ValueError(
                    f"{key!r} is no key of a label: letters, digits and . _ - within, 63 at most, behind a domain and / or without"
                )
        return named

    @field_validator("node_selector", "labels", "queue", "priority")
    @classmethod
    def _values_are_some(cls, said: dict[str, str] | str) -> dict[str, str] | str:
        for value in said.values() if isinstance(said, dict) else [said]:
            if not LABEL_VALUE.fullmatch(value):
                raise ValueError(f"{value!r} is no value of a label: letters, digits and . _ - within, 63 at most")
        return said


class Resources(Strict):
    """What a stage's pod asks for; it gets no more."""

    cpu: str = Field("", pattern=r"^$|^([0-9]*[.])?[0-9]+m?$", description="Cores, for example 4 or 500m. Empty: the namespace's default.")
    memory: str = Field("", pattern=SIZE, description="Memory, for example 16Gi. Empty: the namespace's default.")
    accelerator: str = Field(
        "",
        pattern=RESOURCE,
        description="Resource name, for example nvidia.com/gpu, nvidia.com/mig-1g.10gb or habana.ai/gaudi. Empty: none.",
    )
    accelerators: int = Field(1, ge=1, description="How many of it; counts only where `accelerator` is set.")
    shared_memory: str = Field(
        "",
        pattern=SIZE,
        description="Size of /dev/shm, taken from memory, for example 2Gi. Empty: the runtime's 64 MB.",
    )
    scratch: str = Field("", pattern=SIZE, description="Size of the scratch space, for example 500Gi; see `scratch`. Empty: none.")
    timeout_seconds: int = Field(0, ge=0, description="Seconds after which the pod is ended and the step fails. 0: never.")
    retries: int = Field(0, ge=0, description="How often a failed step is tried again; training goes on from its last checkpoint.")
    retry_after_seconds: int = Field(
        60, ge=0, description="Seconds before the first new try; doubled before each further one, an hour at most."
    )
    scheduling: Scheduling | None = Field(
        None,
        description="Added to `scheduling` for this stage, for example {node_selector: {pool: gpu}}; its queue and priority replace them.",
    )


class Scratch(Strict):
    """Fast space that a pod has for itself and that ends with it: temporary files. Each stage says how much under `resources`."""

    mount: str = Field("/scratch", pattern=MOUNT, description="Where a pod sees it; TMPDIR points there.")
    storage_class: str = Field(
        "",
        pattern=f"^$|{NAME}",
        description="Storage class of a claim made for the pod, such as one on local SSDs. Empty: the disk of the node.",
    )


class Run(Strict):
    """What counts for a run as a whole."""

    service_account: str = Field(
        "",
        pattern=f"^$|{NAME}",
        description="Service account that the pods run as; `tuneline submit -p` gives it along. Empty: the namespace's.",
    )
    timeout_seconds: int = Field(0, ge=0, lt=2**31, description="Seconds after which a run is ended. 0: never.")
    keep_seconds: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Seconds after which Kubernetes forgets an ended run's pods; their logs go with them. null: never.",
    )


class Stages(Strict):
    """Resources a stage."""

    data_curation: Resources = Field(Resources(), description="Reading and deduplicating: memory grows with the text.")
    fine_tuning: Resources = Field(Resources(), description="Training.")
    evaluation: Resources = Field(Resources(), description="Measuring the candidate, its base and the model in service.")
    triton_packaging: Resources = Field(Resources(), description="Packaging, and proving it in a Triton server.")
    others: Resources = Field(
        Resources(), description="The small steps: check_the_platform, resolve, data_versioning, registration, promotion, report."
    )


class Platform(Strict):
    """A cluster."""

    images: Images = Field(Images(), description="The images the pods run, and how they are pulled.")
    volume: Volume = Field(Volume(), description="The volume that all pods share.")
    store: str = Field(
        "",
        description="Where finished artifacts and imported base models are kept: s3://bucket/prefix, with the service's address as "
        "AWS_ENDPOINT_URL under `environment` and its keys under `secrets`. Empty: a folder on the volume, which otherwise holds copies.",
    )
    claims: list[Claim] = Field([], description="Further volumes of all pods, for example [{claim: corpus, mount: /corpus}].")
    scratch: Scratch = Field(Scratch(), description="Space for temporary files.")
    mlflow: Mlflow = Field(Mlflow(), description="Tracking and registry.")
    secrets: dict[str, SecretKey] = Field(
        {},
        description="Environment variables from secrets, for example {MLFLOW_TRACKING_TOKEN: {name: mlflow, key: token}}; "
        "also MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, HF_TOKEN, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY. A secret may hold "
        "a whole address with its password, for MLFLOW_TRACKING_URI or HTTPS_PROXY; it wins over the same variable given elsewhere.",
    )
    secret_files: list[Files] = Field([], description="Secrets as files of every pod, for example [{name: aws, mount: /etc/aws}].")
    config_files: list[Files] = Field([], description="Config maps as files of every pod.")
    environment: dict[str, str] = Field(
        {}, description="Other environment variables of every pod, for example {HF_ENDPOINT: https://mirror.example}."
    )
    network: Network = Field(Network(), description="Proxies, and the authorities that are trusted.")
    security: Security = Field(Security(), description="Who the containers run as.")
    scheduling: Scheduling = Field(Scheduling(), description="Where the pods run.")
    resources: Stages = Field(Stages(), description="What each stage's pod asks for.")
    launcher: LauncherSettings = Field(LauncherSettings(), description="Where fine-tuning runs, if not in the pod of its step.")
    run: Run = Field(Run(), description="The run as a whole.")

    @field_validator("store")
    @classmethod
    def _is_a_bucket(cls, store: str) -> str:
        if store and not buckets.ADDRESS.fullmatch(store):
            raise ValueError("wants s3://bucket/prefix, without keys or the service's address; empty is a folder on the volume")
        return store

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
        return _without_secrets(named)

    @field_validator("launcher")
    @classmethod
    def _launches_without_secrets(cls, launcher: LauncherSettings) -> LauncherSettings:
        _without_secrets(launcher.environment)
        return launcher


def _without_secrets(named: dict[str, str]) -> dict[str, str]:
    """The variables. Raises ValueError for one that holds a secret."""
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
    hint = "docs/kubeflow.md explains the keys; `tuneline init` writes a commented file."
    try:
        platform = Platform.model_validate(read(path))
    except ValidationError as error:
        raise ConfigurationError(told(error, str(path), Platform, hidden=HIDDEN), hint=hint) from None
    for problem in _contradictions(platform):
        raise ConfigurationError(f"{path}: {problem}", hint=hint)
    return platform


def mounts(platform: Platform) -> Iterator[tuple[str, str, str]]:
    """Every volume of a pod: the key that asks for it, its name in the pod, where it is mounted."""
    yield "volume", platform.volume.claim, platform.volume.mount
    yield from ((f"claims[{i}]", one.claim, one.mount) for i, one in enumerate(platform.claims))
    yield from ((f"secret_files[{i}]", one.name, one.mount) for i, one in enumerate(platform.secret_files))
    yield from ((f"config_files[{i}]", one.name, one.mount) for i, one in enumerate(platform.config_files))
    if platform.network.certificates.name:
        yield "network.certificates", platform.network.certificates.name, CERTIFICATES
    stages = [getattr(platform.resources, name) for name in Stages.model_fields]
    if any(stage.scratch for stage in stages):
        yield "scratch", SCRATCH, platform.scratch.mount
    if any(stage.shared_memory for stage in stages):
        yield "shared_memory", *SHARED_MEMORY


def _contradictions(platform: Platform) -> Iterator[str]:
    """What no single field can know: Kubernetes takes a volume's name once, and one volume a place."""
    names: dict[str, str] = dict.fromkeys(OCCUPIED, "Kubeflow")
    places: dict[str, str] = {}
    for key, name, mount in mounts(platform):
        if name in names:
            yield f"{key}: {names[name]} has a volume {name} already; Kubeflow names one after what it holds, so each is mounted once"
        if mount in places:
            yield f"{key}: {mount} is where {places[mount]} is mounted"
        if key != "shared_memory" and any(f"{mount}/".startswith(f"{path}/") for path in OCCUPIED_PATHS):
            yield f"{key}: {mount} is a place that Kubeflow or the system needs"
        names[name], places[mount] = key, key
    if platform.launcher.kind != "process" and platform.resources.fine_tuning.accelerator:
        yield "resources.fine_tuning.accelerator: the step only watches where `launcher` runs the training; name the accelerators there"
    for field in ("http_proxy", "https_proxy"):
        twice = {field, field.upper()} & (platform.secrets.keys() | platform.environment.keys())
        if getattr(platform.network, field) and twice:
            yield f"network.{field}: {twice.pop()} under `secrets` or `environment` says it a second time"
