"""The result of a benchmark as lines of text and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.common.reporting import html_report
from components.common.runtime.counts import format_count
from pipelines.operations.storage_benchmark.fio_check import MAX_DIFFERENCE_POINTS
from pipelines.operations.storage_benchmark.phases import ASSUMED_BYTES_PER_SECOND, BenchmarkPlan

Json = Mapping[str, Any]
LABELS = {"checkpoint_write": "checkpoint", "checkpoint_read": "restore", "model_loading": "loading"}
WORKLOAD_LABELS = {
    "name": "workload",
    "source": "source",
    "dataset_bytes": "dataset, bytes",
    "files": "files",
    "samples_per_file": "records per file",
    "record_bytes": "record, bytes",
    "batch": "records per step",
    "computation_seconds": "computation time per step, s",
    "order": "read order of the records",
    "read_threads": "read-ahead threads (0: the step itself reads)",
    "prefetch": "batches that each thread reads ahead",
    "max_steps": "maximum number of steps (0: no limit)",
    "epochs": "maximum number of epochs (0: no limit)",
    "target_utilization": "target utilization, from 0 to 1",
    "ignored": "ignored keys",
}
REPORT_FILENAME, RESULT_FILENAME = "report.html", "benchmark.json"


def format_bytes(size: float | None, suffix: str = "") -> str:
    """Return a size with a decimal unit; "–" for None."""
    if size is None:
        return "–"
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}{suffix}"
    return f"{size:.0f} B{suffix}"


def format_benchmark(result: Json) -> list[str]:
    """Return the result as lines: the phases, the verdict, and the notes."""
    lines = [f"hosts        {', '.join(host['host'] for host in result['hosts'])}"]
    if training := result["training"]:
        workload = result["workload"]
        lines.append(f"workload     {workload['name']}: {workload['source']}")
        lines.append(f"dataset      {format_bytes(workload['dataset_bytes'])}, cache mode {training['cache']}")
        if workload["ignored"]:
            lines.append(f"ignored      {', '.join(workload['ignored'])}")
        lines += [
            f"training     {format_count(run['accelerators'], 'accelerator')}: utilization {run['utilization']:.1%} "
            f"({'pass' if run['passes'] else 'fail'}), {format_bytes(run['read_bytes_per_second'], '/s')} read"
            for run in training["runs"]
        ]
        target = f"{workload['target_utilization']:.0%} utilization"
        lines.append(f"{'':<13}largest number of accelerators with at least {target}: {describe_largest(training)}")
    lines += [f"{name:<13}{text}" for name, text in describe_phases(result).items()]
    for item in result["verdict"]:
        state = {True: "met", False: "NOT MET", None: "not measured"}[item["ok"]]
        measured = f", measured {format_bytes(item['measured_bytes_per_second'], '/s')} ({LABELS.get(item['phase'], item['phase'])})"
        required = format_bytes(item["required_bytes_per_second"], "/s")
        lines.append(f"{'required':<13}{item['name']} rate {required}{measured if item['phase'] else ''}: {state}")
    return lines + [f"{'note':<13}{note}" for note in result["notes"]]


def describe_phases(result: Json) -> dict[str, str]:
    """Return a line per measured phase other than the training."""
    texts: dict[str, str] = {}
    if fio := result["fio"]:
        limit = "" if fio["agrees"] else f", more than the {MAX_DIFFERENCE_POINTS:g} allowed"
        texts["fio"] = (
            f"utilization {fio['utilization']:.1%} without read-ahead, {fio['fio_utilization']:.1%} with {fio['fio']}: "
            f"{fio['difference_points']:g} percentage points apart{limit}"
        )
    for name, way in (("checkpoint_write", "write"), ("checkpoint_read", "read"), ("model_loading", "read")):
        if phase := result[name]:
            host = {True: ", on another host", False: ", on the same host"}.get(phase.get("other_host"), "")
            texts[LABELS[name]] = (
                f"{format_bytes(phase['bytes'])} {'read' if way == 'read' else 'written and flushed'} by "
                f"{format_count(phase['ranks'], 'rank')} in {phase['seconds']:g} s: {format_bytes(phase[f'{way}_bytes_per_second'], '/s')}{host}"
            )
    if small := result["small_files"]:
        texts["small files"] = (
            f"{format_count(small['readers'], 'reader')}: {small['files_read_per_second']:,g} files/s read, "
            f"{small['files_written_per_second']:,g} files/s written and flushed"
        )
    if mix := result["mix"]:
        texts["all phases"] = (
            f"{format_count(mix['accelerators'], 'accelerator')}: utilization {mix['utilization']:.1%}; checkpoints written at "
            f"{format_bytes(mix['checkpoint_write_bytes_per_second'], '/s')}; {mix['files_read_per_second']:,g} files/s read"
        )
    return texts


def describe_largest(training: Json) -> str:
    """Return the largest passing number of accelerators; it is a lower bound if the requested number passes."""
    largest, requested = training["largest_passing"], training["accelerators"]
    return f"{largest} or more" if largest == requested else f"{largest} of {requested}"


def format_plan(plan: BenchmarkPlan, path: Path) -> list[str]:
    """Return the lines of a dry run."""
    seconds = plan.estimate_seconds()
    return [
        *(f"{format_bytes(size):>9}  {name}" for name, size in plan.list_files().items()),
        f"{format_bytes(sum(plan.list_files().values())):>9}  written in a subfolder of {path}, and removed at the end",
        f"{seconds / 60:>6.1f} min  estimated for storage that sustains {ASSUMED_BYTES_PER_SECOND / 1e9:g} GB/s, "
        "including the search for the largest number of accelerators",
    ]


def render_report(result: Json) -> str:
    """Return the result as an HTML page."""
    sections = {"Verdict": _render_verdict(result), "Training": ""}
    if training := result["training"]:
        runs = training["runs"]
        counts, utilizations = [run["accelerators"] for run in runs], [100 * run["utilization"] for run in runs]
        target = 100 * result["workload"]["target_utilization"]
        sections["Training"] = html_report.plot_lines(
            {"measured": (counts, utilizations), f"target {target:g}%": ([0, max(counts)], [target] * 2)},
            x="emulated accelerators",
            y="accelerator utilization, %",
            caption="Share of the time in which the emulated accelerators compute; in the remaining time, they wait for reads.",
        ) + html_report.render_table(
            [
                "accelerators",
                "utilization, %",
                "worst accelerator, %",
                "result",
                "read rate",
                "records/s",
                "measured steps",
            ],
            [
                [
                    run["accelerators"],
                    round(100 * run["utilization"], 1),
                    round(100 * run["worst_utilization"], 1),
                    "pass" if run["passes"] else "fail",
                    format_bytes(run["read_bytes_per_second"], "/s"),
                    run["samples_per_second"],
                    run["steps"],
                ]
                for run in runs
            ],
        )
        workload = {**result["workload"], "ignored": ", ".join(result["workload"]["ignored"]) or "–"}
        sections["Workload"] = html_report.render_table(
            ["setting", "value"],
            [
                [label, f"{workload[key]:,}" if isinstance(workload[key], int) else str(workload[key])]
                for key, label in WORKLOAD_LABELS.items()
            ],
        )
    if texts := describe_phases(result):
        sections["Other phases"] = html_report.render_table(["phase", "result"], [list(item) for item in texts.items()])
    reads = "direct I/O" if result["direct"] else "through the page cache"
    conditions = f"Reads: {reads}. Memory of all hosts: {format_bytes(result['memory_bytes'])}."
    hosts = [[host["host"], host["rank"]] for host in result["hosts"]]
    sections["Conditions"] = html_report.render_table(["host", "rank"], hosts) + "".join(
        html_report.render_paragraph(note) for note in (conditions, *result["notes"])
    )
    return html_report.render_page("Storage benchmark", result["path"], sections)


def _render_verdict(result: Json) -> str:
    tiles: dict[str, object] = {"result": "pass" if result["ok"] else "fail"}
    if training := result["training"]:
        tiles["accelerators at the target utilization"] = describe_largest(training)
    rows = [
        [
            item["name"],
            format_bytes(item["required_bytes_per_second"], "/s"),
            format_bytes(item["measured_bytes_per_second"], "/s"),
            LABELS.get(item["phase"], item["phase"]),
            {True: "met", False: "not met", None: "not measured"}[item["ok"]],
        ]
        for item in result["verdict"]
    ]
    table = html_report.render_table(["rate", "required", "measured", "phase", "result"], rows) if rows else ""
    return html_report.render_tiles(tiles) + table
