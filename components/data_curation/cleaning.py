"""Normal text, and the filters: each drop has a reason (for counting) and a detail (for people)."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from components.data_curation import characters, instructions, language, quality
from components.data_curation.config import DataCurationConfig
from components.data_curation.drops import Drop
from components.data_curation.rows import Row

__all__ = ["Drop", "clean", "drop", "normalise"]

BLANKS = re.compile(r"\n{4,}")


def normalise(text: str) -> str:
    """The text as it was meant: encoding repaired, NFC, line feeds, plain spaces, no invisible characters but where a script needs them.

    No trailing spaces, at most two blank lines in a row, none at either end. Indentation, quotes and everything else stay. A normal text
    stays as it is.
    """
    while (normal := _normalised(text)) != text:  # what is taken away can bring together what is to be repaired or composed
        text = normal
    return text


def _normalised(text: str) -> str:
    if text.isascii():
        return _lines(characters.replaced(text) if characters.UNUSUAL_ASCII.search(text) else text)
    text = characters.repaired(text)
    if characters.UNUSUAL.search(text):
        text = characters.replaced(text)
    return _lines(unicodedata.normalize("NFC", text))


def _lines(text: str) -> str:
    if " \n" in text or "\t\n" in text or text[-1:] in " \t":
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    if "\n\n\n\n" in text:
        text = BLANKS.sub("\n\n\n", text)
    return text.strip("\n")


def clean(row: Row) -> None:
    """Normalise every text of a row in place."""
    row.content = {name: _cleaned(value) if name != "tools" else value for name, value in row.content.items()}


def _cleaned(value: Any) -> Any:
    if isinstance(value, list):
        return [{"role": m["role"], "content": normalise(m["content"])} for m in value]
    return normalise(value) if isinstance(value, str) else value


def drop(row: Row, config: DataCurationConfig, language: tuple[str, float] | None = None) -> Drop | None:
    """Why the filters drop a clean row, or None. `language` is what language.of(row) said, where that is known already.

    In this order, and the first reason counts: nothing said, too short or too long; faults of a conversation; the language; the
    heuristics for web text, which cost most.
    """
    return (
        _prompt_drop(row, config)
        or _answer_drop(row, config)
        or _length_drop(row, config)
        or instructions.drop(row, config.instructions)
        or _text_drop(row, config, language)
    )


def _text_drop(row: Row, config: DataCurationConfig, known: tuple[str, float] | None) -> Drop | None:
    judged = quality.applies(row, config.quality)
    if not judged and not config.language.keep:
        return None
    found = known or language.of(row)
    return language.judge(found, config.language) or (quality.drop(row.text(), config.quality, found[0]) if judged else None)


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
