"""Texts of evaluation items: separates the question of a record from its passage, options and answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from components.data_curation.normalized_words import normalize_words
from components.data_curation.reading.raw_records import JsonObject
from components.data_curation.text_normalization import normalize_text

# Names of the field with the question, in order of preference, as in the published sets: ARC has `stem`, OpenBookQA
# `question_stem`, PIQA `goal`, MT-bench `turns`, MBPP `text`, COPA `premise` (its `question` is the word cause or effect).
QUESTION_FIELDS = (
    *("question", "question_stem", "stem", "query", "problem", "goal", "prompt", "instruction", "turns", "input"),
    *("premise", "sentence", "ctx", "context", "context_options", "text"),
)
QUESTION_LABELS = frozenset({"question", "q", "problem"})
OTHER_LABELS = (
    *("passage", "context", "article", "paragraph", "document", "background", "story", "premise", "hypothesis"),
    *("choices", "options", "answer choices", "answer options", "answer", "a", "explanation", "rationale", "solution"),
)
# A label at the start of a line (Question:), or the marker of an option: A. or (1) at the start of a line, (A) anywhere.
SEPARATOR = re.compile(
    rf"^[ \t#*]*({'|'.join((*QUESTION_LABELS, *OTHER_LABELS))})(?:[ \t]*\d+)?[ \t*]*[:：]"
    r"|^[ \t]*(?:[A-J1-9][.):]|\([A-J1-9]\))[ \t]|(?<=[ \t])\([A-J1-9]\)[ \t]",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class ItemTexts:
    """The normalized texts of an item: its question, and the other texts without repetition."""

    question: str
    others: list[str]


def split_item(record: JsonObject) -> ItemTexts | None:
    """Return the texts of an item without labels and option markers, or None if the record contains no text.

    The question is in the first of `QUESTION_FIELDS`, or else in the first text of the record; texts of one word, such
    as an id, are skipped if there is a longer one. If parts of that text are labelled, the question is the last part
    labelled as a question, or else the first part.
    """
    fields = [
        (name, parts) for name, text in _iterate_texts("", record) if (parts := _split_parts(normalize_text(text)))
    ]
    if not fields:
        return None
    question = _select_question(_select_question_field(fields))
    others = dict.fromkeys(text for _, parts in fields for _, text in parts if text != question)
    return ItemTexts(question, list(others))


def _iterate_texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value with the lower-case name of its innermost field."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iterate_texts(key.lower(), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_texts(name, inner)


def _split_parts(text: str) -> list[tuple[str, str]]:
    """Return the normalized parts of a text with their lower-case labels ("" if a part has none)."""
    pieces = SEPARATOR.split(text)
    labels = ["", *(label.lower() if label else "" for label in pieces[1::2])]
    parts = zip(labels, map(normalize_words, pieces[::2]), strict=True)
    return [(label, words) for label, words in parts if words]


def _select_question_field(fields: list[tuple[str, list[tuple[str, str]]]]) -> list[tuple[str, str]]:
    """Return the parts of the text with the question."""
    named = [parts for wanted in QUESTION_FIELDS for name, parts in fields if name == wanted]
    candidates = named or [parts for _, parts in fields]
    return next((parts for parts in candidates if " " in _select_question(parts)), candidates[0])


def _select_question(parts: list[tuple[str, str]]) -> str:
    labelled = [text for label, text in parts if label in QUESTION_LABELS]
    return labelled[-1] if labelled else parts[0][1]
