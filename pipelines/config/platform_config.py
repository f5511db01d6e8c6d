"""platform.yaml: the cluster that a pipeline is compiled for, with the settings that Kubeflow fixes at compile time."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from components.common.artifacts import object_storage
from components.common.cost.budgets import Budget
from components.common.cost.cost_rates import Amount, CostRates, Power, Prices
from components.common.launch.kubernetes.pod_scheduling import (
    MOUNT_PATH_PATTERN,
    VOLUME_NAME_PATTERN,
    Claim,
    NodeAffinity,
    Toleration,
)
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime import container_images, url_credentials
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.validation_errors import describe_validation_error
from pipelines.config.customization_config import read_sections

NAME_PATTERN = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
QUANTITY_PATTERN = r"^$|^[0-9]+([EPTGMK]i?)?$"
RESOURCE_NAME_PATTERN = r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
LABEL_KEY_PATTERN = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE_PATTERN = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
IMAGE_DIGEST_PATTERN = re.compile(r"@sha256:[0-9a-f]{64}$")
VARIABLE_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Error messages do not repeat values of these sections: they may contain a secret by mistake.
REDACTED_SECTIONS = ("secrets", "environment", "mlflow", "network", "store", "launcher")
# Names of secrets, word by word: TOKENIZERS_PARALLELISM, the path of a secret and PWD (a folder) are not secrets.
SECRET_NAME_PATTERN = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSPHRASE|[A-Z0-9]*(?:PASSWORD|PASSWD|APIKEY))(?:_|$)|_(?:PWD|PASS|KEY)$|_(?:PWD|PASS)_",
    re.IGNORECASE,
)
LOCATION_NAME_PATTERN = re.compile(r"_(?:FILE|PATH|DIR|URL)$", re.IGNORECASE)
# A switch reveals nothing even if its name looks like a secret's: HF_HUB_DISABLE_IMPLICIT_TOKEN is "1".
SWITCH_VALUES = ("", "0", "1", "false", "true", "no", "yes", "off", "on")
SHARED_MEMORY = ("shared-memory", "/dev/shm")  # noqa: S108 - a volume's name, and where it is mounted
SCRATCH_VOLUME = "scratch"
CERTIFICATES_FOLDER = "/etc/tuneline/certificates"
# Volumes that Kubeflow adds to every pod, and paths that Kubeflow or the system uses.
KUBEFLOW_VOLUMES = (
    "kfp-launcher",
    "gcs-scratch",
    "s3-scratch",
    "minio-scratch",
    "dot-local-scratch",
    "dot-cache-scratch",
    "dot-config-scratch",
)
RESERVED_PATHS = (
    "/kfp-launcher",
    "/gcs",
    "/s3",
    "/minio",
    "/.local",
    "/.cache",
    "/.config",
    "/kfp-workspace",
    "/proc",
    "/sys",
    "/dev",
)


RunEvent = Literal["accepted", "refused", "unchanged", "promoted", "failed"]


class StrictModel(BaseModel):
    """A model that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Images(StrictModel):
    """One image per runtime. Reference images by digest for repeatable runs."""

    curation: str = Field(
        container_images.CURATION_IMAGE, min_length=1, description="Image of data curation and versioning."
    )
    training: str = Field(container_images.TRAINING_IMAGE, min_length=1, description="Image of fine-tuning.")
    evaluation: str = Field(
        container_images.EVALUATION_IMAGE,
        min_length=1,
        description="Image of evaluation, registration and the remaining steps.",
    )
    serving: str = Field(
        container_images.SERVING_IMAGE,
        min_length=1,
        description="Image of packaging and, in the promotion pipeline, of promotion and deployment; contains Triton.",
    )
    pull_secrets: list[str] = Field([], description="Names of the image pull secrets.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None,
        description="Image pull policy. null: Kubernetes decides (Always for the tag latest, otherwise IfNotPresent).",
    )
    pinned: bool = Field(False, description="true: reject images without a digest (name@sha256:…).")

    @model_validator(mode="after")
    def require_digests(self) -> Images:
        for name in ("curation", "training", "evaluation", "serving") if self.pinned else ():
            if not IMAGE_DIGEST_PATTERN.search(getattr(self, name)):
                raise ValueError(
                    f"images.pinned requires digests; {name} is {getattr(self, name)}, without @sha256:<64 digits>"
                )
        return self


