"""docs/examples/storage-probe.yaml and storage-benchmark.yaml: valid for every Kubernetes version; the probe's two pods find each other."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import kubernetes_schemas, pod_security
from tests.pipelines.command import COMMAND, ROOT, environment

EXAMPLE = ROOT / "docs" / "examples" / "storage-probe.yaml"
SMALL = ["--quick", "--size", "4MiB", "--no-fio", "--json"]


BENCHMARK_EXAMPLE = EXAMPLE.with_name("storage-benchmark.yaml")
each_example = pytest.mark.parametrize("example", [EXAMPLE, BENCHMARK_EXAMPLE], ids=lambda path: path.stem)


def load_job(example: Path = EXAMPLE) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(example.read_text(encoding="utf-8"))
    return manifest


@each_example
def test_job_is_valid_for_every_kubernetes_version(example: Path) -> None:
    assert kubernetes_schemas.problems(load_job(example)) == []
    for version in kubernetes_schemas.versions():
        assert kubernetes_schemas.schema_problems(load_job(example), version) == []


@each_example
def test_pods_are_allowed_in_a_restricted_namespace(example: Path) -> None:
    assert pod_security.violations(load_job(example)["spec"]["template"]) == []


@each_example
def test_volume_owner_is_documented_as_a_value_to_change(example: Path) -> None:
    overlays = [
        yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in (ROOT / "deploy" / "overlays").glob("*/platform.yaml")
    ]
    pods = load_job(example)["spec"]["template"]["spec"]["securityContext"]
    assert {overlay["security"]["run_as_user"] for overlay in overlays} != {pods["runAsUser"]}, (
        "all overlays have this user; the page need not mention it"
    )
    head = " ".join(
        line.removeprefix("# ") for line in example.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
    )
    (row,) = (
        line
        for line in (ROOT / "docs" / "how-to" / "storage.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| Kubernetes |") and example.name in line
    )
    for text in (head, row):
        assert "claim" in text
        assert "user and group" in text
        assert "`security` in platform.yaml" in text


def test_two_pods_run_on_different_nodes() -> None:
    spec, template = load_job()["spec"], load_job()["spec"]["template"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    (term,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_pods_pair_by_their_index_and_report_one_result(tmp_path: Path) -> None:
    (container,) = load_job()["spec"]["template"]["spec"]["containers"]
    uid = "0d1c3f7e-6a50-4f1c-9a54-0a3f2b9d8c11"  # the format of the label that provides PAIR
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
    outputs = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first == second
    assert [host["rank"] for host in first["hosts"]] == [0, 1]
    assert list(tmp_path.iterdir()) == []
