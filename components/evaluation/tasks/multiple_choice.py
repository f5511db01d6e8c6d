"""Questions with options: the one that the model finds likeliest, by its log-likelihood after the question.

`acc` and `acc_norm` are lm-eval's (ConfigurableTask.process_results): the option with the highest summed log-likelihood, and the one with
the highest log-likelihood for its length in characters, the delimiter left out; the first of equals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from components.common.errors import InputError
from components.evaluation.task import Engine, Given, Item, Likelihood, Metric, Scores
from components.evaluation.tasks import asking, reading
from components.evaluation.tasks.config import MultipleChoice
from components.evaluation.tasks.reading import Record

METRICS = {"acc": Metric("higher", right_or_wrong=True), "acc_norm": Metric("higher", right_or_wrong=True)}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """Options as pairs of a context and its continuation, the lengths that acc_norm divides by, and the right one's place."""

    pairs: list[tuple[str, str]]
    lengths: list[int]
    gold: int
    prompt: str
    reference: str


@dataclass(frozen=True)
class MultipleChoiceTask:
    """Rows with a query and options, or (as in Winograd schemas) with one continuation of several contexts."""

    settings: MultipleChoice

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """acc and acc_norm."""
        return METRICS

    @property
    def against_base(self) -> bool:
        """A choice is right or wrong by itself."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The questions; `ask` holds their pairs of context and continuation, the lengths of acc_norm, and the right option's place."""
        before = self._before()
        made = [self._item(one, before, given) for one in reading.records(self.settings.data)]
        return asking.first(made, self.settings.max_items)

    def _before(self) -> str:
        """The examples with their right options, each ending with an empty line."""
        settings = self.settings
        if not settings.shots:
            return ""
        shown = reading.records(settings.examples, "examples")[: settings.shots]
        if len(shown) < settings.shots:
            raise InputError(f"{settings.examples} has {len(shown)} rows, and {settings.shots} are to be shown", hint="Lower shots.")
        questions = [question(one, settings.delimiter) for one in shown]
        return "".join("".join(asked.pairs[asked.gold]) + "\n\n" for asked in questions)

    def _item(self, one: Record, before: str, given: Given) -> Item:
        asked = question(one, self.settings.delimiter)
        longest = max((context + after for context, after in asked.pairs), key=len)
        return Item(
            id=one.id,
            prompt=asked.prompt,
            reference=asked.reference,
            source=one.optional("source"),
            category=one.optional("category"),
            length=len(given.tokenizer(before + longest, add_special_tokens=False)["input_ids"]),
            ask={"pairs": [[before + context, after] for context, after in asked.pairs], "lengths": asked.lengths, "gold": asked.gold},
        )

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """The options' log-likelihoods, all asked at once: those of one question share its beginning."""
        pairs = [asking.pair(engine.tokenizer, context, after) for item in items for context, after in item.ask["pairs"]]
        asked = [asking.continuation(before, after, engine.room) for before, after in pairs]
        found = iter(engine.likelihoods(asked, given.reporter))
        by_item = [[next(found) for _ in item.ask["pairs"]] for item in items]
        chosen = [(_best(some), _best(some, item.ask["lengths"])) for item, some in zip(items, by_item, strict=True)]
        values = {
            "acc": [float(place == item.ask["gold"]) for item, (place, _) in zip(items, chosen, strict=True)],
            "acc_norm": [float(place == item.ask["gold"]) for item, (_, place) in zip(items, chosen, strict=True)],
        }
        answers = [_told(item, place) for item, (place, _) in zip(items, chosen, strict=True)]
        return Scores(_unmeasured(values, by_item), answers=answers)


def question(one: Record, delimiter: str) -> Question:
    """A row as a question. Raises InputError for one without options, or without a right one among them."""
    if "context_options" in one.row:
        contexts, after = one.texts("context_options"), one.text("continuation")
        if len(contexts) < 2 or not after:
            raise one.wrong("needs two or more context_options and a continuation that is not empty")
        pairs, lengths = [(context, delimiter + after) for context in contexts], [len(after)] * len(contexts)
        gold = _gold(one, contexts)
        return Question(pairs, lengths, gold, f"{_shared(contexts)}… {after}", contexts[gold])
    query, choices = one.text("query"), one.texts("choices")
    if len(choices) < 2 or not all(choices):
        raise one.wrong("needs two or more options, none of them empty")
    gold = _gold(one, choices)
    return Question([(query, delimiter + choice) for choice in choices], [len(choice) for choice in choices], gold, query, choices[gold])


def _gold(one: Record, options: Sequence[str]) -> int:
    """The right option's place: `gold` is its place, counted from 0, its letter, or its text."""
    gold = one.row.get("gold")
    if isinstance(gold, str) and gold in options:
        return options.index(gold)
    if isinstance(gold, str) and len(gold) == 1 and gold in LETTERS[: len(options)]:
        return LETTERS.index(gold)
    if isinstance(gold, str) and gold.isdecimal():
        gold = int(gold)
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(options):
        return gold
    raise one.wrong(f"says in gold that {gold!r} is right, and has {len(options)} options")


def _shared(contexts: Sequence[str]) -> str:
    """The words that contexts begin with in common."""
    words = [context.split(" ") for context in contexts]
    return " ".join(some[0] for some in takewhile(lambda some: len(set(some)) == 1, zip(*words, strict=False)))


def _best(found: Sequence[Likelihood], lengths: Sequence[int] | None = None) -> int:
    scores = [one.logprob / length for one, length in zip(found, lengths or [1] * len(found), strict=True)]
    return max(range(len(scores)), key=lambda place: scores[place])


def _told(item: Item, place: int) -> str:
    context, after = item.ask["pairs"][place]
    same = len({pair[1] for pair in item.ask["pairs"]}) == 1
    return str(context if same else after).strip()


def _unmeasured(values: dict[str, list[float]], by_item: Sequence[Sequence[Likelihood]]) -> dict[str, list[float]]:
    """The values, not a number for items of which a log-likelihood is none."""
    broken = [any(math.isnan(one.logprob) for one in some) for some in by_item]
    return {name: [float("nan") if bad else value for value, bad in zip(some, broken, strict=True)] for name, some in values.items()}
