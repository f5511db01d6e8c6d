"""Registry of the launchers and their properties.

To add a launcher, add an entry, its module and a test. A launcher with its own settings also gets a field in
`LauncherSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from components.common.launch.kubernetes.kubernetes_client import RAYJOB, TRAINJOB, ResourceKind
from components.common.launch.kubernetes.pod_settings import RayJobSettings, TrainJobSettings
from components.common.launch.ray.ray_settings import RaySettings
from components.common.launch.slurm.slurm_settings import SlurmSettings

if TYPE_CHECKING:
    from components.common.launch import Launcher
    from components.common.launch.launcher_settings import LauncherSettings

LauncherKind = Literal["process", "slurm", "trainjob", "rayjob", "ray"]


@dataclass(frozen=True)
class LauncherEntry:
    """Properties of a launcher. Its key in LAUNCHERS is the value of `launcher.kind`."""

    description: str
    create: Callable[[LauncherSettings], Launcher]
    settings_model: type[BaseModel] | None = None  # of the launcher's section, which has the same name
    hardware_fields: tuple[str, ...] = ()  # keys of the section that influence the numerical result
    required_fields: Mapping[str, str] = field(default_factory=dict)  # required keys of the section, with descriptions
    resource: ResourceKind | None = None  # the Kubernetes resource of a job
    uses_this_machine: bool = False  # the job uses the devices and threads of the step, which are part of the cache key
    ends_with_step: bool = False  # the job cannot outlive the step, so it writes to the step's output folder
    supports_nodes: bool = True
    supports_arrays: bool = False  # the launcher implements ArrayLauncher


def create_process_launcher(settings: LauncherSettings) -> Launcher:
    """Return the launcher `process`."""
    from components.common.launch.torchrun import TorchrunLauncher

    return TorchrunLauncher()


def create_slurm_launcher(settings: LauncherSettings) -> Launcher:
    """Return the launcher `slurm`, with the slurmrestd client if `slurm.rest` is set."""
    from components.common.launch.slurm.command_client import CommandClient
    from components.common.launch.slurm.rest_client import RestClient
    from components.common.launch.slurm.slurm_launcher import SlurmLauncher

    slurm = settings.slurm
    return SlurmLauncher(settings, RestClient(slurm) if slurm.rest else CommandClient(slurm.ssh))


def create_kubernetes_launcher(settings: LauncherSettings) -> Launcher:
    """Return the launcher `trainjob` or `rayjob`."""
    from components.common.launch.kubernetes import kubernetes_launcher

    return kubernetes_launcher.connect_launcher(settings)


def create_ray_launcher(settings: LauncherSettings) -> Launcher:
    """Return the launcher `ray`."""
    from components.common.launch.ray.ray_launcher import RayLauncher

    return RayLauncher(settings)


_POD_HARDWARE = ("accelerator", "cpu", "node_selector", "node_affinity")
LAUNCHERS: dict[LauncherKind, LauncherEntry] = {
    "process": LauncherEntry(
        "processes on the machine of the step",
        create_process_launcher,
        uses_this_machine=True,
        ends_with_step=True,
        supports_nodes=False,
    ),
    "slurm": LauncherEntry(
        "a Slurm batch job",
        create_slurm_launcher,
        SlurmSettings,
        hardware_fields=("gres", "constraint", "cpus"),
        supports_arrays=True,
    ),
    "trainjob": LauncherEntry(
        "a TrainJob of Kubeflow Trainer", create_kubernetes_launcher, TrainJobSettings, _POD_HARDWARE, resource=TRAINJOB
    ),
    "rayjob": LauncherEntry(
        "a RayJob of KubeRay", create_kubernetes_launcher, RayJobSettings, _POD_HARDWARE, resource=RAYJOB
    ),
    "ray": LauncherEntry(
        "a job on an existing Ray cluster",
        create_ray_launcher,
        RaySettings,
        hardware_fields=("accelerator", "cpus", "resources"),
        required_fields={"address": "the address of the cluster's dashboard, for example http://HOST:8265"},
    ),
}


def create_launcher(settings: LauncherSettings) -> Launcher:
    """Return the launcher that the settings select.

    Raises:
        EngineMissingError: the launcher's client or cluster is not available.
        ConfigurationError: the settings cannot be used.
    """
    return settings.entry.create(settings)
