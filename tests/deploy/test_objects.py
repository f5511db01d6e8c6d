"""Every object that an overlay renders is one that its API takes, and every pod of ours one that a restricted namespace takes."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests import crds, kubernetes_schemas, pod_security

from tests.deploy.rendering import CUSTOM, OVERLAYS, built, home, kubectl, matches, of_kind, pods, rendered, DEPLOY  # isort: skip

Json = dict[str, Any]
each = pytest.mark.parametrize("overlay", OVERLAYS)
# Kinds whose CRD is not at hand, and the fields of theirs that are used: apiVersion, and the dotted names of everything under spec.
LISTED = {
    # prometheus-operator, Documentation/api-reference/api.md, PodMonitorSpec and PodMetricsEndpoint
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        {"selector.matchLabels", "podMetricsEndpoints.port", "podMetricsEndpoints.path", "podMetricsEndpoints.interval"},
    ),
    # Kubernetes Network Custom Resource Definition De-facto Standard, version 1.3
    "NetworkAttachmentDefinition": ("k8s.cni.cncf.io/v1", {"config"}),
}
# dell/csi-powerscale, samples/storageclass/isilon.yaml
CSI_POWERSCALE = {"ClusterName", "AccessZone", "IsiPath", "IsiVolumePathPermissions", "RootClientEnabled", "csi.storage.k8s.io/fstype"}
CLUSTER_WIDE = (
    "Namespace", "PersistentVolume", "StorageClass", "ClusterRole", "ClusterRoleBinding",
    "ClusterQueue", "ResourceFlavor", "WorkloadPriorityClass", "ClusterTrainingRuntime",
)  # fmt: skip


def is_custom(thing: Json) -> bool:
    return thing["apiVersion"].partition("/")[0] in CUSTOM


def everything() -> list[Json]:
    """The objects of all overlays, each once."""
    return [json.loads(text) for text in dict.fromkeys(json.dumps(one, sort_keys=True) for name in OVERLAYS for one in rendered(name))]


def test_there_is_an_overlay_for_each_of_the_four_places() -> None:
    assert OVERLAYS == ["gaudi3-roce", "one-gpu-node", "shared-gpus", "xe9680-powerscale"]


@each
def test_every_name_is_there_once_and_every_namespace_is_one_that_the_kind_has(overlay: str) -> None:
    names = [(one["apiVersion"], one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered(overlay)]
    assert len(names) == len(set(names)) > 20
    assert [name for name in names if (name[1] in CLUSTER_WIDE) != (name[2] is None)] == []


def test_the_clients_models_take_every_object_of_kubernetes() -> None:
    core = [one for one in everything() if not is_custom(one)]
    assert {one["kind"] for one in core} >= {"CronJob", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"}
    assert {name(one): found for one in core if (found := kubernetes_schemas.problems(one))} == {}


def name(thing: Json) -> str:
    return f"{thing['kind']} {thing['metadata']['name']}"


@pytest.mark.parametrize("version", kubernetes_schemas.versions() or ["none"])
def test_every_version_of_kubernetes_takes_every_object_strictly(version: str) -> None:
    if version == "none":
        pytest.skip("kubernetes-validate, of the development extra, is not installed; the client's models were asked above")
    core = [one for one in everything() if not is_custom(one)]
    assert {name(one): found for one in core if (found := kubernetes_schemas.schema_problems(one, version))} == {}


def test_an_unknown_field_in_an_object_of_kubernetes_is_refused() -> None:
    (triton, *_) = [one for one in everything() if name(one) == "Deployment triton"]
    triton["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpget"] = {}
    assert any("httpget" in problem for problem in kubernetes_schemas.problems(triton))
    (scaler, *_) = [one for one in everything() if name(one) == "HorizontalPodAutoscaler triton"]
    scaler["spec"]["metrics"][0]["averageUtilization"] = 80
    assert any("averageUtilization" in problem for problem in kubernetes_schemas.problems(scaler))


def test_the_crds_take_every_custom_resource_strictly() -> None:
    ours = [one for one in everything() if is_custom(one) and one["kind"] not in LISTED]
    assert {one["kind"] for one in ours} == {*crds.WHOLE} - {"TrainJob", "RayJob"}
    assert {name(one): found for one in ours if (found := crds.problems(one))} == {}
    for thing in ours:
        inside = thing.get("spec", thing)
        inside["planted"] = "x"
        assert crds.problems(thing) != [], f"an unknown field of a {thing['kind']} is refused"


@pytest.mark.skipif(crds.folder() is None, reason="TUNELINE_CRDS names no folder with the whole CRDs")
def test_the_whole_crds_take_every_custom_resource_strictly_and_the_derived_schemas_are_theirs() -> None:
    place = crds.folder()
    assert place
    for thing in everything():
        if is_custom(thing) and thing["kind"] not in LISTED:
            assert crds.whole(thing) == []
            derived = (crds.DERIVED / f"{thing['kind'].lower()}.json").read_text(encoding="utf-8")
            assert crds.derive(crds._schema(place, thing["kind"])) == json.loads(derived)


def fields(value: Any, path: str = "") -> set[str]:
    """The dotted names of the fields that hold something; below a list as if there were none, below matchLabels none."""
    if isinstance(value, list):
        return {found for one in value for found in fields(one, path)}
    if isinstance(value, dict) and not path.endswith("matchLabels"):
        return {found for key, one in value.items() for found in fields(one, f"{path}.{key}" if path else key)}
    return {path}


def test_a_kind_without_a_crd_at_hand_has_the_listed_fields_and_no_other() -> None:
    listed = [one for one in everything() if one["kind"] in LISTED]
    assert {one["kind"] for one in listed} == set(LISTED)
    for thing in listed:
        assert (thing["apiVersion"], fields(thing["spec"])) == LISTED[thing["kind"]]


def test_the_storage_class_gives_the_driver_what_it_knows_as_text() -> None:
    (made,) = [one for one in everything() if one["kind"] == "StorageClass"]
    assert made["provisioner"] == "csi-isilon.dellemc.com"
    assert set(made["parameters"]) <= CSI_POWERSCALE
    assert all(isinstance(value, str) for value in made["parameters"].values())


def test_the_checkpoint_share_shows_a_new_file_at_once_however_it_is_mounted() -> None:
    mounted = [
        one.get("mountOptions") or one["spec"]["mountOptions"]
        for one in everything()
        if one["kind"] in ("PersistentVolume", "StorageClass")
    ]
    written = [options for options in mounted if "ro" not in options]
    assert len(written) == 3
    for options in written:
        assert {"actimeo=0", "lookupcache=positive", "hard", "nconnect=8", "rsize=1048576", "wsize=1048576"} <= set(options)


# The pods


@each
def test_every_pod_is_one_that_kubernetes_takes_and_a_restricted_namespace(overlay: str) -> None:
    found = list(pods(rendered(overlay)))
    assert len(found) >= 5
    for pod in found:
        assert kubernetes_schemas.problems(pod) == []
        assert pod_security.violations(pod) == []


@each
def test_no_pod_has_a_token_or_writes_to_its_root_or_takes_more_memory_than_it_says(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod_security.containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"]["limits"].keys()
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]] or container["command"][0] == "mkdir"


@each
def test_what_a_pod_refers_to_is_there(overlay: str) -> None:
    """Claims and config maps; tests/deploy/test_agreement.py looks at the secrets."""
    things = rendered(overlay)
    for pod in pods(things):
        where = pod["metadata"]["namespace"]
        assert pod["spec"]["serviceAccountName"] in of_kind(things, "ServiceAccount", where)
        maps = [v["configMap"]["name"] for v in pod["spec"]["volumes"] if not v.get("configMap", {"optional": True}).get("optional")]
        maps += [e["configMapRef"]["name"] for c in pod["spec"]["containers"] for e in c.get("envFrom", [])]
        assert set(maps) <= set(of_kind(things, "ConfigMap", where))
        made = {t["metadata"]["name"] for s in of_kind(things, "StatefulSet", where).values() for t in s["spec"]["volumeClaimTemplates"]}
        claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v}
        assert claims <= {*of_kind(things, "PersistentVolumeClaim", where), *made}


@each
def test_every_selector_takes_a_pod_and_every_port_is_one_of_its(overlay: str) -> None:
    things = rendered(overlay)
    for thing in things:
        if thing["kind"] not in ("Service", "PodDisruptionBudget", "PodMonitor", "Deployment", "StatefulSet"):
            continue
        selector = thing["spec"]["selector"]
        selector = {"matchLabels": selector} if thing["kind"] == "Service" else selector
        (pod,) = [
            pod
            for pod in pods(things)
            if pod["metadata"]["namespace"] == thing["metadata"]["namespace"] and matches(selector, pod["metadata"]["labels"])
        ]
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}
        asked = [port["targetPort"] for port in thing["spec"].get("ports", [])] if thing["kind"] == "Service" else []
        asked += [one["port"] for one in thing["spec"].get("podMetricsEndpoints", [])]
        assert set(asked) <= ports


@each
def test_what_is_scaled_is_there_and_measured_by_a_container_of_it(overlay: str) -> None:
    things = rendered(overlay)
    for scaler in of_kind(things, "HorizontalPodAutoscaler").values():
        target = of_kind(things, scaler["spec"]["scaleTargetRef"]["kind"], scaler["metadata"]["namespace"])["triton"]
        assert "replicas" not in target["spec"], "whoever applies the file again would set the number back"
        names = {container["name"] for container in target["spec"]["template"]["spec"]["containers"]}
        assert {m["containerResource"]["container"] for m in scaler["spec"]["metrics"] if "containerResource" in m} <= names


# Who may talk to whom


@each
def test_a_namespace_of_ours_is_restricted_and_closed_but_for_what_is_said(overlay: str) -> None:
    things = rendered(overlay)
    made = of_kind(things, "Namespace")
    assert "mlflow" in made
    for namespace, said in made.items():
        assert said["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        closed = of_kind(things, "NetworkPolicy", namespace)["default-deny"]["spec"]
        assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        for policy in of_kind(things, "NetworkPolicy", namespace).values():
            rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
            assert all(rule.get("from") or rule.get("to") for rule in rules), "a rule for everybody"


def reaches(things: list[Json], pod: Json, port: int) -> list[Json]:
    """The peers that some policy lets a pod ask on a port."""
    policies = of_kind(things, "NetworkPolicy", pod["metadata"]["namespace"]).values()
    rules = [r for p in policies if matches(p["spec"]["podSelector"], pod["metadata"]["labels"]) for r in p["spec"].get("egress", [])]
    return [peer for rule in rules if port in [p["port"] for p in rule.get("ports", [])] for peer in rule["to"]]


@each
def test_each_pod_gets_where_it_has_to(overlay: str) -> None:
    things = rendered(overlay)
    there = {(pod["metadata"]["name"], pod["metadata"]["namespace"]): pod for pod in pods(things)}
    database = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "postgresql"}}}
    assert database in reaches(things, there["mlflow", "mlflow"], 5432)
    assert database in reaches(things, there["mlflow-backup", "mlflow"], 5432)
    assert not reaches(things, there["postgresql", "mlflow"], 5432)
    variables = {one["name"]: one.get("value") for one in there["mlflow", "mlflow"]["spec"]["containers"][0]["env"]}
    assert reaches(things, there["mlflow", "mlflow"], urlsplit(variables["S3_ENDPOINT"]).port or 443)
    team = home(overlay)
    if team in of_kind(things, "Namespace"):  # the policies of Kubeflow's own namespace are Kubeflow's
        mlflow = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mlflow"}}}
        for tool in ("triton", "tuneline-gc"):
            assert mlflow in reaches(things, there[tool, team], 5000)
            assert not reaches(things, there[tool, team], 6443), "these never ask the API server"
        step = {"metadata": {"namespace": team, "labels": {}}}
        assert reaches(things, step, 6443)


# What is inside config maps


def test_the_parts_that_mig_cuts_are_such_as_the_manager_reads() -> None:
    text = of_kind(rendered("shared-gpus"), "ConfigMap", "gpu-operator")["tuneline-mig"]["data"]["config.yaml"]
    said = yaml.safe_load(text)
    assert (said["version"], set(said)) == ("v1", {"version", "mig-configs"})
    for parts in said["mig-configs"].values():
        for part in parts:
            assert set(part) <= {"devices", "mig-enabled", "mig-devices", "device-filter"}
            assert part["mig-enabled"] == bool(part.get("mig-devices"))
    of_all = [number for part in said["mig-configs"]["customization"] for number in part["devices"]]
    assert sorted(of_all) == list(range(8)), "every GPU of the node once"


def test_the_sharing_is_such_as_the_device_plugin_reads() -> None:
    data = of_kind(rendered("shared-gpus"), "ConfigMap", "gpu-operator")["tuneline-time-slicing"]["data"]
    whole, shared = (yaml.safe_load(data[name]) for name in ("whole", "shared"))
    assert fields(whole) == {"version", "flags.migStrategy"}
    known = {"renameByDefault", "failRequestsGreaterThanOne", "resources.name", "resources.replicas"}
    assert fields(shared) == {"version", "flags.migStrategy", *(f"sharing.timeSlicing.{one}" for one in known)}
    assert shared["sharing"]["timeSlicing"]["resources"][0]["replicas"] > 1


def test_the_second_network_and_its_devices_are_json_that_belongs_together() -> None:
    things = rendered("gaudi3-roce")
    network = json.loads(of_kind(things, "NetworkAttachmentDefinition")["roce"]["spec"]["config"])
    assert {"cniVersion", "name", "type", "master", "ipam"} <= set(network)
    devices = json.loads(of_kind(things, "ConfigMap", "kube-system")["rdma-devices"]["data"]["config.json"])
    (one,) = devices["configList"]
    assert set(one) == {"resourcePrefix", "resourceName", "rdmaHcaMax", "selectors"}
    assert one["selectors"]["ifNames"] == [network["master"]]


def test_each_folder_is_one_that_some_overlay_uses() -> None:
    used = "\n".join(path.read_text(encoding="utf-8") for path in (DEPLOY / "overlays").rglob("kustomization.yaml"))
    folders = [path.parent.name for part in ("base", "components") for path in (DEPLOY / part).glob("*/kustomization.yaml")]
    assert len(folders) > 10
    assert [folder for folder in folders if f"{folder}" not in used] == []


def test_a_mistake_in_a_file_is_found_when_it_is_rendered(tmp_path: Any) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    with pytest.raises(AssertionError, match=r"missing\.yaml"):
        built(tmp_path)
    assert kubectl()
