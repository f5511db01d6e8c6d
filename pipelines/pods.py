"""How a step's pod is made: what platform.yaml says, through kfp and kfp-kubernetes."""

from __future__ import annotations

from typing import Any

from components.common import images
from components.common.launch import settings
from components.common.scheduling import NodeAffinity
from pipelines import launching
from pipelines.platform import CERTIFICATES, SCRATCH, SHARED_MEMORY, Platform, Resources, Scheduling, Security
from pipelines.stages import TITLES

RUN_LABEL = "pipeline/runid"  # Kubeflow Pipelines gives it to every pod of a run
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
# What OpenSSL and Go read, and those that bring authorities of their own unless told: requests, curl, botocore, git.
TRUST = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "GIT_SSL_CAINFO")
TRAINING = ("fine-tuning", "resolve", "plan-one")  # the steps that have to know where the training runs: it is part of its key
LONGEST_PAUSE = "3600s"


def pipeline_config(platform: Platform | None) -> Any:
    """What holds for a run as a whole, as kfp.dsl.PipelineConfig; None where nothing is said."""
    from kfp import dsl

    run = platform.run if platform else None
    if run is None or (run.keep_seconds is None and not run.timeout_seconds):
        return None
    return dsl.PipelineConfig(ttl_seconds_after_finished=run.keep_seconds, active_deadline_seconds=run.timeout_seconds or None)


def prepared(task: Any, platform: Platform | None, *, cached: bool) -> Any:
    """A pipeline task with its title in the UI and its pod made for the platform, if there is one; not `cached`: run each time."""
    task.set_display_name(TITLES[task.component_spec.name.replace("-", "_")])
    if not cached:
        task.set_caching_options(enable_caching=False)
    if platform:
        place(task, platform)
    return task


def place(task: Any, platform: Platform) -> None:
    """Give a pipeline task its image, volumes, environment, identity, scheduling and resources."""
    from kfp import kubernetes

    stage = task.component_spec.name.replace("-", "_")
    wanted: Resources = getattr(platform.resources, stage, platform.resources.others)
    _image(task, platform)
    _volumes(task, platform)
    _environment(task, platform, wanted)
    _security(task, platform.security)
    _scheduling(task, merged(platform.scheduling, wanted.scheduling))
    if task.component_spec.name == "registration":
        kubernetes.use_field_path_as_env(task, env_name="KFP_RUN_ID", field_path=f"metadata.labels['{RUN_LABEL}']")
    _resources(task, wanted)
    _space(task, platform, wanted)


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


def _volumes(task: Any, platform: Platform) -> None:
    from kfp import kubernetes

    volume, trusted = platform.volume, platform.network.certificates
    kubernetes.mount_pvc(task, pvc_name=volume.claim, mount_path=volume.mount, sub_path=volume.sub_path)
    for claim in platform.claims:
        kubernetes.mount_pvc(task, pvc_name=claim.claim, mount_path=claim.mount, sub_path=claim.sub_path)
    for files in platform.secret_files:
        kubernetes.use_secret_as_volume(task, secret_name=files.name, mount_path=files.mount)
    for files in platform.config_files:
        kubernetes.use_config_map_as_volume(task, config_map_name=files.name, mount_path=files.mount)
    if trusted.secret:
        kubernetes.use_secret_as_volume(task, secret_name=trusted.secret, mount_path=CERTIFICATES)
    if trusted.config_map:
        kubernetes.use_config_map_as_volume(task, config_map_name=trusted.config_map, mount_path=CERTIFICATES)


def _environment(task: Any, platform: Platform, wanted: Resources) -> None:
    """Every variable by name, so that the compiled file is the same for the same platform."""
    from kfp import kubernetes

    volume = platform.volume
    values = {
        "TUNELINE_WORKDIR": volume.workdir,
        "TUNELINE_STORE": platform.store or f"{volume.workdir}/store",
        "TUNELINE_STATE": f"{volume.workdir}/state",
        "TUNELINE_CACHE": f"{volume.workdir}/cache",
        "MLFLOW_TRACKING_URI": platform.mlflow.tracking_uri or f"sqlite:///{volume.workdir}/mlflow.db",
        **({"TUNELINE_MLFLOW_UI": platform.mlflow.ui} if platform.mlflow.ui else {}),
        **({"TMPDIR": platform.scratch.mount} if wanted.scratch else {}),
        **_ways_out(platform),
        **platform.environment,
        **(_launcher(platform, platform.resources.fine_tuning) if task.component_spec.name in TRAINING else {}),
    }
    for name in sorted(values.keys() - platform.secrets.keys()):  # a variable that stands twice would leave it to Kubernetes which counts
        task.set_env_variable(name, values[name])
    for name, secret in sorted(platform.secrets.items()):
        kubernetes.use_secret_as_env(task, secret_name=secret.name, secret_key_to_env={secret.key: name})


