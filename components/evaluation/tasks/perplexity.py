r"""Task kind `perplexity`: perplexity of plain texts as in lm-eval, per word and per byte, and in bits per byte.

Words are separated by white space (`re.split(r"\s+", text)`); bytes are those of UTF-8. Every token is scored once, the
first token given the start token.
"""

# A text longer than the context length is split into windows; the last window has as much context as fits.

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar, Literal

from pydantic import Field

from components.evaluation.task_interface import Continuation, Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import TaskSettings

DEFAULT_WINDOW_TOKENS = 2048  # lm-eval's default for a model without a declared limit


class Perplexity(TaskSettings):
    """Settings of a perplexity task."""

    kind: Literal["perplexity"] = "perplexity"
    data: str = Field(
        min_length=1, description="A .txt file (one document), or a file of rows {text} (one document per row)."
    )
    window: int | None = Field(
        None,
        ge=2,
        description="Window length in tokens. null: the model's context length, or 2048 if the model declares no limit.",
    )


class PerplexityTask(Task[Perplexity]):
    """Perplexities of documents, which are scored separately."""

    METRICS: ClassVar = {
        "word_perplexity": Metric("lower", exponential=True),
        "byte_perplexity": Metric("lower", exponential=True),
        "bits_per_byte": Metric("lower"),
    }

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the documents; `request` holds the text and the window.

        Raises:
            InputError: A row has no text.
        """
        items = []
        for record in record_files.read_records(self.settings.data):
            text = record.get_text("text")
            if not text.strip():
                raise record.build_error("has an empty text")
            request = {"text": text, "window": self.settings.window}
            items.append(item_encoding.build_item(record, context, text, "", [text], request))
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return negative log-likelihoods in nats (for bits_per_byte in bits), weighted by words or bytes."""
        limit = engine.max_input_tokens or DEFAULT_WINDOW_TOKENS
        longest = min(self.settings.window or limit, limit)
        start, texts = item_encoding.get_start_token_id(engine.tokenizer), [item.request["text"] for item in items]
        windows = [
            list(split_windows(item_encoding.encode_text(engine.tokenizer, text), start, longest)) for text in texts
        ]
        likelihoods = iter(engine.compute_likelihoods(list(chain(*windows)), context.reporter))
        nats = [-math.fsum(next(likelihoods).logprob for _ in text_windows) for text_windows in windows]
        words = [float(len(re.split(r"\s+", text))) for text in texts]
        sizes = [float(len(text.encode())) for text in texts]
        bits = [text_nats / math.log(2) for text_nats in nats]
        return Scores(
            {"word_perplexity": nats, "byte_perplexity": nats, "bits_per_byte": bits},
            {"word_perplexity": words, "byte_perplexity": sizes, "bits_per_byte": sizes},
        )


def split_windows(ids: Sequence[int], start: int, longest: int) -> Iterator[Continuation]:
    """Yield windows that score every token once (lm-eval's rolling windows).

    Args:
        ids: Tokens of the text.
        start: Token before the text.
        longest: Maximum number of input tokens per window.
    """
    first = min(longest, len(ids))
    if first:
        yield Continuation([start, *ids[:first]], [False] + [True] * first)
    for done in range(first, len(ids), longest):
        end = min(done + longest, len(ids))
        window = list(ids[end - longest - 1 : end])
        yield Continuation(window, [False] * (len(window) - (end - done)) + [True] * (end - done))
