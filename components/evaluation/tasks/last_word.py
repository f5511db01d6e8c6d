"""The last word of a passage (LAMBADA, Paperno et al., arXiv 1606.06031): whether greedy decoding gives it, and its perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.evaluation.task import Engine, Given, Item, Likelihood, Metric, Scores
from components.evaluation.tasks import asking, reading
from components.evaluation.tasks.config import LastWord
from components.evaluation.tasks.reading import Record

METRICS = {"acc": Metric("higher", right_or_wrong=True), "perplexity": Metric("lower", exponential=True)}


@dataclass(frozen=True)
class LastWordTask:
    """Passages whose last word is asked for, as lm-eval's lambada_openai: after the context a space, then the word."""

    settings: LastWord

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """acc, and perplexity: exp of the mean negative log-likelihood of a word."""
        return METRICS

    @property
    def against_base(self) -> bool:
        """A word is right or wrong by itself."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The passages; `ask` holds the context and the word with the space before it."""
        made = []
        for one in reading.records(self.settings.data):
            context, word = passage(one)
            length = len(given.tokenizer(f"{context} {word}", add_special_tokens=False)["input_ids"])
            ask = {"context": context, "continuation": f" {word}"}
            made.append(Item(one.id, context, word, one.optional("source"), one.optional("category"), length, ask))
        return asking.first(made, self.settings.max_items)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """Whether every token of the word is the model's first choice, and the word's negative log-likelihood in nats."""
        pairs = [asking.pair(engine.tokenizer, item.ask["context"], item.ask["continuation"]) for item in items]
        found = engine.likelihoods([asking.continuation(*one, engine.room) for one in pairs], given.reporter)
        return Scores({"acc": [_right(one) for one in found], "perplexity": [-one.logprob for one in found]})


def _right(one: Likelihood) -> float:
    """1.0 where the word is the first choice; not a number where its likelihood is none, since a broken model is not a wrong one."""
    return float("nan") if math.isnan(one.logprob) else float(one.greedy)


def passage(one: Record) -> tuple[str, str]:
    """A row's context and its last word. Raises InputError where one of them is missing."""
    if "context" in one.row:
        context, word = one.text("context").rstrip(), one.text("continuation").strip()
    else:
        context, _, word = one.text("text").strip().rpartition(" ")
    if not context or not word:
        raise one.wrong("needs a context and a last word")
    return context, word
