"""Task kind `memorisation`: share of training rows that a model completes word for word.

The prompt ends in the middle of a conversation's last answer, or in the middle of a plain text. A row is memorised if
the next N tokens equal the row's.
"""

# Source, with N = 50: Carlini et al., "Quantifying Memorization Across Neural Language Models" (ICLR 2023, arXiv
# 2202.07646). Rows with fewer than N tokens after the middle are not tested. The share is a lower bound: other prefixes
# or sampling may reproduce further rows.

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from components.common.models import chat_templates, conversation_rows
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks import item_encoding
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.record_files import Row

EXTRA_TOKENS = 8  # the same words may need more tokens in another tokenizer, or after a cut within a word


class Memorisation(TaskSettings):
    """Settings of a memorisation task."""

    kind: Literal["memorisation"] = "memorisation"
    tokens: int = Field(
        50, ge=4, description="Number of consecutive tokens that must equal the training row's. 50 as in Carlini et al."
    )
    rows: int = Field(
        200,
        ge=2,
        description="Maximum number of training rows to test: a seeded sample of the rows that are long enough.",
    )

    def estimate_tokens(self, rows: int, mean_length: float) -> float:
        """Estimate the tokens of the sampled training rows and their continuations."""
        return 2 * self.rows * self.tokens


class MemorisationTask(Task[Memorisation]):
    """Check for memorised rows. `reproduced` is 1 for a training row that the model completes word for word."""

    METRICS: ClassVar = {"reproduced": Metric("lower", is_binary=True)}

    @property
    def answer_limit(self) -> tuple[int, str]:
        """The number of tested tokens plus a margin, and the name of its setting."""
        return self.settings.tokens + EXTRA_TOKENS, "tokens"

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return a seeded sample of the rows that are long enough, each up to the middle of its text.

        The reference is the N tokens after the middle.

        Raises:
            InputError: Fewer than two rows are long enough.
        """

        def draw(row: Row) -> bytes:
            return hashlib.sha256(f"{context.seed}:{row['id']}".encode()).digest()

        dataset = item_encoding.require_dataset(context)
        path, tokens = dataset.path / "train.parquet", self.settings.tokens
        rows: list[Row] = []
        if dataset.manifest.summary.get("rows_kind", "sft") == conversation_rows.TEXT_KIND:
            rows += ({**row, "messages": [], "tools": None} for row in conversation_rows.read_texts(path))
        else:
            for row in conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset)):
                before, answer = item_encoding.split_last_answer(row["messages"])
                if before:
                    rows.append({"id": row["id"], "messages": before, "tools": row["tools"], "text": answer})
        items: list[Item] = []
        for row in sorted(rows, key=draw):
            text = str(row["text"])
            encoding = context.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            starts = [start for start, _ in encoding["offset_mapping"]]
            middle = len(starts) // 2
            if middle < 1 or len(starts) - middle < tokens:
                continue
            prefix, expected = text[: starts[middle]], text[starts[middle] : [*starts, len(text)][middle + tokens]]
            prompt = "\n\n".join([*(str(m["content"]) for m in row["messages"]), prefix])
            request = {"messages": row["messages"], "tools": row["tools"], "begun": prefix, "tokens": tokens}
            items.append(Item(str(row["id"]), prompt, expected, length=len(starts), request=request))
            if len(items) == self.settings.rows:
                break
        if len(items) < 2:
            raise InputError(
                f"the train split has {len(items)} rows with {tokens} tokens after their middle; expected at least 2",
                hint="Lower tokens, or remove the task.",
            )
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return 1 for every answer that begins with the reference, compared as text."""
        prompts = []
        for item in items:
            messages, tools, prefix = (item.request[name] for name in ("messages", "tools", "begun"))
            if messages:  # rendered by the chat template up to the start of the answer
                tools = json.loads(tools) if tools else None
                opening = chat_templates.render_conversation(engine.tokenizer, messages, tools, prompt=True)
                prompts.append(item_encoding.encode_plain(engine.tokenizer, opening + prefix))
            else:
                prompts.append(item_encoding.encode_text(engine.tokenizer, prefix))
        answers = self.answer_prompts(engine, prompts, context)
        values = []
        for answer, item in zip(answers, items, strict=True):
            reference = item.reference.strip()  # an engine may strip white space
            values.append(float(bool(reference) and answer.strip().startswith(reference)))
        return Scores({"reproduced": values}, answers=answers)
