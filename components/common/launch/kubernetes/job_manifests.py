"""The manifest of a TrainJob or a RayJob that runs a command.

The pods meet the restricted Pod Security Standard unless the settings add capabilities.
"""

# A TrainJob's runtime provides the rest of its pods: the manifest patches the runtime's job `node`, and the runtime
# injects the variables of torchrun (PET_…).

from __future__ import annotations

import shlex
from pathlib import Path

from components.common.artifacts import hashing
from components.common.launch import Command, JsonObject
from components.common.launch.kubernetes.pod_scheduling import build_affinity, build_tolerations, drop_empty
from components.common.launch.kubernetes.pod_settings import LABEL_PREFIX, PodSettings
from components.common.launch.launcher_settings import LauncherSettings, resolve_folder, to_environment
from components.common.launch.ray.ray_settings import RaySettings
from components.common.runtime.errors import ConfigurationError

# JOB_LABEL has the key of the folder, on jobs and pods; NAME_LABEL has the name of the pod's job.
JOB_LABEL, NAME_LABEL, FOLDER_ANNOTATION = f"{LABEL_PREFIX}job", f"{LABEL_PREFIX}job-name", f"{LABEL_PREFIX}folder"
MANAGED_LABELS = {"app.kubernetes.io/managed-by": "tuneline"}
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
TRAINER_CONTAINER = "node"  # replicated job and container in the runtimes of Kubeflow Trainer
SHARED_VOLUME, SHARED_MEMORY_VOLUME = "shared", "shared-memory"
EXIT_GRACE_SECONDS = 30  # after the grace period to save, for Python and Ray to exit


def compute_job_key(settings: LauncherSettings, folder: Path) -> str:
    """Return 12 hexadecimal digits that identify the jobs of a folder on its volume."""
    pods = get_pod_settings(settings)
    return hashing.digest([pods.claim, pods.sub_path, str(resolve_folder(folder))])[:12]


def build_job_name(key: str, attempt: int) -> str:
    """Return the name of a folder's job for an attempt.

    Args:
        key: identifies the folder, from `compute_job_key`.
        attempt: number of the attempt, from 1.
    """
    return f"tuneline-{key}-{attempt}"


def get_pod_settings(settings: LauncherSettings) -> PodSettings:
    """Return the section of the selected launcher, `trainjob` or `rayjob`.

    Raises:
        TypeError: another launcher is selected.
    """
    section = settings.section
    if not isinstance(section, PodSettings):
        raise TypeError(f"launcher.kind is {settings.kind}; expected trainjob or rayjob")
    return section


def check_settings(settings: LauncherSettings, folder: Path) -> None:
    """Check that the image and the claim are set, and that the folder is on the claim's volume.

    Raises:
        ConfigurationError: the image or the claim is not set, or the folder is not on the volume.
    """
    pods, section = get_pod_settings(settings), f"launcher.{settings.kind}"
    for key, source in (("image", "images.training"), ("claim", "volume.claim")):
        if not getattr(pods, key):
            hint = f"Set {section}.{key}, or {source} in the platform.yaml of a compiled pipeline."
            raise ConfigurationError(f"{section}.{key} is empty; a {settings.kind} requires a value", hint=hint)
    if not resolve_folder(folder).is_relative_to(pods.mount):
        raise ConfigurationError(
            f"{resolve_folder(folder)} is not on the volume {pods.claim}, which is mounted at {pods.mount} "
            f"({section}.mount)",
            hint="Put the workdir on the volume that the step and the pods share, at the same path in both.",
        )


