"""Registry of file readers: splits a file into records with the reader for the file's suffix.

A record is a JSONL line, an element of a JSON array, a CSV or Parquet row, or a unit of a text file. A part that cannot
be read becomes an `UnreadableRecord` with its location and the reason.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.runtime.errors import InputError
from components.data_curation.reading import (
    column_mapping,
    csv_reader,
    document_blocks,
    document_reader,
    record_formats,
    remote_files,
    web_pages,
)
from components.data_curation.reading.document_extractors import BINARY_EXTRACTORS, SPREADSHEET_EXTRACTORS
from components.data_curation.reading.file_lines import (
    FileContent,
    MissingLine,
    append_bounded,
    decode_line,
    join_line,
    read_lines,
)
from components.data_curation.reading.raw_records import (
    COMPRESSION_SUFFIXES,
    TOO_DEEP_MESSAGE,
    Record,
    Source,
    TruncatedFileError,
    UnreadableRecord,
    check_depth,
    file_suffix,
    too_long_message,
)
from components.data_curation.reading.source_settings import SourceSettings

if TYPE_CHECKING:
    from components.data_curation.config import DataCurationConfig

READ_BYTES = 64 * 1024  # per read; bounds the decompressed size of a chunk
MAX_DECOMPRESSED_BYTES = 256 * 1024  # per step of gzip
ZSTD_INPUT_BYTES = 512  # per step of zstd, which decompresses its whole input: a few megabytes at most
SAMPLE_BYTES = 4096  # examined for data that is not UTF-8 text
# First bytes of files that often have the suffix of a text file, and their description in errors.
MAGIC_NUMBERS = {
    b"\xff\xfe": "UTF-16LE text, not UTF-8",
    b"\xfe\xff": "UTF-16BE text, not UTF-8",
    b"\x1f\x8b": "gzip data without the .gz suffix",
    b"\x28\xb5\x2f\xfd": "zstd data without the .zst suffix",
    b"PK\x03\x04": "a zip archive, not text",
    b"PAR1": "Parquet data without the .parquet suffix",
}
CONTROL_BYTES = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\x1b")
JSON_SPACE = " \t\r\n"
WRAPPER_KEYS = ("data", "examples", "items", "records", "rows")
WEB_SUFFIXES = (".htm", ".html", ".warc", ".wet")
WEB_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")  # a page may be UTF-16
# NaN and Infinity are common, but not JSON: they become null.
JSON_DECODER = json.JSONDecoder(parse_constant=lambda constant: None)

Records = Iterator[Record | UnreadableRecord]
Reader = Callable[[FileContent, "DataCurationConfig"], Records]


def read_records(source: Source, config: DataCurationConfig) -> Generator[Record | UnreadableRecord, None, None]:
    """Yield the records of a file, including unreadable records.

    Raises:
        InputError: the file changed since it was listed, or can no longer be read.
    """
    digest, settings = hashlib.sha256(), source.settings
    with closing(_read_bytes(source, digest.update)) as chunks:
        compression, suffix = Path(source.name).suffix.lower(), file_suffix(Path(source.name))
        plain: Iterator[bytes] = _decompress(chunks, compression) if compression in COMPRESSION_SUFFIXES else chunks
        if settings.encoding and suffix in SETTING_SUFFIXES["encoding"]:
            plain = _transcode(plain, settings.encoding)
        try:
            first = next(plain, b"")
            reader = _choose_reader(suffix, first, settings)
        except TruncatedFileError as error:
            yield UnreadableRecord(source.name, 1, str(error))
        else:
            records = reader(FileContent(source.name, itertools.chain([first], plain), settings), config)
            yield from records if settings == SourceSettings() else column_mapping.apply_settings(records, settings)
        for _ in chunks:  # the digest covers bytes that the reader left unread
            pass
    if digest.hexdigest() != source.sha256:
        raise InputError(
            f"{source.uri} changed while it was read",
            hint="Rerun the command when the file is complete.",
        )


def _read_bytes(source: Source, update_digest: Callable[[bytes], object]) -> Generator[bytes, None, None]:
    """Yield a local or remote file's bytes, and pass them to `update_digest`."""
    if remote_files.is_remote(source.uri):
        for chunk in remote_files.read_chunks(source.uri, READ_BYTES):
            update_digest(chunk)
            yield chunk
        return
    try:
        file = source.path.open("rb")  # closed below; errors while reading are not translated
    except OSError as error:
        raise InputError(
            f"{source.uri} cannot be read: {error.strerror}",
            hint="Check that the file still exists and, on a cluster, that this step mounts its volume.",
        ) from None
    with file:
        while chunk := file.read(READ_BYTES):
            update_digest(chunk)
            yield chunk


