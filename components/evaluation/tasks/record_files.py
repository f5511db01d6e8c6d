"""Reading of the files from which tasks build their items. Errors contain the file and the line."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import regression_suite
from components.common.artifacts import hashing
from components.common.runtime.counts import format_count
from components.common.runtime.errors import ConfigurationError, InputError
from components.evaluation.tasks.config import SUITE_SCHEME

Row = dict[str, Any]  # the JSON values of a row by field
LocatedValue = tuple[str, object]  # a JSON value and its location

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
CHUNK_BYTES = 1 << 16  # precision of the reported location of damage
ROW_LIST_KEYS = ("data", "rows", "items", "examples")  # keys that may hold the row list in a JSON object


@dataclass(frozen=True)
class Record:
    """A row and its location: file:line, or file:row for Parquet and JSON arrays."""

    id: str
    row: Row
    location: str

    def get_text(self, field: str) -> str:
        """Return a required text; a number is converted.

        Raises:
            InputError: The field is missing, or is neither a text nor a finite number.
        """
        value = self.row.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, float) and not math.isfinite(value):  # often a missing field written by pandas
            raise self.build_error(f"has {value} in {field}; expected a string or a number")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        raise self.build_error(f"has no text in {field} (found {value!r:.60}); expected a string or a number")

    def get_texts(self, field: str) -> list[str]:
        """Return a required text or list of texts as a list; in a CSV file the list is JSON.

        Raises:
            InputError: The field is missing or an empty list, or contains a value that is not a text.
        """
        value = self.row.get(field)
        if isinstance(value, str) and value.lstrip().startswith("["):
            with contextlib.suppress(ValueError):
                value = json.loads(value) or value
        values = list(value) if isinstance(value, (list, tuple)) else [self.get_text(field)]
        if not values or not all(isinstance(text, str) for text in values):
            raise self.build_error(f"has {values!r:.60} in {field}; expected a string, or a list of strings")
        return values

    def get_optional(self, field: str) -> str:
        """Return an optional field as text, "" if it is missing."""
        value = self.row.get(field)
        return "" if value is None else str(value)

    def build_error(self, problem: str) -> InputError:
        """Return the error for this row. `problem` begins with a verb."""
        fields = ", ".join(sorted(map(str, self.row))) or "none"
        return InputError(
            f"{self.location}: the row {problem}",
            hint=f"Correct the row (its fields: {fields}); docs/reference/evaluation-tasks.md lists the fields of each task.",
        )


def require_file(path: str, field: str) -> Path:
    """Return the file at the path in the setting `field`; `suite:NAME` is a file of the regression suite.

    Raises:
        ConfigurationError: The file does not exist; the message contains `field`.
    """
    if path.startswith(SUITE_SCHEME):
        folder = regression_suite.ITEMS_FOLDER
        file, names = folder / path.removeprefix(SUITE_SCHEME), sorted(f.name for f in folder.glob("*.jsonl"))
        if file.name not in names or file.parent != folder:
            raise ConfigurationError(
                f"{field}: {path} is not a file of the regression suite", hint=f"Choose one of: {', '.join(names)}."
            )
        return file
    file = Path(path).expanduser()
    if not file.is_file():
        problem = "is a folder; expected a file" if file.is_dir() else "does not exist"
        raise ConfigurationError(
            f"{field}: {path} {problem}",
            hint="Set the path of a local file; relative paths start at the current folder.",
        )
    return file


def read_records(path: str, field: str = "data") -> list[Record]:
    """Return the rows of a file in order; a .txt or .md file is one row {text}.

    A row's id is its field `id`, or else a digest of its content. Equal rows are numbered.

    Args:
        path: The file.
        field: Name of the setting that contains the path.

    Raises:
        ConfigurationError: The file does not exist or has an unknown format.
        InputError: The content is invalid: damaged compression, text that is not UTF-8, a row that is not a JSON
            object, a duplicate id, no rows, or no text.
    """
    file, suffix = require_file(path, field), get_file_format(path, field)
    records: dict[str, Record] = {}
    equal_rows = Counter[str]()
    for location, row in _read_rows(file, suffix):
        if not isinstance(row, dict):
            raise InputError(
                f"{location}: the row is of type {type(row).__name__}; expected a JSON object",
                hint='Write rows such as {"prompt": "…"}.',
            )
        if row.get("id") in (None, ""):
            try:
                name = hashing.digest(row)[:16]
            except (TypeError, ValueError) as error:  # a timestamp from Parquet, NaN
                raise InputError(
                    f"{location}: the row contains a value that is not valid JSON: {error}",
                    hint="Write the value as text.",
                ) from None
            equal_rows[name] += 1
            name = name if equal_rows[name] == 1 else f"{name}-{equal_rows[name]}"
        else:
            name = str(row["id"])
        if name in records:
            raise InputError(
                f"{location}: duplicate id {name}, first used at {records[name].location}",
                hint="Give every row a distinct id, or remove all ids.",
            )
        records[name] = Record(name, row, location)
    if not records:
        problem = "is empty" if suffix in (".txt", ".md") else "has no rows"
        raise InputError(f"{file} {problem}", hint=f"Set {field} to a file with content.")
    return list(records.values())


def get_file_format(path: str, field: str = "data") -> str:
    """Return the suffix of a file's format, without compression.

    Raises:
        ConfigurationError: The file does not exist or has an unknown format; the message contains `field`.
    """
    file = require_file(path, field)
    suffixes = [suffix.lower() for suffix in file.suffixes]
    suffix = next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSIONS), "")
    if suffix not in DATA_SUFFIXES:
        raise ConfigurationError(
            f"{field}: {file.name} has an unknown file format; supported: {', '.join(DATA_SUFFIXES)}"
            ", also with .gz or .zst",
            hint="Convert the file.",
        )
    return suffix


def read_json_file(path: str, field: str) -> object:
    """Return the value in a JSON file.

    Raises:
        ConfigurationError: The file does not exist; the message contains `field`.
        InputError: The file cannot be read or is not valid JSON.
    """
    file = require_file(path, field)
    return _parse_json(_read_text(file), str(file))


def _read_bytes(file: Path) -> bytes:
    """Return the decompressed bytes. Raises InputError with the line at which damaged compression ends."""
    import pyarrow

    chunks: list[bytes] = []
    try:
        with file.open("rb") as raw:
            codec = COMPRESSIONS.get(file.suffix.lower())
            stream = pyarrow.input_stream(raw, compression=codec) if codec else raw
            while chunk := stream.read(CHUNK_BYTES):
                chunks.append(chunk)
    except OSError as error:
        if error.errno is not None:
            raise InputError(f"{file} cannot be read: {error.strerror}", hint="Check the file's permissions.") from None
        line = sum(chunk.count(b"\n") for chunk in chunks) + 1
        raise InputError(
            f"{file}:{line}: the compressed file is truncated or damaged here: {error}",
            hint="Copy or download the file again.",
        ) from None
    return b"".join(chunks)


def _read_text(file: Path) -> str:
    data = _read_bytes(file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{file}:{line}: the text is not UTF-8: byte 0x{data[error.start]:02x}",
            hint=f"Convert the file: iconv -f latin1 -t utf-8 {file.name}",
        ) from None


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location}: invalid JSON: {error}", hint="Write one JSON value, in UTF-8.") from None


def _read_rows(file: Path, suffix: str) -> Iterator[LocatedValue]:
    """Yield the rows of a file with their locations; a text file is one row."""
    values: list[object]
    match suffix:
        case ".jsonl" | ".ndjson":
            for number, line in enumerate(_read_text(file).split("\n"), 1):
                if line.strip():
                    yield f"{file}:{number}", _parse_json(line, f"{file}:{number}")
            return
        case ".csv" | ".tsv":
            yield from _read_csv(file, suffix)
            return
        case ".json":
            value = _parse_json(_read_text(file), str(file))
            if isinstance(value, dict):
                value = next((value[name] for name in ROW_LIST_KEYS if isinstance(value.get(name), list)), None)
            if not isinstance(value, list):
                raise InputError(
                    f"{file} has no list of rows",
                    hint=f"Write a JSON array of objects, or an object with the array in {' or '.join(ROW_LIST_KEYS)}.",
                )
            values = value
        case ".parquet":
            import pyarrow
            from pyarrow import parquet

            try:
                values = parquet.read_table(io.BytesIO(_read_bytes(file))).to_pylist()
            except (pyarrow.ArrowInvalid, OSError) as error:
                raise InputError(
                    f"{file} is not a valid Parquet file: {error}", hint="Copy or download the file again."
                ) from None
        case _:
            text = _read_text(file)
            if text.strip():
                yield str(file), {"text": text}
            return
    yield from ((f"{file}:row {number}", row) for number, row in enumerate(values, 1))


def _read_csv(file: Path, suffix: str) -> Iterator[LocatedValue]:
    delimiter = "," if suffix == ".csv" else "\t"
    reader = csv.DictReader(io.StringIO(_read_text(file), newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            location = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                header = len(reader.fieldnames or ())
                found = header - list(row.values()).count(None) + len(row.get(None, ()))
                raise InputError(
                    f"{location}: the row has {format_count(found, 'field')}; expected {header}, as in the header",
                    hint="Quote fields that contain a delimiter.",
                )
            yield location, dict(row)
    except csv.Error as error:
        raise InputError(
            f"{file}:{reader.line_num}: invalid CSV: {error}", hint="Quote fields that contain quotes or line breaks."
        ) from None
