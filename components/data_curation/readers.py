"""From files to records. What cannot be read is not lost: it becomes an Unread with its place and the reason.

A record is what one line of JSONL, one element of a JSON array, one row of CSV or Parquet, or one unit of a text file holds.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common.errors import InputError
from components.data_curation import remote, web
from components.data_curation.config import DataCurationConfig
from components.data_curation.records import BrokenOffError, Record, Unread, check_depth, parsed, shown
from components.data_curation.sources import Source, suffix

__all__ = ["BrokenOffError", "Record", "Unread", "read"]

CHUNK = 64 * 1024  # bytes read at once; bounds what a compressed chunk can swell to
PIECE = 256 * 1024  # bytes of it that are unpacked at once
SIP = 512  # bytes given to zstd at once, which unpacks all that it is given: some megabytes at worst
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
WEB = (".htm", ".html", ".warc", ".wet")
WEB_MAY_BEGIN = (b"\xff\xfe", b"\xfe\xff")  # a page may be UTF-16
SPAN = 20_000  # lines that a record of CSV may span
AGAIN = 8  # how often a file's lines are read again, on the average, where quotes are not closed
BREAKS_OFF = "the compressed file breaks off here: its end is missing"


def read(source: Source, config: DataCurationConfig) -> Iterator[Record | Unread]:
    """Every record of a file, and every place where none could be read.

    Raises InputError when the file is no longer the one that was listed, or cannot be had any more.
    """
    kind = suffix(Path(source.name))
    digest = hashlib.sha256()
    with closing(_raw(source, digest.update)) as chunks:
        plain = _decompressed(chunks, Path(source.name).suffix.lower())
        reader, plain = _reader(kind, plain if kind == ".parquet" else _as_named(plain, kind))
        yield from reader(_Content(source.name, plain), config)
        for _ in chunks:  # what a reader left unread still belongs to the digest
            pass
    if digest.hexdigest() != source.sha256:
        raise InputError(
            f"{source.uri} changed while it was read", hint="Wait until nobody writes to the file, then run the same command again."
        )


def _raw(source: Source, seen: Callable[[bytes], object]) -> Generator[bytes, None, None]:
    """A file's bytes as they lie, here or far away; `seen` is told of each."""
    if remote.is_remote(source.uri):
        for chunk in remote.chunks(source.uri, CHUNK):
            seen(chunk)
            yield chunk
        return
    with _opened(Path(source.uri)) as file:
        while chunk := file.read(CHUNK):
            seen(chunk)
            yield chunk


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


def _decompressed(chunks: Iterator[bytes], compression: str) -> Iterator[bytes]:
    """The bytes behind gzip or zstd, several members or frames in a row included. Raises BrokenOffError."""
    return _gunzip(chunks) if compression == ".gz" else _unzstd(chunks) if compression == ".zst" else chunks


def _gunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Several members in a row included, as WARC files have one a record. Never more than PIECE bytes at once."""
    current, began = zlib.decompressobj(wbits=31), False
    for chunk in chunks:
        data = chunk
        while data:
            try:
                plain = current.decompress(data, PIECE)
            except zlib.error as error:
                raise BrokenOffError(f"the compressed data is damaged here: {error}") from None
            began, data = True, current.unconsumed_tail
            if current.eof:
                data, current, began = current.unused_data.lstrip(b"\0"), zlib.decompressobj(wbits=31), False
            if plain:
                yield plain
    if began:
        if plain := current.flush():
            yield plain
        raise BrokenOffError(BREAKS_OFF)


def _unzstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Several frames in a row included."""
    import zstandard

    current, began = zstandard.ZstdDecompressor().decompressobj(), False
    for chunk in chunks:
        data = chunk
        while data:
            try:
                plain = current.decompress(data[:SIP])
            except zstandard.ZstdError as error:
                raise BrokenOffError(f"the compressed data is damaged here: {error}") from None
            began, rest = True, data[SIP:]
            if current.eof:
                rest = (current.unused_data + rest).lstrip(b"\0")
                current, began = zstandard.ZstdDecompressor().decompressobj(), False
            data = rest
            if plain:
                yield plain
    if began:
        raise BrokenOffError(BREAKS_OFF)


