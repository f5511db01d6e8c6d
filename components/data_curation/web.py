"""Web pages: the main text of HTML, and the pages of WARC and WET archives as they stream by.

Of an archive, every record that claims to be a document (response, resource, conversion) becomes a record or an Unread; those that
only describe the crawl (warcinfo, request, metadata, revisit) are its envelope and no rows. The records are those of ISO 28500 (WARC 1.1).
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
from typing import Any

from components.data_curation.records import BrokenOffError, Record, Unread, shown

BEGINNING = b"WARC/"  # of every record of an archive
FIRST_LINE = re.compile(rb"WARC/\d\.\d+[ \t]*\r?\n")
VERSIONS = (b"WARC/1.0", b"WARC/1.1", b"WARC/0.17", b"WARC/0.18")
LONGEST_HEADER = 64 * 1024  # bytes of a record's headers; longer ones are damage
PIECE = 64 * 1024  # bytes read at once of what is passed over
HTML_TYPES = ("text/html", "application/xhtml+xml")
WAT = "a WAT file, which holds a crawl's metadata and no text; nothing of it is read"
CUT = "the file ends in the middle of this record"
SAMPLE = 4096  # characters from which binary data is recognised, as of text files
CONTROL = dict.fromkeys(character for character in range(32) if character not in b"\t\n\v\f\r\x1b")
NO_TEXT_IN = ["//nav", "//footer", "//script", "//noscript", "//template"]  # where nothing else is found, these would be taken for the text
NO_TEXT = "no main text was found in the page"

# The encodings of the WHATWG Encoding Standard (https://encoding.spec.whatwg.org/#names-and-labels) by Python's names; those in which pages
# are labelled by an older name are read by the one that browsers take. Python knows more, which no page should be able to ask for.
BROWSERS_READ = {
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
    *BROWSERS_READ.values(),
    *(f"cp{number}" for number in (866, 932, 949, *range(1250, 1259))),
    *(f"iso8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)),
    *("utf-8", "utf-16-le", "utf-16-be", "euc_jp", "iso2022_jp", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic"),
}
MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
META = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([-\w:.]{2,40})""", re.IGNORECASE)
META_WITHIN = 4096  # bytes; the HTML standard looks at 1,024, and pages stray
CHARSET = re.compile(r"""charset\s*=\s*["']?([-\w:.]{2,40})""", re.IGNORECASE)
MARKUP = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)
RULE = re.compile(r":?-{3,}:?")
DAMAGED = 0.001  # share of characters that may be unreadable in a declared encoding before it is taken for a wrong one


# --- HTML -------------------------------------------------------------------------------------------------------------------------


def page(file: str, data: bytes) -> Record | Unread | None:
    """The page that a file of HTML is; None of an empty file."""
    return _page(file, 1, data, form="html") if data else None


def too_long(longest: int) -> str:
    """Why a page, a record or a line is not read."""
    return f"longer than the {longest:,} bytes of data_curation.max_line_bytes"


def _page(file: str, number: int, data: bytes, *, form: str, charset: str = "", url: str = "") -> Record | Unread:
    source = decoded(data, charset)
    sample = source[:SAMPLE]
    if len(sample) - len(sample.translate(CONTROL)) > len(sample) / 20:
        return Unread(file, number, "binary data, not a page")
    text, title = main_text(source, url)
    if not text:
        return Unread(file, number, NO_TEXT)
    return Record(file, number, _fields(text, url, title), form)


def _fields(text: str, url: str, title: str = "") -> dict[str, Any]:
    return {"text": text, **({"url": url} if url else {}), **({"title": title} if title else {})}


def main_text(html: str, url: str = "") -> tuple[str, str]:
    """The text of a page without navigation, boilerplate and markup, a block a line, and its title; "" for what is not there."""
    extractor = _extractor()
    whole = html.replace("\0", "")
    try:
        tree = extractor.load_html(whole)
        if tree is None:  # a fragment, which would be refused as no document
            tree = extractor.load_html(f"<html><body><div>{whole}</div></body></html>")
        if tree is None:
            return "", ""
        title = " ".join((tree.findtext(".//title") or "").split())
        return _without_bars(extractor.extract(tree, url=url or None, include_comments=False, prune_xpath=NO_TEXT_IN) or ""), title
    except Exception:  # of a parser that meets the whole web: a page on which it stumbles is one page, not the end of a run
        return "", ""


