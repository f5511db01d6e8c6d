"""Write docs/reference/benchmarks-fine-tuning.md and its plot; neither is edited by hand."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.page import GIB, MIB, made_with, met, table_of
from benchmarks.peers import tuners
from benchmarks.peers.tuners import FACTORY, TRL, TUNELINE

GOAL = 1.2  # minimum ratio of useful tokens per CPU second to those of the peer at its best settings
LOSS = 0.01  # of the peer's held-out loss by which ours may lie above it and still count as equal

HEAD = """# Fine-tuning, measured

`benchmarks/fine_tuning.py` writes this page. It trains the embedded model with tuneline, a plain TRL script and LLaMA-Factory, one after the
other in separate processes. Common settings: each row once; LoRA of rank {rank}, alpha {alpha:g}, without dropout, on all linear layers; a constant
learning rate of {learning_rate:g}; {batch_size} rows per optimizer step, packed or not; float32 weights; at most {max_length} tokens per row; and
{threads} threads. Other settings are defaults, except tuneline's micro_batch_size and the settings of systems whose names end in `-kept` or `-best`.
"""

MEASURES = """- **useful tokens**: tokens without padding; **padding**: share of padding in all token positions of the batches
- **tokens/s** and **s**: from the first step to the end of the last; the median of {rounds}, which alternate between systems
- **CPU s**: CPU seconds of all threads in that time. Waiting threads spin, which increases the CPU time on a busy machine, except with `--threads 1`
- **peak memory**: PSS of all processes of the command
- **held-out loss**: cross-entropy of the answers' tokens in nats, on {held_out} rows that no system trained on, by one evaluator. The base
  model's loss is {base:.4f}
