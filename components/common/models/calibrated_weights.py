"""Quantized weights that are calibrated on training rows, shared by the evaluation and the package.

llm-compressor runs in a child process in the quantization environment. The result is kept in the state folder, so that
the package contains the weights that were evaluated.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import encoded_rows, model_loading, quantization_env
from components.common.models.model_loading import LoadableModel
from components.common.models.quantizations import (
    CALIBRATION_ROWS,
    MAX_CALIBRATION_TOKENS,
    QUANTIZATIONS,
    find_quantization,
)
from components.common.runtime import cpu_cores, process_control
from components.common.runtime.errors import ConfigurationError, InputError, TunelineError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

STATE_FOLDER, STATEMENT_FILENAME = "quantized_weights", "calibration.json"
# By its dotted name, because the code digests of stages follow such strings.
WORKER_MODULE = "components.common.models.calibration_worker"
WORKER = Path(__file__).with_name(WORKER_MODULE.rpartition(".")[2] + ".py")
# Tokens of other services are not passed on, and nothing is downloaded.
PASSED_VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES")
PASSED_PREFIXES = ("CUDA_", "HIP_", "ROCR_", "OMP_")


@dataclass(frozen=True)
class QuantizationJob:
    """The input of `calibration_worker`: paths, token ids of the calibration rows, and the scheme."""

    model: str
    output: str
    rows: list[list[int]]
    preset: str
    group_size: int
    threads: int


@dataclass(frozen=True)
class CalibratedWeights:
    """Quantized weights in the layout of transformers, and what determined them.

    Attributes:
        statement: {"split", "rows", "tokens", "dataset_sha256", "sha256", "recipe_sha256", "weights_sha256", "engine",
            "packages"}. `sha256` is the digest of the rows' token ids; `weights_sha256` that of all files.
    """

    folder: Path
    statement: Mapping[str, str | int]


class CalibrationError(TunelineError):
    """llm-compressor failed."""

    kind = "quantization"


def load_if_calibrated(
    quantization: str,
    model: LoadableModel,
    dataset: Artifact,
    state: Path,
    *,
    seed: int,
    reporter: Reporter,
    expected_sha256: str = "",
) -> CalibratedWeights | None:
    """Return the weights of `load_or_quantize`, or None for a format without calibration.

    Args:
        expected_sha256: the weights' digest in the model's evaluation; "" if unknown.

    Raises:
        CalibrationError: the digest is another one.
    """
    entry = find_quantization(quantization)
    if entry is None or not entry.is_calibrated:
        return None
    weights = load_or_quantize(model, dataset, quantization, state, seed=seed, reporter=reporter)
    found = str(weights.statement["weights_sha256"])
    if expected_sha256 and found != expected_sha256:
        raise CalibrationError(
            f"calibration results in the {quantization} weights {found[:12]}; the evaluation measured {expected_sha256[:12]}",
            hint="Set TUNELINE_THREADS to the value of the evaluation and use the same device type, or change the seed to "
            "evaluate the model again.",
        )
    return weights


def load_or_quantize(
    model: LoadableModel, dataset: Artifact, quantization: str, state: Path, *, seed: int, reporter: Reporter
) -> CalibratedWeights:
    """Return a model's calibrated weights from `state`; quantize the model if they are missing or damaged.

    An interrupted quantization starts again. Equal inputs give equal weights on the same device type with the same thread
    count.

    Args:
        model: The model; an adapter is merged.
        dataset: The dataset whose training split is the calibration data.
        quantization: A key of QUANTIZATIONS whose entry is calibrated.
        seed: Seed of the selection of the rows.

    Raises:
        ConfigurationError: the quantization environment does not exist.
        InputError: the training split has no row with an answer.
        CalibrationError: llm-compressor fails.
    """
    quantization_env.check_environment(quantization)
    rows = _read_calibration_rows(model, dataset, seed)
    calibration_sha256 = hashing.digest(rows)
    packages, code = quantization_env.list_versions(), [hashing.sha256_file(path) for path in (WORKER, Path(__file__))]
    inputs = [model.sha256, model.base.sha256, asdict(QUANTIZATIONS[quantization]), calibration_sha256]
    key = hashing.digest([*inputs, packages, *code])
    folder = state / STATE_FOLDER / key
    if found := _load(folder):
        weights = str(found.statement["weights_sha256"])[:12]
        reporter.note(f"using the {quantization} weights {weights} from the state folder")
        folder.touch()  # garbage collection reads the time of the last use
        return found
    reporter.step(f"calibrating {quantization} weights on {len(rows)} training rows")
    with job_folders.private_folder(folder.parent, ".quantizing") as work:
        output = _run_worker(model, quantization, rows, work, folder.with_suffix(".log"))
        statement: dict[str, str | int] = {
            "split": "train",
            "rows": len(rows),
            "tokens": sum(map(len, rows)),
            "dataset_sha256": dataset.sha256,
            "sha256": calibration_sha256,
            "recipe_sha256": hashing.sha256_file(output / "recipe.yaml"),
            "weights_sha256": _digest_weights(output),
            "engine": quantization_env.REQUIREMENTS[0],
            "packages": ", ".join(packages),
        }
        artifact_folder.write_atomically(output / STATEMENT_FILENAME, json.dumps(statement, indent=1) + "\n")
        aside = folder.parent / ".aside"
        job_folders.move_into_place(output, folder, lambda: _load(folder), aside)
    shutil.rmtree(aside, ignore_errors=True)
    return _load(folder) or CalibratedWeights(folder, statement)


def load_quantized_model(folder: Path) -> PreTrainedModel:
    """Return calibrated weights as transformers computes with them, in the default precision on the default device."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=model_loading.get_default_dtype(), trust_remote_code=False
    )
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def select_group_size(model: PreTrainedModel, quantization: str) -> int:
    """Return the preferred group size of a format that divides the number of inputs of all quantized layers.

    Raises:
        ConfigurationError: there is no such size.
    """
    import torch

    sizes, output_layer = QUANTIZATIONS[quantization].group_sizes, model.get_output_embeddings()
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear and layer is not output_layer]
    widths = sorted({layer.in_features for layer in layers})
    for size in sizes:
        if all(width % size == 0 for width in widths):
            return size
    raise ConfigurationError(
        f"triton_packaging.quantization is {quantization}, but linear layers of the {model.config.model_type} model have "
        f"{', '.join(map(str, widths))} inputs; expected multiples of {min(sizes)}",
        hint="Set triton_packaging.quantization to fp8.",
    )


