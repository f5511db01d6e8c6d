"""The result of `tuneline size` as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.planning.throughput import CASES

Json = Mapping[str, Any]
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def format_size(result: Json) -> list[str]:
    """Return the result as lines: one training first, then all trainings, storage and serving."""
    model, layout, binds, memory = result["model"], result["layout"], result["binds"], result["memory"]
    parts = ", ".join(f"{name} {size:g}" for name, size in memory.items())
    splits = {"tensor": layout["tensor"], "pipeline": layout["pipeline"], "context": layout["context"]}
    extra = "".join(f", {name} parallelism {count}" for name, count in splits.items() if count > 1)
    recomputation = "with" if layout["recomputation"] else "without"
    lines = [
        f"model     {model['name']}: {model['parameters']:,} parameters, {model['trainable']:,} trained ({model['source']})",
        f"GPUs      {result['gpus']} × {result['gpu']}{'' if result['fits'] else ' (does not fit)'}; "
        f"bound by {binds['bound']}: {binds['reason']}",
        f"          ZeRO stage {layout['zero_stage']}, micro-batch {layout['micro_batch']}, {recomputation} "
        f"recomputation{extra}",
        f"memory    {result['memory_gib_per_gpu']:g} GiB per GPU: {parts}",
        f"speed     {_format_cases(result['tokens_per_second'])} tokens/s",
        f"time      {_format_cases(result['hours'])} hours",
        f"work      {_format_cases(result['gpu_hours'])} GPU-hours"
        + (f", {result['flops']:.2g} FLOPs" if result["flops"] else ""),
        *_format_energy(result),
    ]
    if (parallel := result["parallel"])["models"] > 1:
        lines.append(
            f"together  {parallel['models']} models at the same time: {parallel['gpus']} GPUs in {parallel['nodes']} nodes"
        )
    lines += _format_storage(result["storage"])
    if result["serving"]:
        lines += _format_serving(result["serving"], result["gpu"])
    lines += [f"{'because' if not n else '':<10}{formula['quantity']}: {formula['formula']} ({formula['source']})"
              for n, formula in enumerate(result["formulas"])]  # fmt: skip
    return lines + [f"{'assumed' if not n else '':<10}{text}" for n, text in enumerate(result["assumptions"])]


def _format_cases(values: Mapping[str, float] | None) -> str:
    """Format a range from low to best, or "unknown"."""
    if values is None:
        return "unknown"
    return " – ".join(f"{values[case]:,g} {case}" for case in CASES)


def _format_energy(result: Json) -> list[str]:
    lines, energy, cost = [], result["energy"], result["cost"]
    if energy:
        used = f"; {_format_cases(energy['kwh'])} kWh per training" if energy["kwh"] else ""
        lines.append(f"energy    {energy['kilowatts']:g} kW{used} (PUE {energy['pue']:g})")
    if cost["total"]:
        parts = " and ".join(name for name in ("gpus", "energy") if cost[name]).replace("gpus", "GPUs")
        lines.append(f"cost      {_format_cases(cost['total'])} per training, for {parts}")
    return lines


def _format_storage(storage: Json) -> list[str]:
    parts = ", ".join(f"{name.replace('_', ' ')} {_format_bytes(size)}" for name, size in storage["parts"].items())
    verb = "takes" if storage["has_write_rate"] else "may take"
    met = "" if storage["meets_stall_budget"] else "; exceeds the stall budget"
    return [
        f"storage   {_format_bytes(storage['bytes'])}: {parts}",
        f"          read {_format_bytes(storage['read_bytes_per_second'])}/s (bound by {storage['read_binds']}), "
        f"write {_format_bytes(storage['write_bytes_per_second'])}/s",
        f"          a checkpoint of {_format_bytes(storage['checkpoint_bytes'])} every {storage['checkpoint_minutes']:g} "
        f"minutes {verb} {storage['checkpoint_seconds']:g} s, {storage['stall_share']:.1%} of the time{met}; "
        f"Young/Daly: every {storage['young_daly_minutes']:,g} minutes",
    ]


def _format_serving(serving: Json, gpu: str) -> list[str]:
    delays = f"first token after at least {serving['min_first_token_seconds'] * 1000:,.0f} ms"
    if serving["min_seconds_per_token"]:
        delays += (
            f", then at least {serving['min_seconds_per_token'] * 1000:,.1f} ms per token; "
            f"at most {serving['max_tokens_per_second']:,.0f} tokens/s"
        )
    return [
        f"serving   {serving['gpus']} × {gpu}, {serving['memory_gib_per_gpu']:g} GiB per GPU; bound by {serving['binds']}: "
        f"weights {_format_bytes(serving['weight_bytes'])}, KV cache {_format_bytes(serving['cache_bytes'])} "
        f"({_format_bytes(serving['cache_bytes_per_token'])} per token)",
        f"          {delays}",
    ]


def _format_bytes(size: float) -> str:
    for unit, name in UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
