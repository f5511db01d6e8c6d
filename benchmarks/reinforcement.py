"""Reinforcement learning with a verifiable reward, for five seeds: a tiny model learns to extract two values, then to do so in JSON.

    python -P -m benchmarks.reinforcement --markdown docs/reference/benchmarks-reinforcement.md

Half of the supervised examples answer in JSON and half in a sentence. The objective grpo then rewards JSON objects with the right
values. Both models answer the same held-out prompts greedily.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from tests.tiny import tiny_model
from tuneline import Customization, curate, evaluate, finetune

SEEDS = (1, 2, 3, 4, 5)
TEMPLATES = (
    "Order {n} {item}.", "Please send {n} {item}.", "{item}: {n}", "We need {item}, {n} in all.", "Pack {n} {item} today.",
    "Add {n} {item} to the list.", "{n} {item}, please.", "The store is short of {n} {item}.", "How about {n} {item}?",
)  # fmt: skip
ITEMS = (
    "pipes", "boards", "screws", "blankets", "jars", "bolts", "cans", "rolls", "lamps", "doors", "tiles", "ropes", "nails", "hooks",
    "belts", "boxes", "panes", "wires", "tapes", "locks",
)  # fmt: skip
LARGEST = 9
SFT = {
    "adaptation": "full",
    "epochs": 16.0,
    "learning_rate": 2e-3,
    "batch_size": 32,
    "micro_batch_size": 32,
    "max_length": 64,
}
GRPO = {
    "objective": "grpo",
    "adaptation": "lora",
    "max_steps": 100,
    "learning_rate": 1e-3,
    "batch_size": 16,
    "micro_batch_size": 16,
    "max_length": 64,
    "checkpoint_every": 30,
    "grpo": {
        "rewards": [{"kind": "json_match"}, {"kind": "final_number"}, {"kind": "no_repetition", "weight": 0}],
        "answers_per_prompt": 8,
        "max_answer_tokens": 32,
    },
}
CURATION = {"near_duplicate_threshold": 1.0, "fractions": {"train": 0.7, "validation": 0.05, "test": 0.25}}
MAX_LOSS = 0.05  # of the share of right numbers, which both kinds of answers contain


def build_rows(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the supervised training, half of which answer in a sentence, and those of the reinforcement."""
    order = random.Random(seed)  # noqa: S311 - rows of a benchmark
    supervised, reinforced = [], []
    for item in ITEMS:
        for n in range(1, LARGEST + 1):
            for text in TEMPLATES:
                prompt, reference = text.format(n=n, item=item), json.dumps({"item": item, "n": n})
                answer = reference if order.random() < 0.5 else f"It is {n} {item}."
                supervised.append({"prompt": prompt, "completion": answer})
                reinforced.append({"prompt": prompt, "completion": reference})
    return supervised, reinforced


def measure(seed: int, folder: Path) -> dict[str, Any]:
    """Train both models of a seed and return the shares of held-out prompts that each answers rightly, with an interval."""
    base = tiny_model(folder / "base", seed=seed, head=32)
    datasets = {}
    for name, rows in zip(("sft", "grpo"), build_rows(seed), strict=True):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        customization = Customization.load(seed=seed, data_curation={**CURATION, "sources": [str(path)]})
        datasets[name] = curate([str(path)], folder / f"dataset-{name}", customization, quiet=True).dataset
    evaluation = {
        "suite": "none",
        "tasks": [
            {"kind": "held_out"},
            {"kind": "generation", "metrics": ["json_valid", "exact_match", "final_number"]},
        ],
        "gate": [
            {"metric": "generation.exact_match", "min_gain": 0},
            {"metric": "generation.final_number", "max_loss": MAX_LOSS},
        ],
    }

    def load(base_model: Path, recipe: dict[str, Any]) -> Customization:
        return Customization.load(
            seed=seed, fine_tuning={"base_model": str(base_model), **recipe}, evaluation=evaluation
        )

    supervised = finetune(datasets["sft"], folder / "sft", load(base, SFT), workdir=folder / "work", quiet=True)
    recipe = load(supervised.model, GRPO)
    reinforced = finetune(datasets["grpo"], folder / "grpo", recipe, workdir=folder / "work", quiet=True)
    result = evaluate(
        reinforced.model, datasets["grpo"], folder / "evaluation", recipe, workdir=folder / "work", quiet=True
    )
    return {"seed": seed, "verdict": result.verdict, "reasons": result.reasons, "metrics": result.metrics["generation"]}


PAGE = """# Reinforcement learning, measured

`make bench-reinforcement` writes this page. A random model of two layers (hidden size 128) first learns by `sft` to extract an item and a
number from {rows:,} sentences; half of the examples answer in JSON, the others in a sentence. Then `grpo` rewards JSON objects with the right
values. The gate compares both models on held-out sentences, answered greedily: `exact_match` must rise, and the share of right numbers must
not fall by more than {max_loss:g}, both with 95% confidence.

```text
{command}
```

Measured at commit `{commit}` on {processor}, {cores} cores, Python {python}, on {date}.

| seed | held-out prompts | exact match, `sft` | `grpo` | difference, 95% interval | valid JSON, `sft` | `grpo` | right numbers, `sft` | `grpo` | gate |
|---|---|---|---|---|---|---|---|---|---|
{table}

The recipe of the second training: {recipe}.

The intervals are those of the evaluation, for the prompts of one seed. The model is tiny and the task simple: the figures show that the method
works, but not what a larger model gains. The regression suite was not run, because it needs general knowledge.
"""


def render_page(results: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    rows = []
    for result in results:
        exact, valid, number = (result["metrics"][name] for name in ("exact_match", "json_valid", "final_number"))
        low, high = exact["ci95"]
        cells = [
            str(result["seed"]), f"{exact['n']:,}", f"{exact['base']:.1%}", f"{exact['candidate']:.1%}", f"{low:+.1%} to {high:+.1%}",
            *(f"{score:.1%}" for metric in (valid, number) for score in (metric["base"], metric["candidate"])), result["verdict"],
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    recipe = ", ".join(f"`{name}: {value}`" for name, value in GRPO.items() if name != "grpo")
    recipe += ", " + ", ".join(f"`grpo.{name}: {json.dumps(value)}`" for name, value in GRPO["grpo"].items())
    facts = machine.circumstances("benchmarks.reinforcement")
    return PAGE.format(
        rows=len(TEMPLATES) * len(ITEMS) * LARGEST, max_loss=MAX_LOSS, table="\n".join(rows), recipe=recipe, **facts
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate the models of every seed, and write the page. Results in the working folder are reused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path(".tuneline/reinforcement"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    results = []
    for seed in options.seeds:
        path = options.workdir / f"{seed}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(measure(seed, options.workdir / str(seed))), encoding="utf-8")
        results.append(json.loads(path.read_text(encoding="utf-8")))
        print(json.dumps(results[-1]), flush=True)
    if options.markdown:
        options.markdown.write_text(render_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
