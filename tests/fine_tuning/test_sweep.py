"""Sweeps: every recipe is trained as it would be alone, the best is the result, and what came of the others is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import ValidationError

from components.common import devices, launch, places, tracking
from components.common.artifacts import Artifact, read_manifest
from components.common.errors import EXIT_INTERRUPTED, BusyError, InputError, InterruptedRunError, TrainingError, TunelineError
from components.common.launch import Command, Launcher, LeftError, SilentError, Stop
from components.common.progress import Reporter, Silent
from components.fine_tuning import sweep, training, watch
from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.stage import finetune
from components.fine_tuning.sweep import Outcome, tune
from components.fine_tuning.training import Job
from tests.datasets import small_dataset
from tests.fine_tuning.recipes import recipe
from tests.pipelines.command import COMMAND, ROOT, environment
from tests.tiny import tiny_model

WILD = 1e18  # a learning rate with which the loss is lost
WHOLE = {"adaptation": "full", "max_grad_norm": 1e30, "device": "cpu", "max_steps": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


class Recorder(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[tuple[int, int | None]] = []

    def progress(self, done: int, total: int | None, unit: str) -> None:
        if unit == "steps":
            self.seen.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


def swept(tiny: Path, vary: Mapping[str, list[Any]], parallel: int = 1, **changes: Any) -> FineTuningConfig:
    return recipe(tiny, **{**WHOLE, **changes}, sweep={"vary": vary, "parallel": parallel})


def train(dataset: Artifact, config: FineTuningConfig, place: Path, reporter: Reporter | None = None, **options: Any) -> Artifact:
    return tune(dataset, place / "model", config, seed=3, state=place / "state", reporter=reporter or Silent(), **options)


def alone(dataset: Artifact, config: FineTuningConfig, name: str, place: Path) -> Artifact:
    return finetune(dataset, place, config.recipes[name], seed=3, state=place.parent / "alone", reporter=Silent())


class Here:
    """In the stead of launch.run: trains in this process, whose libraries are loaded. Real processes are in the first test."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.rates: list[float] = []
        self._before = before

    def run(self, launcher: Launcher, command: Command, folder: Path, reporter: Reporter, *stop: Any) -> dict[str, Any]:
        job = Job(**json.loads(Path(command.arguments[0]).read_text()))
        self._before(len(self.rates))
        self.rates.append(job.config["learning_rate"])
        return {"trained": asdict(training.train(job, reporter))}


def test_the_best_of_recipes_trained_at_once_is_the_model_that_it_is_alone(tiny: Path, dataset: Artifact, tmp_path: Path) -> None:
    config, reporter = swept(tiny, {"learning_rate": [1e-5, 1e-3]}, parallel=2), Recorder()
    made = train(dataset, config, tmp_path, reporter)
    one = alone(dataset, config, "learning_rate=0.001", tmp_path / "one")
    assert made.sha256 == one.sha256
    assert made.manifest.config == one.manifest.config
    best, other = made.manifest.summary["sweep"]["recipes"]
    assert [told["recipe"]["learning_rate"] for told in (best, other)] == [1e-3, 1e-5]
    assert best["validation_loss"] == one.manifest.summary["validation_loss"] < other["validation_loss"]
    assert (best["sha256"], best["failed"]) == (one.sha256, None)
    page = (made.path / "report.html").read_text()
    assert page.index("<td>this model") < page.index("<td>trained")
    assert all(name in page for name in ("learning_rate=0.001</text>", "learning_rate=1e-05</text>"))
    assert reporter.seen[-1] == (8, 8)
    assert f"learning_rate=1e-05: validation loss {other['validation_loss']:.4f}" in reporter.notes


