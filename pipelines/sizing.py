"""Memory, disk and work of a customization by formula, before anything is run, and what its steps take to start.

Sizes in bytes, work in floating-point operations, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLOAT32, BFLOAT16 = 4, 2
PROCESS = 500_000_000  # bytes of a process with torch, transformers and TRL loaded, before any model; measured on Linux x86-64
# Logits, their log-softmax and the gradients of both, and what TRL makes of them for entropy and accuracy. With eight, the total met
# measured peaks of LoRA and full training on 64 to 1,024 tokens within 16%.
LOGIT_COPIES = 8
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


@dataclass(frozen=True)
class Shape:
    """What of a model its memory and work follow from. `parameters` are those of the base and its update together."""

    parameters: int
    trainable: int
    embedding: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    @property
    def frozen(self) -> int:
        """Parameters that no gradient is computed for."""
        return self.parameters - self.trainable

    @staticmethod
    def of(config: Any, counted: dict[str, int]) -> Shape:
        """The shape of a transformers configuration, with the parameters that were counted for it."""
        text = config.get_text_config()
        hidden = int(text.hidden_size)
        return Shape(
            parameters=counted["all"],
            trainable=counted["trainable"],
            embedding=counted["embedding"],
            layers=int(text.num_hidden_layers),
            hidden=hidden,
            intermediate=int(getattr(text, "intermediate_size", None) or 4 * hidden),
            vocabulary=int(text.vocab_size),
        )


def training_memory(shape: Shape, *, rows: int, length: int, dropout: bool, gpu: bool) -> dict[str, int]:
    """{"weights", "gradients", "optimizer", "activations", "logits", "process", "total"} at the peak of a training step.

    `rows` of `length` tokens are in memory at once. Frozen weights are float32 on a CPU and bfloat16 on a GPU; what is trained is float32
    with Adam's two moments, 16 bytes a parameter (4 weights + 4 gradients + 8 optimizer, the sum of EleutherAI's cookbook for mixed
    precision). Activations by the method of Korthikanti et al. (arXiv 2205.05198), without the attention matrix, which scaled
    dot-product attention never holds, for a layer with a gated MLP: 9h + 4i numbers a token; dropout before a low-rank update
    keeps each adapted input and its mask besides, 12h + 2i. Logits are float32: 4·V bytes a token, LOGIT_COPIES times.
    """
    width = BFLOAT16 if gpu else FLOAT32
    numbers = 9 * shape.hidden + 4 * shape.intermediate
    if dropout:
        numbers += 12 * shape.hidden + 2 * shape.intermediate
    parts = {
        "weights": shape.frozen * width + shape.trainable * FLOAT32,
        "gradients": shape.trainable * FLOAT32,
        "optimizer": shape.trainable * 2 * FLOAT32,
        "activations": rows * length * shape.layers * numbers * width,
        "logits": rows * length * shape.vocabulary * FLOAT32 * LOGIT_COPIES,
        "process": PROCESS,
    }
    return {**parts, "total": sum(parts.values())}


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


def training_flops(shape: Shape, length: float) -> float:
    """A trained token's work: 6(N−E) + 6·L·h·T in full, 4(N−E) + 4·L·h·T where the weights are frozen and 6 for each number of the update.

    E are the parameters of an input embedding, which is a look-up; T is the row's length. (6(N−E) + 6LdT meets the published figures of
    Megatron-Bridge within 0.1%; frozen weights need no weight gradient, which meets NeMo AutoModel's LoRA figures within 0.2%.)
    """
    attention = shape.layers * shape.hidden * length
    if not shape.frozen:
        return 6 * (shape.parameters - shape.embedding) + 6 * attention
    return 4 * (shape.frozen - shape.embedding) + 4 * attention + 6 * shape.trainable


def forward_flops(shape: Shape, length: float) -> float:
    """A read token's work: a third of a fully trained one's."""
    return 2 * (shape.parameters - shape.embedding) + 2 * shape.layers * shape.hidden * length


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
