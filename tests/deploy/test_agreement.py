"""Consistency of each overlay's platform.yaml with its manifests: claims, queues, accounts, runtimes, secrets, users and images.

The test of the auxiliary pods is in the long tier: it compiles the pipeline for every overlay.
"""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.launch.kubernetes import job_manifests
from components.common.launch.kubernetes.kubernetes_client import LIMITS_NAME
from pipelines.definition import pod_spec
from pipelines.kubeflow.preflight import kubeflow_pods, launcher_checks
from pipelines.kubeflow.preflight.check_context import collect_demands, parse_amount
from pipelines.steps import step_launcher
from tests.deploy.rendering import (
    DEPLOY,
    OVERLAYS,
    build_example_secrets,
    build_kustomization,
    iterate_pods,
    load_overlay_platform,
    render_overlay,
    render_with_optional,
    select_kind,
    selector_matches,
    team_namespace,
    uncomment_components,
)
from tests.pipelines.test_platforms import compile_for

Json = dict[str, Any]
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
README = (DEPLOY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], set[str]]:
    """Return the keys of the example secrets by folder and name."""
    return build_example_secrets(tmp_path_factory.mktemp("secrets"))


LABELS = {
    "name: ci@example.com",
    "node.example/model: gaudi3",
    "node.example/model: xe9680",
    "node.example/role: serving",
}


def find_manual_objects(kind: str) -> set[str]:
    """Return the secrets or config maps that deploy/README.md creates with kubectl."""
    return set(re.findall(rf"kubectl -n \S+ create {kind} ([a-z0-9-]+)", README))


@each_overlay
def test_platform_claims_exist_with_the_required_access_mode(overlay: str) -> None:
    platform, manifests = load_overlay_platform(overlay), render_overlay(overlay)
    claims = select_kind(manifests, "PersistentVolumeClaim", team_namespace(overlay))
    assert {platform.volume.claim, *(volume.claim for volume in platform.claims)} <= claims.keys()
    access_modes = claims[platform.volume.claim]["spec"]["accessModes"]
    assert access_modes == (["ReadWriteOnce"] if overlay == "one-gpu-node" else ["ReadWriteMany"])


@each_overlay
def test_claim_without_storage_class_has_a_reserved_volume(overlay: str) -> None:
    manifests = render_overlay(overlay)
    volumes = select_kind(manifests, "PersistentVolume").values()
    reserved = {(v["spec"]["claimRef"]["namespace"], v["spec"]["claimRef"]["name"]): v["spec"] for v in volumes}
    assert len(reserved) == len(volumes)
    for claim in (manifest for manifest in manifests if manifest["kind"] == "PersistentVolumeClaim"):
        key = (claim["metadata"]["namespace"], claim["metadata"]["name"])
        assert (claim["spec"]["storageClassName"] == "") == (key in reserved)
        if key in reserved:
            assert reserved[key]["accessModes"] == claim["spec"]["accessModes"]
            assert reserved[key]["capacity"]["storage"] == claim["spec"]["resources"]["requests"]["storage"]
    exports = [spec["nfs"]["path"] for spec in reserved.values() if "ReadWriteMany" in spec["accessModes"]]
    assert len(exports) == len(set(exports)), "two teams write one export"


@each_overlay
def test_storage_classes_are_rendered_or_configured_by_the_site(overlay: str) -> None:
    manifests, site = render_overlay(overlay), load_site(overlay)
    claims = [claim["spec"] for claim in manifests if claim["kind"] == "PersistentVolumeClaim"]
    claims += [
        claim["spec"]
        for s in select_kind(manifests, "StatefulSet").values()
        for claim in s["spec"]["volumeClaimTemplates"]
    ]
    requested = {claim["storageClassName"] for claim in claims} | {load_overlay_platform(overlay).scratch.storage_class}
    site_classes = {value for key, value in site.items() if key.endswith("-storage-class")}
    known = {*select_kind(manifests, "StorageClass"), *site_classes, ""}
    assert requested <= known


