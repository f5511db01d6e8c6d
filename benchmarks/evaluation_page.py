"""The pages of the evaluation benchmark: what docs/reference/benchmarks-evaluation.md and -option-tasks.md are, never edited by hand."""

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
ADDED, BESIDE, BOTH = "adapter alone, added to the weights", "adapter alone, beside the weights", "base and adapter"

HEAD = """# {title}, measured

`benchmarks/evaluation.py` scores likelihood tasks with tuneline's engine and with lm-eval's hf backend: the same requests, the same
weights in float32, the same torch and threads, in turns in one process. This page is written by it. Seconds run from the texts to the
likelihoods: tokenising is in them, imports and loading are not. The peer's batch size is, for each task, the quickest of those tried on its
first rows.
"""

OPTIONS = """Options have one token: no or yes in boolq, else the letter of an option listed in the question, as in lm-eval's MMLU. `mmlu_anatomy` is a
subject of MMLU with lm-eval's description before each question. The examples of `_5shot` are the last five rows of a file (of MMLU, its development rows).

Both systems compute a question once for all its options: lm-eval, too, looks options of one token up in the logits of one row. Without
examples both therefore compute the same tokens. tuneline saves the head and the softmax at all places but the last; what remains are
products of matrices in float32 at the speed of the processor (86% of the CPU time in torch's profile), so the goal is out of reach with
the same tokens and precision. With examples tuneline computes them once for all questions, and lm-eval once for each.
"""

WHY = """tuneline computes what the options of a question have in common once, makes no logits but those behind which a token is
scored, and gives each thread a batch of its own. **places** are tokens and padding that went through the model. The profiles are of
one thread, each over the first {rows} rows of every task{without}.
"""

TOGETHER_TOLD = """Each is measured from nothing loaded to all likelihoods: loading the weights, attaching the adapter, tokenising and
scoring are in it, imports are not. The adapter is LoRA of rank 16 on all linear layers with random matrices, so its answers are worthless
and its cost is true.

- **{added}** is how tuneline scores an adapter: in float32 the update is added to the weights, after the base was scored on them
- **{beside}** is the same engine with the adapter as PEFT attaches it, small products beside every layer
- **{both}** loads the weights once, scores the base, switches the adapter on and scores it

From the first layer on the two models compute different numbers, so nothing but loading can be shared between them: two passes are two
passes, and with enough items for scoring to outweigh loading the ratio comes near to 2. What spares the second pass is that scores are kept
by model and task: the base is measured once, whatever candidates follow.
"""


def seconds(rounds: Sequence[dict[str, Any]], key: str = "wall") -> float:
    """The median of the rounds."""
    return float(median(one[key] for one in rounds))


def speed(results: dict[str, Any], key: str = "wall", task: str | None = None) -> float:
    """The peer's seconds over ours: of all tasks, or of one."""
    mine, theirs = ([one["tasks"][task] if task else one for one in results[name]] for name in ("ours", "theirs"))
    return seconds(theirs, key) / seconds(mine, key)


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """The seconds of base and adapter together, over those of one model run in each way."""
    rounds = results["adapter"]["rounds"] if "adapter" in results else {}
    return {name: seconds(rounds[BOTH]) / seconds(runs) for name, runs in rounds.items() if name != BOTH}


def equal(results: dict[str, Any]) -> bool:
    """Whether both had the same items right."""
    return not any(results["unequal"].values())


