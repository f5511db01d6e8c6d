"""DeepSpeed's ZeRO-3 on two processes of this machine: parameters are really held in parts, and the losses are those of one process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common import models, process
from components.common.artifacts import Artifact
from components.common.progress import Silent
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.fine_tuning.forks import Trainings, trainings
from tests.fine_tuning.recipes import recipe
from tests.tiny import tiny_model

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(1200)]  # DeepSpeed compiles its communication once
TOLERANCE = 1e-4  # of losses; sums are taken in another order


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    folder = tmp_path_factory.mktemp("world")
    return tiny_model(folder / "tiny-llama"), small_dataset(folder / "dataset")


@pytest.fixture(scope="module")
def trained() -> Iterator[Trainings]:
    with trainings() as found:
        yield found


def tune(world: tuple[Path, Artifact], place: Path, **changes: Any) -> Artifact:
    tiny, dataset = world
    return finetune(dataset, place / "model", recipe(tiny, **changes), seed=3, state=place / "state", reporter=Silent())


@pytest.mark.parametrize(
    "settings", [{"adaptation": "full"}, {"adaptation": "lora", "lora": {"dropout": 0.0}}, {"adaptation": "full", "packing": True}]
)
def test_parameters_are_held_in_parts_and_the_losses_are_those_of_one_process(
    settings: dict[str, Any], world: tuple[Path, Artifact], tmp_path: Path
) -> None:
    apart = tune(world, tmp_path / "one", **settings, micro_batch_size=4).manifest.summary
    made = tune(world, tmp_path / "two", **settings, processes=2, strategy="zero3")
    shared = made.manifest.summary
    (proof,) = [reason for reason in shared["choices"] if reason.startswith("strategy zero3 is in force")]
    held, of = (int(word) for word in proof.split(": ")[1].split() if word.isdigit() and int(word) > 2)
    assert held == of, "every parameter is held in parts"
    for loss in ("train_loss", "validation_loss"):
        assert shared[loss] == pytest.approx(apart[loss], abs=TOLERANCE)
    weights = models.load(models.open_model(made.path))
    assert sum(p.numel() for p in weights.parameters()) == shared["parameters"]["all"]


def test_the_best_checkpoint_is_the_result_when_it_is_not_the_last(world: tuple[Path, Artifact], tmp_path: Path) -> None:
    settings = {"adaptation": "full", "learning_rate": 1.0, "schedule": "constant_with_warmup"}
    summary = tune(world, tmp_path / "whole", **settings, processes=2, strategy="zero3").manifest.summary
    alone = tune(world, tmp_path / "one", **settings, micro_batch_size=4).manifest.summary
    assert summary["best_step"] == alone["best_step"] == 2 < summary["steps"]
    assert summary["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-2)


def test_killed_and_started_again_it_ends_with_the_same_weights(world: tuple[Path, Artifact], trained: Trainings, tmp_path: Path) -> None:
    tiny, dataset = world
    config = recipe(tiny, adaptation="full", processes=2, strategy="zero3").model_dump()

    def job(name: str) -> dict[str, Any]:
        return {
            "dataset": str(dataset.path),
            "output": str(tmp_path / name / "model"),
            "state": str(tmp_path / name / "state"),
            "config": config,
        }

    whole = trained.run(job("whole"))
    assert not trained.run(job("often"), at=3).sha256
    ended = trained.run(job("often"))
    assert ended.sha256 == whole.sha256 != ""
    assert ended.resumed_from in (2, 4)


def test_deepspeed_says_nothing_on_standard_output_where_it_is_only_installed(world: tuple[Path, Artifact], tmp_path: Path) -> None:
    tiny, dataset = world
    sets = ["--set", f"fine_tuning.base_model={tiny}", "--set", "fine_tuning.max_steps=1"]
    command = process.module_command("pipelines.cli", "finetune", str(dataset.path), "-o", str(tmp_path / "model"), "--json", *sets)
    done = subprocess.run(command, env=process.python_environment(), stdout=subprocess.PIPE, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["steps"] == 1
