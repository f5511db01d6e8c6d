"""Trainings that SIGKILL ends at twenty random points each. Opt-in: `make stress-training`. docs/reference/stress.md has the results."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.artifacts.artifact_folder import Artifact
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.test_resume import RECIPES, build_job
from tests.fine_tuning.training_processes import TrainingResult, TrainingRunner, start_training_runner
from tests.tiny import tiny_model

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("TUNELINE_STRESS_KILLS", "20"))
SEED = int(os.environ.get("TUNELINE_STRESS_SEED") or random.SystemRandom().randrange(2**32))
STEPS = 60


@pytest.fixture(scope="module")
def training_runner() -> Iterator[TrainingRunner]:
    with start_training_runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def model_and_datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Artifact]]:
    folder = tmp_path_factory.mktemp("world")
    datasets = {
        "sft": small_dataset(folder / "sft"),
        **{kind: dataset_of(kind, folder / kind) for kind in ("text", "preference")},
    }
    return tiny_model(folder / "tiny-llama"), datasets


@pytest.mark.parametrize("name", RECIPES)
def test_training_killed_at_random_ends_with_same_weights(
    name: str, model_and_datasets: tuple[Path, dict[str, Artifact]], training_runner: TrainingRunner, tmp_path: Path
) -> None:
    recipe = {**RECIPES[name], "max_steps": STEPS}
    reference = training_runner.run(build_job(model_and_datasets, tmp_path / "whole", recipe))
    killed_job, rng = build_job(model_and_datasets, tmp_path / "often", recipe), random.Random(f"{SEED} {name}")
    kills, result = 0, TrainingResult()
    while kills < KILLS:
        step, delay_seconds = rng.randint(0, STEPS - 1), rng.uniform(0, 0.08)
        result = training_runner.run(killed_job, at=step, delay_seconds=delay_seconds)
        kills += not result.sha256
        if result.sha256:
            (tmp_path / "often").rename(tmp_path / f"ended-{kills}")
            assert result.sha256 == reference.sha256
    result = training_runner.run(killed_job)
    print(
        f"{name}: {kills} kills, seed {SEED}, finally resumed from step {result.resumed_from}, same weights as without kills: {result.sha256[:12]}"
    )
    assert result.sha256 == reference.sha256
