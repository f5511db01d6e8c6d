"""Web pages: the main text of HTML, and the pages of WARC and WET archives as a stream.

Every document of an archive (response, resource, conversion) becomes a record or an unreadable record. Records that
describe the crawl (warcinfo, request, metadata, revisit) are skipped. The format is ISO 28500 (WARC 1.1).
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from components.data_curation.reading.file_lines import FileContent, append_bounded, decode_line
from components.data_curation.reading.raw_records import (
    Record,
    TruncatedFileError,
    UnreadableRecord,
    quote_name,
    too_long_message,
)

if TYPE_CHECKING:
    from components.data_curation.config import DataCurationConfig

WARC_MAGIC = b"WARC/"  # every record of an archive begins with it
WARC_VERSION_LINE = re.compile(rb"WARC/\d\.\d+[ \t]*\r?\n")
WARC_VERSIONS = (b"WARC/1.0", b"WARC/1.1", b"WARC/0.17", b"WARC/0.18")
DOCUMENT_TYPES = ("conversion", "continuation", "resource", "response")
MAX_HEADER_BYTES = 64 * 1024  # a record with longer headers is damaged
SKIP_BYTES = 64 * 1024  # per read while skipping
MAX_PAGE_BYTES = 50_000_000  # of a decompressed page; protects against decompression bombs
HTML_TYPES = ("text/html", "application/xhtml+xml")
WAT_MESSAGE = "a WAT file, which contains crawl metadata but no text; it is skipped"
SAMPLE_CHARACTERS = 4096  # examined for binary data, as in text files
CONTROL_CHARACTERS = dict.fromkeys(character for character in range(32) if character not in b"\t\n\v\f\r\x1b")
MENU_ANCESTORS = "ancestor::nav | ancestor::aside | ancestor::footer | ancestor::form"
# Removed first: trafilatura would return them if it finds no other text.
PRUNED_ELEMENTS = ["//nav", "//footer", "//script", "//noscript", "//template"]

# The encodings of the WHATWG Encoding Standard (https://encoding.spec.whatwg.org/#names-and-labels) by Python's names.
# Legacy labels map to the encodings that browsers use. Python's other encodings are ignored.
BROWSER_ENCODINGS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
ENCODINGS = {
    *BROWSER_ENCODINGS.values(),
    *(f"cp{number}" for number in (866, 932, 949, *range(1250, 1259))),
    *(f"iso8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)),
    *("utf-8", "utf-16-le", "utf-16-be", "euc_jp", "iso2022_jp", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic"),
}
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([-\w:.]{2,40})""", re.IGNORECASE)
META_SEARCH_BYTES = 4096  # the HTML standard searches 1,024, but pages exceed that
CHARSET = re.compile(r"""charset\s*=\s*["']?([-\w:.]{2,40})""", re.IGNORECASE)
MARKUP = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
TABLE_RULE = re.compile(r":?-{3,}:?")
MAX_UNDECODABLE_SHARE = 0.001  # share of undecodable characters above which a declared encoding is wrong


# --- HTML -------------------------------------------------------------------------------------------------------------


def read_html(content: FileContent, config: DataCurationConfig) -> Iterator[Record | UnreadableRecord]:
    """Read the main text of an HTML file."""
    pieces: list[bytes] = []
    size, truncation = 0, ""
    try:
        for chunk in content.chunks:
            pieces, size = append_bounded(pieces, size, chunk, config.max_line_bytes)
    except TruncatedFileError as error:
        truncation = str(error)
    if size > config.max_line_bytes:
        yield UnreadableRecord(content.file, 1, too_long_message(config.max_line_bytes))
        return
    page = _parse_page(content.file, 1, b"".join(pieces), extracted_from="html") if size else None
    if isinstance(page, Record) or (page and not truncation):
        yield page
    if truncation:
        yield UnreadableRecord(content.file, 1, truncation)


def _parse_page(
    file: str, number: int, data: bytes, *, extracted_from: str, charset: str = "", url: str = ""
) -> Record | UnreadableRecord:
    html = decode_page(data, charset)
    sample = html[:SAMPLE_CHARACTERS]
    if len(sample) - len(sample.translate(CONTROL_CHARACTERS)) > len(sample) / 20:
        return UnreadableRecord(file, number, "binary data, not a page")
    text, title = extract_main_text(html, url, is_crawled=extracted_from != "html")
    if not text:
        return UnreadableRecord(file, number, "no main text was found in the page")
    return Record(file, number, _build_page_fields(text, url, title), extracted_from)