def _without_bars(text: str) -> str:
    """A table's rows, which come as | a | b |, without the frame, empty cells and the rule under the head."""
    lines = []
    for line in text.strip().splitlines():
        if line.startswith("|") and line.rstrip().endswith("|"):
            cells = [cell for cell in (part.strip() for part in line.split("|")) if cell and not RULE.fullmatch(cell)]
            lines += [" | ".join(cells)] if cells else []
        else:
            lines.append(line)
    return "\n".join(lines)


@cache
def _extractor() -> Any:
    import trafilatura

    for name in ("trafilatura", "charset_normalizer", "htmldate", "justext"):
        logging.getLogger(name).addHandler(logging.NullHandler())  # what they make of a page is said in the quarantine
    return trafilatura


def decoded(data: bytes, charset: str = "") -> str:
    """The text of a page: by its byte-order mark, as UTF-8 where it is that, by the encoding that the server (`charset`) or the page
    declares where most of it can be read so, and else by the encoding it looks like."""
    for mark, name in MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(name, errors="replace")
    if (text := _utf_8(data)) is not None:
        return text
    meta = META.search(data, 0, META_WITHIN)
    for label in (charset, meta[1].decode("ascii", "replace") if meta else ""):
        if (text := _as_declared(data, label)) is not None:
            return text
    return _as_it_looks(data)


def _utf_8(data: bytes) -> str | None:
    """The text where the bytes are UTF-8 and say so by more than ASCII, of which other encodings make use too."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data)  # a character cut at the very end is left out
    except UnicodeDecodeError:
        return None
    return None if text.isascii() else text


def _as_declared(data: bytes, label: str) -> str | None:
    """The text in the encoding of this name, unless there is none, or it leaves too much unreadable."""
    try:
        name = codecs.lookup(label).name if label else ""
    except LookupError:
        return None
    name = BROWSERS_READ.get(name, name)
    if name not in ENCODINGS:
        return None
    text = data.decode(name, errors="replace")
    return text if text.count("\ufffd") <= DAMAGED * len(text) else None


def _as_it_looks(data: bytes) -> str:
    if data.isascii():
        return data.decode("ascii")
    import charset_normalizer

    best = charset_normalizer.from_bytes(data[: 1 << 17]).best()
    name = BROWSERS_READ.get(best.encoding, best.encoding) if best else "utf-8"
    return data.decode(name, errors="replace")


# --- archives ---------------------------------------------------------------------------------------------------------------------


class _Stream:
    """Chunks as the file that warcio reads. A line is given in parts where it is longer than any header."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._piece = io.BytesIO()

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0 and (part := self._piece.read(size) or (self._piece.read(size) if self._next() else b"")):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def readline(self, size: int | None = None) -> bytes:
        left = LONGEST_HEADER if size is None else min(size, LONGEST_HEADER)
        line = b""
        while left > 0 and not line.endswith(b"\n"):
            part = self._piece.readline(left) or (self._piece.readline(left) if self._next() else b"")
            if not part:
                break
            line += part
            left -= len(part)
        return line

    def give_back(self, line: bytes) -> None:
        """Let a line that was read be read again."""
        self._piece = io.BytesIO(line + self._piece.read())

    def _next(self) -> bool:
        """Go on to the next chunk that holds anything."""
        for chunk in self._chunks:
            if chunk:
                self._piece = io.BytesIO(chunk)
                return True
        return False


class _NotReadError(Exception):
    """Why a record of an archive gives no text."""


class _WatError(Exception):
    """The archive is a WAT file."""


@dataclass(frozen=True)
class _Entry:
    """A whole record: its type, its address, what it says of its content, its body, and HTTP's status and headers of a response."""

    kind: str
    url: str
    content_type: str
    body: bytes
    http: Any = None


