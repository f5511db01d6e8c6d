"""Task kind `ifeval`: verifiable instructions (Zhou et al., arXiv 2311.07911), scored by lm-eval's checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

from pydantic import Field

from components.common.answer_metrics import ifeval_checks
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.record_files import Record

IFEvalMetric = Literal[
    "prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"
]


class IFEval(TaskSettings):
    """Settings of an ifeval task."""

    kind: Literal["ifeval"] = "ifeval"
    data: str = Field(
        min_length=1,
        description="File of rows {key, prompt, instruction_id_list, kwargs}, in the format of the IFEval dataset.",
    )
    metrics: list[IFEvalMetric] = Field(
        list(get_args(IFEvalMetric)),
        min_length=1,
        description="Metrics. prompt_level: share of prompts whose instructions are all followed; inst_level: share of "
        "followed instructions. strict: check the answer as written; loose: also without markup, first or last line.",
    )
    chat: bool = Field(True, description="Apply the model's chat template. false: send the raw prompt.")
    max_new_tokens: int = Field(1280, ge=1, description="Maximum answer length in tokens. IFEval uses 1,280.")


class IFEvalTask(Task[IFEval]):
    """Greedy answers to prompts with instructions, and the checks of the instructions."""

    METRICS: ClassVar = {
        "prompt_level_strict_acc": Metric("higher", is_binary=True),
        "inst_level_strict_acc": Metric("higher", max_item_loss=1.0),
        "prompt_level_loose_acc": Metric("higher", is_binary=True),
        "inst_level_loose_acc": Metric("higher", max_item_loss=1.0),
    }

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the prompts; `request` holds the row and the decoding.

        Every checker is run once, so that invalid options are found before the evaluation.

        Raises:
            ConfigurationError: nltk's sentence splitter is missing.
            InputError: An instruction or its options are unknown to the checkers, or a key is a duplicate.
        """
        locations: dict[str, str] = {}
        values = self.settings.model_dump(include={"chat", "max_new_tokens"})
        items = []
        for record in record_files.read_records(self.settings.data):
            key = str(record.row.get("key", record.id))
            if (first := locations.setdefault(key, record.location)) != record.location:
                raise InputError(
                    f"{record.location}: duplicate key {key}, first used at {first}",
                    hint="Give every row a distinct key, or remove all keys.",
                )
            try:
                instructions = ifeval_checks.parse_instructions(record.row)
            except ifeval_checks.InvalidInstructionsError as error:
                raise record.build_error(str(error)) from None
            row = {"key": key, "prompt": record.get_text("prompt"), **instructions}
            messages = [{"role": "user", "content": row["prompt"]}]
            category = row["instruction_id_list"][0].partition(":")[0]
            labelled = Record(key, {"category": category}, record.location)
            item = item_encoding.build_prompt_item(labelled, messages, [], context)
            items += item_encoding.extend_requests([item], {"row": row, **values})
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return whether all instructions of a prompt are followed, and the number of followed instructions."""
        answers = self.generate_answers(engine, items, context)
        results = [
            ifeval_checks.check_answer(item.request["row"], answer) for item, answer in zip(items, answers, strict=True)
        ]
        values: dict[str, list[float]] = {}
        weights: dict[str, list[float]] = {}
        for name in self.settings.metrics:
            found = [result[name] if isinstance(result[name], list) else [result[name]] for result in results]
            values[name] = [float(sum(followed)) for followed in found]
            if not self.METRICS[name].is_binary:
                weights[name] = [float(len(followed)) for followed in found]
        return Scores(values, weights, answers)