def _build_page_fields(text: str, url: str, title: str = "") -> dict[str, object]:
    return {"text": text, **({"url": url} if url else {}), **({"title": title} if title else {})}


def extract_main_text(html: str, url: str = "", *, is_crawled: bool = True) -> tuple[str, str]:
    """Return the main text of a page, one block per line, and its title; "" for a missing text or title."""
    text, title = _extract_main(html, url, "txt", is_crawled=is_crawled)
    lines = []
    for line in text.strip().splitlines():
        # Remove the outer bars, empty cells and header rules of table rows (| a | b |).
        if line.startswith("|") and line.rstrip().endswith("|"):
            cells = [cell for part in line.split("|") if (cell := part.strip()) and not TABLE_RULE.fullmatch(cell)]
            lines += [" | ".join(cells)] if cells else []
        else:
            lines.append(line)
    return "\n".join(lines), title


def extract_main_xml(html: str) -> tuple[str, str]:
    """Return the main text of a document as trafilatura's XML, and its title; "" for a missing text or title."""
    return _extract_main(html, "", "xml", is_crawled=False)


def _extract_main(html: str, url: str, output_format: str, *, is_crawled: bool) -> tuple[str, str]:
    trafilatura = _load_trafilatura()
    main_elements = trafilatura.xpaths.BODY_XPATH
    html = html.replace("\0", "")
    try:
        tree = trafilatura.load_html(html)
        if tree is None:  # trafilatura rejects fragments
            tree = trafilatura.load_html(f"<html><body><div>{html}</div></body></html>")
        if tree is None:
            return "", ""
        title = " ".join((tree.findtext(".//title") or "").split())
        # In a page without a main element, trafilatura finds paragraphs only. That suits a crawled page, whose other
        # elements are often menus. A document would lose its headings and lists, so its body is the main element.
        body = tree.find("body")
        found = [element for find in main_elements for element in find(tree) if not element.xpath(MENU_ANCESTORS)]
        if not is_crawled and body is not None and not found:
            main = tree.makeelement("article")
            main.text, body.text = body.text, None
            main.extend(list(body))
            body.append(main)
        text = trafilatura.extract(
            tree, url=url or None, include_comments=False, prune_xpath=PRUNED_ELEMENTS, output_format=output_format
        )
    except Exception:  # trafilatura raises various exceptions for malformed pages; skip only this page
        return "", ""
    return text or "", title


@cache
def _load_trafilatura() -> ModuleType:
    import trafilatura
    import trafilatura.xpaths

    for name in ("trafilatura", "charset_normalizer", "htmldate", "justext"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # the quarantine lists unreadable pages
    return trafilatura


def decode_page(data: bytes, charset: str = "") -> str:
    """Decode a page with the first encoding that applies.

    The order is: the encoding of the byte-order mark; UTF-8 if the bytes are valid; the encoding that the server or the
    page declares, if it decodes most of the page; the detected encoding.

    Args:
        data: the bytes of the page, or of its beginning.
        charset: the encoding that the server declares; "" if the server declares no encoding.
    """
    for mark, name in BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(name, errors="replace")
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)  # ignores an incomplete character at the end
        if not text.isascii():  # ASCII is also valid in encodings with shift sequences, such as ISO-2022-JP
            return text
    except UnicodeDecodeError:
        pass
    meta = META_CHARSET.search(data, 0, META_SEARCH_BYTES)
    for label in (charset, meta[1].decode("ascii", "replace") if meta else ""):
        try:
            name = codecs.lookup(label).name
        except LookupError:
            continue
        name = BROWSER_ENCODINGS.get(name, name)
        if name in ENCODINGS:
            text = data.decode(name, errors="replace")
            if text.count("\ufffd") <= MAX_UNDECODABLE_SHARE * len(text):
                return text
    if data.isascii():
        return data.decode("ascii")
    import charset_normalizer

    best = charset_normalizer.from_bytes(data[: 1 << 17]).best()
    return data.decode(BROWSER_ENCODINGS.get(best.encoding, best.encoding) if best else "utf-8", errors="replace")


# --- archives ---------------------------------------------------------------------------------------------------------


