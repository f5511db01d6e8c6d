"""Tool calls in the text of an answer, in the formats of the model families and in the format of dataset rows.

Curation writes calls in this format, and the gateway and the evaluation read answers alike: a measured call is served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

TAG, END_TAG = "<tool_call>", "</tool_call>"
LINE_OPENING = '\n{"name": "'  # of a call after text, as in the rows of a dataset
SPECIAL_OPENINGS = ("<|python_tag|>", "[TOOL_CALLS]")  # of Llama 3 and Mistral
# Openings of calls at any place of an answer: Hermes and Qwen, Llama 3, Mistral, and dataset rows.
OPENINGS = (TAG, *SPECIAL_OPENINGS, LINE_OPENING)
# Bare JSON, which Llama 3 and Mistral leave when the special tokens before it are not part of the text.
JSON_OPENINGS = ("{", "[", "```json")
MAX_PARSED_CHARACTERS = 128 * 1024
SEPARATORS = re.compile(r"[\s;]*")  # Llama 3 writes semicolons
CALL_ATTEMPT = re.compile(
    r'<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|^[ \t\[]*\{[ \t]*"name"[^\n]*"(?:arguments|parameters)"', re.MULTILINE
)
Call = tuple[str, str]  # name, and arguments as the JSON text of an object


def format_call(name: object, arguments: object) -> str:
    """Return a call as it is in the rows of a dataset: one line of JSON, {"name", "arguments"}."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def split_calls(text: str, allows: Callable[[str], bool]) -> tuple[str, list[Call]]:
    """Split an answer into its text and its calls.

    An answer without a complete call of an allowed function is returned unchanged.

    Args:
        text: The answer.
        allows: Whether the answer may call the function with this name.
    """
    if len(text) > MAX_PARSED_CHARACTERS:
        return text, []
    calls: list[Call] = []
    if TAG in text:
        rest = text.split(TAG)
        content = rest[0]
        for part in rest[1:]:
            body, _, after = part.partition(END_TAG)
            parsed = _read_calls(body, allows)
            calls.extend(parsed)
            content += after if parsed else TAG + part
        return (content.strip(), calls) if calls else (text, [])
    body, before = text.strip(), ""
    if opening := next((each for each in SPECIAL_OPENINGS if each in body), ""):
        before, _, body = body.partition(opening)
    elif body.startswith(JSON_OPENINGS):
        body = body.removeprefix("```json").removesuffix("```")
    else:
        before, opening, body = body.partition(LINE_OPENING)
        body = opening + body
    calls = _read_calls(body, allows)
    return (before.strip(), calls) if calls else (text, [])


def has_call_attempt(text: str) -> bool:
    """Return whether the text that `split_calls` returned contains the opening of a call that it could not read."""
    return bool(CALL_ATTEMPT.search(text))


def _read_calls(body: str, allows: Callable[[str], bool]) -> list[Call]:
    """Read calls or lists of calls; return no calls if one is invalid or not allowed."""
    calls: list[Call] = []
    try:
        for each in _decode_all(body):
            inner = each.get("function") if isinstance(each, dict) else None
            call = inner if isinstance(inner, dict) else each
            name = call.get("name") if isinstance(call, dict) else None
            arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
            arguments = DECODER.decode(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(name, str) or not allows(name) or not isinstance(arguments, dict):
                return []
            calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return []
    return calls


def _decode_all(body: str) -> list[Any]:
    """Return the JSON values of a text, with lists replaced by their elements."""
    values, position = list[Any](), SEPARATORS.match(body).end()  # type: ignore[union-attr]  # it matches an empty text
    while position < len(body):
        value, position = DECODER.raw_decode(body, position)
        values += value if isinstance(value, list) else [value]
        position = SEPARATORS.match(body, position).end()  # type: ignore[union-attr]
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
