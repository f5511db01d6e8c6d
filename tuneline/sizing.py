"""`tuneline.size`: the requirements of customizations, before data, weights or hardware exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from components.common.runtime import reporters
from pipelines.planning import size_options, size_results
from pipelines.planning.size_results import ClusterSize, TrainingSize
from tuneline import call_context
from tuneline.call_context import AnyCustomization


@overload
def size(
    customization: AnyCustomization = ..., *, demand: Sequence[str], quiet: bool = ..., **options: Any
) -> ClusterSize: ...
@overload
def size(customization: AnyCustomization = ..., *, quiet: bool = ..., **options: Any) -> TrainingSize: ...
def size(
    customization: AnyCustomization = None, *, demand: Sequence[str] = (), quiet: bool = False, **options: Any
) -> TrainingSize | ClusterSize:
    """Estimate GPUs, memory, time, storage, energy and cost of a customization, without data, weights or torch.

        training = size(model="llama-3.1-8b", rows=12_000, mean_length=115, gpu="h200")
        cluster = size(demand=["20xllama-3.1-8b"], rows=50_000, mean_length=600, gpu="h200")

    Args:
        customization: the customization, or the path of its file, with the recipe. None: the defaults.
        demand: customizations per month and model, as COUNTxMODEL, for a cluster that all models share.
        quiet: report no progress while counting the tokens of a dataset.
        options: the other options of `tuneline size`, with `_` for `-`, such as `mean_length`, `gpu_hour_price` and
            `packing=False`.

    Returns:
        The size of a training run; with `demand`, that of a cluster.

    Raises:
        TunelineError: an option does not exist or is invalid, or no number of GPUs or nodes meets the limits.
    """
    parsed = size_options.parse_options({**options, "demand": [demand] if isinstance(demand, str) else list(demand)})
    reporter = reporters.create_console_reporter(quiet=quiet, prefix="size: ")
    try:
        return size_results.size(call_context.load(customization), parsed, reporter)
    finally:
        reporters.close_reporter(reporter)
