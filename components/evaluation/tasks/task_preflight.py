"""Preflight check of the evaluation tasks: read their files and build their items before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.common.gate_rules import SUITE_PREFIX
from components.common.runtime.errors import InputError, TunelineError
from components.common.runtime.reporters import Reporter
from components.evaluation import score_cache
from components.evaluation.task_interface import DEFAULT_MAX_LENGTH, TaskContext
from components.evaluation.tasks import item_encoding, task_registry
from components.evaluation.tasks.answer_checks import AnswerChecksTask
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.held_out import HeldOut
from components.evaluation.tasks.judge import JudgeTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUITE_HINT = "Set evaluation.suite to none, and promote the model with `tuneline promote`."


@dataclass(frozen=True)
class TaskWorkload:
    """Size of a task for each model.

    Attributes:
        settings: Settings of the task.
        digest: Digest of the task.
        items: Number of items; None if the task reads the dataset.
        input_tokens: Number of input tokens.
        output_tokens: Maximum number of generated tokens.
    """

    settings: TaskSettings
    digest: str = ""
    items: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_identified_by_files(self) -> bool:
        """Whether the dataset or the task's files identify its items; lm-eval tasks by name read a separate cache."""
        return self.items is None or bool(self.settings.list_file_paths())


def check_tasks(
    tasks: Sequence[TaskSettings],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_length: int | None,
    reporter: Reporter,
    max_input_tokens: int | None = None,
) -> list[TaskWorkload]:
    """Return the workload of every task. Items are built for the tasks that do not read the dataset.

    The check raises the errors that the evaluation would raise after training. Their messages contain the
    configuration key of the task.

    Args:
        tasks: The settings in evaluation.tasks.
        tokenizer: The base model's tokenizer.
        seed: The run's seed.
        max_length: Maximum row length in tokens (evaluation.max_length). None: the context length.
        reporter: Receives notes.
        max_input_tokens: The base model's context length in tokens; None if unknown.

    Raises:
        ConfigurationError: A file, a task of lm-eval or an environment variable does not exist.
        InputError: Rows are invalid, or the longest answer leaves no room for a prompt.
    """
    max_length = max_length or max_input_tokens or DEFAULT_MAX_LENGTH
    context = TaskContext(tokenizer, None, max_length, seed, reporter)
    workloads = []
    for number, settings in enumerate(tasks):
        key = f"evaluation.tasks[{number}]"
        task = task_registry.build_task(settings)
        if isinstance(task, AnswerChecksTask):  # its items are those of other tasks
            workloads.append(TaskWorkload(settings))
            continue
        max_new_tokens, setting = task.answer_limit
        try:
            item_encoding.check_prompt_room(max_input_tokens, max_new_tokens, setting)
            items = task.items(context)
            task.check_requests(items, context, max_input_tokens)
        except item_encoding.NoDatasetError:
            workloads.append(TaskWorkload(settings))
            continue
        except TunelineError as error:
            hint = error.hint
            if settings.name.startswith(SUITE_PREFIX):  # its tasks are not in the user's file, and cannot be changed
                key = f"evaluation.suite: {settings.name}"
                hint = SUITE_HINT if isinstance(error, InputError) else hint
            message = error.message if error.message.startswith(key) else f"{key}: {error.message}"
            raise type(error)(message, hint=hint) from None
        digest, input_tokens = score_cache.digest_task(task, items, []), sum(item.length for item in items)
        answers = task.answers_per_item
        workloads.append(
            TaskWorkload(settings, digest, len(items), answers * input_tokens, answers * len(items) * max_new_tokens)
        )
    return workloads


def check_endpoints(tasks: Sequence[TaskSettings]) -> None:
    """Send one request to the endpoint of each judge.

    Raises:
        ConfigurationError: An API key is not set.
        EngineMissingError: An endpoint does not answer, or rejects the request.
    """
    for number, settings in enumerate(tasks):
        task = task_registry.build_task(settings)
        if isinstance(task, JudgeTask):
            try:
                task.check_endpoint()
            except TunelineError as error:
                raise type(error)(f"evaluation.tasks[{number}]: {error.message}", hint=error.hint) from None


def should_check_tasks(tasks: Sequence[TaskSettings]) -> bool:
    """Return whether any task needs a preflight check; held_out tasks read only the dataset."""
    return any(not isinstance(settings, HeldOut) for settings in tasks)
