"""Launcher settings of a step on Kubeflow: the settings of platform.yaml, with defaults from the step's pod."""

from __future__ import annotations

from components.common.launch.kubernetes.pod_settings import PodSettings
from components.common.launch.launcher_settings import LauncherSettings
from pipelines.config.platform_config import Platform, Scheduling

SCHEDULING_FIELDS = ("node_selector", "tolerations", "node_affinity", "queue", "priority", "labels", "annotations")


def resolve_launcher(platform: Platform, scheduling: Scheduling) -> LauncherSettings:
    """Return the platform's launcher settings; values of the step's pod replace unset values.

    Args:
        platform: the content of platform.yaml.
        scheduling: the scheduling of the step's pod.
    """
    launcher, pods = platform.launcher, platform.launcher.section
    if not isinstance(pods, PodSettings):
        return launcher
    images, volume, security = platform.images, platform.volume, platform.security
    defaults = {
        "image": images.training,
        "pull_policy": images.pull_policy,
        "pull_secrets": images.pull_secrets,
        "claims": platform.claims,
        "run_as_user": security.run_as_user,
        "run_as_group": security.run_as_group,
        **{name: getattr(scheduling, name) for name in SCHEDULING_FIELDS},
    }
    updates = {name: value for name, value in defaults.items() if getattr(pods, name) in (None, "", [], {})}
    if not pods.claim:
        updates |= {"claim": volume.claim, "mount": volume.mount, "sub_path": volume.sub_path}
    environment = {**platform.environment, **launcher.environment}
    return launcher.model_copy(update={"environment": environment, launcher.kind: pods.model_copy(update=updates)})
