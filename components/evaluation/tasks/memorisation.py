"""Whether training rows are reproduced word for word: a model is given a row up to the middle of its answer and goes on greedily.

A row is memorised when the next N tokens are exactly the row's: extractability of N tokens with the prefix as context, N = 50 in Carlini
et al., "Quantifying Memorization Across Neural Language Models" (ICLR 2023, arXiv 2202.07646). Of a conversation the last answer is cut, of
a plain text the text. What has no N tokens after its middle cannot be tried. What a model would say only after another beginning or by
sampling is not found: the share is a lower bound.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common import chat, conversations
from components.common.errors import InputError
from components.evaluation.task import Decoding, Engine, Given, Item, Metric, Scores
from components.evaluation.tasks import asking
from components.evaluation.tasks.config import Memorisation

SPARE = 8  # tokens: the same words may be more of them in another tokenizer, or after a cut within a word
METRICS = {"reproduced": Metric("lower", right_or_wrong=True)}


@dataclass(frozen=True)
class MemorisationTask:
    """Rows of the dataset's train split, cut in their middle."""

    settings: Memorisation

    @property
    def name(self) -> str:
        """What metrics are named by."""
        return self.settings.name

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """reproduced: 1 for a row whose continuation is given word for word."""
        return METRICS

    @property
    def against_base(self) -> bool:
        """A row is reproduced or not; the base's share says how much of it was to be foreseen anyway."""
        return False

    def items(self, given: Given) -> list[Item]:
        """A seeded sample of the rows that are long enough. Raises InputError where fewer than two are."""
        made = []
        for row in sorted(_rows(given), key=lambda row: _chance(given.seed, str(row["id"]))):
            item = self._item(row, given)
            made += [item] if item else []
            if len(made) == self.settings.rows:
                break
        if len(made) < 2:
            count = self.settings.tokens
            raise InputError(
                f"the train split has {len(made)} rows with {count} tokens after their middle, and an interval needs at least 2",
                hint="Lower the task's tokens, or leave it out for rows as short as these.",
            )
        return asking.first(made, self.settings.max_items)

    def _item(self, row: Mapping[str, Any], given: Given) -> Item | None:
        """The row up to the middle of its text, and the N tokens after it as reference; None for too short a text."""
        text, count = str(row["text"]), self.settings.tokens
        starts = [start for start, _ in given.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]]
        middle = len(starts) // 2
        if middle < 1 or len(starts) - middle < count:
            return None
        cut, end = starts[middle], [*starts, len(text)][middle + count]
        before = "\n\n".join([*(str(m["content"]) for m in row["messages"]), text[:cut]])
        ask = {"messages": row["messages"], "tools": row["tools"], "begun": text[:cut], "tokens": count}
        return Item(str(row["id"]), before, text[cut:end], length=len(starts), ask=ask)

    def score(self, engine: Engine, items: Sequence[Item], given: Given, base: Scores | None) -> Scores:
        """1 for every row whose next tokens are the row's, compared as text."""
        longest = self.settings.tokens + SPARE
        asked = [_prompt(engine.tokenizer, item) for item in items]
        prompts = asking.within_room(asked, engine.room, longest, given.reporter, setting="tokens")
        answers = engine.answers(prompts, Decoding(longest), given.reporter)
        values = [float(reproduced(answer, item.reference)) for answer, item in zip(answers, items, strict=True)]
        return Scores({"reproduced": values}, answers=answers)


def _prompt(tokenizer: Any, item: Item) -> list[int]:
    """The conversation up to the answer as the chat template writes it, and the answer's beginning."""
    messages, tools = item.ask["messages"], item.ask["tools"]
    if not messages:
        return asking.encode(tokenizer, item.ask["begun"])
    opening = chat.render(tokenizer, messages, json.loads(tools) if tools else None, prompt=True)
    return asking.encode_bare(tokenizer, opening + item.ask["begun"])


def reproduced(answer: str, reference: str) -> bool:
    """Whether an answer begins with the reference; an engine may leave out white space at both ends."""
    return bool(reference.strip()) and answer.strip().startswith(reference.strip())


def _chance(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()


def _rows(given: Given) -> Iterator[dict[str, Any]]:
    """The training rows as {"id", "messages" before the last answer, "tools", "text" of that answer}; plain texts without messages."""
    dataset = asking.given_dataset(given)
    path, kind = dataset.path / "train.parquet", str(dataset.manifest.summary.get("rows_kind", "sft"))
    if kind == conversations.TEXT:
        yield from ({**row, "messages": [], "tools": None} for row in conversations.texts(path))
        return
    for row in conversations.read(path, conversations.kind_of(dataset)):
        before, answer = asking.before_answer(row["messages"])
        if before:
            yield {"id": row["id"], "messages": before, "tools": row["tools"], "text": answer}
