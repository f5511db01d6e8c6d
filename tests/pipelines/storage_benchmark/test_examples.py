"""docs/examples/storage-benchmark.*: commands that the command line accepts. storage_probe/test_manifest.py validates the Job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from tests.pipelines.command import ROOT, answer_in_process

EXAMPLES = ROOT / "docs" / "examples"


def load_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "storage-benchmark.yaml").read_text(encoding="utf-8"))
    return job


def test_pods_run_on_different_nodes_and_know_their_number(tmp_path: Path) -> None:
    spec, template = load_job()["spec"], load_job()["spec"]["template"]
    (container,) = template["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert command[command.index("--hosts") + 1] == str(spec["completions"])
    assert command[3] == container["volumeMounts"][0]["mountPath"]
    (term,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert_accepted(command[4:], tmp_path)


def test_default_options_of_the_batch_script_are_accepted(tmp_path: Path) -> None:
    script = (EXAMPLES / "storage-benchmark.sbatch").read_text(encoding="utf-8")
    (line,) = (line.strip() for line in script.splitlines() if line.strip().startswith("set -- "))
    assert_accepted(shlex.split(line)[2:], tmp_path)


def assert_accepted(options: list[str], folder: Path) -> None:
    """Check that the dry run of these options plans all phases; `--size` is lowered to the space of this machine."""
    small = ["--size", "1GB", "--checkpoint", "10m", "--dry-run"]
    planned = answer_in_process("storage", "benchmark", folder, *options, *small, cwd=folder)
    assert list(folder.iterdir()) == []
    assert set(planned["files"]) == {"training", "checkpoint", "small files"}