class Volume(StrictModel):
    """The volume that all pods share: raw data, artifact store, checkpoints, data repository."""

    claim: str = Field(
        "tuneline",
        pattern=VOLUME_NAME_PATTERN,
        description="Name of an existing PersistentVolumeClaim with access mode ReadWriteMany (RWX).",
    )
    sub_path: str = Field(
        "", pattern=r"^([^/:][^:]*)?$", description="Folder of the claim to mount. Empty: the whole claim."
    )
    mount: str = Field(
        "/data",
        pattern=MOUNT_PATH_PATTERN,
        description="Mount path in the pods. Paths of sources and base models on this volume begin with this path.",
    )
    folder: str = Field(
        "tuneline",
        pattern=r"^[^/:][^:]*$",
        description="Folder on the volume for the artifact store, checkpoints, the data repository and converted models.",
    )

    @property
    def workdir(self) -> str:
        """Path of the workdir in the pods."""
        return f"{self.mount}/{self.folder.rstrip('/')}"


class MountedFiles(StrictModel):
    """A secret or a config map whose keys are files in a folder."""

    name: str = Field(
        pattern=VOLUME_NAME_PATTERN,
        description="Name of the secret or config map: lowercase letters, digits and -, because the volume gets this name.",
    )
    mount: str = Field(pattern=MOUNT_PATH_PATTERN, description="Mount path. The folder contains one file per key.")


class SecretKey(StrictModel):
    """A value in a Kubernetes secret."""

    name: str = Field(pattern=NAME_PATTERN, description="Name of the secret.")
    key: str = Field(min_length=1, description="Key in the secret.")


def _reject_password(address: str) -> str:
    """Return the address. Raises ValueError if it contains a password."""
    if url_credentials.contains_password(address):
        raise ValueError("contains a password; expected a reference to a secret with the full address, under `secrets`")
    return address


Address = Annotated[str, AfterValidator(_reject_password)]


def _reject_secrets(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables. Raises ValueError for a secret: every reader of the pipeline could see it."""
    for name, value in variables.items():
        is_location, is_switch = LOCATION_NAME_PATTERN.search(name), value.strip().lower() in SWITCH_VALUES
        if SECRET_NAME_PATTERN.search(name) and not is_location and not is_switch:
            raise ValueError(
                f"{name} would be readable in the compiled pipeline; expected a reference to its secret under `secrets`"
            )
        if url_credentials.contains_password(value):
            raise ValueError(
                f"{name} contains an address with a password, which would be readable in the "
                "compiled pipeline; expected a reference to a secret with the full address, under `secrets`"
            )
    return variables


class Mlflow(StrictModel):
    """The tracking server."""

    tracking_uri: Address = Field(
        "",
        description="Address of the MLflow server, for example http://mlflow.mlflow:5000. Empty: a file on the volume. "
        "Set user name and password under `secrets`: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD.",
    )
    ui: Address = Field(
        "",
        description="Address of MLflow for browsers, used in links of the Kubeflow UI. Empty: tracking_uri.",
    )


class Certificates(StrictModel):
    """The certificate authorities that the pods trust: a PEM file in a config map or a secret."""

    config_map: str = Field(
        "", pattern=f"^$|{VOLUME_NAME_PATTERN}", description="Name of the config map with the certificate file."
    )
    secret: str = Field(
        "",
        pattern=f"^$|{VOLUME_NAME_PATTERN}",
        description="Name of the secret with the certificate file, instead of a config map.",
    )
    key: str = Field(
        "ca-bundle.crt",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Key of the file. The file replaces the certificate authorities of the image, so it must include the public authorities.",
    )

    @model_validator(mode="after")
    def require_one_source(self) -> Certificates:
        if self.config_map and self.secret:
            raise ValueError("config_map and secret are both set; expected only one of them")
        return self

    @property
    def name(self) -> str:
        """Name of the config map or secret; "" for the image's own authorities."""
        return self.config_map or self.secret

    @property
    def path(self) -> str:
        """Path of the file in the pods."""
        return f"{CERTIFICATES_FOLDER}/{self.key}"


class Network(StrictModel):
    """Network access from the cluster to the outside."""

    http_proxy: Address = Field(
        "",
        description="HTTP proxy URL, for example http://proxy:3128. Empty: no HTTP proxy. Store a URL with a password "
        "under `secrets`.",
    )
    https_proxy: Address = Field("", description="HTTPS proxy URL. Empty: no HTTPS proxy.")
    no_proxy: list[str] = Field(
        ["localhost", "127.0.0.1", ".svc", ".cluster.local"],
        description="Hosts that bypass the proxy; the list must include the services of Kubeflow and MLflow.",
    )
    certificates: Certificates = Field(Certificates(), description="Certificate authorities that the pods trust.")


class Security(StrictModel):
    """User of the containers.

    Kubeflow also forbids privilege escalation, drops all capabilities and sets the runtime's seccomp profile.
    """

    run_as_user: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="User ID of the containers; on NFS, the owner of the volume's folder. null: the user set in the image.",
    )
    run_as_group: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Group ID of the containers. null: the group set in the image, or 0 if run_as_user is set.",
    )
    run_as_non_root: bool | None = Field(
        None,
        description="true: do not start images that would run as root, as the restricted Pod Security Standard "
        "requires. null: the default of Kubernetes.",
    )


