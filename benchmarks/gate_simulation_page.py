"""The page of the gate's simulation, docs/reference/benchmarks-gate.md, and its plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import gate_simulation
from benchmarks.gate_simulation import BETTER, BOUND_ALONE, ITEM_LOSSES, MAX_LOSS, METHODS, SIZES, Rates, Results
from benchmarks.page import made_with, met, table_of
from components.common.gate_rules import Rule
from components.evaluation import promotion_gate
from components.evaluation.config import MAX_HARMED_SHARE

GOAL = 0.07
DEFAULT, STRICT = ITEM_LOSSES
METHOD_LABELS = {"before": "earlier bound", "gate": "Gaffke (the gate's)"}

HEAD = """# Promotion gate, simulated

`make bench-gate` writes this page. It simulates how often the promotion gate accepts a model that it must refuse (false
acceptance), an equal model, and a better model. [Evaluation](../how-to/evaluation.md#statistics) describes the bounds.

The rule is `max_loss: {max_loss}` with 95% confidence. The true mean difference is exactly −{max_loss} for false acceptance,
0 for an equal model, and +{better} for a better model. Each case has {trials:,} trials; cases with an equal or better model have
a quarter as many. To approximate the gate's exact bound, all trials share {samples:,} weightings of the items. A
measured rate of 5% has a standard error of 0.7%. `max_item_loss` is {loss:g} nats per token, the default of `held_out.loss`, and 1
for right and wrong answers. A catastrophe is a loss of `max_item_loss` on one item; all other items are slightly better, so that the mean stays the same.
"""

GUARANTEE = """## Guarantee and limits

- The bound on the mean assumes one more item with a loss of `max_item_loss`, or with the worst observed loss. The bound is exact if
  right answers can only be lost, or only be gained. For other differences of at most `max_item_loss`, the bound is a conjecture that no
  simulation has contradicted.
- The mean does not reflect catastrophes beyond `max_item_loss` that no test item shows. The rule `max_harmed_share`
  limits the share of such items, by default to 10%, with an exact bound. If 1% of the items lose twice `max_item_loss`
  and the mean is at the limit, the rule on the mean alone accepts the model in these shares of trials: {beyond}.
- Items must be independent. Near-duplicates in a test split make the bounds too optimistic; the data stage removes them.
"""


def write_page(results: Results, path: Path, facts: dict[str, Any]) -> None:
    """Write the page and its plot."""
    plot_path = path.parent / "images" / "benchmarks-gate.svg"
    _plot(results, plot_path)
    beyond = ", ".join(f"{rates['gate']:.0%} with {items} items" for items, rates in results.beyond.items())
    worst = results.find_worst("gate")
    parts = [
        HEAD.format(max_loss=MAX_LOSS, better=BETTER, loss=DEFAULT, **facts),
        made_with(facts),
        f"Goal: false acceptance of at most {GOAL:.0%} in every case: {met(worst <= GOAL)} (worst {worst:.1%}; "
        f"{results.find_worst('before'):.1%} with the earlier bound).\n",
        "![false acceptance and power by distribution](images/benchmarks-gate.svg)\n",
        "## False acceptance\n\nThe table shows false acceptance with the earlier bound → with the present bound, by number of items.\n",
        _compare(results.false_acceptance[DEFAULT]),
        f"For metrics in nats per token, the rule requires {_count_required_items()} items. Without this minimum, as for "
        f"`min_gain: 0`, the worst false acceptance is {results.find_worst(BOUND_ALONE):.1%}.\n",
        "## Power\n\nThe table shows acceptance by the current rule: equal model / better model, by number of items. "
        "With too few items, the rule accepts nothing.\n",
        _show_power(results, DEFAULT),
        "## Bounds compared\n\nThe earlier bound is the lower of two bounds: a studentised bootstrap bound, and percentiles widened for small samples. Betting "
        "and empirical Bernstein bounds are proven under the same assumption, but need several times as many items. The power is the mean "
        "over the distributions, for an equal model.\n",
        _compare_methods(results),
        "## A smaller max_item_loss\n\n`max_item_loss: 1` needs fewer items. A catastrophe is then a loss of 1. Losses beyond 1 break "
        f"the assumption: the worst false acceptance is {results.find_worst('gate', STRICT):.1%}.\n",
        _compare(results.false_acceptance[STRICT]),
        _show_power(results, STRICT),
        f"## Share of harmed items\n\nThe table shows acceptance by `max_harmed_share: {MAX_HARMED_SHARE:g}` if "
        f"exactly {MAX_HARMED_SHARE:.0%} of all items are harmed.\n",
        table_of([f"{items} items" for items in results.harmed], [[f"{v:.1%}" for v in results.harmed.values()]]),
        "## Reuse of a test split\n\nThe table shows the probability that at least one of several inferior candidates passes on one test split "
        f"of {gate_simulation.REUSE_ITEMS:,} items (normal differences, `max_item_loss: 1`, {gate_simulation.REUSE_SAMPLES:,} "
        "weightings). "
        "[Promotion](../how-to/registry.md#reuse-of-a-test-split) describes the correction.\n",
        table_of(
            ["candidates", *next(iter(results.reuse.values()))],
            [[count, *(f"{rate:.1%}" for rate in rates.values())] for count, rates in results.reuse.items()],
        ),
        GUARANTEE.format(beyond=beyond),
    ]
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _count_required_items() -> int:
    return promotion_gate.compute_min_items(Rule(max_loss=MAX_LOSS), DEFAULT, None)


def _compare(table: Mapping[str, Mapping[int, Rates]]) -> str:
    rows = [
        [name, *(f"{rates['before']:.1%} → {rates['gate']:.1%}" for rates in by_size.values())]
        for name, by_size in table.items()
    ]
    return table_of(["differences", *map(str, SIZES)], rows)


def _show_power(results: Results, max_item_loss: float) -> str:
    rows = [
        [
            name,
            *(
                f"{by_size[items]['gate']:.0%} / {results.better[max_item_loss][name][items]['gate']:.0%}"
                for items in by_size
            ),
        ]
        for name, by_size in results.equal[max_item_loss].items()
    ]
    return table_of(["differences", *map(str, SIZES)], rows)


def _compare_methods(results: Results) -> str:
    rows = [
        [
            METHOD_LABELS.get(method, method),
            f"{results.find_worst(method):.1%}",
            *(f"{results.average_power(method, items):.0%}" for items in SIZES),
        ]
        for method in METHODS
    ]
    return table_of(["bound", "worst false acceptance", *(f"power, {items}" for items in SIZES)], rows)


def _plot(results: Results, path: Path) -> None:
    """Write false acceptance and power by distribution, with one mark for each number of items, as one SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tuneline"  # equal plots have equal bytes
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(results.false_acceptance[DEFAULT])
    shades = [0.25 + 0.75 * index / (len(SIZES) - 1) for index in range(len(SIZES))]
    for method, color, label in (("before", "tab:red", "earlier bound"), ("gate", "tab:blue", "present bound")):
        for items, shade in zip(SIZES, shades, strict=True):
            rates = [results.false_acceptance[DEFAULT][name][items][method] * 100 for name in names]
            known = label if items == SIZES[-1] else None
            left.scatter(rates, range(len(names)), s=24, color=color, alpha=shade, label=known, linewidths=0)
    left.axvline(GOAL * 100, color="grey", linewidth=0.8, linestyle=":")
    left.set_title(f"False acceptance, %; the dotted line is {GOAL:.0%}", fontsize=10)
    for table, color, label in ((results.equal, "tab:blue", "equal"), (results.better, "tab:green", "better")):
        for items, shade in zip(SIZES, shades, strict=True):
            rates = [table[DEFAULT][name][items]["gate"] * 100 for name in names]
            known = label if items == SIZES[-1] else None
            right.scatter(rates, range(len(names)), s=24, color=color, alpha=shade, label=known, linewidths=0)
    right.set_title("Acceptance of an equal and of a better model, %", fontsize=10)
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.invert_yaxis()
    figure.supxlabel(f"darker marks: more items ({', '.join(map(str, SIZES))})", fontsize=8)
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False, loc="upper right" if axes is left else "center")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", linewidth=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
