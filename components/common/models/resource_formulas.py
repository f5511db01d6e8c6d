"""Memory, work and checkpoint size of a model, estimated from its shape.

The training's memory check, the dry run and `tuneline size` share these formulas. The module imports neither torch nor
transformers. Sizes are in bytes, work in floating-point operations (FLOPs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.common.models.model_shape import ModelShape
from components.common.models.quantizations import find_quantization

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
# Whole logits of PyTorch's cross-entropy: their float32 values, the log-softmax, and the gradient.
UNFUSED_LOGIT_BYTES = 3 * FLOAT32_BYTES
# 4.5 × the buckets for reducing gradients and gathering weights, of 5e8 bfloat16 numbers each: "overlap_comm" in the
# DeepSpeed page of transformers' documentation.
ZERO3_BUFFER_BYTES = round(4.5 * 2 * 5e8 * BFLOAT16_BYTES)
MAX_MEMORY_FRACTION = 0.9  # of free memory; the estimate was within 16% of measured peaks, mostly above them
Offload = Literal["", "optimizer", "all"]


@dataclass(frozen=True)
class ParallelLayout:
    """The distribution of a training run over processes, one per GPU.

    Attributes:
        data: data-parallel processes.
        tensor: processes that share each layer.
        pipeline: groups of layers.
        context: processes that share each row.
        stage: ZeRO stage, 0 to 3. FSDP is stage 3.
        buffer_bytes: communication buffers of DeepSpeed, in place of the whole layers that a process of stage 3 gathers.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    stage: int = 0
    buffer_bytes: int = 0

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """The number of processes over which ZeRO and FSDP distribute."""
        return self.data * self.context

    def split(self, size: float, stage: int) -> int:
        """Return a process's share of a size that ZeRO distributes from this stage on."""
        return round(size / (self.tensor * self.pipeline * (self.shards if self.stage >= stage else 1)))


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
    masked_attention: bool = False,
    whole_logits: bool = False,
    logit_bytes: float | None = None,
    master_weights: bool = True,
    offload: Offload = "",
    optimizer_in_backward: bool = False,
    reference: bool = False,
    layout: ParallelLayout | None = None,
) -> dict[str, int]:
    """Estimate the peak memory of a training step, in bytes.

    Frozen weights are float32 on a CPU and bfloat16 on a GPU. Trained weights are float32 with Adam's two moments: 16
    bytes per parameter (4 weights, 4 gradients, 8 optimizer), as in EleutherAI's cookbook for mixed precision; a GPU
    also holds the bfloat16 copy that it computes with, which was not measured for full training.

    Activations: `_count_activations` numbers per token, in the compute precision. Logits: `_estimate_logit_bytes`.

    ZeRO and FSDP distribute the optimizer's state and float32 weights (stage 1), the gradients (2) and all weights (3)
    over the data-parallel processes (Rajbhandari et al., arXiv 1910.02054). In stage 3, a process also gathers whole
    layers: `_estimate_gathered_bytes`. Tensor parallelism with sequence parallelism divides everything, as in Korthikanti
    et al.; pipeline parallelism divides the weights, but its first stage holds the activations of as many micro-batches
    as there are stages.

    Args:
        rows: number of rows in memory at once.
        length: number of tokens per row.
        dropout: whether dropout precedes a low-rank update.
        gpu: whether the model is trained on a GPU.
        checkpointing: whether activations are recomputed in the backward pass.
        optimizer_bytes: bytes of the optimizer's state for each trained parameter; 8 for AdamW.
        four_bit: whether the frozen matrices of the layers have 4 bits per weight.
        fused: whether the layers on a GPU are fused or compiled.
        masked_attention: whether PyTorch's `sdpa` on a GPU separates rows, or padding, by a mask.
        whole_logits: whether the loss needs the logits of all tokens at once on a GPU too.
        logit_bytes: bytes per token and vocabulary entry of whole logits. None: LOGIT_COPIES in float32.
        master_weights: whether trained weights are float32. False: weights and gradients have the compute precision.
        offload: what the host's memory holds: the optimizer's state with the float32 weights, or all states.
        optimizer_in_backward: whether each gradient is applied and freed at once, so that one layer has gradients.
        reference: whether a frozen copy of the model computes the reference of the loss. An adapter needs no copy,
            because the reference is the model without it.
        layout: distribution over processes. None: one process.

    Returns:
        Bytes by part: {"weights", "gradients", "optimizer", "activations", "logits", "process", "total"}, and
        "reference" if there is one.
    """
    width, layout = BFLOAT16_BYTES if gpu else FLOAT32_BYTES, layout or ParallelLayout()
    has_master = master_weights and not offload
    copy_width = BFLOAT16_BYTES if gpu and has_master else 0
    trained_width = FLOAT32_BYTES if has_master else width
    with_gradients = shape.trainable
    if optimizer_in_backward:
        with_gradients = min(shape.trainable, max(_count_layer_parameters(shape), shape.vocabulary * shape.hidden))
    tokens, token_shards = rows * length, layout.tensor * layout.context
    numbers = _count_activations(shape, dropout, gpu, checkpointing, fused, masked_attention)
    logits = _estimate_logit_bytes(shape, tokens, logit_bytes, is_tiled=gpu and not whole_logits)
    parts = {
        "weights": layout.split(_estimate_frozen_bytes(shape, width, four_bit) + shape.trainable * copy_width, 3)
        + layout.split(shape.trainable * trained_width, 1 if copy_width else 3),
        "gradients": layout.split(with_gradients * trained_width, 2),
        "optimizer": 0 if offload else layout.split(shape.trainable * optimizer_bytes, 1),
        "activations": round(tokens * numbers * width / token_shards),
        "logits": round(logits / token_shards),
        "process": PROCESS_BYTES,
    }
    if offload == "all":
        parts |= {"weights": 0, "gradients": 0}
    if reference:
        parts["reference"] = layout.split(shape.parameters * width, 3)
    parts["weights"] += _estimate_gathered_bytes(shape, layout, width, four_bit)
    return {**parts, "total": sum(parts.values())}


