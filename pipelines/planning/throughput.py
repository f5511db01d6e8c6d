"""Training speed of an accelerator: a formula for the time of a micro-batch, and bands of the efficiency of published runs.

throughput_bands.yaml is generated from published runs (`python -m benchmarks.sizing_validation`). One efficiency would
be wrong for most runs: software alone changes the time of the same benchmark on the same GPUs by a factor of four.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from components.common.models.accelerators import Accelerator
from components.common.runtime.counts import format_count
from components.common.runtime.yaml_loading import load_yaml

CASES = ("low", "typical", "best")
STACKS = {
    "standard": "PyTorch with FSDP or DeepSpeed, such as tuneline",
    "tuned": "Megatron-LM and NeMo with tensor parallelism, such as MLPerf submissions",
}
MIN_BAND_RUNS, MIN_BAND_SOURCES = 3, 2  # fewer do not show how far software matters
MAX_EFFICIENCY = 0.8  # best measured matrix products: 794.5 of 989 TFLOP/s on H100 (stas00/ml-engineering, MAMF)
BAND_MARGIN = 0.1  # of the lowest and the highest efficiency: published runs are not all runs
# Seconds in which Python launches the kernels of one layer, forward and backward. From the step times of Qwen 1.8B, 7B and
# 14B at 256 tokens per micro-batch (QwenLM/Qwen README): 2 to 12 ms, mostly 5. Tuned stacks use CUDA graphs.
LAUNCH_SECONDS = {"low": 0.012, "typical": 0.005, "best": 0.002}
MAX_LAUNCH_SHARE = 0.3  # of the time of a step; otherwise the run does not show the accelerator's efficiency
# A 4-bit weight is read, and its 16-bit copy written and read: 0.5 + 2 × 2 + 2 bytes in place of 2.
FOUR_BIT_TRAFFIC = 3.25


@dataclass(frozen=True)
class MicroBatch:
    """The work of a micro-batch.

    Attributes:
        flops: FLOPs per token, with those of recomputation.
        tokens: tokens of the micro-batch.
        layers: layers of the model.
        four_bit: whether frozen weights have 4 bits.
    """

    flops: float
    tokens: float
    layers: int
    four_bit: bool = False


@dataclass(frozen=True)
class EfficiencyGroup:
    """Efficiencies of published runs on one GPU with one precision and stack, and the number of their sources."""

    sources: int
    efficiencies: list[float]


@dataclass(frozen=True)
class EfficiencyBand:
    """The share of the peak rate that published runs reach, and their number and kind."""

    low: float
    typical: float
    best: float
    runs: int
    basis: str


def _count_traffic_factor(work: MicroBatch, device: Accelerator, peak: float) -> float:
    """Return the time of a matrix product over that of its FLOPs: weights are read once per micro-batch.

    Roofline (Williams et al., 2009): a product with m rows has m FLOPs per byte of a 16-bit weight.
    """
    if device.bandwidth_bytes is None:
        return 1.0
    tokens_per_read = peak / device.bandwidth_bytes * (FOUR_BIT_TRAFFIC if work.four_bit else 1.0)
    return 1 + tokens_per_read / work.tokens


def compute_efficiency(work: MicroBatch, device: Accelerator, precision: str, rate: float, stack: str) -> float | None:
    """Return the efficiency of a published run; None if it spends its time on launches or the peak is unknown.

    Args:
        rate: tokens per second and GPU.
    """
    peak = device.get_peak_flops(precision)
    launch_seconds = 0.0 if stack.startswith("tuned") else work.layers * LAUNCH_SECONDS["typical"]
    if peak is None or launch_seconds > MAX_LAUNCH_SHARE * work.tokens / rate:
        return None
    return rate * work.flops * _count_traffic_factor(work, device, peak) / peak


def estimate_rate(
    work: MicroBatch, device: Accelerator, precision: str, band: EfficiencyBand, stack: str
) -> dict[str, float] | None:
    """Return tokens per second and GPU by case of CASES; None if the device's peak rate is not known.

    The time of a micro-batch is that of its matrix products or that of the launches, whichever is longer.
    """
    peak = device.get_peak_flops(precision)
    if peak is None:
        return None
    products = work.flops * work.tokens * _count_traffic_factor(work, device, peak) / peak
    launches = {case: 0.0 if stack.startswith("tuned") else work.layers * LAUNCH_SECONDS[case] for case in CASES}
    return {case: work.tokens / max(products / getattr(band, case), launches[case]) for case in CASES}


def build_band(efficiencies: Sequence[float], basis: str) -> EfficiencyBand:
    """Return the band of the efficiencies of published runs, widened by BAND_MARGIN."""
    return EfficiencyBand(
        low=min(efficiencies) * (1 - BAND_MARGIN),
        typical=statistics.median(efficiencies),
        best=min(max(efficiencies) * (1 + BAND_MARGIN), MAX_EFFICIENCY),
        runs=len(efficiencies),
        basis=basis,
    )


def select_band(groups: Mapping[str, EfficiencyGroup], gpu: str, precision: str, stack: str) -> EfficiencyBand | None:
    """Return the band of a GPU, precision and stack; with too few runs or sources, that of all GPUs of a stack.

    Args:
        groups: published runs by "gpu precision stack".

    Returns:
        None if too few runs of the stack are published.
    """
    own = groups.get(f"{gpu} {precision} {stack}", EfficiencyGroup(0, []))
    if len(own.efficiencies) >= MIN_BAND_RUNS and own.sources >= MIN_BAND_SOURCES:
        found = f"{len(own.efficiencies)} published runs on {gpu} with {precision}, {stack} stack"
        return build_band(own.efficiencies, found)
    for suffix, kind in ((f" {precision} {stack}", f"with {precision}"), (f" {stack}", "with all precisions")):
        pooled = [value for key, group in groups.items() if key.endswith(suffix) for value in group.efficiencies]
        if len(pooled) >= MIN_BAND_RUNS:
            few = format_count(len(own.efficiencies), "published run") if own.efficiencies else "no published runs"
            others = f"the band comes from {len(pooled)} runs on all GPUs {kind}, {stack} stack"
            return build_band(pooled, f"too few published runs on {gpu} with {precision} ({few}); {others}")
    return None


@cache
def load_efficiencies() -> dict[str, EfficiencyGroup]:
    """Return the efficiencies of published runs by "gpu precision stack"."""
    rows = load_yaml(Path(__file__).with_name("throughput_bands.yaml").read_text(encoding="utf-8"))
    assert isinstance(rows, dict)
    return {name: EfficiencyGroup(**row) for name, row in rows.items()}