@each_overlay
def test_run_service_account_is_bound_to_runner_and_launcher_roles(overlay: str) -> None:
    manifests, platform = render_overlay(overlay), load_overlay_platform(overlay)
    assert platform.run.service_account in select_kind(manifests, "ServiceAccount", team_namespace(overlay))
    roles = {
        b["roleRef"]["name"]
        for b in select_kind(manifests, "RoleBinding", team_namespace(overlay)).values()
        if _is_bound(b, platform.run.service_account, team_namespace(overlay))
    }
    assert "tuneline-runner" in roles
    if platform.launcher.kind in ("trainjob", "rayjob"):
        assert f"tuneline-launcher-{platform.launcher.kind}" in roles
    pull_secrets = select_kind(manifests, "ServiceAccount", team_namespace(overlay))[platform.run.service_account][
        "imagePullSecrets"
    ]
    assert set(platform.images.pull_secrets) <= {secret["name"] for secret in pull_secrets}


def _is_bound(binding: Json, account: str, namespace: str) -> bool:
    return {"kind": "ServiceAccount", "name": account, "namespace": namespace} in binding["subjects"]


@each_overlay
def test_trainjob_runtime_account_networks_and_devices_exist(overlay: str) -> None:
    platform, manifests = load_overlay_platform(overlay), render_with_optional(overlay)
    if platform.launcher.kind != "trainjob":
        assert overlay != "gaudi3-roce"
        return
    job = platform.launcher.trainjob
    assert job.runtime in select_kind(manifests, job.runtime_kind)
    assert job.service_account in select_kind(manifests, "ServiceAccount", team_namespace(overlay))
    networks = job.annotations["k8s.v1.cni.cncf.io/networks"].split(",")
    assert {network.strip() for network in networks} <= set(
        select_kind(manifests, "NetworkAttachmentDefinition", team_namespace(overlay))
    )
    devices = yaml.safe_load(select_kind(manifests, "ConfigMap", "kube-system")["rdma-devices"]["data"]["config.json"])[
        "configList"
    ]
    assert set(job.resources) == {f"{device['resourcePrefix']}/{device['resourceName']}" for device in devices}


@each_overlay
def test_limits_of_the_launcher_list_what_the_platform_uses(overlay: str) -> None:
    """The checks of `tuneline doctor` on the rendered ConfigMap. tests/engines/test_overlays_cluster.py tries the policies."""
    platform, manifests = load_overlay_platform(overlay), render_overlay(overlay)
    has_policies = bool(select_kind(manifests, "ValidatingAdmissionPolicy"))
    assert has_policies == (platform.launcher.kind in ("trainjob", "rayjob"))
    if has_policies:
        limits = copy.deepcopy(select_kind(manifests, "ConfigMap", team_namespace(overlay))[LIMITS_NAME])
        (finding,) = launcher_checks.check_limits(platform, limits, team_namespace(overlay))
        assert finding["ok"], finding["found"]
        limits["data"]["images"] = "registry.example/other:1"
        (finding,) = launcher_checks.check_limits(platform, limits, team_namespace(overlay))
        assert finding["found"] == f"not in tuneline-launcher-limits: {platform.images.training} (images)"
        del limits["data"]["annotations"]
        (finding,) = launcher_checks.check_limits(platform, limits, team_namespace(overlay))
        assert finding["found"].endswith("k8s.v1.cni.cncf.io/networks=roce (annotations)")


