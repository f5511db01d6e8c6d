"""Text of PDF files: lines in reading order, joined to paragraphs, with headings by font size and ruled tables.

PDFium gives characters with positions, pdfplumber the cells of ruled tables. The other rules are here: columns, page
headers and footers, footnotes, and paragraphs that continue on the next page.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from components.data_curation.reading import ocr
from components.data_curation.reading.document_blocks import (
    SENTENCE_END,
    Block,
    DocumentInfo,
    Part,
    UnreadablePart,
    build_table,
)
from components.data_curation.reading.extraction_limits import (
    ENCRYPTED_MESSAGE,
    ExtractionSettings,
    UnreadableDocumentError,
    describe_excess,
)
from components.data_curation.reading.raw_records import NO_TEXT_REASON

if TYPE_CHECKING:
    import pdfplumber
    import pypdfium2
    from pypdfium2.raw import FS_RECTF

ROTATED_TEXT_OFFSET = 100_000.0  # points; more than the height of a page
MAX_CHARACTER_GAP = 1.5  # of the font size; a wider gap separates columns or cells
SAME_LINE_OVERLAP = 0.5  # share of the lower height
MIN_COLUMN_LINES = 4
MIN_COLUMN_CHARACTERS = 15  # mean of a column's lines; shorter lines are cells of a table
MAX_CROSSING_SHARE = 0.2  # of lines that cross the gap between two columns, such as titles
SIZE_STEP = 0.5  # points; font sizes are rounded to it
HEADING_RATIO = 1.15  # of the body's font size
MAX_HEADING_CHARACTERS, MAX_HEADING_LEVEL = 200, 6
FOOTNOTE_RATIO = 0.92  # of the body's font size
PARAGRAPH_GAP = 1.4  # of the usual distance between two lines
SHORT_LINE_SHARE = 0.85  # of the column's width; a shorter line that ends a sentence ends the paragraph
MARGIN_SHARE = 0.12  # of the page's height at its top and bottom, searched for headers and footers
MARGIN_STEP = 20.0  # points; equal positions on different pages
MIN_RECURRING_PAGES, MIN_RECURRING_SHARE = 3, 0.4  # headers of left and right pages may differ
MIN_TABLE_RULES = 3  # in each direction, of a table of two rows and two columns
RULE_THICKNESS = 3.0  # points
MIN_TABLE_TEXT_SHARE = 0.8  # of the characters within the rules
RECTANGLE_SEGMENTS = 5  # a path of more segments may contain a whole table
MAX_TABLE_PATHS = 3_000  # a page with more images and paths is a drawing and not searched for tables
MIN_OUTLINE_PATHS = 100  # a page without text, but with this number of path objects, may contain outlined text
LIST_MARKER = re.compile(r"(?:[•‣▪◦●○·–—*-]|\(?\d{1,2}[.)]|\(?[a-z][.)])\s+(?=\S)")
BULLET = re.compile(r"^[•‣▪◦●○·–—*-]\s+")
DOT_LEADER = re.compile(r"(?:\s?\.){6,}\s*(?:\d{1,4}|[ivxlc]{1,6})$")  # an entry of a table of contents
FOOTNOTE_MARK = re.compile(r"\s*(?:\d{1,3}|[*†‡§¹²³⁴-⁹]+|\[\d{1,3}\])\s*\S")
LINE_END_HYPHEN = re.compile(r"(?<=[^\W\d_])[-\u00ad\u2010\x02\ufffe]$")
HYPHEN_SIGNS = dict.fromkeys(map(ord, "\x02\ufffe\uffff"), "-") | {0xAD: "-"}
MarginKey = tuple[str, int, int]  # text without numbers, horizontal and vertical position


@dataclass
class _Line:
    """Text at a position on a page, in points from the lower left corner; or a table as Markdown."""

    text: str
    left: float
    bottom: float
    right: float
    top: float
    size: float
    is_table: bool = False
    cells: int = 1  # parts that wide gaps separate


@dataclass
class _Page:
    """The text of a page.

    Attributes:
        number: the number from 1.
        height: the height in points.
        lines: the lines in the order of the file.
        is_scanned: whether the page has an image, but no text.
        recognized: the blocks of a scanned page.
        columns: the lines in reading order, by column.
        notes: the lines of the footnotes.
    """

    number: int
    height: float
    lines: list[_Line]
    is_scanned: bool = False
    recognized: list[Block] = field(default_factory=list)
    columns: list[list[_Line]] = field(default_factory=list)
    notes: list[_Line] = field(default_factory=list)


def extract_pdf(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the blocks of a PDF file, and its pages without text."""
    import pdfplumber
    import pypdfium2

    with path.open("rb") as file:
        if b"%PDF-" not in file.read(1024):
            raise UnreadableDocumentError("not a .pdf file: it does not begin with %PDF-")
    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        problem = ENCRYPTED_MESSAGE if "assword" in str(error) else f"damaged: {error}"
        raise UnreadableDocumentError(problem) from None
    pages = len(document)
    if pages > settings.max_pages:
        raise UnreadableDocumentError(describe_excess(pages, "pages", settings.max_pages, "max_pages"))
    title = str(document.get_metadata_dict().get("Title") or "").encode(errors="ignore").decode()
    yield DocumentInfo(" ".join(title.split()), pages)
    readable: list[_Page] = []
    with pdfplumber.open(path) as tables:
        for number in range(1, pages + 1):
            try:
                pdf_page = document[number - 1]
                page = _read_page(pdf_page, tables, number)
                if page.is_scanned:
                    page.recognized = _recognize_blocks(pdf_page, number, settings)
                readable.append(page)
                pdf_page.close()
            except _UnreadablePageError as error:
                yield UnreadablePart(number, f"page {number} is {error}")
            except pypdfium2.PdfiumError as error:
                yield UnreadablePart(number, f"page {number} is damaged: {error}")
    yield from _build_blocks(readable)


