"""docs/examples/storage-probe.yaml: a Job that every version of Kubernetes takes, restricted pods or not, and whose two pods meet."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests import kubernetes_schemas, pod_security
from tests.pipelines.command import COMMAND, ROOT, environment

EXAMPLE = ROOT / "docs" / "examples" / "storage-probe.yaml"
SMALL = ["--quick", "--size", "4MiB", "--no-fio", "--json"]


def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return found


def test_every_version_of_kubernetes_takes_the_job() -> None:
    assert kubernetes_schemas.problems(job()) == []
    for version in kubernetes_schemas.versions():
        assert kubernetes_schemas.schema_problems(job(), version) == []


def test_a_namespace_that_is_restricted_takes_its_pods() -> None:
    assert pod_security.violations(job()["spec"]["template"]) == []


def test_whose_the_volume_is_stands_among_what_is_to_be_changed() -> None:
    overlays = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (ROOT / "deploy" / "overlays").glob("*/platform.yaml")]
    pods = job()["spec"]["template"]["spec"]["securityContext"]
    assert {one["security"]["run_as_user"] for one in overlays} != {pods["runAsUser"]}, "no overlay has another one: say nothing of it"
    head = " ".join(line.removeprefix("# ") for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    (row,) = (line for line in (ROOT / "docs" / "storage.md").read_text(encoding="utf-8").splitlines() if line.startswith("| Kubernetes |"))
    for text in (head, row):
        assert "claim" in text
        assert "user and group" in text
        assert "`security` in platform.yaml" in text


def test_there_are_two_pods_and_no_node_gets_both() -> None:
    spec, template = job()["spec"], job()["spec"]["template"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    (apart,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_what_the_pods_run_meets_by_their_index_and_comes_to_one_result(tmp_path: Path) -> None:
    (container,) = job()["spec"]["template"]["spec"]["containers"]
    uid = "0d1c3f7e-6a50-4f1c-9a54-0a3f2b9d8c11"  # as the label has it that PAIR is taken from
    program, *arguments = [part.replace("$(PAIR)", uid) for part in container["command"]]
    assert (program, arguments[2]) == ("tuneline", container["volumeMounts"][0]["mountPath"])
    arguments[2] = str(tmp_path)
    pods = [
        subprocess.Popen(
            [*COMMAND, *arguments, *SMALL],
            env=environment(JOB_COMPLETION_INDEX=index),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for index in "01"
    ]
    told = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told
    first, second = (json.loads(out) for out, _ in told)
    assert first == second
    assert [host["rank"] for host in first["hosts"]] == [0, 1]
    assert list(tmp_path.iterdir()) == []
