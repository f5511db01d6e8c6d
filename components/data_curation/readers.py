"""From files to records. What cannot be read is not lost: it becomes an Unread with its place and the reason.

A record is what one line of JSONL, one element of a JSON array, one row of CSV or Parquet, or one unit of a text file holds.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.errors import InputError
from components.data_curation.config import DataCurationConfig
from components.data_curation.sources import Source, suffix

CHUNK = 64 * 1024  # bytes read at once; bounds what a compressed chunk can swell to
SAMPLE = 4096  # bytes from which a file that is no UTF-8 text is recognised
# How files begin that are often given a text file's name, and what is said of them.
BEGINNINGS = {
    b"\xff\xfe": "UTF-16LE text, not UTF-8",
    b"\xfe\xff": "UTF-16BE text, not UTF-8",
    b"\x1f\x8b": "compressed with gzip, which its name does not say",
    b"\x28\xb5\x2f\xfd": "compressed with zstd, which its name does not say",
    b"PK\x03\x04": "a zip archive, not text",
    b"PAR1": "Parquet, which its name does not say",
}


@dataclass(frozen=True)
class Record:
    """A readable record: its file's name, its line (of JSON and Parquet: its number, from 1) and its fields."""

    file: str
    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Unread:
    """What could not be read, as quarantine.jsonl says it."""

    file: str
    line: int
    why: str


class BrokenOffError(Exception):
    """A file of which no more can be had: a compressed one that ends or stops making sense in the middle, one that holds no text at all."""


def read(source: Source, config: DataCurationConfig) -> Iterator[Record | Unread]:
    """Every record of a file, and every place where none could be read.

    Raises InputError when the file is no longer the one that was listed.
    """
    kind = suffix(Path(source.uri))
    reader = _READERS[kind]
    with _opened(Path(source.uri)) as file:
        digest = hashlib.sha256()
        chunks = _chunks(file, digest.update)
        plain = _decompressed(chunks, Path(source.uri).suffix.lower())
        yield from reader(_Content(source.name, plain if kind == ".parquet" else _text_only(plain)), config)
        for _ in chunks:  # what a reader left unread still belongs to the digest
            pass
    if digest.hexdigest() != source.sha256:
        raise InputError(
            f"{source.uri} changed while it was read", hint="Wait until nobody writes to the file, then run the same command again."
        )


def _opened(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        hint = "It could be read when the sources were listed: see that it is there, and on a cluster that this step mounts its volume."
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=hint) from None


@dataclass(frozen=True)
class _Content:
    """A file's name and its decompressed bytes, piece by piece."""

    file: str
    chunks: Iterator[bytes]

    def everything(self) -> tuple[bytes, str]:
        """All bytes that can be had, and why there are no more of them ("" at the file's true end)."""
        pieces: list[bytes] = []
        try:
            pieces.extend(self.chunks)  # an exception leaves what came before it
        except BrokenOffError as error:
            return b"".join(pieces), str(error)
        return b"".join(pieces), ""


