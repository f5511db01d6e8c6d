"""Rendered manifests against the schemas of their APIs, the restricted Pod Security Standard and each other."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests import crds, kubernetes_schemas, pod_security
from tests.deploy.rendering import (
    CUSTOM_GROUPS,
    DEPLOY,
    OVERLAYS,
    build_kustomization,
    find_kubectl,
    iterate_pods,
    render_overlay,
    render_with_optional,
    select_kind,
    selector_matches,
    team_namespace,
)

Json = dict[str, Any]
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
# Kinds whose CRD is not available: apiVersion and the dotted names of the spec fields in use.
LISTED_FIELDS = {
    # prometheus-operator, Documentation/api-reference/api.md, PodMonitorSpec, PodMetricsEndpoint and SafeAuthorization
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        {
            "selector.matchLabels",
            "podMetricsEndpoints.port",
            "podMetricsEndpoints.path",
            "podMetricsEndpoints.interval",
            "podMetricsEndpoints.authorization.credentials.name",
            "podMetricsEndpoints.authorization.credentials.key",
        },
    ),
    # kedacore/keda, commit 8b4f083ca8c8, config/crd/bases/keda.sh_scaledobjects.yaml
    "ScaledObject": (
        "keda.sh/v1alpha1",
        {
            "scaleTargetRef.name",
            "pollingInterval",
            "minReplicaCount",
            "maxReplicaCount",
            *(f"fallback.{name}" for name in ("failureThreshold", "replicas", "behavior")),
            *(
                f"advanced.horizontalPodAutoscalerConfig.behavior.{direction}.{name}"
                for direction in ("scaleDown", "scaleUp")
                for name in ("stabilizationWindowSeconds", "policies.type", "policies.value", "policies.periodSeconds")
            ),
            *(f"triggers.{name}" for name in ("type", "name", "metricType")),
            *(f"triggers.metadata.{name}" for name in ("serverAddress", "threshold", "query")),
        },
    ),
    # prometheus-operator, example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml
    "PrometheusRule": (
        "monitoring.coreos.com/v1",
        {
            "groups.name",
            *(f"groups.rules.{name}" for name in ("alert", "expr", "for", "labels.severity", "annotations.summary")),
        },
    ),
    # kubernetes-sigs/gateway-api, commit 4564255ac2c3, config/crd/standard/gateway.networking.k8s.io_{gateways,httproutes}.yaml
    "Gateway": (
        "gateway.networking.k8s.io/v1",
        {
            "gatewayClassName",
            *(f"listeners.{name}" for name in ("name", "hostname", "port", "protocol", "tls.mode")),
            "listeners.tls.certificateRefs.name",
            *(f"listeners.allowedRoutes.namespaces.{name}" for name in ("from", "selector.matchLabels")),
        },
    ),
    "HTTPRoute": (
        "gateway.networking.k8s.io/v1",
        {
            "hostnames",
            *(f"parentRefs.{name}" for name in ("name", "namespace", "sectionName")),
            *(f"rules.matches.path.{name}" for name in ("type", "value")),
            "rules.timeouts.request",
            *(f"rules.backendRefs.{name}" for name in ("name", "port")),
        },
    ),
    # Kubernetes Network Custom Resource Definition De-facto Standard, version 1.3
    "NetworkAttachmentDefinition": ("k8s.cni.cncf.io/v1", {"config"}),
}
# dell/csi-powerscale, samples/storageclass/isilon.yaml
CSI_POWERSCALE = {
    "ClusterName",
    "AccessZone",
    "IsiPath",
    "IsiVolumePathPermissions",
    "RootClientEnabled",
    "csi.storage.k8s.io/fstype",
}
CLUSTER_WIDE = (
    "Namespace", "PersistentVolume", "StorageClass", "ClusterRole", "ClusterRoleBinding",
    "ClusterQueue", "ResourceFlavor", "WorkloadPriorityClass", "ClusterTrainingRuntime",
    "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
)  # fmt: skip


def is_custom(manifest: Json) -> bool:
    return manifest["apiVersion"].partition("/")[0] in CUSTOM_GROUPS


def collect_manifests() -> list[Json]:
    """Return the manifests of all overlays and their optional components without duplicates."""
    return [
        json.loads(text)
        for text in dict.fromkeys(
            json.dumps(manifest, sort_keys=True)
            for name in OVERLAYS
            for manifest in (*render_overlay(name), *render_with_optional(name))
        )
    ]


def test_four_overlays_exist() -> None:
    assert OVERLAYS == ["gaudi3-roce", "one-gpu-node", "shared-gpus", "xe9680-powerscale"]


@each_overlay
def test_overlay_needs_no_operator_but_those_of_its_launcher_and_queue(overlay: str) -> None:
    groups = {manifest["apiVersion"].partition("/")[0] for manifest in render_overlay(overlay) if is_custom(manifest)}
    assert groups <= {"trainer.kubeflow.org", "kueue.x-k8s.io"}
    optional = {manifest["kind"] for manifest in render_with_optional(overlay)}
    assert "PodMonitor" in optional


@each_overlay
def test_names_are_unique_and_namespaces_match_the_kind_scope(overlay: str) -> None:
    names = [
        (manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace"), manifest["metadata"]["name"])
        for manifest in render_with_optional(overlay)
    ]
    assert len(names) == len(set(names)) > 20
    assert [name for name in names if (name[1] in CLUSTER_WIDE) != (name[2] is None)] == []


def test_kubernetes_objects_match_the_client_models() -> None:
    core = [manifest for manifest in collect_manifests() if not is_custom(manifest)]
    assert {manifest["kind"] for manifest in core} >= {
        "CronJob",
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }
    assert {
        describe(manifest): problems for manifest in core if (problems := kubernetes_schemas.problems(manifest))
    } == {}


def describe(manifest: Json) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


@pytest.mark.parametrize("version", kubernetes_schemas.versions() or ["none"])
def test_kubernetes_objects_match_the_schema_of_each_version(version: str) -> None:
    if version == "none":
        pytest.skip(
            "kubernetes-validate, of the development extra, is not installed; the client's models were asked above"
        )
    core = [manifest for manifest in collect_manifests() if not is_custom(manifest)]
    assert {
        describe(manifest): problems
        for manifest in core
        if (problems := kubernetes_schemas.schema_problems(manifest, version))
    } == {}


def test_unknown_field_in_a_kubernetes_object_is_refused() -> None:
    (triton, *_) = [manifest for manifest in collect_manifests() if describe(manifest) == "Deployment triton"]
    triton["spec"]["template"]["spec"]["containers"][1]["readinessProbe"]["httpget"] = {}
    assert any("httpget" in problem for problem in kubernetes_schemas.problems(triton))
    (scaler, *_) = [
        manifest for manifest in collect_manifests() if describe(manifest) == "HorizontalPodAutoscaler triton"
    ]
    scaler["spec"]["metrics"][0]["averageUtilization"] = 80
    assert any("averageUtilization" in problem for problem in kubernetes_schemas.problems(scaler))


def test_custom_resources_match_their_crds_strictly() -> None:
    custom_resources = [
        manifest for manifest in collect_manifests() if is_custom(manifest) and manifest["kind"] not in LISTED_FIELDS
    ]
    assert {manifest["kind"] for manifest in custom_resources} == {*crds.WHOLE} - {"TrainJob", "RayJob"}
    assert {
        describe(manifest): problems for manifest in custom_resources if (problems := crds.problems(manifest))
    } == {}
    for manifest in custom_resources:
        spec = manifest.get("spec", manifest)
        spec["planted"] = "x"
        assert crds.problems(manifest) != [], f"an unknown field of a {manifest['kind']} is refused"


@pytest.mark.skipif(crds.folder() is None, reason="TUNELINE_CRDS names no folder with the whole CRDs")
def test_custom_resources_match_full_crds_and_derived_schemas() -> None:
    folder = crds.folder()
    assert folder
    for manifest in collect_manifests():
        if is_custom(manifest) and manifest["kind"] not in LISTED_FIELDS:
            assert crds.full_crd_problems(manifest) == []
            derived = (crds.DERIVED / f"{manifest['kind'].lower()}.json").read_text(encoding="utf-8")
            assert crds.derive(crds._schema(folder, manifest["kind"])) == json.loads(derived)


def collect_fields(value: Any, path: str = "") -> set[str]:
    """Return the dotted names of all leaf fields; lists add no level, and labels in matchLabels are skipped."""
    if isinstance(value, list):
        return {name for element in value for name in collect_fields(element, path)}
    if isinstance(value, dict) and not path.endswith("matchLabels"):
        return {
            name for key, element in value.items() for name in collect_fields(element, f"{path}.{key}" if path else key)
        }
    return {path}


def test_kinds_without_a_crd_have_only_the_listed_fields() -> None:
    listed = [manifest for manifest in collect_manifests() if manifest["kind"] in LISTED_FIELDS]
    assert {manifest["kind"] for manifest in listed} == set(LISTED_FIELDS)
    for manifest in listed:
        assert (manifest["apiVersion"], collect_fields(manifest["spec"])) == LISTED_FIELDS[manifest["kind"]]


def test_storage_class_has_only_known_string_parameters() -> None:
    (storage_class,) = [manifest for manifest in collect_manifests() if manifest["kind"] == "StorageClass"]
    assert storage_class["provisioner"] == "csi-isilon.dellemc.com"
    assert set(storage_class["parameters"]) <= CSI_POWERSCALE
    assert all(isinstance(value, str) for value in storage_class["parameters"].values())


def test_writable_shares_are_mounted_without_attribute_caching() -> None:
    mount_options = [
        manifest.get("mountOptions") or manifest["spec"]["mountOptions"]
        for manifest in collect_manifests()
        if manifest["kind"] in ("PersistentVolume", "StorageClass")
    ]
    writable = [options for options in mount_options if "ro" not in options]
    assert len(writable) == 3
    for options in writable:
        assert {"actimeo=0", "lookupcache=positive", "hard", "nconnect=8", "rsize=1048576", "wsize=1048576"} <= set(
            options
        )


# Pods


@each_overlay
def test_pods_are_valid_and_pass_the_restricted_standard(overlay: str) -> None:
    rendered_pods = list(iterate_pods(render_overlay(overlay)))
    assert len(rendered_pods) >= 5
    for pod in rendered_pods:
        assert kubernetes_schemas.problems(pod) == []
        assert pod_security.violations(pod) == []


@each_overlay
def test_pods_have_no_token_a_read_only_root_and_resource_limits(overlay: str) -> None:
    for pod in iterate_pods(render_overlay(overlay)):
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod_security.containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"][
                "limits"
            ].keys()
            assert (
                "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]
                or container["command"][0] == "mkdir"
            )


@each_overlay
def test_claims_config_maps_and_accounts_of_pods_exist(overlay: str) -> None:
    """tests/deploy/test_agreement.py checks the secrets."""
    manifests = render_overlay(overlay)
    for pod in iterate_pods(manifests):
        namespace = pod["metadata"]["namespace"]
        assert pod["spec"]["serviceAccountName"] in select_kind(manifests, "ServiceAccount", namespace)
        maps = [
            v["configMap"]["name"]
            for v in pod["spec"]["volumes"]
            if not v.get("configMap", {"optional": True}).get("optional")
        ]
        maps += [e["configMapRef"]["name"] for c in pod["spec"]["containers"] for e in c.get("envFrom", [])]
        assert set(maps) <= set(select_kind(manifests, "ConfigMap", namespace))
        claim_templates = {
            t["metadata"]["name"]
            for s in select_kind(manifests, "StatefulSet", namespace).values()
            for t in s["spec"]["volumeClaimTemplates"]
        }
        claims = {
            v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v
        }
        assert claims <= {*select_kind(manifests, "PersistentVolumeClaim", namespace), *claim_templates}


@each_overlay
def test_selectors_match_one_pod_that_has_the_ports(overlay: str) -> None:
    manifests = render_with_optional(overlay)
    for manifest in manifests:
        if manifest["kind"] not in ("Service", "PodDisruptionBudget", "PodMonitor", "Deployment", "StatefulSet"):
            continue
        selector = manifest["spec"]["selector"]
        selector = {"matchLabels": selector} if manifest["kind"] == "Service" else selector
        (pod,) = [
            pod
            for pod in iterate_pods(manifests)
            if pod["metadata"]["namespace"] == manifest["metadata"]["namespace"]
            and selector_matches(selector, pod["metadata"]["labels"])
        ]
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}
        referenced_ports = (
            [port["targetPort"] for port in manifest["spec"].get("ports", [])] if manifest["kind"] == "Service" else []
        )
        referenced_ports += [endpoint["port"] for endpoint in manifest["spec"].get("podMetricsEndpoints", [])]
        assert set(referenced_ports) <= ports


@each_overlay
def test_autoscaler_target_and_metric_container_exist(overlay: str) -> None:
    manifests = render_overlay(overlay)
    for scaler in select_kind(manifests, "HorizontalPodAutoscaler").values():
        target = select_kind(manifests, scaler["spec"]["scaleTargetRef"]["kind"], scaler["metadata"]["namespace"])[
            "triton"
        ]
        assert "replicas" not in target["spec"], "whoever applies the file again would set the number back"
        names = {container["name"] for container in target["spec"]["template"]["spec"]["containers"]}
        assert {
            m["containerResource"]["container"] for m in scaler["spec"]["metrics"] if "containerResource" in m
        } <= names


# Network policies


@each_overlay
def test_namespaces_are_restricted_and_deny_traffic_by_default(overlay: str) -> None:
    manifests = render_overlay(overlay)
    namespaces = select_kind(manifests, "Namespace")
    assert "mlflow" in namespaces
    for namespace, manifest in namespaces.items():
        assert manifest["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        default_deny = select_kind(manifests, "NetworkPolicy", namespace)["default-deny"]["spec"]
        assert default_deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        for policy in select_kind(manifests, "NetworkPolicy", namespace).values():
            rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
            assert all(rule.get("from") or rule.get("to") for rule in rules), "a rule for everybody"


def find_egress_peers(manifests: list[Json], pod: Json, port: int) -> list[Json]:
    """Return the peers that the policies let a pod connect to on a port."""
    policies = select_kind(manifests, "NetworkPolicy", pod["metadata"]["namespace"]).values()
    rules = [
        rule
        for policy in policies
        if selector_matches(policy["spec"]["podSelector"], pod["metadata"]["labels"])
        for rule in policy["spec"].get("egress", [])
    ]
    return [
        peer for rule in rules if port in [allowed["port"] for allowed in rule.get("ports", [])] for peer in rule["to"]
    ]


@each_overlay
def test_network_policies_allow_only_the_required_egress(overlay: str) -> None:
    manifests = render_overlay(overlay)
    by_name = {(pod["metadata"]["name"], pod["metadata"]["namespace"]): pod for pod in iterate_pods(manifests)}
    database = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "postgresql"}}}
    assert database in find_egress_peers(manifests, by_name["mlflow", "mlflow"], 5432)
    assert database in find_egress_peers(manifests, by_name["mlflow-backup", "mlflow"], 5432)
    assert not find_egress_peers(manifests, by_name["postgresql", "mlflow"], 5432)
    variables = {
        variable["name"]: variable.get("value")
        for variable in by_name["mlflow", "mlflow"]["spec"]["containers"][0]["env"]
    }
    assert find_egress_peers(manifests, by_name["mlflow", "mlflow"], urlsplit(variables["S3_ENDPOINT"]).port or 443)
    team = team_namespace(overlay)
    if team in select_kind(manifests, "Namespace"):  # Kubeflow manages the policies of its own namespace
        mlflow = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mlflow"}}}
        for name in ("triton", "tuneline-gc"):
            assert mlflow in find_egress_peers(manifests, by_name[name, team], 5000)
            assert not find_egress_peers(manifests, by_name[name, team], 6443), "these never ask the API server"
        step = {"metadata": {"namespace": team, "labels": {}}}
        assert find_egress_peers(manifests, step, 6443)


# Contents of config maps


def test_mig_config_has_the_format_of_the_mig_manager() -> None:
    text = select_kind(render_overlay("shared-gpus"), "ConfigMap", "gpu-operator")["tuneline-mig"]["data"][
        "config.yaml"
    ]
    config = yaml.safe_load(text)
    assert (config["version"], set(config)) == ("v1", {"version", "mig-configs"})
    for partitions in config["mig-configs"].values():
        for partition in partitions:
            assert set(partition) <= {"devices", "mig-enabled", "mig-devices", "device-filter"}
            assert partition["mig-enabled"] == bool(partition.get("mig-devices"))
    devices = [number for partition in config["mig-configs"]["customization"] for number in partition["devices"]]
    assert sorted(devices) == list(range(8)), "every GPU of the node once"


def test_time_slicing_config_has_the_format_of_the_device_plugin() -> None:
    data = select_kind(render_overlay("shared-gpus"), "ConfigMap", "gpu-operator")["tuneline-time-slicing"]["data"]
    whole_gpus, shared_gpus = (yaml.safe_load(data[name]) for name in ("whole", "shared"))
    assert collect_fields(whole_gpus) == {"version", "flags.migStrategy"}
    known = {"renameByDefault", "failRequestsGreaterThanOne", "resources.name", "resources.replicas"}
    assert collect_fields(shared_gpus) == {
        "version",
        "flags.migStrategy",
        *(f"sharing.timeSlicing.{name}" for name in known),
    }
    assert shared_gpus["sharing"]["timeSlicing"]["resources"][0]["replicas"] > 1


def test_rdma_network_and_device_configs_are_consistent() -> None:
    manifests = render_with_optional("gaudi3-roce")
    network = json.loads(select_kind(manifests, "NetworkAttachmentDefinition")["roce"]["spec"]["config"])
    assert {"cniVersion", "name", "type", "master", "ipam"} <= set(network)
    devices = json.loads(select_kind(manifests, "ConfigMap", "kube-system")["rdma-devices"]["data"]["config.json"])
    (device,) = devices["configList"]
    assert set(device) == {"resourcePrefix", "resourceName", "rdmaHcaMax", "selectors"}
    assert device["selectors"]["ifNames"] == [network["master"]]


def test_every_folder_is_used_by_an_overlay() -> None:
    kustomizations = "\n".join(
        path.read_text(encoding="utf-8") for path in (DEPLOY / "overlays").rglob("kustomization.yaml")
    )
    folders = [
        path.parent.name for part in ("base", "components") for path in (DEPLOY / part).glob("*/kustomization.yaml")
    ]
    assert len(folders) > 10
    assert [folder for folder in folders if f"{folder}" not in kustomizations] == ["launcher-rayjob"], (
        "no overlay uses Ray"
    )


def test_missing_resource_fails_the_rendering(tmp_path: Any) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    with pytest.raises(AssertionError, match=r"missing\.yaml"):
        build_kustomization(tmp_path)
    assert find_kubectl()
