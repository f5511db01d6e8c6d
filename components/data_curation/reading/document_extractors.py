"""Registry of document extractors by suffix. They yield the parts of a file, in a process of `extraction_worker`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from datetime import time as clock_time
from pathlib import Path

from components.data_curation.reading import document_blocks
from components.data_curation.reading.csv_reader import find_repeated_column, name_columns
from components.data_curation.reading.document_blocks import DocumentInfo, Part, TableRow, UnreadablePart
from components.data_curation.reading.extraction_limits import (
    ENCRYPTED_MESSAGE,
    ExtractionSettings,
    UnreadableDocumentError,
    check_archive,
)
from components.data_curation.reading.raw_records import quote_name
from components.data_curation.reading.slide_extractor import extract_slides
from components.data_curation.reading.web_page_blocks import extract_web_page

MAX_NAMED_SHEETS = 20
MAX_EXACT_FLOAT = 2.0**53  # larger whole numbers are not exact
WORD_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
WORD_MARKS = {b"<w:tab/>": b" ", b"<w:noBreakHyphen/>": b"-"}  # a tab stop has attributes


@dataclass(frozen=True)
class Extractor:
    """An extractor, and the packages that it imports: distribution names by import names."""

    extract: Callable[[Path, ExtractionSettings], Iterator[Part]]
    packages: Mapping[str, str]

    def find_missing(self) -> str:
        """Return the distribution name of a package that is not installed; "" if all are installed."""
        return next((name for one, name in self.packages.items() if not importlib.util.find_spec(one)), "")

    def read_versions(self) -> dict[str, str]:
        """Return the versions of the packages by distribution name."""
        return {name: importlib.metadata.version(name) for name in self.packages.values()}


# --- Markdown ---------------------------------------------------------------------------------------------------------


def extract_markdown(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the front matter and the blocks of a Markdown file."""
    front_matter, text = document_blocks.split_front_matter(_read_utf8(path))
    blocks = list(document_blocks.parse_markdown(text))
    title = front_matter.get("title")
    first = next((document_blocks.remove_markup(block.text) for block in blocks if block.level == 1), "")
    yield DocumentInfo(title if isinstance(title, str) else first, front_matter=front_matter)
    yield from blocks