def _decompress(chunks: Iterator[bytes], compression: str) -> Iterator[bytes]:
    """Decompress gzip members or zstd frames. Raises TruncatedFileError for damaged or truncated data."""
    import zstandard

    is_gzip = compression == ".gz"
    open_stream: Callable[[], Any] = zstandard.ZstdDecompressor().decompressobj
    if is_gzip:
        open_stream = functools.partial(zlib.decompressobj, wbits=31)
    stream, is_open = open_stream(), False
    for chunk in chunks:
        data = chunk
        while data:
            try:
                if is_gzip:
                    plain, data = stream.decompress(data, MAX_DECOMPRESSED_BYTES), stream.unconsumed_tail
                else:
                    plain, data = stream.decompress(data[:ZSTD_INPUT_BYTES]), data[ZSTD_INPUT_BYTES:]
            except (zlib.error, zstandard.ZstdError) as error:
                raise TruncatedFileError(f"the compressed data is damaged here: {error}") from None
            is_open = not stream.eof
            if stream.eof:  # zlib's unconsumed tail may repeat the unused data
                data = (stream.unused_data if is_gzip else stream.unused_data + data).lstrip(b"\0")
                stream = open_stream()
            if plain:
                yield plain
    if is_open:
        if plain := stream.flush():
            yield plain
        raise TruncatedFileError("the compressed file is truncated")


