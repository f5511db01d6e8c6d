"""Scores of a language model that judges texts: the JSON schema of its answer, and its parser."""

from __future__ import annotations

import json
import re
from typing import Any

MIN_SCORE, MAX_SCORE = 1, 10
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {
        "score": {"type": "integer", "enum": list(range(MIN_SCORE, MAX_SCORE + 1))},
        "reason": {"type": "string"},
    },
    "required": ["score", "reason"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "rating", "strict": True, "schema": ANSWER_SCHEMA}}
TRUNCATED_OBJECT = re.compile(r"\s*\{\s*\"score\"\s*:\s*(\d+)\s*,")


class InvalidScoreError(ValueError):
    """The answer is not a score in the requested format."""


def parse_score(answer: str, is_truncated: bool = False) -> int:
    """Return the score in an answer: a JSON object, alone or as the only object with a score in the text.

    Several objects are an error, because one of them may be a quotation from the row. Of a truncated answer, an object
    at its start counts if only the reason is truncated.

    Raises:
        ValueError: the answer has no integer score from 1 to 10.
    """
    objects = _find_score_objects(answer)
    if is_truncated and not objects and (start := TRUNCATED_OBJECT.match(answer)):
        objects = [{"score": int(start[1])}]
    if len(objects) != 1:
        raise InvalidScoreError("the answer is not one JSON object with a score")
    score = objects[0]["score"]
    if isinstance(score, float) and score.is_integer():
        score = int(score)
    if not isinstance(score, int) or isinstance(score, bool) or not MIN_SCORE <= score <= MAX_SCORE:
        raise InvalidScoreError(f"the answer has no integer score from {MIN_SCORE} to {MAX_SCORE}")
    return score


def _find_score_objects(answer: str) -> list[dict[str, Any]]:
    """Return the JSON objects with the key score in a text, without those inside other objects."""
    objects, position, decoder = [], 0, json.JSONDecoder()
    while (position := answer.find("{", position)) >= 0:
        try:
            found, position = decoder.raw_decode(answer, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        if "score" in found:
            objects.append(found)
    return objects
