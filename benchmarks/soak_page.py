"""Write docs/reference/soak.md and its plot from the results of the soak; neither is edited by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import MIB, made_with, met, table_of

FLAT = 1.05  # maximum memory of a process after the warm-up, as a factor of its memory at the end of the warm-up
WINDOW = 300.0  # seconds at the beginning and at the end that are compared

HEAD = """# An hour of load

`make soak` writes this page. It serves a package with the gateway and Triton under moderate load. It samples the memory of the
gateway, the server and each model's process every {every:g} s. The model is `{model}` ({parameters:.0f}M parameters, float32, threads: {threads}).

The official OpenAI client with an API key sends {rate:g} requests per second on average (a Poisson process, seed {seed}) for {minutes:g} minutes.
The requests are completions and chats, whole or streamed. Some are sampled with a seed, some are
constrained to a JSON schema, and some come from clients that hang up early. Prompts have 8 to 256 tokens, and answers up to 64.
Each answer is compared with the first answer to the same request.
"""

MEMORY = """**begin** is the median of the first {window:g} minutes after a warm-up of {warmup:g} minutes, **end** that of the last {window:g} minutes, and
**maximum** the highest sample after the warm-up. A value is flat if neither **end** nor **maximum** exceeds **begin** by more than {percent:.0%}.
`tuneline` and `tuneline_stream` are the processes of the two models. RSS counts shared memory in full for each process; anonymous memory is private.
PSS (proportional set size) depends on the other processes of the machine, and open files depend on the connections, so neither has a goal.
"""


def verdict(results: dict[str, Any]) -> dict[str, Any]:
    """Return begin, end and maximum of each process and measure, in bytes or numbers, and whether they are flat."""
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
    """Return whether the memory of this kind (rss, anonymous) of all processes and the shared memory are flat."""
    of = results["verdict"]["of"]
    return all(one["flat"] for name, one in of.items() if name.endswith(f" {kind}") or name in ("regions", "shared"))


def good(results: dict[str, Any]) -> bool:
    """Return whether memory is flat, and no request failed, no answer differed and no shared memory is left."""
    return flat(results) and not results["left"] and not results["all"]["errors"] and not results["all"]["wrong"]


def summary(results: dict[str, Any]) -> str:
    """Return the results as lines for the terminal."""
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
    """Return the page; `plot` is the path of the plot."""
    settings = {**results["settings"], "parameters": results["parameters"] / 1e6}
    settings["seconds"] = 24 * 60 / (settings["minutes"] * settings["rate"])
    return "\n".join(
        [
            HEAD.format(**settings),
            made_with(results) + f"\nThe load test ran on {results['date']} with Triton {results['server']}.\n",
            _goals(results),
            f"![memory, and latency by the minute]({plot})\n",
            _memory(results),
            _requests(results),
            _minutes(results),
        ]
    )


def _goals(results: dict[str, Any]) -> str:
    counts, left = results["all"], results["left"]
    leftovers = f"; left: {', '.join(left)}" if left else ""
    return (
        f"- resident memory (RSS) of the gateway, the server and each model's process flat within {FLAT - 1:.0%}: {met(flat(results))}\n"
        f"- anonymous memory of each process flat within {FLAT - 1:.0%}: {met(flat(results, 'anonymous'))}\n"
        f"- no shared memory left at the end: {met(not left)}{leftovers}\n"
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
    return "## Memory\n\n" + told + "\n" + table_of(["", "begin", "end", "maximum", "change", ""], rows)


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
        f"The server and the models took {cpu['server'] / seconds:.0%} of a core, the gateway {cpu['gateway'] / seconds:.0%} "
        f"({cpu['gateway'] / results['all']['requests'] * 1000:.1f} ms of CPU time per request) and the load client "
        f"{cpu['client'] / seconds:.0%}. Times are in milliseconds, from the moment when a request was due.\n"
    )
    return f"\n## Requests\n\n{told}\n" + table_of(["", *COLUMNS], rows)


def _minutes(results: dict[str, Any]) -> str:
    """Return a table with every tenth of the minutes; the plot has every minute."""
    minutes = results["by_minute"]
    step = max(1, len(minutes) // 10)
    rows = [[str(one["minute"] + 1), *_row(one)] for one in minutes[::step]]
    return "\n## By minute\n\n" + table_of(["minute", *COLUMNS], rows)


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
    """Write RSS of each process, and latency by minute, as one SVG."""
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
