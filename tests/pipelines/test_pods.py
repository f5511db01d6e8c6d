"""The compiled pipeline run step by step, with each executor's command in its own process and image environment.

long: it builds the environments of four images and runs whole pipelines.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common.artifacts import artifact_folder
from components.common.runtime import container_images
from tests import image_packages, kfp_launcher
from tests.pipelines.command import ROOT, answer
from tests.tiny import tiny_model

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
STEP_EXTRAS = ("pipeline", "tracking")  # imported by every step
EXTRAS = {
    container_images.CURATION_IMAGE: (*STEP_EXTRAS, "curation", "documents", "versioning"),
    container_images.TRAINING_IMAGE: (*STEP_EXTRAS, "training"),
    container_images.EVALUATION_IMAGE: (
        *STEP_EXTRAS,
        "notifications",
        "curation",
        "documents",
        "versioning",
        "evaluation",
        "packaging",
    ),
    container_images.SERVING_IMAGE: (*STEP_EXTRAS, "packaging"),
}
BUNDLED_PACKAGES = {
    container_images.SERVING_IMAGE: ("nvidia-pytriton",),
    container_images.EVALUATION_IMAGE: ("llama-index-core",),
}  # only embedded.txt installs them
NAMES = {
    container_images.CURATION_IMAGE: "curation",
    container_images.TRAINING_IMAGE: "training",
    container_images.EVALUATION_IMAGE: "evaluation",
    container_images.SERVING_IMAGE: "serving",
}


@pytest.fixture(scope="module")
def image_variables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The environment variables of each image; its environment is built on first use. Triton's stub uses this machine's environment."""
    folder = tmp_path_factory.mktemp("images")
    tuneline = image_packages.copy_packages(folder / "tuneline")
    (folder / "home").mkdir()

    def get_variables(name: str) -> dict[str, str]:
        environment = folder / NAMES[name]
        if not environment.exists():
            image_packages.create_environment(environment, tuneline, EXTRAS[name], BUNDLED_PACKAGES.get(name, ()))
            if name == container_images.SERVING_IMAGE:
                (environment / "serving").symlink_to(Path(sys.prefix) / "serving")
        return image_packages.image_variables(environment, folder / "home")

    return get_variables


def write_platform(project: Path) -> None:
    """Write the platform.yaml of a volume that pods mount at the project folder."""
    platform = {
        "volume": {"mount": str(project), "folder": "pods"},
        "mlflow": {"ui": "https://mlflow.example"},
        "environment": {"TUNELINE_THREADS": os.environ.get("TUNELINE_THREADS", "")},
    }
    (project / "platform.yaml").write_text(yaml.safe_dump(platform))


def compile_for_pods(project: Path, pipeline: str = "customization") -> str:
    """Compile the project's customization for `write_platform`."""
    write_platform(project)
    return compile_project(project, pipeline)


def compile_project(project: Path, pipeline: str = "customization") -> str:
    """Compile the customization of a project for its platform.yaml, with paths of this machine."""
    paths = {"data_curation.sources": f"[{project / 'raw.jsonl'}]", "fine_tuning.base_model": str(project / "tiny")}
    overrides = [part for key, path in paths.items() for part in ("--set", f"{key}={path}")]
    options = ["-c", "customization.yaml", "-p", "platform.yaml", "--pipeline", pipeline]
    answer("compile", *options, *overrides, "-o", f"{pipeline}-pods.yaml", cwd=project)
    return (project / f"{pipeline}-pods.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pipeline_run(
    first: dict[str, Any],
    project: Path,
    tmp_path_factory: pytest.TempPathFactory,
    image_variables: Callable[[str], dict[str, str]],
) -> tuple[dict[str, Any], list[str], Path]:
    """A run of the whole pipeline: its outputs, the steps that ran, and the folder with the output files of each step."""
    root = tmp_path_factory.mktemp("steps")
    return *kfp_launcher.run(
        compile_for_pods(project), {}, root, partial(kfp_launcher.run_process, image_variables)
    ), root


