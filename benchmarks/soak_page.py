"""The page of the soak: docs/soak.md and its plot are what this writes, never edited by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import MIB, made_with, met, table_of

FLAT = 1.05  # times what was held when the warm-up was over that a process may hold later
WINDOW = 300.0  # seconds at the beginning and at the end of what is compared

HEAD = """# An hour of load

`benchmarks/soak.py` serves a package with a real Triton server under moderate load, and looks every {every:g} s at what the server and
each model's process hold. This page is written by it; `make soak` does it again. The model is `{model}` ({parameters:.0f}M parameters,
float32, {threads} thread(s)). Requests arrive at random, {rate:g} a second on average (a Poisson process, seed {seed}), for {minutes:g}
minutes: whole and streamed answers, sampled ones with a seed, and clients that hang up in the middle, with prompts of 8 to 256 and answers
of 4 to 64 tokens. Each answer is compared with the first one to the same request.
"""

MEMORY = """The first {warmup:g} minutes are the warm-up. **begin** is the median of the {window:g} minutes after it, **end** that of the
last ones, **most** the greatest of all samples after the warm-up; flat is what is at neither more than {percent:.0%} above the begin.
`tritonserver` is the server, the others are the processes of the two models. RSS counts shared memory and libraries in full for each
process; anonymous memory is what it wrote itself; PSS counts what is shared in parts, moves with every other process on the machine, and is
not judged. Of open files the end counts.
"""


def verdict(results: dict[str, Any]) -> dict[str, Any]:
    """For each process and measure: what it held at the begin and at the end, and the most, in bytes or pieces; and whether it is flat."""
    warm = results["settings"]["warmup_minutes"] * 60
    samples = [sample for sample in results["samples"] if sample["at"] >= warm]
    window = min(WINDOW, (samples[-1]["at"] - samples[0]["at"]) / 2)
    found = {}
    for name in samples[0]["processes"]:
        for key in ("rss", "anonymous", "pss", "files"):
            found[f"{name} {key}"] = _compared(
                samples, window, lambda sample, name=name, key=key: sample["processes"][name][key]
            )
    for key in ("regions", "shared"):
        found[key] = _compared(samples, window, lambda sample, key=key: sample[key])
    return {"window": window, "of": found}


def _compared(
    samples: Sequence[dict[str, Any]], window: float, value: Callable[[dict[str, Any]], float]
) -> dict[str, Any]:
    first, last = samples[0]["at"], samples[-1]["at"]
    begin = median(value(one) for one in samples if one["at"] <= first + window)
    end = median(value(one) for one in samples if one["at"] >= last - window)
    most = max(map(value, samples))
    return {"begin": begin, "end": end, "most": most, "flat": max(end, most) <= FLAT * begin}


def flat(results: dict[str, Any], kind: str = "rss") -> bool:
    """Whether no process's memory of this kind (rss, anonymous) grew, and no shared memory."""
    of = results["verdict"]["of"]
    return all(one["flat"] for name, one in of.items() if name.endswith(f" {kind}") or name in ("regions", "shared"))


def good(results: dict[str, Any]) -> bool:
    """Whether nothing grew, failed, differed or was left over."""
    return flat(results) and not results["left"] and not results["all"]["errors"] and not results["all"]["wrong"]