def _count_end_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the input embedding and the output head, which they may share."""
    return (2 if shape.embedding else 1) * shape.vocabulary * shape.hidden


def _count_layer_parameters(shape: ModelShape) -> int:
    return (shape.parameters - _count_end_parameters(shape)) // shape.layers


def _estimate_frozen_bytes(shape: ModelShape, width: int, four_bit: bool) -> float:
    """Return the size of the frozen weights; with `four_bit`, embedding and output head keep the compute precision."""
    if not four_bit:
        return float(shape.frozen * width)
    frozen_ends = min(_count_end_parameters(shape), shape.frozen)
    return frozen_ends * width + (shape.frozen - frozen_ends) * NF4_BYTES


def _estimate_gathered_bytes(shape: ModelShape, layout: ParallelLayout, width: int, four_bit: bool) -> int:
    """Return the size of the weights that a process gathers in stage 3: the layer that computes, and the next or the head."""
    if layout.buffer_bytes:
        return layout.buffer_bytes
    if layout.stage < 3 or layout.shards == 1:
        return 0
    layer_bytes = _count_layer_parameters(shape) * (NF4_BYTES if four_bit else width)
    head_bytes = shape.vocabulary * shape.hidden * width
    return round((layer_bytes + max(layer_bytes, head_bytes)) / layout.tensor)


def _estimate_logit_bytes(shape: ModelShape, tokens: int, logit_bytes: float | None, *, is_tiled: bool) -> float:
    """Return the size of a GPU's tile of the logits, or of whole logits: by default LOGIT_COPIES times 4·V bytes per token."""
    if is_tiled:
        return tokens * min(shape.vocabulary, GPU_LOGIT_TILE) * BFLOAT16_BYTES
    return tokens * shape.vocabulary * (FLOAT32_BYTES * LOGIT_COPIES if logit_bytes is None else logit_bytes)


def _count_activations(
    shape: ModelShape, dropout: bool, gpu: bool, checkpointing: bool, fused: bool, masked_attention: bool
) -> int:
    """Return the numbers that all layers keep per token for the backward pass.

    CPU: Korthikanti et al. (arXiv 2205.05198): 9h + 4i numbers per token and layer with a gated MLP.

    Fused or compiled layers on a GPU: 4h + 2q + 2k + 3i: input and output of two norms, queries and output of the
    attention (q), keys and values (k), and three of the MLP. Other layers on a GPU add the float32 values of the norms
    and the gate's activation, 6h + i; this was not measured. Attention with a mask on a GPU repeats keys and values for
    every query head and copies queries and output, 4q − 2k: measured within 1% with an 8B model. The attention matrix
    is left out, because scaled dot-product attention does not store it.

    Dropout before a low-rank update adds the adapted inputs and their masks: 12h + 2i. With activation checkpointing,
    every layer keeps its input only, h numbers per token, and one layer at a time has all.
    """
    queries, keys = shape.query_width or shape.hidden, shape.key_width or shape.hidden
    numbers = 9 * shape.hidden + 4 * shape.intermediate
    if gpu:
        numbers = 4 * shape.hidden + 2 * queries + 2 * keys + 3 * shape.intermediate
        if not fused:
            numbers += 6 * shape.hidden + shape.intermediate
        if masked_attention:
            numbers += 4 * queries - 2 * keys
    if dropout:
        numbers += 12 * shape.hidden + 2 * shape.intermediate
    return numbers + shape.layers * shape.hidden if checkpointing else shape.layers * numbers