def test_a_sweep_that_ended_in_the_middle_goes_on_with_what_is_not_trained_and_comes_to_the_same(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = swept(tiny, {"learning_rate": [1e-3, 1e-4]})

    def busy(number: int) -> None:
        if number == 1:
            raise BusyError("another job trains it")

    first, then = Here(before=busy), Here()
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(BusyError):
        train(dataset, config, tmp_path)
    assert not (tmp_path / "model" / "manifest.json").exists()
    [note] = (tmp_path / "state").glob(f"sweeps/*/{places.TOGETHER}")
    there = {path.relative_to(tmp_path / "state").as_posix() for path in (tmp_path / "state").glob("*/*") if path.parent.name != "tokens"}
    assert there - {f"sweeps/{note.parent.name}"} <= set(json.loads(note.read_text())), "what is trained is known to belong to the sweep"
    monkeypatch.setattr(launch, "run", then.run)
    made = train(dataset, config, tmp_path)
    assert (first.rates, then.rates) == ([1e-3], [1e-4])
    assert made.sha256 == alone(dataset, config, "learning_rate=0.001", tmp_path / "one").sha256
    assert train(dataset, config, tmp_path).sha256 == made.sha256, "a finished sweep is returned"
    assert then.rates == [1e-4]


def test_a_sweep_that_is_changed_after_its_end_in_the_middle_keeps_what_is_trained_and_trains_anew_what_was_damaged(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(number: int) -> None:
        if number == 2:
            raise BusyError("another job trains it")

    first, then = Here(before=busy), Here()
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(BusyError):
        train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5]}, max_steps=2), tmp_path)
    rates = {
        read_manifest(one.parent).config["learning_rate"]: one for one in (tmp_path / "state" / "sweeps").glob("*/model/manifest.json")
    }
    (rates[1e-4].parent / "model.safetensors").write_bytes(b"torn")
    monkeypatch.setattr(launch, "run", then.run)
    made = train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4, 1e-6]}, max_steps=2), tmp_path)
    assert (first.rates, then.rates) == ([1e-3, 1e-4], [1e-4, 1e-6])
    left = tmp_path / "state" / "fine_tuning" / str(made.manifest.produced_by["key"])
    left.mkdir()
    train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4, 1e-6]}, max_steps=2), tmp_path)
    assert not left.exists(), "what a kill right after publishing left is removed by the next call"


def test_rows_that_the_objective_cannot_learn_from_are_refused_as_they_are_for_one_recipe(
    tiny: Path, dataset: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="sft rows, which this objective cannot learn from"):
        train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4]}, objective="dpo"), tmp_path)


def test_a_line_of_the_log_that_a_kill_tore_is_left_out(tmp_path: Path) -> None:
    (tmp_path / watch.LOG).write_text('{"step": 1, "train_loss": 2.0}\n{"step": 2, "train_l')
    failed = Outcome("a", FineTuningConfig(), error=TrainingError("the train loss is nan"))
    assert sweep._log(failed, tmp_path) == [{"step": 1, "train_loss": 2.0}]


def test_of_equal_recipes_the_first_is_chosen_and_when_all_fail_its_error_is_raised(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run", Here().run)
    made = train(dataset, swept(tiny, {"keep_checkpoints": [3, 2]}, max_steps=2), tmp_path / "equal")
    first, second = made.manifest.summary["sweep"]["recipes"]
    assert first["sha256"] == second["sha256"]
    assert (first["recipe"], made.manifest.config["keep_checkpoints"]) == ({"keep_checkpoints": 3}, 3)
    with pytest.raises(TrainingError, match=r"learning rate (1e\+18|5e\+17)"):
        train(dataset, swept(tiny, {"learning_rate": [WILD, 1e19]}), tmp_path / "lost")


def test_a_stop_is_passed_on_to_every_recipe_and_none_is_begun_after_it(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
    ended = []

    def watched(launcher: Launcher, command: Command, folder: Path, reporter: Reporter, stop: Stop, begun: None) -> dict[str, Any]:
        began.wait(30)
        ended.append(stop.asked.wait(30))
        raise TunelineError.from_dict(InterruptedRunError("saved after step 2").as_dict(), EXIT_INTERRUPTED)  # as a worker's is told

    monkeypatch.setattr(launch, "run", watched)
    with pytest.raises(InterruptedRunError, match=r"0 of 3 recipes are trained, .* saved; the first said: saved after step 2"):
        train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5]}, parallel=2), tmp_path)
    assert ended == [True, True]


