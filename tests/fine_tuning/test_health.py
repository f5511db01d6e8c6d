"""What goes wrong in a training is told: a loss that is lost, one that does not move, a device that waits, a disk that is full."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from components.common import jobs
from components.common.artifacts import Artifact
from components.common.errors import BusyError, InputError, TrainingError
from components.common.progress import Silent
from components.fine_tuning import health, watch
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import recipe
from tests.tiny import tiny_model


class Heard(Silent):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def tune(dataset: Artifact, tiny: Path, place: Path, **changes: Any) -> tuple[Artifact, list[str]]:
    heard = Heard()
    made = finetune(dataset, place / "model", recipe(tiny, **changes), seed=3, state=place / "state", reporter=heard)
    return made, heard.notes


def test_a_loss_that_is_lost_names_step_rate_and_the_rows_of_its_batch(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    ids = parquet.read_table(dataset.path / "train.parquet", columns=["id"]).column("id").to_pylist()
    with pytest.raises(TrainingError, match=r"is (nan|inf) at step \d+, learning rate .*; rows of this step: ") as error:
        tune(dataset, tiny, tmp_path, adaptation="full", learning_rate=1e18, max_grad_norm=1e30, validation_rows=0)
    named = error.value.message.partition("rows of this step: ")[2].split(", ")
    assert len(named) == 4
    assert set(named) <= set(ids)


@pytest.mark.parametrize("packing", [False, True])
def test_the_rows_that_are_named_are_those_the_step_was_given(
    packing: bool, dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of every step's batch are those of the rows that would be named."""
    from components.fine_tuning import trainers, training

    seen: list[list[int]] = []
    named: list[list[list[int]]] = []
    collator, rows_of_step = trainers.collator, training._rows_of_step

    def listening(*args: Any) -> Any:
        inner = collator(*args)
        inner_call = inner.torch_call

        def call(examples: list[dict[str, Any]]) -> Any:
            batch = inner_call(examples)
            seen.append(batch["input_ids"].flatten().tolist())
            return batch

        inner.torch_call = call
        return inner

    def asking(splits: Any, config: Any, seed: int) -> Any:
        rows = rows_of_step(splits, config, seed)
        tokens = {one: ids for ids, of in zip(splits.train.dataset["input_ids"], splits.train.dataset["ids"], strict=True) for one in of}
        named.extend([tokens[one] for one in rows(step)] for step in range(1, 13))
        return rows

    monkeypatch.setattr(trainers, "collator", listening)
    monkeypatch.setattr(training, "_rows_of_step", asking)
    settings = {"micro_batch_size": 4, "max_steps": 12, "validation_rows": 0, "packing": packing}
    tune(dataset, tiny, tmp_path, **settings)
    assert len(seen) == 12
    for batch, rows in zip(seen, named, strict=True):
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, rows))]
        assert sum(map(len, distinct)) == len(batch)
        assert all(_contains(batch, ids) for ids in distinct)


def _contains(whole: list[int], part: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def test_a_loss_that_does_not_move_is_said(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    _, notes = tune(dataset, tiny, tmp_path, learning_rate=1e-12, max_steps=15, checkpoint_every=15)
    assert any(note.startswith("the training loss does not move: ") for note in notes)


def test_a_loss_that_falls_is_no_matter(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    _, notes = tune(dataset, tiny, tmp_path, adaptation="full", max_steps=15, checkpoint_every=15)
    assert not any("does not move" in note for note in notes)


@pytest.mark.parametrize(("slope", "moves"), [(0.0, False), (0.002, False), (-0.05, True), (0.05, False)])
def test_a_slope_counts_when_it_is_more_than_chance(slope: float, moves: bool) -> None:
    draw = random.Random(1)
    losses = [3.0 + slope * step + draw.gauss(0, 0.1) for step in range(60)]
    assert (health.standing_still(losses) is None) == moves


def test_too_few_steps_tell_nothing() -> None:
    assert health.standing_still([3.0] * 14) is None
    assert health.standing_still([3.0] * 15)


@pytest.mark.parametrize(("waited", "told"), [(0.09, False), (0.11, True)])
def test_a_device_that_waits_more_than_a_tenth_of_the_time_is_starved(waited: float, told: bool) -> None:
    assert (health.starved(waited) is not None) == told


def test_a_model_that_is_never_better_than_its_base_is_said(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    settings = {"adaptation": "full", "learning_rate": 3.0, "schedule": "constant_with_warmup"}
    _, notes = tune(dataset, tiny, tmp_path, **settings)
    assert any(note.startswith("no checkpoint is better than the base model") for note in notes)


def test_a_disk_that_fills_while_a_checkpoint_is_written_leaves_the_one_before_and_the_next_call_goes_on(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the very file; a disk that is really full is in tests/pipelines/test_wrong_input.py."""
    import torch

    whole, _ = tune(dataset, tiny, tmp_path / "whole")
    save, written = torch.save, []

    def full(value: Any, place: Any, *args: Any, **kwargs: Any) -> Any:
        written.append(str(place))
        if str(place).endswith("checkpoint-4/optimizer.pt"):
            raise OSError(errno.ENOSPC, "No space left on device", str(place))
        return save(value, place, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            tune(dataset, tiny, tmp_path / "often")
    made, _ = tune(dataset, tiny, tmp_path / "often")
    assert (made.sha256, made.manifest.summary["resumed_from"]) == (whole.sha256, 2)


def test_a_second_job_that_would_train_the_same_model_is_refused(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    from components.common import models
    from components.fine_tuning import stage

    config = recipe(tiny)
    key = stage.key_of(dataset.sha256, models.base_model(str(tiny)).sha256, config, 3, models.arithmetic(config.device))
    work = tmp_path / "state" / "fine_tuning" / key
    work.mkdir(parents=True)
    with jobs.held(work), pytest.raises(BusyError, match="works in"):
        tune(dataset, tiny, tmp_path)
    assert tune(dataset, tiny, tmp_path)[0].sha256


def test_an_empty_training_split_of_texts_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the dataset's training split is empty"):
        tune(dataset_of("text", tmp_path / "texts", train=0), tiny, tmp_path, objective="text")


def test_the_lines_of_steps_that_are_done_again_are_dropped_and_torn_ones_too(tmp_path: Path) -> None:
    log = tmp_path / "training.jsonl"
    log.write_text('{"step": 0, "validation_loss": 1}\n{"step": 1, "train_loss": 2}\n{"step": 2, "train_loss": 2}\n{"step": 3, "tra')
    watch.forget_after(log, 1)
    assert [line["step"] for line in watch.lines_of(log)] == [0, 1]
    watch.forget_after(log, 0)
    assert [line["step"] for line in watch.lines_of(log)] == [0]