class _UnreadablePageError(Exception):
    """A page cannot be read. The message completes "page 1 is …"."""


def _recognize_blocks(pdf_page: pypdfium2.PdfPage, number: int, settings: ExtractionSettings) -> list[Block]:
    """Return the paragraphs of a scanned page. Raises _UnreadablePageError without OCR, or if it finds no text."""
    if not settings.ocr_languages:
        raise _UnreadablePageError(NO_TEXT_REASON)
    try:
        text = ocr.recognize_text(pdf_page, settings.ocr_languages)
    except OSError as error:
        raise _UnreadablePageError(f"an image, and tesseract failed: {error}") from None
    paragraphs = (paragraph.split("\n") for paragraph in text.split("\n\n") if paragraph.strip())
    blocks = [Block("paragraph", join_lines([line.strip() for line in lines]), page=number) for lines in paragraphs]
    if not blocks:
        raise _UnreadablePageError("an image in which tesseract found no text")
    return blocks


# --- lines of a page --------------------------------------------------------------------------------------------------


def _read_page(page: pypdfium2.PdfPage, tables: pdfplumber.PDF, number: int) -> _Page:
    """Return a page with its lines and tables."""
    from pypdfium2 import raw

    kinds = (raw.FPDF_PAGEOBJ_IMAGE, raw.FPDF_PAGEOBJ_PATH)
    objects = list(islice(page.get_objects(kinds, max_depth=2), MAX_TABLE_PATHS))
    paths = [item for item in objects if item.type == raw.FPDF_PAGEOBJ_PATH]
    lines = _read_lines(page)
    if not lines:
        is_scanned = len(objects) > len(paths) or len(paths) >= MIN_OUTLINE_PATHS
        return _Page(number, page.get_height(), [], is_scanned)
    if len(objects) < MAX_TABLE_PATHS and not page.get_rotation() and _has_grid(paths):
        for table in _read_tables(tables, number - 1):
            inside = [line for line in lines if _is_inside(line, table)]
            characters = sum(len(line.text) for line in inside)
            if 0 < characters <= len(table.text) / MIN_TABLE_TEXT_SHARE:  # otherwise the cells lack text of the page
                lines = [*(line for line in lines if line not in inside), table]
    return _Page(number, page.get_height(), lines)


def _has_grid(paths: Sequence[pypdfium2.PdfObject]) -> bool:
    """Return whether the rules of a page may form a table of two rows and two columns; pdfplumber is slow."""
    from pypdfium2 import raw

    horizontal = vertical = 0
    for path in paths:
        left, bottom, right, top = path.get_bounds()
        is_flat, is_narrow = top - bottom < RULE_THICKNESS, right - left < RULE_THICKNESS
        horizontal += 0 if is_narrow else 1 if is_flat else 2  # a rectangle has two rules in each direction
        vertical += 0 if is_flat else 1 if is_narrow else 2
        is_complex = raw.FPDFPath_CountSegments(path) > RECTANGLE_SEGMENTS
        if is_complex or (horizontal >= MIN_TABLE_RULES and vertical >= MIN_TABLE_RULES):
            return True
    return False


