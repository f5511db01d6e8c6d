"""Sweeps: each recipe trains as it would separately, the best is published, and all results are reported.

The tests in the `long` tier run several trainings each.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import ValidationError

from components.common import launch
from components.common.artifacts.artifact_folder import Artifact, read_manifest
from components.common.cost.budgets import Budget, BudgetAccount, BudgetClock, BudgetReachedError, SpendingMeter
from components.common.launch import Command, DetachedError, Launcher, StopRequest, UnresponsiveError
from components.common.models import compute_devices
from components.common.models.model_shape import ModelShape
from components.common.reporting import mlflow_tracking
from components.common.runtime.errors import (
    EXIT_INTERRUPTED,
    BusyError,
    ConfigurationError,
    InputError,
    InterruptedRunError,
    TrainingError,
    TunelineError,
)
from components.common.runtime.reporters import Reporter, SilentReporter
from components.common.workspace import artifact_store
from components.fine_tuning import callbacks, recipe_defaults, training
from components.fine_tuning.acceleration import TrainingDevice
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.stage import finetune
from components.fine_tuning.sweep import tune
from components.fine_tuning.training import TrainingJob
from tests.datasets import small_dataset
from tests.fine_tuning.recipes import recipe
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.tiny import tiny_model

DIVERGING_LEARNING_RATE = 1e18  # the loss becomes non-finite
FULL_FINE_TUNING = {"adaptation": "full", "max_grad_norm": 1e30, "device": "cpu", "max_steps": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


class Recorder(SilentReporter):
    """Records steps and notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[int, int | None]] = []

    def progress(self, done: int, total: int | None, unit: str) -> None:
        if unit == "steps":
            self.steps.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


def sweep_recipe(tiny: Path, vary: Mapping[str, list[Any]], parallel: int = 1, **changes: Any) -> FineTuningConfig:
    return recipe(tiny, **{**FULL_FINE_TUNING, **changes}, sweep={"vary": vary, "parallel": parallel})


def train(
    dataset: Artifact, config: FineTuningConfig, folder: Path, reporter: Reporter | None = None, **options: Any
) -> Artifact:
    return tune(
        dataset,
        folder / "model",
        config,
        seed=3,
        state=folder / "state",
        reporter=reporter or SilentReporter(),
        **options,
    )


def train_alone(dataset: Artifact, config: FineTuningConfig, name: str, folder: Path) -> Artifact:
    return finetune(
        dataset, folder, config.recipes[name], seed=3, state=folder.parent / "alone", reporter=SilentReporter()
    )


class InProcessRunner:
    """Replaces launch.run and trains in this process, which has the libraries loaded. The first test uses real processes."""

    def __init__(self, before_training: Callable[[int], None] = lambda number: None) -> None:
        self.rates: list[float] = []
        self._before_training = before_training

    def run(self, launcher: Launcher, command: Command, folder: Path, reporter: Reporter, *stop: Any) -> dict[str, Any]:
        job = TrainingJob(**json.loads(Path(command.arguments[0]).read_text()))
        self._before_training(len(self.rates))
        self.rates.append(job.config["learning_rate"])
        return {"trained": asdict(training.train(job, reporter))}


