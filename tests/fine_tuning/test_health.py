"""Training health: non-finite and flat loss, data starvation, full disk, concurrent jobs and damaged logs."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import BusyError, InputError, TrainingError
from components.common.workspace import job_folders
from components.fine_tuning import callbacks, training_health
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.recipes import recipe
from tests.note_recorder import NoteRecorder
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


def tune(dataset: Artifact, tiny: Path, folder: Path, **changes: Any) -> tuple[Artifact, list[str]]:
    reporter = NoteRecorder()
    model = finetune(
        dataset, folder / "model", recipe(tiny, **changes), seed=3, state=folder / "state", reporter=reporter
    )
    return model, reporter.notes


def test_non_finite_loss_error_names_step_learning_rate_and_rows(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    ids = parquet.read_table(dataset.path / "train.parquet", columns=["id"]).column("id").to_pylist()
    with pytest.raises(
        TrainingError, match=r"is (nan|inf) at step \d+, learning rate .*; rows of this step: "
    ) as error:
        tune(dataset, tiny, tmp_path, adaptation="full", learning_rate=1e18, max_grad_norm=1e30, validation_rows=0)
    reported_ids = error.value.message.partition("rows of this step: ")[2].split(", ")
    assert len(reported_ids) == 4
    assert set(reported_ids) <= set(ids)


@pytest.mark.parametrize("packing", [False, True])
def test_row_lookup_matches_the_rows_of_each_step(
    packing: bool, dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's batch has exactly the tokens of the rows that an error at that step would name."""
    from components.fine_tuning import trainers, training

    batches: list[list[int]] = []
    expected_rows: list[list[list[int]]] = []
    build_collator, build_row_lookup = trainers.build_collator, training._build_row_lookup

    def build_recording_collator(*args: Any) -> Any:
        inner_collator = build_collator(*args)
        inner_torch_call = inner_collator.torch_call

        def torch_call(examples: list[dict[str, Any]]) -> Any:
            batch = inner_torch_call(examples)
            batches.append(batch["input_ids"].flatten().tolist())
            return batch

        inner_collator.torch_call = torch_call
        return inner_collator

    def build_recording_lookup(splits: Any, config: Any, seed: int) -> Any:
        rows = build_row_lookup(splits, config, seed)
        tokens = {
            row_id: ids
            for ids, row_ids in zip(splits.train.dataset["input_ids"], splits.train.dataset["ids"], strict=True)
            for row_id in row_ids
        }
        expected_rows.extend([tokens[row_id] for row_id in rows(step)] for step in range(1, 13))
        return rows

    monkeypatch.setattr(trainers, "build_collator", build_recording_collator)
    monkeypatch.setattr(training, "_build_row_lookup", build_recording_lookup)
    settings = {"micro_batch_size": 4, "max_steps": 12, "validation_rows": 0, "packing": packing}
    tune(dataset, tiny, tmp_path, **settings)
    assert len(batches) == 12
    for batch, rows in zip(batches, expected_rows, strict=True):
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, rows))]
        assert sum(map(len, distinct)) == len(batch)
        assert all(_contains(batch, ids) for ids in distinct)


def _contains(sequence: list[int], subsequence: list[int]) -> bool:
    return any(sequence[i : i + len(subsequence)] == subsequence for i in range(len(sequence) - len(subsequence) + 1))


def test_flat_training_loss_is_reported(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    _, notes = tune(dataset, tiny, tmp_path, learning_rate=1e-12, max_steps=15, checkpoint_every=15)
    assert any(note.startswith("the training loss does not fall: ") for note in notes)


def test_falling_training_loss_is_not_reported(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    _, notes = tune(dataset, tiny, tmp_path, adaptation="full", max_steps=15, checkpoint_every=15)
    assert not any("does not fall" in note for note in notes)


@pytest.mark.parametrize(("slope", "is_falling"), [(0.0, False), (0.002, False), (-0.05, True), (0.05, False)])
def test_only_significantly_falling_loss_is_not_a_stall(slope: float, is_falling: bool) -> None:
    draw = random.Random(1)
    losses = [3.0 + slope * step + draw.gauss(0, 0.1) for step in range(60)]
    assert (training_health.describe_stall(losses) is None) == is_falling


def test_stall_check_needs_fifteen_steps() -> None:
    assert training_health.describe_stall([3.0] * 14) is None
    assert training_health.describe_stall([3.0] * 15)


@pytest.mark.parametrize(("wait_share", "is_reported"), [(0.09, False), (0.11, True)])
def test_data_starvation_is_reported_above_ten_percent_wait(wait_share: float, is_reported: bool) -> None:
    assert (training_health.describe_data_starvation(wait_share) is not None) == is_reported


def test_model_never_better_than_before_training_is_reported(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    settings = {"adaptation": "full", "learning_rate": 3.0, "schedule": "constant_with_warmup"}
    _, notes = tune(dataset, tiny, tmp_path, **settings)
    assert any(note.startswith("no checkpoint is better than the model before training") for note in notes)


@pytest.mark.long
def test_training_resumes_from_last_checkpoint_after_disk_full(
    dataset: Artifact, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of one file fails here; tests/pipelines/test_invalid_input.py fills a real disk. Long: trains three times."""
    import torch

    reference, _ = tune(dataset, tiny, tmp_path / "whole")
    save, paths = torch.save, []

    def save_until_disk_is_full(value: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        paths.append(str(path))
        if str(path).endswith("checkpoint-4/optimizer.pt"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save(value, path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", save_until_disk_is_full)
        with pytest.raises(OSError, match="No space left"):
            tune(dataset, tiny, tmp_path / "often")
    model, _ = tune(dataset, tiny, tmp_path / "often")
    assert (model.sha256, model.manifest.summary["resumed_from"]) == (reference.sha256, 2)


def test_concurrent_training_of_same_model_is_rejected(dataset: Artifact, tiny: Path, tmp_path: Path) -> None:
    from components.common.models import model_loading
    from components.fine_tuning import stage

    config = recipe(tiny)
    key = stage.compute_key(
        dataset.sha256,
        model_loading.resolve_base_model(str(tiny)).sha256,
        config,
        3,
        model_loading.describe_arithmetic(config.device),
    )
    job_folder = tmp_path / "state" / "fine_tuning" / key
    job_folder.mkdir(parents=True)
    with job_folders.folder_lock(job_folder), pytest.raises(BusyError, match="has locked"):
        tune(dataset, tiny, tmp_path)
    assert tune(dataset, tiny, tmp_path)[0].sha256


def test_empty_text_training_split_is_rejected(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the dataset's training split is empty"):
        tune(dataset_of("text", tmp_path / "texts", train=0), tiny, tmp_path, objective="text")


def test_truncate_log_drops_repeated_steps_and_torn_lines(tmp_path: Path) -> None:
    log = tmp_path / "training.jsonl"
    log.write_text(
        '{"step": 0, "validation_loss": 1}\n{"step": 1, "train_loss": 2}\n{"step": 2, "train_loss": 2}\n{"step": 3, "tra'
    )
    callbacks.truncate_log(log, 1)
    assert [line["step"] for line in callbacks.read_log(log)] == [0, 1]
    callbacks.truncate_log(log, 0)
    assert [line["step"] for line in callbacks.read_log(log)] == [0]
