"""The platform.yaml of an overlay names what the overlay makes: claims, queues, accounts, runtimes, secrets, users, images."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.launch import objects
from pipelines import launching
from pipelines import pods as stages
from pipelines.cluster import kubeflow_pods
from pipelines.cluster.look import amount, demands
from tests.deploy.rendering import DEPLOY, OVERLAYS, built, home, matches, of_kind, platform_of, pods, rendered, secrets
from tests.pipelines.test_platforms import compiled_for

Json = dict[str, Any]
each = pytest.mark.parametrize("overlay", OVERLAYS)
README = (DEPLOY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], set[str]]:
    """The keys of the secrets that deploy/secrets makes, by folder and name."""
    return secrets(tmp_path_factory.mktemp("secrets"))


LABELS = {"name: ci@example.com", "node.example/model: gaudi3", "node.example/model: xe9680", "node.example/role: serving"}


def by_hand(kind: str) -> set[str]:
    """Secrets or config maps that deploy/README.md has a person make."""
    return set(re.findall(rf"kubectl -n \S+ create {kind} ([a-z0-9-]+)", README))


@each
def test_the_claims_of_the_platform_are_made_and_such_as_many_nodes_may_write(overlay: str) -> None:
    said, things = platform_of(overlay), rendered(overlay)
    made = of_kind(things, "PersistentVolumeClaim", home(overlay))
    assert {said.volume.claim, *(one.claim for one in said.claims)} <= made.keys()
    mode = made[said.volume.claim]["spec"]["accessModes"]
    assert mode == (["ReadWriteOnce"] if overlay == "one-gpu-node" else ["ReadWriteMany"])


@each
def test_a_claim_without_a_storage_class_has_a_volume_that_is_kept_for_it(overlay: str) -> None:
    things = rendered(overlay)
    volumes = of_kind(things, "PersistentVolume").values()
    kept = {(v["spec"]["claimRef"]["namespace"], v["spec"]["claimRef"]["name"]): v["spec"] for v in volumes}
    assert len(kept) == len(volumes)
    for claim in (one for one in things if one["kind"] == "PersistentVolumeClaim"):
        where = (claim["metadata"]["namespace"], claim["metadata"]["name"])
        assert (claim["spec"]["storageClassName"] == "") == (where in kept)
        if where in kept:
            assert kept[where]["accessModes"] == claim["spec"]["accessModes"]
            assert kept[where]["capacity"]["storage"] == claim["spec"]["resources"]["requests"]["storage"]
    written = [spec["nfs"]["path"] for spec in kept.values() if "ReadWriteMany" in spec["accessModes"]]
    assert len(written) == len(set(written)), "two teams write one export"


@each
def test_a_storage_class_is_made_here_or_said_to_be_the_sites(overlay: str) -> None:
    things, site = rendered(overlay), site_of(overlay)
    claims = [one["spec"] for one in things if one["kind"] == "PersistentVolumeClaim"]
    claims += [one["spec"] for s in of_kind(things, "StatefulSet").values() for one in s["spec"]["volumeClaimTemplates"]]
    wanted = {one["storageClassName"] for one in claims} | {platform_of(overlay).scratch.storage_class}
    of_site = {value for key, value in site.items() if key.endswith("-storage-class")}
    known = {*of_kind(things, "StorageClass"), *of_site, ""}
    assert wanted <= known


@each
def test_the_account_of_the_runs_is_made_and_may_what_kubeflow_does_in_each_pod(overlay: str) -> None:
    things, said = rendered(overlay), platform_of(overlay)
    assert said.run.service_account in of_kind(things, "ServiceAccount", home(overlay))
    bound = {
        b["roleRef"]["name"]
        for b in of_kind(things, "RoleBinding", home(overlay)).values()
        if _is_bound(b, said.run.service_account, home(overlay))
    }
    assert "tuneline-runner" in bound
    if said.launcher.kind in ("trainjob", "rayjob"):
        assert "tuneline-launcher" in bound
    pulled = of_kind(things, "ServiceAccount", home(overlay))[said.run.service_account]["imagePullSecrets"]
    assert set(said.images.pull_secrets) <= {one["name"] for one in pulled}


def _is_bound(binding: Json, account: str, namespace: str) -> bool:
    return {"kind": "ServiceAccount", "name": account, "namespace": namespace} in binding["subjects"]


@each
def test_a_launchers_job_finds_its_runtime_its_account_its_network_and_its_device(overlay: str) -> None:
    said, things = platform_of(overlay), rendered(overlay)
    if said.launcher.kind != "trainjob":
        assert overlay != "gaudi3-roce"
        return
    job = said.launcher.trainjob
    assert job.runtime in of_kind(things, job.runtime_kind)
    assert job.service_account in of_kind(things, "ServiceAccount", home(overlay))
    networks = job.annotations["k8s.v1.cni.cncf.io/networks"].split(",")
    assert {one.strip() for one in networks} <= set(of_kind(things, "NetworkAttachmentDefinition", home(overlay)))
    devices = yaml.safe_load(of_kind(things, "ConfigMap", "kube-system")["rdma-devices"]["data"]["config.json"])["configList"]
    assert set(job.resources) == {f"{one['resourcePrefix']}/{one['resourceName']}" for one in devices}


@each
def test_a_runtime_has_the_job_and_the_container_that_are_patched_and_an_image_of_ours(overlay: str) -> None:
    for runtime in of_kind(rendered(overlay), "ClusterTrainingRuntime").values():
        (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert (job["name"], container["name"]) == (objects.NODE, objects.NODE)
        assert container["image"] == platform_of(overlay).images.training


# Queues


@each
def test_the_queue_and_the_priority_of_the_platform_lead_to_a_share_of_nodes_that_are_described(overlay: str) -> None:
    said, things = platform_of(overlay), rendered(overlay)
    assert bool(said.scheduling.queue) == (overlay != "one-gpu-node")
    if not said.scheduling.queue:
        return
    local = of_kind(things, "LocalQueue", home(overlay))[said.scheduling.queue]
    queue = of_kind(things, "ClusterQueue")[local["spec"]["clusterQueue"]]
    assert matches(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": home(overlay)})
    assert said.scheduling.priority in of_kind(things, "WorkloadPriorityClass")
    named = {flavor["name"] for group in queue["spec"]["resourceGroups"] for flavor in group["flavors"]}
    assert named == set(of_kind(things, "ResourceFlavor"))


def wanted(overlay: str) -> dict[str, tuple[dict[str, str], int]]:
    """What a stage's pod asks for, or a launcher's job: amounts, and how many pods of it there are at once."""
    said = platform_of(overlay)
    found = {one.title: (one.amounts, 1) for one in demands(said)}
    if said.launcher.kind == "trainjob":
        job = launching.launcher(said, stages.merged(said.scheduling, said.resources.fine_tuning.scheduling)).trainjob
        amounts = {"cpu": job.cpu, "memory": job.memory, job.accelerator: str(job.accelerators), **job.resources}
        found["the launcher's job"] = (amounts, said.launcher.nodes)
    return found


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "one-gpu-node"])
def test_every_stage_fits_a_share_by_itself_without_borrowing(overlay: str) -> None:
    (group,) = of_kind(rendered(overlay), "ClusterQueue")["team-a"]["spec"]["resourceGroups"]
    shares = [{one["name"]: amount(one["nominalQuota"]) for one in flavor["resources"]} for flavor in group["flavors"]]
    assert all(list(share) == group["coveredResources"] for share in shares), "Kueue wants the same resources in the same order"
    for stage, (amounts, pieces) in wanted(overlay).items():
        assert set(amounts) <= set(group["coveredResources"]), f"Kueue admits no pod that asks for more: {stage}"
        fits = [all(amount(much) * pieces <= share[name] for name, much in amounts.items()) for share in shares]
        assert any(fits), f"{stage} never fits"


def test_the_queue_gives_out_the_parts_that_mig_cuts_but_for_those_that_serve() -> None:
    things = rendered("shared-gpus")
    cut = yaml.safe_load(of_kind(things, "ConfigMap", "gpu-operator")["tuneline-mig"]["data"]["config.yaml"])["mig-configs"][
        "customization"
    ]
    parts = {f"nvidia.com/mig-{name}": n * len(one["devices"]) for one in cut for name, n in one.get("mig-devices", {}).items()}
    parts["nvidia.com/gpu"] = sum(len(one["devices"]) for one in cut if not one["mig-enabled"])
    scaler = of_kind(things, "HorizontalPodAutoscaler")["triton"]["spec"]
    (triton,) = [one["spec"]["containers"][0] for one in pods(things) if one["metadata"]["name"] == "triton"]
    at_most = scaler["maxReplicas"] + 1  # one more comes before one goes, when Triton is changed
    served = {name: int(n) * at_most for name, n in triton["resources"]["limits"].items() if name.startswith("nvidia.com/")}
    (group,) = of_kind(things, "ClusterQueue")["team-a"]["spec"]["resourceGroups"]
    quota = {one["name"]: one["nominalQuota"] for one in group["flavors"][1]["resources"]}
    assert served == {"nvidia.com/mig-1g.10gb": 3}
    assert quota["nvidia.com/gpu.shared"] == 0, "a node has whole GPUs or shared ones"
    assert {name: quota[name] + served.get(name, 0) for name in parts} == parts


def test_serving_takes_no_gpu_of_the_nodes_that_a_training_wants_whole() -> None:
    """What Kueue does not see would have it admit a training that fits nowhere."""
    things, said = rendered("xe9680-powerscale"), platform_of("xe9680-powerscale")
    flavor = of_kind(things, "ResourceFlavor")["accelerators"]["spec"]["nodeLabels"]
    assert flavor == said.resources.fine_tuning.scheduling.node_selector
    (triton,) = [one["spec"] for one in pods(things) if one["metadata"]["name"] == "triton"]
    assert triton["nodeSelector"]
    assert not flavor.keys() & triton["nodeSelector"].keys()


def test_housekeeping_asks_the_data_repository_that_the_runs_publish_to() -> None:
    """Without it no revision would be a reason to stay."""
    for overlay in OVERLAYS:
        spec = of_kind(rendered(overlay), "CronJob", home(overlay))["tuneline-gc"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        (house,) = spec["containers"]
        told = {one["name"]: one.get("value") for one in house["env"]}
        assert "--set=data_versioning.repository=$(DATA_REPOSITORY)" in house["args"]
        assert told["DATA_REPOSITORY"] == site_of(overlay)["data-repository"]
        assert told["DATA_REPOSITORY"].startswith("https://") == ("GIT_PASSWORD" in platform_of(overlay).secrets)


def test_teams_lend_each_other_what_they_do_not_use_and_get_it_back() -> None:
    things = rendered("xe9680-powerscale")
    queues = of_kind(things, "ClusterQueue")
    assert set(queues) == {"team-a", "team-b"}
    assert {one["spec"]["cohortName"] for one in queues.values()} == {"customization"}
    for name, queue in queues.items():
        assert queue["spec"]["preemption"]["reclaimWithinCohort"] == "Any"
        assert queue["spec"]["preemption"]["withinClusterQueue"] == "LowerPriority"
        assert matches(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": name})
        assert of_kind(things, "LocalQueue", name)[name]["spec"]["clusterQueue"] == name
        limits = [
            one.get("borrowingLimit") for group in queue["spec"]["resourceGroups"] for f in group["flavors"] for one in f["resources"]
        ]
        assert set(limits) == {None}, "no limit to what is borrowed"
    priorities = of_kind(things, "WorkloadPriorityClass")
    threshold = queues["team-a"]["spec"]["preemption"]["borrowWithinCohort"]["maxPriorityThreshold"]
    assert [name for name, one in priorities.items() if one["value"] <= threshold] == ["experiment"], "a borrower takes from these alone"


def test_each_team_has_an_experiment_of_its_own() -> None:
    """MLflow lets its maker write to it, and the others only look."""
    things = rendered("xe9680-powerscale")
    places = {team: of_kind(things, "ConfigMap", team)["tuneline-place"]["data"] for team in ("team-a", "team-b")}
    assert {team: place["MLFLOW_EXPERIMENT_NAME"] for team, place in places.items()} == {"team-a": "team-a", "team-b": "team-b"}
    assert platform_of("xe9680-powerscale").environment["MLFLOW_EXPERIMENT_NAME"] == "team-a"


def test_two_teams_have_the_same_but_for_serving_and_the_look_at_the_cluster() -> None:
    things = rendered("xe9680-powerscale")
    kinds = {
        team: {(one["kind"], one["metadata"]["name"]) for one in things if one["metadata"].get("namespace") == team}
        for team in ("team-a", "team-b")
    }
    only = {name for _, name in kinds["team-a"] - {(kind, name.replace("team-b", "team-a")) for kind, name in kinds["team-b"]}}
    assert only == {"triton", "registry-audit", "tuneline-doctor"}


# Secrets and config maps


@each
def test_every_secret_is_one_whose_example_has_the_key_or_that_the_readme_makes(
    overlay: str, examples: dict[tuple[str, str], set[str]]
) -> None:
    said, team = platform_of(overlay), home(overlay)
    for variable, secret in said.secrets.items():
        assert secret.key in examples["team", secret.name], variable
    assert {one.name for one in said.secret_files} <= by_hand("secret generic")
    assert set(said.images.pull_secrets) <= by_hand("secret docker-registry")
    assert {one.name for one in said.config_files} | {said.network.certificates.config_map} - {""} <= by_hand("configmap")
    for pod in pods(rendered(overlay)):
        folder = "team" if pod["metadata"]["namespace"] == team or pod["metadata"]["namespace"].startswith("team-") else "mlflow"
        named = {v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v}
        assert named <= {name for place, name in examples if place == folder} | by_hand("secret generic")
        for container in pod["spec"]["containers"]:
            for one in (e["valueFrom"]["secretKeyRef"] for e in container.get("env", []) if "secretKeyRef" in e.get("valueFrom", {})):
                assert one["key"] in examples[folder, one["name"]]


def test_no_secret_stands_in_the_tree() -> None:
    for example in DEPLOY.glob("secrets/*/*.env.example"):
        values = [line.partition("=")[2] for line in example.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        assert set(values) <= {"replace-me", "pipeline"}
    assert not [one for name in OVERLAYS for one in rendered(name) if one["kind"] == "Secret"]
    assert "deploy/secrets/*/*.env" in (DEPLOY.parent / ".gitignore").read_text(encoding="utf-8").splitlines()


# Pods that no pipeline makes, beside those that it makes


@each
def test_the_pods_around_the_pipeline_see_its_work_where_its_own_pods_see_it_and_as_the_same_user(overlay: str) -> None:
    said, things, team = platform_of(overlay), rendered(overlay), home(overlay)
    step = kubeflow_pods.pods(compiled_for(overlay))["registration"]["spec"]["containers"][0]
    told = {one["name"]: one["value"] for one in step["env"] if "value" in one}
    place = of_kind(things, "ConfigMap", team)["tuneline-place"]["data"]
    assert place == {key: told[key] for key in place}
    assert place.keys() >= {key for key in told if key.startswith(("TUNELINE_", "MLFLOW_"))} - {"TUNELINE_MLFLOW_UI"}
    for pod in (pod for pod in pods(things) if pod["metadata"]["namespace"] == team):
        data = [v["name"] for v in pod["spec"]["volumes"] if v.get("persistentVolumeClaim", {}).get("claimName") == said.volume.claim]
        assert bool(data) == (pod["metadata"]["name"] != "registry-audit"), "the registry alone is asked"
        mounts = [m["mountPath"] for c in pod["spec"]["containers"] for m in c["volumeMounts"] if m["name"] in data]
        assert set(mounts) <= {said.volume.mount}
        context = pod["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (said.security.run_as_user, said.security.run_as_group)
    house = of_kind(things, "CronJob", team)["tuneline-gc"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--workdir={said.volume.workdir}" in house


@each
def test_the_images_are_those_of_the_platform_and_none_is_left_without_a_digest(overlay: str) -> None:
    said = platform_of(overlay).images
    known = {said.curation, said.training, said.evaluation, said.serving}
    for pod in pods(rendered(overlay)):
        for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
            image = container["image"]
            assert image in known or re.search(r"/(python-mlflow|postgres)@sha256:", image)


@each
def test_mlflow_answers_where_the_platform_asks(overlay: str) -> None:
    said = platform_of(overlay)
    service = of_kind(rendered(overlay), "Service", "mlflow")["mlflow"]
    (port,) = service["spec"]["ports"]
    assert said.mlflow.tracking_uri == f"http://mlflow.mlflow.svc:{port['port']}"
    server = of_kind(rendered(overlay), "Deployment", "mlflow")["mlflow"]["spec"]["template"]["spec"]["containers"][0]
    public = {one["name"]: one.get("value") for one in server["env"]}["PUBLIC_HOST"]
    assert said.mlflow.ui in ("", f"https://{public}")


# What a site changes


def site_of(overlay: str) -> dict[str, str]:
    """The values of site.yaml."""
    return dict(yaml.safe_load((DEPLOY / "overlays" / overlay / "site.yaml").read_text(encoding="utf-8"))["data"])


@each
def test_each_value_of_the_site_comes_to_an_object_and_no_example_is_left_elsewhere(overlay: str, tmp_path: Path) -> None:
    """Each value is exchanged for one that is found again. Examples may then stand only where an image, a person or a label is named."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    shutil.copytree(DEPLOY.parent / "mlflow", tmp_path / "mlflow")
    file = tmp_path / "deploy" / "overlays" / overlay / "site.yaml"
    thing = yaml.safe_load(file.read_text(encoding="utf-8"))
    marked = {key: str(4_000 + n) if key in ("user", "group") else f"marked-{n}" for n, key in enumerate(thing["data"])}
    file.write_text(yaml.safe_dump({**thing, "data": marked}))
    things = built(tmp_path / "deploy" / "overlays" / overlay)
    text = yaml.safe_dump_all(things)
    said_by_platform = {"scratch-storage-class"}
    assert {key for key, mark in marked.items() if mark not in text} == said_by_platform & marked.keys()
    left = {line.strip() for thing in things if thing["metadata"]["name"].partition("-")[0] != "mlflow" or thing["kind"] != "ConfigMap"
            for line in yaml.safe_dump(thing).splitlines() if re.search(r"\.example\b|192\.0\.2\.|198\.51\.100\.", line)}  # fmt: skip
    assert {line for line in left if "registry.example/" not in line} <= LABELS