@pytest.mark.long
def test_best_of_parallel_recipes_equals_its_separate_training(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    config, reporter = sweep_recipe(tiny, {"learning_rate": [1e-5, 1e-3]}, parallel=2), Recorder()
    model = train(dataset, config, tmp_path, reporter)
    expected = train_alone(dataset, config, "learning_rate=0.001", tmp_path / "one")
    assert model.sha256 == expected.sha256
    assert model.manifest.config == expected.manifest.config
    best, other = model.manifest.summary["sweep"]["recipes"]
    assert [result["recipe"]["learning_rate"] for result in (best, other)] == [1e-3, 1e-5]
    assert best["validation_loss"] == expected.manifest.summary["validation_loss"] < other["validation_loss"]
    assert (best["sha256"], best["failed"]) == (expected.sha256, None)
    page = (model.path / "report.html").read_text()
    assert page.index("<td>published") < page.index("<td>trained")
    assert all(name in page for name in ("learning_rate=0.001</text>", "learning_rate=1e-05</text>"))
    assert reporter.steps[-1] == (8, 8)
    assert f"learning_rate=1e-05: validation loss {other['validation_loss']:.4f}" in reporter.notes


@pytest.mark.long
def test_interrupted_sweep_trains_only_the_remaining_recipes(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4]})

    def fail_second(number: int) -> None:
        if number == 1:
            raise BusyError("another job trains it")

    first, second = InProcessRunner(before_training=fail_second), InProcessRunner()
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(BusyError):
        train(dataset, config, tmp_path)
    assert not (tmp_path / "model" / "manifest.json").exists()
    [linked_state] = (tmp_path / "state").glob(f"sweeps/*/{artifact_store.LINKED_STATE_FILENAME}")
    state_folders = {
        path.relative_to(tmp_path / "state").as_posix()
        for path in (tmp_path / "state").glob("*/*")
        if path.parent.name != "tokens"
    }
    assert state_folders - {f"sweeps/{linked_state.parent.name}"} <= set(json.loads(linked_state.read_text())), (
        "what is trained is known to belong to the sweep"
    )
    monkeypatch.setattr(launch, "run", second.run)
    model = train(dataset, config, tmp_path)
    assert (first.rates, second.rates) == ([1e-3], [1e-4])
    assert model.sha256 == train_alone(dataset, config, "learning_rate=0.001", tmp_path / "one").sha256
    assert train(dataset, config, tmp_path).sha256 == model.sha256, "a finished sweep is returned"
    assert second.rates == [1e-4]


@pytest.mark.stress
def test_changed_sweep_reuses_trained_recipes_and_retrains_damaged_ones(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_third(number: int) -> None:
        if number == 2:
            raise BusyError("another job trains it")

    first, second = InProcessRunner(before_training=fail_third), InProcessRunner()
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(BusyError):
        train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5]}, max_steps=2), tmp_path)
    manifests = {
        read_manifest(path.parent).config["learning_rate"]: path
        for path in (tmp_path / "state" / "sweeps").glob("*/model/manifest.json")
    }
    (manifests[1e-4].parent / "model.safetensors").write_bytes(b"torn")
    monkeypatch.setattr(launch, "run", second.run)
    model = train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4, 1e-6]}, max_steps=2), tmp_path)
    assert (first.rates, second.rates) == ([1e-3, 1e-4], [1e-4, 1e-6])
    leftover = tmp_path / "state" / "fine_tuning" / str(model.manifest.produced_by["key"])
    leftover.mkdir()
    train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4, 1e-6]}, max_steps=2), tmp_path)
    assert not leftover.exists(), "what a kill right after publishing left is removed by the next call"


def test_sweep_rejects_rows_of_an_unsupported_kind(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sft rows, which this objective cannot learn from"):
        train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4]}, objective="dpo"), tmp_path)


def test_read_log_skips_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / callbacks.LOG_FILENAME).write_text('{"step": 1, "train_loss": 2.0}\n{"step": 2, "train_l')
    assert callbacks.read_log(tmp_path / callbacks.LOG_FILENAME) == [{"step": 1, "train_loss": 2.0}]
    assert callbacks.read_log(tmp_path / "missing.jsonl") == []


@pytest.mark.long
def test_first_of_equal_recipes_wins_and_all_failures_raise(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", InProcessRunner().run)
    model = train(dataset, sweep_recipe(tiny, {"keep_checkpoints": [3, 2]}, max_steps=2), tmp_path / "equal")
    first, second = model.manifest.summary["sweep"]["recipes"]
    assert first["sha256"] == second["sha256"]
    assert (first["recipe"], model.manifest.config["keep_checkpoints"]) == ({"keep_checkpoints": 3}, 3)
    with pytest.raises(TrainingError, match=r"learning rate (1e\+18|5e\+17)"):
        train(dataset, sweep_recipe(tiny, {"learning_rate": [DIVERGING_LEARNING_RATE, 1e19]}), tmp_path / "lost")


def test_stop_reaches_every_recipe_and_starts_no_further_one(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_started = threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
    save_requests = []

    def run_until_stopped(
        launcher: Launcher, command: Command, folder: Path, reporter: Reporter, stop: StopRequest, begun: None
    ) -> dict[str, Any]:
        both_started.wait(30)
        save_requests.append(stop.save_requested.wait(30))
        # A worker's error arrives in this form.
        raise TunelineError.from_dict(InterruptedRunError("saved after step 2").as_dict(), EXIT_INTERRUPTED)

    monkeypatch.setattr(launch, "run", run_until_stopped)
    with pytest.raises(
        InterruptedRunError,
        match="0 of 3 recipes are trained; first message: saved after step 2",
    ):
        train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5]}, parallel=2), tmp_path)
    assert save_requests == [True, True]


