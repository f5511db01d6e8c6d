"""Formats of quantized weights, one entry per value of `triton_packaging.quantization`, with their capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Frantar et al. (GPTQ, arXiv 2210.17323) use 128 rows of 2,048 tokens; instruction rows are shorter.
CALIBRATION_ROWS, MAX_CALIBRATION_TOKENS = 256, 2048

QuantizationName = Literal["none", "int8", "fp8", "int4-gptq"]


@dataclass(frozen=True)
class Quantization:
    """Capabilities of a format.

    Attributes:
        backend: Triton backend that serves the weights.
        weight_bits: Bits per weight of a linear layer.
        preset: Scheme of compressed-tensors; "" if the weights have another format. The output layer keeps its precision.
        is_calibrated: Whether llm-compressor chooses the weights such that the model's outputs on training rows change
            little. This requires the quantization environment. Otherwise, each weight is rounded to nearest.
        group_sizes: Possible numbers of weights that share a scale, the preferred one first; () for one scale per row.
        needs_bfloat16: Whether vLLM refuses float32, as its CPU build 0.32 does: "not implemented for 'Float'".
        hardware: Devices that compute with the format, according to the documentation of vLLM 0.32.
    """

    backend: Literal["python", "vllm"]
    weight_bits: int
    preset: str = ""
    is_calibrated: bool = False
    group_sizes: tuple[int, ...] = ()
    needs_bfloat16: bool = False
    hardware: str = ""


QUANTIZATIONS: Mapping[str, Quantization] = {
    "int8": Quantization("python", weight_bits=8),
    "fp8": Quantization("vllm", weight_bits=8, preset="FP8_DYNAMIC", hardware="NVIDIA Ada to Blackwell, AMD MI300"),
    # With the embedded model, 414 log-probabilities of vLLM 0.32's CPU build (bfloat16) differ from those of transformers
    # (float32) by 0.058 nats on average and at most 0.32; without quantization, by 0.048 and 0.22.
    "int4-gptq": Quantization(
        "vllm",
        weight_bits=4,
        preset="W4A16",
        is_calibrated=True,
        group_sizes=(128, 64, 32),  # of vLLM's Marlin kernels
        needs_bfloat16=True,
        hardware="NVIDIA Turing to Hopper, x86 CPUs",
    ),
}


def find_quantization(name: str) -> Quantization | None:
    """Return the entry of a format, or None for "none"."""
    return None if name == "none" else QUANTIZATIONS[name]
