"""Task kind `multiple_choice`: the answer is the option with the highest log-likelihood after the question.

`acc` and `acc_norm` follow lm-eval (ConfigurableTask.process_results). `acc` selects the option with the highest summed
log-likelihood, `acc_norm` the option with the highest log-likelihood per character, without the delimiter.
"""

# Of equal options, the first is selected.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Literal

from pydantic import Field

from components.evaluation.task_interface import Engine, Item, Likelihood, Metric, Scores, TaskContext
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import FewShotSettings
from components.evaluation.tasks.record_files import Record

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class MultipleChoice(FewShotSettings):
    """Settings of a multiple_choice task."""

    kind: Literal["multiple_choice"] = "multiple_choice"
    data: str = Field(
        min_length=1, description="File of rows {query, choices, gold}, or {context_options, continuation, gold}."
    )
    delimiter: str = Field(" ", description="Text between the query and an option.")


@dataclass(frozen=True)
class Question:
    """A question with its options.

    Attributes:
        pairs: Context and continuation of each option.
        lengths: Lengths in characters by which acc_norm divides the log-likelihoods.
        gold: Index of the correct option.
        prompt: Text of the question for reports.
        reference: Text of the correct option.
    """

    pairs: list[tuple[str, str]]
    lengths: list[int]
    gold: int
    prompt: str
    reference: str


class MultipleChoiceTask(Task[MultipleChoice]):
    """Questions with one query and several options, or (Winograd schemas) several contexts and one continuation."""

    METRICS: ClassVar = {"acc": Metric("higher", is_binary=True), "acc_norm": Metric("higher", is_binary=True)}

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the questions with their examples; `request` holds the pairs, the lengths and the correct index.

        Raises:
            InputError: A row has fewer than two options, an empty text or an invalid `gold`.
        """
        delimiter = self.settings.delimiter
        examples = [parse_question(record, delimiter) for record in item_encoding.read_examples(self.settings)]
        before = "".join("".join(example.pairs[example.gold]) + "\n\n" for example in examples)
        items = []
        for record in record_files.read_records(self.settings.data):
            question = parse_question(record, delimiter)
            longest = max((text + after for text, after in question.pairs), key=len)
            request = {
                "pairs": [[before + text, after] for text, after in question.pairs],
                "lengths": question.lengths,
                "gold": question.gold,
            }
            items.append(
                item_encoding.build_item(
                    record, context, question.prompt, question.reference, [before + longest], request
                )
            )
        return items

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Score all options in one call, so that the options of a question share its prefix."""
        continuations = [
            item_encoding.build_continuation(
                *item_encoding.encode_pair(engine.tokenizer, text, after), engine.max_input_tokens
            )
            for item in items
            for text, after in item.request["pairs"]
        ]
        likelihoods = iter(engine.compute_likelihoods(continuations, context.reporter))
        values: dict[str, list[float]] = {"acc": [], "acc_norm": []}
        answers = []
        for item in items:
            pairs, gold = item.request["pairs"], item.request["gold"]
            options = [next(likelihoods) for _ in pairs]
            chosen = _find_most_likely(options, [1] * len(pairs))
            normalized = _find_most_likely(options, item.request["lengths"])
            measured = not any(math.isnan(option.logprob) for option in options)
            values["acc"].append(float(chosen == gold) if measured else math.nan)
            values["acc_norm"].append(float(normalized == gold) if measured else math.nan)
            # Options that share their continuation differ in their contexts.
            text, after = pairs[chosen]
            answers.append(str(text if len({pair[1] for pair in pairs}) == 1 else after).strip())
        return Scores(values, answers=answers)


def parse_question(record: Record, delimiter: str) -> Question:
    """Return a row as a question.

    Args:
        record: The row.
        delimiter: Text between the query and an option.

    Raises:
        InputError: The row has fewer than two options, an empty text or an invalid `gold`.
    """
    if "context_options" in record.row:
        options, after = record.get_texts("context_options"), record.get_text("continuation")
        if len(options) < 2 or not after:
            raise record.build_error(
                f"has {options!r:.60} in context_options and {after!r:.60} in continuation; expected two or more "
                "options and a continuation that is not empty"
            )
        words = [option.split(" ") for option in options]
        shared = takewhile(lambda column: len(set(column)) == 1, zip(*words, strict=False))
        prompt = f"{' '.join(column[0] for column in shared)}… {after}"
        pairs, lengths = [(option, delimiter + after) for option in options], [len(after)] * len(options)
    else:
        prompt, options = record.get_text("query"), record.get_texts("choices")
        if len(options) < 2 or not all(options):
            raise record.build_error(f"has {options!r:.60} in choices; expected two or more options that are not empty")
        pairs, lengths = [(prompt, delimiter + option) for option in options], [len(option) for option in options]
    gold = _parse_gold(record, options)
    return Question(pairs, lengths, gold, prompt, options[gold])


def _parse_gold(record: Record, options: Sequence[str]) -> int:
    """Return the index of the correct option; `gold` is its index from 0, its letter or its text."""
    gold = record.row.get("gold")
    if isinstance(gold, str) and gold in options:
        return options.index(gold)
    if isinstance(gold, str) and len(gold) == 1 and gold in LETTERS[: len(options)]:
        return LETTERS.index(gold)
    if isinstance(gold, str) and gold.isdecimal():
        gold = int(gold)
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(options):
        return gold
    raise record.build_error(
        f"has {gold!r} in gold; expected the index, letter or text of one of its {len(options)} options"
    )


def _find_most_likely(options: Sequence[Likelihood], lengths: Sequence[int]) -> int:
    scores = [option.logprob / length for option, length in zip(options, lengths, strict=True)]
    return max(range(len(scores)), key=lambda index: scores[index])
