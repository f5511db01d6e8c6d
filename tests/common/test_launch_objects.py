"""The TrainJobs and RayJobs that are asked for: what was reviewed, what their CRDs take, and pods that a restricted namespace takes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from components.common.launch import Command, objects
from components.common.launch.settings import LauncherSettings
from components.common.scheduling import NodeAffinity, Toleration, affinity, tolerations
from tests import crds, kubernetes_schemas, pod_security

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/data/tuneline/state/fine_tuning/0a1b/launch")
REGENERATE = "if the change is meant: python -P -m tests.common.test_launch_objects writes the golden copies anew"
IMAGE = "registry.example/tuneline/training@sha256:" + "1" * 64
ONE = {"image": IMAGE, "claim": "tuneline"}
MANY = {
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
    "claims": [{"claim": "base-models", "mount": "/models"}, {"claim": "corpus", "mount": "/corpus", "sub_path": "clean"}],
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
MADE = {"TrainJob": objects.trainjob, "RayJob": objects.rayjob}
KINDS = sorted(MADE)


def settings(kind: str, size: str) -> LauncherSettings:
    """One node as little as can be said, or two of eight accelerators with all that a site can say."""
    own = {"rayjob": {"ray_version": "2.60.0", "pull_policy": "IfNotPresent"}}.get(kind.lower(), {}) if size == "two" else {}
    pods = {**(MANY if size == "two" else ONE), **own}
    more = {"nodes": 2, "threads": 12, "environment": FABRIC} if size == "two" else {}
    return LauncherSettings.model_validate({"kind": kind.lower(), kind.lower(): pods, **more})


def made(kind: str, size: str) -> Json:
    """The object."""
    said = settings(kind, size)
    command = Command("components.fine_tuning.worker", ["job.json"], 8 if size == "two" else 1, said.nodes)
    return MADE[kind](said, command, FOLDER, objects.name_of(objects.key_of(said, FOLDER), 1))


def written(thing: Json) -> str:
    return yaml.safe_dump(thing, sort_keys=False, width=140)


def pods(thing: Json) -> list[Json]:
    """The pods of an object; a TrainJob's are patches of a runtime's, whose container is given here as the runtime has it."""
    if thing["kind"] == "RayJob":
        return list(crds.pods(thing))
    template = _patched(thing)
    (container,) = template["spec"]["containers"]
    whole = {**container, "image": thing["spec"]["trainer"]["image"], "resources": thing["spec"]["trainer"].get("resourcesPerNode", {})}
    metadata = {"name": "pod", **template.get("metadata", {})}
    spec = {**template["spec"], "containers": [whole], "initContainers": []}
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]


def _patched(thing: Json) -> Json:
    (patch,) = thing["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return dict(job["template"]["spec"]["template"])


SIZES = [(kind, size) for kind in KINDS for size in ("one", "two")]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_an_object_is_what_was_reviewed(kind: str, size: str) -> None:
    assert written(made(kind, size)) == (GOLDEN / f"{kind.lower()}-{size}.yaml").read_text(encoding="utf-8"), REGENERATE


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_its_crd_takes_an_object_strictly(kind: str, size: str) -> None:
    assert crds.problems(made(kind, size)) == []


@pytest.mark.skipif(crds.folder() is None, reason="TUNELINE_CRDS names no folder with the whole CRDs")
@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_the_whole_crd_takes_an_object_strictly(kind: str, size: str) -> None:
    thing = made(kind, size)
    assert crds.whole(thing) == []
    for place in places(thing):
        assert crds.whole(planted(thing, place)) != [], f"an unknown field in {place} is refused"


@pytest.mark.skipif(crds.folder() is None, reason="TUNELINE_CRDS names no folder with the whole CRDs")
@pytest.mark.parametrize("kind", KINDS)
def test_the_derived_schemas_are_those_of_the_whole_crds(kind: str) -> None:
    place = crds.folder()
    assert place
    assert crds.derive(crds._schema(place, kind)) == yaml.safe_load((crds.DERIVED / f"{kind.lower()}.json").read_text())


FREE = ("labels", "annotations", "limits", "requests", "rayStartParams", "nodeSelector", "metadata")  # any key, or not in the schema


def places(thing: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each object whose fields the API server knows."""
    if isinstance(thing, dict):
        if not path or path[-1] not in FREE:
            yield path
        for key, value in thing.items():
            if path or key == "spec":
                yield from places(value, (*path, key))
    elif isinstance(thing, list):
        for index, value in enumerate(thing):
            yield from places(value, (*path, index))


def planted(thing: Json, place: tuple[Any, ...]) -> Json:
    """A copy with an unknown field in that object."""
    changed = copy.deepcopy(thing)
    inside: Any = changed
    for key in place:
        inside = inside[key]
    inside["planted"] = "x"
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_refused_wherever_it_stands(kind: str) -> None:
    thing = made(kind, "two")
    found = list(places(thing))
    assert len(found) > 20
    assert [place for place in found if not crds.problems(planted(thing, place))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_type_is_refused(kind: str) -> None:
    thing = made(kind, "two")
    thing["spec"]["activeDeadlineSeconds"] = "a day"
    assert crds.problems(thing) != []


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_the_pods_pass_the_restricted_standard_and_every_version_of_kubernetes_takes_them(kind: str, size: str) -> None:
    for pod in pods(made(kind, size)):
        assert pod_security.violations(pod) == []
        for version in kubernetes_schemas.versions():
            assert kubernetes_schemas.schema_problems(pod, version) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_capability_that_is_added_is_in_the_pods_and_breaks_the_standard(kind: str) -> None:
    said = settings(kind, "one")
    pods_of = said.model_copy(update={kind.lower(): objects.pods_of(said).model_copy(update={"capabilities": ["IPC_LOCK"]})})
    thing = MADE[kind](pods_of, Command("m", [], 1, 1), FOLDER, "tuneline-0-1")
    assert any("IPC_LOCK" in problem for pod in pods(thing) for problem in pod_security.violations(pod))


def test_the_variables_of_torchrun_are_the_launchers() -> None:
    with pytest.raises(ValidationError, match="PET_NNODES: the variables of torchrun"):
        LauncherSettings(kind="trainjob", environment={"PET_NNODES": "3"})


def test_a_label_by_which_jobs_are_found_cannot_be_set() -> None:
    with pytest.raises(ValidationError, match="tuneline/job: keys that begin with tuneline/"):
        LauncherSettings.model_validate({"trainjob": {"labels": {"tuneline/job": "x"}}})


def test_the_same_path_on_another_volume_is_another_job() -> None:
    here = settings("TrainJob", "one")
    other = LauncherSettings.model_validate({"kind": "trainjob", "trainjob": {**ONE, "claim": "another"}})
    keys = {objects.key_of(here, FOLDER), objects.key_of(other, FOLDER), objects.key_of(here, FOLDER.parent)}
    assert len(keys) == 3


def test_a_tolerated_taint_and_a_preferred_node_are_as_kubernetes_has_them() -> None:
    assert tolerations([Toleration(operator="Exists", seconds=60)]) == [{"operator": "Exists", "tolerationSeconds": 60}]
    preferred = affinity([NodeAffinity(key="zone", values=["a"], weight=10)])["nodeAffinity"]
    assert list(preferred) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert affinity([]) == {}


if __name__ == "__main__":
    for kind_, size_ in SIZES:
        (GOLDEN / f"{kind_.lower()}-{size_}.yaml").write_text(written(made(kind_, size_)), encoding="utf-8")
    sys.exit(0)
