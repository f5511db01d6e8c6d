"""Tool calls in the text of an answer, in the formats of the model families and in the format of dataset rows.

Curation writes calls in this format, and the gateway and the evaluation read answers alike: a measured call is served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from components.common.runtime.json_loading import DECODER

TAG, END_TAG = "<tool_call>", "</tool_call>"
LINE_OPENING = '\n{"name": "'  # of a call after text, as in the rows of a dataset
FENCE, END_FENCE = "```json", "```"
SPECIAL_OPENINGS = ("<|python_tag|>", "[TOOL_CALLS]")  # of Llama 3 and Mistral
# Openings of calls at any place of an answer: Hermes and Qwen, Llama 3, Mistral, code blocks, and dataset rows. None
# contains the first character of another, so the first one in a text stays the first when the text grows.
OPENINGS = (TAG, *SPECIAL_OPENINGS, FENCE, LINE_OPENING)
# Bare JSON, which Llama 3 and Mistral leave when the special tokens before it are not part of the text.
JSON_OPENINGS = ("{", "[")
MAX_PARSED_CHARACTERS = 128 * 1024
SEPARATORS = re.compile(r"[\s;]*")  # Llama 3 writes semicolons
CALL_ATTEMPT = re.compile(
    r'<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|^[ \t\[]*\{[ \t]*"name"[^\n]*"(?:arguments|parameters)"', re.MULTILINE
)
Call = tuple[str, str]  # name, and arguments as the JSON text of an object


def format_call(name: object, arguments: object) -> str:
    """Return a call as it is in the rows of a dataset: one line of JSON, {"name", "arguments"}."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def find_opening(text: str, *, is_start: bool) -> int | None:
    """Return the position of the first possible call, or None. Bare JSON is one only at the start of an answer."""
    if is_start and text.lstrip().startswith(JSON_OPENINGS):
        return 0
    return min((text.index(opening) for opening in OPENINGS if opening in text), default=None)


def split_calls(text: str, allows: Callable[[str], bool], sent_characters: int = 0) -> tuple[str, list[Call]]:
    """Split an answer into its text and its calls.

    An answer without a complete call of an allowed function is returned unchanged.

    Args:
        text: The answer, or the rest of a streamed one.
        allows: Whether the answer may call the function with this name.
        sent_characters: Length of the text before the rest, which contains no opening of a call.
    """
    start = find_opening(text, is_start=not sent_characters)
    if start is None or sent_characters + len(text) > MAX_PARSED_CHARACTERS:
        return text, []
    content, calls = _split_at_opening(text[start:], allows)
    if not calls:
        return text, []
    content = (text[:start] + content).rstrip()
    return content if sent_characters else content.lstrip(), calls


def _split_at_opening(text: str, allows: Callable[[str], bool]) -> tuple[str, list[Call]]:
    """Split a text that begins with an opening. A tag or special token in it takes precedence over JSON."""
    if TAG in text:
        content, *parts = text.split(TAG)
        calls: list[Call] = []
        for part in parts:
            body, _, after = part.partition(END_TAG)
            parsed = _read_calls(body, allows)
            calls += parsed
            content += after if parsed else TAG + part
        return content, calls
    if opening := next((each for each in SPECIAL_OPENINGS if each in text), ""):
        before, _, body = text.partition(opening)
        return before, _read_calls(body, allows)
    if not text.startswith(FENCE):
        return "", _read_calls(text, allows)
    if calls := _read_calls(text.strip().removeprefix(FENCE).removesuffix(END_FENCE), allows):
        return "", calls
    before, opening, body = text.partition(LINE_OPENING)  # after a code block without a call
    return before, _read_calls(opening + body, allows)


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
            arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            arguments = DECODER.decode(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(name, str) or not allows(name) or not isinstance(arguments, dict):
                return []
            written = json.dumps(arguments, ensure_ascii=False)
            written.encode()  # a UnicodeEncodeError, which is a ValueError, for half of a surrogate pair
            calls.append((name, written))
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
