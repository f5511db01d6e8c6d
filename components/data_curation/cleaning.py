"""Normal text, and the filters: each drop has a reason (for counting) and a detail (for people)."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from components.data_curation.config import DataCurationConfig
from components.data_curation.rows import Row

# Control characters other than tab and line feed, and the byte-order mark: never meant, and some tokenizers stumble over them.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]")
TRAILING = re.compile(r"[^\S\n]+$", re.MULTILINE)
BLANKS = re.compile(r"\n{4,}")


@dataclass(frozen=True)
class Drop:
    """Why a row is not kept."""

    reason: str
    detail: str


def normalise(text: str) -> str:
    """NFC; line feeds only; no trailing spaces, no control characters, at most two blank lines in a row. Indentation stays."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = TRAILING.sub("", CONTROL.sub("", text))
    return BLANKS.sub("\n\n\n", text).strip("\n")


def clean(row: Row) -> None:
    """Normalise every text of a row in place."""
    row.content = {name: _cleaned(value) if name != "tools" else value for name, value in row.content.items()}


def _cleaned(value: Any) -> Any:
    if isinstance(value, list):
        return [{"role": m["role"], "content": normalise(m["content"])} for m in value]
    return normalise(value) if isinstance(value, str) else value


def drop(row: Row, config: DataCurationConfig) -> Drop | None:
    """Why the filters drop a clean row, or None."""
    return _prompt_drop(row, config) or _answer_drop(row, config) or _length_drop(row, config)


def _prompt_drop(row: Row, config: DataCurationConfig) -> Drop | None:
    if row.kind == "text":
        return None
    length = len(row.prompt().strip())
    if length == 0:
        return Drop("empty_prompt", "the user says nothing")
    if length < config.min_prompt_characters:
        return Drop("short_prompt", f"{length} characters, {config.min_prompt_characters} wanted")
    return None


def _answer_drop(row: Row, config: DataCurationConfig) -> Drop | None:
    answers = [answer.strip() for answer in row.answers()]
    what = "the text" if row.kind == "text" else "an answer"
    if not answers or not all(answers):
        return Drop("empty_text" if row.kind == "text" else "empty_answer", f"{what} is empty" if answers else "nobody answers")
    shortest = min(map(len, answers))
    if shortest < config.min_answer_characters:
        return Drop("short_text" if row.kind == "text" else "short_answer", f"{shortest} characters, {config.min_answer_characters} wanted")
    if row.kind == "preference" and row.content["chosen"] == row.content["rejected"]:
        return Drop("no_preference", "the chosen answer equals the rejected one")
    return None


def _length_drop(row: Row, config: DataCurationConfig) -> Drop | None:
    length = len(row.text())
    if length > config.max_row_characters:
        return Drop("long_row", f"{length:,} characters, at most {config.max_row_characters:,}")
    return None
