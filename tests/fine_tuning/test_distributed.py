"""Two processes that share a training on a processor: they learn what one learns, stop and go on as one, and fail together.

What needs accelerators (fsdp2, zero3) is refused here; that the proof of sharding tells parts from wholes is shown on parameters that
FSDP2 has really sharded, over gloo.
"""

from __future__ import annotations

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
from pydantic import ValidationError
from torch import nn

from components.common import artifacts, launch
from components.common.artifacts import Artifact
from components.common.errors import EXIT_INTERRUPTED, ConfigurationError, TrainingError, TunelineError
from components.common.launch import Command, Running
from components.common.launch.torchrun import TorchRun
from components.common.progress import Reporter, Silent
from components.fine_tuning import checkpoints, sharding
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.tiny import tiny_model

EVEN = 2e-6  # nats a token; 0.0 was measured in every case
RAGGED = 0.8  # nats a token; 0.45 measured, see the test
LORA = {"lora": {"dropout": 0.0}}  # the processes draw masks of their own
LONG = {"max_steps": 60, "checkpoint_every": 10, "schedule": "constant_with_warmup", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


@dataclass
class Warm:
    """Two processes that train one thing after the other, in the stead of two new ones for each."""

    job: Running
    folder: Path
    done: int = 0

    def run(self, launcher: TorchRun, command: Command, place: Path, reporter: Reporter) -> dict[str, Any]:
        """As launch.run."""
        assert (command.module, command.processes) == ("components.fine_tuning.worker", 2)
        turn = self.folder / str(self.done)
        turn.mkdir()
        (turn / "draft").write_text(command.arguments[0])
        (turn / "draft").rename(turn / "go")
        wait_until(lambda: len(self.codes()) == 2 or self.job.look().state != "running", 120)
        self.done += 1
        return launch._outcome(self.job, self.job.look(), place)

    def codes(self) -> list[int]:
        """What the processes' last training ended with."""
        turns = [self.folder / str(number) for number in (self.done, self.done - 1)]
        return next(([int(path.read_text() or -1) for path in sorted(turn.glob("code.*"))] for turn in turns if turn.exists()), [])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    folder = tmp_path_factory.mktemp("warm")
    job = TorchRun().start(Command("tests.fine_tuning.warm", [str(folder)], 2), folder)
    try:
        yield Warm(job, folder)
        (folder / "end").touch()
        wait_until(lambda: job.look().state != "running", 30)
    finally:
        job.cancel()


def wait_until(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def recipe(tiny: Path, **changes: Any) -> FineTuningConfig:
    values = {"base_model": str(tiny), "max_steps": 6, "batch_size": 4, "micro_batch_size": 2, "checkpoint_every": 3, "max_length": 96}
    return FineTuningConfig.model_validate({**values, "learning_rate": 5e-3, "warmup_steps": 1, "device": "cpu", **changes})


def tune(dataset: Artifact, tiny: Path, output: Path, reporter: Reporter | None = None, **changes: Any) -> Artifact:
    config = recipe(tiny, **changes)
    return finetune(dataset, output, config, seed=3, state=output.parent / "state", reporter=reporter or Silent())


def figures(made: Artifact, *names: str) -> dict[tuple[int, str], float]:
    """What the log says by step."""
    lines = [json.loads(line) for line in (made.path / "training.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


def furthest(one: dict[tuple[int, str], float], other: dict[tuple[int, str], float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[key] - other[key]) for key in one)


LOSSES = ("train_loss", "validation_loss")


@pytest.mark.parametrize(
    "changes",
    [{"adaptation": "full", "learning_rate": 1e-3}, LORA, {**LORA, "packing": True}, {"validation_rows": 0, **LORA}],
    ids=["full", "lora", "packed", "without validation"],
)
def test_two_processes_learn_what_one_learns(
    changes: dict[str, Any], tiny: Path, dataset: Artifact, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has as many rows as fit into the micro-batches of both: no batch is ragged."""
    monkeypatch.setattr(launch, "run", warm.run)
    one, two = (tune(dataset, tiny, tmp_path / str(n) / "model", processes=n, **changes) for n in (1, 2))
    assert two.manifest.summary["examples"] % 4 == 0
    assert (one.manifest.summary["processes"], two.manifest.summary["processes"]) == (1, 2)
    assert warm.codes() == [0, 0]
    losses = figures(two, *LOSSES)
    assert losses[6, "train_loss"] != losses[1, "train_loss"]
    assert furthest(figures(one, *LOSSES), losses) <= EVEN
    assert furthest(figures(one, "tokens"), figures(two, "tokens")) == 0
    norms = figures(one, "gradient_norm")
    assert furthest(norms, figures(two, "gradient_norm")) <= 1e-5 * max(norms.values())


def test_two_processes_learn_nearly_what_one_learns_where_the_last_batch_is_ragged(
    tiny: Path, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 26 rows the last batch has two: each process takes rows of the beginning once more, so that all have as many."""
    monkeypatch.setattr(launch, "run", warm.run)
    ragged = small_dataset(tmp_path / "ragged", train=26)
    one, two = (tune(ragged, tiny, tmp_path / str(n) / "model", processes=n, max_steps=14, **LORA) for n in (1, 2))
    before, after = (lambda step: step < 7), (lambda step: step >= 7)
    told = [figures(made, *LOSSES) for made in (one, two)]
    whole, torn = ([{key: value for key, value in made.items() if when(key[0])} for made in told] for when in (before, after))
    assert furthest(*whole) <= EVEN
    assert 0 < furthest(*torn) <= RAGGED


class Recorder(Silent):
    """Keeps what it is told, and does something at a step."""

    def __init__(self, at: int = -1, do: Callable[[], None] = lambda: None) -> None:
        self.steps: list[int] = []
        self.began_at: int | None = None
        self.notes: list[str] = []
        self._at, self._do = at, do

    def progress(self, done: int, total: int | None, unit: str) -> None:
        if unit == "steps" and self.began_at is None:
            self.began_at = done

    def metrics(self, values: Any, step: int) -> None:
        if "train_loss" in values:
            self.steps.append(step)
            if step == self._at:
                self._do()

    def note(self, text: str) -> None:
        self.notes.append(text)


def workers() -> list[psutil.Process]:
    """The processes of a training that this one waits for, in the order of their ranks."""
    found = [one for one in psutil.Process().children(recursive=True) if "components.fine_tuning.worker" in one.cmdline()]
    ranked = [one for one in found if "RANK" in one.environ()]
    return sorted(ranked, key=lambda one: int(one.environ()["RANK"]))


@pytest.mark.long
def test_killed_and_asked_to_stop_two_processes_end_with_the_weights_they_would_have_had(
    tiny: Path, dataset: Artifact, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(launch, "run", warm.run)
        whole = tune(dataset, tiny, tmp_path / "whole" / "model", processes=2, **LONG)
    output = tmp_path / "again" / "model"
    seen: list[psutil.Process] = []

    def kill_one() -> None:
        seen.extend(workers())
        seen[1].kill()

    killed = Recorder(at=15, do=kill_one)
    with pytest.raises(TunelineError) as error:
        tune(dataset, tiny, output, killed, processes=2, **LONG)
    assert len(seen) == 2
    psutil.wait_procs(seen, timeout=10)
    assert not [one for one in seen if one.is_running()], "who was not killed ends too"
    assert not (output / artifacts.MANIFEST).exists()

    asked = Recorder(at=30, do=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(TunelineError, match=r"interrupted after step \d+ and is saved") as interrupted:
        tune(dataset, tiny, output, asked, processes=2, **LONG)
    assert (interrupted.value.kind, interrupted.value.exit_code) == ("interrupted", EXIT_INTERRUPTED)
    assert asked.began_at == 10, "the killed one was saved after step 10"
    newest = max(output.parent.glob("state/fine_tuning/*/checkpoint-*"), key=checkpoints.step_of)
    assert checkpoints.is_complete(newest)
    assert f"after step {checkpoints.step_of(newest)} and" in interrupted.value.message

    made = tune(dataset, tiny, output, processes=2, **LONG)
    assert made.manifest.summary["resumed_from"] == checkpoints.step_of(newest)
    assert furthest(figures(made, *LOSSES), figures(whole, *LOSSES)) == 0
    assert made.sha256 == whole.sha256
    assert list(dict.fromkeys(killed.steps + asked.steps)) == sorted({*killed.steps, *asked.steps})
    # last, so that the rest is tried whatever it says
    assert error.value.kind != "unexpected", f"a killed process is no fault of tuneline: {error.value.message}"
    assert "same command again" in error.value.hint


def test_a_loss_that_is_lost_ends_both_processes_with_the_error(
    tiny: Path, dataset: Artifact, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", warm.run)
    wild = {"adaptation": "full", "learning_rate": 1e18, "max_steps": 8, "max_grad_norm": 1e30}
    with pytest.raises(TunelineError, match=r"is (nan|inf) at step \d+, learning rate") as error:
        tune(dataset, tiny, tmp_path / "model", processes=2, **wild)
    assert (error.value.kind, error.value.exit_code) == (TrainingError.kind, TrainingError.exit_code)
    assert warm.codes() == [TrainingError.exit_code] * 2
    assert not (tmp_path / "model" / artifacts.MANIFEST).exists()


def test_a_strategy_that_would_not_be_in_force_here_is_refused_before_any_work(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="strategy: fsdp2 cannot be in force on cpu: ") as refused:
        tune(dataset, tiny, tmp_path / "model", processes=2, strategy="fsdp2")
    assert "ddp" in refused.value.hint
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_one_process_has_nothing_to_shard(strategy: str, tiny: Path) -> None:
    with pytest.raises(ValidationError, match=f"strategy {strategy} shards the model over processes, and processes is 1"):
        recipe(tiny, strategy=strategy)


def test_sharding_is_proven_by_parameters_that_are_held_in_parts(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(launch.LostJobError):  # it leaves no outcome
        launch.run(TorchRun(), Command("tests.fine_tuning.sharded", [str(tiny), str(tmp_path)], 2), tmp_path, Silent())
    for rank in range(2):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        whole, sharded, some = (told[name] for name in ("whole", "sharded", "some"))
        assert len(sharded["parts"]) == len(whole["parts"]) > 10
        assert not any(whole["parts"].values())
        assert whole["proof"] == f"strategy fsdp2 is not in force: none of the {len(whole['parts'])} parameters is held in parts"
        assert all(sharded["parts"].values())
        assert sharded["proof"] == "proven"
        assert {name for name, part in some["parts"].items() if part} == {name for name in some["parts"] if ".layers.0." in name}


def test_a_model_that_is_held_whole_and_shared_by_nobody_is_no_proof() -> None:
    sharded, plain = FineTuningConfig(strategy="zero3", processes=2), FineTuningConfig(processes=2)
    with pytest.raises(TrainingError, match="strategy zero3 is not in force: none of the 2 parameters") as error:
        sharding.prove(sharded, nn.Linear(4, 4))
    assert "ddp" in error.value.hint
    with pytest.raises(TrainingError, match="strategy ddp is not in force: each of the 2 processes would learn by itself"):
        sharding.prove(plain, nn.Linear(4, 4))


def test_a_parameter_that_deepspeed_has_partitioned_is_a_part() -> None:
    """At the seam: DeepSpeed leaves an empty parameter, with the part in ds_tensor and the size of the whole in ds_numel."""
    model = nn.Linear(4, 4, bias=False)
    model.weight.ds_numel, model.weight.ds_tensor = 16, nn.Parameter(model.weight.data.flatten()[:8])
    sharding.prove(FineTuningConfig(strategy="zero3", processes=2), model)
    model.weight.ds_tensor = nn.Parameter(model.weight.data.flatten())
    with pytest.raises(TrainingError):
        sharding.prove(FineTuningConfig(strategy="zero3", processes=2), model)
