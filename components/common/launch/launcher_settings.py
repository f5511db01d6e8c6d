"""The section `launcher` of platform.yaml: launcher, number of nodes, and settings of each launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from components.common.launch.kubernetes.pod_scheduling import StrictModel
from components.common.launch.kubernetes.pod_settings import RayJobSettings, TrainJobSettings
from components.common.launch.launcher_registry import LAUNCHERS, LauncherEntry, LauncherKind
from components.common.launch.ray.ray_settings import RaySettings
from components.common.launch.slurm.slurm_settings import SlurmSettings
from components.common.runtime.errors import ConfigurationError, UsageError
from components.common.runtime.validation_errors import describe_validation_error

SETTINGS_VARIABLE = "TUNELINE_LAUNCHER"  # contains a step's settings as JSON
SECRET_FIELDS = ("environment",)  # their values may contain a secret, and are not reported


class LauncherSettings(StrictModel):
    """Launcher and number of nodes of the training."""

    kind: LauncherKind = Field(
        "process", description="; ".join(f"{kind}: {entry.description}" for kind, entry in LAUNCHERS.items()) + "."
    )
    nodes: int = Field(
        1, ge=1, description="Number of nodes for training. fine_tuning.processes is divided evenly among the nodes."
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads per training process; ignored if kind is process. 0: the node's cores divided "
        "by its number of processes.",
    )
    resumes: int = Field(
        10,
        ge=0,
        description="Maximum number of resumes from the last checkpoint after preemption, eviction or a time limit.",
    )
    looks_every: float = Field(5.0, ge=0.1, description="Poll interval of a waiting or running job in seconds.")
    patience_seconds: float = Field(
        3600.0,
        ge=0,
        description="Retry timeout in seconds for an unresponsive scheduler or API server. The job continues during "
        "retries.",
    )
    python: str = Field(
        "",
        description="Path of the Python interpreter with tuneline on the nodes. Empty: `python` of the image or, "
        "without an image, the path of the current interpreter.",
    )
    environment: dict[str, str] = Field(
        {}, description="Environment variables of the training job, for example {NCCL_SOCKET_IFNAME: ib0}."
    )
    slurm: SlurmSettings = Field(SlurmSettings(), description="Slurm batch job settings; used if kind is slurm.")
    trainjob: TrainJobSettings = Field(
        TrainJobSettings(), description="TrainJob pod settings; used if kind is trainjob."
    )
    ray: RaySettings = Field(RaySettings(), description="Ray cluster settings; used if kind is ray.")
    rayjob: RayJobSettings = Field(RayJobSettings(), description="RayJob pod settings; used if kind is rayjob.")

    @property
    def entry(self) -> LauncherEntry:
        """The registry entry of the selected launcher."""
        return LAUNCHERS[self.kind]

    @property
    def section(self) -> BaseModel | None:
        """The section of the selected launcher, or None if the launcher has no section."""
        return getattr(self, self.kind) if self.entry.settings_model else None

    @field_validator("environment")
    @classmethod
    def _reject_torchrun_variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if name.startswith("PET_"):
                raise ValueError(f"{name}: the launcher sets the variables of torchrun (PET_…)")
        return environment

    @model_validator(mode="after")
    def _check_entry(self) -> LauncherSettings:
        if self.nodes > 1 and not self.entry.supports_nodes:
            raise ValueError(f"nodes is {self.nodes}; expected 1, because kind {self.kind} runs on one machine")
        for name, meaning in self.entry.required_fields.items():
            if not getattr(self.section, name):
                raise ValueError(f"kind {self.kind} requires {self.kind}.{name}, which is empty: {meaning}")
        return self

    def describe_hardware(self) -> dict[str, object]:
        """Return the settings that influence the numerical result.

        They are part of a training run's cache key, in place of the device and threads of the local machine.

        Returns:
            A mapping with the keys launcher, nodes, threads and the hardware fields of the launcher's section.
        """
        section = self.section.model_dump(include=set(self.entry.hardware_fields)) if self.section else {}
        return {"launcher": self.kind, "nodes": self.nodes, "threads": self.threads, **section}


def load_settings() -> LauncherSettings:
    """Return the settings in the variable TUNELINE_LAUNCHER, or the default settings if the variable is not set.

    Raises:
        ConfigurationError: the variable does not contain valid settings.
    """
    try:
        return LauncherSettings.model_validate_json(os.environ.get(SETTINGS_VARIABLE) or "{}")
    except ValidationError as error:
        hint = f"Set {SETTINGS_VARIABLE} to a JSON object with the keys of the section launcher of platform.yaml."
        message = describe_validation_error(error, SETTINGS_VARIABLE, LauncherSettings, hidden=SECRET_FIELDS)
        raise ConfigurationError(message, hint=hint) from None


def replace_kind(settings: LauncherSettings, kind: str) -> LauncherSettings:
    """Return the settings with another kind.

    Raises:
        UsageError: the kind does not exist, or the other settings do not allow it.
    """
    try:
        return LauncherSettings.model_validate(settings.model_dump() | {"kind": kind})
    except ValidationError as error:
        hint = f"Choose one of: {', '.join(get_args(LauncherKind))}."
        message = describe_validation_error(error, f"--launcher {kind}", LauncherSettings, hidden=SECRET_FIELDS)
        raise UsageError(message, hint=hint) from None


def to_environment(settings: LauncherSettings) -> dict[str, str]:
    """Return the environment variable that passes the settings to a step."""
    return {SETTINGS_VARIABLE: json.dumps(settings.model_dump(mode="json", exclude_defaults=True), sort_keys=True)}


def resolve_folder(folder: Path) -> Path:
    """Return a job folder's path without symbolic links, whose targets may differ on the nodes."""
    return folder.resolve()
