"""The examples on the launcher pages are valid on a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from components.common.launch import Command
from components.common.launch.kubernetes import job_manifests
from components.common.launch.launcher_settings import LauncherSettings
from pipelines.config import platform_config
from pipelines.definition import pod_spec
from pipelines.steps import step_launcher
from tests import crds, kubernetes_schemas, pod_security
from tests.pipelines.command import ROOT

DOCS = ROOT / "docs"
HOW_TO = DOCS / "how-to"
COMPONENTS = ROOT / "deploy" / "components"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
BUILDERS = {"trainjob": job_manifests.build_trainjob, "rayjob": job_manifests.build_rayjob}


def load_example(kind: str, tmp_path: Path) -> LauncherSettings:
    """Return the launcher settings that the step resolves from a page's platform.yaml."""
    (text,) = BLOCK.findall((HOW_TO / f"{kind}.md").read_text(encoding="utf-8"))
    file = tmp_path / "platform.yaml"
    file.write_text(text)
    platform = platform_config.load_platform(file)
    return step_launcher.resolve_launcher(
        platform, pod_spec.merge_scheduling(platform.scheduling, platform.resources.fine_tuning.scheduling)
    )


@pytest.mark.parametrize("kind", BUILDERS)
def test_example_platform_builds_a_job_that_matches_its_crd(kind: str, tmp_path: Path) -> None:
    settings = load_example(kind, tmp_path)
    folder = Path("/data/tuneline/state/fine_tuning/0a1b/launch")
    job_manifests.check_settings(settings, folder)
    job = BUILDERS[kind](
        settings, Command("components.fine_tuning.worker", [], 8, settings.nodes), folder, "tuneline-0-1"
    )
    assert crds.problems(job) == []
    assert job["metadata"]["labels"][job_manifests.QUEUE_LABEL] == "team-a"


def test_job_inherits_unset_fields_from_the_platform(
    tmp_path: Path,
) -> None:
    settings = load_example("trainjob", tmp_path).trainjob
    assert (settings.image, settings.claim, settings.mount) == (
        "registry.example/tuneline/python-training:1",
        "tuneline",
        "/data",
    )
    assert (settings.run_as_user, settings.run_as_group) == (1000, 1000)


@pytest.mark.parametrize("kind", ["trainjob", "rayjob"])
def test_role_matches_the_schema_of_each_version(kind: str) -> None:
    path = COMPONENTS / f"launcher-{kind}" / "launcher-rbac.yaml"
    manifests = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert [manifest["kind"] for manifest in manifests] == ["Role", "RoleBinding"]
    assert [problem for manifest in manifests for problem in kubernetes_schemas.problems(manifest)] == []
    for version in kubernetes_schemas.versions():
        assert [
            problem for manifest in manifests for problem in kubernetes_schemas.schema_problems(manifest, version)
        ] == []


def test_runtime_has_the_patched_job_and_container() -> None:
    runtime = yaml.safe_load((COMPONENTS / "runtime" / "training-runtime.yaml").read_text(encoding="utf-8"))
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert (job["name"], container["name"]) == (job_manifests.TRAINER_CONTAINER, job_manifests.TRAINER_CONTAINER)
    assert "torch" in runtime["spec"]["mlPolicy"], "its plugin injects the variables of torchrun"
    if crds.folder():
        assert crds.full_crd_problems(runtime) == []


def test_ray_curation_job_is_valid_restricted_and_documented() -> None:
    job = yaml.safe_load((DOCS / "examples" / "rayjob-curation.yaml").read_text(encoding="utf-8"))
    assert crds.problems(job) == []
    if crds.folder():
        assert crds.full_crd_problems(job) == []
    assert [problem for pod in crds.pods(job) for problem in pod_security.violations(pod)] == []
    page = (HOW_TO / "ray.md").read_text(encoding="utf-8")
    documented = next(line for line in page.splitlines() if line.startswith("ray job submit") and " curate " in line)
    paths = re.compile(r"/\S+|--workdir")  # the paths differ
    assert paths.sub("", job["spec"]["entrypoint"]).split() == paths.sub("", documented.partition(" -- ")[2]).split()


def test_slurm_examples_load_with_a_slurm_launcher(tmp_path: Path) -> None:
    file, launchers = tmp_path / "platform.yaml", []
    for text in BLOCK.findall((HOW_TO / "slurm.md").read_text(encoding="utf-8")):
        file.write_text(text)
        platform = platform_config.load_platform(file)
        assert platform.launcher.kind == "slurm"
        launchers.append((platform.launcher.slurm.rest, [*platform.secrets]))
    assert launchers == [("", []), ("https://slurm.example:6820", ["SLURM_JWT"])]
