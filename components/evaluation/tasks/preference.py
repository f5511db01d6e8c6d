"""Whether a model finds the chosen answer of a pair likelier than the rejected one, summed over its tokens and per token.

Every token of the answer counts, with the mark that ends its turn. A longer answer has the lower sum: per token, length counts less
(the length-normalised reward of SimPO, arXiv 2405.14734, beside the sum that DPO, arXiv 2305.18290, compares).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common import chat
from components.common.chat import Completion
from components.common.errors import InputError
from components.evaluation.task import Continuation, Engine, Given, Item, Likelihood, Metric, Scores
from components.evaluation.tasks import asking, reading
from components.evaluation.tasks.config import Preference
from components.evaluation.tasks.reading import Record

METRICS = {
    "accuracy": Metric("higher", right_or_wrong=True),
    "accuracy_per_token": Metric("higher", right_or_wrong=True),
    "margin": Metric("higher"),
    "margin_per_token": Metric("higher", per_token=True),
}
SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PreferenceTask:
    """Pairs of answers to the same prompt, from a file or the dataset's test split."""

    settings: Preference

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """accuracy and margin (nats), each summed and per token; equal likelihoods are no preference."""
        return METRICS

    @property
    def against_base(self) -> bool:
        """A model's preference is its own."""
        return False

    def items(self, given: Given) -> list[Item]:
        """The pairs; `ask` holds the messages of the prompt and of both answers. Raises InputError for a pair of equal answers."""
        rows = reading.records(self.settings.data) if self.settings.data else _of_dataset(given)
        return asking.first([_item(one, given) for one in rows], self.settings.max_items)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """How much likelier the chosen answers are, in nats."""
        asked = [_continuation(engine, item, side) for item in items for side in SIDES]
        found = iter(engine.likelihoods(asked, given.reporter))
        pairs = [(next(found), next(found)) for _ in items]
        sums = [chosen.logprob - rejected.logprob for chosen, rejected in pairs]
        means = [_mean(chosen) - _mean(rejected) for chosen, rejected in pairs]
        return Scores({"accuracy": _right(sums), "accuracy_per_token": _right(means), "margin": sums, "margin_per_token": means})


def _item(one: Record, given: Given) -> Item:
    prompt = asking.messages_of(one, "prompt")
    answers = {side: _answer(one, side) for side in SIDES}
    if answers["chosen"] == answers["rejected"]:
        raise one.wrong("has the same answer as chosen and as rejected")
    text = "\n\n".join(m["content"] for m in prompt)
    said = {side: "\n\n".join(m["content"] for m in turns) for side, turns in answers.items()}
    tokens = max(len(given.tokenizer(text + said[side], add_special_tokens=False)["input_ids"]) for side in SIDES)
    ask = {"prompt": prompt, **answers, "tools": asking.tools_of(one)}
    return Item(one.id, text, said["chosen"], one.optional("source"), one.optional("category"), tokens, ask)


def _answer(one: Record, side: str) -> list[dict[str, str]]:
    turns = asking.messages_of(Record(one.id, {side: one.row.get(side)}, one.place), side)
    return [{"role": "assistant", "content": turns[0]["content"]}] if isinstance(one.row[side], str) else turns


def _of_dataset(given: Given) -> list[Record]:
    """The test split's pairs. Raises InputError for a dataset of other rows."""
    dataset = asking.given_dataset(given)
    kind = str(dataset.manifest.summary.get("rows_kind", "sft"))
    if kind != "preference":
        raise InputError(f"the dataset in {dataset.path} holds {kind} rows, no preference pairs", hint="Name a file of pairs in data.")
    rows = asking.columns(dataset, "test", ["prompt", "chosen", "rejected", "tools", "source"])
    return [Record(name, row, f"{dataset.path / 'test.parquet'} {name}") for name, row in rows.items()]


def completion(tokenizer: Any, item: Item, side: str) -> Completion:
    """The tokens of the prompt and of one answer. Raises InputError where the chat template refuses them."""
    tools = json.loads(item.ask["tools"]) if item.ask["tools"] else None
    return chat.encode_completion(tokenizer, item.ask["prompt"], item.ask[side], tools)


def _continuation(engine: Engine, item: Item, side: str) -> Continuation:
    made = completion(engine.tokenizer, item, side)
    return asking.continuation(made.prompt_ids, made.answer_ids, engine.room)


def _mean(one: Likelihood) -> float:
    return one.logprob / one.tokens if one.tokens else float("nan")


def _right(differences: Sequence[float]) -> list[float]:
    """1.0 where the difference is above 0, not a number where it is none."""
    return [one if math.isnan(one) else float(one > 0) for one in differences]