@pytest.mark.stress
def test_steps_in_their_image_environments_give_the_digests_of_a_run(
    first: dict[str, Any], project: Path, pipeline_run: tuple[dict[str, Any], list[str], Path]
) -> None:
    outputs, ran, _ = pipeline_run
    assert ran == [
        "check-the-platform", "resolve", "data-curation", "data-versioning", "fine-tuning", "evaluation", "triton-packaging",
        "registration", "promotion", "report", "finish",
    ]  # fmt: skip
    digests = {kind: artifact_folder.read(Path(path), kind).sha256 for kind, path in first["artifacts"].items()}
    assert {kind: outputs[kind] for kind in ("dataset", "model", "evaluation")} == {
        k: v for k, v in digests.items() if k != "repository"
    }
    assert outputs["verdict"] == first["verdict"] == "accepted"
    stored = {path.parent.name for path in (project / "pods" / "store").glob("*/manifest.json")}
    assert stored == set(digests.values()), "no other artifact was built"


@pytest.mark.stress
def test_each_step_links_to_its_mlflow_run_and_artifact(
    pipeline_run: tuple[dict[str, Any], list[str], Path],
) -> None:
    outputs, _, root = pipeline_run
    for step, kind in (("data-curation", "dataset"), ("fine-tuning", "model"), ("evaluation", "evaluation")):
        run, digest, cost = (root / step / "links").read_text(encoding="utf-8").splitlines()
        assert "](https://mlflow.example/#/experiments/" in run
        assert "/runs/" in run
        assert digest == f"- {kind}: {outputs[kind]}"
        assert cost.startswith("- cost: ")
    assert "](https://mlflow.example/#/models/" in (root / "registration" / "links").read_text(encoding="utf-8")


@pytest.mark.stress
def test_kubeflow_records_the_artifacts_with_their_digests(
    pipeline_run: tuple[dict[str, Any], list[str], Path], first: dict[str, Any]
) -> None:
    """Kubeflow draws its lineage from the inputs and outputs of the tasks."""
    outputs, _, root = pipeline_run
    written = {
        path.parent.name: json.loads(path.read_text()).get("artifacts") for path in root.glob("*/output_metadata.json")
    }
    found = {
        name: written[step][name]["artifacts"][0]["metadata"]
        for step, name in (
            ("data-curation", "curated_dataset"),
            ("fine-tuning", "tuned_model"),
            ("triton-packaging", "triton_package"),
        )
    }
    assert found["curated_dataset"]["content_sha256"] == outputs["dataset"]
    assert found["tuned_model"]["content_sha256"] == outputs["model"]
    assert found["triton_package"]["content_sha256"] == Path(first["artifacts"]["repository"]).name
    assert found["tuned_model"]["store_uri"].endswith(f"/pods/store/{outputs['model']}")
    page = (root / "finish" / "page").read_text(encoding="utf-8")
    assert "version 1: accepted" in page
    assert "Package for Triton and prove" in page


@pytest.mark.stress
def test_failed_run_ends_with_a_page_about_its_error(
    project: Path, tmp_path: Path, image_variables: Callable[[str], dict[str, str]]
) -> None:
    compiled = compile_for_pods(project)
    source = project / "raw.jsonl"
    source.rename(tmp_path / "moved.jsonl")
    try:
        with pytest.raises(AssertionError, match="resolve ended with 2"):
            kfp_launcher.run(compiled, {}, tmp_path / "steps", partial(kfp_launcher.run_process, image_variables))
    finally:
        (tmp_path / "moved.jsonl").rename(source)
    page = (tmp_path / "steps" / "finish" / "page").read_text(encoding="utf-8")
    assert "Plan the run: failed" in page
    assert "raw.jsonl" in page


def list_manifests(project: Path) -> set[tuple[str, int]]:
    """Return the artifacts of the pods' store with the inode of their manifest, which changes when an artifact is rebuilt."""
    return {(str(path.parent), path.stat().st_ino) for path in (project / "pods" / "store").glob("*/manifest.json")}


