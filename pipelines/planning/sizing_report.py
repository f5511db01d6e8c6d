"""The result of `tuneline size` as lines of text, and as an HTML page with a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.common.reporting import html_report
from components.common.runtime.counts import format_count
from pipelines.planning.throughput import CASES

Json = Mapping[str, Any]
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def format_size(result: Json) -> list[str]:
    """Return the result as lines: one training run first, then all training runs, storage and serving."""
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
        f"speed     {_format_cases(result['tokens_per_second'], 'tokens/s')}",
        f"time      {_format_cases(result['hours'], 'hours')}",
        f"compute   {_format_cases(result['gpu_hours'], 'GPU-hours')}"
        + (f", {result['flops']:.2g} FLOPs" if result["flops"] else ""),
        *_format_energy(result),
    ]
    if (parallel := result["parallel"])["models"] > 1:
        lines.append(
            f"parallel  {parallel['models']} concurrent training runs: {parallel['gpus']} GPUs on {format_count(parallel['nodes'], 'node')}"
        )
    lines += _format_storage(result["storage"])
    if result["serving"]:
        lines += _format_serving(result["serving"], result["gpu"])
    lines += [f"{'formulas' if not n else '':<10}{formula['quantity']}: {formula['formula']} ({formula['source']})"
              for n, formula in enumerate(result["formulas"])]  # fmt: skip
    return lines + [f"{'assumed' if not n else '':<10}{text}" for n, text in enumerate(result["assumptions"])]


def render_report(result: Json) -> str:
    """Return an HTML page: figures, ranges, bill of materials, memory, storage, serving, formulas and assumptions."""
    model = result["model"]
    subtitle = (
        f"{model['name']}, {model['trainable']:,} of {model['parameters']:,} parameters trained, on {result['gpu']}"
    )
    return html_report.render_page(
        "Sizing estimate for one customization",
        subtitle,
        {
            **render_main_sections(result),
            "Layout": html_report.render_table(["setting", "value"], _list_layout(result["layout"])),
            "Storage": html_report.render_table(["part", "size or rate"], _list_storage(result["storage"])),
            "Serving": _render_serving(result["serving"]),
            "Formulas": render_formulas(result["formulas"]),
            "Assumptions": render_list(result["assumptions"]),
        },
    )  # fmt: skip


def render_main_sections(result: Json) -> dict[str, str]:
    """Return HTML by heading: key figures, the bound, ranges, the bill of materials and the memory of a GPU."""
    hours, binds = result["hours"], result["binds"]
    tiles = {
        f"× {result['gpu']} per training run": result["gpus"],
        "GiB per GPU": result["memory_gib_per_gpu"],
        "hours, typical": hours["typical"] if hours else None,
        "bound": binds["bound"],
    }
    limits = {f"usable memory of {result['gpu']}": result["usable_gib_per_gpu"]}
    return {
        "Result": html_report.render_tiles(tiles)
        + html_report.render_paragraph(f"Bound by {binds['bound']}: {binds['reason']}.", "" if result["fits"] else "bad"),
        "Ranges": html_report.render_table(["per training run", *CASES], _list_ranges(result)),
        "Bill of materials": html_report.render_table(["item", "quantity", "reason"], _list_materials(result)),
        "Memory": html_report.plot_stacked_bars(
            {result["model"]["name"]: result["memory"]}, x="GiB per GPU", limits=limits,
            caption="Peak memory of a GPU by part, and the memory that a training run may use.",
        ),
    }  # fmt: skip


def _list_ranges(result: Json) -> list[list[object]]:
    """Return a row for each quantity that depends on the speed; low is the slowest case."""
    energy, cost = result["energy"], result["cost"]
    quantities = {
        "tokens per second": result["tokens_per_second"],
        "hours": result["hours"],
        "GPU-hours": result["gpu_hours"],
        "kWh": energy["kwh"] if energy else None,
        "cost": cost["total"],
    }
    return [
        [name, *(_plain(values[case]) if values else None for case in CASES)] for name, values in quantities.items()
    ]


def _plain(value: float) -> float:
    """Return a value that tables show without an exponent."""
    return round(value) if value >= 1000 else value


def _list_materials(result: Json) -> list[list[object]]:
    """Return item, quantity and reason of the resources that all concurrent training runs need."""
    parallel, storage, energy, serving = result["parallel"], result["storage"], result["energy"], result["serving"]
    together = f"{parallel['models']} × {result['gpus']} GPUs" if parallel["models"] > 1 else result["binds"]["reason"]
    power = f"{energy['kilowatts'] * parallel['models']:,g} kW" if energy else "unknown"
    rows: list[list[object]] = [
        [f"GPUs, {result['gpu']}", f"{parallel['gpus']:,}", together],
        ["GPU nodes", f"{parallel['nodes']:,}", "a training run that fits on one node does not span nodes"],
        ["power", power, "1.2 × GPUs × design power"],
        ["usable storage", _format_bytes(storage["bytes"]), "datasets, checkpoints, models and the base model"],
        ["storage, read", f"{_format_bytes(storage['read_bytes_per_second'])}/s", f"bound by {storage['read_binds']}"],
        ["storage, write", f"{_format_bytes(storage['write_bytes_per_second'])}/s",
         f"checkpoints take {storage['stall_share']:.1%} of the time"],
    ]  # fmt: skip
    if serving:
        rows.append(
            [f"GPUs per serving replica, {result['gpu']}", f"{serving['gpus']:,}", f"bound by {serving['binds']}"]
        )
    return rows


def _list_layout(layout: Json) -> list[list[object]]:
    return [
        *([f"{name} parallelism", f"{layout[name]}"] for name in ("data", "tensor", "pipeline", "context")),
        ["ZeRO stage", f"{layout['zero_stage']}"],
        ["micro-batch, rows", f"{layout['micro_batch']}"],
        ["activation recomputation", layout["recomputation"]],
    ]


def _list_storage(storage: Json) -> list[list[object]]:
    parts = [[name.replace("_", " "), _format_bytes(size)] for name, size in storage["parts"].items()]
    return [
        *parts,
        ["total", _format_bytes(storage["bytes"])],
        ["read rate", f"{_format_bytes(storage['read_bytes_per_second'])}/s"],
        ["write rate", f"{_format_bytes(storage['write_bytes_per_second'])}/s"],
        ["checkpoint", f"{_format_bytes(storage['checkpoint_bytes'])} every {storage['checkpoint_minutes']:g} minutes, "
         f"written in {'' if storage['has_write_rate'] else 'at most '}{storage['checkpoint_seconds']:g} s"],
        ["Young/Daly interval", f"{storage['young_daly_minutes']:,g} minutes"],
    ]  # fmt: skip


def _render_serving(serving: Json | None) -> str:
    if serving is None:
        return ""
    rate = serving["max_tokens_per_second"]
    rows: list[list[object]] = [
        ["GPUs per replica", f"{serving['gpus']}"],
        ["bound by", serving["binds"]],
        ["memory per GPU", f"{serving['memory_gib_per_gpu']:g} GiB"],
        ["weights", _format_bytes(serving["weight_bytes"])],
        ["KV cache", f"{_format_bytes(serving['cache_bytes'])}, {_format_bytes(serving['cache_bytes_per_token'])} per token"],
        ["first token", f"at least {serving['min_first_token_seconds'] * 1000:,.0f} ms"],
        ["tokens per second", f"at most {rate:,.0f}" if rate else None],
    ]  # fmt: skip
    return html_report.render_table(["figure", "value"], rows)


def render_formulas(formulas: Sequence[Json]) -> str:
    """Return a table of formulas with their sources."""
    rows = [[formula["quantity"], formula["formula"], formula["source"]] for formula in formulas]
    return html_report.render_table(["quantity", "formula", "source"], rows)


def render_list(texts: Sequence[str]) -> str:
    """Return texts as paragraphs."""
    return "".join(html_report.render_paragraph(text) for text in texts)


def _format_cases(values: Mapping[str, float] | None, unit: str) -> str:
    """Format the values of the three cases with their unit, or "unknown"."""
    if values is None:
        return "unknown"
    figures = " – ".join(f"{values[case]:,g}" for case in CASES)
    return f"{figures} {unit}".rstrip() + f" ({' – '.join(CASES)} speed)"


def _format_energy(result: Json) -> list[str]:
    lines, energy, cost = [], result["energy"], result["cost"]
    if energy:
        used = (
            f"; energy per training run: {_format_cases(energy['kwh'], 'kWh')}, PUE {energy['pue']:g}"
            if energy["kwh"]
            else ""
        )
        lines.append(f"power     {energy['kilowatts']:g} kW{used}")
    if cost["total"]:
        parts = " and ".join(name for name in ("gpus", "energy") if cost[name]).replace("gpus", "GPUs")
        lines.append(f"cost      {_format_cases(cost['total'], '')} per training run, for {parts}")
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
