"""Calibrated weights: selection of rows and group size, refusals, and llm-compressor in its environment.

The tests marked long need the quantization environment (`python -m components.common.models.quantization_env`), and are
skipped without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.common.artifacts import code_digest
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import (
    calibrated_weights,
    conversation_rows,
    encoded_rows,
    model_loading,
    quantization_env,
)
from components.common.models.calibrated_weights import CalibratedWeights, CalibrationError, load_or_quantize
from components.common.models.model_loading import LoadableModel
from components.common.runtime import virtual_environments
from components.common.runtime.errors import ConfigurationError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import quantization, serving_env
from components.triton_packaging.config import TritonPackagingConfig
from tests.datasets import small_dataset
from tests.quantization_environment import make_environment
from tests.tiny import tiny_model

NEEDS_ENVIRONMENT = pytest.mark.skipif(
    quantization_env.missing_reason() is not None, reason="the quantization environment does not exist"
)
CONFIG = TritonPackagingConfig(backend="vllm", quantization="int4-gptq", prove=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A dataset with twelve test rows."""
    return small_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadableModel:
    """A random model whose layers have 64 and 128 inputs."""
    return model_loading.open_model(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def test_missing_or_old_environment_is_refused_before_training(
    model: LoadableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_loading.load_configuration(model.weights)
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigurationError, match=r"int4-gptq weights require llm-compressor, but .*nowhere does"
    ) as caught:
        quantization.check_quantizable(CONFIG, config)
    assert quantization_env.CREATE_COMMAND in caught.value.hint
    old = make_environment(tmp_path / "old", "exit 1")
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(old))
    marker = quantization_env.describe_complete().replace(quantization_env.REQUIREMENTS[0], "llmcompressor==0.13.0")
    (old / quantization_env.MARKER_FILENAME).write_text(marker, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"old is incomplete or has other versions"):
        quantization.check_quantizable(CONFIG, config)
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(make_environment(tmp_path / "new", "exit 1")))
    quantization.check_quantizable(CONFIG, config)


def test_environment_is_complete_only_after_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commands = tmp_path / "environment", list[list[str]]()
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(folder))

    def run(command: list[str]) -> None:
        """Create what venv and pip would create; the check fails the first time."""
        commands.append(command)
        if "venv" in command:
            shutil.rmtree(folder, ignore_errors=True)
            make_environment(folder, "exit 1", "llmcompressor-0.14.0.1")
            (folder / quantization_env.MARKER_FILENAME).unlink()
        elif quantization_env.CHECK_SCRIPT in command and len(commands) == 3:
            raise TunelineError("llm-compressor cannot be imported", hint="")

    monkeypatch.setattr(virtual_environments, "run_command", run)
    with pytest.raises(TunelineError, match="cannot be imported"):
        quantization_env.create_environment()
    assert "is incomplete" in str(quantization_env.missing_reason())
    assert quantization_env.create_environment() == folder
    assert len(commands) == 6
    assert quantization_env.missing_reason() is None
    quantization_env.create_environment()
    assert len(commands) == 6


@pytest.mark.parametrize(
    ("module", "variable"),
    [(quantization_env, "TUNELINE_QUANTIZATION_ENV"), (serving_env, "TUNELINE_SERVING_ENV")],
)
def test_folder_with_other_content_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "notes.txt").write_text("kept", encoding="utf-8")
    monkeypatch.setattr(virtual_environments, "run_command", lambda command: pytest.fail(f"{command} ran"))
    with pytest.raises(ConfigurationError, match="is not empty and not an environment of tuneline"):
        module.create_environment()
    monkeypatch.setattr(
        sys, "prefix", str(tmp_path)
    )  # an interrupted creation in tuneline's own environment is repaired
    with pytest.raises(pytest.fail.Exception, match="ran"):
        module.create_environment()


@pytest.mark.parametrize("stage", ["evaluation", "triton_packaging"])
def test_code_of_a_stage_includes_the_calibration(stage: str) -> None:
    files, packages = code_digest.import_closure(stage)
    assert calibrated_weights.WORKER in files
    assert "llmcompressor" in packages


def test_layers_that_no_group_size_divides_are_refused(
    model: LoadableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(make_environment(tmp_path / "environment", "exit 1")))
    assert calibrated_weights.select_group_size(model_loading.load_model(model), "int4-gptq") == 64
    config = model_loading.load_configuration(model.weights)
    config.intermediate_size = 96
    quantization.check_quantizable(CONFIG, config)  # groups of 32
    config.intermediate_size = 100
    with pytest.raises(ConfigurationError, match="llama model have 64, 100 inputs; expected multiples of 32"):
        quantization.check_quantizable(CONFIG, config)


def test_rows_for_calibration_are_training_rows(model: LoadableModel, dataset: Artifact) -> None:
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    rows = {
        split: encoded_rows.read_random_rows(dataset, split, tokenizer, max_items=1000, max_length=64, seed=1)
        for split in ("train", "test")
    }
    assert rows["train"]
    assert not {row.id for row in rows["train"]} & {row.id for row in rows["test"]}
    assert all(len(row.ids) <= 64 for row in rows["train"])
    assert tokenizer.decode(rows["train"][0].ids).startswith("<|im_start|>")


