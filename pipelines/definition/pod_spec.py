"""Pod specification of each pipeline step: platform.yaml applied to a task through kfp and kfp-kubernetes."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

from components.common.cost import budgets
from components.common.cost.budgets import Budget, BudgetAccount, SpendingMeter
from components.common.launch import launcher_settings
from components.common.launch.kubernetes.pod_scheduling import Claim
from components.common.launch.launcher_settings import LauncherSettings
from components.common.runtime import container_images
from components.common.workspace import step_records
from pipelines.config.platform_config import (
    CERTIFICATES_FOLDER,
    SCRATCH_VOLUME,
    SHARED_MEMORY,
    Platform,
    Resources,
    Scheduling,
    Volume,
)
from pipelines.steps import step_launcher
from pipelines.steps.stage_names import STEP_TITLES

if TYPE_CHECKING:
    from kfp import dsl

RUN_LABEL = "pipeline/runid"  # set by Kubeflow Pipelines on every pod of a run
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
# OpenSSL and Go read the first; requests, curl, botocore and git use their own CA bundles by default.
CA_BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "GIT_SSL_CAINFO")
LAUNCHER_STEPS = ("fine-tuning", "resolve", "plan-one")  # the launcher is part of the training's cache key
NOTIFICATION_STEPS = ("check-the-platform", "finish")
BUDGET_STEPS = ("fine-tuning",)  # pods do not know the cost of one another
MAX_RETRY_INTERVAL = "3600s"


def pipeline_config(platform: Platform | None) -> dsl.PipelineConfig | None:
    """Return the Kubernetes settings of the whole run; None if the platform sets no such settings."""
    from kfp import dsl

    run = platform.run if platform else None
    if run is None or (run.keep_seconds is None and not run.timeout_seconds):
        return None
    return dsl.PipelineConfig(
        ttl_seconds_after_finished=run.keep_seconds, active_deadline_seconds=run.timeout_seconds or None
    )


def name_component(component: dsl.base_component.BaseComponent, prefix: str) -> dsl.base_component.BaseComponent:
    """Return the component with a prefix before its name, from which kfp takes the names of tasks and executors."""
    if not prefix:
        return component
    named = copy.copy(component)
    named.component_spec = dataclasses.replace(component.component_spec, name=f"{prefix}-{component.name}")
    return named


def build_title(step: str, prefix: str) -> str:
    """Return the title of a step in the Kubeflow UI. `prefix` is that of `name_component`."""
    return f"{prefix}: {STEP_TITLES[step]}" if prefix else STEP_TITLES[step]


def configure_task(
    task: dsl.PipelineTask,
    platform: Platform | None,
    *,
    cached: bool = True,
    budget: Budget | None = None,
    prefix: str = "",
) -> dsl.PipelineTask:
    """Set a task's title, its caching and, with a platform, its pod and the budget of its step. Return the task.

    `prefix` is that of `name_component`.
    """
    from kfp import kubernetes

    name = task.component_spec.name.removeprefix(f"{prefix}-" if prefix else "")
    title = build_title(name.replace("-", "_"), prefix)
    task.set_display_name(title)
    if not cached:
        task.set_caching_options(enable_caching=False)
    if platform is None:
        return task
    resources: Resources = getattr(platform.resources, name.replace("-", "_"), platform.resources.others)
    runtimes = {
        container_images.CURATION_IMAGE: platform.images.curation,
        container_images.TRAINING_IMAGE: platform.images.training,
        container_images.EVALUATION_IMAGE: platform.images.evaluation,
        container_images.SERVING_IMAGE: platform.images.serving,
    }
    task.set_container_image(runtimes[task.container_spec.image])
    if platform.images.pull_secrets:
        kubernetes.set_image_pull_secrets(task, platform.images.pull_secrets)
    if platform.images.pull_policy:
        kubernetes.set_image_pull_policy(task, platform.images.pull_policy)
    _mount_volumes(task, platform)
    variables = _list_variables(name, platform, resources)
    accounts = [BudgetAccount(name="budget", budget=budget)] if budget and name in BUDGET_STEPS else []
    if name != "finish":
        variables[step_records.STEP_VARIABLE] = title
    variables |= budgets.to_environment(SpendingMeter(rates=platform.cost_rates, accounts=accounts))
    secrets = dict(platform.secrets)
    if name in NOTIFICATION_STEPS:
        secrets |= {variable: each.url for variable, each in platform.notification_variables.items()}
    # Kubernetes does not define which of two equal names takes precedence, so each variable is set only once.
    for variable in sorted(variables.keys() - secrets.keys() - {step_records.RUN_VARIABLE}):
        task.set_env_variable(variable, variables[variable])
    for variable, secret in sorted(secrets.items()):
        kubernetes.use_secret_as_env(task, secret_name=secret.name, secret_key_to_env={secret.key: variable})
    if context := platform.security.model_dump(exclude_none=True):
        kubernetes.set_security_context(task, **context)
    _set_scheduling(task, merge_scheduling(platform.scheduling, resources.scheduling))
    run_id = f"metadata.labels['{RUN_LABEL}']"
    kubernetes.use_field_path_as_env(task, env_name=step_records.RUN_VARIABLE, field_path=run_id)
    _set_resources(task, platform, resources)
    return task


def _mount_volumes(task: dsl.PipelineTask, platform: Platform) -> None:
    from kfp import kubernetes

    claims: list[Volume | Claim] = [platform.volume, *platform.claims]
    for claim in claims:
        kubernetes.mount_pvc(task, pvc_name=claim.claim, mount_path=claim.mount, sub_path=claim.sub_path)
    for files in platform.secret_files:
        kubernetes.use_secret_as_volume(task, secret_name=files.name, mount_path=files.mount)
    for files in platform.config_files:
        kubernetes.use_config_map_as_volume(task, config_map_name=files.name, mount_path=files.mount)
    certificates = platform.network.certificates
    if certificates.secret:
        kubernetes.use_secret_as_volume(task, secret_name=certificates.secret, mount_path=CERTIFICATES_FOLDER)
    if certificates.config_map:
        kubernetes.use_config_map_as_volume(
            task, config_map_name=certificates.config_map, mount_path=CERTIFICATES_FOLDER
        )


def _list_variables(step: str, platform: Platform, resources: Resources) -> dict[str, str]:
    workdir, network, training = platform.volume.workdir, platform.network, platform.resources.fine_tuning
    proxies = {"HTTP_PROXY": network.http_proxy, "HTTPS_PROXY": network.https_proxy}
    proxies = {name: proxy for name, proxy in proxies.items() if proxy}
    if proxies:
        proxies["NO_PROXY"] = ",".join(network.no_proxy)
    launcher: dict[str, str] = {}
    if step in LAUNCHER_STEPS and platform.launcher != LauncherSettings():
        scheduling = merge_scheduling(platform.scheduling, training.scheduling)
        launcher = launcher_settings.to_environment(step_launcher.resolve_launcher(platform, scheduling))
    return {
        "TUNELINE_WORKDIR": workdir,
        "TUNELINE_STORE": platform.store or f"{workdir}/store",
        "TUNELINE_STATE": f"{workdir}/state",
        "TUNELINE_CACHE": f"{workdir}/cache",
        "MLFLOW_TRACKING_URI": platform.mlflow.tracking_uri or f"sqlite:///{workdir}/mlflow.db",
        **({"TUNELINE_MLFLOW_UI": platform.mlflow.ui} if platform.mlflow.ui else {}),
        **({"TMPDIR": platform.scratch.mount} if resources.scratch else {}),
        **proxies,
        **{name.lower(): value for name, value in proxies.items()},  # programs differ in the case that they read
        **(dict.fromkeys(CA_BUNDLE_VARIABLES, network.certificates.path) if network.certificates.name else {}),
        **platform.environment,
        **launcher,
    }


def merge_scheduling(common: Scheduling, own: Scheduling | None) -> Scheduling:
    """Return the scheduling of all pods combined with the additions of a stage."""
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


def _set_scheduling(task: dsl.PipelineTask, scheduling: Scheduling) -> None:
    from kfp import kubernetes

    for key, value in sorted(scheduling.node_selector.items()):
        kubernetes.add_node_selector(task, key, value)
    for t in scheduling.tolerations:
        kubernetes.add_toleration(task, t.key or None, t.operator, t.value or None, t.effect, t.seconds)
    # Kubernetes requires one of several terms, and every expression of one term: so all required expressions form one term.
    affinity = [
        (term.weight, {"key": term.key, "operator": term.operator, "values": term.values})
        for term in scheduling.node_affinity
    ]
    if required := [expression for weight, expression in affinity if weight is None]:
        kubernetes.add_node_affinity(task, match_expressions=required)
    for weight, expression in affinity:
        if weight is not None:
            kubernetes.add_node_affinity(task, match_expressions=[expression], weight=weight)
    labels = dict(scheduling.labels)
    if scheduling.queue:
        labels[QUEUE_LABEL] = scheduling.queue
    if scheduling.priority:
        labels[PRIORITY_LABEL] = scheduling.priority
    for key, value in sorted(labels.items()):
        kubernetes.add_pod_label(task, key, value)
    for key, value in sorted(scheduling.annotations.items()):
        kubernetes.add_pod_annotation(task, key, value)


def _set_resources(task: dsl.PipelineTask, platform: Platform, resources: Resources) -> None:
    from kfp import kubernetes

    if resources.cpu:
        task.set_cpu_request(resources.cpu).set_cpu_limit(resources.cpu)
    if resources.memory:
        task.set_memory_request(resources.memory).set_memory_limit(resources.memory)
    elif resources.memory_request:
        task.set_memory_request(resources.memory_request)
    if resources.accelerator:
        task.set_accelerator_type(resources.accelerator).set_accelerator_limit(resources.accelerators)
    if resources.timeout_seconds:
        kubernetes.set_timeout(task, resources.timeout_seconds)
    if resources.retries:
        task.set_retry(resources.retries, f"{resources.retry_after_seconds}s", 2.0, MAX_RETRY_INTERVAL)
    if resources.shared_memory:
        name, path = SHARED_MEMORY
        kubernetes.empty_dir_mount(task, name, path, medium="Memory", size_limit=resources.shared_memory)
    mount, storage_class = platform.scratch.mount, platform.scratch.storage_class
    if resources.scratch and storage_class:
        kubernetes.add_ephemeral_volume(
            task, SCRATCH_VOLUME, mount, ["ReadWriteOnce"], resources.scratch, storage_class
        )
    elif resources.scratch:
        kubernetes.empty_dir_mount(task, SCRATCH_VOLUME, mount, size_limit=resources.scratch)