def summary(results: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    lines = [f"base and adapter together: {ratio:.2f} × {name}" for name, ratio in ratios(results).items()]
    if "theirs" in results:
        verdict = "the same items right" if equal(results) else "NOT the same items right"
        lines.insert(0, f"{speed(results):.2f} × lm-eval's speed at its best batch sizes, {verdict}")
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """The page."""
    only_options = all(task.removesuffix(icl.FEW_SHOT_SUFFIX) in icl.OPTION_TASKS for task in results["lengths"])
    parts = [
        HEAD.format(title="Options of one token" if only_options else "Evaluation"),
        _data(results),
        made_with(results) + f"\nOn {results['date']}, {results['threads']} threads, {_versions(results)}.\n",
    ]
    if "theirs" in results:
        parts += [_beside(results), _scores(results), _trials(results), _profiles(results)]
    else:
        parts += [f"**lm-eval** was not measured: {results['peer_error']}\n"]
    if "adapter" in results:
        parts.append(_together(results))
    return "\n".join([*parts, _memory(results)])


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
        told + "\n" + table_of(["", "items", "requests", "tokens", "tokens scored", "tokens a request", "sha256"], rows)
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
        f"{a['wall']:.1f} and {b['wall']:.1f}" for a, b in zip(results["ours"], results["theirs"], strict=True)
    )
    wall, cpu = speed(results), speed(results, "cpu")
    goal = f"Goal, at least {SPEED:g} × the speed of lm-eval at its best batch size: {met(min(wall, cpu) >= SPEED)}"
    told = (
        f"tuneline with `batch_tokens: {results['batch_tokens']}`; medians of the rounds, which were {all_rounds} s.\n"
    )
    if results["load"] > results["cores"] / 2:
        told += "\nOther programs used the processor at the same time: the CPU seconds compare, the seconds do not.\n"
    slow = [task for task in results["lengths"] if speed(results, "cpu", task) < SPEED]
    missed = f" Tasks that miss it in CPU time: {', '.join(slow)}." if slow else ""
    return f"## Beside lm-eval\n\n{table_of(head, rows)}\n{told}\n{goal} ({wall:.2f}, in CPU time {cpu:.2f}).{missed}\n"


def _scores(results: dict[str, Any]) -> str:
    rows = []
    for task in results["lengths"]:
        apart, unequal = results["differences"][task], results["unequal"][task]
        accuracies = [f"{results['accuracy'][name][task]:.4f}" for name in ("ours", "theirs")]
        rows.append([task, *accuracies, str(len(unequal)), f"{apart['mean']:.1e}", f"{apart['most']:.1e}"])
    head = ["", "tuneline", "lm-eval", "items that differ", "log-likelihood, mean difference", "most"]
    verdict = (
        "Both have the same items right."
        if equal(results)
        else "**The two do not have the same items right: the speeds do not compare.**"
    )
    return f"## Scores\n\n{verdict} Differences are in nats a request.\n\n{table_of(head, rows)}"


def _trials(results: dict[str, Any]) -> str:
    rows = [[str(trial["batch"]), f"{trial['wall']:.1f}", f"{trial['cpu']:.1f}"] for trial in results["trials"]]
    return "## lm-eval's batch sizes, on the first rows\n\n" + table_of(["batch_size", "s", "CPU s"], rows)


def _profiles(results: dict[str, Any]) -> str:
    mine, theirs = (results["profiles"][name] for name in ("ours", "theirs"))
    rows = [["places", f"{mine['slots']:,.0f}", f"{theirs['slots']:,.0f}", f"{theirs['slots'] / mine['slots']:.2f}"]]
    for part in mine["parts"]:
        one, other = mine["parts"][part], theirs["parts"][part]
        rows.append([f"{part}, s", f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}" if one else ""])
    rows.append(["all, s", f"{mine['total']:.2f}", f"{theirs['total']:.2f}", f"{theirs['total'] / mine['total']:.2f}"])
    mixed = len({task.endswith(icl.FEW_SHOT_SUFFIX) for task in results["lengths"]}) > 1
    told = WHY.format(rows=results["profile_rows"], without=" without examples" if mixed else "")
    return f"## Where the time goes\n\n{told}\n{table_of(['', 'tuneline', 'lm-eval', '×'], rows)}"


def _together(results: dict[str, Any]) -> str:
    told, found = results["adapter"], ratios(results)
    rows = []
    for name, rounds in told["rounds"].items():
        ratio = found.get(name)
        verdict = met(ratio <= TOGETHER) if ratio is not None and name != "lm-eval, adapter" else ""
        rows.append(
            [name, f"{seconds(rounds):.1f}", f"{seconds(rounds, 'cpu'):.1f}", f"{ratio:.2f}" if ratio else "", verdict]
        )
    head = ["", "s", "CPU s", "together over this", f"goal: at most {TOGETHER:g}"]
    exact = (
        f"Log-likelihoods with the update added to the weights differ from those beside them by at most {told['added_apart']:.1e} nats a "
        f"request; those of base and adapter together from those of each alone by at most {told['together_apart']:.1e}.\n"
    )
    return f"## An adapter and its base\n\n{TOGETHER_TOLD.format(added=ADDED, beside=BESIDE, both=BOTH)}\n{table_of(head, rows)}\n{exact}"


def _memory(results: dict[str, Any]) -> str:
    cost = results["cost"]
    return f"\nThe process of all measurements took {cost['wall']:,.0f} s and held {cost['rss'] / MIB:,.0f} MiB at most, both systems in it.\n"