def estimate_training_flops(
    shape: ModelShape, length: float, *, causal: bool = True, checkpointing: bool = False
) -> float:
    """Estimate the FLOPs per trained token.

    Full training of N parameters: 6(N−E) + 6·L·q·T, within 0.1% of the published figures of Megatron-Bridge. With N
    frozen weights: 4(N−E) + 4·L·q·T, plus 6 per trained parameter, within 0.2% of NeMo AutoModel's LoRA figures. Frozen
    weights have no weight gradient. E is the number of parameters of the input embedding, which is a lookup. L is the
    number of layers, and q the size of the queries. Parameters of experts that a token does not use do not count.

    Args:
        length: T, the number of tokens per row.
        causal: whether a token attends to earlier ones only. False counts the whole matrix, as many papers do.
        checkpointing: whether the backward pass repeats the forward pass.
    """
    forward = estimate_forward_flops(shape, length, causal=causal)
    repeated = forward if checkpointing else 0.0
    if not shape.frozen:
        return 3 * forward + repeated
    return 2 * (forward - 2 * shape.trainable) + 6 * shape.trainable + repeated


def estimate_forward_flops(shape: ModelShape, length: float, *, causal: bool = True) -> float:
    """Estimate the FLOPs per token of a forward pass: a third of full training.

    Args:
        length: number of tokens per row.
        causal: as for `estimate_training_flops`.
    """
    attention = (2 if causal else 4) * shape.layers * (shape.query_width or shape.hidden) * length
    return 2 * (shape.parameters - shape.embedding - shape.inactive) + attention


def estimate_cache_bytes(shape: ModelShape, *, value_bytes: float = BFLOAT16_BYTES) -> float:
    """Return the size of the keys and values of one token in all layers: 2·L·k values."""
    return 2 * shape.layers * (shape.key_width or shape.hidden) * value_bytes


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


def estimate_calibration_memory(shape: ModelShape, *, tokens: float) -> int:
    """Return the memory in which llm-compressor calibrates weights on rows with this number of tokens, on the host.

    The weights are float32. Each token has the input and the output of one layer. The largest matrix product of inputs
    (Hessian) exists twice. The process that waits for the result adds its packages.
    """
    states = 2 * tokens * shape.hidden + 2 * shape.intermediate**2
    return round((shape.parameters + states) * FLOAT32_BYTES) + 2 * PROCESS_BYTES


def estimate_calibration_flops(shape: ModelShape, *, tokens: float, length: float) -> float:
    """Return the operations of a calibration: two forward passes, and about one more for the Hessians and GPTQ."""
    return 3 * tokens * estimate_forward_flops(shape, length)


def estimate_checkpoint_bytes(shape: ModelShape, *, full: bool) -> int:
    """Return the size of a checkpoint: trainable parameters in float32 and Adam's two moments of each.

    4 + 8 bytes per parameter; MLPerf Storage assumes 2 + 12 in mixed precision. With adaptation full the trainer writes
    the whole model, and of a model with experts, also every trained tensor under its parameter's name.
    """
    saved = shape.parameters if full else shape.trainable
    if full and shape.inactive:
        saved += shape.trainable
    return (saved + 2 * shape.trainable) * FLOAT32_BYTES


def estimate_model_bytes(shape: ModelShape, *, whole: bool) -> int:
    """Return the size of a published model in float32: all weights, or those of the adapter."""
    return (shape.parameters if whole else shape.trainable) * FLOAT32_BYTES


def estimate_repository_bytes(shape: ModelShape, *, gpu: bool, quantization: str = "none") -> int:
    """Return the size of the weights in a Triton model repository; bfloat16 for a GPU.

    int8: one byte for each weight, those of the output layer included, and two for each of the input embedding.
    Formats of compressed-tensors: their bits per weight, without the input embedding and the output layer, which are
    counted separately even if they share their weights. Calibrated formats have no weights in float32.
    """
    full = BFLOAT16_BYTES if gpu else FLOAT32_BYTES
    entry = find_quantization(quantization)
    if entry and entry.preset:
        full = BFLOAT16_BYTES if entry.is_calibrated else full
        tables = shape.embedding + shape.vocabulary * shape.hidden
        scales = BFLOAT16_BYTES / min(entry.group_sizes) if entry.group_sizes else 0
        return round((shape.parameters - tables) * (entry.weight_bits / 8 + scales)) + full * tables
    if quantization == "int8":
        table = shape.vocabulary * shape.hidden  # of the input embedding and of the output layer
        return shape.parameters - shape.embedding + BFLOAT16_BYTES * table
    return shape.parameters * full


def estimate_loading_memory(shape: ModelShape, *, processes: int, sharded: bool, full: bool) -> int:
    """Return the host memory in which the processes of one node load a model for training on GPUs.

    Without sharding, each process loads the model into host memory, in float32 if all weights are trained. With
    sharding, each process reads its shard onto its device.
    """
    weights = 0 if sharded else shape.parameters * (FLOAT32_BYTES if full else BFLOAT16_BYTES)
    return processes * (weights + PROCESS_BYTES)
