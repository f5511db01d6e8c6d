"""Normalized texts for the comparison of rows."""

from __future__ import annotations

import re

from components.data_curation.prompt_lines import PromptLines
from components.data_curation.rows import Row

# A word is a run of letters, digits and underscores; in scripts without spaces (Han, kana, Hangul), one character.
WORD_PATTERN = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]|[^\W぀-ヿ㐀-䶿一-鿿가-힯]+")


def normalize_words(text: str) -> str:
    """Return the lower-case words of a text with single spaces; a text without words keeps its punctuation."""
    return " ".join(WORD_PATTERN.findall(text.lower())) or " ".join(text.split())


def split_row_words(row: Row) -> tuple[str, PromptLines]:
    """Return the words of a row's text as `normalize_words` does, and the lines of its prompt among them."""
    prompt, answer = row.split_prompt()
    words, ends, turn_start = list[str](), list[int](), 0
    for message in prompt:
        turn_start = len(words)
        for line in message.split("\n"):
            if found := WORD_PATTERN.findall(line.lower()):
                words += found
                ends.append(len(words))
    words += WORD_PATTERN.findall("\n".join(answer).lower())
    return " ".join(words) or " ".join(row.text().split()), PromptLines(ends, turn_start)


def build_exact_key(kind: str, text: str) -> str:
    """Return the key that exact duplicates share: kind and text, ignoring case and white space."""
    return f"{kind}: " + " ".join(text.casefold().split())


def normalize_answer(row: Row, min_words: int) -> str | None:
    """Return the words of the answers, or of a pair's chosen answer; None below `min_words`, and for kind text."""
    if row.kind == "text":
        return None
    answers = row.answers()
    words = normalize_words("\n".join(answers[:1] if row.kind == "preference" else answers))
    return words if words.count(" ") + 1 >= min_words else None
