"""Write docs/reference/benchmarks-evaluation.md and benchmarks-option-tasks.md; neither is edited by hand."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import icl
from benchmarks.page import MIB, made_with, met, table_of

SPEED, TOGETHER = (
    2.0,
    1.6,
)  # times lm-eval's speed, at least; times the seconds of one model for an adapter and its base, at most
ADDED, BESIDE, BOTH = "adapter alone, added to the weights", "adapter alone, not added", "base and adapter"

HEAD = """# {title}, measured

`benchmarks/evaluation.py` writes this page. It scores likelihood tasks with tuneline's engine and with lm-eval's hf backend, alternately in one
process, with the same requests, float32 weights, torch and threads. Times include tokenization, but not imports and loading. For each task,
lm-eval uses the fastest of several batch sizes, tried on the task's first rows.
"""

OPTIONS = """Each option is one token: "no" or "yes" in boolq, otherwise the letter of a choice that the question lists, as in lm-eval's MMLU. `mmlu_anatomy` has
lm-eval's description before each question. The five examples of `_5shot` tasks are the last rows of a file, or MMLU's development rows.

Both systems process a question once for all its options. Without examples, they therefore process the same tokens; tuneline computes
the head and the softmax at the last position only. In this case, the goal is out of reach: float32 matrix products take 86% of the CPU time. tuneline
computes examples once for all questions, lm-eval once per question.
"""

WHY = """tuneline computes the common prefix of a question's options once, and logits only where a token is scored. Each thread has its own batch.
**positions** are the tokens and padding that the model processes. The profiles use one thread and the first {rows} rows of every task{without}.
"""

TOGETHER_TOLD = """Times include loading the weights, attaching the adapter, tokenization and scoring, but not imports. The adapter is LoRA of rank 16 on all
linear layers. Its matrices are random: the answers are meaningless, but the cost is real.

- **{added}**: tuneline's method; it adds the float32 update to the weights after it has scored the base
- **{beside}**: the same engine with PEFT's adapter, as small extra matrix products in every layer
- **{both}**: loads the weights once, scores the base, and then scores the adapter

The two models share only loading, so the ratio approaches 2 with more items. tuneline stores scores by model and task: it scores a base once
for all candidates.
"""


def seconds(rounds: Sequence[dict[str, Any]], key: str = "wall") -> float:
    """Return the median seconds of the rounds."""
    return float(median(one[key] for one in rounds))


def speed(results: dict[str, Any], key: str = "wall", task: str | None = None) -> float:
    """Return lm-eval's seconds divided by tuneline's, for all tasks or for one."""
    mine, theirs = ([one["tasks"][task] if task else one for one in results[name]] for name in ("ours", "theirs"))
    return seconds(theirs, key) / seconds(mine, key)


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of base and adapter together divided by those of one model, for each way to run it."""
    rounds = results["adapter"]["rounds"] if "adapter" in results else {}
    return {name: seconds(rounds[BOTH]) / seconds(runs) for name, runs in rounds.items() if name != BOTH}


def equal(results: dict[str, Any]) -> bool:
    """Return whether both systems answered the same items correctly."""
    return not any(results["unequal"].values())


def summary(results: dict[str, Any]) -> str:
    """Return a few lines for the terminal."""
    lines = [f"base and adapter together: {ratio:.2f} × {name}" for name, ratio in ratios(results).items()]
    if "theirs" in results:
        verdict = "the same items correct" if equal(results) else "NOT the same items correct"
        lines.insert(0, f"{speed(results):.2f} × lm-eval's speed at its best batch sizes, {verdict}")
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """Return the page."""
    only_options = all(task.removesuffix(icl.FEW_SHOT_SUFFIX) in icl.OPTION_TASKS for task in results["lengths"])
    parts = [
        HEAD.format(title="Options of one token" if only_options else "Evaluation"),
        _data(results),
        made_with(results)
        + f"\nThe measurements ran on {results['date']} with {_count_threads(results)} and {_versions(results)}.\n",
    ]
    if "theirs" in results:
        parts += [_beside(results), _scores(results), _trials(results), _profiles(results)]
    else:
        parts += [f"**lm-eval** was not measured: {results['peer_error']}\n"]
    if "adapter" in results:
        parts.append(_together(results))
    return "\n".join([*parts, _memory(results)])


def _count_threads(results: dict[str, Any]) -> str:
    return "1 thread" if results["threads"] == 1 else f"{results['threads']} threads"


def _versions(results: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in results["versions"].items())


def _data(results: dict[str, Any]) -> str:
    rows = []
    for task, told in results["lengths"].items():
        counts = [f"{told[name]:,}" for name in ("items", "requests", "tokens", "scored")]
        rows.append([task, *counts, f"{told['tokens'] / told['requests']:.0f}", f"`{results['sha256'][task][:16]}`"])
    told = f"The model is `{results['model']}`; the items are the first rows of MosaicML's in-context-learning files.\n"
    if any(task.removesuffix(icl.FEW_SHOT_SUFFIX) in icl.OPTION_TASKS for task in results["lengths"]):
        told += "\n" + OPTIONS
    return (
        told
        + "\n"
        + table_of(["", "items", "requests", "tokens", "tokens scored", "tokens per request", "sha256"], rows)
    )