@each
def test_the_sites_values_are_those_of_the_platform(overlay: str) -> None:
    site, said = site_of(overlay), platform_of(overlay)
    assert (site["user"], site["group"]) == (str(said.security.run_as_user), str(said.security.run_as_group))
    assert site.get("scratch-storage-class", "") == said.scratch.storage_class


@each
def test_the_command_line_takes_what_a_pod_calls_it_with(overlay: str) -> None:
    from typer.main import get_command

    from pipelines.cli import main

    commands = get_command(main.app).commands  # type: ignore[attr-defined]
    lines = [
        one["args"][1:] for pod in pods(rendered(overlay)) for one in pod["spec"]["containers"] if one.get("args", [""])[0] == "tuneline"
    ]
    called = [line for line in lines if line[0] in commands]
    assert "deploy" in [line[0] for line in called]
    for name, *arguments in called:
        commands[name].make_context(name, list(arguments))


@each
def test_the_watcher_and_triton_share_a_folder_and_the_name_that_a_pod_is_ready_by(overlay: str) -> None:
    (pod,) = [one for one in pods(rendered(overlay)) if one["metadata"]["name"] == "triton"]
    triton, watcher = pod["spec"]["containers"]
    said = dict(one.lstrip("-").split("=", 1) for one in [*triton["args"], *watcher["args"]] if "=" in one)
    assert said["model-repository"] == f"{said['folder']}/repository"
    assert pod["spec"]["initContainers"][0]["command"][-1] == said["model-repository"]
    assert triton["readinessProbe"]["httpGet"]["path"] == f"/v2/models/{said['as']}/ready"
    for container in (triton, watcher):  # vLLM's packages name folders by their path
        assert said["folder"] in [mount["mountPath"] for mount in container["volumeMounts"]]
    ports = {one["name"]: one["containerPort"] for one in triton["ports"]}
    assert (said["url"], said["grpc-url"]) == (f"http://127.0.0.1:{ports['http']}", f"127.0.0.1:{ports['grpc']}")