def archive(file: str, chunks: Iterator[bytes], longest: int) -> Iterator[Record | Unread]:
    """The documents of a WARC or WET archive, numbered as its records are from 1.

    A record is held whole, up to `longest` bytes. After damage reading goes on at the next record; where the file ends in the middle,
    what came before has been given.
    """
    stream, number = _Stream(chunks), 0
    try:
        while line := _to_record(stream):
            number += 1
            try:
                found = _document(file, number, _entry(stream, line, longest))
            except _NotReadError as error:
                found = Unread(file, number, str(error))
            if found is not None:
                yield found
    except _WatError:
        yield Unread(file, number, f"the file is {WAT}")
    except BrokenOffError as error:
        yield Unread(file, number + 1 if number == 0 else number, str(error))


def _to_record(stream: _Stream) -> bytes:
    """The first line of the next record, or of what stands in its place; b"" at the end."""
    line = stream.readline()
    while line and not line.strip():
        line = stream.readline()
    return line


def _entry(stream: _Stream, first: bytes, longest: int) -> _Entry:
    """The record that begins with this line. Raises _NotReadError when it is damaged, cut off or too long; the stream is then after it.

    A file whose lines end in line feeds only went through something that takes it for text: its records' lengths hold no longer, and
    each goes to where the next begins.
    """
    from warcio.statusandheaders import StatusAndHeadersParser

    if first.strip() not in VERSIONS:
        raise _damaged(stream, f"no record begins here, but {shown(first.decode(errors='replace'))}")
    headers = StatusAndHeadersParser([version.decode() for version in VERSIONS]).parse(_head(stream, first))
    if not first.endswith(b"\r\n"):
        return _entry_of(headers, *_up_to_the_next(stream, longest), longest)
    length = (headers.get_header("Content-Length") or "").strip()
    if not (length.isascii() and length.isdigit()):
        raise _damaged(stream, "a record that does not say how long it is")
    body = stream.read(min(int(length), longest + 1))
    missing = int(length) - len(body)
    while missing and (passed := len(stream.read(min(missing, PIECE)))):
        missing -= passed
    if missing:
        raise _NotReadError(CUT)
    return _entry_of(headers, body, int(length), longest)


def _head(stream: _Stream, first: bytes) -> io.BytesIO:
    """A record's headers, to the empty line after them or as far as any headers go."""
    head, line = io.BytesIO(), first
    while line.strip() and head.tell() < LONGEST_HEADER:
        head.write(line)
        line = stream.readline()
    head.write(line)
    head.seek(0)
    return head


def _damaged(stream: _Stream, what: str) -> _NotReadError:
    """Pass over what is damaged, up to the next record; what the damage is called then."""
    _, passed = _up_to_the_next(stream, 0)
    return _NotReadError(f"{what}; {passed:,} bytes up to the next record are passed over")


def _up_to_the_next(stream: _Stream, longest: int) -> tuple[bytes, int]:
    """What stands before the next record's first line, or the file's end, as far as `longest`, and how many bytes it is in all."""
    held, passed = io.BytesIO(), 0
    while (line := stream.readline()) and not FIRST_LINE.fullmatch(line):
        passed += len(line)
        if passed <= longest:
            held.write(line)
    stream.give_back(line)
    return held.getvalue(), passed


def _entry_of(headers: Any, body: bytes, length: int, longest: int) -> _Entry:
    kind, content_type = headers.get_header("WARC-Type") or "", _plain_type(headers.get_header("Content-Type"))
    if length > longest and kind in DOCUMENTS:
        raise _NotReadError(too_long(longest))
    url = (headers.get_header("WARC-Target-URI") or "").strip().removeprefix("<").removesuffix(">")
    if kind != "response" or content_type != "application/http":
        return _Entry(kind, url, content_type, body)
    return _Entry(kind, url, content_type, *_http(body))


def _http(body: bytes) -> tuple[bytes, Any]:
    """What the server sent after its headers, and its status and headers."""
    from warcio.statusandheaders import StatusAndHeadersParser

    answer = io.BytesIO(body)
    try:
        headers = StatusAndHeadersParser(["HTTP/"], verify=False).parse(answer)
    except EOFError:
        raise _NotReadError("an empty answer of the server") from None
    return answer.read(), headers


def _plain_type(value: str | None) -> str:
    """text/html of "text/html; charset=UTF-8"."""
    return (value or "").partition(";")[0].strip().lower()


