"""Task kind `held_out`: loss and perplexity of the dataset's test split, and answers for a side-by-side comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from components.common.models import chat_templates, conversation_rows
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.evaluation.task_interface import (
    HARM_NATS,
    MAX_ITEM_LOSS_NATS,
    Continuation,
    Engine,
    Item,
    Metric,
    Scores,
    TaskContext,
)
from components.evaluation.tasks import item_encoding
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings
from components.evaluation.tasks.record_files import Record


class HeldOut(TaskSettings):
    """Settings of a held_out task."""

    kind: Literal["held_out"] = "held_out"
    max_items: int | None = Field(
        None, ge=2, description="Maximum number of test rows, in order of id. Default: evaluation.max_items."
    )
    generations: int = Field(
        4,
        ge=0,
        description="Number of test rows to answer, with greedy decoding, for the side-by-side comparison. Default: "
        "evaluation.generations.",
    )
    generation_tokens: int = Field(
        48,
        ge=1,
        description="Maximum answer length, in tokens, in the side-by-side comparison. "
        "Default: evaluation.generation_tokens.",
    )

    def estimate_tokens(self, rows: int, mean_length: float) -> tuple[float, float]:
        """Estimate the tokens of all rows and of the generated answers."""
        return rows * mean_length, self.generations * self.generation_tokens


class HeldOutTask(Task[HeldOut]):
    """Loss on the test split in nats per answer token (Σ nll / Σ tokens), and its exponential, the perplexity."""

    METRICS: ClassVar = {
        "loss": Metric("lower", per_token=True, max_item_loss=MAX_ITEM_LOSS_NATS, harm=HARM_NATS),
        "perplexity": Metric("lower", per_token=True, exponential=True, max_item_loss=MAX_ITEM_LOSS_NATS),
    }

    @property
    def answer_limit(self) -> tuple[int, str]:
        """The maximum length of the answers for the side-by-side comparison, and the name of its setting."""
        return self.settings.generation_tokens if self.settings.generations else 0, "generation_tokens"

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the test rows with an answer within max_length.

        Raises:
            InputError: Fewer than two rows have an answer within max_length, or no dataset is available.
        """
        dataset = item_encoding.require_dataset(context)
        path = dataset.path / "test.parquet"
        if dataset.manifest.summary.get("rows_kind") == conversation_rows.TEXT_KIND:
            rows = conversation_rows.read_texts(path)
        else:
            rows = conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset))
        labels = item_encoding.read_columns(dataset, "test", ["source", "meta"])
        rows = [{**labels[row["id"]], **row} for row in sorted(rows, key=lambda row: str(row["id"]))]
        rows = rows[: self.settings.max_items]
        items = []
        for row in rows:
            prompt, reference, prompt_ids = "", "", list[int]()
            if "text" in row:  # plain text: every token counts, and there is no prompt
                ids = chat_templates.encode_text(context.tokenizer, row["text"])[: context.max_length]
                answer_mask = [1] * len(ids)
            else:
                messages = row["messages"]
                tools = json.loads(row["tools"]) if row.get("tools") else None
                encoded = chat_templates.encode_conversation(
                    context.tokenizer, messages, tools, max_length=context.max_length
                )
                ids, answer_mask = encoded.input_ids, encoded.answer_mask
                last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
                prompt = item_encoding.join_contents(messages[:last])
                reference = str(messages[last]["content"]) if last < len(messages) else ""
                if last:
                    prompt_ids = chat_templates.encode_prompt(context.tokenizer, messages[:last], tools)
            if any(answer_mask[1:]):
                record = Record(str(row["id"]), row, str(path))
                category = json.loads(record.get_optional("meta") or "{}").get("category") or ""
                request = {"ids": ids, "answer": answer_mask, "prompt": prompt_ids}
                source = record.get_optional("source")
                items.append(Item(record.id, prompt, reference, source, str(category), len(ids), request))
        if left_out := len(rows) - len(items):
            rows_without_answer = f"{left_out:,} of {format_count(len(rows), 'test row')}"
            context.reporter.note(
                f"left out {rows_without_answer}, for lack of an answer within {context.max_length:,} tokens"
            )
        if len(items) < 2:
            raise InputError(
                f"the test split of {dataset.path} has {format_count(len(items), 'row')} with an answer; expected at least 2",
                hint="Increase the number of rows, the test fraction or evaluation.max_length.",
            )
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return each item's summed negative log-likelihood in nats, weighted by tokens, and the greedy answers."""
        continuations = [Continuation(item.request["ids"], item.request["answer"]) for item in items]
        likelihoods = engine.compute_likelihoods(continuations, context.reporter)
        nll = [-likelihood.logprob for likelihood in likelihoods]
        tokens = [float(likelihood.tokens) for likelihood in likelihoods]

        answers: list[str | None] = [None] * len(items)
        chosen = [i for i, item in enumerate(items) if item.request["prompt"]][: self.settings.generations]
        if chosen:
            prompts = [items[i].request["prompt"] for i in chosen]
            for i, answer in zip(chosen, self.answer_prompts(engine, prompts, context), strict=True):
                answers[i] = answer
        return Scores(dict.fromkeys(self.metrics, nll), dict.fromkeys(self.metrics, tokens), answers)
