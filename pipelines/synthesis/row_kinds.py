"""Registry of the kinds of synthetic rows: what they are written from, the teacher's answer, its parser, and the row's content."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

RowContentKind = Literal["sft", "preference"]
Reads = Literal["passage", "prompt"]
Message = Mapping[str, str]
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
        earlier: the messages before the turns, if the row continues a conversation.
    """

    turns: tuple[Turn, ...]
    rejected: str = ""
    earlier: tuple[Message, ...] = ()

    def build_content(self) -> dict[str, Any]:
        """Return the content of the row as curation reads it."""
        messages = [dict(message) for message in self.earlier]
        messages += [
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
        parse: returns the candidate of an answer and of the conversation that it continues, which is empty for a passage.
            Raises InvalidAnswerError if the answer has another structure.
        judge_criteria: what the judge rates.
        schema: JSON schema of the teacher's answer; None if the answer is plain text, which is not repaired.
        reads: what a row is written from: a passage, which must support the answer, or the prompt of a row.
        rows_per_source: the default maximum number of rows per passage or prompt.
        max_document_share: the default maximum share of rows from one document.
        assumed_yield: accepted rows per request, for estimates without a probe.
        assumed_answer_tokens: length of an answer, for estimates without a probe.
    """

    content: RowContentKind
    parse: Callable[[str, Sequence[Message]], Candidate]
    judge_criteria: str
    schema: Mapping[str, Any] | None
    reads: Reads = "passage"
    rows_per_source: int = 3
    max_document_share: float = 0.25
    assumed_yield: float = 0.6  # small models reach 0.1, large ones 0.9
    assumed_answer_tokens: int = 120


def _read_object(text: str) -> dict[str, Any]:
    """Return the one JSON object of an answer, alone or in a code block."""
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
    return value


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


def _parse_qa(text: str, prompt: Sequence[Message]) -> Candidate:
    return Candidate((Turn(*_read_texts(_read_object(text), TURN_KEYS)),))


def _parse_multi_turn(text: str, prompt: Sequence[Message]) -> Candidate:
    value = _read_object(text)
    turns = value.get("turns")
    if set(value) != {"turns"} or not isinstance(turns, list) or not MIN_TURNS <= len(turns) <= MAX_TURNS:
        raise InvalidAnswerError(f"expected an object with turns, a list of {MIN_TURNS} to {MAX_TURNS} objects")
    return Candidate(tuple(Turn(*_read_texts(turn, TURN_KEYS)) for turn in turns))


def _parse_preference(text: str, prompt: Sequence[Message]) -> Candidate:
    question, chosen, rejected, evidence = _read_texts(_read_object(text), PREFERENCE_KEYS)
    return Candidate((Turn(question, chosen, evidence),), rejected)


def _parse_text(text: str, prompt: Sequence[Message]) -> Candidate:
    (answer,) = _read_texts({"answer": text}, ("answer",))
    return Candidate((Turn(prompt[-1]["content"], answer, ""),), earlier=tuple(prompt[:-1]))


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
GROUNDED_CRITERIA = (
    "The row was written from the passage. Grounding: every statement of the answer is in the passage, or of a pair, of "
    "the chosen answer. Completeness: the answer answers the question. Usefulness: a reader of the documents could ask "
    "the question, and understands it without the passage. Of a pair, the chosen answer is clearly better."
)
ANSWER_CRITERIA = (
    "The last answer of the row. Correctness: every statement is true, and no instruction of the prompt is ignored. "
    "Completeness: it answers the whole prompt. Usefulness: it is clear, and as long as the prompt needs."
)
KINDS: dict[str, RowKind] = {
    "qa": RowKind("sft", _parse_qa, GROUNDED_CRITERIA, _build_schema(TURN_KEYS)),
    "multi-turn": RowKind("sft", _parse_multi_turn, GROUNDED_CRITERIA, TURNS_SCHEMA),
    "preference": RowKind("preference", _parse_preference, GROUNDED_CRITERIA, _build_schema(PREFERENCE_KEYS)),
    # A prompt is answered once, and without checks only empty and long answers are rejected.
    "answer": RowKind("sft", _parse_text, ANSWER_CRITERIA, None, "prompt", 1, 1.0, 0.95, 250),
}
