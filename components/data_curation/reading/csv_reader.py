"""Reader for CSV, also with semicolons, and TSV. After an invalid record, reading resumes at the second line of that record."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.common.runtime.counts import format_count
from components.data_curation.reading.file_lines import FileContent, MissingLine, read_lines
from components.data_curation.reading.raw_records import (
    Record,
    UnreadableRecord,
    parse_json,
    quote_name,
    too_long_message,
)

if TYPE_CHECKING:
    from components.data_curation.config import DataCurationConfig

MAX_CSV_RECORD_LINES = 20_000
MAX_REREADS_PER_LINE = 8  # average per line of a file with unclosed quotes

CSV_DELIMITERS = b",;\t"  # spreadsheets write semicolons where the comma is the decimal sign
SEPARATOR_LINE = re.compile(rb'"?sep=([^\w\s"\x80-\xff]|\t)"?\r?', re.IGNORECASE)  # Excel's first line
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
QUOTED_CELL = re.compile(rb'"[^"]*"?')
NumberedLine = tuple[int, bytes | MissingLine]


def read_csv(
    content: FileContent, config: DataCurationConfig, delimiter: str = ""
) -> Iterator[Record | UnreadableRecord]:
    """Yield the rows below the header line.

    Args:
        content: the file.
        config: the stage's configuration.
        delimiter: separates the cells unless the source states a delimiter; "" for the most frequent of comma, semicolon and
            tab in the header line. Excel's line `sep=;` above the header takes precedence.
    """
    rows = _read_rows(content, config.max_line_bytes, content.settings.delimiter or delimiter)
    header = next(rows, None)
    if header is None:
        return
    names = name_columns(header.cells)
    if reason := header.reason or _check_utf8(names) or find_repeated_column(names):
        has_rows = next(rows, None) is not None
        reason = f"{reason}; the rows below this header are skipped" if has_rows else reason
        yield UnreadableRecord(content.file, header.first, reason)
        return
    for row in rows:
        width = (
            f"{format_count(len(row.cells), 'field')}; the header has {len(names)}"
            if len(row.cells) != len(names)
            else ""
        )
        if reason := row.reason or _check_utf8(row.cells) or width:
            lines = f"lines {row.first} to {row.last}: " if row.last > row.first else ""
            yield UnreadableRecord(content.file, row.first, lines + reason)
        else:
            cells = {name: parse_cell(cell) for name, cell in zip(names, row.cells, strict=True)}
            yield Record(content.file, row.first, cells)


def _check_utf8(cells: Sequence[str]) -> str:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError as error:  # U+DC80 to U+DCFF mark the bytes 0x80 to 0xff
        return f"not UTF-8: byte 0x{ord(error.object[error.start]) - 0xDC00:02x}"
    return ""


def name_columns(header: Sequence[str]) -> list[str]:
    """Return the names of the columns; an empty name becomes `column` with its number."""
    return [name.strip() or f"column {number}" for number, name in enumerate(header, 1)]


def find_repeated_column(names: Sequence[str]) -> str:
    """Return the reason for a header with a repeated name; "" if the names are unique."""
    repeated = (name for name, count in Counter(names).items() if count > 1)
    return next((f"the header contains the column {quote_name(name)} more than once" for name in repeated), "")


def parse_cell(cell: str) -> Any:
    """Parse a cell that contains a JSON list of objects (messages, tools); return any other cell as text."""
    if not cell.startswith(("[{", "[ {")):
        return cell
    try:
        return parse_json(cell)
    except ValueError:
        return cell


@dataclass(frozen=True)
class _CsvRow:
    """The cells of a row and the lines that it spans, or the reason that it cannot be read."""

    first: int
    last: int
    cells: list[str]
    reason: str = ""


def _read_rows(content: FileContent, max_bytes: int, delimiter: str) -> Iterator[_CsvRow]:
    csv.field_size_limit(max_bytes + 1)  # the csv module counts the line feed too
    numbered = read_lines(content, max_bytes)
    start = list(itertools.islice(itertools.dropwhile(_is_blank, numbered), 1))
    if separator := _find_separator(start):
        start, delimiter = [], separator
    lines = _CsvLines(itertools.chain(start, numbered), max_bytes)
    reader = csv.reader(lines, delimiter=delimiter or _choose_delimiter(start), strict=True)
    while True:
        try:
            row = lines.finish_row(next(reader))
        except StopIteration:
            return
        except csv.Error as error:
            row = lines.reject_row(error)
        if row.cells or row.reason:
            yield row


def _is_blank(numbered: NumberedLine) -> bool:
    _, line = numbered
    return isinstance(line, bytes) and not line.removeprefix(BYTE_ORDER_MARK).strip(b" \r")


def _find_separator(start: Sequence[NumberedLine]) -> str:
    """Return the delimiter that Excel's line `sep=;` sets; "" for any other line."""
    lines = (line.removeprefix(BYTE_ORDER_MARK) for _, line in start if isinstance(line, bytes))
    return next((match[1].decode() for line in lines if (match := SEPARATOR_LINE.fullmatch(line))), "")


