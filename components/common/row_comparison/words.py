"""The words of a row's text, in which rows are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from components.common.row_comparison.prompt_lines import PromptLines

# A word is a run of letters, digits and underscores; in scripts without spaces (Han, kana, Hangul), one character.
WORD_PATTERN = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]|[^\W぀-ヿ㐀-䶿一-鿿가-힯]+")
# For bytes.translate: of ASCII, the characters of words remain, and the others become spaces.
WORD_CHARACTERS = bytes(byte if chr(byte).isalnum() or chr(byte) == "_" else ord(" ") for byte in range(0x80)).ljust(
    256
)
MESSAGE_COLUMNS = ("messages", "prompt", "chosen", "rejected", "completion")


def list_texts(content: Mapping[str, Any]) -> list[str]:
    """Return the texts of all turns in a row's content; of kind text, the text."""
    if "text" in content:
        return [str(content["text"])]
    return [message["content"] for name in MESSAGE_COLUMNS for message in content.get(name) or ()]


def split_prompt(content: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the texts of the messages up to the last user turn, which is the last of them, and of those after it.

    Without a user turn, and for kind text, the first list is empty.
    """
    messages = content.get("messages") or content.get("prompt") or []
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    texts = list_texts(content)
    end = users[-1] + 1 if users else 0
    return texts[:end], texts[end:]


def find_words(text: str) -> list[str]:
    """Return the lower-case words of a text."""
    if text.isascii():  # twice as fast
        return text.lower().encode().translate(WORD_CHARACTERS).decode().split()
    return WORD_PATTERN.findall(text.lower())


def split_words(prompt: Sequence[str], answer: Sequence[str]) -> tuple[list[str], PromptLines]:
    """Return the lower-case words, and the lines of the prompt among them.

    A text without words keeps its punctuation.
    """
    words, ends, turn_start = list[str](), list[int](), 0
    for message in prompt:
        turn_start = len(words)
        for line in message.split("\n"):
            if found := find_words(line):
                words += found
                ends.append(len(words))
    words += find_words("\n".join(answer))
    return words or "\n".join([*prompt, *answer]).split(), PromptLines(ends, turn_start)
