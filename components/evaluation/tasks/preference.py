"""Pairs of a chosen and a rejected answer; task kind `preference` compares their log-likelihoods.

Every token of the answer counts, including the end-of-turn token. DPO (arXiv 2305.18290) compares the total, which is lower
for longer answers. SimPO (arXiv 2405.14734) compares the value per token, which depends less on length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import Field

from components.common.models import chat_templates
from components.common.models.chat_templates import EncodedCompletion
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import (
    MAX_ITEM_LOSS_NATS,
    Engine,
    Item,
    Likelihood,
    Metric,
    Scores,
    TaskContext,
)
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.item_encoding import Message
from components.evaluation.tasks.record_files import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")


class PairSettings(TaskSettings):
    """Settings of tasks on pairs of answers."""

    data: str = Field(
        "",
        description="File of rows {prompt, chosen, rejected}, as texts or messages; category or subset names a slice. "
        "Empty: the test split of a preference dataset.",
    )


class Preference(PairSettings):
    """Settings of a preference task."""

    kind: Literal["preference"] = "preference"


P = TypeVar("P", bound=PairSettings)


class PairTask(Task[P]):
    """Base class of tasks on pairs of answers to one prompt."""

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the pairs; `request` holds the messages of the prompt and of both answers.

        Raises:
            InputError: The dataset has no preference rows, or a row is invalid or has two equal answers.
        """
        if self.settings.data:
            records = record_files.read_records(self.settings.data)
        else:
            dataset = item_encoding.require_dataset(context)
            kind = dataset.manifest.summary.get("rows_kind", "sft")
            if kind != "preference":
                raise InputError(
                    f"the dataset in {dataset.path} has {kind} rows; expected preference rows",
                    hint="Set data to a file of preference pairs.",
                )
            rows = item_encoding.read_columns(dataset, "test", ["prompt", *SIDES, "tools", "source"])
            records = [Record(name, row, f"{dataset.path / 'test.parquet'} {name}") for name, row in rows.items()]
        items = []
        for record in records:
            record.row["category"] = record.row.get("category") or record.row.get("subset")
            prompt = item_encoding.read_messages(record, "prompt")
            answers: dict[str, list[Message]] = {}
            for side in SIDES:
                value = record.row.get(side)
                turns = item_encoding.read_messages(Record(record.id, {side: value}, record.location), side)
                answers[side] = (
                    [{"role": "assistant", "content": turns[0]["content"]}] if isinstance(value, str) else turns
                )
            if answers["chosen"] == answers["rejected"]:
                raise record.build_error("has the same answer as chosen and as rejected")
            text = item_encoding.join_contents(prompt)
            chosen, rejected = (item_encoding.join_contents(answers[side]) for side in SIDES)
            request = {"prompt": prompt, **answers, "tools": item_encoding.read_tools(record)}
            texts = [text + chosen, text + rejected]
            items.append(item_encoding.build_item(record, context, text, chosen, texts, request))
        return items

    def check_encoding(self, item: Item, context: TaskContext) -> None:
        """Raise InputError if the chat template rejects the prompt with one of its answers."""
        for side in SIDES:
            encode_completion(context.tokenizer, item, side)


class PreferenceTask(PairTask[Preference]):
    """Comparison of likelihoods. Margins are in nats; equal likelihoods count as incorrect."""

    METRICS: ClassVar = {
        "accuracy": Metric("higher", is_binary=True),
        "accuracy_per_token": Metric("higher", is_binary=True),
        "margin": Metric("higher"),
        "margin_per_token": Metric("higher", per_token=True, max_item_loss=MAX_ITEM_LOSS_NATS),
    }

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return whether the chosen answers are more likely, and the margins."""
        likelihoods = compute_likelihoods(engine, items, context)
        totals = [likelihood.logprob for likelihood in likelihoods]
        values: dict[str, list[float]] = {}
        for suffix, logprobs in (("", totals), ("_per_token", list_means(likelihoods))):
            margins = subtract_rejected(logprobs)
            values["accuracy" + suffix] = judge_margins(margins)
            values["margin" + suffix] = margins
        return Scores({name: values[name] for name in self.METRICS})


def compute_likelihoods(engine: Engine, items: Sequence[Item], context: TaskContext) -> list[Likelihood]:
    """Return the likelihood of each item's chosen and rejected answer, alternately."""
    completions = [encode_completion(engine.tokenizer, item, side) for item in items for side in SIDES]
    continuations = [
        item_encoding.build_continuation(completion.prompt_ids, completion.answer_ids, engine.max_input_tokens)
        for completion in completions
    ]
    return engine.compute_likelihoods(continuations, context.reporter)


def list_means(likelihoods: Sequence[Likelihood]) -> list[float]:
    """Return the log-likelihoods per token; NaN for an empty answer."""
    return [each.logprob / each.tokens if each.tokens else math.nan for each in likelihoods]


def subtract_rejected(values: Sequence[float]) -> list[float]:
    """Return the differences of alternating values of chosen and rejected answers."""
    return [chosen - rejected for chosen, rejected in zip(values[::2], values[1::2], strict=True)]


def judge_margins(margins: Sequence[float]) -> list[float]:
    """Return 1 for each positive margin, 0 for others, and NaN for NaN."""
    return [margin if math.isnan(margin) else float(margin > 0) for margin in margins]


def encode_completion(tokenizer: PreTrainedTokenizerBase, item: Item, side: str) -> EncodedCompletion:
    """Return the tokens of the prompt and of one answer.

    Args:
        tokenizer: The model's tokenizer.
        item: A pair of answers.
        side: "chosen" or "rejected".

    Raises:
        InputError: The chat template rejects the prompt or the answer.
    """
    tools = json.loads(item.request["tools"]) if item.request["tools"] else None
    return chat_templates.encode_completion(tokenizer, item.request["prompt"], item.request[side], tools)