def summary(results: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    counts = results["all"]
    lines = [
        f"{counts['requests']} requests, {counts['hung_up']} hung up, {counts['errors']} errors, {counts['wrong']} wrong"
    ]
    lines += [f"{name}: {_shown(name, one)}" for name, one in results["verdict"]["of"].items()]
    return "\n".join([*lines, f"flat: {flat(results)}; left over: {results['left'] or 'nothing'}"])


def _shown(name: str, one: dict[str, Any]) -> str:
    unit = 1 if name.endswith(("files", "regions")) else MIB
    return ", ".join(f"{key} {one[key] / unit:.1f}" for key in ("begin", "end", "most"))


def markdown(results: dict[str, Any], plot: str) -> str:
    """The page; `plot` is the address of the plot."""
    settings = {**results["settings"], "parameters": results["parameters"] / 1e6}
    return "\n".join(
        [
            HEAD.format(**settings),
            made_with(results) + f"\nOn {results['date']}, Triton {results['server']}.\n",
            _goals(results),
            f"![memory, and latency by the minute]({plot})\n",
            _memory(results),
            _requests(results),
            _minutes(results),
        ]
    )


def _goals(results: dict[str, Any]) -> str:
    counts, left = results["all"], results["left"]
    told = f"; left: {', '.join(left)}" if left else ""
    return (
        f"- memory (RSS) of the server and of each model's process flat within {FLAT - 1:.0%}: {met(flat(results))}\n"
        f"- what each of them wrote itself (anonymous memory) flat within {FLAT - 1:.0%}: {met(flat(results, 'anonymous'))}\n"
        f"- no shared memory left over at the end: {met(not left)}{told}\n"
        f"- no failed request: {met(not counts['errors'])} ({counts['errors']} of {counts['requests']:,})\n"
        f"- equal requests have equal answers: {met(not counts['wrong'])} ({counts['wrong']} differed, of {results['different']} different "
        "requests)\n"
    )


def _memory(results: dict[str, Any]) -> str:
    window = results["verdict"]["window"] / 60
    told = MEMORY.format(warmup=results["settings"]["warmup_minutes"], window=round(window, 1), percent=FLAT - 1)
    rows = []
    for name, one in results["verdict"]["of"].items():
        count = name.endswith(("files", "regions"))
        cells = [f"{one[key]:,.0f}" if count else f"{one[key] / MIB:,.1f} MiB" for key in ("begin", "end", "most")]
        rows.append(
            [_called(name), *cells, f"{one['end'] / one['begin'] - 1:+.1%}", "flat" if one["flat"] else "not flat"]
        )
    return "## Memory\n\n" + told + "\n" + table_of(["", "begin", "end", "most", "end over begin", ""], rows)


def _called(name: str) -> str:
    said = {"rss": "RSS", "anonymous": "anonymous memory", "pss": "PSS", "files": "open files"}
    process, _, key = name.rpartition(" ")
    return (
        f"`{process}`, {said[key]}"
        if process
        else {"regions": "regions of shared memory", "shared": "shared memory"}[name]
    )


def _requests(results: dict[str, Any]) -> str:
    rows = [[kind, *_row(one)] for kind, one in {**results["kinds"], "**all**": results["all"]}.items()]
    cpu, seconds = results["cpu"], results["settings"]["minutes"] * 60
    told = (
        f"Server and models took {cpu['server'] / seconds:.0%} of a core, the load client with its looks at memory "
        f"{cpu['client'] / seconds:.0%}. Times are milliseconds, from the moment a request was due.\n"
    )
    return f"\n## Requests\n\n{told}\n" + table_of(["", *COLUMNS], rows)


def _minutes(results: dict[str, Any]) -> str:
    """By tenths of the time; the plot has every minute."""
    minutes = results["by_minute"]
    step = max(1, len(minutes) // 10)
    rows = [[str(one["minute"] + 1), *_row(one)] for one in minutes[::step]]
    return "\n## Some of the minutes\n\n" + table_of(["minute", *COLUMNS], rows)


COLUMNS = ["requests", "hung up", "errors", "wrong", "tokens", "first token p50", "p99", "answer p50", "p99"]


def _row(one: dict[str, Any]) -> list[str]:
    counts = [f"{one[key]:,}" for key in ("requests", "hung_up", "errors", "wrong", "tokens")]
    times = [
        f"{one[key][rank] * 1000:.0f}" if one[key] else ""
        for key in ("first_token", "latency")
        for rank in ("p50", "p99")
    ]
    return [*counts, *times]


def plot(results: dict[str, Any], path: Path) -> None:
    """RSS of each process, and latency by the minute, as one SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    memory, latency = figure.subplots(2, 1, sharex=True)
    samples, minutes = results["samples"], results["by_minute"]
    for name in samples[0]["processes"]:
        held = [sample["processes"][name]["rss"] / MIB for sample in samples]
        memory.plot([sample["at"] / 60 for sample in samples], held, label=name)
    memory.axvline(results["settings"]["warmup_minutes"], color="grey", linewidth=0.8, linestyle=":")
    memory.set_title("RSS, MiB; the dotted line is the end of the warm-up", fontsize=10)
    memory.set_ylim(bottom=0)
    for key, rank, label in (
        ("first_token", "p50", "first token, p50"),
        ("latency", "p50", "answer, p50"),
        ("latency", "p99", "answer, p99"),
    ):
        known = [one for one in minutes if one[key]]
        latency.plot([one["minute"] + 0.5 for one in known], [one[key][rank] * 1000 for one in known], label=label)
    latency.set_title("milliseconds, by the minute", fontsize=10)
    latency.set_yscale("log")
    latency.set_xlabel("minutes")
    for axes in (memory, latency):
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
