"""Task results with given scores, for tests of the gate and the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from components.evaluation.task_interface import HARM_NATS, MAX_ITEM_LOSS_NATS, Item, Metric, Scores
from components.evaluation.task_results import TaskResult
from components.evaluation.tasks.config import TaskSettings

LOSS = {
    "loss": Metric(better="lower", per_token=True, max_item_loss=MAX_ITEM_LOSS_NATS, harm=HARM_NATS),
    "perplexity": Metric(better="lower", per_token=True, exponential=True, max_item_loss=MAX_ITEM_LOSS_NATS),
}
ACCURACY = {"exact_match": Metric(is_binary=True)}


@dataclass(frozen=True)
class StubTask:
    """A task without items and scores; tests supply both."""

    name: str
    metrics: Mapping[str, Metric]
    settings: TaskSettings = field(default_factory=lambda: TaskSettings(kind="numbers"))
    compares_with_base: bool = False

    @property
    def calibration_key(self) -> object:
        return None

    def find_gate_problem(self, calibration: Mapping[str, float]) -> str:
        return ""

    def items(self, context: object) -> list[Item]:
        raise AssertionError("its items are given")

    def score(self, *_: object) -> Scores:
        raise AssertionError("its scores are given")


def build_loss_scores(
    scores: Mapping[str, Sequence[float]], tokens: Sequence[int], **slices: Sequence[object]
) -> TaskResult:
    """Build held-out losses from summed nats per item and role, tokens per item, and slice values per item."""
    scores_by_role = {
        role: Scores({name: list(v) for name in LOSS}, {name: [float(t) for t in tokens] for name in LOSS})
        for role, v in scores.items()
    }
    return TaskResult(StubTask("held_out", LOSS), build_items(len(tokens), **slices), scores_by_role, {}, "0" * 64)


def build_binary_scores(scores: Mapping[str, Sequence[float]], **slices: Sequence[object]) -> TaskResult:
    """Build binary scores, 1 for a correct answer, per item and role."""
    scores_by_role = {role: Scores({"exact_match": list(v)}) for role, v in scores.items()}
    return TaskResult(
        StubTask("questions", ACCURACY), build_items(len(scores["candidate"]), **slices), scores_by_role, {}, "0" * 64
    )


def build_items(count: int, **slices: Sequence[object]) -> list[Item]:
    """Build `count` items with their slice values."""
    return [
        Item(id=f"{i:04d}", prompt=f"question {i}", **{name: values[i] for name, values in slices.items()})
        for i in range(count)
    ]  # type: ignore[arg-type]
