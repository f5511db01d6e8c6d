"""Memory and FLOPs of a model, estimated from its shape. Memory is in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
PROCESS_BYTES = 500_000_000  # with torch, transformers and TRL loaded, before any model; measured on Linux x86-64
# Logits, their log-softmax, the gradients of both, and TRL's copies for entropy and accuracy. With eight copies, the
# total is within 16% of the measured peaks of LoRA and full training on 64 to 1,024 tokens.
LOGIT_COPIES = 8
# TRL's output head for GPUs computes logits in bfloat16 tiles of this many entries of the vocabulary.
GPU_LOGIT_TILE = 32_768
# 4-bit NormalFloat with double quantization: a float8 constant for 64 weights, and a float32 one for 256 of these
# constants (Dettmers et al., arXiv 2305.14314, section 3).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that determine memory and FLOPs.

    Attributes:
        parameters: number of parameters of the base model and the adapter.
        trainable: number of parameters with gradients.
        embedding: number of parameters of the input embedding.
        layers: number of layers.
        hidden: size of the hidden states (h in the formulas below).
        intermediate: inner size of the MLP (i).
        vocabulary: number of tokens in the vocabulary (V).
        key_width: size of a token's keys in one layer (k); that of its values is equal. 0: the size of the hidden states.
    """

    parameters: int
    trainable: int
    embedding: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    key_width: int = 0

    @property
    def frozen(self) -> int:
        """The number of parameters without gradients."""
        return self.parameters - self.trainable

    @staticmethod
    def from_configuration(config: Any, counted: dict[str, int]) -> ModelShape:
        """Return the shape of a transformers configuration with these parameter counts.

        Args:
            config: transformers.PretrainedConfig.
            counted: numbers of parameters, {"all", "trainable", "embedding"}.
        """
        text = config.get_text_config()
        hidden = int(text.hidden_size)
        heads = getattr(text, "num_attention_heads", None)
        key_heads = getattr(text, "num_key_value_heads", None) or heads
        head_width = getattr(text, "head_dim", None) or (hidden // heads if heads else 0)
        return ModelShape(
            parameters=counted["all"],
            trainable=counted["trainable"],
            embedding=counted["embedding"],
            layers=int(text.num_hidden_layers),
            hidden=hidden,
            intermediate=int(getattr(text, "intermediate_size", None) or 4 * hidden),
            vocabulary=int(text.vocab_size),
            key_width=int((key_heads or 0) * head_width),
        )


def estimate_training_memory(
    shape: ModelShape,
    *,
    rows: int,
    length: int,
    dropout: bool,
    gpu: bool,
    checkpointing: bool = False,
    optimizer_bytes: float = 8.0,
    four_bit: bool = False,
    fused: bool = True,
    whole_logits: bool = False,
) -> dict[str, int]:
    """Estimate the peak memory of a training step, in bytes.

    Frozen weights are float32 on a CPU and bfloat16 on a GPU. Trained weights are float32 with Adam's two moments: 16
    bytes per parameter (4 weights, 4 gradients, 8 optimizer), as in EleutherAI's cookbook for mixed precision; a GPU
    also holds the bfloat16 copy that it computes with, which was not measured for full training.

    Activations on a CPU follow Korthikanti et al. (arXiv 2205.05198): 9h + 4i numbers per token and layer with a gated
    MLP. With fused or compiled layers on a GPU they are 6h + 2k + 3i: input and output of two norms, queries, keys,
    values and output of the attention, and three of the MLP. Other layers on a GPU add the float32 values of the norms
    and the gate's activation, 6h + i; this was not measured. The attention matrix is left out, because scaled
    dot-product attention does not store it. Dropout before a low-rank update adds the adapted inputs and their masks:
    12h + 2i. With activation checkpointing, every layer keeps its input only, h numbers per token, and one layer at a
    time has all.

    Logits on a CPU are float32: 4·V bytes per token, LOGIT_COPIES times. A GPU holds a tile of them.

    Args:
        rows: number of rows in memory at once.
        length: number of tokens per row.
        dropout: whether dropout precedes a low-rank update.
        gpu: whether the model is trained on a GPU.
        checkpointing: whether activations are recomputed in the backward pass.
        optimizer_bytes: bytes of the optimizer's state for each trained parameter; 8 for AdamW.
        four_bit: whether the frozen matrices of the layers have 4 bits per weight.
        fused: whether the layers on a GPU are fused or compiled.
        whole_logits: whether the loss needs the logits of all tokens at once on a GPU too.

    Returns:
        Bytes by part: {"weights", "gradients", "optimizer", "activations", "logits", "process", "total"}.
    """
    width = BFLOAT16_BYTES if gpu else FLOAT32_BYTES
    gpu_numbers = 6 * shape.hidden + 2 * (shape.key_width or shape.hidden) + 3 * shape.intermediate
    if not fused:
        gpu_numbers += 6 * shape.hidden + shape.intermediate
    numbers = gpu_numbers if gpu else 9 * shape.hidden + 4 * shape.intermediate
    if dropout:
        numbers += 12 * shape.hidden + 2 * shape.intermediate
    numbers = numbers + shape.layers * shape.hidden if checkpointing else shape.layers * numbers
    frozen_bytes = float(shape.frozen * width)
    if four_bit:
        ends = min((2 if shape.embedding else 1) * shape.vocabulary * shape.hidden, shape.frozen)
        frozen_bytes = ends * width + (shape.frozen - ends) * NF4_BYTES
    trained_width = FLOAT32_BYTES + (BFLOAT16_BYTES if gpu else 0)
    tokens = rows * length
    logits = tokens * shape.vocabulary * FLOAT32_BYTES * LOGIT_COPIES
    if gpu and not whole_logits:
        logits = tokens * min(shape.vocabulary, GPU_LOGIT_TILE) * BFLOAT16_BYTES
    parts = {
        "weights": round(frozen_bytes) + shape.trainable * trained_width,
        "gradients": shape.trainable * FLOAT32_BYTES,
        "optimizer": round(shape.trainable * optimizer_bytes),
        "activations": tokens * numbers * width,
        "logits": logits,
        "process": PROCESS_BYTES,
    }
    return {**parts, "total": sum(parts.values())}


def estimate_training_flops(shape: ModelShape, length: float) -> float:
    """Estimate the FLOPs per trained token.

    Full training of N parameters: 6(N−E) + 6·L·h·T, within 0.1% of the published figures of Megatron-Bridge. With N
    frozen weights: 4(N−E) + 4·L·h·T, plus 6 per trained parameter, within 0.2% of NeMo AutoModel's LoRA figures. Frozen
    weights have no weight gradient. E is the number of parameters of the input embedding, which is a lookup. L is the
    number of layers, and h the size of the hidden states.

    Args:
        length: T, the number of tokens per row.
    """
    attention = shape.layers * shape.hidden * length
    if not shape.frozen:
        return 6 * (shape.parameters - shape.embedding) + 6 * attention
    return 4 * (shape.frozen - shape.embedding) + 4 * attention + 6 * shape.trainable


def estimate_forward_flops(shape: ModelShape, length: float) -> float:
    """Estimate the FLOPs per token of a forward pass: a third of full training.

    Args:
        length: number of tokens per row.
    """
    return 2 * (shape.parameters - shape.embedding) + 2 * shape.layers * shape.hidden * length
