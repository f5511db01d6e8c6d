"""The one place where tasks read their items from files. What cannot be read is an InputError that names file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import hashing
from components.common.errors import ConfigurationError, InputError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
COMPRESSED = (".gz", ".zst")
CHUNK = 1 << 20  # bytes
LISTS = ("data", "rows", "items", "examples")  # where an object in a .json file has its rows


@dataclass(frozen=True)
class Record:
    """A row of a file and where it stands: `place` is file:line, or file:row for Parquet and JSON arrays."""

    id: str
    row: dict[str, Any]
    place: str

    def text(self, field: str) -> str:
        """A field that has to be a text; a number is told as one. Raises InputError."""
        value = self.row.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, float) and not math.isfinite(value):  # pandas' mark of a field that is missing, as often as not
            raise self.wrong(f"has {value} in {field}, which is no text and no number")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        raise self.wrong(f"has no text in {field}")

    def texts(self, field: str) -> list[str]:
        """A field that has to be a text or a list of texts, which may be written as JSON in a CSV file. Raises InputError."""
        value = self.row.get(field)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _list_in(value) or value
        values = list(value) if isinstance(value, (list, tuple)) else [self.text(field)]
        if not values or not all(isinstance(one, str) for one in values):
            raise self.wrong(f"needs a text, or a list of texts, in {field}")
        return values

    def optional(self, field: str) -> str:
        """A field that may be missing, as a text."""
        value = self.row.get(field)
        return "" if value is None else str(value)

    def wrong(self, what: str) -> InputError:
        """The error for this row; what is said of it begins with a verb."""
        fields = ", ".join(sorted(map(str, self.row))) or "none"
        return InputError(
            f"{self.place}: the row {what}", hint=f"It has these fields: {fields}. docs/evaluation-tasks.md says what a task needs."
        )


def _list_in(text: str) -> list[Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def existing(path: str, field: str) -> Path:
    """The file that a setting names. Raises ConfigurationError where there is none."""
    file = Path(path).expanduser()
    if not file.is_file():
        what = "is a folder, and a file is read" if file.is_dir() else "is not there"
        raise ConfigurationError(f"{field}: {path} {what}", hint="Name a file on this machine; a relative path begins where you are.")
    return file


def records(path: str, field: str = "data") -> list[Record]:
    """The rows of a file, in its order, each with an id: its own `id`, or a digest of its content, numbered where rows are equal.

    Raises ConfigurationError where there is no such file or its name says no known format, and InputError for what cannot be read: a
    damaged or cut compressed file, text that is not UTF-8, a row that is no JSON object, an id that stands twice, a file without rows.
    """
    file = existing(path, field)
    kind = _suffix(file, field)
    found = list(_rows(file, kind))
    if not found:
        raise InputError(f"{file} holds no rows", hint=f"Name another file in {field}.")
    return _identified(found)


def document(path: str, field: str = "data") -> list[Record]:
    """Texts: a .txt or .md file as one, the rows {text} of other files. Raises as records does."""
    file = existing(path, field)
    if _suffix(file, field) not in (".txt", ".md"):
        return records(path, field)
    text = _text(file)
    if not text.strip():
        raise InputError(f"{file} is empty", hint=f"Name another file in {field}.")
    return _identified([(str(file), {"text": text})])


def kind(path: str, field: str = "data") -> str:
    """The ending that says a file's format, without that of its compression. Raises ConfigurationError where it says none."""
    return _suffix(existing(path, field), field)


def json_file(path: str, field: str) -> Any:
    """The value in a JSON file. Raises ConfigurationError where there is none, InputError where it is no JSON."""
    file = existing(path, field)
    return _json(_text(file), str(file))


def _suffix(file: Path, field: str) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    kind = next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")
    if kind not in SUFFIXES:
        raise ConfigurationError(
            f"{field}: {file.name} has no ending of a format that is read", hint=f"Those are {', '.join(SUFFIXES)}, also with .gz or .zst."
        )
    return kind


def _identified(found: Sequence[tuple[str, dict[str, Any]]]) -> list[Record]:
    made, seen, equal = [], dict[str, str](), Counter[str]()
    for place, row in found:
        own = row.get("id")
        name = str(own) if own not in (None, "") else _digest(row, place)
        if own in (None, ""):
            equal[name] += 1
            name = name if equal[name] == 1 else f"{name}-{equal[name]}"
        if name in seen:
            raise InputError(f"{place}: the id {name} stands already at {seen[name]}", hint="Give every row its own id, or none an id.")
        seen[name] = place
        made.append(Record(name, row, place))
    return made


