"""Texts of evaluation items: separates the question of a record from its passage, options and answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from components.common.row_comparison.words import WORD_PATTERN
from components.data_curation.normalized_words import normalize_words
from components.data_curation.reading.raw_records import JsonObject
from components.data_curation.reading.record_formats import ROLES, SYSTEM_KEYS
from components.data_curation.text_normalization import normalize_text

# Names of the field with the question, in order of preference, as in the published sets: ARC has `stem`, OpenBookQA
# `question_stem`, PIQA `goal`, MT-bench `turns`, MBPP `text`, COPA `premise` (its `question` is the word cause or effect).
QUESTION_FIELDS = (
    *("question", "question_stem", "stem", "query", "problem", "goal", "prompt", "instruction", "turns", "input"),
    *("premise", "sentence", "ctx", "context", "context_options", "text"),
)
TURN_SUFFIX = " turn"  # the name of a turn's text is its role with this suffix
USER_TURN = f"user{TURN_SUFFIX}"
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
# The end of a line with the options A. and B., or 1. and 2.; a single marker may be an initial or end a sentence.
INLINE_OPTIONS = re.compile(r"(?<!\S)(?:A([.):])[ \t].*?[ \t]B\1|1([.):])[ \t].*?[ \t]2\2)[ \t].*", re.IGNORECASE)
INLINE_MARKER = re.compile(r"(?<!\S)(?=[A-J1-9][.):][ \t])", re.IGNORECASE)


@dataclass(frozen=True)
class ItemTexts:
    """The normalized texts of an item: its question, and the other texts without repetition."""

    question: str
    others: list[str]


@dataclass(frozen=True)
class _Field:
    """A text of a record: its lower-case name, and its normalized parts with their labels ("" if a part has none)."""

    name: str
    text: str
    parts: list[tuple[str, str]]


def split_item(record: JsonObject, ngram: int) -> ItemTexts | None:
    """Return the texts of an item without labels and option markers, or None if the record contains no text.

    The question is in the last user turn, or in the first of `QUESTION_FIELDS`, or else in the first text of the
    record; texts of one word, such as an id, are skipped if there is a longer one. If parts of that text are labelled,
    the question is the last part labelled as a question, or else the first part. An instruction is part of the question
    of its input. System prompts are not texts of an item.

    Args:
        record: the record.
        ngram: the length of n-grams in words.
    """
    fields = [_Field(name, text, parts) for name, text in _iterate_texts("", record) if (parts := _split_parts(text))]
    if not fields:
        return None
    field = _select_question_field(fields)
    question = _select_question(field.parts)
    if field.name == "instruction" and (given := next((one for one in fields if one.name == "input"), None)):
        question = _join_input(field, given, ngram)
        fields.remove(field)
    others = dict.fromkeys(text for one in fields for _, text in one.parts if text != question)
    return ItemTexts(question, list(others))


def _iterate_texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value, except system prompts, with the lower-case name of its innermost field.

    The name of a turn's text is its role with `TURN_SUFFIX`.
    """
    if isinstance(value, str):
        yield name, normalize_text(value)
    elif isinstance(value, Mapping):
        role = _get_role(value)
        for key, inner in value.items() if role != "system" else ():
            lower = key.lower()
            if role and lower in ("content", "value"):
                yield from _iterate_texts(role + TURN_SUFFIX, inner)
            elif lower == "text" and name.endswith(TURN_SUFFIX):  # a part of a turn
                yield from _iterate_texts(name, inner)
            elif lower not in (("role", "from") if role else SYSTEM_KEYS):
                yield from _iterate_texts(lower, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_texts(name, inner)


def _get_role(value: Mapping[str, object]) -> str:
    """Return the role of a turn; "" if the value is not a turn."""
    fields = {key.lower(): inner for key, inner in value.items()}
    is_turn = "content" in fields or "value" in fields
    return ROLES.get(str(fields.get("role", fields.get("from"))).lower(), "") if is_turn else ""


def _join_input(instruction: _Field, given: _Field, ngram: int) -> str:
    """Return the question of an instruction with an input, as rows contain both.

    Many rows share an instruction. Therefore the instruction is cut from the left, so that every n-gram contains the
    whole input, or is within the input.
    """
    question = _select_question(given.parts)
    if normalize_words(given.text).startswith(question):
        words = WORD_PATTERN.findall(f"{instruction.text}\n{question}".lower())
        return " ".join(words[-max(ngram, len(WORD_PATTERN.findall(question))) :])
    is_labelled = any(label in QUESTION_LABELS for label, _ in given.parts)
    return question if is_labelled else _select_question(instruction.parts)  # the input is a passage or options


def _split_parts(text: str) -> list[tuple[str, str]]:
    """Return the normalized parts of a text with their lower-case labels ("" if a part has none)."""
    text = INLINE_OPTIONS.sub(lambda options: INLINE_MARKER.sub("\n", options[0]), text)
    pieces = SEPARATOR.split(text)
    labels = ["", *(label.lower() if label else "" for label in pieces[1::2])]
    parts = zip(labels, map(normalize_words, pieces[::2]), strict=True)
    return [(label, words) for label, words in parts if words]


def _select_question_field(fields: list[_Field]) -> _Field:
    """Return the text with the question."""
    turns = [one for one in reversed(fields) if one.name == USER_TURN]
    candidates = [*turns, *(one for wanted in QUESTION_FIELDS for one in fields if one.name == wanted)] or fields
    return next((one for one in candidates if " " in _select_question(one.parts)), candidates[0])


def _select_question(parts: list[tuple[str, str]]) -> str:
    labelled = [text for label, text in parts if label in QUESTION_LABELS]
    return labelled[-1] if labelled else parts[0][1]