def _read_calibration_rows(model: LoadableModel, dataset: Artifact, seed: int) -> list[list[int]]:
    config = model_loading.load_configuration(model.base.path).get_text_config(decoder=True)
    max_length = min(MAX_CALIBRATION_TOKENS, getattr(config, "max_position_embeddings", None) or MAX_CALIBRATION_TOKENS)
    tokenizer = model_loading.load_tokenizer(model.tokenizer)
    items = encoded_rows.read_random_rows(
        dataset, "train", tokenizer, max_items=CALIBRATION_ROWS, max_length=max_length, seed=seed
    )
    if not items:
        raise InputError(
            f"the training split of {dataset.path} has no row with an answer; calibration requires at least 1",
            hint="Pass the dataset that the model was trained on, or set triton_packaging.quantization to none.",
        )
    return [item.ids for item in items]


def _run_worker(model: LoadableModel, quantization: str, rows: list[list[int]], work: Path, kept_log: Path) -> Path:
    """Merge the model, quantize it in a child process, and return the folder of the weights.

    Args:
        kept_log: path of the child's output after a failure.
    """
    import torch

    loaded = model_loading.load_model(model, trainable=True, dtype=torch.float32)  # stays on the CPU
    merged = loaded.merge_and_unload() if model.adapter else loaded
    group_size = select_group_size(merged, quantization)
    merged.bfloat16().save_pretrained(work / "merged")
    # llm-compressor loads the tokenizer.
    model_loading.save_tokenizer(model_loading.load_tokenizer(model.tokenizer), work / "merged")
    del loaded, merged
    gc.collect()
    job = QuantizationJob(
        str(work / "merged"),
        str(work / "output"),
        rows,
        QUANTIZATIONS[quantization].preset,
        group_size,
        cpu_cores.get_thread_count(),
    )
    (work / "quantization_job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [str(quantization_env.get_python()), "-I", str(WORKER), str(work / "quantization_job.json")]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_VARIABLES or name.startswith(PASSED_PREFIXES)
    }
    with (work / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            command,
            cwd=work,
            env={**variables, "HF_HOME": str(work / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            preexec_fn=process_control.die_with_parent,
        )
    if status := done.returncode:
        lines = (work / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        shutil.copyfile(work / "log.txt", kept_log)
        ended = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
        raise CalibrationError(
            f"llm-compressor failed with {ended}: {lines[-1] if lines else 'no output'}",
            hint=f"See {kept_log}. Free memory if the system killed the process, or set triton_packaging.quantization to fp8.",
        )
    return work / "output"


def list_files(folder: Path) -> list[Path]:
    """Return the files of calibrated weights, which `weights_sha256` covers."""
    return sorted(path for path in folder.iterdir() if path.name != STATEMENT_FILENAME)


def _load(folder: Path) -> CalibratedWeights | None:
    """Return complete and undamaged weights in a folder, or None."""
    try:
        statement = json.loads((folder / STATEMENT_FILENAME).read_text(encoding="utf-8"))
        is_intact = _digest_weights(folder) == statement["weights_sha256"]
    except (OSError, ValueError, KeyError):
        return None
    return CalibratedWeights(folder, statement) if is_intact else None


def _digest_weights(folder: Path) -> str:
    return hashing.content_sha256((path.name, hashing.sha256_file(path)) for path in list_files(folder))
