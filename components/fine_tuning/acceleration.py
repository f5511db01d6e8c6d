"""Compute settings of a training run: precision, attention kernel, fused layers, compilation, activation checkpointing.

`check_machine` rejects recipes that this machine cannot train. `choose_settings` returns the settings with reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING

from components.common.models import compute_devices
from components.common.models.model_shape import ModelShape
from components.common.models.resource_formulas import (
    BFLOAT16_BYTES,
    FLOAT32_BYTES,
    MAX_MEMORY_FRACTION,
    ZERO3_BUFFER_BYTES,
    ParallelLayout,
    estimate_cache_bytes,
    estimate_training_memory,
)
from components.common.runtime.errors import ConfigurationError, EngineMissingError
from components.fine_tuning import model_support, rewards, varlen_attention
from components.fine_tuning.config import FineTuningConfig, Recipe
from components.fine_tuning.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

BFLOAT16_DEVICES = ("cuda", "hpu")  # devices that compute in bfloat16 by default


@dataclass(frozen=True)
class ComputeSettings:
    """Compute settings of a training run. `reasons` has one sentence per setting."""

    device: str
    bfloat16: bool
    attention: str
    liger: bool
    compile: bool
    activation_checkpointing: bool
    reasons: list[str]


def has_machine_requirements(config: FineTuningConfig) -> bool:
    """Return whether the recipe requires a device or a package that some machines lack."""
    return (
        config.device not in ("auto", "cpu")
        or config.adaptation_spec.holds_4bit_weights
        or OPTIMIZERS[config.optimizer].requires_bitsandbytes
        or config.is_sharded
        or config.attention in ("flash_attention_2", varlen_attention.NAME)
        or config.fused_kernels == "on"
        or config.precision == "bfloat16"
        or rewards.has_machine_requirements(config.grpo.rewards)
    )


def check_machine(config: FineTuningConfig) -> str:
    """Return the device that this recipe would train on.

    Raises:
        ConfigurationError: this machine cannot train the recipe, or cannot compute its rewards.
        EngineMissingError: a package that the recipe needs is not installed.
    """
    rewards.check_machine(config.grpo.rewards)
    device = compute_devices.select_device(config.device)
    if config.adaptation_spec.holds_4bit_weights:
        if device != "cuda":
            raise ConfigurationError(
                f"fine_tuning.adaptation: {config.adaptation} requires an NVIDIA GPU; the device is {device}, "
                "for which bitsandbytes has no 4-bit kernels",
                hint="Set fine_tuning.adaptation to lora.",
            )
        _require_package("bitsandbytes", f"fine_tuning.adaptation: {config.adaptation}", "gpu")
    if OPTIMIZERS[config.optimizer].requires_bitsandbytes:
        if device != "cuda":
            raise ConfigurationError(
                f"fine_tuning.optimizer: {config.optimizer} requires an NVIDIA GPU; the device is {device}",
                hint="Set fine_tuning.optimizer to adamw or adafactor.",
            )
        _require_package("bitsandbytes", f"fine_tuning.optimizer: {config.optimizer}", "gpu")
    if config.strategy == "fsdp2":
        if device == "mps":
            raise ConfigurationError(
                "fine_tuning.strategy: fsdp2 has no effect on mps: PyTorch cannot shard a model on mps",
                hint="Set fine_tuning.device to cpu.",
            )
        if device == "cpu" and (accelerator := compute_devices.select_device("auto")) != "cpu":
            raise ConfigurationError(
                f"fine_tuning.device is cpu, but fsdp2 loads the shards onto this machine's accelerator, {accelerator}",
                hint="Set fine_tuning.device to auto, or fine_tuning.strategy to ddp.",
            )
    if config.strategy == "zero3":
        if device == "mps":
            raise ConfigurationError(
                "fine_tuning.strategy: zero3 has no effect on mps: DeepSpeed does not support mps",
                hint="Set fine_tuning.device to cpu.",
            )
        _require_package("deepspeed", "fine_tuning.strategy: zero3", "deepspeed")
    if config.precision == "bfloat16" and device == "mps":
        raise ConfigurationError(
            "fine_tuning.precision: bfloat16 training is not supported on mps",
            hint="Set fine_tuning.precision to auto.",
        )
    _choose_attention(config, device, _uses_bfloat16(config, device))
    if config.fused_kernels == "on" and device != "cuda":
        raise ConfigurationError(
            f"fine_tuning.fused_kernels: on requires an NVIDIA GPU; the device is {device}",
            hint="Set fine_tuning.fused_kernels to auto.",
        )
    count = compute_devices.count_devices(device)
    if count is not None and config.processes > count:
        raise ConfigurationError(
            f"fine_tuning.processes is {config.processes}; expected at most {count}, the number of {device} devices",
            hint="Reduce fine_tuning.processes: each process needs its own accelerator.",
        )
    return device


def _require_package(package: str, purpose: str, extra: str) -> None:
    if util.find_spec(package) is None:
        raise EngineMissingError(
            f"{purpose} requires the package {package}, which is not installed",
            hint=f"Run: pip install 'tuneline[{extra}]'",
        )


def _uses_bfloat16(config: FineTuningConfig, device: str) -> bool:
    return config.precision == "bfloat16" or (config.precision == "auto" and device in BFLOAT16_DEVICES)


def choose_settings(config: Recipe, device: str, shape: ModelShape, model_config: PretrainedConfig) -> ComputeSettings:
    """Return the compute settings of this recipe and model on this device.

    Args:
        config: The recipe.
        device: Name of the device, as returned by `check_machine`.
        shape: Shape of the model.
        model_config: The model's transformers configuration.

    Raises:
        ConfigurationError: the device or the model does not support a setting of the recipe.
    """
    bfloat16 = _uses_bfloat16(config, device)
    precision_reason = "as configured" if config.precision != "auto" else f"the fastest precision on {device}"
    attention, attention_reason = _choose_attention(config, device, bfloat16, model_support.find_class(model_config))
    liger, liger_reason = _choose_liger(config, device, str(model_config.model_type))
    choice = config.activation_checkpointing
    is_checkpointing, memory = choice == "on", "as configured"
    if choice == "auto":
        chosen = config.model_copy(update={"attention": attention})
        required = estimate_required_memory(
            chosen, shape, rows=config.micro_batch_size, length=config.max_length, gpu=device in BFLOAT16_DEVICES
        )
        free = compute_devices.get_free_memory_bytes(device) // (config.processes if device == "cpu" else 1)
        is_checkpointing = required > MAX_MEMORY_FRACTION * free
        memory = f"about {required / 1e9:.1f} GB are required without it and {free / 1e9:.1f} GB are free"
    reasons = [
        f"{'bfloat16' if bfloat16 else 'float32'}: {precision_reason}",
        attention_reason,
        liger_reason,
        f"torch.compile: {'on' if config.compile else 'off'}, as configured",
        f"activation checkpointing: {'on' if is_checkpointing else 'off'}, {memory}",
    ]
    return ComputeSettings(device, bfloat16, attention, liger, config.compile, is_checkpointing, reasons)


@dataclass(frozen=True)
class TrainingDevice:
    """The device that trains: whether it is a GPU, and its memory in bytes for each process (None: unknown).

    The memory is without the weights of a teacher and of reward models.
    """

    is_gpu: bool
    memory: int | None


def describe_training_device(config: FineTuningConfig, *, remote: bool, other_parameters: int = 0) -> TrainingDevice:
    """Return the device that trains the recipe.

    Args:
        config: The recipe.
        remote: Whether another machine trains; its accelerators are taken for GPUs, and their memory is not known.
        other_parameters: Parameters of a teacher and of reward models, whose weights take memory on the device.
    """
    if remote:
        return TrainingDevice(is_gpu=config.device != "cpu", memory=None)
    device = compute_devices.select_device(config.device)
    memory = compute_devices.get_total_memory_bytes(device)
    is_gpu = device in BFLOAT16_DEVICES
    others = other_parameters * (BFLOAT16_BYTES if is_gpu else FLOAT32_BYTES)
    return TrainingDevice(is_gpu, max(0, memory // (config.processes if device == "cpu" else 1) - others))


def estimate_required_memory(
    config: FineTuningConfig, shape: ModelShape, *, rows: int, length: int, gpu: bool, checkpointing: bool = False
) -> int:
    """Return the estimated bytes that each process requires, as `estimate_memory_parts` does by part."""
    parts = estimate_memory_parts(config, shape, rows=rows, length=length, gpu=gpu, checkpointing=checkpointing)
    return parts["total"]


def estimate_memory_parts(
    config: FineTuningConfig, shape: ModelShape, *, rows: int, length: int, gpu: bool, checkpointing: bool = False
) -> dict[str, int]:
    """Return the estimated bytes that each process requires, by part; see `estimate_training_memory`.

    Args:
        config: The recipe; its objective, dropout and sharding matter.
        shape: Shape of the adapted model.
        rows: Rows of a micro-batch.
        length: Tokens per row.
        gpu: Whether a GPU trains.
        checkpointing: Whether activations are recomputed.
    """
    objective = config.objective_spec
    # Preference objectives hold two sequences per row: chosen and rejected, or an answer and its KL completion.
    sequences = rows * (1 if objective.is_causal else 2)
    has_reference = objective.has_reference and config.adaptation_spec.trains_all_weights
    if objective.generates:
        sequences, length = rows * config.answers_per_prompt, length + config.max_answer_tokens
        has_reference = has_reference and config.grpo.kl_weight > 0
    layout = ParallelLayout(
        data=config.processes,
        stage=3 if config.is_sharded else 0,
        buffer_bytes=ZERO3_BUFFER_BYTES if config.strategy == "zero3" and gpu else 0,
    )
    parts = estimate_training_memory(
        shape,
        rows=sequences,
        length=length,
        dropout=config.has_lora_dropout,
        gpu=gpu,
        checkpointing=checkpointing,
        optimizer_bytes=OPTIMIZERS[config.optimizer].state_bytes,
        four_bit=gpu and config.adaptation_spec.holds_4bit_weights,
        fused=config.compile or (config.fused_kernels != "off" and util.find_spec("liger_kernel") is not None),
        masked_attention=gpu and config.has_masked_attention,
        whole_logits=not (objective.is_causal or objective.scores_answers),
        reference=has_reference and not config.precomputes_reference,
        layout=layout,
    )
    if objective.scores_answers:  # one number for a row
        parts["total"] -= parts["logits"]
        parts["logits"] = 0
    if objective.generates:
        # The cache is freed before the activations are stored.
        generated = _estimate_generation_bytes(config, shape, rows=rows, length=length, gpu=gpu)
        generation = max(0, generated - parts["activations"] - parts["logits"])
        parts |= {"generation": generation, "total": parts.pop("total") + generation}
    return parts


def _estimate_generation_bytes(
    config: FineTuningConfig, shape: ModelShape, *, rows: int, length: int, gpu: bool
) -> int:
    """Return the bytes of the keys and values of all answers of a step, which are generated at once, and of their mask."""
    engine, page = config.rollout_engine, config.rollout_engine.page_tokens
    answers = max(rows, (config.batch_size or config.objective_spec.batch_rows) // config.processes)
    answers *= config.answers_per_prompt
    # An engine outside of autocast computes in the precision of the weights.
    is_bfloat16 = gpu and not (engine.answer and config.adaptation_spec.trains_all_weights)
    value_bytes = BFLOAT16_BYTES if is_bfloat16 else FLOAT32_BYTES
    tokens = answers * (length if page == 1 else (-(-length // page) + 1) * page)
    cache = round(tokens * estimate_cache_bytes(shape, value_bytes=value_bytes))
    if not engine.prefill_tokens or config.attention == "flash_attention_2":
        return cache
    batch = max(engine.prefill_tokens, answers)
    return cache + batch * (tokens + batch) * value_bytes


def _choose_attention(
    config: FineTuningConfig, device: str, bfloat16: bool, model_class: type[PreTrainedModel] | None = None
) -> tuple[str, str]:
    """Return the attention kernel and the reason; without a model class, only check the machine."""
    missing_for_gpu = ""
    if device != "cuda":
        missing_for_gpu = f"an NVIDIA GPU; the device is {device}"
    elif not bfloat16:
        missing_for_gpu = f"bfloat16; fine_tuning.precision is {config.precision}"
    missing = {
        "flash_attention_2": missing_for_gpu
        or ("" if util.find_spec("flash_attn") else "the package flash-attn, which is not installed"),
        varlen_attention.NAME: missing_for_gpu
        or ("" if varlen_attention.is_available() else "torch 2.10 or later")
        or (
            ""
            if config.is_padding_free
            else f"rows without padding, but {config.objective} with {config.adaptation} pads them"
        ),
    }
    if reason := missing.get(config.attention):
        raise ConfigurationError(
            f"fine_tuning.attention: {config.attention} requires {reason}", hint="Set fine_tuning.attention to auto."
        )
    if config.attention != "auto":
        return config.attention, f"attention {config.attention}: as configured"
    kernels = model_support.list_attention_kernels(model_class) if model_class else model_support.ATTENTION_KERNELS
    if not missing["flash_attention_2"] and "flash_attention_2" in kernels:
        return "flash_attention_2", "attention flash_attention_2: flash-attn is installed"
    if not missing[varlen_attention.NAME] and varlen_attention.NAME in kernels:
        return varlen_attention.NAME, "attention varlen: PyTorch's FlashAttention for rows of different lengths"
    if "sdpa" not in kernels:
        return "eager", "attention eager: the model does not support sdpa"
    if device != "cuda":
        return "sdpa", f"attention sdpa: PyTorch's kernel on {device}"
    return (
        "sdpa",
        f"attention sdpa: flash_attention_2 requires {missing['flash_attention_2'] or 'a model that supports it'}",
    )


def _choose_liger(config: FineTuningConfig, device: str, model_type: str) -> tuple[bool, str]:
    """Decide whether Liger's kernels (Hsu et al., arXiv 2410.10989) replace layers; they run on NVIDIA GPUs only."""
    missing = ""
    if device != "cuda":
        missing = f"an NVIDIA GPU; the device is {device}"
    elif config.objective_spec.scores_answers or config.objective_spec.has_teacher:
        # Liger replaces `forward` by that of a language model; distillation reads the output layer itself.
        missing = f"an objective other than {config.objective}"
    elif config.compile:  # torch 2.11 fails to trace Liger's functions, and fuses the same layers
        missing = "fine_tuning.compile false"
    elif util.find_spec("liger_kernel") is None:
        missing = "liger-kernel, which is not installed"
    else:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            missing = f"a model that Liger supports; the model type is {model_type}"
    if config.fused_kernels == "off":
        return False, "fused kernels: off, as configured"
    if not missing:
        return True, "fused kernels: on"
    if config.fused_kernels == "on":
        raise ConfigurationError(
            f"fine_tuning.fused_kernels: on requires {missing}", hint="Set fine_tuning.fused_kernels to auto."
        )
    return False, f"fused kernels: off, because they require {missing}"


def choose_dtype(config: FineTuningConfig, settings: ComputeSettings) -> torch.dtype:
    """Return the data type of the base model's weights.

    Frozen weights have the compute precision. Trained weights are float32, because bfloat16 rounds small updates to
    zero.
    """
    import torch

    return torch.bfloat16 if settings.bfloat16 and not config.adaptation_spec.trains_all_weights else torch.float32


@contextmanager
def keep_model_code(model_class: type[PreTrainedModel]) -> Iterator[None]:
    """Restore the names in the model class's module after the block.

    Liger replaces layers and functions of the module for every later model of the process, also of training runs without
    fused kernels, which torch.compile then fails to trace.
    """
    names = vars(sys.modules[model_class.__module__])
    saved = dict(names)
    try:
        yield
    finally:
        names.update(saved)


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the repeated layers of a model in place, each on its first call.

    Equal layers share the compiled code, which is therefore built once; the whole model as one graph would take minutes.
    The names of the weights stay as they are.
    """
    from torch.nn import ModuleList

    for module in model.modules():
        if isinstance(module, ModuleList) and len({type(layer) for layer in module}) == 1 and len(module) > 1:
            for layer in module:
                layer.compile(dynamic=True)