def _digest(row: dict[str, Any], place: str) -> str:
    try:
        return hashing.digest(row)[:16]
    except (TypeError, ValueError) as error:  # a time out of Parquet, a NaN
        raise InputError(
            f"{place}: a value of the row is none that JSON knows: {error}", hint="Write it as text, or leave it out."
        ) from None


def _rows(file: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    match kind:
        case ".jsonl" | ".ndjson":
            return _json_lines(_text(file), file)
        case ".json":
            return _json_array(_text(file), file)
        case ".csv" | ".tsv":
            return _csv(_text(file), file, "," if kind == ".csv" else "\t")
        case ".parquet":
            return _parquet(file)
        case _:
            return iter([(str(file), {"text": _text(file)})])


def _bytes(file: Path) -> bytes:
    """The file's bytes, decompressed. Raises InputError with the line after which it breaks off."""
    pieces: list[bytes] = []
    try:
        with _opened(file) as stream:
            while piece := stream.read(CHUNK):
                pieces.append(piece)
    except OSError as error:
        if error.errno is not None:
            raise InputError(f"{file} cannot be read: {error.strerror}", hint="See that this user may read it.") from None
        raise _broken(file, pieces, error) from None
    except (EOFError, zlib.error) as error:
        raise _broken(file, pieces, error) from None
    return b"".join(pieces)


def _opened(file: Path) -> Any:
    match file.suffix.lower():
        case ".gz":
            return gzip.open(file, "rb")
        case ".zst":
            return io.BufferedReader(_Zstd(file))
    return file.open("rb")


class _Zstd(io.RawIOBase):
    """A zstd file's content; EOFError where it breaks off, as gzip has it."""

    def __init__(self, file: Path) -> None:
        import zstandard

        self._file, self._error = file.open("rb"), zstandard.ZstdError
        self._engine = zstandard.ZstdDecompressor()
        self._frame, self._ready, self._began = self._engine.decompressobj(), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            raw = self._file.read(CHUNK // 16)
            if not raw:
                if self._began:
                    raise EOFError("its end is missing")
                return 0
            self._ready = self._unpacked(raw)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpacked(self, raw: bytes) -> bytes:
        pieces = []
        while raw:
            try:
                pieces.append(self._frame.decompress(raw))
            except self._error as error:
                raise EOFError(str(error)) from None
            self._began = not self._frame.eof
            raw = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._engine.decompressobj()
        return b"".join(pieces)

    def close(self) -> None:
        self._file.close()
        super().close()


def _broken(file: Path, pieces: Sequence[bytes], error: BaseException) -> InputError:
    line = sum(piece.count(b"\n") for piece in pieces) + 1
    return InputError(f"{file}:{line}: the compressed file breaks off here or is damaged: {error}", hint="Copy or download the file again.")


def _text(file: Path) -> str:
    data = _bytes(file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}:{line}: the text is not UTF-8", hint=f"Convert it: iconv -f latin1 -t utf-8 {file.name}") from None


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: this is no JSON: {error}", hint="Write one JSON value, in UTF-8.") from None


def _json_lines(text: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", _object(_json(line, f"{file}:{number}"), f"{file}:{number}")


def _json_array(text: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    value = _json(text, str(file))
    if isinstance(value, dict):
        value = next((value[name] for name in LISTS if isinstance(value.get(name), list)), None)
    if not isinstance(value, list):
        raise InputError(
            f"{file} holds no list of rows", hint=f"Write a JSON array of objects, or an object with it in {' or '.join(LISTS)}."
        )
    for number, row in enumerate(value, 1):
        yield f"{file}:row {number}", _object(row, f"{file}:row {number}")


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{place}: a row has to be a JSON object, not {type(value).__name__}", hint='Write rows such as {"prompt": "…"}.')
    return value


def _csv(text: str, file: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            place = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                raise InputError(f"{place}: the row has not as many fields as the head", hint="Quote fields that hold a delimiter.")
            yield place, dict(row)
    except csv.Error as error:
        raise InputError(f"{file}:{reader.line_num}: this is no CSV: {error}", hint="Quote fields that hold quotes or line ends.") from None


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(_bytes(file)))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(f"{file} is no Parquet file: {error}", hint="Copy or download the file again.") from None
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{file}:row {number}", row