def _as_named(chunks: Iterator[bytes], kind: str) -> Iterator[bytes]:
    """The chunks of a file that its name says is text or a web archive. Raises BrokenOffError before the first when it is neither."""
    first = next(chunks, b"")
    if what := _magic(first, WEB_MAY_BEGIN) if kind in WEB else _foreign(first[:SAMPLE]):
        raise BrokenOffError(f"the file is {what}; nothing of it is read")
    yield first
    yield from chunks


def _magic(sample: bytes, but: Iterable[bytes] = ()) -> str | None:
    return next((what for beginning, what in BEGINNINGS.items() if sample.startswith(beginning) and beginning not in but), None)


def _foreign(sample: bytes) -> str | None:
    """What a file's beginning is where it cannot be UTF-8 text; single stray bytes are left to the line they stand in.

    UTF-16 without a byte-order mark has a zero in every other byte of Latin letters, digits and punctuation; in binary data more than a
    twentieth of the bytes are control characters that text does without (among random bytes, a tenth).
    """
    if what := _magic(sample):
        return what
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    if max(even, odd) > len(sample) / 10 and min(even, odd) < max(even, odd) / 10:
        return f"UTF-16{'LE' if odd > even else 'BE'} text, not UTF-8"
    control = len(sample) - len(sample.translate(None, delete=CONTROL))
    return "binary data, not text" if control > len(sample) / 20 else None


CONTROL = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\x1b")


@dataclass(frozen=True)
class _Missing:
    """Why a line is not there; whether its quotes are odd in number, so that a quoted cell of CSV begins or ends in it; and whether
    the file breaks off here."""

    why: str
    odd: bool = False
    end: bool = False


def _lines(content: _Content, longest: int) -> Iterator[tuple[int, bytes | _Missing]]:
    """Numbered lines. An over-long line is passed over, never held."""
    number, held, size = 1, [b""], 0  # the parts of the line that began last; none of one that is too long already
    try:
        for chunk in content.chunks:
            first, *others = chunk.split(b"\n")
            held, size = _longer(held, size, first, longest)
            for line in others:
                yield number, _joined(held, size, longest)
                number, held, size = number + 1, [line], len(line)
    except BrokenOffError as error:
        yield number, _Missing(str(error), end=True)
        return
    if size:
        yield number, _joined(held, size, longest)


def _longer(held: list[bytes], size: int, more: bytes, longest: int) -> tuple[list[bytes], int]:
    size += len(more)
    held.append(more)
    if size > longest:
        held[:] = [b'"' * _odd(b"".join(held))]
    return held, size


def _odd(line: bytes) -> bool:
    return line.count(b'"') % 2 == 1


def _joined(held: list[bytes], size: int, longest: int) -> bytes | _Missing:
    line = held[0] if len(held) == 1 else b"".join(held)
    return _Missing(web.too_long(longest), _odd(line)) if size > longest else line


def _decoded(line: bytes) -> str:
    """The text of a line; raises ValueError with a reason for people."""
    try:
        return line.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}") from None