def test_launcher_error_detaches_other_recipes_without_stopping_them(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the stop request of the other recipes; tests/common/test_launch.py tests its effect."""
    both_started, stop_requests = threading.Barrier(2), []

    def run_and_fail(
        launcher: Launcher, command: Command, folder: Path, reporter: Reporter, stop: StopRequest, begun: None
    ) -> dict[str, Any]:
        if both_started.wait(30):
            raise UnresponsiveError("Slurm has not answered for 3600 s")
        stop_requests.append(
            (stop.detach_requested.wait(30), stop.save_requested.is_set(), stop.kill_requested.is_set())
        )
        raise DetachedError("it goes on")

    monkeypatch.setattr(launch, "run", run_and_fail)
    with pytest.raises(UnresponsiveError, match="has not answered"):
        train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5]}, parallel=2), tmp_path)
    assert stop_requests == [(True, False, False)]


@pytest.mark.parametrize("kind", ["job_lost", "unexpected", "configuration"])
@pytest.mark.stress
def test_recipe_with_environment_failure_is_retried_by_the_next_call(
    kind: str, tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, another job exhausted the node's memory. Dropping the recipe would make the result random."""

    def fail_second(number: int) -> None:
        if number == 1:
            raise TunelineError.from_dict({"kind": kind, "message": "the node is broken"})

    config, first, second = (
        sweep_recipe(tiny, {"learning_rate": [1e-4, 1e-3]}, max_steps=2),
        InProcessRunner(before_training=fail_second),
        InProcessRunner(),
    )
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(TunelineError, match="the node is broken"):
        train(dataset, config, tmp_path)
    monkeypatch.setattr(launch, "run", second.run)
    results = train(dataset, config, tmp_path).manifest.summary["sweep"]["recipes"]
    assert (first.rates, second.rates, [result["failed"] for result in results]) == ([1e-4], [1e-3], [None, None])


def test_parallel_recipes_get_separate_accelerators(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the environment of each recipe's processes; no accelerator is needed."""
    environments, both_started = [], threading.Barrier(2)

    def record_environment(
        launcher: Any, command: Command, folder: Path, reporter: Reporter, stop: StopRequest, begun: None
    ) -> dict[str, Any]:
        environments.append(launcher.environment)
        both_started.wait(30)
        raise TrainingError("the train loss is nan")

    monkeypatch.setattr(launch, "run", record_environment)
    monkeypatch.setitem(compute_devices.VISIBLE_DEVICES_VARIABLES, "cpu", "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(compute_devices, "count_devices", lambda device: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    with pytest.raises(TrainingError):
        train(
            dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5, 1e-6]}, parallel=2, processes=2), tmp_path
        )
    assert sorted(environment["CUDA_VISIBLE_DEVICES"] for environment in environments) == ["2,3", "2,3", "6,7", "6,7"]
    assert compute_devices.partition_devices("cpu", 3) == [{}], "one that needs most of them is not confined"


