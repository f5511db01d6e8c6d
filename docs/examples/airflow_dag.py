"""The five stages as pods of an Airflow DAG, in a namespace created from deploy/. docs/how-to/other-platforms.md lists the exit codes.

Requires Airflow 3 with the provider cncf.kubernetes. Airflow cannot distinguish failures, so it retries all of them: a command with a permanent
error fails again within seconds, and an interrupted one (75) resumes. If the gate refuses the model (3), `evaluate` and the tasks after it are
skipped.

Change registry, namespace, resources, user and group. User and group own the volume's folder: `run_as_user` and `run_as_group` of `security` in
platform.yaml, which are not 1000 in every overlay of deploy/.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.secret import Secret
from airflow.sdk import DAG  # Airflow 2: from airflow import DAG
from kubernetes.client import models as k8s

REGISTRY = "registry.example/tuneline"
USER, GROUP = 1000, 1000
CONFIGURATION = "/data/customization.yaml"
FOLDER = (
    "/data/airflow/{{ run_id | replace(':', '-') | replace('+', '-') }}"  # one folder per run, also for its retries
)
INCUMBENT = "{{ params.incumbent }}"  # the folder of the served model; empty for the first version
CREDENTIALS = [
    Secret("env", "MLFLOW_TRACKING_USERNAME", "mlflow", "username"),
    Secret("env", "MLFLOW_TRACKING_PASSWORD", "mlflow", "password"),
]
VOLUMES = [
    k8s.V1Volume(name="data", persistent_volume_claim=k8s.V1PersistentVolumeClaimVolumeSource(claim_name="tuneline")),
    k8s.V1Volume(name="tmp", empty_dir=k8s.V1EmptyDirVolumeSource(size_limit="50Gi")),
    k8s.V1Volume(name="shm", empty_dir=k8s.V1EmptyDirVolumeSource(medium="Memory", size_limit="16Gi")),
]
MOUNTS = [
    k8s.V1VolumeMount(name="data", mount_path="/data"),
    k8s.V1VolumeMount(name="tmp", mount_path="/tmp"),  # noqa: S108
    k8s.V1VolumeMount(name="shm", mount_path="/dev/shm"),  # noqa: S108
]


def stage(
    name: str, image: str, arguments: list[str], cpu: str, memory: str, gpus: int = 0, **more: Any
) -> KubernetesPodOperator:
    """Return a stage as a restricted pod without a token, with the volume and the variables that all stages share."""
    amounts = {"cpu": cpu, "memory": memory}
    limits = {**amounts, "nvidia.com/gpu": str(gpus)} if gpus else amounts
    return KubernetesPodOperator(
        task_id=name,
        name=f"tuneline-{name}",
        namespace="team-a",
        image=f"{REGISTRY}/{image}:1",
        cmds=["tuneline"],
        arguments=[name, *arguments],
        configmaps=["tuneline-place"],
        volumes=VOLUMES,
        volume_mounts=MOUNTS,
        container_resources=k8s.V1ResourceRequirements(requests=amounts, limits=limits),
        service_account_name="tuneline-tools",
        automount_service_account_token=False,
        image_pull_secrets=[k8s.V1LocalObjectReference(name="registry")],
        security_context=k8s.V1PodSecurityContext(
            run_as_user=USER,
            run_as_group=GROUP,
            run_as_non_root=True,
            seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
        ),
        container_security_context=k8s.V1SecurityContext(
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            capabilities=k8s.V1Capabilities(drop=["ALL"]),
        ),
        termination_grace_period=300,  # time to save and to exit with 75
        startup_timeout_seconds=3600,  # time to wait in a queue and to pull an image of several gigabytes
        retries=5,
        retry_delay=timedelta(minutes=2),
        retry_exponential_backoff=True,
        **more,
    )


with DAG(
    dag_id="customize", schedule=None, catchup=False, max_active_runs=1, params={"incumbent": "", "model": "helper"}
) as dag:
    curate = stage(
        "curate", "python-curation", ["/data/raw/*.jsonl", "-o", f"{FOLDER}/dataset", "-c", CONFIGURATION], "8", "32Gi"
    )
    finetune = stage(
        "finetune",
        "python-training",
        [f"{FOLDER}/dataset", "-o", f"{FOLDER}/model", "-c", CONFIGURATION],
        "8",
        "64Gi",
        gpus=1,
    )
    evaluate = stage(
        "evaluate",
        "python-evaluation",
        [
            f"{FOLDER}/model",
            f"--dataset={FOLDER}/dataset",
            f"--incumbent={INCUMBENT}",
            f"--output={FOLDER}/evaluation",
            f"--config={CONFIGURATION}",
            "--fail-on-refusal",
        ],
        "8",
        "64Gi",
        gpus=1,
        skip_on_exit_code=3,
    )
    package = stage(
        "package",
        "python-serving",
        [f"{FOLDER}/model", "-o", f"{FOLDER}/repository", "-c", CONFIGURATION],
        "8",
        "64Gi",
        gpus=1,
    )
    register = stage(
        "register",
        "python-evaluation",
        [
            f"--model={FOLDER}/model",
            f"--evaluation={FOLDER}/evaluation",
            f"--repository={FOLDER}/repository",
            "--name={{ params.model }}",
            f"--config={CONFIGURATION}",
        ],
        "1",
        "4Gi",
        secrets=CREDENTIALS,
    )
    curate >> finetune >> evaluate >> package >> register
