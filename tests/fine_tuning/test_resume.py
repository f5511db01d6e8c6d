"""A training that is killed, asked to stop, or finds its newest checkpoint torn ends with the very weights it would have had."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import Artifact
from components.fine_tuning import checkpoints
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.forks import Ended, Trainings, moments, trainings
from tests.fine_tuning.recipes import ROWS, SHORT
from tests.tiny import tiny_model

STEPS = 24
KILLS = 3
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"adaptation": "full", "learning_rate": 1e-3},
    "lora": {"adaptation": "lora"},
    "p_tuning": {"adaptation": "p_tuning"},
    "lora, packed": {"adaptation": "lora", "packing": True},
    "full, packed text": {"adaptation": "full", "packing": True, "objective": "text", "learning_rate": 1e-3},
    "dpo": {"objective": "dpo"},
}


@pytest.fixture(scope="module")
def trained() -> Iterator[Trainings]:
    with trainings() as found:
        yield found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Artifact]]:
    folder = tmp_path_factory.mktemp("world")
    rows = {"sft": small_dataset(folder / "sft"), **{kind: dataset_of(kind, folder / kind) for kind in ("text", "preference")}}
    return tiny_model(folder / "tiny-llama"), rows


@pytest.fixture(scope="module")
def uninterrupted(
    world: tuple[Path, dict[str, Artifact]], trained: Trainings, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """The digest that a recipe ends with when nothing disturbs it."""

    @cache
    def digest(name: str) -> str:
        return trained.run(job(world, tmp_path_factory.mktemp("whole"), RECIPES[name])).sha256

    return digest


def job(world: tuple[Path, dict[str, Artifact]], place: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Dropout is on, the last batch of an epoch is short, and checkpoints fall at other steps than validations of a kill."""
    tiny, rows = world
    config = {"base_model": str(tiny), **SHORT, "max_steps": STEPS, "checkpoint_every": 3, "batch_size": 10, **recipe}
    dataset = rows[ROWS[config.get("objective", "sft")]]
    return {"dataset": str(dataset.path), "output": str(place / "model"), "state": str(place / "state"), "config": config}


@pytest.mark.parametrize("name", RECIPES)
def test_killed_three_times_it_ends_with_the_same_weights(
    name: str, world: tuple[Path, dict[str, Artifact]], trained: Trainings, uninterrupted: Callable[[str], str], tmp_path: Path
) -> None:
    often = job(world, tmp_path / "often", RECIPES[name])
    for at, later in sorted(moments(STEPS, KILLS, seed=len(name))):
        assert trained.run(often, at=at, later=later) == Ended(), "a killed training says nothing"
    ended = trained.run(often)
    assert ended.sha256 == uninterrupted(name)
    assert ended.resumed_from
    log = [json.loads(line) for line in (tmp_path / "often" / "model" / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "train_loss" in line] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ["full", "lora", "p_tuning", "lora, packed"])
def test_asked_to_stop_it_saves_says_so_and_goes_on_also_past_a_torn_checkpoint(
    name: str, world: tuple[Path, dict[str, Artifact]], trained: Trainings, uninterrupted: Callable[[str], str], tmp_path: Path
) -> None:
    stopped = job(world, tmp_path / "stopped", RECIPES[name])
    asked = trained.run(stopped, at=7, sent=signal.SIGTERM)
    assert asked.error.startswith("75 training was interrupted after step")
    saved = max((tmp_path / "stopped").glob("state/fine_tuning/*/checkpoint-*"), key=checkpoints.step_of)
    assert checkpoints.is_complete(saved)
    assert trained.run(stopped, at=14, sent=signal.SIGTERM).error.startswith("75 ")
    newest = max((tmp_path / "stopped").glob("state/fine_tuning/*/checkpoint-*"), key=checkpoints.step_of)
    (newest / "optimizer.pt").write_bytes(b"torn")
    ended = trained.run(stopped)
    assert ended.sha256 == uninterrupted(name)
    assert ended.resumed_from is not None
    assert ended.resumed_from < checkpoints.step_of(newest), "the torn checkpoint is skipped"


def test_checkpoints_are_bounded_in_number_and_the_best_is_among_them(
    world: tuple[Path, dict[str, Artifact]], trained: Trainings, tmp_path: Path
) -> None:
    told = job(world, tmp_path, {"adaptation": "full", "learning_rate": 0.3, "schedule": "constant_with_warmup"})
    trained.run(told, at=20)
    kept = sorted((tmp_path / "state").glob("fine_tuning/*/checkpoint-*"), key=checkpoints.step_of)
    assert 2 <= len(kept) <= 4, "two, the best, and one that is just being written"
    whole = [checkpoint for checkpoint in kept if checkpoints.is_complete(checkpoint)]
    assert checkpoints.best_of(whole[-1]) in whole
