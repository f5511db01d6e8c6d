"""The compiled pipeline run step by step, each executor's own command in a process of its own, as its pod would run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.common import artifacts, images
from tests import image_packages, kfp_launcher
from tests.pipelines.command import answer

pytestmark = [pytest.mark.pipeline, pytest.mark.daft, pytest.mark.dvc, pytest.mark.mlflow, pytest.mark.triton]
STEP = ("pipeline", "tracking")  # what every step imports
HELD = {
    images.CURATION: (*STEP, "curation", "versioning"),
    images.TRAINING: (*STEP, "training"),
    images.EVALUATION: (*STEP, "curation", "versioning", "evaluation", "packaging"),
    images.SERVING: (*STEP, "packaging"),
}
BUNDLED = {images.SERVING: ("nvidia-pytriton",), images.EVALUATION: ("llama-index-core",)}  # embedded.txt installs them alone
NAMES = {images.CURATION: "curation", images.TRAINING: "training", images.EVALUATION: "evaluation", images.SERVING: "serving"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What each image sets, its environment made when it is first asked for. The one that Triton's stub runs in is this machine's."""
    folder = tmp_path_factory.mktemp("images")
    tuneline = image_packages.installed(folder / "tuneline")
    (folder / "home").mkdir()

    def of(name: str) -> dict[str, str]:
        made = folder / NAMES[name]
        if not made.exists():
            image_packages.environment(made, tuneline, HELD[name], BUNDLED.get(name, ()))
            if name == images.SERVING:
                (made / "serving").symlink_to(Path(sys.prefix) / "serving")
        return image_packages.variables(made, folder / "home")

    return of


def on_a_cluster(project: Path, pipeline: str = "customization") -> str:
    """The customization of the project compiled for a volume that the pods see where the project lies."""
    platform = {
        "volume": {"mount": str(project), "folder": "pods"},
        "mlflow": {"ui": "https://mlflow.example"},
        "environment": {"TUNELINE_THREADS": os.environ.get("TUNELINE_THREADS", "")},
    }
    (project / "platform.yaml").write_text(yaml.safe_dump(platform))
    paths = {"data_curation.sources": f"[{project / 'raw.jsonl'}]", "fine_tuning.base_model": str(project / "tiny")}
    given = [part for key, path in paths.items() for part in ("--set", f"{key}={path}")]
    named = ["-c", "customization.yaml", "-p", "platform.yaml", "--pipeline", pipeline]
    answer("compile", *named, *given, "-o", f"{pipeline}-pods.yaml", cwd=project)
    return (project / f"{pipeline}-pods.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(
    first: dict[str, Any], project: Path, tmp_path_factory: pytest.TempPathFactory, image: Callable[[str], dict[str, str]]
) -> tuple[dict[str, Any], list[str], Path]:
    """The whole pipeline step by step: its outputs, the steps that ran, and the folder with the files of each step's outputs."""
    root = tmp_path_factory.mktemp("steps")
    return *kfp_launcher.run(on_a_cluster(project), {}, root, image), root


@pytest.mark.long
def test_step_by_step_with_what_its_image_holds_the_pipeline_gives_the_digests_of_a_run(
    first: dict[str, Any], project: Path, whole: tuple[dict[str, Any], list[str], Path]
) -> None:
    outputs, ran, _ = whole
    assert ran == [
        "check-the-platform", "resolve", "data-curation", "data-versioning", "fine-tuning", "evaluation", "triton-packaging",
        "registration", "promotion", "report",
    ]  # fmt: skip
    digests = {kind: artifacts.read(Path(path), kind).sha256 for kind, path in first["artifacts"].items()}
    assert {kind: outputs[kind] for kind in ("dataset", "model", "evaluation")} == {k: v for k, v in digests.items() if k != "repository"}
    assert outputs["verdict"] == first["verdict"] == "accepted"
    stored = {path.parent.name for path in (project / "pods" / "store").glob("*/manifest.json")}
    assert stored == set(digests.values()), "nothing else was made"


@pytest.mark.long
def test_each_step_leads_to_its_run_in_mlflow_and_names_what_it_made(whole: tuple[dict[str, Any], list[str], Path]) -> None:
    outputs, _, root = whole
    for step, made in (("data-curation", "dataset"), ("fine-tuning", "model"), ("evaluation", "evaluation")):
        run, digest = (root / step / "links").read_text(encoding="utf-8").splitlines()
        assert "](https://mlflow.example/#/experiments/" in run
        assert "/runs/" in run
        assert digest == f"- {made}: {outputs[made]}"
    assert "](https://mlflow.example/#/models/" in (root / "registration" / "links").read_text(encoding="utf-8")


def manifests(project: Path) -> set[tuple[str, int]]:
    """The artifacts in the pods' store, each by its manifest's file: one written anew is another, one used again has another time."""
    return {(str(path.parent), path.stat().st_ino) for path in (project / "pods" / "store").glob("*/manifest.json")}


@pytest.mark.long
@pytest.mark.parametrize("stage", ["data_curation", "fine_tuning", "evaluation", "triton_packaging"])
def test_a_stage_alone_makes_what_it_makes_in_the_whole_pipeline(
    whole: tuple[dict[str, Any], list[str], Path], first: dict[str, Any], project: Path, tmp_path: Path, stage: str,
    image: Callable[[str], dict[str, str]],
) -> None:  # fmt: skip
    """Only the evaluation is another one: alone it compares with the model that the whole run brought into service meanwhile."""
    given = {
        "fine_tuning": {"dataset": whole[0]["dataset"]},
        "evaluation": {"model": whole[0]["model"], "dataset": whole[0]["dataset"]},
        "triton_packaging": {"model": whole[0]["model"]},
    }.get(stage, {})
    before = manifests(project)
    outputs, ran = kfp_launcher.run(on_a_cluster(project, stage), given, tmp_path, image)
    versioned = ["data-versioning"] if stage == "data_curation" else []
    assert ran == ["check-the-platform", "plan-one", stage.replace("_", "-"), *versioned]
    new = [Path(name) for name, _ in manifests(project) - before]
    kind = {"data_curation": "dataset", "fine_tuning": "model", "evaluation": "evaluation", "triton_packaging": "repository"}[stage]
    if stage == "evaluation":
        assert [folder.name for folder in new] == [outputs["Output"]]
        assert artifacts.read(project / "pods" / "store" / outputs["Output"], kind).manifest.summary["verdict"] == "unchanged"
        return
    assert outputs["Output"] == artifacts.read(Path(first["artifacts"][kind]), kind).sha256
    assert not new, "it was found in the store, and nothing was written anew"
