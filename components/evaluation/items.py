"""The held-out items: the same tokens and prompts for every model that is compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.common import chat, conversations, hashing
from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.progress import Reporter
from components.evaluation.config import EvaluationConfig


@dataclass(frozen=True)
class Item:
    """A test row as tokens, with the mask of its answer, and the prompt that leads to its last answer."""

    id: str
    input_ids: list[int]
    answer: list[int]
    prompt_ids: list[int]
    prompt: str
    reference: str

    @property
    def answer_tokens(self) -> int:
        """Tokens whose loss is counted; a first token has nothing before it to be predicted from."""
        return sum(self.answer[1:])


def read_items(dataset: Artifact, tokenizer: Any, config: EvaluationConfig, reporter: Reporter) -> list[Item]:
    """The test rows by id, those without an answer within max_length left out. Raises InputError when fewer than two remain."""
    kind, path = str(dataset.manifest.summary.get("rows_kind", "sft")), dataset.path / "test.parquet"
    make = _text_item if kind == conversations.TEXT else _item
    rows = conversations.texts(path) if kind == conversations.TEXT else conversations.read(path, conversations.kind_of(dataset))
    rows = sorted(rows, key=lambda row: str(row["id"]))[: config.max_items]
    items = [item for row in rows if (item := make(row, tokenizer, config.max_length)).answer_tokens]
    if len(items) < len(rows):
        reporter.note(f"{len(rows) - len(items)} of {len(rows)} test rows have no answer within {config.max_length} tokens")
    if len(items) < 2:
        raise InputError(
            f"the test split of {dataset.path} has {len(items)} rows that can be measured, and an interval needs at least 2",
            hint="Curate more data, raise the test fraction, or raise evaluation.max_length.",
        )
    return items


def _item(row: dict[str, Any], tokenizer: Any, max_length: int) -> Item:
    messages: Sequence[dict[str, Any]] = row["messages"]
    tools = json.loads(row["tools"]) if row.get("tools") else None
    encoded = chat.encode(tokenizer, messages, tools, max_length=max_length)
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
    before = messages[:last]
    return Item(
        id=row["id"],
        input_ids=encoded.input_ids,
        answer=encoded.answer,
        prompt_ids=chat.encode_prompt(tokenizer, before, tools) if before else [],
        prompt="\n\n".join(str(m["content"]) for m in before),
        reference=str(messages[last]["content"]) if last < len(messages) else "",
    )


def _text_item(row: dict[str, Any], tokenizer: Any, max_length: int) -> Item:
    """A plain text, every token of which counts; there is nothing to answer."""
    ids = chat.encode_text(tokenizer, row["text"])[:max_length]
    return Item(id=row["id"], input_ids=ids, answer=[1] * len(ids), prompt_ids=[], prompt="", reference="")


def task_digest(items: Sequence[Item], config: EvaluationConfig) -> str:
    """What was asked: the items' tokens and masks, and the decoding of the generations."""
    asked = [[item.id, item.input_ids, item.answer, item.prompt_ids] for item in items]
    return hashing.digest({"items": asked, "generations": config.generations, "generation_tokens": config.generation_tokens})
