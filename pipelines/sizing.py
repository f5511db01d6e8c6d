"""Memory, disk and work of a customization by formula, before anything is run, and what its steps take to start.

Sizes in bytes, work in floating-point operations, times in seconds.
"""

from __future__ import annotations

from typing import Any

from components.common.shape import BFLOAT16, FLOAT32, PROCESS, Shape

# How much of a plain matrix product's rate a training step reaches. The demo's did half of it on two idle cores.
EFFICIENCY = 0.5
# Seconds that a step takes before and after its work: a Python is started, kfp, torch, transformers, TRL and MLflow are imported, the
# tracking store is opened. Taken from the events of a run of a tiny model on two cores of an AMD EPYC (Zen 4): from the end of the step
# before to this one's own end, without what it then did with its rows. `run` is the command around the steps.
START = {
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


def evaluation_memory(shape: Shape, *, batch_tokens: int, gpu: bool) -> int:
    """Weights of one model, and the logits of a batch with their log-softmax (nothing is kept for gradients)."""
    return shape.parameters * (BFLOAT16 if gpu else FLOAT32) + batch_tokens * shape.vocabulary * FLOAT32 * 2 + PROCESS


def packaging_memory(shape: Shape, *, proven: bool) -> int:
    """The adapter is merged in float32; for the proof a server holds the merged model beside it."""
    one = shape.parameters * FLOAT32 + PROCESS
    return 2 * one if proven else one


def checkpoint(shape: Shape, *, full: bool) -> int:
    """Bytes of a checkpoint: what is trained in float32, and Adam's two moments of it. (2 + 12 bytes a parameter in mixed precision,
    MLPerf Storage; 4 + 8 here.) The trainer writes the whole model for adaptation full."""
    return (shape.parameters if full else shape.trainable) * FLOAT32 + shape.trainable * 2 * FLOAT32


def matmul_rate(shape: Shape, *, rows: int, seconds: float = 1.0) -> float:
    """Floating-point operations a second of this machine, measured on a product of the model's own shape for at most `seconds`."""
    import time

    import torch

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    inner, outer, tokens = min(shape.hidden, 8192), min(shape.intermediate, 8192), min(rows, 4096)
    left, right = torch.ones(tokens, inner, device=device, dtype=dtype), torch.ones(inner, outer, device=device, dtype=dtype)
    _product(left, right, gpu)  # the first one starts threads
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        _product(left, right, gpu)
        done += 1
    return 2 * tokens * inner * outer * done / (time.perf_counter() - began)


def _product(left: Any, right: Any, gpu: bool) -> None:
    import torch

    torch.mm(left, right)
    if gpu:
        torch.cuda.synchronize()
