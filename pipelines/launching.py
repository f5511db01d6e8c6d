"""The launcher of a step on Kubeflow: what platform.yaml says of it, with what it says of the step's own pod where that is left out."""

from __future__ import annotations

from typing import Any

from components.common.launch.settings import LauncherSettings
from pipelines.platform import Platform, Scheduling

OF_KUBERNETES = ("trainjob", "rayjob")
PLACE = ("node_selector", "tolerations", "node_affinity", "queue", "priority", "labels", "annotations")


def launcher(platform: Platform, scheduling: Scheduling) -> LauncherSettings:
    """The launcher's settings for a step whose pod is scheduled so."""
    said = platform.launcher
    environment = {**platform.environment, **said.environment} if said.kind in OF_KUBERNETES else said.environment
    filled: dict[str, Any] = {kind: _filled(getattr(said, kind), platform, scheduling) for kind in OF_KUBERNETES if said.kind == kind}
    return said.model_copy(update={"environment": environment, **filled})


def _filled(pods: Any, platform: Platform, scheduling: Scheduling) -> Any:
    """A section with what is empty taken from the rest of the platform."""
    images, volume, security = platform.images, platform.volume, platform.security
    known = {
        "image": images.training,
        "pull_policy": images.pull_policy,
        "pull_secrets": images.pull_secrets,
        "claims": platform.claims,
        "run_as_user": security.run_as_user,
        "run_as_group": security.run_as_group,
        **{name: getattr(scheduling, name) for name in PLACE},
    }
    taken = {name: value for name, value in known.items() if getattr(pods, name) in (None, "", [], {})}
    place = {} if pods.claim else {"claim": volume.claim, "mount": volume.mount, "sub_path": volume.sub_path}
    return pods.model_copy(update={**taken, **place})