class Scheduling(StrictModel):
    """Scheduling of every pod of the pipeline, with or without an accelerator."""

    node_selector: dict[str, str] = Field({}, description="Required labels of the nodes, for example {pool: gpu}.")
    tolerations: list[Toleration] = Field(
        [], description="Tolerated taints, for example [{key: nvidia.com/gpu, operator: Exists}]."
    )
    node_affinity: list[NodeAffinity] = Field(
        [],
        description="Conditions on the labels of nodes, for example [{key: nvidia.com/gpu.memory, operator: Gt, values: ['70000']}].",
    )
    queue: str = Field(
        "", description="LocalQueue of Kueue for the pods (label kueue.x-k8s.io/queue-name). Empty: no queue."
    )
    priority: str = Field(
        "",
        description="WorkloadPriorityClass of Kueue (label kueue.x-k8s.io/priority-class). "
        "Empty: Kueue uses the priority of the pods, by default 0.",
    )
    labels: dict[str, str] = Field({}, description="Additional labels of the pods, for example {team: search}.")
    annotations: dict[str, str] = Field(
        {}, description="Annotations of the pods, for example {k8s.v1.cni.cncf.io/networks: rdma} for a second network."
    )

    @field_validator("node_selector", "labels", "annotations")
    @classmethod
    def check_label_keys(cls, values: dict[str, str]) -> dict[str, str]:
        for key in values:
            if not LABEL_KEY_PATTERN.fullmatch(key):
                raise ValueError(
                    f"{key!r} is not a valid label key; "
                    "expected [DOMAIN/]NAME with at most 63 letters, digits and . _ -"
                )
        return values

    @field_validator("node_selector", "labels", "queue", "priority")
    @classmethod
    def check_label_values(cls, values: dict[str, str] | str) -> dict[str, str] | str:
        for value in values.values() if isinstance(values, dict) else [values]:
            if not LABEL_VALUE_PATTERN.fullmatch(value):
                raise ValueError(
                    f"{value!r} is not a valid label value; "
                    "expected at most 63 letters, digits and . _ -, with a letter or digit at each end"
                )
        return values