def test_random_rows_are_read_alone_in_the_order_of_their_digests(
    model: LoadableModel, dataset: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, read, counts = model_loading.load_tokenizer(model.tokenizer), conversation_rows.read_conversations, []

    def count_rows(*arguments: Any) -> list[conversation_rows.Row]:
        rows = read(*arguments)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(conversation_rows, "read_conversations", count_rows)
    few, all_rows = (
        encoded_rows.read_random_rows(dataset, "train", tokenizer, max_items=number, max_length=512, seed=1)
        for number in (2, 1000)
    )
    assert counts == [2 * encoded_rows.ROWS_PER_ITEM, len(all_rows)]
    assert few == all_rows[:2]
    ids = [row.id for row in all_rows]
    assert ids == sorted(ids, key=lambda id_: hashlib.sha256(f"1:{id_}".encode()).digest())


@pytest.mark.parametrize(("end", "name"), [("exit 3", "status 3"), ("kill -9 $$", "signal SIGKILL")])
def test_failure_of_the_child_process_is_reported_with_its_log(
    model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, name: str
) -> None:
    environment = make_environment(tmp_path / "environment", f"env; echo no memory >&2; {end}")
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(environment))
    monkeypatch.setenv("SERVICE_TOKEN", "secret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(CalibrationError, match=f"llm-compressor failed with {name}: no memory") as caught:
        load_or_quantize(model, dataset, "int4-gptq", tmp_path / "state", seed=1, reporter=SilentReporter())
    [log] = (tmp_path / "state" / "quantized_weights").iterdir()
    assert str(log) in caught.value.hint
    output = log.read_text(encoding="utf-8")
    assert "secret-value" not in output
    assert {"HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", "OMP_NUM_THREADS=1"} <= set(output.splitlines())


def test_weights_are_reused_for_equal_inputs_only(
    model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI does not install the quantization environment; a script replaces its interpreter."""
    script = 'mkdir output; for name in model.safetensors config.json recipe.yaml; do date +%N > "output/$name"; done'

    def quantize(*packages: str, quantized: LoadableModel = model, seed: int = 1) -> CalibratedWeights:
        environment = make_environment(tmp_path / "-".join(["environment", *packages]), script, *packages)
        monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(environment))
        result = load_or_quantize(
            quantized, dataset, "int4-gptq", tmp_path / "state", seed=seed, reporter=SilentReporter()
        )
        shutil.rmtree(environment)
        return result

    first = quantize("numpy-1")
    assert quantize("numpy-1") == first
    assert first.statement["packages"] == f"numpy-1, torch-{torch.__version__}"
    (first.folder / "config.json").write_text("{}", encoding="utf-8")
    repaired = quantize("numpy-1")
    assert repaired.folder == first.folder
    assert repaired.statement["weights_sha256"] != first.statement["weights_sha256"]
    others = [
        quantize("numpy-2"),
        quantize("numpy-1", quantized=replace(model, sha256="0" * 64)),
        quantize("numpy-1", seed=2),
    ]
    assert len({one.folder for one in [first, *others]}) == 4
    names = {path.name for path in calibrated_weights.list_files(first.folder)}
    assert names == {"model.safetensors", "config.json", "recipe.yaml"}


@pytest.mark.long  # imports llm-compressor three times
@NEEDS_ENVIRONMENT
def test_calibrated_weights_are_deterministic_reused_and_repaired(
    model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    def quantize(state: str, seed: int = 1) -> CalibratedWeights:
        return load_or_quantize(model, dataset, "int4-gptq", tmp_path / state, seed=seed, reporter=SilentReporter())

    first, other = quantize("one"), quantize("two")
    assert first.statement == other.statement
    assert first.statement["split"] == "train"
    assert first.statement["dataset_sha256"] == dataset.sha256
    path = first.folder / "model.safetensors"
    written = path.stat().st_mtime_ns
    assert quantize("one").folder == first.folder
    assert path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:-1])
    assert quantize("one").statement == first.statement
    tensors = load_file(path)
    layer = "model.layers.0.mlp.down_proj"
    assert tensors[f"{layer}.weight_packed"].dtype == torch.int32
    assert tensors[f"{layer}.weight_scale"].shape == (64, 128 // 64)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32, torch.int64, torch.bfloat16}


@pytest.mark.long
@NEEDS_ENVIRONMENT
def test_killed_quantization_ends_its_child_and_starts_again(
    model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from components.common.artifacts import artifact_folder\n"
        "from components.common.models import calibrated_weights, model_loading\n"
        "from components.common.runtime.reporters import SilentReporter\n"
        "calibrated_weights.load_or_quantize(model_loading.open_model(Path(sys.argv[1])), "
        "artifact_folder.read(Path(sys.argv[2]), 'dataset'), 'int4-gptq', Path(sys.argv[3]), seed=1, reporter=SilentReporter())\n"
    )
    state = tmp_path / "state"
    command = [sys.executable, "-c", script, str(model.weights), str(dataset.path), str(state)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        while not (logs := list(state.glob("quantized_weights/.quantizing.*/log.txt"))):
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 20
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(logs[0].parent).encode() in read(path)]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = load_or_quantize(model, dataset, "int4-gptq", state, seed=1, reporter=SilentReporter())
    assert [path.name for path in (state / "quantized_weights").iterdir()] == [found.folder.name]
    shutil.rmtree(state)
    again = load_or_quantize(model, dataset, "int4-gptq", state, seed=1, reporter=SilentReporter())
    assert json.dumps(again.statement) == json.dumps(found.statement)


def read(path: Path) -> bytes:
    """Return a file's bytes; empty if the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