def _chunks(file: io.BufferedReader, seen: Callable[[bytes], object]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        seen(chunk)
        yield chunk


def _decompressed(chunks: Iterator[bytes], compression: str) -> Iterator[bytes]:
    """The bytes behind gzip or zstd, several members or frames in a row included. Raises BrokenOffError."""
    if compression == ".gz":
        return _inflate(chunks, lambda: zlib.decompressobj(wbits=31), zlib.error)
    if compression == ".zst":
        import zstandard

        return _inflate(chunks, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
    return chunks


def _inflate(chunks: Iterator[bytes], new: Callable[[], Any], damage: type[Exception]) -> Iterator[bytes]:
    current, began = new(), False
    for chunk in chunks:
        data = chunk
        while data:
            try:
                plain = current.decompress(data)
            except damage as error:
                raise BrokenOffError(f"the compressed data is damaged here: {error}") from None
            began, data = True, b""
            if current.eof:
                data, current, began = current.unused_data.lstrip(b"\0"), new(), False
            if plain:
                yield plain
    if began:
        raise BrokenOffError("the compressed file breaks off here: its end is missing")


def _text_only(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks of a text file. Raises BrokenOffError before the first when the file is something else."""
    first = next(chunks, b"")
    if what := _foreign(first[:SAMPLE]):
        raise BrokenOffError(f"the file is {what}; nothing of it is read")
    yield first
    yield from chunks


def _foreign(sample: bytes) -> str | None:
    """What a file's beginning is where it cannot be UTF-8 text; single stray bytes are left to the line they stand in.

    UTF-16 without a byte-order mark has a zero in every other byte of Latin letters, digits and punctuation; in binary data more than a
    twentieth of the bytes are control characters that text does without (among random bytes, a tenth).
    """
    for beginning, what in BEGINNINGS.items():
        if sample.startswith(beginning):
            return what
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if max(even, odd) > len(sample) / 10 and min(even, odd) < max(even, odd) / 10:
        return f"UTF-16{'LE' if odd > even else 'BE'} text, not UTF-8"
    control = len(sample) - len(sample.translate(None, delete=CONTROL))
    return "binary data, not text" if control > len(sample) / 20 else None


CONTROL = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\x1b")


def _lines(content: _Content, longest: int) -> Iterator[tuple[int, bytes | str]]:
    """Numbered lines as bytes; as str the reason why a line is not there. An over-long line is passed over, never held."""
    number, held, too_long = 1, bytearray(), False
    try:
        for chunk in content.chunks:
            pieces = chunk.split(b"\n")
            for piece in pieces[:-1]:
                held += piece
                yield number, _too_long(longest) if too_long or len(held) > longest else bytes(held)
                number, held, too_long = number + 1, bytearray(), False
            held += pieces[-1]
            if len(held) > longest:
                held, too_long = bytearray(), True
    except BrokenOffError as error:
        yield number, str(error)
        return
    if held or too_long:
        yield number, _too_long(longest) if too_long else bytes(held)


def _too_long(longest: int) -> str:
    return f"longer than the {longest:,} bytes of data_curation.max_line_bytes"


def _decoded(line: bytes) -> str:
    """The text of a line; raises ValueError with a reason for people."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}") from None


def _json_lines(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    for number, line in _lines(content, config.max_line_bytes):
        if isinstance(line, str):
            yield Unread(content.file, number, line)
        elif line.strip():
            yield _json_record(content.file, number, line)


def _json_record(file: str, number: int, line: bytes) -> Record | Unread:
    try:
        return _record(file, number, json.loads(_decoded(line), parse_constant=_nothing))
    except json.JSONDecodeError as error:
        return Unread(file, number, f"invalid JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return Unread(file, number, "invalid JSON: nested too deeply")
    except ValueError as error:
        return Unread(file, number, str(error) if "UTF-8" in str(error) else f"invalid JSON: {error}")


def _nothing(_: str) -> None:
    """NaN and Infinity are not JSON, but common: no value."""


def _record(file: str, number: int, value: Any) -> Record | Unread:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        return Unread(file, number, f"a JSON {type(value).__name__}, not an object")
    return Record(file, number, value)


def _json(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    """A JSON array, an object, or JSON lines by another name. Of a damaged array, the elements before the damage."""
    data, broken = content.everything()
    try:
        text = _decoded(data)
    except ValueError as error:
        yield Unread(content.file, 1, str(error))
        return
    if text.lstrip().startswith("["):
        yield from _elements(content.file, text, broken, config.max_line_bytes)
    elif _is_one_object(text):
        yield _json_record(content.file, 1, data)
    else:
        yield from _json_lines(_Content(content.file, iter([data])), config)
        if broken:
            yield Unread(content.file, data.count(b"\n") + 1, broken)


def _is_one_object(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _elements(file: str, text: str, broken: str, longest: int) -> Iterator[Record | Unread]:
    decoder, position, number = json.JSONDecoder(parse_constant=_nothing), text.index("[") + 1, 0
    while True:
        position = _skip(text, position, " \t\r\n,")
        if text[position : position + 1] == "]":
            position = _skip(text, position + 1, " \t\r\n")
            if position == len(text):
                return
            if text[position] != "[":  # several arrays, one after the other, are read like one
                yield Unread(file, number + 1, "something other than an array follows the array; it is unread")
                return
            position += 1
            continue
        number += 1
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield Unread(file, number, broken or f"invalid JSON: {error or 'nested too deeply'}; what follows in this array is unread")
            return
        yield Unread(file, number, _too_long(longest)) if end - position > longest else _record(file, number, value)
        position = end


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _csv(content: _Content, config: DataCurationConfig, delimiter: str = ",") -> Iterator[Record | Unread]:
    """Rows under a header line. Bytes that are not UTF-8 go through as surrogates, to be found in their own row."""
    broken: list[Unread] = []
    reader = csv.reader(_csv_lines(content, config.max_line_bytes, broken), delimiter=delimiter, strict=True)
    csv.field_size_limit(config.max_line_bytes)
    header: list[str] | None = None
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield Unread(content.file, reader.line_num, f"invalid CSV: {error}")
            continue
        if header is None:
            header = row
        elif row:
            yield _csv_record(content.file, reader.line_num, header, row)
    yield from broken


def _csv_lines(content: _Content, longest: int, broken: list[Unread]) -> Iterator[str]:
    for number, line in _lines(content, longest):
        if isinstance(line, str):
            broken.append(Unread(content.file, number, line))
        else:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors="surrogateescape") + "\n"


def _csv_record(file: str, number: int, header: list[str], row: list[str]) -> Record | Unread:
    if any("\udc80" <= character <= "\udcff" for cell in row for character in cell):
        return Unread(file, number, "not UTF-8")
    if len(row) != len(header):
        return Unread(file, number, f"{len(row)} fields under a header of {len(header)}")
    return Record(file, number, {name.strip(): _cell(value) for name, value in zip(header, row, strict=True)})


def _cell(value: str) -> Any:
    """A cell that holds a JSON list of objects (messages, tools) as that list; any other as it stands."""
    if not value.startswith(("[{", "[ {")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _tsv(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    return _csv(content, config, delimiter="\t")


def _parquet(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    import pyarrow
    from pyarrow import parquet

    data, broken = content.everything()
    number = 0
    try:
        for batch in parquet.ParquetFile(pyarrow.BufferReader(data)).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(content.file, number, {name: plain(value) for name, value in row.items()})
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Unread(content.file, number + 1, broken or f"unreadable Parquet: {error}")


def plain(value: Any) -> Any:
    """A value of Parquet as JSON knows it: NaN becomes nothing, dates and decimals become text."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _text(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    """Lines, blocks between blank lines, or the whole of a text file."""
    if config.text_unit == "file":
        data, broken = content.everything()
        yield from _text_records(content.file, [(1, data)] if data or not broken else [])
        if broken:
            yield Unread(content.file, data.count(b"\n") + 1, broken)
        return
    block: list[bytes] = []
    began = 1
    for number, line in _lines(content, config.max_line_bytes):
        if isinstance(line, str):
            yield Unread(content.file, number, line)
        elif line.strip():
            began = began if block else number
            block.append(line)
        if block and (config.text_unit == "line" or not isinstance(line, bytes) or not line.strip()):
            yield from _text_records(content.file, [(began, b"\n".join(block))])
            block = []
    yield from _text_records(content.file, [(began, b"\n".join(block))] if block else [])


def _text_records(file: str, units: Iterable[tuple[int, bytes]]) -> Iterator[Record | Unread]:
    for number, data in units:
        try:
            yield Record(file, number, {"text": _decoded(data)})
        except ValueError as error:
            yield Unread(file, number, str(error))


_READERS: dict[str, Callable[[_Content, DataCurationConfig], Iterator[Record | Unread]]] = {
    ".csv": _csv,
    ".json": _json,
    ".jsonl": _json_lines,
    ".md": _text,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
    ".text": _text,
    ".tsv": _tsv,
    ".txt": _text,
}
