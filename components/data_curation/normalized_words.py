"""Normalized texts for the comparison of rows."""

from __future__ import annotations

from collections.abc import Sequence

from components.common.row_comparison.prompt_lines import PromptLines
from components.common.row_comparison.words import find_words, split_words
from components.data_curation.rows import Row


def normalize_words(text: str) -> str:
    """Return the lower-case words of a text with single spaces; a text without words keeps its punctuation."""
    return " ".join(find_words(text)) or " ".join(text.split())


def split_row_words(row: Row) -> tuple[list[str], PromptLines]:
    """Return the words of a row's text as `normalize_words` does, and the lines of its prompt among them."""
    return split_words(*row.split_prompt())


def build_exact_key(kind: str, text: str) -> str:
    """Return the key that exact duplicates share: kind and text, ignoring case and white space."""
    return f"{kind}: " + " ".join(text.casefold().split())


def normalize_answer(row: Row, min_words: int, words: Sequence[str], lines: PromptLines) -> str | None:
    """Return the words of the answers, or of a pair's chosen answer; None below `min_words`, and for kind text.

    Args:
        row: the row.
        min_words: the minimum number of words.
        words: the words of the row's text, from `split_row_words`.
        lines: the lines of the prompt among them.
    """
    if row.kind == "text":
        return None
    answers = row.answers()[:1] if row.kind == "preference" else row.answers()
    answer_words = words[lines.answer_start :] if lines.ends and row.split_prompt()[1] == answers else ()
    answer = " ".join(answer_words) or normalize_words("\n".join(answers))
    return answer if answer.count(" ") + 1 >= min_words else None
