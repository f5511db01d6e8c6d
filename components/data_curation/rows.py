"""A row of the curation, independent of the format of its record."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.common.artifacts import hashing
from components.common.row_comparison import words

Kind = Literal["sft", "preference", "unpaired", "text"]
Message = dict[str, str]

# Content of a row by kind: the Parquet columns in addition to id, source and meta. The row's digest covers the content.
CONTENT_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "sft": ("messages", "tools"),
    "preference": ("prompt", "chosen", "rejected", "tools"),
    "unpaired": ("prompt", "completion", "label", "tools"),
    "text": ("text",),
}


@dataclass
class Row:
    """A row with its origin.

    Attributes:
        kind: the kind of the row.
        content: the values of the kind's CONTENT_COLUMNS.
        own_id: the id in the source, or "".
        source: the value of the record's field `source`, or the file's name.
        meta: the other fields of the record.
        file: the name of the file.
        line: the line or number of the record in the file.
        id: the id of a published row; otherwise "".
        format: the record format.
    """

    kind: Kind
    content: dict[str, Any]
    own_id: str
    source: str
    meta: dict[str, Any]
    file: str
    line: int
    id: str = ""
    format: str = ""

    def digest(self) -> str:
        """Return the sha256 (hex) of kind and content."""
        return hashing.digest([self.kind, self.content])

    def prompt(self) -> str:
        """Return the text of all user turns; "" for kind text."""
        messages = self.content.get("messages") or self.content.get("prompt") or []
        return _join_contents(m for m in messages if m["role"] == "user")

    def answers(self) -> list[str]:
        """Return all answers, of a preference pair the chosen answer first; for kind text, the text."""
        if self.kind == "sft":
            return [m["content"] for m in self.content["messages"] if m["role"] == "assistant"]
        if self.kind == "preference":
            return [_join_contents(self.content["chosen"]), _join_contents(self.content["rejected"])]
        return [_join_contents(self.content["completion"]) if self.kind == "unpaired" else self.content["text"]]

    def split_prompt(self) -> tuple[list[str], list[str]]:
        """Return the texts of the messages up to the last user turn, which is the last of them, and of those after it.

        Without a user turn, and for kind text, the first list is empty. Joined by line breaks, both are `text()`.
        """
        return words.split_prompt(self.content)

    def text(self) -> str:
        """Return the text of all turns, for length limits, comparison and display."""
        return extract_text(self.content)


def extract_text(content: Mapping[str, Any]) -> str:
    """Return the text of all turns in a row's content."""
    return "\n".join(words.list_texts(content))


def _join_contents(messages: Iterable[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def make_unique_id(name: str, taken: dict[str, int]) -> str:
    """Return a unique id: a repeated name is followed by a number (-2, -3, …).

    Args:
        name: the source's id or the content's hash.
        taken: the highest number in use by name; updated.
    """
    number = taken.get(name, 0) + 1
    while number > 1 and f"{name}-{number}" in taken:
        number += 1
    unique = name if number == 1 else f"{name}-{number}"
    taken[name] = number
    taken.setdefault(unique, 1)
    return unique


def choose_sample(ids: Sequence[str], size: int) -> set[int]:
    """Return the indices of the ids with the smallest hashes. The choice does not depend on the order of the ids."""
    if len(ids) <= size:
        return set(range(len(ids)))
    hashes = [hashlib.blake2b(one.encode(errors="surrogatepass"), digest_size=8).digest() for one in ids]
    return set(heapq.nsmallest(size, range(len(ids)), key=lambda index: (hashes[index], index)))


def hash_to_unit_interval(seed: int, text: str) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{text}".encode()).digest()[:8], "big") / 2**64


def to_json(value: Mapping[str, Any] | Sequence[Any] | None) -> str | None:
    """Return a value as JSON with sorted keys; None for an empty value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if value else None