def build_trainjob(settings: LauncherSettings, command: Command, folder: Path, name: str) -> JsonObject:
    """Return the manifest of a TrainJob (trainer.kubeflow.org/v1alpha1)."""
    pods = settings.trainjob
    trainer = {
        "image": pods.image,
        "command": _build_module_command(settings, "components.common.launch.node_runner", str(resolve_folder(folder))),
        "numNodes": command.nodes,
        "numProcPerNode": command.processes,
        "resourcesPerNode": _build_resources(pods),
        "env": _build_environment(settings),
    }
    # The patch adds volumes, security and scheduling. Variables cannot be patched, so they are in `trainer`.
    pod_spec = _build_pod_spec(pods, {"name": TRAINER_CONTAINER})
    if pods.queue:
        # Kueue 0.19 writes the job back without this field, which it does not know, and JobSet then refuses the changed
        # job for ever. With a queue, the grace period is that of the runtime; `tuneline doctor` compares it.
        del pod_spec["terminationGracePeriodSeconds"]
    template = {"metadata": _build_pod_metadata(settings, folder, name), "spec": pod_spec}
    patch = {"replicatedJobs": [{"name": TRAINER_CONTAINER, "template": {"spec": {"template": template}}}]}
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": pods.runtime_kind, "name": pods.runtime},
        "trainer": drop_empty(trainer),
        "runtimePatches": [
            {"manager": f"{LABEL_PREFIX}launcher", "trainingRuntimeSpec": {"template": {"spec": patch}}}
        ],
        "activeDeadlineSeconds": pods.deadline_seconds or None,
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _build_metadata(settings, folder, name),
        "spec": drop_empty(spec),
    }


def build_rayjob(settings: LauncherSettings, command: Command, folder: Path, name: str) -> JsonObject:
    """Return the manifest of a RayJob (ray.io/v1) with its own cluster: a head and a worker per node."""
    pods = settings.rayjob
    head_resources = _build_amounts({"cpu": pods.head_cpu, "memory": pods.head_memory})
    # The entry point reserves all resources of each worker pod.
    ray = RaySettings(cpus=int(pods.cpu) if pods.cpu.isdigit() else 0, accelerator=pods.accelerator)
    head_environment = to_environment(settings.model_copy(update={"ray": ray}))
    head = {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104 - KubeRay calls it
        "template": _build_ray_template(settings, folder, name, "head", head_resources, head_environment),
    }
    workers = {
        "groupName": "nodes",
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), command.nodes),
        "rayStartParams": {},
        "template": _build_ray_template(settings, folder, name, "node", _build_resources(pods), {}),
    }
    cluster = {"rayVersion": pods.ray_version, "headGroupSpec": head, "workerGroupSpecs": [workers]}
    entrypoint = _build_module_command(
        settings, "components.common.launch.ray.ray_entrypoint", str(resolve_folder(folder))
    )
    spec = {
        "entrypoint": shlex.join(entrypoint),
        "submissionMode": "HTTPMode",  # without a separate submitter pod
        "shutdownAfterJobFinishes": True,  # required by Kueue
        "ttlSecondsAfterFinished": pods.keep_seconds,
        "backoffLimit": 0,  # the watching step decides about another attempt
        "activeDeadlineSeconds": pods.deadline_seconds or None,
        "rayClusterSpec": drop_empty(cluster),
    }
    metadata = _build_metadata(settings, folder, name)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": drop_empty(spec)}


def _build_ray_template(
    settings: LauncherSettings, folder: Path, name: str, part: str, resources: JsonObject, variables: dict[str, str]
) -> JsonObject:
    pods = settings.rayjob
    module, job_folder = "components.common.launch.ray.pre_stop_hook", str(resolve_folder(folder))
    hook = _build_module_command(settings, module, str(pods.save_seconds), job_folder)
    container = {
        "name": "ray",
        "image": pods.image,
        "imagePullPolicy": pods.pull_policy,
        "env": _build_environment(settings, RAY_JOB_STOP_WAIT_TIME_S=str(pods.save_seconds), **variables),
        "resources": resources,
    }
    # Ray kills its processes as soon as its pod gets SIGTERM; the hook runs before that signal.
    lifecycle = {"preStop": {"exec": {"command": hook}}}
    metadata = _build_pod_metadata(settings, folder, name, **{f"{LABEL_PREFIX}part": part})
    spec = {"automountServiceAccountToken": False, **_build_pod_spec(pods, container, lifecycle)}
    return {"metadata": metadata, "spec": spec}