def test_an_error_that_is_no_recipes_own_ends_no_job_that_goes_on_elsewhere(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the seam: what the watchers of the others are told. What they do then is in tests/common/test_launch.py."""
    both, told = threading.Barrier(2), []

    def watched(launcher: Launcher, command: Command, folder: Path, reporter: Reporter, stop: Stop, begun: None) -> dict[str, Any]:
        if both.wait(30):
            raise SilentError("Slurm has not answered for 3600 s")
        told.append((stop.leave.wait(30), stop.asked.is_set(), stop.now.is_set()))
        raise LeftError("it goes on")

    monkeypatch.setattr(launch, "run", watched)
    with pytest.raises(SilentError, match="has not answered"):
        train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5]}, parallel=2), tmp_path)
    assert told == [(True, False, False)]


@pytest.mark.parametrize("kind", ["job_lost", "unexpected", "configuration"])
def test_a_recipe_that_the_place_may_have_failed_is_not_left_out_and_is_trained_by_the_next_call(
    kind: str, tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose node was out of memory by another's fault: without it, chance would choose."""

    def failed(number: int) -> None:
        if number == 1:
            raise TunelineError.from_dict({"kind": kind, "message": "the node is broken"})

    config, first, then = swept(tiny, {"learning_rate": [1e-4, 1e-3]}, max_steps=2), Here(before=failed), Here()
    monkeypatch.setattr(launch, "run", first.run)
    with pytest.raises(TunelineError, match="the node is broken"):
        train(dataset, config, tmp_path)
    monkeypatch.setattr(launch, "run", then.run)
    told = train(dataset, config, tmp_path).manifest.summary["sweep"]["recipes"]
    assert (first.rates, then.rates, [one["failed"] for one in told]) == ([1e-4], [1e-3], [None, None])


def test_on_a_machine_with_several_accelerators_recipes_that_run_at_once_have_their_own(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the seam: which accelerators a recipe's processes are to see. Here there are none."""
    seen, both = [], threading.Barrier(2)

    def watched(launcher: Any, command: Command, folder: Path, reporter: Reporter, stop: Stop, begun: None) -> dict[str, Any]:
        seen.append(launcher.environment)
        both.wait(30)
        raise TrainingError("the train loss is nan")

    monkeypatch.setattr(launch, "run", watched)
    monkeypatch.setitem(devices.VISIBLE, "cpu", "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "count", lambda device: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    with pytest.raises(TrainingError):
        train(dataset, swept(tiny, {"learning_rate": [1e-3, 1e-4, 1e-5, 1e-6]}, parallel=2, processes=2), tmp_path)
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen) == ["2,3", "2,3", "6,7", "6,7"]
    assert devices.shares("cpu", 3) == [{}], "one that needs most of them is not confined"


@pytest.mark.mlflow
def test_a_recipe_that_fails_is_told_of_beside_the_best_and_each_is_a_run_in_the_steps_own(
    tiny: Path, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setattr(launch, "run", Here().run)
    with tracking.stage_run("fine_tuning") as own:
        made = train(dataset, swept(tiny, {"learning_rate": [WILD, 1e-3]}), tmp_path, tracked=own)
    told = made.manifest.summary["sweep"]["recipes"]
    assert [one["recipe"]["learning_rate"] for one in told] == [1e-3, WILD]
    assert re.match(r"the (train|validation) loss is (nan|inf) at step", told[1]["failed"])
    assert told[1]["sha256"] is told[1]["validation_loss"] is None
    page = (made.path / "report.html").read_text()
    assert page.index("<td>this model") < page.index(f"<td>failed: {told[1]['failed'][:20]}")
    assert not list((tmp_path / "state" / "fine_tuning").iterdir()), "nothing is kept of what was not chosen"
    assert not list((tmp_path / "state" / "sweeps").iterdir())
    client = tracking.connect().MlflowClient()
    of_it = f"tags.`mlflow.parentRunId` = '{own.run_id}'"
    runs = {run.info.run_name: run for run in client.search_runs([client.get_run(own.run_id).info.experiment_id], of_it)}
    good, failed = runs["learning_rate=0.001"], runs[f"learning_rate={WILD}"]
    assert (good.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert good.data.params["learning_rate"] == "0.001"
    assert len(client.get_metric_history(good.info.run_id, "train_loss")) >= 4
    assert not [name for name in client.get_run(own.run_id).data.metrics if name.endswith("loss")]


def test_without_validation_rows_there_is_nothing_to_compare_by(tiny: Path, tmp_path: Path) -> None:
    rows = small_dataset(tmp_path / "dataset", validation=0)
    with pytest.raises(InputError, match="has no validation rows"):
        train(rows, swept(tiny, {"learning_rate": [1e-3, 1e-4]}), tmp_path)


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ({"learning_rate": [1e-3, -1]}, "learning_rate=-1: learning_rate: Input should be greater than 0"),
        ({"learning_rate": [1e-3], "lora.rank": [8, 0]}, "learning_rate=0.001, lora.rank=0: lora.rank: Input should be greater than"),
        ({"micro_batch_size": [2, 3]}, "micro_batch_size=3: Value error, batch_size 4 is not a multiple of micro_batch_size 3"),
        ({"learning_rate": [1e-3, 0.001]}, "learning_rate=0.001 stands there twice"),
        ({"learning_rate": []}, "learning_rate: it has no values to try"),
        ({"lora": [{"rank": 8}]}, "lora: it is a section; name a key of it, such as lora.rank"),
        ({"lora.rang": [8]}, "lora.rang: there is no such key"),
        ({"learning_rate.x": [8]}, "learning_rate.x: there is no such key"),
        ({"rank": [8]}, "rank: there is no such key"),
        ({"max_length": [64, 96]}, "max_length: with another one the validation loss measures something else"),
        ({"preference.beta": [0.1]}, "preference.beta: with another one the validation loss measures something else"),
        ({"sweep.parallel": [1, 2]}, "sweep.parallel: it is no part of a recipe"),
        ({"learning_rate": [*range(1, 9)], "lora.rank": [*range(1, 10)]}, "these are 72 recipes, and 64 is the most"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_any_work_with_the_combination(vary: dict[str, list[Any]], said: str, tiny: Path) -> None:
    with pytest.raises(ValidationError) as refused:
        swept(tiny, vary, adaptation="lora")
    assert f"sweep.vary: {said}" in str(refused.value)


def test_what_ktos_loss_is_measured_by_cannot_be_varied(tiny: Path) -> None:
    with pytest.raises(ValidationError, match="micro_batch_size: kto's loss has a reference term that is the mean over a micro-batch"):
        swept(tiny, {"micro_batch_size": [2, 4]}, objective="kto")


def test_recipes_that_could_not_be_compared_by_their_loss_are_refused(tiny: Path) -> None:
    with pytest.raises(ValidationError, match=r"learning_rate=0.001: validation_rows is 0"):
        swept(tiny, {"learning_rate": [1e-3]}, validation_rows=0)


def test_every_combination_is_a_recipe_and_a_configuration_without_a_sweep_reads_as_before(tiny: Path) -> None:
    config = swept(tiny, {"learning_rate": ["1e-4", 3e-4], "lora.rank": [8, 16]}, adaptation="lora")
    assert list(config.recipes) == [f"learning_rate={rate}, lora.rank={rank}" for rate in (0.0001, 0.0003) for rank in (8, 16)]
    turned = swept(tiny, {"lora.rank": [8, 16], "learning_rate": ["1e-4", 3e-4]}, adaptation="lora")
    assert list(turned.recipes) == list(config.recipes), "whatever order the keys came in, such as that of canonical JSON"
    last = config.recipes["learning_rate=0.0003, lora.rank=16"]
    assert last == recipe(tiny, **{**WHOLE, "adaptation": "lora"}, learning_rate=3e-4, lora={"rank": 16})
    assert FineTuningConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert "sweep" not in last.model_dump()
    assert "sweep" not in FineTuningConfig().model_dump(mode="json")


@pytest.mark.stress
def test_killed_and_then_stopped_in_the_middle_a_sweep_leaves_no_process_and_ends_as_if_nothing_had_been(
    tiny: Path, dataset: Artifact, tmp_path: Path
) -> None:
    config = swept(tiny, {"learning_rate": [1e-4, 1e-3]}, parallel=2, max_steps=200, checkpoint_every=10)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"seed": 3, "fine_tuning": config.model_dump()}))
    command = [*COMMAND, "finetune", str(dataset.path), "-o", "model", "-c", "c.yaml", "--workdir", "wd", "--json"]

    def saved() -> list[int]:
        """The newest checkpoint of each recipe."""
        states = (tmp_path / "wd" / "state" / "fine_tuning").glob("*")
        return sorted(max((int(one.name.split("-")[1]) for one in state.glob("checkpoint-*")), default=0) for state in states)

    def run_until(step: int, number: int) -> tuple[int, dict[str, Any]]:
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment(ROOT)) as child:
            until = time.monotonic() + 240
            while child.poll() is None and not (len(saved()) == 2 and saved()[0] >= step):
                assert time.monotonic() < until
                time.sleep(0.1)
            workers = psutil.Process(child.pid).children(recursive=True)
            child.send_signal(number)
            said = child.communicate(timeout=120)[0]
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        return child.returncode, json.loads(said or "{}")

    assert run_until(10, signal.SIGKILL) == (-signal.SIGKILL, {})
    code, told = run_until(saved()[0] + 10, signal.SIGTERM)
    assert (code, told["error"]["kind"]) == (EXIT_INTERRUPTED, "interrupted")
    assert told["error"]["message"].startswith("the sweep was interrupted: 0 of 2 recipes are trained")
    before = saved()
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment(ROOT), check=True)
    result = json.loads(done.stdout)
    assert result["resumed_from"] in before
    best = alone(dataset, config, f"learning_rate={result['sweep'][0]['recipe']['learning_rate']}", tmp_path / "one")
    assert (result["sha256"], best.sha256) == (result["sweep"][0]["sha256"], result["sha256"])
