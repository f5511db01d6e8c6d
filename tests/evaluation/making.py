"""Measured tasks made of numbers, for what judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from components.evaluation.measured import Measured
from components.evaluation.task import Item, Metric, Scores
from components.evaluation.tasks.config import Common

LOSS = {"loss": Metric(better="lower", per_token=True), "perplexity": Metric(better="lower", per_token=True, exponential=True)}
RIGHT = {"exact_match": Metric(right_or_wrong=True)}


@dataclass(frozen=True)
class Numbers:
    """A task whose scores are given."""

    name: str
    metrics: Mapping[str, Metric]
    settings: Common = field(default_factory=lambda: Common(kind="numbers"))
    against_base: bool = False

    def items(self, given: object) -> list[Item]:
        """None of its own."""
        raise AssertionError("its items are given")

    def score(self, *_: object) -> Scores:
        """None of its own."""
        raise AssertionError("its scores are given")


def losses(scores: Mapping[str, Sequence[float]], tokens: Sequence[int], **slices: Sequence[object]) -> Measured:
    """Held-out losses: summed nats an item by role, tokens an item; `source`, `category`, `length` one an item."""
    found = {
        role: Scores({name: list(v) for name in LOSS}, {name: [float(t) for t in tokens] for name in LOSS}) for role, v in scores.items()
    }
    return Measured(Numbers("held_out", LOSS), items(len(tokens), **slices), found, {}, "0" * 64)


def rights(scores: Mapping[str, Sequence[float]], **slices: Sequence[object]) -> Measured:
    """Right (1) and wrong (0) an item by role."""
    found = {role: Scores({"exact_match": list(v)}) for role, v in scores.items()}
    return Measured(Numbers("questions", RIGHT), items(len(scores["candidate"]), **slices), found, {}, "0" * 64)


def items(count: int, **slices: Sequence[object]) -> list[Item]:
    """So many items, each with its slices."""
    return [Item(id=f"{i:04d}", prompt=f"question {i}", **{name: values[i] for name, values in slices.items()}) for i in range(count)]  # type: ignore[arg-type]
