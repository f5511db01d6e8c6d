"""The size of a shared cluster as lines of text, and as an HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.common.reporting import html_report
from components.common.runtime.counts import format_count
from pipelines.planning import cluster_size, sizing_report
from pipelines.planning.cluster_size import ClusterRequest
from pipelines.planning.throughput import CASES

Json = Mapping[str, Any]
WAITS = {"p50": "P50", "p90": "P90"}
PLOTTED_NODES = 6  # numbers of nodes in the plots, from the smallest cluster on


def format_cluster(result: Json) -> list[str]:
    """Return the result as lines: demand, cluster, waiting times, the bound, and the bill of materials."""
    weekly, wait, shares = result["customizations_per_week"], result["wait_hours"], result["utilization"]
    capacity, binds = weekly["capacity"], result["binds"]
    who = format_count(result["teams"], "team") if result["teams"] else "enough teams to use every GPU"
    lines = [
        f"{'demand' if not n else '':<10}{item['per_month']} × {item['model']} per month: {format_count(item['gpus'], 'GPU')} for "
        f"{_format_cases(item['hours'])} hours each"
        for n, item in enumerate(result["demand"])
    ]
    lines += [
        f"cluster   {format_count(result['nodes'], 'node')} with {result['gpus']} × {result['gpu']}, queue {result['queue']}"
        + ("" if result["keeps_up"] else "; the queue grows because the cluster cannot keep up with the demand"),
        f"weekly    {weekly['demand']:g} customizations requested; capacity with {who}: {_format_cases(capacity)}, "
        f"{capacity['drawn']:g} for a mix of these cases",
        f"wait      for GPUs: mean {wait['mean']:g}, P50 {wait['p50']:g}, P90 {wait['p90']:g}, P99 "
        f"{wait['p99']:g} hours",
        f"use       {shares['gpus']:.1%} of the GPUs, {shares['read']:.1%} of the read rate, {shares['write']:.1%} of the "
        f"write rate; allocated GPUs spend {result['transfer_share']:.1%} of their time waiting for storage",
        f"bound     at capacity by {binds['bound']}: {binds['reason']}",
    ]
    for n, gain in enumerate(result["gains"]):
        change = (
            "change within noise"
            if gain["is_noise"]
            else f"{gain['customizations_per_week']:+g} customizations per week"
        )
        lines.append(
            f"{'gains' if not n else '':<10}{gain['change']}: capacity {change}, P90 wait {gain['p90_wait_hours']:+g} hours"
        )
    for n, item in enumerate(result["bill_of_materials"]):
        quantity = f"{item['quantity']:g} {item['unit']}".strip()
        lines.append(f"{'materials' if not n else '':<10}{item['item']}: {quantity}; {item['reason']}")
    return lines + [f"{'assumed' if not n else '':<10}{text}" for n, text in enumerate(result["assumptions"])]


def _format_cases(values: Mapping[str, float]) -> str:
    return " – ".join(f"{values[case]:,g} {case}" for case in CASES)


def render_report(request: ClusterRequest, result: Json) -> str:
    """Return an HTML page: the main sections, waiting time and capacity by number of nodes, gains, formulas and assumptions."""
    measured = cluster_size.measure_nodes(request, PLOTTED_NODES)
    counts = [size["nodes"] for size in measured]
    waits = {name: (counts, [size[key] for size in measured]) for key, name in WAITS.items()}
    requested = result["customizations_per_week"]["demand"]
    weekly = {"demand": (counts, [requested] * len(counts))}
    weekly |= {case: (counts, [size[case] for size in measured]) for case in CASES}
    demand = ", ".join(f"{item['per_month']} × {item['model']}" for item in result["demand"])
    gains = [
        [gain["change"], "within noise" if gain["is_noise"] else f"{gain['customizations_per_week']:+g}", f"{gain['p90_wait_hours']:+g}"]
        for gain in result["gains"]
    ]  # fmt: skip
    plot = html_report.plot_lines(
        waits,
        x="nodes",
        y="hours",
        caption=f"Waiting time for GPUs by number of nodes; this cluster has {result['nodes']}.",
    )
    return html_report.render_page(
        "Sizing estimate for a shared cluster",
        f"{demand} per month on {result['gpu']}",
        {
            **render_main_sections(result),
            "Waiting time": plot
            if any(size["p90"] for size in measured)
            else html_report.render_paragraph(
                f"With {counts[0]} to {counts[-1]} nodes, at least 90% of customizations do not wait for GPUs."
            ),
            "Capacity": html_report.plot_lines(
                weekly, x="nodes", y="customizations per week", caption="Customizations per week: demand and capacity."
            ),
            "Gains": html_report.render_table(
                ["change", "capacity, customizations per week", "P90 wait, hours"], gains
            ),
            "Formulas": sizing_report.render_formulas(result["formulas"]),
            "Assumptions": sizing_report.render_list(result["assumptions"]),
        },
    )


def render_main_sections(result: Json) -> dict[str, str]:
    """Return HTML by heading: key figures, the bound, the demand, the bill of materials, utilization and memory."""
    binds, models = result["binds"], result["demand"]
    tiles = {
        "nodes": result["nodes"],
        "GPUs": result["gpus"],
        "demand per week": result["customizations_per_week"]["demand"],
        "P90 wait, hours": result["wait_hours"]["p90"],
    }
    demand = [
        [item["model"], item["per_month"], item["gpus"], item["memory_gib_per_gpu"],
         " – ".join(f"{item['hours'][case]:,g}" for case in CASES)]
        for item in models
    ]  # fmt: skip
    rows = [
        [item["item"], f"{item['quantity']:,g} {item['unit']}".strip(), item["reason"]] for item in result["bill_of_materials"]
    ]  # fmt: skip
    shares = {
        f"{name}, {moment}": 100 * utilization[key]
        for key, name in {"gpus": "GPUs", "read": "read rate", "write": "write rate"}.items()
        for moment, utilization in {
            "with the demand": result["utilization"],
            "at capacity": result["utilization_at_capacity"],
        }.items()
    }
    limits = {f"usable memory of {result['gpu']}": result["usable_gib_per_gpu"]}
    return {
        "Result": html_report.render_tiles(tiles)
        + html_report.render_paragraph(f"Bound at capacity by {binds['bound']}: {binds['reason']}.")
        + ("" if result["keeps_up"] else html_report.render_paragraph("The queue grows without limit.", "bad")),
        "Demand": html_report.render_table(
            ["model", "per month", "GPUs", "GiB per GPU", f"hours, {' – '.join(CASES)}"], demand
        ),
        "Bill of materials": html_report.render_table(["item", "quantity", "reason"], rows),
        "Utilization": html_report.plot_bars(
            shares,
            x="percent",
            caption="Allocated share of the GPUs, and used share of the storage bandwidth.",
        ),
        "Memory": html_report.plot_stacked_bars(
            {item["model"]: item["memory"] for item in models},
            x="GiB per GPU",
            limits=limits,
            caption="Peak memory of a GPU by part, and the memory that a training run may use.",
        ),
    }
