"""The words or sentences of the user's turns, and conversations without some of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

UnitName = Literal["word", "sentence"]
Message = dict[str, Any]

# In scripts without spaces (Han, kana, Hangul), a word is one character. Punctuation belongs to the word before it.
UNSPACED = r"぀-ヿ㐀-䶿一-鿿가-힯"
PATTERNS: dict[UnitName, re.Pattern[str]] = {
    "word": re.compile(rf"[{UNSPACED}][^\s\w{UNSPACED}]*\s*|[^\s{UNSPACED}]+\s*"),
    "sentence": re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|[。！？]+|\n+|$)\s*", re.DOTALL),
}


@dataclass(frozen=True)
class Unit:
    """A word or sentence with the white space after it.

    Attributes:
        message: Index of the message.
        start: First character in the message's content.
        end: Character after the last one.
        text: The text without the white space around it.
    """

    message: int
    start: int
    end: int
    text: str


def split_units(messages: Sequence[Mapping[str, Any]], unit: UnitName) -> list[Unit]:
    """Return the words or sentences of all user turns, in order."""
    return [
        Unit(number, match.start(), match.end(), match[0].strip())
        for number, message in enumerate(messages)
        if message["role"] == "user"
        for match in PATTERNS[unit].finditer(str(message.get("content") or ""))
    ]


def remove_units(messages: Sequence[Mapping[str, Any]], removed: Collection[Unit]) -> list[Message]:
    """Return the conversation without these units. White space that ends a shortened turn is removed, too."""
    shortened = [dict(message) for message in messages]
    for unit in sorted(removed, key=lambda one: (one.message, -one.start)):
        content = str(shortened[unit.message]["content"])
        shortened[unit.message]["content"] = content[: unit.start] + content[unit.end :]
    for number in {unit.message for unit in removed}:
        shortened[number]["content"] = shortened[number]["content"].rstrip()
    return shortened