"""


def combined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for several rounds: the round with the median rate, and the peak memory of all. Failed rounds are ignored."""
    done = [one for one in rounds if "error" not in one]
    if not done:
        return rounds[-1]
    ordered = sorted(done, key=rate)
    middle = ordered[(len(ordered) - 1) // 2]
    figures = {
        "rate": statistics.median(rate(one) for one in done),
        "rates": [round(rate(one), 2) for one in done],
        "pss": max(one["cost"]["pss"] for one in done),
    }
    return {**middle, **figures}


def rate(one: dict[str, Any]) -> float:
    """Return the useful tokens per second of a round."""
    return float(one["tokens"] / one["seconds"])


def padding(row: dict[str, Any]) -> float:
    """Return the share of the slots without a token."""
    return 1 - float(row["tokens"] / row["slots"])


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare tuneline with the best settings of each peer: without packing, with it, and the best of both if both were measured.

    The best settings are those with the most useful tokens per CPU second. "cpu" and "speed" are ratios to the peer's tokens per CPU second and
    per second, "memory" is the ratio to its peak, and "loss" is the held-out loss minus the peer's.
    """
    pairs = []
    for peer in (TRL, FACTORY):
        for label, packings in (("packing off", [False]), ("packing on", [True]), ("best of either", [False, True])):
            ours, theirs = (
                max(
                    (row for row in rows if "rate" in row and row["system"] == system and row["packing"] in packings),
                    key=lambda row: row["tokens"] / row["cpu"],
                    default=None,
                )
                for system in (TUNELINE, peer)
            )
            if ours and theirs:
                pairs.append({"peer": peer, "label": label, **_compared(ours, theirs)})
    return pairs


def _compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    speed, memory = ours["rate"] / theirs["rate"], ours["pss"] / theirs["pss"]
    cpu = (theirs["cpu"] / theirs["tokens"]) / (ours["cpu"] / ours["tokens"])
    told = {"ours": ours["name"], "theirs": theirs["name"], "speed": speed, "cpu": cpu, "memory": memory}
    told |= {"fast": cpu >= GOAL, "lean": memory <= 1}
    if "held_out" in ours and "held_out" in theirs:
        loss = ours["held_out"] - theirs["held_out"]
        told |= {"loss": loss, "equal": loss <= LOSS * theirs["held_out"]}
    return told


def markdown(results: dict[str, Any], plot: str) -> str:
    """Return the page; `plot` is the address of the plot."""
    settings, rows = results["settings"], results["rows"]
    several = f"{results['rounds']} rounds" if results["rounds"] > 1 else "one round"
    measures = MEASURES.format(rounds=several, held_out=results["data"]["held_out"], base=results["base_loss"])
    failed = "".join(f"\n**{row['name']}** was not measured: {row['error']}\n" for row in rows if "error" in row)
    return "\n".join(
        [
            HEAD.format(**settings),
            _data(results["data"]),
            "## Side by side\n",
            made_with(results) + f"\nThe measurements ran on {results['date']}.\n",
            table_of(
                ["", "useful tokens", "s", "tokens/s", "CPU s", "padding", "peak memory", "held-out loss"], _rows(rows)
            )
            + failed,
            f"![tokens per second, and the loss during training]({plot})\n",
            measures,
            _goals(rows),
            _startup(rows),
            _settings(rows),
            _losses(rows),
            _profiles(results["profiles"]),
        ]
    )


def _data(data: dict[str, Any]) -> str:
    return (
        f"The rows are the first {data['rows']:,} of `{data['name']}` with one question and one answer that have at most "
        f"{data['max_length']} tokens in total: {data['tokens']:,} tokens, {data['tokens'] / data['rows']:.0f} per row. Of {data['read']:,} rows, "
        f"{data['left_out']:,} are longer and were left out, because each system truncates differently. The sha256 begins with `{data['sha256'][:16]}`.\n"
    )


def _rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = []
    for row in rows:
        if "rate" not in row:
            continue
        spread = f" ({min(row['rates']):.1f}–{max(row['rates']):.1f})" if len(row["rates"]) > 1 else ""
        loss = f"{row['held_out']:.4f}" if "held_out" in row else ""
        figures = [
            f"{row['tokens']:,}",
            f"{row['seconds']:.0f}",
            f"{row['rate']:.1f}{spread}",
            f"{row['cpu']:.0f}",
            f"{padding(row):.1%}",
        ]
        lines.append([row["name"], *figures, f"{row['pss'] / MIB:,.0f} MiB", loss])
    return lines


def _goals(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"{pair['ours']} / {pair['theirs']}",
            pair["label"],
            f"{pair['cpu']:.2f}",
            f"≥ {GOAL}: {met(pair['fast'])}",
            f"{pair['speed']:.2f}",
            f"{pair['memory']:.2f}",
            f"≤ 1: {met(pair['lean'])}",
            f"{round(pair['loss'], 4) + 0.0:+.4f}, {'equal or lower' if pair['equal'] else '**higher**'}"
            if "loss" in pair
            else "",
        ]
        for pair in ratios(rows)
    ]
    head = [
        "",
        "",
        "× tokens per CPU second",
        "goal",
        "× tokens/s",
        "× peak memory",
        "goal",
        "held-out loss, difference",
    ]
    return (
        "## tuneline compared with its peers\n\n"
        + table_of(head, lines)
        + f"\nLosses within {LOSS:.0%} count as equal.\n"
    )


def _startup(rows: list[dict[str, Any]]) -> str:
    head = ["", "s to the first step", "import", "load", "prepare"]
    lines = []
    for row in rows:
        if "rate" in row:
            parts = row.get("parts", {})
            lines.append(
                [
                    row["name"],
                    f"{row['startup']:.1f}",
                    *(f"{parts[n]:.1f}" if n in parts else "" for n in ("import", "load", "prepare")),
                ]
            )
    told = "The table shows the time from the command to the first step, including tokenization and packing, and its parts if the system reports them.\n"
    return "## Startup\n\n" + told + "\n" + table_of(head, lines)


def _settings(rows: list[dict[str, Any]]) -> str:
    head = ["", "steps", "settings in addition to the common ones", "weights", "packages"]
    lines = [
        [
            row["name"],
            str(row["steps"]),
            row["flags"],
            ", ".join(row["types"]),
            ", ".join(f"{n} {v}" for n, v in row["versions"].items()),
        ]
        for row in rows
        if "rate" in row
    ]
    return "## Settings\n\n" + table_of(head, lines)


def _losses(rows: list[dict[str, Any]]) -> str:
    lines = [[row["name"], " ".join(f"{loss:.3f}" for loss in row["losses"])] for row in rows if "rate" in row]
    told = "The table shows the loss that each system reports, by step. The order of the rows differs.\n"
    return "## Training loss\n\n" + told + "\n" + table_of(["", "loss by step"], lines)


def _profiles(profiles: dict[str, dict[str, float]]) -> str:
    kinds = list(next(iter(profiles.values()), {}))
    lines = [[name, *(f"{shares[kind]:.1%}" for kind in kinds)] for name, shares in profiles.items()]
    told = "The table shows how the time of torch's operations is divided, in a separate training run with torch's profiler.\n"
    return "## Time breakdown\n\n" + told + "\n" + table_of(["", *kinds], lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw tokens per second and memory as bars, and the loss by tokens seen, as one SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"] if "rate" in row]
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    (speed, memory), (off, on) = figure.subplots(2, 2)
    colours = {system: f"C{number}" for number, system in enumerate(tuners.SCRIPTS)}
    for axes, key, unit, title in (
        (speed, "rate", 1, "useful tokens per second"),
        (memory, "pss", GIB, "peak memory, GiB"),
    ):
        axes.barh([r["name"] for r in rows], [r[key] / unit for r in rows], color=[colours[r["system"]] for r in rows])
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
    for axes, packing in ((off, False), (on, True)):
        for row in (r for r in rows if r["packing"] == packing and r["losses"]):
            each = row["tokens"] / len(row["losses"])
            seen = [each * (step + 1) for step in range(len(row["losses"]))]
            style = "--" if row["name"].endswith(("-kept", "-best")) else "-"
            axes.plot(seen, row["losses"], style, label=row["name"], color=colours[row["system"]])
        axes.set_title(f"training loss, packing {'on' if packing else 'off'}", fontsize=10)
        axes.set_xlabel("useful tokens")
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
