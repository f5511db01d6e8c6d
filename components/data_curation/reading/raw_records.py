"""Data classes shared by listing, reading and parsing: source files, raw records and unreadable records."""

from __future__ import annotations

import json
import operator
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field

from components.data_curation.reading.source_settings import SourceSettings

MAX_JSON_DEPTH = 200  # nesting levels; Python's own limit depends on the depth of the calling code
TOO_DEEP_MESSAGE = f"nested deeper than {MAX_JSON_DEPTH} levels"
MAX_QUOTED_CHARACTERS = 80  # a longer name is described by its length
COMPRESSION_SUFFIXES = (".gz", ".zst")
FILE_SCHEME = "file://"
NO_TEXT_REASON = "an image without text; it requires OCR"  # end of the reason for a scanned page
JsonObject = dict[str, Any]


def to_source_uri(path: Path) -> str:
    """Return an absolute path as text, or as a file:// URI if it is not UTF-8: artifacts and plans are UTF-8."""
    return str(path) if is_utf8(str(path)) else path.as_uri()


def to_source_path(uri: str) -> Path:
    """Return the path of a URI that `to_source_uri` returned."""
    return Path(os.fsdecode(unquote_to_bytes(uri.removeprefix(FILE_SCHEME))) if uri.startswith(FILE_SCHEME) else uri)


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode the text. Python marks bytes of file names that are not UTF-8 by surrogates."""
    return text.encode(errors="ignore").decode() == text


@dataclass(frozen=True)
class FileLocation:
    """A listed file without its digest. The fields are those of `Source`."""

    uri: str
    bytes: int
    called: str = ""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.called or Path(self.uri).name


class Source(BaseModel):
    """A source file with its digest and size at the time of listing.

    Attributes:
        uri: an absolute path, of a path that is not UTF-8 the file:// URI, or an s3:// or hf:// address.
        sha256: the digest of the file's bytes (hex).
        bytes: the size of the file in bytes.
        called: the file's name if `uri` does not contain it, as for a cached file; otherwise "".
        settings: how the file is read.
        extract: the digest of the artifact with the file if the rows were read from a database; otherwise "".
    """

    model_config = ConfigDict(frozen=True)

    uri: str
    sha256: str
    bytes: int
    called: str = ""
    settings: SourceSettings = Field(default_factory=SourceSettings, exclude_if=SourceSettings().__eq__)
    extract: str = Field("", exclude_if=operator.not_)

    @property
    def path(self) -> Path:
        """The path of a local file."""
        return to_source_path(self.uri)

    @property
    def name(self) -> str:
        """The file's name, the only part of its location that artifacts record."""
        return self.called or Path(self.uri).name


@dataclass(frozen=True)
class Record:
    """A readable record of a file.

    Attributes:
        file: the file's name.
        line: the line of the record from 1; in JSON arrays, Parquet files, web archives and documents, the record's number.
        fields: the record's keys and values.
        extracted_from: html, warc, wet, or the suffix of a document (pdf, md) if the text was extracted; otherwise "".
        format: the record format of its source; "" for the configured format.
        unmapped: columns without a role in its source's settings.
        excluded_by: the condition that does not select the record; otherwise "".
        tokens: the length of a document's chunk in tokens; otherwise 0.
        pages: in the first record of a document, the number of its pages or slides that were read; otherwise 0.
    """

    file: str
    line: int
    fields: JsonObject
    extracted_from: str = ""
    format: str = ""
    unmapped: JsonObject = field(default_factory=dict)
    excluded_by: str = ""
    tokens: int = 0
    pages: int = 0


@dataclass(frozen=True)
class UnreadableRecord:
    """A record or a part of a file that cannot be read, with the reason. quarantine.jsonl lists it."""

    file: str
    line: int
    reason: str


class TruncatedFileError(Exception):
    """The rest of a file cannot be read: its compressed data is truncated or damaged, or the file is not text."""


def file_suffix(path: Path) -> str:
    """Return the suffix in lower case, ignoring a compression suffix: .jsonl for rows.jsonl and rows.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def too_long_message(limit: int) -> str:
    """Return the quarantine reason for a line, a record or a page that exceeds max_line_bytes."""
    return f"longer than the {limit:,} bytes of data_curation.max_line_bytes"


def count_characters(value: object) -> int:
    """Return the number of characters in all texts of a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(count_characters, inner))


def check_depth(text: str, value: object) -> None:
    """Raise ValueError if the parsed `value` of the JSON `text` is nested deeper than MAX_JSON_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        containers = (item for item in level if isinstance(item, dict | list))
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    if level:
        raise ValueError(TOO_DEEP_MESSAGE)


def parse_json(text: str) -> Any:
    """Parse the JSON text of a field.

    Raises:
        ValueError: the text is invalid JSON, or nested deeper than MAX_JSON_DEPTH.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP_MESSAGE) from None
    check_depth(text, value)
    return value


def quote_name(text: str) -> str:
    """Quote a name from the data for an error message.

    A long name is described by its length, because redaction does not recognize a truncated address. Invisible
    characters are replaced by spaces for the same reason.
    """
    if len(text) > MAX_QUOTED_CHARACTERS:
        return f"[{len(text):,} characters]"
    return "'" + " ".join("".join(character if character.isprintable() else " " for character in text).split()) + "'"
