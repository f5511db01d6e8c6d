"""DeepSpeed ZeRO-3 with two local processes: parameters are sharded and losses equal those of one process."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import adapter_merging, model_loading
from components.common.runtime import process_control
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.fine_tuning.sharding import TORCH_LOCK_FILENAME
from components.fine_tuning.stage import finetune
from tests.datasets import small_dataset
from tests.fine_tuning.loading_memory import measure_loading
from tests.fine_tuning.recipes import recipe
from tests.fine_tuning.training_processes import TrainingRunner, start_training_runner
from tests.tiny import tiny_model

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]  # DeepSpeed compiles its communication extension once
TOLERANCE = 1e-4  # for losses; the order of summation differs


@pytest.fixture(scope="module")
def model_and_dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    folder = tmp_path_factory.mktemp("world")
    return tiny_model(folder / "tiny-llama"), small_dataset(folder / "dataset")


@pytest.fixture(scope="module")
def training_server() -> Iterator[TrainingRunner]:
    with start_training_runner() as server:
        yield server


def train(model_and_dataset: tuple[Path, Artifact], folder: Path, **changes: Any) -> Artifact:
    tiny, dataset = model_and_dataset
    return finetune(
        dataset, folder / "model", recipe(tiny, **changes), seed=3, state=folder / "state", reporter=SilentReporter()
    )


@pytest.mark.stress  # four minutes of CPU, most of them for the compilation
@pytest.mark.parametrize(
    "settings",
    [
        {"adaptation": "full"},
        {"adaptation": "lora", "lora": {"dropout": 0.0}},
        {"adaptation": "full", "packing": True},
    ],
)
def test_parameters_are_sharded_and_losses_match_one_process(
    settings: dict[str, Any], model_and_dataset: tuple[Path, Artifact], tmp_path: Path
) -> None:
    single = train(model_and_dataset, tmp_path / "one", **settings, micro_batch_size=4).manifest.summary
    artifact = train(model_and_dataset, tmp_path / "two", **settings, processes=2, strategy="zero3")
    sharded = artifact.manifest.summary
    (proof,) = [reason for reason in sharded["choices"] if reason.startswith("strategy zero3 is in effect")]
    sharded_count, total_count = (
        int(word) for word in proof.split(": ")[1].split() if word.isdigit() and int(word) > 2
    )
    assert sharded_count == total_count, "every parameter is sharded"
    for loss in ("train_loss", "validation_loss"):
        assert sharded[loss] == pytest.approx(single[loss], abs=TOLERANCE)
    weights = model_loading.load_model(model_loading.open_model(artifact.path))
    assert sum(p.numel() for p in weights.parameters()) == sharded["parameters"]["all"]


@pytest.mark.stress
def test_weights_are_sharded_while_they_are_loaded(
    model_and_dataset: tuple[Path, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither process holds the whole model: 150 of 300 MB, and a tensor of 33 MB."""
    shares = measure_loading("zero3", model_and_dataset[1], tmp_path, monkeypatch)
    assert all(0.45 < share < 0.75 for share in shares), shares


@pytest.mark.stress
def test_sharded_adapter_is_merged(model_and_dataset: tuple[Path, Artifact], tmp_path: Path) -> None:
    settings = {"lora": {"dropout": 0.0}, "processes": 2, "strategy": "zero3", "max_steps": 2}
    merged, apart = (
        model_loading.load_model(
            model_loading.open_model(train(model_and_dataset, tmp_path / str(merge), **settings, merge=merge).path)
        )
        for merge in (True, False)
    )
    assert not list((tmp_path / "True" / "model").glob("adapter_*"))
    logits = [adapter_merging._compute_logits(model) for model in (apart, merged)]
    assert adapter_merging.compute_relative_difference(*logits) <= adapter_merging.MAX_LOGIT_DIFFERENCE


@pytest.mark.stress
def test_lock_of_a_killed_compilation_does_not_stop_the_training(
    model_and_dataset: tuple[Path, Artifact], tmp_path: Path
) -> None:
    folder = artifact_store.get_cache_folder() / "torch_extensions" / platform.node() / "deepspeed_shm_comm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TORCH_LOCK_FILENAME).touch()
    summary = train(model_and_dataset, tmp_path, processes=2, strategy="zero3", max_steps=1).manifest.summary
    assert summary["steps"] == 1
    assert not (folder / TORCH_LOCK_FILENAME).exists()


@pytest.mark.stress
def test_best_checkpoint_is_the_result_when_not_the_last(
    model_and_dataset: tuple[Path, Artifact], tmp_path: Path
) -> None:
    settings = {"adaptation": "full", "learning_rate": 1.0, "schedule": "constant_with_warmup"}
    sharded = train(model_and_dataset, tmp_path / "whole", **settings, processes=2, strategy="zero3").manifest.summary
    single = train(model_and_dataset, tmp_path / "one", **settings, micro_batch_size=4).manifest.summary
    assert sharded["best_step"] == single["best_step"] == 2 < sharded["steps"]
    assert sharded["validation_loss"] == pytest.approx(single["validation_loss"], abs=1e-2)


@pytest.mark.stress
def test_killed_training_resumes_to_the_same_weights(
    model_and_dataset: tuple[Path, Artifact], training_server: TrainingRunner, tmp_path: Path
) -> None:
    tiny, dataset = model_and_dataset
    config = recipe(tiny, adaptation="full", processes=2, strategy="zero3").model_dump()

    def build_job(name: str) -> dict[str, Any]:
        return {
            "dataset": str(dataset.path),
            "output": str(tmp_path / name / "model"),
            "state": str(tmp_path / name / "state"),
            "config": config,
        }

    uninterrupted = training_server.run(build_job("whole"))
    assert not training_server.run(build_job("often"), at=3).sha256
    resumed = training_server.run(build_job("often"))
    assert resumed.sha256 == uninterrupted.sha256 != ""
    assert resumed.resumed_from in (2, 4)


@pytest.mark.stress
def test_installed_but_unused_deepspeed_prints_nothing_to_stdout(
    model_and_dataset: tuple[Path, Artifact], tmp_path: Path
) -> None:
    tiny, dataset = model_and_dataset
    overrides = ["--set", f"fine_tuning.base_model={tiny}", "--set", "fine_tuning.max_steps=1"]
    command = process_control.build_module_command(
        "pipelines.cli", "finetune", str(dataset.path), "-o", str(tmp_path / "model"), "--json", *overrides
    )
    process = subprocess.run(
        command, env=process_control.build_python_environment(), stdout=subprocess.PIPE, check=True, cwd=tmp_path
    )
    assert json.loads(process.stdout)["steps"] == 1
