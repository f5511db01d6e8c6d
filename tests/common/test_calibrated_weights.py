"""Calibrated weights: selection of rows and group size, refusals, and llm-compressor in its environment.

The tests marked long need the quantization environment (`python -m components.common.models.quantization_env`), and are
skipped without it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import calibrated_weights, encoded_rows, model_loading, quantization_env
from components.common.models.calibrated_weights import CalibrationError, load_or_quantize
from components.common.models.model_loading import LoadableModel
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.triton_packaging import quantization
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
    with pytest.raises(ConfigurationError, match=r"requires llm-compressor, but .*nowhere does not exist") as caught:
        quantization.check_quantizable(CONFIG, config)
    assert quantization_env.CREATE_COMMAND in caught.value.hint
    old = make_environment(tmp_path / "old", "exit 1", ("llmcompressor==0.13.0",))
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(old))
    with pytest.raises(ConfigurationError, match=r"old lacks llmcompressor 0\.14\.0\.1"):
        quantization.check_quantizable(CONFIG, config)
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(make_environment(tmp_path / "new", "exit 1")))
    quantization.check_quantizable(CONFIG, config)


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


def test_failure_of_the_child_process_is_reported(
    model: LoadableModel, dataset: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = make_environment(tmp_path / "environment", "echo no memory >&2; exit 3")
    monkeypatch.setenv("TUNELINE_QUANTIZATION_ENV", str(environment))
    with pytest.raises(CalibrationError, match="llm-compressor failed with status 3: no memory"):
        load_or_quantize(model, dataset, "int4-gptq", tmp_path / "state", seed=1, reporter=SilentReporter())
    assert not list((tmp_path / "state" / "quantized_weights").iterdir())


@pytest.mark.long  # imports llm-compressor three times
@NEEDS_ENVIRONMENT
def test_calibrated_weights_are_deterministic_reused_and_repaired(
    model: LoadableModel, dataset: Artifact, tmp_path: Path
) -> None:
    def quantize(state: str, seed: int = 1) -> calibrated_weights.CalibratedWeights:
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