def _choose_delimiter(start: Sequence[NumberedLine]) -> str:
    """Return the delimiter that is most frequent outside the quoted cells of the header line."""
    header = b"".join(QUOTED_CELL.sub(b"", line) for _, line in start if isinstance(line, bytes))
    return chr(max(CSV_DELIMITERS, key=header.count))


class _CsvLines:
    """Iterator over a file's lines for the csv module, which holds the lines of a record until it is complete.

    An unclosed quote extends a record over the rows below it. Therefore only the first line of an invalid record is
    rejected, and the other lines are read again. After MAX_REREADS_PER_LINE rereads per line of the file, a record
    that is read again must end on its first line. This bounds the work on files with many unclosed quotes.
    """

    def __init__(self, lines: Iterator[NumberedLine], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._new_lines = lines
        self._reread_lines: deque[NumberedLine] = deque()
        self._record: list[NumberedLine] = []
        self._size = 0
        self._lines_read = self._lines_reread = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if not self._reread_lines:
            self._lines_read += 1
            number, line = next(self._new_lines)
        else:
            self._lines_reread += 1
            limit = MAX_REREADS_PER_LINE * max(self._lines_read, MAX_CSV_RECORD_LINES)
            if self._record and self._lines_reread > limit:
                raise csv.Error("the quoted field is not closed on this line")
            number, line = self._reread_lines.popleft()
        if isinstance(line, MissingLine):
            text = '"\n' if line.has_odd_quotes else "\n"
        else:  # surrogates mark bytes that are not UTF-8; `_check_utf8` reports them
            text = line.decode("utf-8-sig" if number == 1 else "utf-8", errors="surrogateescape") + "\n"
        self._record.append((number, line))
        self._size += len(line) + 1 if isinstance(line, bytes) else 1
        if self._size > self._max_bytes + 1:
            raise csv.Error(too_long_message(self._max_bytes))
        if len(self._record) > MAX_CSV_RECORD_LINES:
            raise csv.Error(f"more than {MAX_CSV_RECORD_LINES:,} lines")
        return text

    def finish_row(self, cells: list[str]) -> _CsvRow:
        """Return the row that the held lines contain."""
        record = self._take_record()
        reason = next((line.reason for _, line in record if isinstance(line, MissingLine)), "")
        return _CsvRow(record[0][0], record[-1][0], cells, reason)

    def reject_row(self, error: csv.Error) -> _CsvRow:
        """Reject the first held line and read the others again; reject all of them if the file is truncated."""
        (number, line), *others = self._take_record()
        if others and isinstance(end := others[-1][1], MissingLine) and end.is_file_end:
            return _CsvRow(number, others[-1][0], [], end.reason)
        self._reread_lines.extendleft(reversed(others))
        if isinstance(line, MissingLine):
            reason = line.reason
        elif others:
            reason = f"invalid CSV: a quote opened here is not closed correctly: {error} in line {others[-1][0]}"
        else:
            reason = f"invalid CSV: {error}"
        return _CsvRow(number, number, [], reason)

    def _take_record(self) -> list[NumberedLine]:
        record, self._record, self._size = self._record, [], 0
        return record