def _beside(results: dict[str, Any]) -> str:
    rows = []
    for task in [*results["lengths"], None]:
        mine, theirs = ([one["tasks"][task] if task else one for one in results[name]] for name in ("ours", "theirs"))
        figures = [f"{seconds(one, key):.1f}" for one in (mine, theirs) for key in ("wall", "cpu")]
        ratios = [f"{speed(results, key, task):.2f}" for key in ("wall", "cpu")]
        rows.append([task or "**all**", *figures, str(results["best_of"][task]) if task else "", *ratios])
    head = ["", "tuneline s", "CPU s", "lm-eval s", "CPU s", "its batch size", "× speed", "× CPU"]
    all_rounds = ", ".join(
        f"{a['wall']:.1f} / {b['wall']:.1f}" for a, b in zip(results["ours"], results["theirs"], strict=True)
    )
    wall, cpu = speed(results), speed(results, "cpu")
    goal = f"Goal: at least {SPEED:g} × the speed of lm-eval at its best batch size: {met(min(wall, cpu) >= SPEED)}"
    told = (
        f"tuneline runs with `batch_tokens: {results['batch_tokens']}`. The table shows the medians of the rounds (tuneline / lm-eval): "
        f"{all_rounds} s.\n"
    )
    if results["load"] > results["cores"] / 2:
        told += "\nOther programs were using the CPU: compare the CPU seconds, not the elapsed seconds.\n"
    slow = [task for task in results["lengths"] if speed(results, "cpu", task) < SPEED]
    missed = f" Tasks that miss the goal in CPU time: {', '.join(slow)}." if slow else ""
    return f"## Compared with lm-eval\n\n{table_of(head, rows)}\n{told}\n{goal} ({wall:.2f}, in CPU time {cpu:.2f}).{missed}\n"


def _scores(results: dict[str, Any]) -> str:
    rows = []
    for task in results["lengths"]:
        apart, unequal = results["differences"][task], results["unequal"][task]
        accuracies = [f"{results['accuracy'][name][task]:.4f}" for name in ("ours", "theirs")]
        rows.append([task, *accuracies, str(len(unequal)), f"{apart['mean']:.1e}", f"{apart['most']:.1e}"])
    head = ["", "tuneline", "lm-eval", "items that differ", "log-likelihood, mean difference", "maximum"]
    verdict = (
        "Both systems answer the same items correctly."
        if equal(results)
        else "**The systems differ in some items, so their speeds are not comparable.**"
    )
    return f"## Scores\n\n{verdict} Differences are in nats per request.\n\n{table_of(head, rows)}"


def _trials(results: dict[str, Any]) -> str:
    rows = [[str(trial["batch"]), f"{trial['wall']:.1f}", f"{trial['cpu']:.1f}"] for trial in results["trials"]]
    return "## lm-eval's batch sizes, on the first rows\n\n" + table_of(["batch_size", "s", "CPU s"], rows)


def _profiles(results: dict[str, Any]) -> str:
    mine, theirs = (results["profiles"][name] for name in ("ours", "theirs"))
    rows = [["positions", f"{mine['slots']:,.0f}", f"{theirs['slots']:,.0f}", f"{theirs['slots'] / mine['slots']:.2f}"]]
    for part in mine["parts"]:
        one, other = mine["parts"][part], theirs["parts"][part]
        rows.append([f"{part}, s", f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}" if one else ""])
    rows.append(["all, s", f"{mine['total']:.2f}", f"{theirs['total']:.2f}", f"{theirs['total'] / mine['total']:.2f}"])
    mixed = len({task.endswith(icl.FEW_SHOT_SUFFIX) for task in results["lengths"]}) > 1
    told = WHY.format(rows=results["profile_rows"], without=" without examples" if mixed else "")
    return f"## Time breakdown\n\n{told}\n{table_of(['', 'tuneline', 'lm-eval', '×'], rows)}"


def _together(results: dict[str, Any]) -> str:
    told, found = results["adapter"], ratios(results)
    rows = []
    for name, rounds in told["rounds"].items():
        ratio = found.get(name)
        verdict = met(ratio <= TOGETHER) if ratio is not None and name != "lm-eval, adapter" else ""
        rows.append(
            [name, f"{seconds(rounds):.1f}", f"{seconds(rounds, 'cpu'):.1f}", f"{ratio:.2f}" if ratio else "", verdict]
        )
    head = ["", "s", "CPU s", "ratio of both to this", f"goal: at most {TOGETHER:g}"]
    exact = (
        f"Log-likelihoods differ by at most {told['added_apart']:.1e} nats per request between an update added to the weights and one that is "
        f"not. The difference between models scored together and alone is at most {told['together_apart']:.1e} nats.\n"
    )
    return f"## An adapter and its base\n\n{TOGETHER_TOLD.format(added=ADDED, beside=BESIDE, both=BOTH)}\n{table_of(head, rows)}\n{exact}"


def _memory(results: dict[str, Any]) -> str:
    cost = results["cost"]
    return f"\nAll measurements ran in one process, which took {cost['wall']:,.0f} s and used at most {cost['rss'] / MIB:,.0f} MiB.\n"