@pytest.mark.mlflow
def test_failed_recipe_is_reported_and_each_recipe_is_a_nested_run(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setattr(launch, "run", InProcessRunner().run)
    with mlflow_tracking.stage_run("fine_tuning") as parent_run:
        model = train(
            dataset,
            sweep_recipe(tiny, {"learning_rate": [DIVERGING_LEARNING_RATE, 1e-3]}),
            tmp_path,
            tracked=parent_run,
        )
    results = model.manifest.summary["sweep"]["recipes"]
    assert [result["recipe"]["learning_rate"] for result in results] == [1e-3, DIVERGING_LEARNING_RATE]
    assert re.match(r"the (train|validation) loss is (nan|inf) at step", results[1]["failed"])
    assert results[1]["sha256"] is results[1]["validation_loss"] is None
    page = (model.path / "report.html").read_text()
    assert page.index(">published<") < page.index(f">failed: {results[1]['failed'][:20]}")
    assert not list((tmp_path / "state" / "fine_tuning").iterdir()), "nothing is kept of what was not chosen"
    assert not list((tmp_path / "state" / "sweeps").iterdir())
    client = mlflow_tracking.connect().MlflowClient()
    is_child_run = f"tags.`mlflow.parentRunId` = '{parent_run.run_id}'"
    runs = {
        run.info.run_name: run
        for run in client.search_runs([client.get_run(parent_run.run_id).info.experiment_id], is_child_run)
    }
    succeeded, failed = runs["learning_rate=0.001"], runs[f"learning_rate={DIVERGING_LEARNING_RATE}"]
    assert (succeeded.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert succeeded.data.params["learning_rate"] == "0.001"
    assert len(client.get_metric_history(succeeded.info.run_id, "train_loss")) >= 4
    assert not [name for name in client.get_run(parent_run.run_id).data.metrics if name.endswith("loss")]


def test_every_recipe_must_fit_into_memory_before_the_first_trains(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, config = InProcessRunner(), sweep_recipe(tiny, {"micro_batch_size": [1, 4]})
    monkeypatch.setattr(launch, "run", runner.run)
    check = recipe_defaults.check_memory

    def check_one_row(recipe: Recipe, longest: int, shape: ModelShape, device: TrainingDevice) -> None:
        check(recipe, longest, shape, replace(device, memory=1 if recipe.micro_batch_size > 1 else None))

    monkeypatch.setattr(recipe_defaults, "check_memory", check_one_row)
    with pytest.raises(ConfigurationError, match=r"sweep\.vary: micro_batch_size=4: training does not fit into mem"):
        train(dataset, config, tmp_path)
    assert runner.rates == []


def test_sweep_requires_validation_rows_in_the_dataset(tiny: Path, tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path / "dataset", validation=0)
    with pytest.raises(InputError, match="has no validation rows"):
        train(dataset, sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4]}), tmp_path)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"learning_rate": [1e-3, -1]}, "learning_rate=-1: learning_rate: found -1; expected more than 0"),
        (
            {"learning_rate": [1e-3], "lora.rank": [8, 0]},
            "learning_rate=0.001, lora.rank=0: lora.rank: found 0; expected 1 or more",
        ),
        (
            {"micro_batch_size": [2, 3]},
            "micro_batch_size=3: batch_size 4 is not a multiple of micro_batch_size 3",
        ),
        ({"learning_rate": [1e-3, 0.001]}, "learning_rate=0.001 is listed twice"),
        ({"learning_rate": []}, "learning_rate has an empty list of values"),
        ({"lora": [{"rank": 8}]}, "lora is a section; expected one of its keys, such as lora.rank"),
        ({"lora.rang": [8]}, "lora.rang is not a key of fine_tuning"),
        ({"learning_rate.x": [8]}, "learning_rate.x is not a key of fine_tuning"),
        ({"rank": [8]}, "rank is not a key of fine_tuning"),
        ({"max_length": [64, 96]}, "max_length changes the definition of the validation loss"),
        ({"preference.beta": [0.1]}, "preference.beta changes the definition of the validation loss"),
        ({"sweep.parallel": [1, 2]}, "sweep.parallel is not part of a recipe"),
        ({"learning_rate": [*range(1, 9)], "lora.rank": [*range(1, 10)]}, "72 combinations; expected at most 64"),
    ],
)
def test_invalid_combination_is_rejected_by_name(vary: dict[str, list[Any]], message: str, tiny: Path) -> None:
    with pytest.raises(ValidationError) as error:
        sweep_recipe(tiny, vary, adaptation="lora")
    assert f"sweep.vary: {message}" in str(error.value)


@pytest.mark.parametrize(("objective", "term"), [("kto", "reference"), ("orpo", "likelihood")])
def test_micro_batch_size_cannot_be_varied_if_the_loss_depends_on_it(objective: str, term: str, tiny: Path) -> None:
    message = f"micro_batch_size cannot be varied: the {term} term of {objective}'s loss is the mean over a micro-batch"
    with pytest.raises(ValidationError, match=message):
        sweep_recipe(tiny, {"micro_batch_size": [2, 4]}, objective=objective)


def test_sweep_with_zero_validation_rows_is_rejected(tiny: Path) -> None:
    with pytest.raises(ValidationError, match=r"learning_rate=0.001: validation_rows is 0"):
        sweep_recipe(tiny, {"learning_rate": [1e-3]}, validation_rows=0)