@each_overlay
def test_training_runtime_has_the_patched_job_container_and_image(overlay: str) -> None:
    for runtime in select_kind(render_overlay(overlay), "ClusterTrainingRuntime").values():
        (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert (job["name"], container["name"]) == (job_manifests.TRAINER_CONTAINER, job_manifests.TRAINER_CONTAINER)
        assert container["image"] == load_overlay_platform(overlay).images.training


# Queues


@each_overlay
def test_platform_queue_and_priority_resolve_to_resource_flavors(overlay: str) -> None:
    platform, manifests = load_overlay_platform(overlay), render_overlay(overlay)
    assert bool(platform.scheduling.queue) == (overlay != "one-gpu-node")
    if not platform.scheduling.queue:
        return
    local_queue = select_kind(manifests, "LocalQueue", team_namespace(overlay))[platform.scheduling.queue]
    queue = select_kind(manifests, "ClusterQueue")[local_queue["spec"]["clusterQueue"]]
    assert selector_matches(
        queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": team_namespace(overlay)}
    )
    assert platform.scheduling.priority in select_kind(manifests, "WorkloadPriorityClass")
    flavors = {flavor["name"] for group in queue["spec"]["resourceGroups"] for flavor in group["flavors"]}
    assert flavors == set(select_kind(manifests, "ResourceFlavor"))


def collect_pod_requests(overlay: str) -> dict[str, tuple[dict[str, str], int]]:
    """Return the requests of each stage's pod and of the launcher's job: amounts and number of concurrent pods."""
    platform = load_overlay_platform(overlay)
    requests = {demand.title: (demand.amounts, 1) for demand in collect_demands(platform)}
    if platform.launcher.kind == "trainjob":
        job = step_launcher.resolve_launcher(
            platform, pod_spec.merge_scheduling(platform.scheduling, platform.resources.fine_tuning.scheduling)
        ).trainjob
        amounts = {"cpu": job.cpu, "memory": job.memory, job.accelerator: str(job.accelerators), **job.resources}
        requests["the launcher's job"] = (amounts, platform.launcher.nodes)
    return requests


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "one-gpu-node"])
def test_every_stage_fits_one_flavor_quota_without_borrowing(overlay: str) -> None:
    (group,) = select_kind(render_overlay(overlay), "ClusterQueue")["team-a"]["spec"]["resourceGroups"]
    quotas = [
        {resource["name"]: parse_amount(resource["nominalQuota"]) for resource in flavor["resources"]}
        for flavor in group["flavors"]
    ]
    assert all(list(quota) == group["coveredResources"] for quota in quotas), (
        "Kueue wants the same resources in the same order"
    )
    for stage, (amounts, replicas) in collect_pod_requests(overlay).items():
        assert set(amounts) <= set(group["coveredResources"]), f"Kueue admits no pod that asks for more: {stage}"
        fits = [
            all(parse_amount(amount) * replicas <= quota[name] for name, amount in amounts.items()) for quota in quotas
        ]
        assert any(fits), f"{stage} never fits"


def test_queue_quota_plus_serving_equals_mig_partitions() -> None:
    manifests = render_overlay("shared-gpus")
    mig_configs = yaml.safe_load(
        select_kind(manifests, "ConfigMap", "gpu-operator")["tuneline-mig"]["data"]["config.yaml"]
    )["mig-configs"]["customization"]
    partitions = {
        f"nvidia.com/mig-{name}": n * len(config["devices"])
        for config in mig_configs
        for name, n in config.get("mig-devices", {}).items()
    }
    partitions["nvidia.com/gpu"] = sum(len(config["devices"]) for config in mig_configs if not config["mig-enabled"])
    scaler = select_kind(manifests, "HorizontalPodAutoscaler")["triton"]["spec"]
    (triton,) = [pod["spec"]["containers"][0] for pod in iterate_pods(manifests) if pod["metadata"]["name"] == "triton"]
    max_pods = scaler["maxReplicas"] + 1  # a rollout starts a new pod before it stops an old one
    served = {
        name: int(n) * max_pods for name, n in triton["resources"]["limits"].items() if name.startswith("nvidia.com/")
    }
    (group,) = select_kind(manifests, "ClusterQueue")["team-a"]["spec"]["resourceGroups"]
    quota = {resource["name"]: parse_amount(resource["nominalQuota"]) for resource in group["flavors"][1]["resources"]}
    assert served == {"nvidia.com/mig-1g.10gb": 3}
    assert quota["nvidia.com/gpu.shared"] == 0, "a node has whole GPUs or shared ones"
    assert {name: quota[name] + served.get(name, 0) for name in partitions} == partitions


def test_serving_does_not_run_on_training_nodes() -> None:
    """Kueue does not count serving pods: it would admit a training job that fits on no node."""
    manifests, platform = render_overlay("xe9680-powerscale"), load_overlay_platform("xe9680-powerscale")
    flavor = select_kind(manifests, "ResourceFlavor")["accelerators"]["spec"]["nodeLabels"]
    assert flavor == platform.resources.fine_tuning.scheduling.node_selector
    (triton,) = [pod["spec"] for pod in iterate_pods(manifests) if pod["metadata"]["name"] == "triton"]
    assert triton["nodeSelector"]
    assert not flavor.keys() & triton["nodeSelector"].keys()