def _read_lines(page: pypdfium2.PdfPage) -> list[_Line]:
    """Return the runs of characters on one line without a wide gap, in the order of the file."""
    from pypdfium2 import raw

    text_page = page.get_textpage()
    box = raw.FS_RECTF()
    lines: list[_Line] = []
    codes: list[int] = []
    heights: list[float] = []
    left = bottom = right = top = 0.0
    turns = 0

    def finish() -> None:
        text = b"".join(code.to_bytes(2, "little") for code in codes if code < 0x10000)
        decoded = " ".join(text.decode("utf-16-le", errors="ignore").translate(HYPHEN_SIGNS).split())
        if decoded and not DOT_LEADER.search(decoded):
            size = round(median(heights) / SIZE_STEP) * SIZE_STEP
            lines.append(_Line(decoded, left, bottom, right, top, size))
        codes.clear()
        heights.clear()

    for index in range(text_page.count_chars()):
        code = raw.FPDFText_GetUnicode(text_page, index)
        if code in (0x0A, 0x0D):
            finish()
            continue
        if code == 0x20:  # may be generated, without a box
            if codes:
                codes.append(code)
            continue
        raw.FPDFText_GetLooseCharBox(text_page, index, box)
        if not heights:
            turns = round(raw.FPDFText_GetCharAngle(text_page, index) / (math.pi / 2)) % 4
        x1, y1, x2, y2 = _turn_box(box, turns)
        height = y2 - y1
        if height <= 0:  # a generated character
            continue
        is_apart = x1 - right > MAX_CHARACTER_GAP * height or x1 < left - height or min(top, y2) - max(bottom, y1) <= 0
        if heights and is_apart:
            finish()
        if not heights:
            left, bottom, right, top = x1, y1, x2, y2
        codes.append(code)
        heights.append(height)
        bottom, right, top = min(bottom, y1), max(right, x2), max(top, y2)
    finish()
    text_page.close()
    return lines


def _turn_box(box: FS_RECTF, turns: int) -> tuple[float, float, float, float]:
    """Return left, bottom, right and top as if the text were horizontal. Rotated text follows the text of the page.

    Args:
        box: the box of a character.
        turns: the number of clockwise quarter turns of the text.
    """
    if turns == 0:
        return box.left, box.bottom, box.right, box.top
    left, bottom, right, top = {
        1: (-box.top, box.left, -box.bottom, box.right),
        2: (-box.right, -box.top, -box.left, -box.bottom),
        3: (box.bottom, -box.right, box.top, -box.left),
    }[turns]
    return left, bottom - turns * ROTATED_TEXT_OFFSET, right, top - turns * ROTATED_TEXT_OFFSET


def _read_tables(tables: pdfplumber.PDF, index: int) -> Iterator[_Line]:
    """Yield the ruled tables of a page as Markdown."""
    page = tables.pages[index]
    try:
        found: list[Any] = page.find_tables()
        cells = [(table.bbox, table.extract()) for table in found]
    except Exception:  # pdfminer raises various exceptions for damaged pages; PDFium has read the text
        return
    finally:
        page.close()
    offset = page.mediabox[1] + page.height
    for (left, top, right, bottom), rows in cells:
        texts = [[" ".join((cell or "").split()) for cell in row] for row in rows]
        texts = [row for row in texts if any(row)]
        if len(texts) < 2 or max(len(row) for row in texts) < 2:
            continue
        yield _Line(build_table(texts), left, offset - bottom, right, offset - top, 0.0, is_table=True)


def _is_inside(line: _Line, table: _Line) -> bool:
    x, y = (line.left + line.right) / 2, (line.bottom + line.top) / 2
    return table.left <= x <= table.right and table.bottom <= y <= table.top


# --- reading order ----------------------------------------------------------------------------------------------------


def _build_margin_key(line: _Line, height: float) -> MarginKey | None:
    """Return the text without numbers and the position of a line in the page's margin; None for other lines."""
    middle = (line.bottom + line.top) / 2
    if line.is_table or MARGIN_SHARE * height < middle < (1 - MARGIN_SHARE) * height:
        return None
    center = round((line.left + line.right) / 2 / MARGIN_STEP)
    return re.sub(r"\d+", "#", line.text), center, round(middle / MARGIN_STEP)


