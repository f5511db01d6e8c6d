"""Who may do what: every right that is given is one that code uses, and none is given twice or by a star."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.cluster import permissions
from tests.deploy.rendering import OVERLAYS, platform_of, rendered

Json = dict[str, Any]
Right = tuple[str, str, str, str]  # verb, group, resource, name ("": of any name)
LAUNCHED = "components/common/launch: {}"
LOOKED_AT = "pipelines/cluster: {}"
# Each right beside what uses it. That the launcher's and the doctor's are used, and no others, is also tried against a stand-in for the API
# server, in tests/common/test_kubernetes_jobs.py and tests/pipelines/cluster/test_doctor.py.
REASONS: dict[str, dict[Right, str]] = {
    "tuneline-runner": dict.fromkeys(permissions.OF_THE_PODS, "Kubeflow's launcher and Argo's executor, in each pod")
    | {("get", "", "secrets", permissions.STORE_SECRET): "the keys of Kubeflow's own artifact store, for its launcher"},
    "tuneline-launcher": {
        (verb, group, kind, ""): LAUNCHED.format(reason)
        for group, kind in (("trainer.kubeflow.org", "trainjobs"), ("ray.io", "rayjobs"))
        for verb, reason in {
            "create": "KubernetesLauncher.start",
            "get": "KubernetesJob looks at its job, by a plain GET",
            "list": "a job is found again by its label",
            "delete": "a cancelled or ended job is removed",
        }.items()
    }
    | {
        ("list", "", "pods", ""): LAUNCHED.format("what a pod waits for, and that it was evicted"),
        ("list", "", "events", ""): LAUNCHED.format("why a job has no pods yet"),
        ("list", "kueue.x-k8s.io", "workloads", ""): LAUNCHED.format("what Kueue says of a job that waits"),
    },
    "tuneline-doctor": {
        **{("get", "", kind, ""): LOOKED_AT.format("whether what platform.yaml names is there")
           for kind in ("persistentvolumeclaims", "configmaps", "serviceaccounts", "secrets", "services", "endpoints")},
        **{("list", "", kind, ""): LOOKED_AT.format("limits.py and nodes.py") for kind in ("limitranges", "resourcequotas", "nodes")},
        ("get", "", "namespaces", "team-a"): LOOKED_AT.format("namespace.py: what Pod Security it enforces"),
        ("get", "storage.k8s.io", "storageclasses", ""): LOOKED_AT.format("storage.py: that of the scratch space"),
        ("create", "", "pods", ""): LOOKED_AT.format("admission.py: tried with dryRun=All, never made"),
        ("create", "authorization.k8s.io", "localsubjectaccessreviews", ""): LOOKED_AT.format("permissions.py: what the pods' account may"),
        **{(verb, "kueue.x-k8s.io", kind, ""): LOOKED_AT.format("queue.py: the one that is named, or what there is instead")
           for verb in ("get", "list") for kind in ("localqueues", "clusterqueues", "workloadpriorityclasses")},
        **{(verb, "trainer.kubeflow.org", kind, ""): LOOKED_AT.format("training.py: the runtime that is named, or what there is instead")
           for verb in ("get", "list") for kind in ("clustertrainingruntimes", "trainingruntimes")},
    },
}  # fmt: skip


def rights(rules: list[Json]) -> list[Right]:
    """Every single right of some rules."""
    return [
        (verb, group, kind, name)
        for rule in rules
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_right_has_a_reason_and_every_reason_its_right(overlay: str) -> None:
    roles = [one for one in rendered(overlay) if one["kind"] in ("Role", "ClusterRole")]
    given: dict[tuple[str, str], list[Right]] = {}
    for role in roles:
        where = role["metadata"].get("namespace") or "team-a"  # a ClusterRole goes with the team's Role of the same name
        given.setdefault((where, role["metadata"]["name"]), []).extend(rights(role["rules"]))
    assert given
    for (where, name), found in given.items():
        assert len(found) == len(set(found)), f"{name} in {where} says one right twice"
        assert set(found) == set(REASONS[name])
    assert not [one for found in given.values() for one in found if "*" in one]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_accounts_of_ours_and_the_named_person_are_bound_and_each_to_a_role_that_is_there(overlay: str) -> None:
    things = rendered(overlay)
    accounts = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in things if one["kind"] == "ServiceAccount"}
    roles = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in things if one["kind"].endswith("Role")}
    for binding in (one for one in things if one["kind"].endswith("RoleBinding")):
        kind, where = binding["roleRef"]["kind"], binding["metadata"].get("namespace")
        assert (kind, where, binding["roleRef"]["name"]) in roles
        for subject in binding["subjects"]:
            if subject["kind"] == "ServiceAccount":
                assert (subject["namespace"], subject["name"]) in accounts
                assert subject["name"] == "tuneline", "the account of the tools has no rights"
            else:
                assert (subject["kind"], binding["metadata"]["name"]) == ("User", "tuneline-doctor")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_launchers_role_is_where_trainings_may_be_started_elsewhere_and_nowhere_else(overlay: str) -> None:
    there = any(one["metadata"]["name"] == "tuneline-launcher" for one in rendered(overlay))
    runtime = any(one["kind"] == "ClusterTrainingRuntime" for one in rendered(overlay))
    assert there == runtime
    assert there or platform_of(overlay).launcher.kind == "process"
