"""Registry of the evaluation task kinds, and the configuration type of `evaluation.tasks`.

Tasks import heavy libraries only when they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.evaluation.tasks.answer_checks import AnswerChecks, AnswerChecksTask
from components.evaluation.tasks.base_task import AnyTask
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.generation import Generation, GenerationTask
from components.evaluation.tasks.held_out import HeldOut, HeldOutTask
from components.evaluation.tasks.ifeval import IFEval, IFEvalTask
from components.evaluation.tasks.judge import Judge, JudgeTask
from components.evaluation.tasks.last_word import LastWord, LastWordTask
from components.evaluation.tasks.lm_eval import LMEval, LMEvalTask
from components.evaluation.tasks.memorisation import Memorisation, MemorisationTask
from components.evaluation.tasks.multiple_choice import MultipleChoice, MultipleChoiceTask
from components.evaluation.tasks.perplexity import Perplexity, PerplexityTask
from components.evaluation.tasks.personal_data import PersonalData, PersonalDataTask
from components.evaluation.tasks.preference import Preference, PreferenceTask
from components.evaluation.tasks.refusal import Refusal, RefusalTask
from components.evaluation.tasks.reward import Reward, RewardTask
from components.evaluation.tasks.tool_calls import ToolCalls, ToolCallsTask
from components.evaluation.tasks.toxicity import Toxicity, ToxicityTask


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Attributes:
        settings: Configuration model of the task's entry in evaluation.tasks.
        task: Class that builds and scores the items.
        scores_likelihoods: Whether the task needs an engine that computes log-likelihoods.
        generates_answers: Whether the task needs an engine that generates answers.
        scores_rewards: Whether the task measures reward models, and only these.
        needs_endpoint: Whether the task needs the endpoint of a judge model.
        row_kind: Kind of rows that the dataset must have if the task reads it; "" for any kind.
    """

    settings: type[TaskSettings]
    task: type[AnyTask]
    scores_likelihoods: bool = False
    generates_answers: bool = False
    scores_rewards: bool = False
    needs_endpoint: bool = False
    row_kind: str = ""

    @property
    def name(self) -> str:
        """The value of `kind`."""
        return str(self.settings.model_fields["kind"].default)


TASK_KINDS = {
    kind.name: kind
    for kind in (
        TaskKind(HeldOut, HeldOutTask, scores_likelihoods=True, generates_answers=True),
        TaskKind(Generation, GenerationTask, generates_answers=True),
        TaskKind(MultipleChoice, MultipleChoiceTask, scores_likelihoods=True),
        TaskKind(Perplexity, PerplexityTask, scores_likelihoods=True),
        TaskKind(LastWord, LastWordTask, scores_likelihoods=True),
        TaskKind(Preference, PreferenceTask, scores_likelihoods=True, row_kind="preference"),
        TaskKind(LMEval, LMEvalTask, scores_likelihoods=True, generates_answers=True),
        TaskKind(IFEval, IFEvalTask, generates_answers=True),
        TaskKind(Judge, JudgeTask, generates_answers=True, needs_endpoint=True),
        TaskKind(PersonalData, PersonalDataTask, generates_answers=True),
        TaskKind(Toxicity, ToxicityTask, generates_answers=True),
        TaskKind(Memorisation, MemorisationTask, scores_likelihoods=True, generates_answers=True),
        TaskKind(Refusal, RefusalTask, generates_answers=True),
        TaskKind(AnswerChecks, AnswerChecksTask, generates_answers=True),
        TaskKind(ToolCalls, ToolCallsTask, generates_answers=True),
        TaskKind(Reward, RewardTask, scores_rewards=True, row_kind="preference"),
    )
}

if TYPE_CHECKING:
    TaskConfig = TaskSettings
else:
    settings_union = reduce(or_, (kind.settings for kind in TASK_KINDS.values()))
    TaskConfig = Annotated[settings_union, Field(discriminator="kind")]


def build_task(settings: TaskSettings) -> AnyTask:
    """Return the task for these settings."""
    return TASK_KINDS[settings.kind].task(settings)
