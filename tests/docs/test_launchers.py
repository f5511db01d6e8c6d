"""The pages of the launchers: their examples are such as a cluster takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from components.common.launch import Command, objects
from components.common.launch.settings import LauncherSettings
from pipelines import launching, platform, pods
from tests import crds, kubernetes_schemas, pod_security
from tests.pipelines.command import ROOT

DOCS = ROOT / "docs"
COMPONENTS = ROOT / "deploy" / "components"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
MADE = {"trainjob": objects.trainjob, "rayjob": objects.rayjob}


def example(kind: str, tmp_path: Path) -> LauncherSettings:
    """The launcher of a page's platform.yaml, as the step is given it."""
    (text,) = BLOCK.findall((DOCS / f"{kind}.md").read_text(encoding="utf-8"))
    file = tmp_path / "platform.yaml"
    file.write_text(text)
    read = platform.load(file)
    return launching.launcher(read, pods.merged(read.scheduling, read.resources.fine_tuning.scheduling))


@pytest.mark.parametrize("kind", MADE)
def test_the_platform_of_a_page_leads_to_a_job_that_its_crd_takes(kind: str, tmp_path: Path) -> None:
    said = example(kind, tmp_path)
    folder = Path("/data/tuneline/state/fine_tuning/0a1b/launch")
    objects.check(said, folder)
    thing = MADE[kind](said, Command("components.fine_tuning.worker", [], 8, said.nodes), folder, "tuneline-0-1")
    assert crds.problems(thing) == []
    assert thing["metadata"]["labels"][objects.QUEUE] == "team-a"


def test_what_the_platform_says_of_the_steps_pod_counts_for_the_job_where_the_launcher_says_nothing(tmp_path: Path) -> None:
    said = example("trainjob", tmp_path).trainjob
    assert (said.image, said.claim, said.mount) == ("registry.example/tuneline/python-training:1", "tuneline", "/data")
    assert (said.run_as_user, said.run_as_group) == (1000, 1000)


def test_the_role_is_one_that_every_version_of_kubernetes_takes() -> None:
    things = list(yaml.safe_load_all((COMPONENTS / "launcher" / "launcher-rbac.yaml").read_text(encoding="utf-8")))
    assert [thing["kind"] for thing in things] == ["Role", "RoleBinding"]
    assert [problem for thing in things for problem in kubernetes_schemas.problems(thing)] == []
    for version in kubernetes_schemas.versions():
        assert [problem for thing in things for problem in kubernetes_schemas.schema_problems(thing, version)] == []


def test_the_runtime_has_the_job_and_the_container_that_are_patched() -> None:
    runtime = yaml.safe_load((COMPONENTS / "runtime" / "training-runtime.yaml").read_text(encoding="utf-8"))
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert (job["name"], container["name"]) == (objects.NODE, objects.NODE)
    assert "torch" in runtime["spec"]["mlPolicy"], "its plugin injects the variables of torchrun"
    if crds.folder():
        assert crds.whole(runtime) == []


def test_the_curation_on_ray_is_a_job_that_its_crd_and_a_restricted_namespace_take_and_a_command_that_there_is() -> None:
    thing = yaml.safe_load((DOCS / "examples" / "rayjob-curation.yaml").read_text(encoding="utf-8"))
    assert crds.problems(thing) == []
    if crds.folder():
        assert crds.whole(thing) == []
    assert [problem for pod in crds.pods(thing) for problem in pod_security.violations(pod)] == []
    page = (DOCS / "ray.md").read_text(encoding="utf-8")
    told = next(line for line in page.splitlines() if line.startswith("ray job submit") and " curate " in line)
    named = re.compile(r"/\S+|--workdir")  # the paths are each one's own
    assert named.sub("", thing["spec"]["entrypoint"]).split() == named.sub("", told.partition(" -- ")[2]).split()


def test_each_platform_of_the_page_on_slurm_can_be_read_and_leads_to_a_launcher(tmp_path: Path) -> None:
    file, ways = tmp_path / "platform.yaml", []
    for text in BLOCK.findall((DOCS / "slurm.md").read_text(encoding="utf-8")):
        file.write_text(text)
        read = platform.load(file)
        assert read.launcher.kind == "slurm"
        ways.append((read.launcher.slurm.rest, [*read.secrets]))
    assert ways == [("", []), ("https://slurm.example:6820", ["SLURM_JWT"])]
