"""What of a model its memory and work follow from, by formula.

Sizes in bytes, work in floating-point operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLOAT32, BFLOAT16 = 4, 2
PROCESS = 500_000_000  # bytes of a process with torch, transformers and TRL loaded, before any model; measured on Linux x86-64
# Logits, their log-softmax and the gradients of both, and what TRL makes of them for entropy and accuracy. With eight, the total met
# measured peaks of LoRA and full training on 64 to 1,024 tokens within 16%.
LOGIT_COPIES = 8


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
