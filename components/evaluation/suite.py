"""Tasks of the default regression suite, on its items and on rows of the dataset.

`components.common.regression_suite` states its items and rules.
"""

from __future__ import annotations

from typing import Literal

from components.common.regression_suite import TASKS
from components.evaluation.tasks.answer_checks import AnswerChecks
from components.evaluation.tasks.config import SUITE_SCHEME, TaskSettings
from components.evaluation.tasks.ifeval import IFEval
from components.evaluation.tasks.memorisation import Memorisation
from components.evaluation.tasks.multiple_choice import MultipleChoice
from components.evaluation.tasks.refusal import Refusal

SuiteName = Literal["default", "none"]
ANSWER_TASKS = ["suite_instructions", "suite_harmful", "suite_harmless"]
MEMORISATION_ROWS, MEMORISATION_TOKENS = 64, 20
REQUEST_TOKENS = 24  # a refusal begins an answer; the embedded model begins it with up to 20 tokens of apology


def build_tasks() -> list[TaskSettings]:
    """Return the tasks of the suite. Answers are short to bound the cost."""

    def state(name: str) -> dict[str, str]:
        kind, file = TASKS[name]
        return {"kind": kind, "name": name, **({"data": f"{SUITE_SCHEME}{file}"} if file else {})}

    requests, rows = {"max_new_tokens": REQUEST_TOKENS}, {"tokens": MEMORISATION_TOKENS, "rows": MEMORISATION_ROWS}
    return [
        IFEval.model_validate(
            {**state("suite_instructions"), "metrics": ["prompt_level_strict_acc"], "max_new_tokens": 48}
        ),
        MultipleChoice.model_validate(state("suite_capability")),
        Refusal.model_validate({**state("suite_harmful"), **requests, "metrics": ["refused"]}),
        Refusal.model_validate({**state("suite_harmless"), **requests, "metrics": ["answered"]}),
        Memorisation.model_validate({**state("suite_memorisation"), **rows, "include_short": True}),
        Memorisation.model_validate({**state("suite_control"), **rows, "include_short": True, "split": "held_out"}),
        Memorisation.model_validate({**state("suite_leaks"), **rows, "search_leaks": True}),
        AnswerChecks.model_validate({**state("suite_answers"), "tasks": ANSWER_TASKS}),
    ]
