"""Base classes of evaluation tasks, which build the items and score a model on them.

CONTRIBUTING.md describes how to add a task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import Decoding, Engine, Item, Metric, Sampling, Scores, TaskContext
from components.evaluation.tasks import item_encoding
from components.evaluation.tasks.config import AnswerSettings, TaskSettings

S = TypeVar("S", bound=TaskSettings)
A = TypeVar("A", bound=AnswerSettings)


class Task(ABC, Generic[S]):
    """Base class of evaluation tasks. A task's digest includes its settings."""

    METRICS: ClassVar[Mapping[str, Metric]] = {}  # all metrics of the kind

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @property
    def name(self) -> str:
        """The prefix of the task's metrics: name.metric."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics to report: those in the settings, or else all metrics of the kind."""
        return {name: self.METRICS[name] for name in getattr(self.settings, "metrics", self.METRICS)}

    @property
    def compares_with_base(self) -> bool:
        """Whether a model's scores depend on the base model's answers; `score` then receives the base's scores."""
        return False

    @property
    def answer_limit(self) -> tuple[int, str]:
        """The maximum answer length in tokens (0: no answers), and the name of its setting."""
        return int(getattr(self.settings, "max_new_tokens", 0)), "max_new_tokens"

    @property
    def min_items(self) -> int:
        """The number of items without which the task fails."""
        return 2

    @property
    def answers_per_item(self) -> int:
        """The number of answers that a model generates for each item."""
        return int(getattr(self.settings, "samples", 1))

    @property
    def calibration_key(self) -> object:
        """The values on which the task's calibration depends; None for a task without a calibration."""
        return None

    def measure_calibration(self, context: TaskContext) -> dict[str, float]:
        """Return figures of how reliable the task's scores are, for a task with a `calibration_key`."""
        return {}

    def find_gate_problem(self, calibration: Mapping[str, float]) -> str:
        """Return why no gate rule may use the task's metrics, as a clause; "" if rules may.

        Args:
            calibration: Result of `measure_calibration`; empty if it was not measured.
        """
        return ""

    def items(self, context: TaskContext) -> list[Item]:
        """Return the items in order of id, equal for all models.

        Raises:
            InputError: The rows are invalid, or the task has fewer than two items.
        """
        items = sorted(self.build_items(context), key=lambda item: item.id)[: self.settings.max_items]
        if len(items) < self.min_items:
            raise InputError(
                f"the task has {format_count(len(items), 'item')}; expected at least {self.min_items}",
                hint="Add rows, or remove the task.",
            )
        return items

    @abstractmethod
    def build_items(self, context: TaskContext) -> list[Item]:
        """Return all items, in any order."""

    @abstractmethod
    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return the scores of one model on the items.

        Args:
            engine: The loaded model.
            items: The items to score.
            context: Inputs of the task in addition to its settings.
            base: Scores of the base model if `compares_with_base` is true; None while the base model is scored.
        """

    def check_requests(self, items: Sequence[Item], context: TaskContext, max_input_tokens: int | None) -> None:
        """Raise InputError if the chat template rejects a prompt.

        One item is encoded per sequence of roles, with and without tools.
        """
        # A chat template distinguishes conversations by their roles and by whether there are tools.
        representatives: dict[tuple[object, ...], Item] = {}
        for item in reversed(items):
            turns = [value for value in item.request.values() if isinstance(value, list)]
            roles = [tuple(m["role"] for m in messages if isinstance(m, dict) and "role" in m) for messages in turns]
            representatives[(*roles, bool(item.request.get("tools")))] = item
        for item in representatives.values():
            self.check_encoding(item, context)

    def check_encoding(self, item: Item, context: TaskContext) -> None:
        """Raise InputError if the chat template rejects the item's prompt."""
        if "messages" in item.request and item.request.get("chat", True):
            item_encoding.encode_prompt(context.tokenizer, item)

    def generate_answers(
        self, engine: Engine, items: Sequence[Item], context: TaskContext, sampling: Sampling | None = None
    ) -> list[str]:
        """Return one answer per item without surrounding white space. Applies the settings `chat` and `stop`."""
        chat, stop = getattr(self.settings, "chat", True), getattr(self.settings, "stop", ())
        prompts = [item_encoding.encode_prompt(engine.tokenizer, item, chat=chat) for item in items]
        return [answer.strip() for answer in self.answer_prompts(engine, prompts, context, stop, sampling)]

    def answer_prompts(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        context: TaskContext,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Return one answer per prompt (token ids), greedy without `sampling`. Prompts that are too long are truncated."""
        limit, setting = self.answer_limit
        prompts = item_encoding.fit_prompts(prompts, engine.max_input_tokens, limit, context.reporter, setting=setting)
        return engine.generate(prompts, Decoding(limit, tuple(stop), sampling), context.reporter)


AnyTask = Task[Any]


class AnswerCheckTask(Task[A]):
    """Base class of tasks that generate one greedy answer per prompt and check each answer separately."""

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the prompts with the decoding settings."""
        decoding = self.settings.model_dump(include={"chat", "max_new_tokens"})
        return item_encoding.extend_requests(item_encoding.build_row_items(self.settings, context), decoding)

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Generate the answers and check them."""
        return self.check_answers(self.generate_answers(engine, items, context), items)

    @abstractmethod
    def check_answers(self, answers: Sequence[str], items: Sequence[Item]) -> Scores:
        """Return the scores of the answers, one per item."""