def _launcher(platform: Platform, wanted: Resources) -> dict[str, str]:
    """Where the training runs, if not in the step's pod."""
    if platform.launcher.kind == "process":
        return {}
    return settings.as_environment(launching.launcher(platform, merged(platform.scheduling, wanted.scheduling)))


def _ways_out(platform: Platform) -> dict[str, str]:
    """Variables for proxies and trusted authorities. Some programs read the proxy in small letters only, some in capitals only."""
    network = platform.network
    proxies = {"HTTP_PROXY": network.http_proxy, "HTTPS_PROXY": network.https_proxy}
    found = {name: proxy for name, proxy in proxies.items() if proxy}
    if found:
        found["NO_PROXY"] = ",".join(network.no_proxy)
    both = {**found, **{name.lower(): value for name, value in found.items()}}
    return both | (dict.fromkeys(TRUST, network.certificates.path) if network.certificates.name else {})


def _security(task: Any, security: Security) -> None:
    from kfp import kubernetes

    said = security.model_dump(exclude_none=True)
    if said:
        kubernetes.set_security_context(task, **said)


def merged(common: Scheduling, own: Scheduling | None) -> Scheduling:
    """The scheduling of all pods, with what a stage adds to it."""
    if own is None:
        return common
    return Scheduling(
        node_selector=common.node_selector | own.node_selector,
        tolerations=common.tolerations + own.tolerations,
        node_affinity=common.node_affinity + own.node_affinity,
        queue=own.queue or common.queue,
        priority=own.priority or common.priority,
        labels=common.labels | own.labels,
        annotations=common.annotations | own.annotations,
    )


def _scheduling(task: Any, scheduling: Scheduling) -> None:
    from kfp import kubernetes

    for key, value in sorted(scheduling.node_selector.items()):
        kubernetes.add_node_selector(task, key, value)
    for t in scheduling.tolerations:
        kubernetes.add_toleration(task, t.key or None, t.operator, t.value or None, t.effect, t.seconds)
    _affinity(task, scheduling.node_affinity)
    queue = {QUEUE_LABEL: scheduling.queue, PRIORITY_LABEL: scheduling.priority}
    for key, value in sorted((scheduling.labels | {key: value for key, value in queue.items() if value}).items()):
        kubernetes.add_pod_label(task, key, value)
    for key, value in sorted(scheduling.annotations.items()):
        kubernetes.add_pod_annotation(task, key, value)


def _affinity(task: Any, conditions: list[NodeAffinity]) -> None:
    """Kubernetes wants one of several required terms to hold, and every expression within a term: so what must hold is one term."""
    from kfp import kubernetes

    required = [_expression(one) for one in conditions if one.weight is None]
    if required:
        kubernetes.add_node_affinity(task, match_expressions=required)
    for one in conditions:
        if one.weight is not None:
            kubernetes.add_node_affinity(task, match_expressions=[_expression(one)], weight=one.weight)


def _expression(one: NodeAffinity) -> dict[str, Any]:
    return {"key": one.key, "operator": one.operator, "values": one.values}


def _resources(task: Any, wanted: Resources) -> None:
    from kfp import kubernetes

    if wanted.cpu:
        task.set_cpu_request(wanted.cpu).set_cpu_limit(wanted.cpu)
    if wanted.memory:
        task.set_memory_request(wanted.memory).set_memory_limit(wanted.memory)
    if wanted.accelerator:
        task.set_accelerator_type(wanted.accelerator).set_accelerator_limit(wanted.accelerators)
    if wanted.timeout_seconds:
        kubernetes.set_timeout(task, wanted.timeout_seconds)
    if wanted.retries:
        task.set_retry(wanted.retries, f"{wanted.retry_after_seconds}s", 2.0, LONGEST_PAUSE)


def _space(task: Any, platform: Platform, wanted: Resources) -> None:
    """What a pod has for itself: shared memory, and scratch space on the node's disk or on a claim that lives as long as the pod."""
    from kfp import kubernetes

    scratch = platform.scratch
    if wanted.shared_memory:
        name, path = SHARED_MEMORY
        kubernetes.empty_dir_mount(task, name, path, medium="Memory", size_limit=wanted.shared_memory)
    if wanted.scratch and scratch.storage_class:
        kubernetes.add_ephemeral_volume(task, SCRATCH, scratch.mount, ["ReadWriteOnce"], wanted.scratch, scratch.storage_class)
    elif wanted.scratch:
        kubernetes.empty_dir_mount(task, SCRATCH, scratch.mount, size_limit=wanted.scratch)