@pytest.mark.stress
@pytest.mark.parametrize("stage", ["data_curation", "fine_tuning", "evaluation", "triton_packaging"])
def test_single_stage_gives_the_artifact_of_the_whole_pipeline(
    pipeline_run: tuple[dict[str, Any], list[str], Path], first: dict[str, Any], project: Path, tmp_path: Path, stage: str,
    image_variables: Callable[[str], dict[str, str]],
) -> None:  # fmt: skip
    """Only the evaluation differs: it now compares with the model that the whole run promoted."""
    parameters = {
        "fine_tuning": {"dataset": pipeline_run[0]["dataset"]},
        "evaluation": {"model": pipeline_run[0]["model"], "dataset": pipeline_run[0]["dataset"]},
        "triton_packaging": {"model": pipeline_run[0]["model"]},
    }.get(stage, {})
    before = list_manifests(project)
    run_container = partial(kfp_launcher.run_process, image_variables)
    outputs, ran = kfp_launcher.run(compile_for_pods(project, stage), parameters, tmp_path, run_container)
    versioning_steps = ["data-versioning"] if stage == "data_curation" else []
    assert ran == ["check-the-platform", "plan-one", stage.replace("_", "-"), *versioning_steps]
    new = [Path(name) for name, _ in list_manifests(project) - before]
    kind = {
        "data_curation": "dataset",
        "fine_tuning": "model",
        "evaluation": "evaluation",
        "triton_packaging": "repository",
    }[stage]
    if stage == "evaluation":
        assert [folder.name for folder in new] == [outputs["Output"]]
        assert (
            artifact_folder.read(project / "pods" / "store" / outputs["Output"], kind).manifest.summary["verdict"]
            == "unchanged"
        )
        return
    assert outputs["Output"] == artifact_folder.read(Path(first["artifacts"][kind]), kind).sha256
    assert not new, "the stored artifact is reused"


STAGES = ("resolve", "data-curation", "data-versioning", "fine-tuning", "evaluation")


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_chain_of_rlhf_gives_the_artifacts_of_a_local_chain(
    tmp_path: Path, image_variables: Callable[[str], dict[str, str]]
) -> None:
    """The models learn little in 20 steps; the gate decides about them as it does locally."""
    shutil.copytree(ROOT / "examples" / "rlhf", tmp_path / "rlhf")
    configs = [tmp_path / "rlhf" / f"{name}.yaml" for name in ("sft", "reward", "rlhf")]
    for config in configs:
        config.write_text(config.read_text().replace("sources: [", f"sources: [{tmp_path}/rlhf/"))
    write_platform(tmp_path)
    base = tiny_model(tmp_path / "tiny")
    settings = {"max_steps": 20, "learning_rate": 5e-3, "validation_rows": 8, "base_model": base}
    options = [part for path in configs for part in ("-c", path)]
    options += [part for key, value in settings.items() for part in ("--set", f"fine_tuning.{key}={value}")]
    options += ["--set", "triton_packaging.prove=false"]

    def run_pods(name: str) -> list[str]:
        answer("compile", *options, "-p", "platform.yaml", "-o", name, cwd=tmp_path)
        compiled = (tmp_path / name).read_text(encoding="utf-8")
        run_container = partial(kfp_launcher.run_process, image_variables)
        return kfp_launcher.run(compiled, {}, tmp_path / "steps" / name, run_container)[1]

    ran = run_pods("chain.yaml")
    sft, reward, rlhf = answer("run", *options, "--workdir", "wd", cwd=tmp_path, timeout_seconds=1800)["chain"]
    packaged = ["triton-packaging", "registration", "promotion", "report"]
    expected = [f"sft-{step}" for step in (*STAGES, *packaged)]
    expected += [f"reward-{step}" for step in (*STAGES, "registration", "report")]
    kept = packaged if rlhf["verdict"] == "accepted" else ["registration-2", "report"]
    expected += [f"rlhf-{step}" for step in (*STAGES, *kept)]
    assert ran == ["check-the-platform", "check-chain", *expected, "finish"]
    assert [run["verdict"] for run in (sft, reward)] == ["accepted", "accepted"]
    stores = [tmp_path / folder / "store" for folder in ("pods", "wd")]
    pods, local = ({path.parent.name for path in store.glob("*/manifest.json")} for store in stores)
    made = {Path(path).name for run in (sft, reward, rlhf) for path in run["artifacts"].values() if path}
    assert made < pods == local, "the stores also have the base model into which the adapter of sft is merged"
    values = yaml.safe_load(configs[0].read_text())
    values["evaluation"]["gate"] = [{"metric": "held_out.loss", "min_gain": 100}]
    configs[0].write_text(yaml.safe_dump(values))
    ran = run_pods("refused.yaml")
    assert ran[2:] == [*(f"sft-{step}" for step in (*STAGES, "registration-2", "report")), "finish"]
