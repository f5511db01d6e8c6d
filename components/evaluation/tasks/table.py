"""The tasks there are: an entry a kind. Only names and classes here; what a task needs is imported when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from components.evaluation.task import Metric, Task
from components.evaluation.tasks.config import Common
from components.evaluation.tasks.generation import GenerationTask
from components.evaluation.tasks.held_out import HeldOutTask
from components.evaluation.tasks.ifeval import IFEvalTask
from components.evaluation.tasks.judge import JudgeTask
from components.evaluation.tasks.last_word import LastWordTask
from components.evaluation.tasks.lm_eval import LMEvalTask
from components.evaluation.tasks.memorisation import MemorisationTask
from components.evaluation.tasks.multiple_choice import MultipleChoiceTask
from components.evaluation.tasks.perplexity import PerplexityTask
from components.evaluation.tasks.personal_data import PersonalDataTask
from components.evaluation.tasks.preference import PreferenceTask
from components.evaluation.tasks.toxicity import ToxicityTask

TASKS: dict[str, Callable[[Any], Task]] = {
    "held_out": HeldOutTask,
    "generation": GenerationTask,
    "multiple_choice": MultipleChoiceTask,
    "perplexity": PerplexityTask,
    "last_word": LastWordTask,
    "preference": PreferenceTask,
    "lm_eval": LMEvalTask,
    "ifeval": IFEvalTask,
    "judge": JudgeTask,
    "personal_data": PersonalDataTask,
    "toxicity": ToxicityTask,
    "memorisation": MemorisationTask,
}


def build(settings: Common) -> Task:
    """The task of these settings."""
    return TASKS[settings.kind](settings)


def metrics_of(settings: Common) -> Mapping[str, Metric]:
    """Its metrics by name."""
    return build(settings).metrics
