"""What is asked of Kubernetes: the TrainJob or RayJob of a command, as JSON.

The pods pass the restricted Pod Security Standard, unless the settings add capabilities. Of a TrainJob's pods the runtime says the rest:
its `node` job is what is patched here, and the variables of torchrun (PET_…) are what it injects.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from components.common import hashing
from components.common.errors import ConfigurationError
from components.common.launch import Command
from components.common.launch.pods import OWN, Pods, RayJob
from components.common.launch.settings import LauncherSettings, Ray, as_environment, shared
from components.common.scheduling import affinity, tolerations

Json = dict[str, Any]
JOB_LABEL, FOLDER_NOTE = f"{OWN}job", f"{OWN}folder"
MANAGED = {"app.kubernetes.io/managed-by": "tuneline"}
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
NODE = "node"  # of the runtimes that come with Kubeflow Trainer: the replicated job, and its container
RAY_CONTAINER = "ray"
VOLUME, SHARED_MEMORY = "shared", "shared-memory"
AFTER_SAVING = 30  # seconds between the end of the time to save and the kill: for Python and Ray to end


def key_of(settings: LauncherSettings, folder: Path) -> str:
    """What tells the jobs of a folder from all others: 12 hexadecimal digits. The same path on another volume is another folder."""
    pods = pods_of(settings)
    return hashing.digest([pods.claim, pods.sub_path, str(shared(folder))])[:12]


def name_of(key: str, number: int) -> str:
    """The name of a folder's job: that of its try `number`."""
    return f"tuneline-{key}-{number}"


def pods_of(settings: LauncherSettings) -> Pods:
    """The section that counts."""
    return settings.rayjob if settings.kind == "rayjob" else settings.trainjob


def check(settings: LauncherSettings, folder: Path) -> None:
    """Raise ConfigurationError where no pod could do the work: without an image, or in a folder that is not on the volume."""
    pods, section = pods_of(settings), f"launcher.{settings.kind}"
    for key, meant in (("image", "images.training"), ("claim", "volume.claim")):
        if not getattr(pods, key):
            hint = f"A step that was compiled with a platform.yaml takes {meant}; elsewhere name it."
            raise ConfigurationError(f"{section}.{key} is empty, and the pods of a {settings.kind} need one", hint=hint)
    if not shared(folder).is_relative_to(pods.mount):
        raise ConfigurationError(
            f"{shared(folder)} is not on the volume {pods.claim}, which is mounted at {pods.mount} ({section}.mount)",
            hint="Put the work folder on the volume that the step and the pods share, at the same place in both.",
        )


def trainjob(settings: LauncherSettings, command: Command, folder: Path, name: str) -> Json:
    """A TrainJob (trainer.kubeflow.org/v1alpha1)."""
    pods = settings.trainjob
    run = [settings.python or "python", "-P", "-m", "components.common.launch.node", str(shared(folder))]
    trainer = {
        "image": pods.image,
        "command": run,
        "numNodes": command.nodes,
        "numProcPerNode": command.processes,
        "resourcesPerNode": _resources(pods),
        "env": _environment(settings),
    }
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": pods.runtime_kind, "name": pods.runtime},
        "trainer": _said(trainer),
        "runtimePatches": [{"manager": f"{OWN}launcher", "trainingRuntimeSpec": {"template": {"spec": _patched(pods)}}}],
        "activeDeadlineSeconds": pods.deadline_seconds or None,
    }
    metadata = _metadata(settings, folder, name)
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": _said(spec)}


