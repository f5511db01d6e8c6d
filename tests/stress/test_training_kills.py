"""Trainings killed with SIGKILL at twenty random moments each. Opt-in: `make stress-training`. docs/stress.md has what it found."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.common.artifacts import Artifact
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.forks import Ended, Trainings, trainings
from tests.fine_tuning.test_resume import RECIPES, job
from tests.tiny import tiny_model

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("TUNELINE_STRESS_KILLS", "20"))
SEED = int(os.environ.get("TUNELINE_STRESS_SEED") or random.SystemRandom().randrange(2**32))
STEPS = 60


@pytest.fixture(scope="module")
def trained() -> Iterator[Trainings]:
    with trainings() as found:
        yield found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Artifact]]:
    folder = tmp_path_factory.mktemp("world")
    rows = {"sft": small_dataset(folder / "sft"), **{kind: dataset_of(kind, folder / kind) for kind in ("text", "preference")}}
    return tiny_model(folder / "tiny-llama"), rows


@pytest.mark.parametrize("name", RECIPES)
def test_killed_at_random_moments_it_ends_with_the_same_weights(
    name: str, world: tuple[Path, dict[str, Artifact]], trained: Trainings, tmp_path: Path
) -> None:
    recipe = {**RECIPES[name], "max_steps": STEPS}
    whole = trained.run(job(world, tmp_path / "whole", recipe))
    often, draw = job(world, tmp_path / "often", recipe), random.Random(f"{SEED} {name}")
    kills, ended = 0, Ended()
    while kills < KILLS:
        step, later = draw.randint(0, STEPS - 1), draw.uniform(0, 0.08)
        ended = trained.run(often, at=step, later=later)
        kills += not ended.sha256
        if ended.sha256:
            (tmp_path / "often").rename(tmp_path / f"ended-{kills}")
            assert ended.sha256 == whole.sha256
    ended = trained.run(often)
    print(
        f"{name}: {kills} kills, seed {SEED}, went on from step {ended.resumed_from} at last, weights as without kills: {ended.sha256[:12]}"
    )
    assert ended.sha256 == whole.sha256