def _json_lines(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    for number, line in _lines(content, config.max_line_bytes):
        if isinstance(line, _Missing):
            yield Unread(content.file, number, line.why)
        elif line.strip():
            yield _json_record(content.file, number, line)


def _json_record(file: str, number: int, line: bytes) -> Record | Unread:
    try:
        text = _decoded(line)
        value = _JSON.decode(text)
        check_depth(text, value)
        return _record(file, number, value)
    except json.JSONDecodeError as error:
        return Unread(file, number, f"invalid JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return Unread(file, number, "invalid JSON: nested too deeply")
    except ValueError as error:
        return Unread(file, number, str(error) if "UTF-8" in str(error) else f"invalid JSON: {error}")


def _nothing(_: str) -> None:
    """NaN and Infinity are not JSON, but common: no value."""


_JSON = json.JSONDecoder(parse_constant=_nothing)


def _record(file: str, number: int, value: Any) -> Record | Unread:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        return Unread(file, number, f"a JSON {type(value).__name__}, not an object")
    return Record(file, number, value)


def _json(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    """A JSON array, an object, or JSON lines by another name. Of a damaged array, the elements before the damage."""
    data, broken = content.everything()
    text = data.decode(errors="surrogateescape").removeprefix("\ufeff")  # bytes that are not UTF-8 are found in their own element
    if text.lstrip().startswith("["):
        yield from _elements(content.file, text, broken, config.max_line_bytes)
        return
    if _is_one_object(text):
        yield _json_record(content.file, 1, data)
    else:
        whole = data[: data.rfind(b"\n") + 1] if broken else data
        yield from _json_lines(_Content(content.file, iter([whole])), config)
    if broken:
        yield Unread(content.file, data.count(b"\n") + 1, broken)


def _is_one_object(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _elements(file: str, text: str, broken: str, longest: int) -> Iterator[Record | Unread]:
    decoder, position, number = _JSON, text.index("[") + 1, 0
    while True:
        position = _skip(text, position, " \t\r\n,")
        if text[position : position + 1] == "]":
            position = _skip(text, position + 1, " \t\r\n")
            if position == len(text):
                yield from [Unread(file, number + 1, broken)] if broken else []
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
        yield _element(file, number, text[position:end], value, longest)
        position = end


def _element(file: str, number: int, text: str, value: Any, longest: int) -> Record | Unread:
    data = text.encode(errors="surrogateescape")
    if len(data) > longest:
        return Unread(file, number, web.too_long(longest))
    try:
        check_depth(_decoded(data), value)
    except ValueError as error:
        return Unread(file, number, str(error))
    return _record(file, number, value)


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _csv(content: _Content, config: DataCurationConfig, delimiter: str = ",") -> Iterator[Record | Unread]:
    """Rows under a header line."""
    rows = _csv_rows(content, config.max_line_bytes, delimiter)
    header = next(rows, None)
    if header is None:
        return
    names = [name.strip() or f"column {number}" for number, name in enumerate(header.cells, 1)]
    if why := header.why or _not_utf8(names) or _doubled(names):
        more = next(rows, None) is not None
        yield Unread(content.file, header.first, f"{why}; nothing below this header is read" if more else why)
        return
    for row in rows:
        yield _csv_record(content.file, names, row)


def _not_utf8(cells: Sequence[str]) -> str:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return "not UTF-8"
    return ""


def _doubled(names: Sequence[str]) -> str:
    name = next((name for name, count in Counter(names).items() if count > 1), None)
    return "" if name is None else f"the header names the column {shown(name)} twice"


@dataclass(frozen=True)
class _CsvRow:
    """The cells of a row and the lines it spans, or why it is none."""

    first: int
    last: int
    cells: list[str]
    why: str = ""


def _csv_rows(content: _Content, longest: int, delimiter: str) -> Iterator[_CsvRow]:
    csv.field_size_limit(longest + 1)  # its line feed is given to the csv module too
    lines = _CsvLines(content, longest)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            row = lines.row(next(reader))
        except StopIteration:
            return
        except csv.Error as error:
            row = lines.broken(error)
        if row.cells or row.why:
            yield row


class _CsvLines:
    """Lines for the csv module. Those of a record are held until it is whole: of a broken one, all but the first are given out again.

    A quote that nobody closes would swallow the rows below it. Where very many lines begin with such a quote, they are not looked at
    again and again: from AGAIN times the lines of the file on, a record must end in its own line to be read a second time.
    """

    def __init__(self, content: _Content, longest: int) -> None:
        self._longest = longest
        self._new = _lines(content, longest)
        self._again: deque[tuple[int, bytes | _Missing]] = deque()
        self._record: list[tuple[int, bytes | _Missing]] = []
        self._size = 0
        self._once = self._more = 0  # lines given out for the first time, and again

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, line = self._next()
        text = _csv_text(number, line)
        self._record.append((number, line))
        self._size += len(line) + 1 if isinstance(line, bytes) else 1
        if self._size > self._longest + 1:
            raise csv.Error(web.too_long(self._longest))
        if len(self._record) > SPAN:
            raise csv.Error(f"more than {SPAN:,} lines")
        return text

    def _next(self) -> tuple[int, bytes | _Missing]:
        if not self._again:
            self._once += 1
            return next(self._new)
        self._more += 1
        if self._record and self._more > AGAIN * max(self._once, SPAN):
            raise csv.Error("a quote is opened here and not closed in this line")
        return self._again.popleft()

    def row(self, cells: list[str]) -> _CsvRow:
        """The row that the lines since the last one hold."""
        record = self._taken()
        why = next((line.why for _, line in record if isinstance(line, _Missing)), "")
        return _CsvRow(record[0][0], record[-1][0], cells, why)

    def broken(self, error: csv.Error) -> _CsvRow:
        """What is said of the first of these lines; the others come again. Where the file breaks off within quotes, none does."""
        (number, line), *others = self._taken()
        if others and isinstance(end := others[-1][1], _Missing) and end.end:
            return _CsvRow(number, others[-1][0], [], end.why)
        self._again.extendleft(reversed(others))
        why = f"invalid CSV: {error}"
        if others:
            why = f"invalid CSV: a quote is opened here and not closed as it should be: {error} in line {others[-1][0]}"
        return _CsvRow(number, number, [], line.why if isinstance(line, _Missing) else why)

    def _taken(self) -> list[tuple[int, bytes | _Missing]]:
        record, self._record, self._size = self._record, [], 0
        return record


def _csv_text(number: int, line: bytes | _Missing) -> str:
    """A line as the csv module gets it: bytes that are not UTF-8 as surrogates, to be found in their own row."""
    if isinstance(line, _Missing):
        return '"\n' if line.odd else "\n"
    return line.decode("utf-8-sig" if number == 1 else "utf-8", errors="surrogateescape") + "\n"


def _csv_record(file: str, names: list[str], row: _CsvRow) -> Record | Unread:
    width = f"{len(row.cells)} fields under a header of {len(names)}" if len(row.cells) != len(names) else ""
    if why := row.why or _not_utf8(row.cells) or width:
        return Unread(file, row.first, f"lines {row.first} to {row.last}: {why}" if row.last > row.first else why)
    return Record(file, row.first, {name: _cell(value) for name, value in zip(names, row.cells, strict=True)})


def _cell(value: str) -> Any:
    """A cell that holds a JSON list of objects (messages, tools) as that list; any other as it stands."""
    if not value.startswith(("[{", "[ {")):
        return value
    try:
        return parsed(value)
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
        yield from [_text_record(content.file, 1, data)] if data or not broken else []
        if broken:
            yield Unread(content.file, data.count(b"\n") + 1, broken)
        return
    longest, block, size, began = config.max_line_bytes, list[bytes](), 0, 1
    for number, line in _lines(content, longest):
        if isinstance(line, _Missing):
            yield Unread(content.file, number, line.why)
        elif line.strip():
            began = began if block else number
            block, size = _longer(block, size, b"\n" + line if block else line, longest)
        if block and (config.text_unit == "line" or not isinstance(line, bytes) or not line.strip()):
            yield _text_record(content.file, began, _joined(block, size, longest))
            block, size = [], 0
    yield from [_text_record(content.file, began, _joined(block, size, longest))] if block else []


def _text_record(file: str, number: int, data: bytes | _Missing) -> Record | Unread:
    if isinstance(data, _Missing):
        return Unread(file, number, data.why)
    try:
        return Record(file, number, {"text": _decoded(data)})
    except ValueError as error:
        return Unread(file, number, str(error))


def _html(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    """A page a file."""
    pieces: list[bytes] = []
    size, broken = 0, ""
    try:
        for chunk in content.chunks:
            pieces, size = _longer(pieces, size, chunk, config.max_line_bytes)
    except BrokenOffError as error:
        broken = str(error)
    if size > config.max_line_bytes:
        yield Unread(content.file, 1, web.too_long(config.max_line_bytes))
        return
    found = web.page(content.file, b"".join(pieces))
    if isinstance(found, Record) or (found and not broken):
        yield found
    if broken:
        yield Unread(content.file, 1, broken)


def _archive(content: _Content, config: DataCurationConfig) -> Iterator[Record | Unread]:
    return web.archive(content.file, content.chunks, config.max_line_bytes)


Reader = Callable[[_Content, DataCurationConfig], Iterator[Record | Unread]]
_READERS: dict[str, Reader] = {
    ".csv": _csv,
    ".htm": _html,
    ".html": _html,
    ".json": _json,
    ".jsonl": _json_lines,
    ".md": _text,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
    ".text": _text,
    ".tsv": _tsv,
    ".txt": _text,
    ".warc": _archive,
    ".wet": _archive,
}


def _reader(kind: str, chunks: Iterator[bytes]) -> tuple[Reader, Iterator[bytes]]:
    """The reader of a kind of file. A web archive is known by how it begins, also under the name of a text file."""
    reader = _READERS[kind]
    if reader is not _text:
        return reader, chunks
    try:
        first = next(chunks, b"")
    except BrokenOffError as error:
        return _only(str(error)), chunks
    return _archive if first.lstrip().startswith(web.BEGINNING) else reader, itertools.chain([first], chunks)


def _only(why: str) -> Reader:
    """The reader of a file of which nothing can be had."""
    return lambda content, config: iter([Unread(content.file, 1, why)])
