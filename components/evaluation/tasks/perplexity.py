r"""The perplexity of plain texts, as lm-eval defines it: per word, per byte, and in bits per byte.

A word is what white space parts (`re.split(r"\s+", text)`), bytes are those of UTF-8, and every token counts, the first one given the mark
of a beginning. A text longer than the model reads is computed in windows, each token once, the last window with as much before it as fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from components.evaluation.task import Continuation, Engine, Given, Item, Metric, Scores
from components.evaluation.tasks import asking, reading
from components.evaluation.tasks.config import Perplexity

METRICS = {
    "word_perplexity": Metric("lower", exponential=True),
    "byte_perplexity": Metric("lower", exponential=True),
    "bits_per_byte": Metric("lower"),
}
UNKNOWN_ROOM = 2048  # tokens: what lm-eval takes for a model that names none


@dataclass(frozen=True)
class PerplexityTask:
    """Documents, each measured by itself."""

    settings: Perplexity

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """word_perplexity, byte_perplexity and bits_per_byte."""
        return METRICS

    @property
    def against_base(self) -> bool:
        """Texts are measured by themselves."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The documents; `ask` holds the text and the window. Raises InputError for an empty one."""
        made = []
        for one in reading.document(self.settings.data):
            text = one.text("text")
            if not text.strip():
                raise one.wrong("holds an empty text")
            length = len(given.tokenizer(text, add_special_tokens=False)["input_ids"])
            ask = {"text": text, "window": self.settings.window}
            made.append(Item(one.id, text, source=one.optional("source"), category=one.optional("category"), length=length, ask=ask))
        return asking.first(made, self.settings.max_items)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """The documents' negative log-likelihoods in nats (for bits_per_byte in bits), over their words and bytes."""
        longest = min(self.settings.window or engine.room or UNKNOWN_ROOM, engine.room or UNKNOWN_ROOM)
        start = asking.first_token(engine.tokenizer)
        asked = [list(windows(asking.encode(engine.tokenizer, item.ask["text"]), start, longest)) for item in items]
        found = iter(engine.likelihoods([one for some in asked for one in some], given.reporter))
        nats = [-math.fsum(next(found).logprob for _ in some) for some in asked]
        texts = [item.ask["text"] for item in items]
        words, sizes = [float(len(re.split(r"\s+", text))) for text in texts], [float(len(text.encode())) for text in texts]
        values = {"word_perplexity": nats, "byte_perplexity": nats, "bits_per_byte": [one / math.log(2) for one in nats]}
        return Scores(values, {"word_perplexity": words, "byte_perplexity": sizes, "bits_per_byte": sizes})


def windows(ids: Sequence[int], start: int, longest: int) -> Iterator[Continuation]:
    """What is computed of a text: at most `longest` tokens are read at once, and each is counted in one window (lm-eval's rolling ones)."""
    first = min(longest, len(ids))
    if first:
        yield Continuation([start, *ids[:first]], [False] + [True] * first)
    for done in range(first, len(ids), longest):
        end = min(done + longest, len(ids))
        window = list(ids[end - longest - 1 : end])
        yield Continuation(window, [False] * (len(window) - (end - done)) + [True] * (end - done))