def _find_recurring_lines(pages: Sequence[_Page]) -> set[MarginKey]:
    """Return the keys of page headers and footers.

    They are on many pages, or the first or last line of several pages, as the title of a chapter is, at a position that
    most pages use.
    """
    counts, outer, positions = Counter[MarginKey](), Counter[MarginKey](), Counter[int]()
    for page in pages:
        lowest = min((line.top for line in page.lines), default=0.0)
        highest = max((line.bottom for line in page.lines), default=0.0)
        keys = {line_key: line for line in page.lines if (line_key := _build_margin_key(line, page.height))}
        outer_keys = {key for key, line in keys.items() if line.bottom <= lowest or line.top >= highest}
        counts.update(keys.keys())
        outer.update(outer_keys)
        positions.update({key[2] for key in outer_keys})
    least = max(MIN_RECURRING_PAGES, MIN_RECURRING_SHARE * len(pages))
    return {key for key in counts if counts[key] >= least or (outer[key] > 1 and positions[key[2]] >= least)}


def _split_columns(lines: list[_Line]) -> list[list[_Line]]:
    """Divide the lines into columns, in reading order. A line across the columns ends those above it."""
    gap = _find_column_gap(lines)
    ordered = sorted(lines, key=lambda line: (-line.top, line.left))
    if gap is None:
        return [ordered]
    columns: list[list[_Line]] = []
    left, right = list[_Line](), list[_Line]()
    for line in [*ordered, None]:
        if line is not None and line.right <= gap:
            left.append(line)
        elif line is not None and line.left >= gap:
            right.append(line)
        else:
            columns += [part for side in (left, right) if side for part in _split_columns(side)]
            left, right = [], []
            if line is not None:
                columns.append([line])
    return columns


def _find_column_gap(lines: Sequence[_Line]) -> float | None:
    """Return the position between two columns of text; None for a page with one column."""
    best, best_count = None, 0
    for gap in sorted({line.left for line in lines}):
        left = [line for line in lines if line.right <= gap and not line.is_table]
        right = [line for line in lines if line.left >= gap and not line.is_table]
        count = min(len(left), len(right))
        if count < max(MIN_COLUMN_LINES, best_count + 1):
            continue
        crossing = len(lines) - len(left) - len(right)
        long = all(sum(len(line.text) for line in side) >= MIN_COLUMN_CHARACTERS * len(side) for side in (left, right))
        if long and crossing <= MAX_CROSSING_SHARE * len(lines):
            best, best_count = gap, count
    return best


def _merge_lines(column: Sequence[_Line]) -> list[_Line]:
    """Join the parts of a line that a wide gap separates."""
    merged: list[_Line] = []
    for line in column:
        last = merged[-1] if merged else None
        if last and not last.is_table and not line.is_table:
            overlap = min(last.top, line.top) - max(last.bottom, line.bottom)
            lowest = min(last.top - last.bottom, line.top - line.bottom)
            if overlap > SAME_LINE_OVERLAP * lowest:
                first, second = sorted((last, line), key=lambda part: part.left)
                size = max((last, line), key=lambda part: len(part.text)).size
                text = f"{first.text} {second.text}"
                box = (min(last.bottom, line.bottom), max(last.right, line.right), max(last.top, line.top))
                merged[-1] = _Line(text, first.left, *box, size, cells=last.cells + line.cells)
                continue
        merged.append(line)
    return merged


def _separate_footnotes(page: _Page, body_size: float) -> None:
    """Move the small text at the end of each column to the page's footnotes, if it begins with a footnote mark."""
    for column in page.columns:
        start = len(column)
        while start > 0 and 0 < column[start - 1].size <= FOOTNOTE_RATIO * body_size:
            start -= 1
        while start < len(column) and not FOOTNOTE_MARK.match(column[start].text):
            start += 1
        page.notes += column[start:]
        del column[start:]


# --- paragraphs -------------------------------------------------------------------------------------------------------


class _BlockBuilder:
    """Joins lines to blocks. Footnotes follow the paragraph that continues on the next page."""

    def __init__(self, levels: dict[float, int]) -> None:
        self._levels = levels
        self._lines: list[_Line] = []
        self._page = 0
        self._notes: list[Block] = []
        self.blocks: list[Block] = []

    def add(self, line: _Line, page: int, *, begins_paragraph: bool) -> None:
        if line.is_table:
            self.finish()
            self.blocks.append(Block("table", line.text, page=page))
            return
        if begins_paragraph:
            self.finish()
        if not self._lines:
            self._page = page
        self._lines.append(line)

    def add_notes(self, blocks: Sequence[Block]) -> None:
        self._notes += blocks

    def finish(self) -> None:
        """End the paragraph."""
        if self._lines:
            text = join_lines([line.text for line in self._lines])
            level = self._levels.get(self._lines[0].size, 0)
            if level and len(text) <= MAX_HEADING_CHARACTERS and re.search(r"[^\W\d_]", text):
                self.blocks.append(Block("heading", text, level, self._page))
            elif LIST_MARKER.match(text):
                item, previous = BULLET.sub("- ", text), self.blocks[-1] if self.blocks else None
                if previous and previous.kind == "list" and previous.page == self._page:
                    self.blocks[-1] = Block("list", f"{previous.text}\n{item}", page=self._page)
                else:
                    self.blocks.append(Block("list", item, page=self._page))
            else:
                self.blocks.append(Block("paragraph", text, page=self._page))
        self._lines = []
        self.blocks += self._notes
        self._notes = []