class Resources(StrictModel):
    """Resources of a stage's pod; requests and limits are equal."""

    cpu: str = Field(
        "",
        pattern=r"^$|^([0-9]*[.])?[0-9]+m?$",
        description="Number of CPU cores, for example 4 or 500m. Empty: the default of the namespace's LimitRange.",
    )
    memory: str = Field(
        "", pattern=QUANTITY_PATTERN, description="Memory, for example 16Gi. Empty: the LimitRange's default."
    )
    memory_request: str = Field(
        "",
        pattern=QUANTITY_PATTERN,
        description="Memory request without a limit; cannot be combined with `memory`. Empty: `compile -c` "
        "requests the estimate of `tuneline size`.",
        exclude_if=operator.not_,
    )
    accelerator: str = Field(
        "",
        pattern=RESOURCE_NAME_PATTERN,
        description="Resource name of the accelerator, for example nvidia.com/gpu, nvidia.com/mig-1g.10gb or habana.ai/gaudi. "
        "Empty: no accelerator.",
    )
    accelerators: int = Field(1, ge=1, description="Number of accelerators; used only if `accelerator` is set.")
    shared_memory: str = Field(
        "",
        pattern=QUANTITY_PATTERN,
        description="Size of /dev/shm, counted as memory, for example 2Gi. Empty: the container runtime's default of 64 MB.",
    )
    scratch: str = Field(
        "",
        pattern=QUANTITY_PATTERN,
        description="Size of the scratch volume, for example 500Gi; see `scratch`. Empty: no scratch volume.",
    )
    timeout_seconds: int = Field(
        0, ge=0, description="Seconds after which the pod is terminated and the step fails. 0: no limit."
    )
    retries: int = Field(
        0, ge=0, description="Number of retries of a failed step; training resumes from its last checkpoint."
    )
    retry_after_seconds: int = Field(
        60,
        ge=0,
        description="Delay in seconds before the first retry; doubled before each further retry, up to an hour.",
    )
    scheduling: Scheduling | None = Field(
        None,
        description="Additions to `scheduling` for this stage, for example {node_selector: {pool: gpu}}; "
        "its queue and priority replace those of `scheduling`.",
    )


class Scratch(StrictModel):
    """Temporary storage of a single pod, deleted with the pod; `resources` sets its size."""

    mount: str = Field(
        "/scratch", pattern=MOUNT_PATH_PATTERN, description="Mount path in the pods; TMPDIR points to it."
    )
    storage_class: str = Field(
        "",
        pattern=f"^$|{NAME_PATTERN}",
        description="Storage class of an ephemeral volume claim, such as a class on local SSDs. Empty: the node's disk.",
    )


class RunSettings(StrictModel):
    """Service account, timeout and cleanup of runs."""

    service_account: str = Field(
        "",
        pattern=f"^$|{NAME_PATTERN}",
        description="Service account of the pods, applied by `tuneline submit -p`. Empty: pipeline-runner, or default-editor in a profile.",
    )
    timeout_seconds: int = Field(0, ge=0, lt=2**31, description="Seconds after which a run is terminated. 0: no limit.")
    ui: Address = Field(
        "",
        description="Address of the Kubeflow Pipelines UI, for links in notifications, for example https://kubeflow.example/pipeline.",
    )
    keep_seconds: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Seconds after which Kubernetes deletes the pods of a finished run and their logs. null: the TTL of "
        "Kubeflow's persistence agent, by default one day.",
    )


class Notification(StrictModel):
    """A service that is notified about the end of runs."""

    url: SecretKey = Field(
        description="Secret with the Apprise URL of the service, for example slack://…, mailtos://… or jsons://… (a webhook)."
    )
    events: list[RunEvent] = Field(
        ["accepted", "refused", "unchanged", "promoted", "failed"],
        min_length=1,
        description="Events that trigger a notification: the verdict on the candidate (accepted, refused or unchanged), the "
        "promotion of a version, or a failure.",
    )

    @property
    def name(self) -> str:
        """Name of the service in reports: its secret and key."""
        return f"{self.url.name}/{self.url.key}"


class StageResources(StrictModel):
    """Resources per stage."""

    data_curation: Resources = Field(
        Resources(),
        description="Data curation: reading and deduplication, whose memory grows with the size of the text.",
    )
    fine_tuning: Resources = Field(Resources(), description="Training.")
    evaluation: Resources = Field(Resources(), description="Evaluation of the candidate, its base and the champion.")
    triton_packaging: Resources = Field(Resources(), description="Packaging and its verification in a Triton server.")
    others: Resources = Field(
        Resources(),
        description="Resources of the remaining steps: check_the_platform, resolve, data_versioning, registration, "
        "promotion, report, finish.",
    )