class _ByteStream:
    """File-like object over chunks of bytes, for warcio. `readline` splits lines longer than MAX_HEADER_BYTES."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._current = io.BytesIO()

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0 and (part := self._current.read(size) or (self._current.read(size) if self._advance() else b"")):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def readline(self, size: int | None = None) -> bytes:
        left = MAX_HEADER_BYTES if size is None else min(size, MAX_HEADER_BYTES)
        line = b""
        while left > 0 and not line.endswith(b"\n"):
            part = self._current.readline(left) or (self._current.readline(left) if self._advance() else b"")
            if not part:
                break
            line += part
            left -= len(part)
        return line

    def unread_line(self, line: bytes) -> None:
        """Put a line back into the stream."""
        self._current = io.BytesIO(line + self._current.read())

    def _advance(self) -> bool:
        for chunk in self._chunks:
            if chunk:
                self._current = io.BytesIO(chunk)
                return True
        return False


class _UnreadableRecordError(Exception):
    """A record of an archive contains no readable text."""


class _WatArchiveError(Exception):
    """The archive is a WAT file."""


@dataclass(frozen=True)
class _WarcRecord:
    """A complete record: its type, address, media type and body."""

    kind: str
    url: str
    content_type: str
    body: bytes


def read_archive(content: FileContent, config: DataCurationConfig) -> Iterator[Record | UnreadableRecord]:
    """Read the documents of a WARC or WET archive, numbered like its records from 1.

    Memory holds one record of up to `max_line_bytes`. After damage, reading resumes at the next record.
    """
    stream, file, number = _ByteStream(content.chunks), content.file, 0
    try:
        while line := stream.readline():
            if not line.strip():
                continue
            number += 1
            try:
                document = _parse_document(file, number, _read_warc_record(stream, line, config.max_line_bytes))
            except _UnreadableRecordError as error:
                document = UnreadableRecord(file, number, str(error))
            if document is not None:
                yield document
    except _WatArchiveError:
        yield UnreadableRecord(file, number, f"the file is {WAT_MESSAGE}")
    except TruncatedFileError as error:
        yield UnreadableRecord(file, max(number, 1), str(error))


def _read_warc_record(stream: _ByteStream, first: bytes, max_bytes: int) -> _WarcRecord:
    """Read the record that begins with this line. Raises _UnreadableRecordError if it is damaged or too long."""
    from warcio.statusandheaders import StatusAndHeadersParser

    if first.strip() not in WARC_VERSIONS:
        found = quote_name(first.decode(errors="replace"))
        raise _skip_damage(stream, f"expected the beginning of a record, found {found}")
    head, line = io.BytesIO(), first
    while line.strip() and head.tell() < MAX_HEADER_BYTES:
        head.write(line)
        line = stream.readline()
    head.write(line)
    head.seek(0)
    headers = StatusAndHeadersParser([version.decode() for version in WARC_VERSIONS]).parse(head)
    if first.endswith(b"\r\n"):
        body, length = _read_body(stream, (headers.get_header("Content-Length") or "").strip(), max_bytes)
    else:  # a text tool has changed the line ends, so the Content-Length is wrong
        body, length = _read_to_next_record(stream, max_bytes)
    kind, content_type = headers.get_header("WARC-Type") or "", _parse_media_type(headers.get_header("Content-Type"))
    if length > max_bytes and kind in DOCUMENT_TYPES:
        raise _UnreadableRecordError(too_long_message(max_bytes))
    url = (headers.get_header("WARC-Target-URI") or "").strip().removeprefix("<").removesuffix(">")
    return _WarcRecord(kind, url, content_type, body)


def _read_body(stream: _ByteStream, length_field: str, max_bytes: int) -> tuple[bytes, int]:
    """Read a body of the declared length; return at most its first `max_bytes` + 1 bytes, and its length."""
    if not (length_field.isascii() and length_field.isdigit()):
        found = quote_name(length_field) if length_field else "missing"
        raise _skip_damage(stream, f"the Content-Length is {found}; expected a number of bytes")
    length = int(length_field)
    body = stream.read(min(length, max_bytes + 1))
    missing = length - len(body)
    while missing and (skipped := len(stream.read(min(missing, SKIP_BYTES)))):
        missing -= skipped
    if missing:
        raise _UnreadableRecordError(f"the file ends after {length - missing:,} of {length:,} bytes of this record")
    return body, length


def _skip_damage(stream: _ByteStream, problem: str) -> _UnreadableRecordError:
    """Skip to the next record, and return the error."""
    _, skipped = _read_to_next_record(stream, 0)
    return _UnreadableRecordError(f"{problem}; skipped {skipped:,} bytes to the next record")


def _read_to_next_record(stream: _ByteStream, max_bytes: int) -> tuple[bytes, int]:
    """Read up to the next record or the end; return at most `max_bytes` of the bytes, and their total number."""
    held, length = io.BytesIO(), 0
    while (line := stream.readline()) and not WARC_VERSION_LINE.fullmatch(line):
        length += len(line)
        if length <= max_bytes:
            held.write(line)
    stream.unread_line(line)
    return held.getvalue(), length


def _parse_media_type(value: str | None) -> str:
    """Return text/html for "text/html; charset=UTF-8"."""
    return (value or "").partition(";")[0].strip().lower()


def _parse_document(file: str, number: int, record: _WarcRecord) -> Record | UnreadableRecord | None:
    """Return a record's document; None for a record that describes the crawl. Raises an error for other records."""
    if record.kind == "metadata" and record.content_type == "application/json":
        raise _WatArchiveError
    # wget stores its logs under the scheme metadata:.
    if record.kind not in DOCUMENT_TYPES or record.url.startswith("metadata:"):
        return None
    if record.kind == "continuation":
        raise _UnreadableRecordError("a segment of a record; segmented records are not supported")
    if record.kind == "conversion":
        return Record(file, number, _build_page_fields(_extract_conversion_text(record), record.url), "wet")
    content_type, charset, body = record.content_type, "", record.body
    if record.kind == "response" and content_type == "application/http":
        content_type, charset, body = _parse_response(body)
    if not body.strip():
        raise _UnreadableRecordError("an empty page")
    if content_type in HTML_TYPES or (not content_type and _is_markup(body)):
        return _parse_page(file, number, body, extracted_from="warc", charset=charset, url=record.url)
    if content_type == "text/plain":
        return Record(file, number, _build_page_fields(decode_page(body, charset).strip(), record.url), "warc")
    raise _UnreadableRecordError(f"{content_type or 'unknown media type'}; expected HTML or text/plain")