def _order_lines(pages: Sequence[_Page]) -> dict[float, int]:
    """Add the columns and footnotes of all pages, and return the heading level of each font size above the body's."""
    recurring = _find_recurring_lines(pages)
    sizes = Counter[float]()
    for page in pages:
        for line in page.lines:
            sizes[line.size] += 0 if line.is_table else len(line.text)
    body_size = max(sizes, key=lambda size: sizes[size], default=0.0)
    for page in pages:
        kept = [line for line in page.lines if _build_margin_key(line, page.height) not in recurring]
        page.columns = [_merge_lines(column) for column in _split_columns(kept)]
        _separate_footnotes(page, body_size)
    larger = sorted((size for size in sizes if size >= HEADING_RATIO * body_size), reverse=True)
    return {size: min(rank, MAX_HEADING_LEVEL) for rank, size in enumerate(larger, 1)}


def _build_blocks(pages: Sequence[_Page]) -> list[Block]:
    """Return the blocks of all pages."""
    levels = _order_lines(pages)
    builder = _BlockBuilder(levels)
    last: _Line | None = None
    for page in pages:
        if page.recognized:
            builder.finish()
            builder.blocks += page.recognized
            last = None
        for column in page.columns:
            pitch = _measure_pitch(column)
            right = max((line.right for line in column), default=0.0)
            left = min((line.left for line in column), default=0.0)
            for index, line in enumerate(column):
                continues = last and last.size not in levels and _continues(last, line)
                begins = _begins_paragraph(column, index, pitch, left, right) if index else not continues
                builder.add(line, page.number, begins_paragraph=begins)
                last = line
        notes = _BlockBuilder({})
        for line in page.notes:
            notes.add(line, page.number, begins_paragraph=FOOTNOTE_MARK.match(line.text) is not None)
        notes.finish()
        builder.add_notes(notes.blocks)
    builder.finish()
    return builder.blocks


def _continues(last: _Line, line: _Line) -> bool:
    """Return whether the first line of a column or page continues the last paragraph."""
    return (
        not last.is_table
        and not line.is_table
        and abs(last.size - line.size) <= SIZE_STEP
        and not SENTENCE_END.search(last.text)
        and not LIST_MARKER.match(line.text)
    )


def _begins_paragraph(column: Sequence[_Line], index: int, pitch: float, left: float, right: float) -> bool:
    """Return whether a line begins a paragraph, by the lines above it and the bounds of the column."""
    above, line = column[index - 1], column[index]
    if above.is_table or line.is_table or abs(above.size - line.size) > SIZE_STEP or LIST_MARKER.match(line.text):
        return True
    if above.top - line.top > PARAGRAPH_GAP * pitch or min(above.cells, line.cells) > 1:
        return True  # the second: rows of a table without rules
    if index > 1 and abs(column[index - 2].left - above.left) < 1 and line.left < above.left - line.size:
        return True  # the end of an indented block
    is_short = above.right < left + SHORT_LINE_SHARE * (right - left)
    is_indented = line.left > left + line.size and above.left <= left + line.size
    return SENTENCE_END.search(above.text) is not None and (is_short or is_indented)


def _measure_pitch(column: Sequence[_Line]) -> float:
    """Return the usual distance between two lines of a column, in points."""
    distances = [
        above.top - line.top for above, line in pairwise(column) if above.size == line.size and above.top > line.top
    ]
    return min(median(distances), 2 * median(line.size for line in column)) if distances else 0.0


def join_lines(lines: Sequence[str]) -> str:
    """Join the lines of a paragraph, and words that a hyphen divides at the end of a line."""
    text = ""
    for line in lines:
        if text and LINE_END_HYPHEN.search(text) and line[:1].islower():
            text = text[:-1] + line
        else:
            text += f" {line}" if text else line
    return text
