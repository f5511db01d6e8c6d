"""Gradients of training rows with respect to the adapter, one backward pass per row, cached by model and dataset.

The published weights are the only checkpoint: tuneline deletes the others when training ends.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.common.artifacts import artifact_folder, hashing
from components.common.models import compute_devices, model_loading, resource_formulas
from components.common.models.adaptations import find_adaptation
from components.common.models.model_loading import LoadableModel
from components.common.models.model_shape import ModelShape
from components.common.runtime import filesystem
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders

if TYPE_CHECKING:
    import torch

    from components.fine_tuning.objectives import Example

CACHE_VERSION = 1  # increment when the values in the cache change
# Longer gradients are projected to this length. The inner product of two projections differs from that of the gradients
# by 1/√length of the product of their norms (standard deviation): 0.8%. 64 KiB a row.
SKETCH_LENGTH = 16_384
SKETCH_SEED = 0
LAST_LAYERS = 2  # of a model without an adapter, the layers whose weight matrices have gradients
ROWS_PER_FILE = 32
TIMED_ROWS = 3  # before the estimate
LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class GradientCost:
    """Measured cost of the gradients.

    Attributes:
        computed: Rows whose gradients were computed.
        cached: Rows whose gradients were in the cache.
        estimated_seconds: Estimate after the first rows; None if fewer were computed.
        seconds: Duration.
        memory_bytes: Estimated peak memory.
        cache_bytes: Size of these rows' gradients in the cache.
    """

    computed: int
    cached: int
    estimated_seconds: float | None
    seconds: float
    memory_bytes: int
    cache_bytes: int


class GradientSketch:
    """Gradients of the loss with respect to some parameters, projected if they are long.

    Args:
        model: The transformers model or peft.PeftModel, in evaluation mode.
        parameters: The parameters.
        length: Length of a projection.
    """

    # CountSketch (Charikar et al., 2002): every number is added, with a random sign, to one random entry of the
    # projection. TRAK (Park et al., arXiv 2303.14186) projects gradients for the same purpose.

    def __init__(self, model: Any, parameters: Sequence[torch.Tensor], length: int = SKETCH_LENGTH) -> None:
        import torch

        self._model, self._parameters = model, list(parameters)
        self.size = sum(parameter.numel() for parameter in self._parameters)
        self.length = min(length, self.size)
        self._targets: torch.Tensor | None = None
        if self.size > length:
            generator = torch.Generator().manual_seed(SKETCH_SEED)
            self._targets = torch.randint(length, (self.size,), generator=generator, dtype=torch.int32)
            self._signs = torch.randint(2, (self.size,), generator=generator, dtype=torch.int8) * 2 - 1

    def compute(self, examples: Sequence[Example]) -> np.ndarray:
        """Return the gradient of the mean loss of the labelled tokens of a row's examples, float32, shape (length,)."""
        import torch
        from torch.nn.functional import cross_entropy

        count = sum(label >= 0 for example in examples for label in example["labels"][1:])
        if not count:
            raise ValueError("a row without labelled tokens has no gradient")
        device, total = self._model.device, torch.zeros(self.size)
        for example in examples:  # one at a time, so that the activations of only one are in memory
            ids = torch.tensor([example["input_ids"]], device=device)
            labels = torch.tensor(example["labels"][1:], device=device)
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = cross_entropy(logits.float(), labels, reduction="sum") / count
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            parts = [
                torch.zeros(parameter.numel()) if gradient is None else gradient.detach().float().flatten().cpu()
                for gradient, parameter in zip(gradients, self._parameters, strict=True)
            ]
            total += torch.cat(parts)
        values: np.ndarray = self.project(total).numpy()
        return values

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the projection of a gradient, shape (size,) → (length,); a short gradient remains as it is."""
        import torch

        if self._targets is None:
            return gradient
        return torch.zeros(self.length).index_add_(0, self._targets, gradient * self._signs)


def check_support(model: LoadableModel) -> None:
    """Check that the gradients of the model's training rows can be computed.

    Raises:
        ConfigurationError: the adapter has virtual tokens, or the training compared answers.
    """
    from components.fine_tuning.objectives import OBJECTIVES

    config = model.artifact.manifest.config if model.artifact else {}
    objective = config.get("objective", "sft")
    if objective not in OBJECTIVES or not OBJECTIVES[objective].is_causal:
        raise ConfigurationError(
            f"training rows of the objective {objective} are not supported; expected sft or text",
            hint="Omit --training-data to explain only the words of the prompt.",
        )
    peft_type = _read_peft_type(model)
    adaptation = find_adaptation(peft_type) if peft_type else None
    if peft_type and (adaptation is None or adaptation.is_prompt_based):
        raise ConfigurationError(
            f"training rows of the adaptation {peft_type} are not supported: its virtual tokens have no low-rank gradients; "
            "expected lora, qlora, ia3 or full",
            hint="Omit --training-data to explain only the words of the prompt.",
        )


def _read_peft_type(model: LoadableModel) -> str:
    if model.adapter is None:
        return ""
    settings = json.loads((model.adapter / model_loading.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return str(settings.get("peft_type", ""))


def select_parameters(loaded: Any) -> dict[str, torch.Tensor]:
    """Return the parameters whose gradients represent a row: the adapter's, else the matrices of the last layers.

    The other parameters are frozen.

    Raises:
        ConfigurationError: a model without an adapter has no numbered layers.
    """
    named = dict(loaded.named_parameters())
    if hasattr(loaded, "peft_config"):
        selected = {name: value for name, value in named.items() if value.requires_grad}
    else:
        matrices = {
            name: int(match[1])
            for name, value in named.items()
            if value.dim() == 2 and (match := LAYER_NUMBER.search(name))
        }
        first = max(matrices.values(), default=0) - LAST_LAYERS + 1
        selected = {name: named[name] for name, number in matrices.items() if number >= first}
    if not selected:
        raise ConfigurationError(
            "training rows of this architecture are not supported: it has neither an adapter nor numbered layers",
            hint="Omit --training-data to explain only the words of the prompt.",
        )
    for name, value in named.items():
        value.requires_grad_(name in selected)
    return selected


def check_memory(loaded: Any, parameters: Mapping[str, torch.Tensor], rows: int, longest: int) -> int:
    """Return the estimated peak memory of the gradients and the kernel in bytes.

    Args:
        loaded: The loaded model.
        parameters: The parameters with gradients.
        rows: Number of rows.
        longest: Length of the longest row in tokens.

    Raises:
        ConfigurationError: the estimate exceeds the free memory; the message has the estimate by part.
    """
    counted = {
        "all": sum(value.numel() for value in loaded.parameters()),
        "trainable": sum(value.numel() for value in parameters.values()),
        "embedding": 0,
    }
    device = loaded.device.type
    base = loaded.get_base_model() if hasattr(loaded, "get_base_model") else loaded
    shape = ModelShape.from_configuration(base.config, counted)
    parts = resource_formulas.estimate_training_memory(
        shape, rows=1, length=longest, dropout=False, gpu=device != "cpu", optimizer_bytes=0.0, whole_logits=True
    )
    del parts["total"], parts["optimizer"]
    length = min(SKETCH_LENGTH, counted["trainable"])
    parts["projection"] = counted["trainable"] * (4 + 1 + 4 + 4) if counted["trainable"] > SKETCH_LENGTH else 0
    parts["rows"], parts["kernel"] = rows * length * (4 + 8), 3 * rows * rows * 8
    total = sum(parts.values())
    free = compute_devices.get_free_memory_bytes("cpu")
    needed = total - parts["weights"] - parts["process"]  # these are in memory already
    if needed > resource_formulas.MAX_MEMORY_FRACTION * free:
        details = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
        raise ConfigurationError(
            f"the gradients of {rows:,} rows need an estimated {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free "
            f"(GB by part: {details})",
            hint="Lower --rows, or use a machine with more memory.",
        )
    return total


def compute_row_gradients(
    sketch: GradientSketch,
    rows: Mapping[int, Sequence[Example]],
    key: Mapping[str, Any],
    state: Path,
    memory_bytes: int,
    reporter: Reporter,
) -> tuple[np.ndarray, GradientCost]:
    """Return the gradients of the rows, shape (rows, length), in their order; compute only those not in the cache.

    After an interruption, the same call continues with the rows that are not stored.

    Args:
        sketch: Computes a gradient.
        rows: The examples of each row by its number in the training split.
        key: Values that determine the gradients, in addition to the code's version.
        state: Folder of unfinished work; the cache is in `state`/explanation/<key>.
        memory_bytes: Estimated peak memory, for the cost.
        reporter: Receives progress and the estimate.

    Raises:
        BusyError: another command computes the gradients of this model.
    """
    folder = state / "explanation" / hashing.digest({**key, "length": sketch.length, "version": CACHE_VERSION})
    folder.mkdir(parents=True, exist_ok=True)
    start, estimate = time.monotonic(), None
    with job_folders.folder_lock(folder):
        known = _load_cache(folder, sketch.length, rows)
        missing = [number for number in rows if number not in known]
        cached = len(rows) - len(missing)
        cached_rows = format_count(cached, "row is", "rows are")
        reporter.step(f"computing the gradients of {format_count(len(missing), 'row')}; {cached_rows} cached")
        pending: dict[int, np.ndarray] = {}
        for done, number in enumerate(missing, 1):
            pending[number] = sketch.compute(rows[number])
            if done == TIMED_ROWS and len(missing) > TIMED_ROWS:
                estimate = (time.monotonic() - start) / done * len(missing)
                reporter.note(
                    f"estimated time of the gradients: {estimate:.0f} s ({format_count(len(missing), 'row')})"
                )
            if len(pending) == ROWS_PER_FILE or done == len(missing):
                _store(folder, pending)
                known |= pending
                pending = {}
            reporter.progress(done, len(missing), "rows")
    seconds = time.monotonic() - start
    values = np.stack([known[number] for number in rows])
    cost = GradientCost(len(missing), cached, estimate, seconds, memory_bytes, values.nbytes)
    return values, cost


def _load_cache(folder: Path, length: int, wanted: Container[int]) -> dict[int, np.ndarray]:
    """Return the stored gradients of the wanted rows by row number; remove damaged files."""
    known: dict[int, np.ndarray] = {}
    for path in sorted(folder.glob("rows-*.npy")):
        try:
            table: np.ndarray = np.load(path, allow_pickle=False)
        except (ValueError, EOFError):
            table = np.empty((0, 0))
        if table.dtype.names != ("number", "gradient") or table["gradient"].shape[1:] != (length,):
            path.unlink(missing_ok=True)
            continue
        stored = zip(table["number"].tolist(), table["gradient"], strict=True)
        known |= {number: gradient for number, gradient in stored if number in wanted}
    return known


def _store(folder: Path, gradients: Mapping[int, np.ndarray]) -> None:
    """Write gradients to a new file of the cache, atomically."""
    length = len(next(iter(gradients.values())))
    table: np.ndarray = np.zeros(len(gradients), dtype=[("number", "<i8"), ("gradient", "<f4", (length,))])
    table["number"], table["gradient"] = list(gradients), list(gradients.values())
    path = folder / f"rows-{hashing.digest(list(gradients))[:16]}.npy"
    draft = path.with_name(f".{path.name}.part")
    with draft.open("wb") as file:
        np.save(file, table, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    filesystem.rename(draft, path)
    artifact_folder.fsync(folder)
