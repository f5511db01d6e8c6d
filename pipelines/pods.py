"""How a step's pod is made: what platform.yaml says, through kfp and kfp-kubernetes."""

from __future__ import annotations

from typing import Any

from components.common import images
from pipelines.platform import Platform, Resources, Scheduling

RUN_LABEL = "pipeline/runid"  # Kubeflow Pipelines gives it to every pod of a run
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def place(task: Any, platform: Platform) -> None:
    """Give a pipeline task its image, volume, environment, scheduling and resources."""
    from kfp import kubernetes

    _image(task, platform)
    _environment(task, platform)
    _scheduling(task, platform.scheduling)
    if task.component_spec.name == "registration":
        kubernetes.use_field_path_as_env(task, env_name="KFP_RUN_ID", field_path=f"metadata.labels['{RUN_LABEL}']")
    stage = task.component_spec.name.replace("-", "_")
    _resources(task, getattr(platform.resources, stage, platform.resources.others))


def _image(task: Any, platform: Platform) -> None:
    from kfp import kubernetes

    named = platform.images
    runtimes = {
        images.CURATION: named.curation,
        images.TRAINING: named.training,
        images.EVALUATION: named.evaluation,
        images.SERVING: named.serving,
    }
    task.set_container_image(runtimes[task.container_spec.image])
    if named.pull_secrets:
        kubernetes.set_image_pull_secrets(task, named.pull_secrets)
    if named.pull_policy:
        kubernetes.set_image_pull_policy(task, named.pull_policy)


def _environment(task: Any, platform: Platform) -> None:
    """The volume and the places on it; every variable by name, so that the compiled file is the same for the same platform."""
    from kfp import kubernetes

    volume = platform.volume
    kubernetes.mount_pvc(task, pvc_name=volume.claim, mount_path=volume.mount)
    values = {
        "TUNELINE_WORKDIR": volume.workdir,
        "TUNELINE_STORE": f"{volume.workdir}/store",
        "TUNELINE_STATE": f"{volume.workdir}/state",
        "TUNELINE_CACHE": f"{volume.workdir}/cache",
        "MLFLOW_TRACKING_URI": platform.mlflow.tracking_uri or f"sqlite:///{volume.workdir}/mlflow.db",
        **platform.environment,
    }
    for name in sorted(values.keys() - platform.secrets.keys()):  # a variable that stands twice would leave it to Kubernetes which counts
        task.set_env_variable(name, values[name])
    for name, secret in sorted(platform.secrets.items()):
        kubernetes.use_secret_as_env(task, secret_name=secret.name, secret_key_to_env={secret.key: name})


def _scheduling(task: Any, scheduling: Scheduling) -> None:
    from kfp import kubernetes

    for key, value in sorted(scheduling.node_selector.items()):
        kubernetes.add_node_selector(task, key, value)
    for t in scheduling.tolerations:
        kubernetes.add_toleration(task, t.key or None, t.operator, t.value or None, t.effect, t.seconds)
    if scheduling.queue:
        kubernetes.add_pod_label(task, QUEUE_LABEL, scheduling.queue)


def _resources(task: Any, wanted: Resources) -> None:
    from kfp import kubernetes

    if wanted.cpu:
        task.set_cpu_request(wanted.cpu).set_cpu_limit(wanted.cpu)
    if wanted.memory:
        task.set_memory_request(wanted.memory).set_memory_limit(wanted.memory)
    if wanted.accelerator:
        task.set_accelerator_type(wanted.accelerator).set_accelerator_limit(wanted.accelerators)
    if wanted.shared_memory:
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory", size_limit=wanted.shared_memory)  # noqa: S108
    if wanted.timeout_seconds:
        kubernetes.set_timeout(task, wanted.timeout_seconds)