def _build_module_command(settings: LauncherSettings, module: str, *arguments: str) -> list[str]:
    return [settings.python or "python", "-P", "-m", module, *arguments]


def _build_metadata(settings: LauncherSettings, folder: Path, name: str) -> JsonObject:
    pods = get_pod_settings(settings)
    queue = drop_empty({QUEUE_LABEL: pods.queue, PRIORITY_LABEL: pods.priority}) if pods.queue else {}
    labels = {**MANAGED_LABELS, **pods.labels, JOB_LABEL: compute_job_key(settings, folder), **queue}
    return {"name": name, "labels": labels, "annotations": {FOLDER_ANNOTATION: str(resolve_folder(folder))}}


def _build_pod_metadata(settings: LauncherSettings, folder: Path, name: str, **labels: str) -> JsonObject:
    """Return the metadata of the pods of a job; by the labels, the pods are found after their job was deleted."""
    pods = get_pod_settings(settings)
    own_labels = {JOB_LABEL: compute_job_key(settings, folder), NAME_LABEL: name}
    return drop_empty(
        {"labels": {**MANAGED_LABELS, **pods.labels, **labels, **own_labels}, "annotations": dict(pods.annotations)}
    )


def _build_pod_spec(pods: PodSettings, container: JsonObject, lifecycle: JsonObject | None = None) -> JsonObject:
    """Return the specification of a pod; add the security context and the mounts to this container."""
    identity = {"runAsUser": pods.run_as_user, "runAsGroup": pods.run_as_group}
    security_context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **identity}
    capabilities = drop_empty({"drop": ["ALL"], "add": list(pods.capabilities)})
    volumes, mounts = _build_volumes(pods)
    container = {
        **container,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": mounts,
        "lifecycle": lifecycle,
    }
    return drop_empty(
        {
            "securityContext": drop_empty(security_context),
            "serviceAccountName": pods.service_account,
            "imagePullSecrets": [{"name": name} for name in pods.pull_secrets],
            "nodeSelector": dict(pods.node_selector),
            "tolerations": build_tolerations(pods.tolerations),
            "affinity": build_affinity(pods.node_affinity),
            "terminationGracePeriodSeconds": pods.save_seconds + EXIT_GRACE_SECONDS,
            "volumes": volumes,
            "containers": [drop_empty(container)],
        }
    )


def _build_volumes(pods: PodSettings) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return the volumes of a pod and the mounts of its container."""
    claims = [(SHARED_VOLUME, pods.claim, pods.mount, pods.sub_path)]
    claims += [(f"further-{n}", claim.claim, claim.mount, claim.sub_path) for n, claim in enumerate(pods.claims)]
    volumes: list[JsonObject] = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _, _ in claims
    ]
    mounts = [drop_empty({"name": name, "mountPath": mount, "subPath": path}) for name, _, mount, path in claims]
    if pods.shared_memory:
        memory = {"medium": "Memory", "sizeLimit": pods.shared_memory}
        volumes.append({"name": SHARED_MEMORY_VOLUME, "emptyDir": memory})
        mounts.append({"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"})  # noqa: S108 - the mount path
    return volumes, mounts


def _build_resources(pods: PodSettings) -> JsonObject:
    accelerator = {pods.accelerator: str(pods.accelerators)} if pods.accelerator else {}
    return _build_amounts({"cpu": pods.cpu, "memory": pods.memory, **accelerator, **pods.resources})


def _build_amounts(amounts: dict[str, str]) -> JsonObject:
    """Return resources with requests equal to limits."""
    values = drop_empty(amounts)
    return {"requests": values, "limits": dict(values)} if values else {}


def _build_environment(settings: LauncherSettings, **variables: str) -> list[JsonObject]:
    threads = {"TUNELINE_JOB_THREADS": str(settings.threads)} if settings.threads else {}
    values = {**threads, **settings.environment, **variables}
    return [{"name": name, "value": value} for name, value in sorted(values.items())]
