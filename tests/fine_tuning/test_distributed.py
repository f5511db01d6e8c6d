"""Training with two CPU processes, data-parallel and sharded by FSDP2: results, resume after interruption, and errors.

The module is in the `long` tier because it starts multi-process jobs. tests/engines/test_zero3.py has the tests of ZeRO-3.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from components.common import launch
from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.launch import Command, Job
from components.common.launch.torchrun import TorchrunLauncher
from components.common.models import adapter_merging, model_loading
from components.common.runtime.errors import EXIT_INTERRUPTED, ConfigurationError, TrainingError, TunelineError
from components.common.runtime.reporters import Reporter, SilentReporter
from components.fine_tuning import checkpoints, sharding
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests.datasets import dataset_of, small_dataset
from tests.fine_tuning.loading_memory import measure_loading
from tests.fine_tuning.recipes import REQUIRED_SETTINGS
from tests.model_families import FAMILIES, write_model
from tests.tiny import tiny_model

pytestmark = pytest.mark.long

MAX_LOSS_DIFFERENCE = 2e-6  # nats per token; 0.0 was measured in every case
MAX_SHARDED_LOSS_DIFFERENCE = 1e-4  # nats per token; sums are in another order
MAX_RAGGED_LOSS_DIFFERENCE = 0.8  # nats per token; 0.45 was measured, see the test
NO_DROPOUT = {"lora": {"dropout": 0.0}}  # each process draws its own masks
LONG_TRAINING = {"max_steps": 60, "checkpoint_every": 10, "schedule": "constant_with_warmup", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return dataset_of("preference", tmp_path_factory.mktemp("data") / "pairs")


@dataclass
class WorkerPool:
    """Two reusable worker processes that replace launch.run, which would start two new ones for each training."""

    job: Job
    folder: Path
    completed_jobs: int = 0

    def run(
        self, launcher: TorchrunLauncher, command: Command, output_folder: Path, reporter: Reporter
    ) -> dict[str, Any]:
        """Run a training job like launch.run."""
        assert (command.module, command.processes) == ("components.fine_tuning.worker", 2)
        job_folder = self.folder / str(self.completed_jobs)
        job_folder.mkdir()
        (job_folder / "draft").write_text(command.arguments[0])
        (job_folder / "draft").rename(job_folder / "go")
        wait_until(lambda: len(self.exit_codes()) == 2 or self.job.poll().state != "running", 120)
        self.completed_jobs += 1
        return launch._collect_outcome(self.job, self.job.poll(), output_folder)

    def exit_codes(self) -> list[int]:
        """Return the exit codes of the last training, by rank."""
        job_folders = [self.folder / str(number) for number in (self.completed_jobs, self.completed_jobs - 1)]
        return next(
            (
                [int(path.read_text() or -1) for path in sorted(job_folder.glob("code.*"))]
                for job_folder in job_folders
                if job_folder.exists()
            ),
            [],
        )


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    folder = tmp_path_factory.mktemp("workers")
    job = TorchrunLauncher().start(Command("tests.fine_tuning.worker_pool", [str(folder)], 2), folder)
    try:
        yield WorkerPool(job, folder)
        (folder / "end").touch()
        wait_until(lambda: job.poll().state != "running", 30)
    finally:
        job.cancel()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def recipe(tiny: Path, **changes: Any) -> FineTuningConfig:
    values = {
        "base_model": str(tiny),
        "max_steps": 6,
        "batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint_every": 3,
        "max_length": 96,
    }
    return FineTuningConfig.model_validate(
        {**values, "learning_rate": 5e-3, "warmup_steps": 1, "device": "cpu", **changes}
    )


def tune(dataset: Artifact, tiny: Path, output: Path, reporter: Reporter | None = None, **changes: Any) -> Artifact:
    config = recipe(tiny, **changes)
    return finetune(
        dataset, output, config, seed=3, state=output.parent / "state", reporter=reporter or SilentReporter()
    )


def read_metrics(model: Artifact, *names: str) -> dict[tuple[int, str], float]:
    """Return the logged values by step and name."""
    lines = [json.loads(line) for line in (model.path / "training.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


def max_difference(first: dict[tuple[int, str], float], second: dict[tuple[int, str], float]) -> float:
    assert first.keys() == second.keys()
    return max(abs(first[key] - second[key]) for key in first)


LOSSES = ("train_loss", "validation_loss")


@pytest.mark.parametrize(
    "changes",
    [
        {"adaptation": "full", "learning_rate": 1e-3},
        NO_DROPOUT,
        {**NO_DROPOUT, "packing": True},
        {"validation_rows": 0, **NO_DROPOUT},
        {"mixing_weights": {"*": 1.0}, "mixing_caps": {"*": 8}, **NO_DROPOUT},
        {"objective": "orpo", **NO_DROPOUT},
        {"objective": "simpo", "adaptation": "full", "learning_rate": 1e-4},
    ],
    ids=["full", "lora", "packed", "no validation", "mixed", "orpo", "simpo"],
)
def test_two_processes_match_one_process(
    changes: dict[str, Any],
    tiny: Path,
    dataset: Artifact,
    pairs: Artifact,
    tmp_path: Path,
    worker_pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of examples is a multiple of the batch size, so every batch is complete."""
    monkeypatch.setattr(launch, "run", worker_pool.run)
    rows = pairs if "objective" in changes else dataset
    reference, distributed = (
        tune(rows, tiny, tmp_path / str(processes) / "model", processes=processes, **changes) for processes in (1, 2)
    )
    assert distributed.manifest.summary["examples"] % 4 == 0
    assert (reference.manifest.summary["processes"], distributed.manifest.summary["processes"]) == (1, 2)
    assert worker_pool.exit_codes() == [0, 0]
    losses = read_metrics(distributed, *LOSSES)
    assert losses[6, "train_loss"] != losses[1, "train_loss"]
    assert max_difference(read_metrics(reference, *LOSSES), losses) <= MAX_LOSS_DIFFERENCE
    assert max_difference(read_metrics(reference, "tokens"), read_metrics(distributed, "tokens")) == 0
    norms = read_metrics(reference, "gradient_norm")
    assert max_difference(norms, read_metrics(distributed, "gradient_norm")) <= 1e-5 * max(norms.values())


