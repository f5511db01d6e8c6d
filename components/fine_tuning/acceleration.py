"""What makes a training fast on the device it runs on, each choice with its reason."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from components.common import devices
from components.common.errors import ConfigurationError, EngineMissingError
from components.common.shape import Shape, training_memory
from components.fine_tuning.config import LOW_RANK, SHARDED, FineTuningConfig
from components.fine_tuning.methods import ADAPTATIONS

HALF = ("cuda", "hpu")  # devices that compute in bfloat16 by default
ROOM = 0.9  # of the free memory that a training is planned into: the formula was within 16% of measured peaks, mostly above


@dataclass(frozen=True)
class Choice:
    """How the steps are computed. `reasons`: one sentence a decision."""

    device: str
    bfloat16: bool
    attention: str
    liger: bool
    compile: bool
    activation_checkpointing: bool
    reasons: list[str]


def asks_for_more(config: FineTuningConfig) -> bool:
    """Whether the recipe names something that is not on every machine."""
    kernels = config.attention == "flash_attention_2" or config.fused_kernels == "on" or config.precision == "bfloat16"
    return config.device not in ("auto", "cpu") or ADAPTATIONS[config.adaptation].four_bits or config.strategy in SHARDED or kernels


def check(config: FineTuningConfig) -> str:
    """The device this recipe would train on. Raises ConfigurationError, or EngineMissingError, where it cannot train on this machine."""
    device = devices.choose(config.device)
    if ADAPTATIONS[config.adaptation].four_bits:
        _check_four_bits(device)
    if config.strategy in SHARDED:
        _check_sharding(config.strategy, device)
    if config.precision == "bfloat16" and device == "mps":
        raise ConfigurationError("fine_tuning.precision: bfloat16 training is not supported on mps", hint="Use precision: auto.")
    _attention(config, device, _computes_in_half(config, device))
    if config.fused_kernels == "on" and device != "cuda":
        raise ConfigurationError("fine_tuning.fused_kernels: on needs an NVIDIA GPU", hint="Use fused_kernels: auto.")
    here = devices.count(device)
    if here is not None and config.processes > here:
        raise ConfigurationError(
            f"fine_tuning.processes is {config.processes}, and {here} of {device} are here",
            hint="One process an accelerator: lower processes.",
        )
    return device


def _computes_in_half(config: FineTuningConfig, device: str) -> bool:
    return config.precision == "bfloat16" or (config.precision == "auto" and device in HALF)


def _check_four_bits(device: str) -> None:
    if device != "cuda":
        raise ConfigurationError(
            f"fine_tuning.adaptation: qlora needs an NVIDIA GPU, and here {device} trains: bitsandbytes has no 4-bit kernels for it",
            hint="Use adaptation: lora, or a machine with an NVIDIA GPU.",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EngineMissingError("adaptation qlora needs the package bitsandbytes", hint="pip install 'tuneline[gpu]'")


def _check_sharding(strategy: str, device: str) -> None:
    if strategy == "fsdp2" and device not in HALF:
        raise ConfigurationError(
            f"fine_tuning.strategy: fsdp2 cannot be in force on {device}: Accelerate ignores it there and trains with plain DDP",
            hint="Use strategy: zero3 or ddp, or accelerators.",
        )
    if strategy == "zero3" and device == "mps":
        raise ConfigurationError(
            "fine_tuning.strategy: zero3 cannot be in force on mps: DeepSpeed does not know it", hint="Use device: cpu."
        )
    if strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        raise EngineMissingError("strategy zero3 needs the package deepspeed", hint="pip install 'tuneline[deepspeed]'")


def choose(config: FineTuningConfig, device: str, shape: Shape, model_type: str) -> Choice:
    """Precision, attention kernel, fused layers, compilation and activation checkpointing for this recipe and model on this device."""
    half = _computes_in_half(config, device)
    attention, why_attention = _attention(config, device, half)
    liger, why_liger = _liger(config, device, model_type)
    again, why_again = _activation_checkpointing(config, device, shape)
    why_half = f"{'bfloat16' if half else 'float32'}: " + ("as configured" if config.precision != "auto" else f"what {device} is fast in")
    why_compile = [f"torch.compile: {'on' if config.compile else 'off'}, as configured"]
    return Choice(device, half, attention, liger, config.compile, again, [why_half, why_attention, why_liger, *why_compile, why_again])


def _attention(config: FineTuningConfig, device: str, half: bool) -> tuple[str, str]:
    installed = importlib.util.find_spec("flash_attn") is not None
    if config.attention == "flash_attention_2" and not (installed and device == "cuda" and half):
        needs = "an NVIDIA GPU" if device != "cuda" else "bfloat16" if not half else "the package flash-attn"
        raise ConfigurationError(f"fine_tuning.attention: flash_attention_2 needs {needs}", hint="Use attention: auto.")
    if config.attention != "auto":
        return config.attention, f"attention {config.attention}: as configured"
    if device == "cuda" and half and installed:
        return "flash_attention_2", "attention flash_attention_2: flash-attn is installed"
    without = "flash-attn has no float32 kernels" if installed else "flash-attn is not installed"
    return "sdpa", "attention sdpa: " + (without if device == "cuda" else f"torch's own kernel on {device}")


def _liger(config: FineTuningConfig, device: str, model_type: str) -> tuple[bool, str]:
    """Whether Liger's kernels (Hsu et al., arXiv 2410.10989) replace layers: they are Triton's, for NVIDIA GPUs."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    known = installed and _liger_knows(model_type)
    if config.fused_kernels == "on" and not (device == "cuda" and known):
        what = (
            "an NVIDIA GPU" if device != "cuda" else "liger-kernel, which is not installed" if not installed else "a model that Liger knows"
        )
        raise ConfigurationError(f"fine_tuning.fused_kernels: on needs {what}", hint="Use fused_kernels: auto.")
    if config.fused_kernels == "off":
        return False, "fused kernels: off, as configured"
    if device != "cuda":
        return False, f"fused kernels: off, they are for NVIDIA GPUs and not for {device}"
    return (
        known,
        f"fused kernels: {'on' if known else 'off: liger-kernel ' + ('does not know ' + model_type if installed else 'is not installed')}",
    )


def _liger_knows(model_type: str) -> bool:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def _activation_checkpointing(config: FineTuningConfig, device: str, shape: Shape) -> tuple[bool, str]:
    if config.activation_checkpointing != "auto":
        return config.activation_checkpointing == "on", f"activation checkpointing: {config.activation_checkpointing}, as configured"
    dropout = config.adaptation in LOW_RANK and config.lora.dropout > 0
    rows = config.micro_batch_size * (2 if config.objective in ("dpo", "kto") else 1)
    needed = training_memory(shape, rows=rows, length=config.max_length, dropout=dropout, gpu=device in HALF)["total"]
    if config.strategy in SHARDED:
        needed //= config.processes
    free = devices.free_memory(device) // (config.processes if device == "cpu" else 1)
    again = needed > ROOM * free
    told = f"about {needed / 1e9:.1f} GB are needed without it and {free / 1e9:.1f} GB free"
    return again, f"activation checkpointing: {'on' if again else 'off'}, {told}"


def torch_dtype(config: FineTuningConfig, choice: Choice) -> Any:
    """How weights are held: frozen ones in bfloat16 where that is computed in; trained ones in float32, or small updates round away."""
    import torch

    return torch.bfloat16 if choice.bfloat16 and config.adaptation != "full" else torch.float32
