"""Loss and perplexity of the dataset's own test split, and a few answers to be read side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common import chat, conversations
from components.common.errors import InputError
from components.evaluation.task import Continuation, Decoding, Engine, Given, Item, Metric, Scores
from components.evaluation.tasks import asking
from components.evaluation.tasks.config import HeldOut

LOSS = Metric(better="lower", per_token=True)


@dataclass(frozen=True)
class HeldOutTask:
    """The test split: nats an answer token, and their exponential. `generations` items are answered greedily beside it."""

    settings: HeldOut
    against_base: bool = False

    @property
    def name(self) -> str:
        """held_out, unless it is named otherwise."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """loss (Σ nll / Σ tokens, not a mean of means) and perplexity."""
        return {"loss": LOSS, "perplexity": Metric(better="lower", per_token=True, exponential=True)}

    def items(self, given: Given) -> list[Item]:
        """The test rows by id, those without an answer within max_length left out. Raises InputError when fewer than two remain."""
        dataset = asking.given_dataset(given)
        rows = _rows(given)[: self.settings.max_items]
        items = [item for row in rows if any((item := _item(row, given)).ask["answer"][1:])]
        if len(items) < len(rows):
            given.reporter.note(f"{len(rows) - len(items)} of {len(rows)} test rows have no answer within {given.max_length} tokens")
        if len(items) < 2:
            raise InputError(
                f"the test split of {dataset.path} has {len(items)} rows that can be measured, and an interval needs at least 2",
                hint="Curate more data, raise the test fraction, or raise evaluation.max_length.",
            )
        return items

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """Summed negative log-likelihood of each item's answer tokens (nats), weighed by their number, and the greedy answers."""
        asked = [Continuation(item.ask["ids"], item.ask["answer"]) for item in items]
        found = engine.likelihoods(asked, given.reporter)
        nll, tokens = [-one.logprob for one in found], [float(one.tokens) for one in found]
        values, weights = dict.fromkeys(self.metrics, nll), dict.fromkeys(self.metrics, tokens)
        return Scores(values, weights, self._answers(engine, items, given))

    def _answers(self, engine: Engine, items: Sequence[Item], given: Given) -> list[str | None]:
        chosen = [i for i, item in enumerate(items) if item.ask["prompt"]][: self.settings.generations]
        longest, asked = self.settings.generation_tokens, [items[i].ask["prompt"] for i in chosen]
        prompts = asking.within_room(asked, engine.room, longest, given.reporter, setting="generation_tokens") if chosen else []
        texts = engine.answers(prompts, Decoding(longest), given.reporter) if chosen else []
        by_index = dict(zip(chosen, texts, strict=True))
        return [by_index.get(i) for i in range(len(items))]


def _rows(given: Given) -> list[dict[str, Any]]:
    """The test rows in order of their ids, each with its source and its category where it says one."""
    import pyarrow.parquet as parquet

    dataset = asking.given_dataset(given)
    path = dataset.path / "test.parquet"
    text = dataset.manifest.summary.get("rows_kind") == conversations.TEXT
    rows = conversations.texts(path) if text else conversations.read(path, conversations.kind_of(dataset))
    told = parquet.read_table(path, columns=[name for name in ("id", "source", "meta") if name in parquet.read_schema(path).names])
    beside = {str(one["id"]): one for one in told.to_pylist()}
    return sorted(({**beside[str(row["id"])], **row} for row in rows), key=lambda row: str(row["id"]))


def _item(row: dict[str, Any], given: Given) -> Item:
    asked = _text(row, given) if "text" in row else _conversation(row, given)
    meta = json.loads(row.get("meta") or "{}")
    return Item(id=str(row["id"]), source=row.get("source") or "", category=str(meta.get("category") or ""), **asked)


def _conversation(row: dict[str, Any], given: Given) -> dict[str, Any]:
    messages: Sequence[dict[str, Any]] = row["messages"]
    tools = json.loads(row["tools"]) if row.get("tools") else None
    encoded = chat.encode(given.tokenizer, messages, tools, max_length=given.max_length)
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
    before = messages[:last]
    prompt = chat.encode_prompt(given.tokenizer, before, tools) if before else []
    return {
        "prompt": "\n\n".join(str(m["content"]) for m in before),
        "reference": str(messages[last]["content"]) if last < len(messages) else "",
        "length": len(encoded.input_ids),
        "ask": {"ids": encoded.input_ids, "answer": encoded.answer, "prompt": prompt},
    }


def _text(row: dict[str, Any], given: Given) -> dict[str, Any]:
    """A plain text, every token of which counts; there is nothing to answer."""
    ids = chat.encode_text(given.tokenizer, row["text"])[: given.max_length]
    return {"prompt": "", "length": len(ids), "ask": {"ids": ids, "answer": [1] * len(ids), "prompt": []}}