def _patched(pods: Pods) -> Json:
    """What a runtime does not know: the volume, the security, the place. Its variables may not be patched, they stand in `trainer`."""
    container = {"name": NODE, "securityContext": _confined(pods), "volumeMounts": _mounts(pods)}
    spec = {**_pod(pods), "containers": [container]}
    template = _said({"metadata": _said({"labels": dict(pods.labels), "annotations": dict(pods.annotations)}), "spec": spec})
    return {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": template}}}]}


def rayjob(settings: LauncherSettings, command: Command, folder: Path, name: str) -> Json:
    """A RayJob (ray.io/v1) with a cluster of its own: a head, and a worker a node of the training."""
    pods = settings.rayjob
    run = [settings.python or "python", "-P", "-m", "components.common.launch.ray_nodes", str(shared(folder))]
    spec = {
        "entrypoint": shlex.join(run),
        "submissionMode": "HTTPMode",  # without a pod that does nothing but submit
        "shutdownAfterJobFinishes": True,  # Kueue wants it
        "ttlSecondsAfterFinished": pods.keep_seconds,
        "backoffLimit": 0,  # who watches starts it again, and knows when
        "activeDeadlineSeconds": pods.deadline_seconds or None,
        "rayClusterSpec": _said({"rayVersion": pods.ray_version, **_groups(settings, command, folder)}),
    }
    metadata = _metadata(settings, folder, name)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": _said(spec)}


def _groups(settings: LauncherSettings, command: Command, folder: Path) -> Json:
    pods, count = settings.rayjob, command.nodes
    own = _amounts({"cpu": pods.head_cpu, "memory": pods.head_memory})
    told = as_environment(settings.model_copy(update={"ray": _share(pods)}))
    head = {
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104 - of the pod; KubeRay asks there
        "template": _template(settings, folder, "head", own, told),
    }
    workers = {
        "groupName": "nodes",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": _template(settings, folder, "node", _resources(pods), {}),
    }
    return {"headGroupSpec": head, "workerGroupSpecs": [workers]}


def _share(pods: RayJob) -> Ray:
    """What the entry point takes of each node: all that its pod has."""
    return Ray(cpus=int(pods.cpu) if pods.cpu.isdigit() else 0, accelerator=pods.accelerator)


def _template(settings: LauncherSettings, folder: Path, part: str, resources: Json, told: dict[str, str]) -> Json:
    pods = settings.rayjob
    save = [settings.python or "python", "-P", "-m", "components.common.launch.save", str(pods.save_seconds), str(shared(folder))]
    container = {
        "name": RAY_CONTAINER,
        "image": pods.image,
        "imagePullPolicy": pods.pull_policy,
        "env": _environment(settings, RAY_JOB_STOP_WAIT_TIME_S=str(pods.save_seconds), **told),
        "resources": resources,
        "securityContext": _confined(pods),
        "volumeMounts": _mounts(pods),
        # Ray ends its processes at once when its pod is ended. What runs before that signal is this.
        "lifecycle": {"preStop": {"exec": {"command": save}}},
    }
    labels = {**MANAGED, **pods.labels, f"{OWN}part": part}
    metadata = _said({"labels": labels, "annotations": dict(pods.annotations)})
    return {"metadata": metadata, "spec": {**_pod(pods), "containers": [_said(container)]}}


def _metadata(settings: LauncherSettings, folder: Path, name: str) -> Json:
    pods = pods_of(settings)
    queue = {QUEUE: pods.queue, PRIORITY: pods.priority} if pods.queue else {}
    labels = {**MANAGED, **pods.labels, JOB_LABEL: key_of(settings, folder), **_said(queue)}
    return {"name": name, "labels": labels, "annotations": {FOLDER_NOTE: str(shared(folder))}}


def _pod(pods: Pods) -> Json:
    """What holds for a pod as a whole."""
    identity = {"runAsUser": pods.run_as_user, "runAsGroup": pods.run_as_group}
    return _said(
        {
            "securityContext": _said({"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **identity}),
            "serviceAccountName": pods.service_account,
            "imagePullSecrets": [{"name": name} for name in pods.pull_secrets],
            "nodeSelector": dict(pods.node_selector),
            "tolerations": tolerations(pods.tolerations),
            "affinity": affinity(pods.node_affinity),
            "terminationGracePeriodSeconds": pods.save_seconds + AFTER_SAVING,
            "volumes": _volumes(pods),
        }
    )


def _confined(pods: Pods) -> Json:
    return {"allowPrivilegeEscalation": False, "capabilities": _said({"drop": ["ALL"], "add": list(pods.capabilities)})}


def _volumes(pods: Pods) -> list[Json]:
    claims = {VOLUME: pods.claim} | {_further(number): one.claim for number, one in enumerate(pods.claims)}
    volumes: list[Json] = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in claims.items()]
    if pods.shared_memory:
        volumes.append({"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}})
    return volumes


def _further(number: int) -> str:
    return f"further-{number}"


def _mounts(pods: Pods) -> list[Json]:
    mounts: list[Json] = [_said({"name": VOLUME, "mountPath": pods.mount, "subPath": pods.sub_path})]
    mounts += [_said({"name": _further(number), "mountPath": one.mount, "subPath": one.sub_path}) for number, one in enumerate(pods.claims)]
    if pods.shared_memory:
        mounts.append({"name": SHARED_MEMORY, "mountPath": "/dev/shm"})  # noqa: S108 - where it is mounted
    return mounts


def _resources(pods: Pods) -> Json:
    accelerator = {pods.accelerator: str(pods.accelerators)} if pods.accelerator else {}
    return _amounts({"cpu": pods.cpu, "memory": pods.memory, **accelerator, **pods.resources})


def _amounts(wanted: dict[str, str]) -> Json:
    """As much as is asked for, and no more."""
    said = _said(wanted)
    return {"requests": said, "limits": dict(said)} if said else {}


def _environment(settings: LauncherSettings, **own: str) -> list[Json]:
    threads = {"TUNELINE_JOB_THREADS": str(settings.threads)} if settings.threads else {}
    return [{"name": name, "value": value} for name, value in sorted({**threads, **settings.environment, **own}.items())]


def _said(values: Json) -> Json:
    """Without what says nothing."""
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}
