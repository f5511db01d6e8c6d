"""Speed of this machine: the rate of a matrix product, and measured start times of the steps of a run."""

from __future__ import annotations

import time

from components.common.models.model_shape import ModelShape

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
