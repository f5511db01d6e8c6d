"""Task kind `last_word`: prediction of the last word of a passage (LAMBADA, Paperno et al., arXiv 1606.06031)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from components.evaluation.task_interface import Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings


class LastWord(TaskSettings):
    """Settings of a last_word task."""

    kind: Literal["last_word"] = "last_word"
    data: str = Field(
        min_length=1,
        description="File of rows {context, continuation} or {text}; for {text}, the task predicts the last word.",
    )


class LastWordTask(Task[LastWord]):
    """Passages as in lm-eval's lambada_openai: the context, a space, then the word. Perplexity is per word."""

    METRICS: ClassVar = {"acc": Metric("higher", is_binary=True), "perplexity": Metric("lower", exponential=True)}

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the passages; `request` holds the context, and the word with a leading space.

        Raises:
            InputError: A row has no context or no last word.
        """
        items = []
        for record in record_files.read_records(self.settings.data):
            if "context" in record.row:
                passage, word = record.get_text("context").rstrip(), record.get_text("continuation").strip()
            else:
                passage, _, word = record.get_text("text").strip().rpartition(" ")
            if not passage or not word:
                raise record.build_error("has an empty context or an empty last word")
            request = {"context": passage, "continuation": f" {word}"}
            items.append(item_encoding.build_item(record, context, passage, word, [f"{passage} {word}"], request))
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return whether greedy decoding gives the word, and the word's negative log-likelihood in nats."""
        pairs = [
            item_encoding.encode_pair(engine.tokenizer, item.request["context"], item.request["continuation"])
            for item in items
        ]
        continuations = [item_encoding.build_continuation(*pair, engine.max_input_tokens) for pair in pairs]
        likelihoods = engine.compute_likelihoods(continuations, context.reporter)
        # A NaN likelihood is a broken model, not a wrong word.
        acc = [math.nan if math.isnan(likelihood.logprob) else float(likelihood.greedy) for likelihood in likelihoods]
        return Scores({"acc": acc, "perplexity": [-likelihood.logprob for likelihood in likelihoods]})
