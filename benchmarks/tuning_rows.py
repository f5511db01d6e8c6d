"""The training rows of all contestants, and the held-out rows."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # {"id", "messages": [user, assistant]}
PAIRS = (("prompt", "response"), ("instruction", "output"), ("prompt", "completion"))


@dataclass(frozen=True)
class Chosen:
    """Training rows and held-out rows.

    Attributes:
        lengths: Tokens of each training row.
        left_out: Number of rows longer than the limit.
    """

    train: list[Row]
    held_out: list[Row]
    lengths: list[int]
    left_out: int

    @property
    def tokens(self) -> int:
        """Tokens of the training rows."""
        return sum(self.lengths)

    @property
    def sha256(self) -> str:
        """Digest of both kinds of rows."""
        return hashlib.sha256(json.dumps([self.train, self.held_out], sort_keys=True).encode()).hexdigest()


def read(path: Path) -> list[Row]:
    """Return the distinct rows of a JSONL file, which may be gzipped, with one question and one answer, in the order of the file.

    A row is {"messages": [...]}, or a pair such as {"prompt", "response"} or {"instruction", "output"}.
    """
    rows: dict[str, Row] = {}
    for record in _records(path):
        messages = _messages(record)
        if messages:
            number = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
            rows.setdefault(number, {"id": number, "messages": messages})
    return list(rows.values())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _messages(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return one question and its answer; empty for any other row."""
    if "messages" in record:
        said = [(message["role"], message["content"]) for message in record["messages"]]
    else:
        pair = next((pair for pair in PAIRS if set(pair) <= set(record)), None)
        said = list(zip(("user", "assistant"), (record[name] for name in pair), strict=True)) if pair else []
    if [role for role, _ in said] != ["user", "assistant"] or not all(content.strip() for _, content in said):
        return []
    return [{"role": role, "content": content} for role, content in said]


def choose(
    rows: Sequence[Row], lengths: Sequence[int], *, tokens: int, batch: int, held_out: int, max_length: int
) -> Chosen:
    """Hold out the last `held_out` rows, and choose the first of the others that have `tokens` tokens in total, in whole batches.

    Rows with more than `max_length` tokens are left out, because each contestant truncates differently. Raises ValueError if there are too few
    rows.
    """
    whole = [(row, length) for row, length in zip(rows, lengths, strict=True) if length <= max_length]
    train, apart = whole[:-held_out], whole[-held_out:]
    count = total = 0
    while total < tokens or count % batch:
        if count == len(train):
            raise ValueError(
                f"{len(train):,} training rows have fewer than {tokens:,} tokens in whole batches of {batch}"
            )
        total += train[count][1]
        count += 1
    return Chosen(
        [row for row, _ in train[:count]],
        [row for row, _ in apart],
        [length for _, length in train[:count]],
        len(rows) - len(whole),
    )


def lengths(rows: Sequence[Row], tokenizer: Any) -> list[int]:
    """Return the tokens of each row, including the chat template."""
    from components.common.models import chat_templates

    return [
        len(
            tokenizer(chat_templates.render_conversation(tokenizer, row["messages"]), add_special_tokens=False)[
                "input_ids"
            ]
        )
        for row in rows
    ]
