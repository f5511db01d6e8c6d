"""What readers give: records, and places where none could be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


class BrokenOffError(Exception):
    """A file of which no more can be had: a compressed one that ends or stops making sense in the middle, one that holds no text at all."""
