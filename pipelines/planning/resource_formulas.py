"""Formulas for the memory, disk and work of a customization, and measured start times of its steps.

Sizes are in bytes, work in floating-point operations, times in seconds.
"""

from __future__ import annotations

import time

from components.common.models.model_shape import BFLOAT16_BYTES, FLOAT32_BYTES, PROCESS_BYTES, ModelShape

# Share of a plain matrix product's rate that a training step reaches; measured with the demo on two idle cores.
TRAINING_EFFICIENCY = 0.5
# Seconds that a step takes in addition to its work: start Python, import kfp, torch, transformers, TRL and MLflow, and
# open the tracking store. From the events of a run of a tiny model on two cores of an AMD EPYC (Zen 4): from the end of the
# previous step to the step's own end, without the work on rows. `run` is the command around the steps.
START_SECONDS = {
    "run": 3.4,
    "resolve": 1.7,
    "data_curation": 2.7,
    "data_versioning": 3.2,
    "fine_tuning": 7.0,
    "evaluation": 8.0,
    "triton_packaging": 4.9,
    "registration": 3.7,
    "promotion": 2.3,
    "report": 2.6,
}
MAX_MATMUL_SIZE = 8192
MAX_MATMUL_ROWS = 4096


def estimate_evaluation_memory(shape: ModelShape, *, batch_tokens: int, gpu: bool) -> int:
    """Return the size of one model's weights and of a batch's logits with their log-softmax; no gradients."""
    return (
        shape.parameters * (BFLOAT16_BYTES if gpu else FLOAT32_BYTES)
        + batch_tokens * shape.vocabulary * FLOAT32_BYTES * 2
        + PROCESS_BYTES
    )


def estimate_packaging_memory(shape: ModelShape, *, proven: bool) -> int:
    """Return the size of the adapter's merge in float32; for verification a server loads the merged model too."""
    size = shape.parameters * FLOAT32_BYTES + PROCESS_BYTES
    return 2 * size if proven else size


def estimate_checkpoint_bytes(shape: ModelShape, *, full: bool) -> int:
    """Return the size of a checkpoint: trainable parameters in float32 and Adam's two moments of each.

    4 + 8 bytes per parameter; MLPerf Storage assumes 2 + 12 in mixed precision. With adaptation full the trainer writes
    the whole model.
    """
    return (shape.parameters if full else shape.trainable) * FLOAT32_BYTES + shape.trainable * 2 * FLOAT32_BYTES


def measure_matmul_rate(shape: ModelShape, *, rows: int, seconds: float = 1.0) -> float:
    """Measure this machine's floating-point operations per second on a matrix product of the model's shape.

    Args:
        shape: the model, whose hidden and intermediate sizes give the second matrix.
        rows: the rows of the first matrix, limited to MAX_MATMUL_ROWS.
        seconds: the duration of the measurement.
    """
    import torch

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    inner, outer = min(shape.hidden, MAX_MATMUL_SIZE), min(shape.intermediate, MAX_MATMUL_SIZE)
    tokens = min(rows, MAX_MATMUL_ROWS)
    left = torch.ones(tokens, inner, device=device, dtype=dtype)
    right = torch.ones(inner, outer, device=device, dtype=dtype)

    def multiply() -> None:
        torch.mm(left, right)
        if gpu:
            torch.cuda.synchronize()

    multiply()  # the first product starts threads
    started, products = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        multiply()
        products += 1
    return 2 * tokens * inner * outer * products / (time.perf_counter() - started)