def _read_utf8(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UnreadableDocumentError(f"not UTF-8: byte 0x{data[error.start]:02x} in line {number}") from None
    return text.replace("\r\n", "\n")


# --- Office and EPUB --------------------------------------------------------------------------------------------------


def extract_office(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the blocks of a Word or EPUB file, which kreuzberg converts to Markdown."""
    import kreuzberg

    check_archive(path, settings)
    config = kreuzberg.ExtractionConfig(output_format="markdown", use_cache=False)
    if settings.suffix == ".docx":
        result = kreuzberg.extract_bytes_sync(_replace_marks(path), WORD_TYPE, config=config)
    else:
        result = kreuzberg.extract_file_sync(path, config=config)
    title = result.metadata.get("title")
    yield DocumentInfo(title if isinstance(title, str) else "")
    yield from document_blocks.parse_markdown(result.content)


def _replace_marks(path: Path) -> bytes:
    """Return a Word file with spaces and hyphens instead of the tabs and hyphens that kreuzberg 4.10 drops."""
    output = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(output, "w") as target:
        for name in source.namelist():
            content = source.read(name) if name.endswith((".xml", ".rels")) else b""  # images contain no text
            for element, text in WORD_MARKS.items():
                content = content.replace(element, b'<w:t xml:space="preserve">%s</w:t>' % text)
            target.writestr(name, content)
    return output.getvalue()


def extract_pdf(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the blocks of a PDF file."""
    from components.data_curation.reading import pdf_extractor

    return pdf_extractor.extract_pdf(path, settings)


def extract_spreadsheet(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the rows of a sheet below its header, the first row that is not empty.

    If the source states no sheet, other sheets than the first are reported as unreadable.
    """
    import python_calamine

    if settings.suffix != ".xls":
        check_archive(path, settings)
    try:
        workbook = python_calamine.CalamineWorkbook.from_path(path)
    except python_calamine.PasswordError:
        raise UnreadableDocumentError(ENCRYPTED_MESSAGE) from None
    name = _find_sheet(workbook.sheet_names, settings.sheet)
    sheet = workbook.get_sheet_by_name(name)
    rows = enumerate(sheet.to_python(skip_empty_area=False), 1)
    filled = ((number, row) for number, row in rows if any(cell != "" for cell in row))
    _, header = next(filled, (0, []))
    if not header:
        raise UnreadableDocumentError(f"the sheet {quote_name(name)} is empty")
    names = name_columns([str(_to_json_cell(cell)) for cell in header])
    if repeated := find_repeated_column(names):
        raise UnreadableDocumentError(repeated)
    if not settings.sheet and (others := workbook.sheet_names[1:]):
        listed = ", ".join(map(quote_name, others[:MAX_NAMED_SHEETS]))
        verb = "sheet is" if len(others) == 1 else "sheets are"
        yield UnreadablePart(1, f"{len(others)} other {verb} not read: {listed}; set `sheet` for this source")
    for number, row in filled:
        yield TableRow(number, {column: _to_json_cell(cell) for column, cell in zip(names, row, strict=True)})


def _find_sheet(names: Sequence[str], sheet: str) -> str:
    """Return the name of the sheet with this name or number from 1; "" for the first sheet."""
    if not names:
        raise UnreadableDocumentError("the file contains no sheets")
    if sheet in names:
        return sheet
    number = int(sheet) if sheet.isascii() and sheet.isdigit() else 0 if sheet else 1
    if not 1 <= number <= len(names):
        found = ", ".join(map(quote_name, names[:MAX_NAMED_SHEETS]))
        raise UnreadableDocumentError(f"no sheet {quote_name(sheet)}; the file has the sheets {found}")
    return names[number - 1]


def _to_json_cell(cell: object) -> str | int | float | bool:
    """Convert a cell to JSON: dates and times become ISO 8601 text, whole numbers integers."""
    if isinstance(cell, date | clock_time):  # a datetime is a date
        return cell.isoformat()
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < MAX_EXACT_FLOAT:
        return int(cell)
    return cell if isinstance(cell, str | int | float) else str(cell)


MARKDOWN_PACKAGES = {"markdown_it": "markdown-it-py"}
OFFICE_PACKAGES = {"kreuzberg": "kreuzberg", **MARKDOWN_PACKAGES}
PDF_PACKAGES = {"pypdfium2": "pypdfium2", "pdfplumber": "pdfplumber"}
PLAIN_TEXT_SUFFIXES = (".text", ".txt")  # read by paragraph, see `document_reader.read_paragraphs`
MARKDOWN_EXTRACTORS = {".md": Extractor(extract_markdown, MARKDOWN_PACKAGES)}
WEB_EXTRACTORS = {  # for text_unit: section
    suffix: Extractor(extract_web_page, {"trafilatura": "trafilatura"}) for suffix in (".htm", ".html")
}
DOCUMENT_EXTRACTORS = {
    ".docx": Extractor(extract_office, OFFICE_PACKAGES),
    ".epub": Extractor(extract_office, OFFICE_PACKAGES),
    ".pdf": Extractor(extract_pdf, PDF_PACKAGES),
    ".pptx": Extractor(extract_slides, {"lxml": "lxml"}),
}
SPREADSHEET_EXTRACTORS = {
    suffix: Extractor(extract_spreadsheet, {"python_calamine": "python-calamine"})
    for suffix in (".ods", ".xls", ".xlsx")
}
BINARY_EXTRACTORS = DOCUMENT_EXTRACTORS | SPREADSHEET_EXTRACTORS
EXTRACTORS = MARKDOWN_EXTRACTORS | WEB_EXTRACTORS | BINARY_EXTRACTORS
