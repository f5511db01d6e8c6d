"""A row as curation works with it, whatever format it came in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.common import hashing

Kind = Literal["sft", "preference", "unpaired", "text"]
Message = dict[str, str]

# What a row of each kind holds beside id, source and meta: its columns in Parquet, and what makes its identity.
CONTENT: dict[Kind, tuple[str, ...]] = {
    "sft": ("messages", "tools"),
    "preference": ("prompt", "chosen", "rejected", "tools"),
    "unpaired": ("prompt", "completion", "label", "tools"),
    "text": ("text",),
}


@dataclass
class Row:
    """One row: its kind, its content (see CONTENT), where it comes from and what else the source said of it.

    `own_id` is the source's id for it, or "". `id` is that of a published row. `form` is the format it was read as.
    """

    kind: Kind
    content: dict[str, Any]
    own_id: str
    source: str
    meta: dict[str, Any]
    file: str
    line: int
    id: str = ""
    form: str = ""

    def digest(self) -> str:
        """sha256 (hex) of the content: the same wherever it stands."""
        return hashing.digest([self.kind, self.content])

    def prompt(self) -> str:
        """What the user says, turn after turn; "" for text."""
        messages = self.content.get("messages") or self.content.get("prompt") or []
        return _joined(m for m in messages if m["role"] == "user")

    def answers(self) -> list[str]:
        """Every answer in the row; of a preference pair, the chosen one first. For text, the text."""
        if self.kind == "sft":
            return [m["content"] for m in self.content["messages"] if m["role"] == "assistant"]
        if self.kind == "preference":
            return [_joined(self.content["chosen"]), _joined(self.content["rejected"])]
        return [_joined(self.content["completion"]) if self.kind == "unpaired" else self.content["text"]]

    def text(self) -> str:
        """All that is said in the row, for lengths, duplicates and people."""
        if self.kind == "text":
            return str(self.content["text"])
        parts = [self.content[name] for name in ("messages", "prompt", "chosen", "rejected", "completion") if name in self.content]
        return _joined(message for part in parts for message in part)


def _joined(messages: Any) -> str:
    return "\n".join(message["content"] for message in messages)


def numbered(name: str, taken: dict[str, int]) -> str:
    """An id for a row of this name: a name seen before gets a running number (-2, -3, …). `taken` remembers what was given."""
    number = taken.get(name, 0) + 1
    while number > 1 and f"{name}-{number}" in taken:
        number += 1
    made = name if number == 1 else f"{name}-{number}"
    taken[name] = number
    taken.setdefault(made, 1)
    return made


def chance(seed: int, text: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{text}".encode()).digest()[:8], "big") / 2**64


def as_json(value: Mapping[str, Any] | Sequence[Any] | None) -> str | None:
    """A value as a JSON string with sorted keys; None for an empty one."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False) if value else None
