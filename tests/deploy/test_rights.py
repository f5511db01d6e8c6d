"""RBAC: every granted right is used by code, is granted once, and has no wildcard."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.kubeflow.preflight import permission_checks
from tests.deploy.rendering import OVERLAYS, load_overlay_platform, render_overlay

Json = dict[str, Any]
Right = tuple[str, str, str, str]  # verb, group, resource, name ("": of any name)
LAUNCHER = "components/common/launch: {}"
PREFLIGHT = "pipelines/kubeflow/preflight: {}"
# Each right and the code that uses it. A fake API server also checks the rights of the launcher and the doctor, in
# tests/common/test_kubernetes_jobs.py and tests/pipelines/preflight/test_doctor.py.
REASONS: dict[str, dict[Right, str]] = {
    "tuneline-runner": dict.fromkeys(permission_checks.POD_RIGHTS, "Kubeflow's launcher and Argo's executor, in each pod")
    | {("get", "", "secrets", permission_checks.STORE_SECRET): "the keys of Kubeflow's own artifact store, for its launcher"},
    "tuneline-launcher-trainjob": {
        (verb, "trainer.kubeflow.org", "trainjobs", ""): LAUNCHER.format(reason)
        for verb, reason in {
            "create": "KubernetesLauncher.start",
            "get": "KubernetesJob polls its job with GET",
            "list": "a job is looked up by its label",
            "delete": "a cancelled or ended job is removed",
        }.items()
    }
    | {
        ("list", "", "pods", ""): LAUNCHER.format("pods of earlier jobs, and why a pod is pending or removed"),
        ("list", "", "events", ""): LAUNCHER.format("why a job has no pods yet"),
        ("list", "kueue.x-k8s.io", "workloads", ""): LAUNCHER.format("the Kueue status of a pending job"),
    },
    "tuneline-doctor": {
        **{("get", "", kind, ""): PREFLIGHT.format("whether the objects of platform.yaml exist")
           for kind in ("persistentvolumeclaims", "configmaps", "serviceaccounts", "secrets", "services", "endpoints")},
        **{("list", "", kind, ""): PREFLIGHT.format("namespace_limits.py and node_checks.py") for kind in ("limitranges", "resourcequotas", "nodes")},
        ("get", "", "namespaces", "team-a"): PREFLIGHT.format("namespace_checks.py: the enforced Pod Security level"),
        ("get", "storage.k8s.io", "storageclasses", ""): PREFLIGHT.format("storage_checks.py: the class of the scratch space"),
        ("create", "", "pods", ""): PREFLIGHT.format("pod_dry_run.py: dryRun=All, never created"),
        ("create", "authorization.k8s.io", "localsubjectaccessreviews", ""): PREFLIGHT.format("permission_checks.py: rights of the pods' account"),
        **{(verb, "kueue.x-k8s.io", kind, ""): PREFLIGHT.format("queue_checks.py: the configured queue, or the available ones")
           for verb in ("get", "list") for kind in ("localqueues", "clusterqueues", "workloadpriorityclasses")},
        **{(verb, "trainer.kubeflow.org", kind, ""): PREFLIGHT.format("launcher_checks.py: the configured runtime, or the available ones")
           for verb in ("get", "list") for kind in ("clustertrainingruntimes", "trainingruntimes")},
    },
}  # fmt: skip


def list_rights(rules: list[Json]) -> list[Right]:
    """Return the single rights of the rules."""
    return [
        (verb, group, kind, name)
        for rule in rules
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rights_equal_the_documented_reasons(overlay: str) -> None:
    roles = [manifest for manifest in render_overlay(overlay) if manifest["kind"] in ("Role", "ClusterRole")]
    granted: dict[tuple[str, str], list[Right]] = {}
    for role in roles:
        namespace = (
            role["metadata"].get("namespace") or "team-a"
        )  # a ClusterRole belongs to the team's Role of the same name
        granted.setdefault((namespace, role["metadata"]["name"]), []).extend(list_rights(role["rules"]))
    assert granted
    for (namespace, name), role_rights in granted.items():
        assert len(role_rights) == len(set(role_rights)), f"{name} in {namespace} says one right twice"
        assert set(role_rights) == set(REASONS[name])
    assert not [right for role_rights in granted.values() for right in role_rights if "*" in right]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_bindings_name_existing_roles_and_known_subjects(overlay: str) -> None:
    manifests = render_overlay(overlay)
    accounts = {
        (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        for manifest in manifests
        if manifest["kind"] == "ServiceAccount"
    }
    roles = {
        (manifest["kind"], manifest["metadata"].get("namespace"), manifest["metadata"]["name"])
        for manifest in manifests
        if manifest["kind"].endswith("Role")
    }
    for binding in (manifest for manifest in manifests if manifest["kind"].endswith("RoleBinding")):
        kind, namespace = binding["roleRef"]["kind"], binding["metadata"].get("namespace")
        assert (kind, namespace, binding["roleRef"]["name"]) in roles
        for subject in binding["subjects"]:
            if subject["kind"] == "ServiceAccount":
                assert (subject["namespace"], subject["name"]) in accounts
                assert subject["name"] == "tuneline", "the account of the tools has no rights"
            else:
                assert (subject["kind"], binding["metadata"]["name"]) == ("User", "tuneline-doctor")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_launcher_role_exists_only_for_launchers_outside_the_step(overlay: str) -> None:
    """A right to create jobs is a right to create any pod of the namespace."""
    roles = {manifest["metadata"]["name"] for manifest in render_overlay(overlay) if manifest["kind"] == "Role"}
    has_runtime = any(manifest["kind"] == "ClusterTrainingRuntime" for manifest in render_overlay(overlay))
    kind = load_overlay_platform(overlay).launcher.kind
    expected = {f"tuneline-launcher-{kind}"} if kind in ("trainjob", "rayjob") else set()
    assert {name for name in roles if name.startswith("tuneline-launcher")} == expected
    assert has_runtime == (kind == "trainjob")