def test_two_processes_nearly_match_one_with_incomplete_last_batch(
    tiny: Path, tmp_path: Path, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch of 26 rows has two: the processes repeat the first rows, so that both have the same number."""
    monkeypatch.setattr(launch, "run", worker_pool.run)
    dataset = small_dataset(tmp_path / "ragged", train=26)
    reference, distributed = (
        tune(dataset, tiny, tmp_path / str(processes) / "model", processes=processes, max_steps=14, **NO_DROPOUT)
        for processes in (1, 2)
    )
    is_first_epoch, is_later = (lambda step: step < 7), (lambda step: step >= 7)
    metrics = [read_metrics(model, *LOSSES) for model in (reference, distributed)]
    complete, incomplete = (
        [{key: value for key, value in values.items() if is_selected(key[0])} for values in metrics]
        for is_selected in (is_first_epoch, is_later)
    )
    assert max_difference(*complete) <= MAX_LOSS_DIFFERENCE
    assert 0 < max_difference(*incomplete) <= MAX_RAGGED_LOSS_DIFFERENCE


def test_two_processes_generate_and_validate_together(
    tiny: Path, dataset: Artifact, tmp_path: Path, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled answers differ from those of one process; the greedy answers before the training are equal. Of three validation
    rows, the second process has one or none."""
    monkeypatch.setattr(launch, "run", worker_pool.run)
    changes = {
        "objective": "grpo",
        **REQUIRED_SETTINGS["grpo"],
        "micro_batch_size": 1,
        "validation_rows": 3,
        **NO_DROPOUT,
    }
    reference, *distributed = (
        tune(dataset, tiny, tmp_path / name / "model", processes=processes, **changes)
        for name, processes in (("one", 1), ("two", 2), ("again", 2))
    )
    assert worker_pool.exit_codes() == [0, 0]
    names = ("validation_reward", "validation_answer_tokens")
    rewards, expected = read_metrics(distributed[0], *names), read_metrics(reference, *names)
    assert [rewards[0, name] for name in names] == pytest.approx([expected[0, name] for name in names])
    assert rewards.keys() == expected.keys()
    assert distributed[0].manifest.summary["rows_seen"] == reference.manifest.summary["rows_seen"] == 24
    assert distributed[0].sha256 == distributed[1].sha256


@pytest.mark.parametrize("objective", ["reward", "distill"])
def test_two_processes_start_with_the_validation_loss_of_one(
    objective: str,
    tiny: Path,
    dataset: Artifact,
    tmp_path: Path,
    worker_pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training rows of a reward model are equal, those of a distillation are sampled by each process."""
    monkeypatch.setattr(launch, "run", worker_pool.run)
    changes: dict[str, Any] = {"objective": objective, "micro_batch_size": 1, "validation_rows": 4}
    rows = dataset
    if objective == "reward":
        rows = dataset_of("preference", tmp_path / "pairs")
    else:
        teacher = tiny_model(tmp_path / "teacher", seed=1)
        changes["distillation"] = {"teacher": str(teacher), "max_answer_tokens": 8}
    reference, *distributed = (
        tune(rows, tiny, tmp_path / name / "model", processes=processes, **changes)
        for name, processes in (("one", 1), ("two", 2), ("again", 2))
    )
    assert worker_pool.exit_codes() == [0, 0]
    losses, expected = read_metrics(distributed[0], *LOSSES), read_metrics(reference, *LOSSES)
    assert losses[0, "validation_loss"] == pytest.approx(expected[0, "validation_loss"], abs=0.05)
    if objective == "reward":
        assert max_difference(losses, expected) <= MAX_LOSS_DIFFERENCE
    assert distributed[0].sha256 == distributed[1].sha256


class Recorder(SilentReporter):
    """Records steps and notes, and runs an action at a step."""

    def __init__(self, at_step: int = -1, action: Callable[[], None] = lambda: None) -> None:
        self.steps: list[int] = []
        self.first_step: int | None = None
        self.notes: list[str] = []
        self._at_step, self._action = at_step, action

    def progress(self, done: int, total: int | None, unit: str) -> None:
        if unit == "steps" and self.first_step is None:
            self.first_step = done

    def metrics(self, values: Any, step: int) -> None:
        if "train_loss" in values:
            self.steps.append(step)
            if step == self._at_step:
                self._action()

    def note(self, text: str) -> None:
        self.notes.append(text)


def find_workers() -> list[psutil.Process]:
    """Return the worker processes of the running training in rank order."""
    workers: dict[int, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a child that has just ended
            if "components.fine_tuning.worker" in process.cmdline() and "RANK" in process.environ():
                workers[int(process.environ()["RANK"])] = process
    return [workers[rank] for rank in sorted(workers)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="ddp"),
        pytest.param({"adaptation": "full", "strategy": "fsdp2"}, marks=pytest.mark.stress, id="fsdp2"),
    ],
)
def test_killed_and_interrupted_job_resumes_to_same_weights(
    changes: dict[str, Any],
    tiny: Path,
    dataset: Artifact,
    tmp_path: Path,
    worker_pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {**LONG_TRAINING, **changes, "processes": 2}
    with monkeypatch.context() as patched:
        patched.setattr(launch, "run", worker_pool.run)
        reference = tune(dataset, tiny, tmp_path / "whole" / "model", **settings)
    output = tmp_path / "again" / "model"
    workers: list[psutil.Process] = []

    def kill_worker() -> None:
        workers.extend(find_workers())
        workers[1].kill()

    killed_reporter = Recorder(at_step=15, action=kill_worker)
    with pytest.raises(TunelineError) as error:
        tune(dataset, tiny, output, killed_reporter, **settings)
    assert len(workers) == 2
    psutil.wait_procs(workers, timeout=10)
    assert not [process for process in workers if process.is_running()], "who was not killed ends too"
    assert not (output / artifact_folder.MANIFEST_FILENAME).exists()

    interrupted_reporter = Recorder(at_step=30, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(TunelineError, match=r"interrupted after step \d+ and was saved") as interrupted:
        tune(dataset, tiny, output, interrupted_reporter, **settings)
    assert (interrupted.value.kind, interrupted.value.exit_code) == ("interrupted", EXIT_INTERRUPTED)
    assert interrupted_reporter.first_step == 10, "the killed one was saved after step 10"
    newest = max(output.parent.glob("state/fine_tuning/*/checkpoint-*"), key=checkpoints.parse_step)
    assert checkpoints.is_complete(newest)
    assert f"after step {checkpoints.parse_step(newest)} and" in interrupted.value.message

    model = tune(dataset, tiny, output, **settings)
    assert model.manifest.summary["resumed_from"] == checkpoints.parse_step(newest)
    assert max_difference(read_metrics(model, *LOSSES), read_metrics(reference, *LOSSES)) == 0
    assert model.sha256 == reference.sha256
    assert list(dict.fromkeys(killed_reporter.steps + interrupted_reporter.steps)) == sorted(
        {*killed_reporter.steps, *interrupted_reporter.steps}
    )
    # checked last, so that a failure here does not hide the other results
    assert error.value.kind != "unexpected", f"a killed process is no fault of tuneline: {error.value.message}"
    assert "same command again" in error.value.hint


def test_non_finite_loss_stops_both_processes_with_error(
    tiny: Path, dataset: Artifact, tmp_path: Path, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", worker_pool.run)
    diverging = {"adaptation": "full", "learning_rate": 1e18, "max_steps": 8, "max_grad_norm": 1e30}
    with pytest.raises(TunelineError, match=r"is (nan|inf) at step \d+, learning rate") as error:
        tune(dataset, tiny, tmp_path / "model", processes=2, **diverging)
    assert (error.value.kind, error.value.exit_code) == (TrainingError.kind, TrainingError.exit_code)
    assert worker_pool.exit_codes() == [TrainingError.exit_code] * 2
    assert not (tmp_path / "model" / artifact_folder.MANIFEST_FILENAME).exists()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sft", {"adaptation": "full", "learning_rate": 1e-3, "activation_checkpointing": "on"}),
        ("sft", {**NO_DROPOUT, "packing": True}),
        ("preference", {"adaptation": "full", "objective": "dpo"}),
        ("preference", {**NO_DROPOUT, "objective": "dpo"}),
        ("unpaired", {"adaptation": "full", "objective": "kto", "learning_rate": 1e-4}),
        ("preference", {"adaptation": "full", "objective": "simpo", "learning_rate": 1e-4}),
        ("preference", {**NO_DROPOUT, "objective": "orpo", "micro_batch_size": 2}),
    ],
    ids=["full", "packed lora", "full dpo", "dpo lora", "full kto", "full simpo", "orpo lora"],
)
def test_sharded_training_matches_one_process(
    kind: str,
    changes: dict[str, Any],
    tiny: Path,
    tmp_path: Path,
    worker_pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The validation loss of step 0 is that of the model as it was loaded, in shards or whole.

    Both take 4 rows at once, over which KTO's reference term is the mean; for ORPO, whose likelihood is the mean over the
    tokens of a micro-batch, both have micro-batches of 2 rows.
    """
    monkeypatch.setattr(launch, "run", worker_pool.run)
    rows = small_dataset(tmp_path / "rows") if kind == "sft" else dataset_of(kind, tmp_path / "rows")
    reference = tune(rows, tiny, tmp_path / "one" / "model", **{"micro_batch_size": 4, **changes})
    sharded = tune(rows, tiny, tmp_path / "two" / "model", processes=2, strategy="fsdp2", **changes)
    (proof,) = [reason for reason in sharded.manifest.summary["choices"] if "strategy fsdp2 is in effect" in reason]
    assert "20 of " in proof, "every weight of the base model is sharded"
    metrics = read_metrics(sharded, *LOSSES)
    assert (0, "validation_loss") in metrics
    assert max_difference(read_metrics(reference, *LOSSES), metrics) <= MAX_SHARDED_LOSS_DIFFERENCE
    norms = read_metrics(reference, "gradient_norm")
    assert max_difference(norms, read_metrics(sharded, "gradient_norm")) <= 1e-4 * max(norms.values())
    model = model_loading.load_model(model_loading.open_model(sharded.path))
    assert sum(p.numel() for p in model.parameters()) == sharded.manifest.summary["parameters"]["all"]


@pytest.mark.stress
def test_weights_are_sharded_while_they_are_loaded(
    dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process holds its half of the model: 150 of 300 MB. 0.51 was measured."""
    shares = measure_loading("fsdp2", dataset, tmp_path, monkeypatch)
    assert all(0.45 < share < 0.6 for share in shares), shares


def test_every_family_is_loaded_in_shards(tmp_path: Path) -> None:
    """The sharded models compute the losses of the whole ones; buffers, tied weights and merged experts are loaded."""
    models, job_folder = tmp_path / "models", tmp_path / "job"
    job_folder.mkdir()
    for family in FAMILIES:
        write_model(family, models / family.model_type)
    command = Command("tests.fine_tuning.family_sharding_worker", [str(models)], 2)
    with pytest.raises(launch.LostJobError):  # the worker writes no outcome file
        launch.run(TorchrunLauncher(), command, job_folder, SilentReporter())
    results = [json.loads((models / f"result.{rank}").read_text()) for rank in range(2)]
    ids = torch.arange(3, 35)[None]
    for family in FAMILIES:
        model = model_loading.load_model(model_loading.open_model(models / family.model_type), dtype=torch.float32)
        with torch.no_grad():
            expected = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        for loss, share in (result[family.model_type] for result in results):
            assert loss == pytest.approx(expected, abs=1e-5), family.name
            assert 0.45 < share < 0.55, family.name


def test_best_sharded_checkpoint_is_the_result_when_not_the_last(
    tiny: Path, dataset: Artifact, tmp_path: Path, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", worker_pool.run)
    settings = {"adaptation": "full", "learning_rate": 1.0, "schedule": "constant_with_warmup", "checkpoint_every": 2}
    reference = tune(dataset, tiny, tmp_path / "one" / "model", **settings)
    sharded = tune(dataset, tiny, tmp_path / "two" / "model", processes=2, strategy="fsdp2", **settings)
    best, steps = (sharded.manifest.summary[name] for name in ("best_step", "steps"))
    assert reference.manifest.summary["best_step"] == best == 2 < steps
    weights = [
        dict(model_loading.load_model(model_loading.open_model(model.path)).named_parameters())
        for model in (reference, sharded)
    ]
    for name, parameter in weights[0].items():
        assert torch.allclose(parameter, weights[1][name], atol=1e-3), name


def test_sharded_adapter_is_merged(
    tiny: Path, dataset: Artifact, tmp_path: Path, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", worker_pool.run)
    settings = {**NO_DROPOUT, "processes": 2, "strategy": "fsdp2", "max_steps": 2}
    merged, apart = (
        model_loading.load_model(
            model_loading.open_model(tune(dataset, tiny, tmp_path / str(merge) / "model", merge=merge, **settings).path)
        )
        for merge in (True, False)
    )
    assert not list((tmp_path / "True" / "model").glob("adapter_*"))
    logits = [adapter_merging._compute_logits(model) for model in (apart, merged)]
    assert adapter_merging.compute_relative_difference(*logits) <= adapter_merging.MAX_LOGIT_DIFFERENCE


def test_incomplete_weights_stop_the_sharded_loading(
    dataset: Artifact, tmp_path: Path, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", worker_pool.run)
    broken = tiny_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"][:8].clone()
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(TunelineError) as error:
        tune(dataset, broken, tmp_path / "model", processes=2, strategy="fsdp2")
    assert "missing: model.norm.weight" in error.value.message
    assert "wrong shape: model.layers.0.mlp.up_proj.weight" in error.value.message  # with the shapes of a shard
    assert error.value.exit_code == ConfigurationError.exit_code


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_sharding_with_one_process_is_rejected(strategy: str, tiny: Path) -> None:
    with pytest.raises(ValidationError, match=f"strategy {strategy} requires at least 2 processes; processes is 1"):
        recipe(tiny, strategy=strategy)


def test_sharded_parameters_are_detected(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(launch.LostJobError):  # the worker writes no outcome file
        launch.run(
            TorchrunLauncher(),
            Command("tests.fine_tuning.sharding_worker", [str(tiny), str(tmp_path)], 2),
            tmp_path,
            SilentReporter(),
        )
    for rank in range(2):
        result = json.loads((tmp_path / f"result.{rank}").read_text())
        unsharded, sharded, partial = (result[name] for name in ("unsharded", "sharded", "partial"))
        assert len(sharded["is_sharded"]) == len(unsharded["is_sharded"]) > 10
        assert not any(unsharded["is_sharded"].values())
        assert (
            unsharded["verification"]
            == f"strategy fsdp2 is not in effect: none of the {len(unsharded['is_sharded'])} parameters is sharded"
        )
        assert all(sharded["is_sharded"].values())
        assert sharded["verification"] == "verified"
        assert {name for name, is_sharded in partial["is_sharded"].items() if is_sharded} == {
            name for name in partial["is_sharded"] if ".layers.0." in name
        }


def test_unsharded_and_unwrapped_models_fail_verification() -> None:
    sharded_config, ddp_config = FineTuningConfig(strategy="zero3", processes=2), FineTuningConfig(processes=2)
    with pytest.raises(TrainingError, match="strategy zero3 is not in effect: none of the 2 parameters") as error:
        sharding.verify_strategy(sharded_config, nn.Linear(4, 4))
    assert "ddp" in error.value.hint
    with pytest.raises(
        TrainingError, match="strategy ddp is not in effect: each of the 2 processes would train separately"
    ):
        sharding.verify_strategy(ddp_config, nn.Linear(4, 4))


def test_parameter_partitioned_by_deepspeed_counts_as_sharded() -> None:
    """DeepSpeed leaves an empty parameter, its shard in ds_tensor and the full size in ds_numel; the test fakes these attributes."""
    model = nn.Linear(4, 4, bias=False)
    model.weight.ds_numel, model.weight.ds_tensor = 16, nn.Parameter(model.weight.data.flatten()[:8])
    sharding.verify_strategy(FineTuningConfig(strategy="zero3", processes=2), model)
    model.weight.ds_tensor = nn.Parameter(model.weight.data.flatten())
    with pytest.raises(TrainingError):
        sharding.verify_strategy(FineTuningConfig(strategy="zero3", processes=2), model)
