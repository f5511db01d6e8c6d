"""TrainJob and RayJob manifests: golden files, CRD schemas and the restricted Pod Security Standard."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from components.common.launch import Command
from components.common.launch.kubernetes import job_manifests
from components.common.launch.kubernetes.pod_scheduling import (
    NodeAffinity,
    Toleration,
    build_affinity,
    build_tolerations,
)
from components.common.launch.launcher_settings import LauncherSettings
from tests import crds, kubernetes_schemas, pod_security

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/data/tuneline/state/fine_tuning/0a1b/launch")
REGENERATE = "if the change is intended: python -P -m tests.common.test_launch_objects rewrites the golden files"
IMAGE = "registry.example/tuneline/training@sha256:" + "1" * 64
MINIMAL_SETTINGS = {"image": IMAGE, "claim": "tuneline"}
FULL_SETTINGS = {
    "namespace": "team-a",
    "image": IMAGE,
    "pull_secrets": ["registry"],
    "accelerator": "nvidia.com/gpu",
    "accelerators": 8,
    "cpu": "96",
    "memory": "1500Gi",
    "resources": {"rdma/hca": "8"},
    "shared_memory": "64Gi",
    "claim": "tuneline",
    "mount": "/data",
    "sub_path": "models",
    "claims": [
        {"claim": "base-models", "mount": "/models"},
        {"claim": "corpus", "mount": "/corpus", "sub_path": "clean"},
    ],
    "queue": "team-a",
    "priority": "batch",
    "service_account": "trainer",
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "node_affinity": [{"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["70000"]}],
    "labels": {"team": "search"},
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-1, rdma-2"},
    "run_as_user": 1000,
    "run_as_group": 1000,
    "deadline_seconds": 86400,
}
FABRIC = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2"}
BUILDERS = {"TrainJob": job_manifests.build_trainjob, "RayJob": job_manifests.build_rayjob}
KINDS = sorted(BUILDERS)


def build_settings(kind: str, size: str) -> LauncherSettings:
    """Return minimal settings for one node, or full settings for two nodes of eight accelerators."""
    kind_settings = (
        {"rayjob": {"ray_version": "2.60.0", "pull_policy": "IfNotPresent"}}.get(kind.lower(), {})
        if size == "two"
        else {}
    )
    pod_settings = {**(FULL_SETTINGS if size == "two" else MINIMAL_SETTINGS), **kind_settings}
    launcher_settings = {"nodes": 2, "threads": 12, "environment": FABRIC} if size == "two" else {}
    return LauncherSettings.model_validate({"kind": kind.lower(), kind.lower(): pod_settings, **launcher_settings})


def build_object(kind: str, size: str) -> Json:
    settings = build_settings(kind, size)
    command = Command("components.fine_tuning.worker", ["job.json"], 8 if size == "two" else 1, settings.nodes)
    return BUILDERS[kind](
        settings, command, FOLDER, job_manifests.build_job_name(job_manifests.compute_job_key(settings, FOLDER), 1)
    )


def to_yaml(manifest: Json) -> str:
    return yaml.safe_dump(manifest, sort_keys=False, width=140)


def extract_pods(manifest: Json) -> list[Json]:
    """Return the pods of a manifest; a TrainJob patches the pod template of its runtime, which is filled in here."""
    if manifest["kind"] == "RayJob":
        return list(crds.pods(manifest))
    template = _patched_template(manifest)
    (container,) = template["spec"]["containers"]
    full_container = {
        **container,
        "image": manifest["spec"]["trainer"]["image"],
        "resources": manifest["spec"]["trainer"].get("resourcesPerNode", {}),
    }
    metadata = {"name": "pod", **template.get("metadata", {})}
    spec = {**template["spec"], "containers": [full_container], "initContainers": []}
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]


def _patched_template(manifest: Json) -> Json:
    (patch,) = manifest["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return dict(job["template"]["spec"]["template"])


SIZES = [(kind, size) for kind in KINDS for size in ("one", "two")]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_manifest_equals_golden_file(kind: str, size: str) -> None:
    assert to_yaml(build_object(kind, size)) == (GOLDEN / f"{kind.lower()}-{size}.yaml").read_text(encoding="utf-8"), (
        REGENERATE
    )


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_manifest_is_valid_against_derived_schema(kind: str, size: str) -> None:
    assert crds.problems(build_object(kind, size)) == []


@pytest.mark.skipif(crds.folder() is None, reason="TUNELINE_CRDS names no folder with the whole CRDs")
@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_manifest_is_valid_against_full_crd(kind: str, size: str) -> None:
    manifest = build_object(kind, size)
    assert crds.full_crd_problems(manifest) == []
    for path in iterate_object_paths(manifest):
        assert crds.full_crd_problems(with_unknown_field(manifest, path)) != [], (
            f"an unknown field in {path} is refused"
        )


@pytest.mark.skipif(crds.folder() is None, reason="TUNELINE_CRDS names no folder with the whole CRDs")
@pytest.mark.parametrize("kind", KINDS)
def test_derived_schemas_match_full_crds(kind: str) -> None:
    folder = crds.folder()
    assert folder
    assert crds.derive(crds._schema(folder, kind)) == yaml.safe_load(
        (crds.DERIVED / f"{kind.lower()}.json").read_text()
    )


OPEN_FIELDS = (
    "labels",
    "annotations",
    "limits",
    "requests",
    "rayStartParams",
    "nodeSelector",
    "metadata",
)  # maps with arbitrary keys, or objects outside the schema


def iterate_object_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each object whose fields the schema lists."""
    if isinstance(value, dict):
        if not path or path[-1] not in OPEN_FIELDS:
            yield path
        for key, child in value.items():
            if path or key == "spec":
                yield from iterate_object_paths(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from iterate_object_paths(child, (*path, index))


def with_unknown_field(manifest: Json, path: tuple[Any, ...]) -> Json:
    """Return a copy with an unknown field in the object at `path`."""
    changed = copy.deepcopy(manifest)
    target: Any = changed
    for key in path:
        target = target[key]
    target["planted"] = "x"
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_field_is_refused_at_every_level(kind: str) -> None:
    manifest = build_object(kind, "two")
    paths = list(iterate_object_paths(manifest))
    assert len(paths) > 20
    assert [path for path in paths if not crds.problems(with_unknown_field(manifest, path))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_type_is_refused(kind: str) -> None:
    manifest = build_object(kind, "two")
    manifest["spec"]["activeDeadlineSeconds"] = "a day"
    assert crds.problems(manifest) != []


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_pods_meet_restricted_standard_and_all_schemas(kind: str, size: str) -> None:
    for pod in extract_pods(build_object(kind, size)):
        assert pod_security.violations(pod) == []
        for version in kubernetes_schemas.versions():
            assert kubernetes_schemas.schema_problems(pod, version) == []


@pytest.mark.parametrize("kind", KINDS)
def test_added_capability_violates_restricted_standard(kind: str) -> None:
    settings = build_settings(kind, "one")
    with_capability = settings.model_copy(
        update={
            kind.lower(): job_manifests.get_pod_settings(settings).model_copy(update={"capabilities": ["IPC_LOCK"]})
        }
    )
    manifest = BUILDERS[kind](with_capability, Command("m", [], 1, 1), FOLDER, "tuneline-0-1")
    assert any("IPC_LOCK" in problem for pod in extract_pods(manifest) for problem in pod_security.violations(pod))


def test_torchrun_variables_are_reserved() -> None:
    with pytest.raises(ValidationError, match="PET_NNODES: the launcher sets the variables of torchrun"):
        LauncherSettings(kind="trainjob", environment={"PET_NNODES": "3"})


def test_tuneline_labels_are_reserved() -> None:
    with pytest.raises(ValidationError, match="tuneline/job: keys that begin with tuneline/"):
        LauncherSettings.model_validate({"trainjob": {"labels": {"tuneline/job": "x"}}})


def test_job_key_depends_on_volume_and_folder() -> None:
    settings = build_settings("TrainJob", "one")
    other = LauncherSettings.model_validate({"kind": "trainjob", "trainjob": {**MINIMAL_SETTINGS, "claim": "another"}})
    keys = {
        job_manifests.compute_job_key(settings, FOLDER),
        job_manifests.compute_job_key(other, FOLDER),
        job_manifests.compute_job_key(settings, FOLDER.parent),
    }
    assert len(keys) == 3


def test_toleration_and_preferred_affinity_use_kubernetes_format() -> None:
    assert build_tolerations([Toleration(operator="Exists", seconds=60)]) == [
        {"operator": "Exists", "tolerationSeconds": 60}
    ]
    preferred = build_affinity([NodeAffinity(key="zone", values=["a"], weight=10)])["nodeAffinity"]
    assert list(preferred) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert build_affinity([]) == {}


if __name__ == "__main__":
    for kind_, size_ in SIZES:
        (GOLDEN / f"{kind_.lower()}-{size_}.yaml").write_text(to_yaml(build_object(kind_, size_)), encoding="utf-8")
    sys.exit(0)