def _extract_conversion_text(record: _WarcRecord) -> str:
    """Return the extracted text of a page, as in WET files."""
    if record.content_type != "text/plain":
        raise _UnreadableRecordError(f"a conversion to {record.content_type or 'an unknown type'}; expected text/plain")
    try:
        text = decode_line(record.body).strip()
    except ValueError as error:
        raise _UnreadableRecordError(str(error)) from None
    if not text:
        raise _UnreadableRecordError("a conversion without any text")
    return text


def _parse_response(response: bytes) -> tuple[str, str, bytes]:
    """Return the media type, charset and decoded body of a successful HTTP response."""
    from warcio.bufferedreaders import ChunkedDataReader
    from warcio.statusandheaders import StatusAndHeadersParser

    stream = io.BytesIO(response)
    try:
        http = StatusAndHeadersParser(["HTTP/"], verify=False).parse(stream)
    except EOFError:
        raise _UnreadableRecordError("an empty HTTP response") from None
    status = http.get_statuscode()
    if status != "200":
        problem = f"HTTP status {quote_name(status)}; expected 200" if status else "an HTTP response without a status"
        raise _UnreadableRecordError(problem)
    header = http.get_header("Content-Type") or ""
    charset = CHARSET.search(header)
    encoding, transfer = (
        (http.get_header(f"{name}-Encoding") or "").strip().lower() for name in ("Content", "Transfer")
    )
    body = ChunkedDataReader(stream).read() if transfer == "chunked" else stream.read()
    if encoding in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
        body = _inflate(body, 31)
    elif encoding == "deflate" and body[:1] == b"\x78":
        body = _inflate(body, 15)
    elif encoding in ("br", "zstd") and not _is_markup(body):
        raise _UnreadableRecordError(f"unsupported Content-Encoding {encoding!r}; supported: gzip, deflate")
    return _parse_media_type(header), charset[1] if charset else "", body


def _inflate(body: bytes, wbits: int) -> bytes:
    inflater = zlib.decompressobj(wbits=wbits)
    try:
        plain = inflater.decompress(body, MAX_PAGE_BYTES)
    except zlib.error as error:
        raise _UnreadableRecordError(f"the compressed body is damaged: {error}") from None
    if inflater.unconsumed_tail:
        raise _UnreadableRecordError(f"the decompressed body is larger than {MAX_PAGE_BYTES:,} bytes")
    if not inflater.eof:
        raise _UnreadableRecordError("the compressed body is truncated")
    return plain


def _is_markup(body: bytes) -> bool:
    return MARKUP.match(body[:SKIP_BYTES].removeprefix(b"\xef\xbb\xbf")) is not None