def test_every_combination_is_a_recipe_without_a_sweep_section(tiny: Path) -> None:
    config = sweep_recipe(tiny, {"learning_rate": ["1e-4", 3e-4], "lora.rank": [8, 16]}, adaptation="lora")
    assert list(config.recipes) == [
        f"learning_rate={rate}, lora.rank={rank}" for rate in (0.0001, 0.0003) for rank in (8, 16)
    ]
    reordered = sweep_recipe(tiny, {"lora.rank": [8, 16], "learning_rate": ["1e-4", 3e-4]}, adaptation="lora")
    assert list(reordered.recipes) == list(config.recipes), (
        "whatever order the keys came in, such as that of canonical JSON"
    )
    last = config.recipes["learning_rate=0.0003, lora.rank=16"]
    assert (
        last.model_dump()
        == recipe(
            tiny, **{**FULL_FINE_TUNING, "adaptation": "lora"}, learning_rate=3e-4, lora={"rank": 16}
        ).model_dump()
    )
    assert Recipe.model_validate(json.loads(config.model_dump_json())) == config
    assert "sweep" not in last.model_dump()
    assert "sweep" not in FineTuningConfig().model_dump(mode="json")


@pytest.mark.stress
def test_killed_and_interrupted_sweep_resumes_without_leftovers(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    config = sweep_recipe(tiny, {"learning_rate": [1e-4, 1e-3]}, parallel=2, max_steps=200, checkpoint_every=10)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"seed": 3, "fine_tuning": config.model_dump()}))
    command = [*COMMAND, "finetune", str(dataset.path), "-o", "model", "-c", "c.yaml", "--workdir", "wd", "--json"]

    def list_checkpoint_steps() -> list[int]:
        """Return the step of the newest checkpoint of each recipe."""
        states = (tmp_path / "wd" / "state" / "fine_tuning").glob("*")
        return sorted(
            max((int(checkpoint.name.split("-")[1]) for checkpoint in state.glob("checkpoint-*")), default=0)
            for state in states
        )

    def run_until(step: int, signal_number: int) -> tuple[int, dict[str, Any]]:
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment(ROOT)) as child:
            deadline = time.monotonic() + 240
            while child.poll() is None and not (
                len(list_checkpoint_steps()) == 2 and list_checkpoint_steps()[0] >= step
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            workers = psutil.Process(child.pid).children(recursive=True)
            child.send_signal(signal_number)
            output = child.communicate(timeout=120)[0]
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        return child.returncode, json.loads(output or "{}")

    assert run_until(10, signal.SIGKILL) == (-signal.SIGKILL, {})
    code, error_output = run_until(list_checkpoint_steps()[0] + 10, signal.SIGTERM)
    assert (code, error_output["error"]["kind"]) == (EXIT_INTERRUPTED, "interrupted")
    assert error_output["error"]["message"].startswith("the sweep was interrupted: 0 of 2 recipes are trained")
    checkpoint_steps = list_checkpoint_steps()
    process = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment(ROOT), check=True
    )
    result = json.loads(process.stdout)
    assert result["resumed_from"] in checkpoint_steps
    best = train_alone(
        dataset, config, f"learning_rate={result['sweep'][0]['recipe']['learning_rate']}", tmp_path / "one"
    )
    assert (result["sha256"], best.sha256) == (result["sweep"][0]["sha256"], result["sha256"])


@pytest.mark.long
def test_sweep_starts_no_recipe_beyond_the_budget_and_resumes(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long: two trainings."""
    config = sweep_recipe(tiny, {"learning_rate": [1e-3, 1e-4]})
    account = BudgetAccount(name="budget", budget=Budget(hours=1))
    budget = BudgetClock(SpendingMeter(accounts=[account]))

    def spend(number: int) -> None:
        budget.clock._wall -= 3600.0

    first, second = InProcessRunner(before_training=spend), InProcessRunner()
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(BudgetReachedError, match=r"budget.hours is used up: 1(\.\d+)? of 1; no further stage starts"):
        train(dataset, config, tmp_path, budget=budget)
    monkeypatch.setattr(launch, "run", second.run)
    train(dataset, config, tmp_path)
    assert (first.rates, second.rates) == ([1e-3], [1e-4])
