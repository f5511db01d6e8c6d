"""The launcher that the settings name: a new one is a new entry."""

from __future__ import annotations

from collections.abc import Callable

from components.common.launch import Launcher
from components.common.launch.settings import LauncherSettings


def _process(settings: LauncherSettings) -> Launcher:
    from components.common.launch.torchrun import TorchRun

    return TorchRun()


def _slurm(settings: LauncherSettings) -> Launcher:
    from components.common.launch.slurm.launcher import SlurmLauncher
    from components.common.launch.slurm.programs import Programs
    from components.common.launch.slurm.rest import Rest

    return SlurmLauncher(settings, Rest(settings.slurm) if settings.slurm.rest else Programs(settings.slurm.ssh))


def _kubernetes(settings: LauncherSettings) -> Launcher:
    from components.common.launch import kubernetes_jobs

    return kubernetes_jobs.launcher(settings)


def _ray(settings: LauncherSettings) -> Launcher:
    from components.common.launch.ray_cluster import RayLauncher

    return RayLauncher(settings)


LAUNCHERS: dict[str, Callable[[LauncherSettings], Launcher]] = {
    "process": _process,
    "slurm": _slurm,
    "trainjob": _kubernetes,
    "rayjob": _kubernetes,
    "ray": _ray,
}


def launcher(settings: LauncherSettings) -> Launcher:
    """The launcher. Raises EngineMissingError or ConfigurationError where it cannot work here."""
    return LAUNCHERS[settings.kind](settings)


def can_start_together(settings: LauncherSettings) -> bool:
    """Whether its scheduler takes many jobs in one, so that they need not wait for one another here (see StartsTogether)."""
    return settings.kind == "slurm"