class Platform(StrictModel):
    """Target cluster of a compiled pipeline."""

    images: Images = Field(Images(), description="Images of the pods and their pull policy.")
    volume: Volume = Field(Volume(), description="The volume that all pods share.")
    store: str = Field(
        "",
        description="Address of the artifact store: s3://bucket/prefix. Empty: a folder on the volume. A bucket also stores "
        "imported base models, and the volume contains only copies. For a bucket, set the keys under `secrets` "
        "and, except for Amazon S3, AWS_ENDPOINT_URL under `environment`.",
    )
    claims: list[Claim] = Field(
        [], description="Additional volumes of all pods, for example [{claim: corpus, mount: /corpus}]."
    )
    scratch: Scratch = Field(Scratch(), description="Scratch volumes for temporary files.")
    mlflow: Mlflow = Field(Mlflow(), description="MLflow tracking and model registry.")
    secrets: dict[str, SecretKey] = Field(
        {},
        description="Environment variables from secrets, for example {MLFLOW_TRACKING_TOKEN: {name: mlflow, key: "
        "token}}. Further examples: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, HF_TOKEN, AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY. A secret may hold a full URL with a password (MLFLOW_TRACKING_URI, HTTPS_PROXY). A "
        "variable from a secret overrides the same variable set elsewhere.",
    )
    secret_files: list[MountedFiles] = Field(
        [], description="Secrets to mount as files in every pod, for example [{name: aws, mount: /etc/aws}]."
    )
    config_files: list[MountedFiles] = Field([], description="Config maps to mount as files in every pod.")
    environment: Annotated[dict[str, str], AfterValidator(_reject_secrets)] = Field(
        {},
        description="Environment variables with literal values for every pod, for example {HF_ENDPOINT: https://mirror.example}.",
    )
    network: Network = Field(Network(), description="Proxies and trusted certificate authorities.")
    security: Security = Field(Security(), description="User of the containers.")
    scheduling: Scheduling = Field(Scheduling(), description="Scheduling of the pods.")
    resources: StageResources = Field(StageResources(), description="Resources of each stage's pod.")
    launcher: LauncherSettings = Field(
        LauncherSettings(), description="Launcher of fine-tuning. Default: train in the pod of the step."
    )
    run: RunSettings = Field(RunSettings(), description="Service account, timeout and cleanup of runs.")
    notifications: list[Notification] = Field(
        [],
        description="Services to notify about the end of a run, for example [{url: {name: notify, key: slack}, events: [failed]}].",
    )
    prices: Prices = Field(Prices(), description="Prices for the cost of runs; see docs/how-to/costs.md.")
    power: Power = Field(Power(), description="Power for estimating energy that no counter measures.")
    pue: Amount = Field(
        1.0,
        ge=1,
        description="Power usage effectiveness of the data center: total power ÷ power of the machines. Energy is multiplied by this factor.",
    )
    team_budgets: dict[str, Budget] = Field(
        {},
        description="Limits per team, workdir and calendar month, by `team` of customization.yaml, for "
        "example {search: {gpu_hours: 500}}.",
    )

    @property
    def notification_variables(self) -> dict[str, Notification]:
        """The notifications by the environment variable of their URL."""
        return {f"TUNELINE_NOTIFICATION_{number}": each for number, each in enumerate(self.notifications, start=1)}

    @property
    def cost_rates(self) -> CostRates:
        """Prices and power of the environment."""
        return CostRates(prices=self.prices, power=self.power, pue=self.pue)

    @field_validator("store")
    @classmethod
    def check_store(cls, store: str) -> str:
        if store and not object_storage.S3_ADDRESS_PATTERN.fullmatch(store):
            raise ValueError(
                "expected s3://bucket/prefix without keys or endpoint, or an empty string for a folder on the volume"
            )
        return store

    @field_validator("secrets", "environment")
    @classmethod
    def check_variable_names(cls, variables: dict[str, object]) -> dict[str, object]:
        for name in variables:
            if not VARIABLE_NAME_PATTERN.fullmatch(name):
                raise ValueError(
                    f"{name} is not a valid name of an environment variable; expected letters A to Z, digits and _, "
                    "not starting with a digit"
                )
        return variables

    @field_validator("launcher")
    @classmethod
    def reject_launcher_secrets(cls, launcher: LauncherSettings) -> LauncherSettings:
        _reject_secrets(launcher.environment)
        return launcher


