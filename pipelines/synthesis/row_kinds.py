"""Registry of the kinds of synthetic rows: the JSON schema of the teacher's answer, its parser, and the row's content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

RowContentKind = Literal["sft", "preference"]
MIN_TURNS, MAX_TURNS = 2, 4
MAX_JSON_CHARACTERS = 50_000  # bounds the time to parse an answer
TEXT_SCHEMA = {"type": "string"}
CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # except tab, line feed and carriage return


class InvalidAnswerError(ValueError):
    """The answer of the teacher does not have the requested structure; the message is the problem."""


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the quotation from the passage that proves the answer."""

    question: str
    answer: str
    evidence: str


@dataclass(frozen=True)
class Candidate:
    """A row that the checks have not accepted yet.

    Attributes:
        turns: the questions with their answers.
        rejected: the worse answer to the last question; "" for conversations.
    """

    turns: tuple[Turn, ...]
    rejected: str = ""

    def build_content(self) -> dict[str, Any]:
        """Return the content of the row as curation reads it."""
        messages = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in (("user", turn.question), ("assistant", turn.answer))
        ]
        if not self.rejected:
            return {"messages": messages}
        worse = {"role": "assistant", "content": self.rejected}
        return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [worse]}


@dataclass(frozen=True)
class RowKind:
    """A kind of synthetic rows.

    Attributes:
        content: the kind of the rows in a dataset.
        schema: JSON schema of the teacher's answer.
        parse: returns the candidate of an answer with the schema's structure. Raises InvalidAnswerError.
    """

    content: RowContentKind
    schema: Mapping[str, Any]
    parse: Callable[[Mapping[str, Any]], Candidate]


def parse_answer(kind: RowKind, text: str) -> Candidate:
    """Return the candidate in an answer: one JSON object, alone or in a code block.

    Raises:
        InvalidAnswerError: the answer has another structure.
    """
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```"):
        stripped = stripped.removesuffix("```").partition("\n")[2]
    if len(stripped) > MAX_JSON_CHARACTERS:
        raise InvalidAnswerError(f"the answer is longer than {MAX_JSON_CHARACTERS:,} characters")
    try:
        value = json.loads(stripped)
        stripped.encode()
    except (ValueError, RecursionError):
        raise InvalidAnswerError("the answer is not one JSON object") from None
    if not isinstance(value, dict):
        raise InvalidAnswerError("the answer is not one JSON object")
    return kind.parse(value)


def _read_texts(value: object, names: tuple[str, ...]) -> list[str]:
    """Return the texts of an object with exactly these keys."""
    if not isinstance(value, dict) or set(value) != set(names):
        raise InvalidAnswerError(f"expected an object with the keys {', '.join(names)}")
    texts = []
    for name in names:
        text = value[name]
        if not isinstance(text, str) or not text.strip():
            raise InvalidAnswerError(f"{name} is empty or not a string")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidAnswerError(f"{name} contains a lone surrogate") from None
        if CONTROL_CHARACTER.search(text):
            raise InvalidAnswerError(f"{name} contains a control character")
        texts.append(text.strip())
    return texts


TURN_KEYS = ("question", "answer", "evidence")
PREFERENCE_KEYS = ("question", "chosen", "rejected", "evidence")


def _parse_qa(value: Mapping[str, Any]) -> Candidate:
    return Candidate((Turn(*_read_texts(value, TURN_KEYS)),))


def _parse_multi_turn(value: Mapping[str, Any]) -> Candidate:
    turns = value.get("turns")
    if set(value) != {"turns"} or not isinstance(turns, list) or not MIN_TURNS <= len(turns) <= MAX_TURNS:
        raise InvalidAnswerError(f"expected an object with turns, a list of {MIN_TURNS} to {MAX_TURNS} objects")
    return Candidate(tuple(Turn(*_read_texts(turn, TURN_KEYS)) for turn in turns))


def _parse_preference(value: Mapping[str, Any]) -> Candidate:
    question, chosen, rejected, evidence = _read_texts(value, PREFERENCE_KEYS)
    return Candidate((Turn(question, chosen, evidence),), rejected)


def _build_schema(names: tuple[str, ...]) -> dict[str, Any]:
    properties = dict.fromkeys(names, TEXT_SCHEMA)
    return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}


TURNS_SCHEMA = {
    "type": "object",
    "properties": {
        "turns": {
            "type": "array",
            "items": _build_schema(TURN_KEYS),
            "minItems": MIN_TURNS,
            "maxItems": MAX_TURNS,
        }
    },
    "required": ["turns"],
    "additionalProperties": False,
}
KINDS: dict[str, RowKind] = {
    "qa": RowKind("sft", _build_schema(TURN_KEYS), _parse_qa),
    "multi-turn": RowKind("sft", TURNS_SCHEMA, _parse_multi_turn),
    "preference": RowKind("preference", _build_schema(PREFERENCE_KEYS), _parse_preference),
}
