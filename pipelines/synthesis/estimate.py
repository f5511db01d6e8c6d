"""Estimates of requests, tokens, time and cost: from measured answers of a probe, or from assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from pipelines.synthesis.journal import Answer
from pipelines.synthesis.settings import SynthesisSettings
from pipelines.synthesis.synthesis import JUDGE_MAX_TOKENS, SynthesizedRows, Task
from pipelines.synthesis.teacher_budget import TeacherBudget, estimate_tokens

REPAIR_TOKENS = 60  # of the request to correct an answer, rounded up
MAX_SHOWN_CHARACTERS = 200  # of a rejected answer
JUDGE_PROMPT_TOKENS = 400  # of the judge's instruction and criteria, rounded up


@dataclass(frozen=True)
class Estimate:
    """The estimate of a whole synthesis, including its probe.

    Attributes:
        basis: "measured" with a probe, otherwise "assumed".
        rows: the expected number of rows.
        row_yield: accepted rows per task.
        requests: the number of requests, with repairs and judgements.
        input_tokens: tokens of the prompts.
        output_tokens: tokens of the answers.
        seconds: time of all requests at the concurrency; None without a probe.
        cost: the expected cost in the unit of the prices.
        max_cost: the cost if the teacher answers every task, with all repairs, judgements and answers of the maximum
            length; at most the limit of the cost.
        asked: the number of probe tasks that the teacher answered; 0 without a probe.
        rejected: the rejected answers of the probe by reason.
        first_rejected: reason, detail and text of the first rejected answer; {} if none is rejected.
    """

    basis: str
    rows: int
    row_yield: float
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float | None
    cost: float
    max_cost: float
    asked: int
    rejected: dict[str, int]
    first_rejected: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        fields = asdict(self)
        return {"yield" if name == "row_yield" else name: value for name, value in fields.items()}


def estimate_synthesis(
    tasks: Sequence[Task],
    settings: SynthesisSettings,
    probe: SynthesizedRows | None,
    answers: Sequence[Answer],
    budget: TeacherBudget,
    concurrency: int,
    *,
    has_judge: bool,
) -> Estimate:
    """Return the estimate of a synthesis.

    Args:
        tasks: all tasks.
        settings: the settings.
        probe: the rows of the probe; None without a probe.
        answers: the answers of the probe.
        budget: the prices.
        concurrency: the number of concurrent requests.
        has_judge: whether a judge rates the rows.
    """
    prompts = [
        estimate_tokens(message["content"] for message in task.template.build_messages(task.passage, task.number))
        for task in tasks
    ]
    kind = tasks[0].template.kind  # equal for all templates of a synthesis in these respects
    attempts = 1 if kind.schema is None else settings.repairs + 1
    # A repair repeats the prompt with all earlier answers; the judge reads about the prompt and the answer.
    repeated = attempts * (attempts - 1) // 2 * (settings.sampling.max_tokens + REPAIR_TOKENS)
    max_input = sum(prompts) * attempts + len(tasks) * repeated
    max_output = len(tasks) * attempts * settings.sampling.max_tokens
    if has_judge:
        max_input += sum(prompts) + len(tasks) * (settings.sampling.max_tokens + JUDGE_PROMPT_TOKENS)
        max_output += len(tasks) * JUDGE_MAX_TOKENS
    max_cost = budget.compute_cost(max_input, max_output)
    seconds = None
    if probe is None or not answers:
        row_yield, requests_per_task = kind.assumed_yield, 1 + (kind.assumed_yield if has_judge else 0.0)
        answer_tokens = min(kind.assumed_answer_tokens, settings.sampling.max_tokens)
        input_per_request, output_per_request = fmean(prompts), float(answer_tokens)
    else:
        row_yield = len(probe.rows) / probe.asked
        requests_per_task = len(answers) / probe.asked
        input_per_request = fmean(answer.input_tokens for answer in answers)
        output_per_request = fmean(answer.output_tokens for answer in answers)
        seconds = fmean(answer.seconds for answer in answers) / concurrency
    needed = min(len(tasks), round(settings.rows / row_yield)) if row_yield else len(tasks)
    requests = round(needed * requests_per_task)
    input_tokens, output_tokens = round(requests * input_per_request), round(requests * output_per_request)
    first = probe.rejected[0] if probe and probe.rejected else None
    return Estimate(
        "measured" if seconds is not None else "assumed",
        min(settings.rows, round(needed * row_yield)),
        round(row_yield, 4),
        requests,
        input_tokens,
        output_tokens,
        None if seconds is None else round(requests * seconds, 1),
        budget.compute_cost(input_tokens, output_tokens),
        max_cost if budget.max_cost is None else min(max_cost, budget.max_cost),
        probe.asked if probe else 0,
        probe.reasons if probe else {},
        {"reason": first.reason, "detail": first.detail, "text": first.text[:MAX_SHOWN_CHARACTERS]} if first else {},
    )
