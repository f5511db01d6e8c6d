"""Task kind `answer_checks`: share of degenerate answers among those that other tasks generated.

An answer is degenerate if it is empty, repeats itself or is in another language than its prompt. No model is queried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from components.common import personal_data
from components.common.answer_metrics.repetition import is_repetitive
from components.common.language_identification import HAN_SCRIPT, identify_language
from components.evaluation.task_interface import Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings

CHECKED_KINDS = ("generation", "ifeval", "personal_data", "refusal", "toxicity")  # one answer for every item
# Confidence of a language. Of a short or technical answer, fastText is often wrong below 0.6; of the suite's prompts, all
# in English, it is right with 0.37 and more.
MIN_ANSWER_CONFIDENCE, MIN_PROMPT_CONFIDENCE = 0.6, 0.3
HAN_LANGUAGES = ("zh", "ja")


class AnswerChecks(TaskSettings):
    """Settings of an answer_checks task."""

    kind: Literal["answer_checks"] = "answer_checks"
    tasks: list[str] = Field(
        min_length=1, description=f"Names of tasks of the kinds {', '.join(CHECKED_KINDS)} whose answers are checked."
    )

    def estimate_tokens(self, rows: int, mean_length: float) -> tuple[float, float]:
        """Return 0: no model is queried."""
        return 0.0, 0.0


class AnswerChecksTask(Task[AnswerChecks]):
    """Checks of the answers of other tasks. Every metric is the share of answers with the defect."""

    METRICS: ClassVar = {
        "repetitive": Metric("lower", is_binary=True),
        "empty": Metric("lower", is_binary=True),
        "language_switched": Metric("lower", is_binary=True),
    }

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the items of the checked tasks; their source is the task."""
        return [
            replace(item, id=f"{name}/{item.id}", source=name)
            for name in self.settings.tasks
            for item in context.items_by_task[name]
        ]

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Raise AssertionError: the task queries no model."""
        raise AssertionError("answer_checks scores the answers of other tasks with check_answers")

    def check_answers(self, items: Sequence[Item], answers_by_id: Mapping[str, str]) -> Scores:
        """Return 1 for every answer with the defect.

        Args:
            items: The items of this task.
            answers_by_id: One model's answers by the ids of these items.
        """
        answers = [answers_by_id[item.id] for item in items]
        values = {
            "repetitive": [float(is_repetitive(answer)) for answer in answers],
            "empty": [float(not answer.strip()) for answer in answers],
            "language_switched": [
                float(has_other_language(answer, item.prompt)) for answer, item in zip(answers, items, strict=True)
            ],
        }
        return Scores(values, answers=[personal_data.mask(answer) for answer in answers])


def has_other_language(answer: str, prompt: str) -> bool:
    """Return whether the languages of prompt and answer are known and differ."""
    expected, certainty = identify_language(prompt)
    if certainty < MIN_PROMPT_CONFIDENCE:
        return False
    found, confidence = identify_language(answer)
    if found == HAN_SCRIPT:
        return expected not in HAN_LANGUAGES
    return confidence >= MIN_ANSWER_CONFIDENCE and found != expected