def test_garbage_collection_uses_the_data_repository_of_the_runs() -> None:
    """Without the repository, garbage collection would not pin the published revisions."""
    for overlay in OVERLAYS:
        spec = select_kind(render_overlay(overlay), "CronJob", team_namespace(overlay))["tuneline-gc"]["spec"][
            "jobTemplate"
        ]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert "--set=data_versioning.repository=$(DATA_REPOSITORY)" in container["args"]
        assert variables["DATA_REPOSITORY"] == load_site(overlay)["data-repository"]
        assert variables["DATA_REPOSITORY"].startswith("https://") == (
            "GIT_PASSWORD" in load_overlay_platform(overlay).secrets
        )


def test_teams_borrow_unused_quota_and_reclaim_it() -> None:
    manifests = render_overlay("xe9680-powerscale")
    queues = select_kind(manifests, "ClusterQueue")
    assert set(queues) == {"team-a", "team-b"}
    assert {queue["spec"]["cohortName"] for queue in queues.values()} == {"customization"}
    for name, queue in queues.items():
        assert queue["spec"]["preemption"]["reclaimWithinCohort"] == "Any"
        assert queue["spec"]["preemption"]["withinClusterQueue"] == "LowerPriority"
        assert selector_matches(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": name})
        assert select_kind(manifests, "LocalQueue", name)[name]["spec"]["clusterQueue"] == name
        limits = [
            resource.get("borrowingLimit")
            for group in queue["spec"]["resourceGroups"]
            for f in group["flavors"]
            for resource in f["resources"]
        ]
        assert set(limits) == {None}, "no limit to what is borrowed"
    priorities = select_kind(manifests, "WorkloadPriorityClass")
    threshold = queues["team-a"]["spec"]["preemption"]["borrowWithinCohort"]["maxPriorityThreshold"]
    assert [name for name, priority in priorities.items() if priority["value"] <= threshold] == ["experiment"], (
        "a borrower takes from these alone"
    )


def test_each_team_has_its_own_mlflow_experiment() -> None:
    """The creator of an MLflow experiment can write to it; other users can only read it."""
    manifests = render_overlay("xe9680-powerscale")
    environments = {
        team: select_kind(manifests, "ConfigMap", team)["tuneline-place"]["data"] for team in ("team-a", "team-b")
    }
    assert {team: environment["MLFLOW_EXPERIMENT_NAME"] for team, environment in environments.items()} == {
        "team-a": "team-a",
        "team-b": "team-b",
    }
    assert load_overlay_platform("xe9680-powerscale").environment["MLFLOW_EXPERIMENT_NAME"] == "team-a"


def test_team_namespaces_differ_only_in_serving_audit_drift_and_doctor() -> None:
    manifests = render_overlay("xe9680-powerscale")
    kinds = {
        team: {
            (manifest["kind"], manifest["metadata"]["name"])
            for manifest in manifests
            if manifest["metadata"].get("namespace") == team
        }
        for team in ("team-a", "team-b")
    }
    only_team_a = {
        name
        for _, name in kinds["team-a"] - {(kind, name.replace("team-b", "team-a")) for kind, name in kinds["team-b"]}
    }
    assert only_team_a == {"triton", "registry-audit", "traffic-drift", "tuneline-doctor"}


# Secrets and config maps


@each_overlay
def test_secrets_exist_in_the_examples_or_the_readme(overlay: str, examples: dict[tuple[str, str], set[str]]) -> None:
    platform, team = load_overlay_platform(overlay), team_namespace(overlay)
    for variable, secret in platform.secrets.items():
        assert secret.key in examples["team", secret.name], variable
    assert {secret_file.name for secret_file in platform.secret_files} <= find_manual_objects("secret generic")
    assert set(platform.images.pull_secrets) <= find_manual_objects("secret docker-registry")
    assert {config_file.name for config_file in platform.config_files} | {platform.network.certificates.config_map} - {
        ""
    } <= find_manual_objects("configmap")
    for pod in iterate_pods(render_overlay(overlay)):
        folder = (
            "team"
            if pod["metadata"]["namespace"] == team or pod["metadata"]["namespace"].startswith("team-")
            else "mlflow"
        )
        mounted = {v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v}
        assert mounted <= {name for example_folder, name in examples if example_folder == folder} | find_manual_objects(
            "secret generic"
        )
        for container in pod["spec"]["containers"]:
            for reference in (
                e["valueFrom"]["secretKeyRef"]
                for e in container.get("env", [])
                if "secretKeyRef" in e.get("valueFrom", {})
            ):
                assert reference["key"] in examples[folder, reference["name"]]


def test_no_secret_is_committed() -> None:
    for example in DEPLOY.glob("secrets/*/*.env.example"):
        values = [
            line.partition("=")[2]
            for line in example.read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#")
        ]
        assert set(values) <= {"replace-me", "pipeline"}
    assert not [manifest for name in OVERLAYS for manifest in render_overlay(name) if manifest["kind"] == "Secret"]
    assert "deploy/secrets/*/*.env" in (DEPLOY.parent / ".gitignore").read_text(encoding="utf-8").splitlines()


# Pods outside the pipeline, compared with its steps


@pytest.mark.long
@each_overlay
def test_auxiliary_pods_share_volume_user_and_settings_of_the_steps(overlay: str) -> None:
    platform, manifests, team = load_overlay_platform(overlay), render_overlay(overlay), team_namespace(overlay)
    step = kubeflow_pods.build_pods(compile_for(overlay))["registration"]["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in step["env"] if "value" in variable}
    environment = select_kind(manifests, "ConfigMap", team)["tuneline-place"]["data"]
    assert environment == {key: variables[key] for key in environment}
    own = {"TUNELINE_MLFLOW_UI", "TUNELINE_STEP"}  # for links and records of the pipeline's steps
    assert environment.keys() >= {key for key in variables if key.startswith(("TUNELINE_", "MLFLOW_"))} - own
    for pod in (pod for pod in iterate_pods(manifests) if pod["metadata"]["namespace"] == team):
        volumes = [
            v["name"]
            for v in pod["spec"]["volumes"]
            if v.get("persistentVolumeClaim", {}).get("claimName") == platform.volume.claim
        ]
        assert bool(volumes) == (pod["metadata"]["name"] != "registry-audit"), "the registry alone is asked"
        mounts = [m["mountPath"] for c in pod["spec"]["containers"] for m in c["volumeMounts"] if m["name"] in volumes]
        assert set(mounts) <= {platform.volume.mount}
        context = pod["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (
            platform.security.run_as_user,
            platform.security.run_as_group,
        )
    arguments = select_kind(manifests, "CronJob", team)["tuneline-gc"]["spec"]["jobTemplate"]["spec"]["template"][
        "spec"
    ]["containers"][0]["args"]
    assert f"--workdir={platform.volume.workdir}" in arguments


@each_overlay
def test_images_come_from_the_platform_or_have_a_digest(overlay: str) -> None:
    images = load_overlay_platform(overlay).images
    known = {images.curation, images.training, images.evaluation, images.serving}
    for pod in iterate_pods(render_overlay(overlay)):
        for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
            image = container["image"]
            assert image in known or re.search(r"/(python-mlflow|postgres)@sha256:", image)


@each_overlay
def test_mlflow_service_matches_the_tracking_uri(overlay: str) -> None:
    platform = load_overlay_platform(overlay)
    service = select_kind(render_overlay(overlay), "Service", "mlflow")["mlflow"]
    (port,) = service["spec"]["ports"]
    assert platform.mlflow.tracking_uri == f"http://mlflow.mlflow.svc:{port['port']}"
    server = select_kind(render_overlay(overlay), "Deployment", "mlflow")["mlflow"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    public_host = {variable["name"]: variable.get("value") for variable in server["env"]}["PUBLIC_HOST"]
    assert platform.mlflow.ui in ("", f"https://{public_host}")


# Site values


def load_site(overlay: str) -> dict[str, str]:
    """Return the values of site.yaml."""
    return dict(yaml.safe_load((DEPLOY / "overlays" / overlay / "site.yaml").read_text(encoding="utf-8"))["data"])


@each_overlay
def test_every_site_value_is_substituted_and_no_example_remains(overlay: str, tmp_path: Path) -> None:
    """Replace each value by a marker. Example values may then remain only in image names, user names and labels."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    shutil.copytree(DEPLOY.parent / "mlflow", tmp_path / "mlflow")
    file = tmp_path / "deploy" / "overlays" / overlay / "site.yaml"
    site = yaml.safe_load(file.read_text(encoding="utf-8"))
    markers = {key: str(4_000 + n) if key in ("user", "group") else f"marked-{n}" for n, key in enumerate(site["data"])}
    file.write_text(yaml.safe_dump({**site, "data": markers}))
    uncomment_components(file.parent)
    manifests = build_kustomization(tmp_path / "deploy" / "overlays" / overlay)
    text = yaml.safe_dump_all(manifests)
    users = {
        (context["runAsUser"], context["runAsGroup"])
        for pod in iterate_pods(manifests)
        if pod["metadata"]["namespace"] == team_namespace(overlay) and (context := pod["spec"]["securityContext"])
    }
    assert users == {(int(markers["user"]), int(markers["group"]))}
    platform_only = {"scratch-storage-class"}
    assert {key for key, marker in markers.items() if marker not in text} == platform_only & markers.keys()
    examples = {line.strip() for manifest in manifests if manifest["metadata"]["name"].partition("-")[0] != "mlflow" or manifest["kind"] != "ConfigMap"
            for line in yaml.safe_dump(manifest).splitlines() if re.search(r"\.example\b|192\.0\.2\.|198\.51\.100\.", line)}  # fmt: skip
    assert {line for line in examples if "registry.example/" not in line} <= LABELS


@each_overlay
def test_site_values_match_the_platform(overlay: str) -> None:
    site, platform = load_site(overlay), load_overlay_platform(overlay)
    assert (site["user"], site["group"]) == (str(platform.security.run_as_user), str(platform.security.run_as_group))
    assert site.get("scratch-storage-class", "") == platform.scratch.storage_class


@each_overlay
def test_container_arguments_are_accepted_by_the_cli(overlay: str) -> None:
    from typer.main import get_command

    from pipelines.cli import main

    commands = get_command(main.app).commands  # type: ignore[attr-defined]
    lines = [
        container["args"][1:]
        for pod in iterate_pods(render_overlay(overlay))
        for container in pod["spec"]["containers"]
        if container.get("args", [""])[0] == "tuneline"
    ]
    calls = [line for line in lines if line[0] in commands]
    assert "deploy" in [line[0] for line in calls]
    for name, *arguments in calls:
        commands[name].make_context(name, list(arguments))


@each_overlay
def test_triton_has_no_port_and_shares_its_folder_and_sockets(overlay: str) -> None:
    (pod,) = [pod for pod in iterate_pods(render_overlay(overlay)) if pod["metadata"]["name"] == "triton"]
    triton, gateway, watcher = pod["spec"]["containers"]
    options = [
        dict(argument.lstrip("-").split("=", 1) for argument in container["args"] if "=" in argument)
        for container in (triton, gateway, watcher)
    ]
    assert options[0]["model-repository"] == f"{options[2]['folder']}/repository"
    assert pod["spec"]["initContainers"][0]["command"][-1] == options[0]["model-repository"]
    assert options[1]["repository"] == options[0]["model-repository"]
    assert options[0]["allow-http"] == "false"
    assert [bool(container.get("ports")) for container in (triton, gateway, watcher)] == [False, True, False]
    socket = f"{options[0]['grpc-address']}:{options[0]['grpc-port']}"
    assert options[1]["grpc-url"] == options[2]["grpc-url"] == socket
    assert options[0]["metrics-address"] == f"unix:{options[1]['metrics-socket']}"
    assert socket in triton["livenessProbe"]["exec"]["command"][-1]
    for container in (triton, gateway, watcher):
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(Path(options[1]["metrics-socket"]).parent) in mounts
        assert options[2]["folder"] in mounts  # vLLM packages contain absolute paths
    assert str(Path(options[1]["keys"]).parent) in [mount["mountPath"] for mount in gateway["volumeMounts"]]