def _transcode(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Convert text to UTF-8. Bytes that are not in the encoding remain, so that their lines are reported.

    Raises:
        TruncatedFileError: the rest of the file is not in the encoding.
    """
    decoder = codecs.getincrementaldecoder(encoding)(errors="surrogateescape")
    try:
        for chunk in chunks:
            yield decoder.decode(chunk).encode(errors="surrogateescape")
        yield decoder.decode(b"", final=True).encode(errors="surrogateescape")
    except UnicodeError as error:
        raise TruncatedFileError(f"the rest of the file is not {encoding}: {error}") from None


def _choose_reader(suffix: str, first: bytes, settings: SourceSettings) -> Reader:
    """Return the reader for a file's suffix. Raises TruncatedFileError if the first bytes contradict the suffix."""
    reader = csv_reader.read_csv if settings.delimiter and suffix in SETTING_SUFFIXES["delimiter"] else READERS[suffix]
    if suffix == ".parquet" or suffix in BINARY_EXTRACTORS:
        return reader
    allowed = WEB_BYTE_ORDER_MARKS if suffix in WEB_SUFFIXES else ()
    magic = (text for mark, text in MAGIC_NUMBERS.items() if first.startswith(mark) and mark not in allowed)
    problem = next(magic, "")
    if not problem and suffix not in WEB_SUFFIXES:
        # UTF-16 without a byte-order mark has a zero in every other byte of Latin text. In binary data more than a
        # twentieth of the bytes are control characters that text does not use (among random bytes, a tenth). A few
        # stray bytes do not affect the file: only their lines are rejected.
        sample = first[:SAMPLE_BYTES]
        even, odd = sample[0::2].count(0), sample[1::2].count(0)
        if max(even, odd) > len(sample) / 10 and min(even, odd) < max(even, odd) / 10:
            problem = f"UTF-16{'LE' if odd > even else 'BE'} text, not UTF-8"
        elif len(sample) - len(sample.translate(None, delete=CONTROL_BYTES)) > len(sample) / 20:
            problem = "binary data, not text"
    if problem:
        raise TruncatedFileError(f"the file is {problem}; it is skipped")
    # Web archives often have the suffix .txt.
    is_archive = reader is read_text and first.lstrip().startswith(web_pages.WARC_MAGIC)
    return web_pages.read_archive if is_archive else reader


# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json_lines(content: FileContent, config: DataCurationConfig) -> Records:
    """Read a JSON object or string from each line."""
    for number, line in read_lines(content, config.max_line_bytes):
        if isinstance(line, MissingLine):
            yield UnreadableRecord(content.file, number, line.reason)
        elif line.strip():
            yield _parse_json_record(content.file, number, line)


def _parse_json_record(file: str, number: int, line: bytes) -> Record | UnreadableRecord:
    try:
        text = decode_line(line)
        value = JSON_DECODER.decode(text)
        check_depth(text, value)
        return _to_record(file, number, value)
    except json.JSONDecodeError as error:
        reason = f"invalid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    except RecursionError:
        reason = f"invalid JSON: {TOO_DEEP_MESSAGE}"
    except ValueError as error:
        reason = str(error) if "UTF-8" in str(error) else f"invalid JSON: {error}"
    return UnreadableRecord(file, number, reason)


def _to_record(file: str, number: int, value: object) -> Record | UnreadableRecord:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        return UnreadableRecord(
            file, number, f"a JSON value of type {type(value).__name__}; expected an object or a string"
        )
    return Record(file, number, value)


def read_json(content: FileContent, config: DataCurationConfig) -> Records:
    """Read a JSON array, an object or JSON lines. Of an invalid array, read the elements before the error.

    An object that is not a record, but holds a list of records under a key of WRAPPER_KEYS, is read like the list.
    """
    data, truncation = content.read_all()
    # Surrogates mark bytes that are not UTF-8, which are reported with their element.
    text = data.decode(errors="surrogateescape").removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        yield from _read_json_array(content.file, text, truncation, config.max_line_bytes)
        return
    try:
        array = _find_wrapped_array(text)
        is_one_value = True
    except (ValueError, RecursionError):
        array, is_one_value = "", False
    if array:
        yield from _read_json_array(content.file, array, truncation, config.max_line_bytes)
        return
    if is_one_value:
        yield _parse_json_record(content.file, 1, data)
    else:
        complete = data[: data.rfind(b"\n") + 1] if truncation else data
        yield from read_json_lines(FileContent(content.file, iter([complete])), config)
    if truncation:
        yield UnreadableRecord(content.file, data.count(b"\n") + 1, truncation)


def _find_wrapped_array(text: str) -> str:
    """Return the part of the text with the array of an object such as {"version": 1, "data": [...]}.

    Returns:
        The array as JSON; "" for any other value.

    Raises:
        ValueError: the text is not a JSON value.
        RecursionError: the value is nested too deep.
    """
    value = JSON_DECODER.decode(text)
    if not isinstance(value, dict) or record_formats.is_record(value):
        return ""
    wrappers = [key for key, inner in value.items() if key.lower() in WRAPPER_KEYS and isinstance(inner, list)]
    if len(wrappers) != 1 or not all(isinstance(element, dict | str) for element in value[wrappers[0]]):
        return ""
    array, position = "", _skip_characters(text, text.index("{") + 1, JSON_SPACE)
    while text[position] != "}":
        key, end = JSON_DECODER.raw_decode(text, position)
        position = _skip_characters(text, end, JSON_SPACE + ":")
        _, end = JSON_DECODER.raw_decode(text, position)
        if key == wrappers[0]:
            array = text[position:end]
        position = _skip_characters(text, end, JSON_SPACE + ",")
    return array


def _read_json_array(file: str, text: str, truncation: str, max_bytes: int) -> Records:
    """Yield the elements of one or several consecutive arrays."""
    position, number = text.index("[") + 1, 0
    while True:
        position = _skip_characters(text, position, JSON_SPACE + ",")
        if text[position : position + 1] == "]":
            position = _skip_characters(text, position + 1, JSON_SPACE)
            if position == len(text):
                if truncation:
                    yield UnreadableRecord(file, number + 1, truncation)
                return
            if text[position] != "[":
                reason = "the array is followed by other content, which is skipped"
                yield UnreadableRecord(file, number + 1, reason)
                return
            position += 1
            continue
        number += 1
        try:
            value, end = JSON_DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            problem = TOO_DEEP_MESSAGE if isinstance(error, RecursionError) else error
            reason = f"invalid JSON: {problem}; the rest of the array is skipped"
            yield UnreadableRecord(file, number, truncation or reason)
            return
        element = text[position:end].encode(errors="surrogateescape")
        try:
            if len(element) > max_bytes:
                raise ValueError(too_long_message(max_bytes))
            check_depth(decode_line(element), value)
            yield _to_record(file, number, value)
        except ValueError as error:
            yield UnreadableRecord(file, number, str(error))
        position = end


def _skip_characters(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


# --- tables, texts and web pages --------------------------------------------------------------------------------------


def read_parquet(content: FileContent, config: DataCurationConfig) -> Records:
    """Read the rows of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    data, truncation = content.read_all()
    number = 0
    try:
        for batch in parquet.ParquetFile(pyarrow.BufferReader(data)).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(content.file, number, {name: to_json_value(value) for name, value in row.items()})
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield UnreadableRecord(content.file, number + 1, truncation or f"unreadable Parquet: {error}")


def to_json_value(value: object) -> object:
    """Convert a Parquet value to a JSON value: NaN and infinity become null, dates and decimals become text."""
    if isinstance(value, dict):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def read_text(content: FileContent, config: DataCurationConfig) -> Records:
    """Read a text file by section, by line, by paragraph (a block between blank lines) or as a whole."""
    unit: str = config.text_unit
    is_markdown = file_suffix(Path(content.file)) == ".md"
    if unit == "auto":
        sample, content = content.take_sample(READ_BYTES)
        is_document = is_markdown or document_blocks.is_hard_wrapped(sample.decode(errors="replace"))
        unit = "section" if is_document else "line"
    if unit == "section" and is_markdown:
        yield from document_reader.read_document(content, config)
    elif unit == "section":
        paragraphs = _read_lines_or_paragraphs(content, "paragraph", config.max_line_bytes)
        yield from document_reader.read_paragraphs(content.file, paragraphs, config)
    elif unit == "file":
        data, truncation = content.read_all()
        if data or not truncation:
            yield _to_text_record(content.file, 1, data)
        if truncation:
            yield UnreadableRecord(content.file, data.count(b"\n") + 1, truncation)
    else:
        yield from _read_lines_or_paragraphs(content, unit, config.max_line_bytes)


def _read_lines_or_paragraphs(content: FileContent, unit: str, max_bytes: int) -> Records:
    block, size, first = list[bytes](), 0, 1
    for number, line in read_lines(content, max_bytes):
        if isinstance(line, MissingLine):
            yield UnreadableRecord(content.file, number, line.reason)
        elif line.strip():
            first = first if block else number
            block, size = append_bounded(block, size, b"\n" + line if block else line, max_bytes)
        if block and (unit == "line" or isinstance(line, MissingLine) or not line.strip()):
            yield _to_text_record(content.file, first, join_line(block, size, max_bytes))
            block, size = [], 0
    if block:
        yield _to_text_record(content.file, first, join_line(block, size, max_bytes))


def _to_text_record(file: str, number: int, data: bytes | MissingLine) -> Record | UnreadableRecord:
    if isinstance(data, MissingLine):
        return UnreadableRecord(file, number, data.reason)
    try:
        return Record(file, number, {"text": decode_line(data)})
    except ValueError as error:
        return UnreadableRecord(file, number, str(error))


def read_page(content: FileContent, config: DataCurationConfig) -> Records:
    """Read an HTML file as one record, or with text_unit: section as a document."""
    read = document_reader.read_document if config.text_unit == "section" else web_pages.read_html
    return read(content, config)


# The suffixes of the files to which a setting of a source applies.
CSV_SUFFIXES, PLAIN_SUFFIXES = {".csv", ".text", ".tsv", ".txt"}, {".json", ".jsonl", ".md", ".ndjson"}
SETTING_SUFFIXES = {
    "delimiter": CSV_SUFFIXES,
    "encoding": CSV_SUFFIXES | PLAIN_SUFFIXES,
    "sheet": set(SPREADSHEET_EXTRACTORS),
}
READERS: dict[str, Reader] = {
    ".csv": csv_reader.read_csv,
    ".docx": document_reader.read_document,
    ".epub": document_reader.read_document,
    ".htm": read_page,
    ".html": read_page,
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".md": read_text,
    ".ndjson": read_json_lines,
    ".ods": document_reader.read_spreadsheet,
    ".parquet": read_parquet,
    ".pdf": document_reader.read_document,
    ".pptx": document_reader.read_document,
    ".text": read_text,
    ".tsv": functools.partial(csv_reader.read_csv, delimiter="\t"),
    ".txt": read_text,
    ".warc": web_pages.read_archive,
    ".wet": web_pages.read_archive,
    ".xls": document_reader.read_spreadsheet,
    ".xlsx": document_reader.read_spreadsheet,
}
