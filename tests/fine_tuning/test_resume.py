"""Resume: a training that is killed, interrupted or has a torn checkpoint ends with the weights of an uninterrupted one.

In the `long` tier because the tests start, kill and restart complete trainings.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.fine_tuning import checkpoints
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import REQUIRED_SETTINGS, ROW_KINDS, SHORT_TRAINING
from tests.fine_tuning.training_processes import TrainingResult, TrainingRunner, draw_kill_points, start_training_runner
from tests.model_families import FAMILIES, write_model
from tests.tiny import tiny_model

pytestmark = pytest.mark.long

STEPS = 24
KILLS = 3
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"adaptation": "full", "learning_rate": 1e-3},
    # transformers saves fused experts under other names than those of the model's parameters.
    "full, experts": {"adaptation": "full", "learning_rate": 1e-2, "base_model": "mixtral"},
    "lora": {"adaptation": "lora"},
    "p_tuning": {"adaptation": "p_tuning"},
    "lora, packed": {"adaptation": "lora", "packing": True},
    "full, packed text": {"adaptation": "full", "packing": True, "objective": "text", "learning_rate": 1e-3},
    "dpo": {"objective": "dpo"},
    "orpo": {"objective": "orpo"},
    "grpo": {"objective": "grpo", **REQUIRED_SETTINGS["grpo"]},
    "grpo, continuous batching": {
        "objective": "grpo",
        "grpo": {**REQUIRED_SETTINGS["grpo"]["grpo"], "rollouts": {"engine": "continuous_batching"}},
    },
    "rloo, continuous batching": {
        "objective": "rloo",
        "grpo": {**REQUIRED_SETTINGS["rloo"]["grpo"], "rollouts": {"engine": "continuous_batching"}},
    },
    "rloo": {"objective": "rloo", **REQUIRED_SETTINGS["rloo"]},
    "reward": {"objective": "reward"},
    "distill": {"objective": "distill", **REQUIRED_SETTINGS["distill"]},
    "simpo, full": {"objective": "simpo", "adaptation": "full", "learning_rate": 1e-4},
}


LONG_TIER = ("full", "full, experts", "lora, packed", "dpo")


def tiered(*names: str) -> list[Any]:
    """Return the recipes as cases: those that share their code with another belong to the stress tier."""
    return [pytest.param(name, marks=() if name in LONG_TIER else pytest.mark.stress) for name in names]


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


@pytest.fixture(scope="module")
def expected_digest(
    model_and_datasets: tuple[Path, dict[str, Artifact]],
    training_runner: TrainingRunner,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], str]:
    """Return the digest of a recipe's uninterrupted training."""

    @cache
    def digest(name: str) -> str:
        return training_runner.run(
            build_job(model_and_datasets, tmp_path_factory.mktemp("whole"), RECIPES[name])
        ).sha256

    return digest


def build_job(
    model_and_datasets: tuple[Path, dict[str, Artifact]], folder: Path, recipe: dict[str, Any]
) -> dict[str, Any]:
    """Build a job that uses dropout, has an incomplete last batch per epoch, and saves a checkpoint every three steps."""
    tiny, datasets = model_and_datasets
    config = {
        "base_model": str(tiny),
        **SHORT_TRAINING,
        "max_steps": STEPS,
        "checkpoint_every": 3,
        "batch_size": 10,
        **recipe,
    }
    if config["base_model"] == "mixtral":
        mixtral = next(family for family in FAMILIES if family.model_type == "mixtral")
        config["base_model"] = str(write_model(mixtral, folder / "experts"))
    if config.get("objective") == "distill":
        teacher = tiny_model(folder / "teacher", seed=1)
        config["distillation"] = {**config["distillation"], "teacher": str(teacher)}
    dataset = datasets[ROW_KINDS[config.get("objective", "sft")]]
    return {
        "dataset": str(dataset.path),
        "output": str(folder / "model"),
        "state": str(folder / "state"),
        "config": config,
    }


@pytest.mark.parametrize("name", tiered(*RECIPES))
def test_training_killed_three_times_ends_with_same_weights(
    name: str,
    model_and_datasets: tuple[Path, dict[str, Artifact]],
    training_runner: TrainingRunner,
    expected_digest: Callable[[str], str],
    tmp_path: Path,
) -> None:
    killed_job = build_job(model_and_datasets, tmp_path / "often", RECIPES[name])
    for at, delay_seconds in sorted(draw_kill_points(STEPS, KILLS, seed=len(name))):
        assert training_runner.run(killed_job, at=at, delay_seconds=delay_seconds) == TrainingResult(), (
            "a killed training says nothing"
        )
    result = training_runner.run(killed_job)
    assert result.sha256 == expected_digest(name)
    assert result.resumed_from
    log = [json.loads(line) for line in (tmp_path / "often" / "model" / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "train_loss" in line] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", tiered("full", "lora", "p_tuning", "lora, packed"))
def test_interrupted_training_resumes_past_a_torn_checkpoint(
    name: str,
    model_and_datasets: tuple[Path, dict[str, Artifact]],
    training_runner: TrainingRunner,
    expected_digest: Callable[[str], str],
    tmp_path: Path,
) -> None:
    interrupted_job = build_job(model_and_datasets, tmp_path / "stopped", RECIPES[name])
    interrupted = training_runner.run(interrupted_job, at=7, signal_number=signal.SIGTERM)
    assert interrupted.error.startswith("75 training was interrupted after step")
    checkpoint = max((tmp_path / "stopped").glob("state/fine_tuning/*/checkpoint-*"), key=checkpoints.parse_step)
    assert checkpoints.is_complete(checkpoint)
    assert training_runner.run(interrupted_job, at=14, signal_number=signal.SIGTERM).error.startswith("75 ")
    newest = max((tmp_path / "stopped").glob("state/fine_tuning/*/checkpoint-*"), key=checkpoints.parse_step)
    (newest / "optimizer.pt").write_bytes(b"torn")
    result = training_runner.run(interrupted_job)
    assert result.sha256 == expected_digest(name)
    assert result.resumed_from is not None
    assert result.resumed_from < checkpoints.parse_step(newest), "the torn checkpoint is skipped"


def test_checkpoint_count_is_bounded_and_includes_the_best(
    model_and_datasets: tuple[Path, dict[str, Artifact]], training_runner: TrainingRunner, tmp_path: Path
) -> None:
    job = build_job(
        model_and_datasets, tmp_path, {"adaptation": "full", "learning_rate": 0.3, "schedule": "constant_with_warmup"}
    )
    training_runner.run(job, at=20)
    saved = sorted((tmp_path / "state").glob("fine_tuning/*/checkpoint-*"), key=checkpoints.parse_step)
    assert 2 <= len(saved) <= 4, "two, the best, and one that is just being written"
    complete = [checkpoint for checkpoint in saved if checkpoints.is_complete(checkpoint)]
    assert checkpoints.find_best(complete[-1]) in complete
