"""What readers give: records, and places where none could be read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DEPTH = 200  # how deeply JSON may be nested; Python's own bound hangs on how deep the calls around it are
NAMED = 80  # characters of a name, or of a word in a name's place, from which on only their number is told


@dataclass(frozen=True)
class Record:
    """A readable record: its file's name, the line it begins in (of JSON, Parquet and WARC: its number, from 1), and its fields.

    `form` says what its text was taken out of (html, warc or wet), and is "" where the fields stood in the file as they are.
    """

    file: str
    line: int
    fields: dict[str, Any]
    form: str = ""


@dataclass(frozen=True)
class Unread:
    """What could not be read, as quarantine.jsonl says it."""

    file: str
    line: int
    why: str


def check_depth(text: str, value: Any) -> None:
    """Raise ValueError where the value of this JSON text is nested too deeply for what works on it later."""
    if text.count("[") + text.count("{") <= DEPTH:
        return
    level = [value]
    for _ in range(DEPTH):
        level = [inner for one in level if isinstance(one, dict | list) for inner in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise ValueError("nested too deeply")


def parsed(text: str) -> Any:
    """The value of a JSON text that stands in a field. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(text, value)
    return value


def shown(text: str) -> str:
    """A name out of the data as a reason quotes it: whole, or by its length, since half an address is not known for personal data; and
    with blanks for what cannot be seen, which would hide it as well."""
    if len(text) > NAMED:
        return f"a text of {len(text)} characters"
    return "'" + " ".join("".join(one if one.isprintable() else " " for one in text).split()) + "'"


class BrokenOffError(Exception):
    """A file of which no more can be had: a compressed one that ends or stops making sense in the middle, one that holds no text at all."""