DOCUMENTS = ("conversion", "continuation", "resource", "response")


def _document(file: str, number: int, entry: _Entry) -> Record | Unread | None:
    """What a record of an archive says; None of the envelope. Raises _NotReadError, and _WatError for a WAT file's metadata."""
    if entry.kind == "metadata" and entry.content_type == "application/json":
        raise _WatError
    if entry.kind not in DOCUMENTS or entry.url.startswith("metadata:"):  # wget's own logs are resources of that scheme
        return None
    if entry.kind == "continuation":
        raise _NotReadError("a part of a record that was cut into several, which are not joined")
    if entry.kind == "conversion":
        return _converted(file, number, entry)
    if entry.http is None:
        return _of_type(file, number, entry, entry.content_type, "", entry.body)
    return _response(file, number, entry)


def _converted(file: str, number: int, entry: _Entry) -> Record:
    """A text that somebody has taken out of a page already, as in WET files."""
    if entry.content_type != "text/plain":
        raise _NotReadError(f"a conversion to {entry.content_type or 'an unknown type'}, not to text")
    try:
        text = entry.body.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise _NotReadError(f"not UTF-8: byte 0x{entry.body[error.start]:02x} at position {error.start}") from None
    if not text:
        raise _NotReadError("a conversion without any text")
    return Record(file, number, _fields(text, entry.url), "wet")


def _response(file: str, number: int, entry: _Entry) -> Record | Unread:
    status = entry.http.get_statuscode()
    if status != "200":
        raise _NotReadError(f"the server answered {shown(status)}, not with the page" if status else "an answer without a status")
    content_type = entry.http.get_header("Content-Type") or ""
    charset = CHARSET.search(content_type)
    return _of_type(file, number, entry, _plain_type(content_type), charset[1] if charset else "", _unpacked(entry))


def _unpacked(entry: _Entry) -> bytes:
    """The body as it was before the server chunked and compressed it; as it stands where a crawler has undone that already."""
    body, encoding = entry.body, (entry.http.get_header("Content-Encoding") or "").strip().lower()
    if (entry.http.get_header("Transfer-Encoding") or "").strip().lower() == "chunked":
        from warcio.bufferedreaders import ChunkedDataReader

        body = ChunkedDataReader(io.BytesIO(body)).read()
    if encoding in ("gzip", "x-gzip") and body.startswith(b"\x1f\x8b"):
        return _inflated(body, 31)
    if encoding == "deflate" and body[:1] == b"\x78":
        return _inflated(body, 15)
    if encoding in ("br", "zstd") and not _is_markup(body):
        raise _NotReadError(f"a body compressed with {encoding}, which is not read")
    return body


def _inflated(body: bytes, wbits: int) -> bytes:
    inflater = zlib.decompressobj(wbits=wbits)
    try:
        plain = inflater.decompress(body, LARGEST_PAGE)
    except zlib.error as error:
        raise _NotReadError(f"its compressed body is damaged: {error}") from None
    if not inflater.eof and not inflater.unconsumed_tail:
        raise _NotReadError("its compressed body breaks off: its end is missing")
    if inflater.unconsumed_tail:
        raise _NotReadError(f"its compressed body holds more than {LARGEST_PAGE:,} bytes")
    return plain


LARGEST_PAGE = 50_000_000  # bytes of a page once it is unpacked: beyond any page, and below what a crafted one could swell to


def _of_type(file: str, number: int, entry: _Entry, content_type: str, charset: str, body: bytes) -> Record | Unread:
    """A body by what it is said to be, and where nothing is said by how it begins."""
    if not body.strip():
        raise _NotReadError("an empty page")
    if content_type in HTML_TYPES or (not content_type and _is_markup(body)):
        return _page(file, number, body, form="warc", charset=charset, url=entry.url)
    if content_type == "text/plain":
        return Record(file, number, _fields(decoded(body, charset).strip(), entry.url), "warc")
    raise _NotReadError(f"{content_type or 'content of an unknown type'}, not a page of text")


def _is_markup(body: bytes) -> bool:
    return MARKUP.match(body[:PIECE].removeprefix(b"\xef\xbb\xbf")) is not None