def load_platform(path: Path) -> Platform:
    """Load platform.yaml.

    Raises:
        ConfigurationError: the file is unreadable, or a value is invalid; the message contains the file, the field, the
            value found and the allowed values.
    """
    hint = "See docs/reference/platform.md, or run `tuneline init` to write a commented file."
    try:
        platform = Platform.model_validate(read_sections(path))
    except ValidationError as error:
        message = describe_validation_error(error, str(path), Platform, hidden=REDACTED_SECTIONS)
        raise ConfigurationError(message, hint=hint) from None
    for problem in _find_contradictions(platform):
        raise ConfigurationError(f"{path}: {problem}", hint=hint)
    return platform


def list_mounts(platform: Platform) -> Iterator[tuple[str, str, str]]:
    """Yield every volume of a pod: its key in platform.yaml, its name in the pod, its mount path."""
    yield "volume", platform.volume.claim, platform.volume.mount
    yield from ((f"claims[{i}]", claim.claim, claim.mount) for i, claim in enumerate(platform.claims))
    yield from ((f"secret_files[{i}]", files.name, files.mount) for i, files in enumerate(platform.secret_files))
    yield from ((f"config_files[{i}]", files.name, files.mount) for i, files in enumerate(platform.config_files))
    if platform.network.certificates.name:
        yield "network.certificates", platform.network.certificates.name, CERTIFICATES_FOLDER
    stages = [getattr(platform.resources, name) for name in StageResources.model_fields]
    if any(stage.scratch for stage in stages):
        yield "scratch", SCRATCH_VOLUME, platform.scratch.mount
    if any(stage.shared_memory for stage in stages):
        yield "shared_memory", *SHARED_MEMORY


def _find_contradictions(platform: Platform) -> Iterator[str]:
    """Yield problems between fields. Kubernetes accepts a volume name once, and one volume per mount path."""
    names: dict[str, str] = dict.fromkeys(KUBEFLOW_VOLUMES, "Kubeflow")
    paths: dict[str, str] = {}
    for key, name, mount in list_mounts(platform):
        if name in names:
            yield (
                f"{key}: {names[name]} already has a volume {name}; "
                "volumes are named after their content, so each can be mounted only once"
            )
        if mount in paths:
            yield f"{key}: {mount} is already the mount path of {paths[mount]}"
        if key != "shared_memory" and any(f"{mount}/".startswith(f"{path}/") for path in RESERVED_PATHS):
            yield f"{key}: {mount} is reserved for Kubeflow or the system"
        names[name], paths[mount] = key, key
    for stage in StageResources.model_fields:
        resources: Resources = getattr(platform.resources, stage)
        if resources.memory and resources.memory_request:
            yield (
                f"resources.{stage}.memory_request: no effect, because memory {resources.memory} sets both request "
                "and limit; expected only one of memory and memory_request"
            )
    if not platform.launcher.entry.uses_this_machine and platform.resources.fine_tuning.accelerator:
        yield (
            "resources.fine_tuning.accelerator: no effect, because `launcher` runs training outside the step's "
            "pod; expected the accelerators under `launcher`"
        )
    for field in ("http_proxy", "https_proxy"):
        duplicates = {field, field.upper()} & (platform.secrets.keys() | platform.environment.keys())
        if getattr(platform.network, field) and duplicates:
            yield f"network.{field}: {duplicates.pop()} is also set under `secrets` or `environment`"
