"""Registry of document extractors: yields the parts of a file by its suffix. Runs in a process of `extraction_worker`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.data_curation.reading import document_blocks
from components.data_curation.reading.document_blocks import DocumentInfo, Part
from components.data_curation.reading.extraction_limits import (
    ExtractionSettings,
    UnreadableDocumentError,
    check_archive,
    describe_excess,
)

PAGE_MARKER = re.compile(r"^tunelinepagebreak(\d+)$", re.MULTILINE)


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


# --- text -------------------------------------------------------------------------------------------------------------


def extract_markdown(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the front matter and the blocks of a Markdown file."""
    front_matter, text = document_blocks.split_front_matter(_read_utf8(path))
    blocks = list(document_blocks.parse_markdown(text))
    title = front_matter.get("title")
    first = next((block.text for block in blocks if block.level == 1), "")
    yield DocumentInfo(title if isinstance(title, str) else first, front_matter=front_matter)
    yield from blocks


def extract_plain_text(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the paragraphs of a plain text file."""
    yield DocumentInfo()
    yield from document_blocks.parse_plain_text(_read_utf8(path))


def _read_utf8(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UnreadableDocumentError(f"not UTF-8: byte 0x{data[error.start]:02x} in line {number}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


# --- Office and EPUB --------------------------------------------------------------------------------------------------


def extract_office(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the blocks of a Word, PowerPoint or EPUB file, which kreuzberg converts to Markdown."""
    import kreuzberg

    check_archive(path, settings)
    config = kreuzberg.ExtractionConfig(
        output_format="markdown",
        use_cache=False,
        pages=kreuzberg.PageConfig(insert_page_markers=True, marker_format="\n\ntunelinepagebreak{page_num}\n\n"),
    )
    result = kreuzberg.extract_file_sync(path, config=config)
    # PowerPoint: the text before the first marker, then (number, text) of every slide.
    before, *marked = PAGE_MARKER.split(result.content)
    has_pages = settings.suffix == ".pptx"
    pages = len(marked) // 2 if has_pages else 0
    if pages > settings.max_pages:
        raise UnreadableDocumentError(describe_excess(pages, "slides", settings.max_pages, "max_pages"))
    title = result.metadata.get("title")
    yield DocumentInfo(title if isinstance(title, str) else "", pages)
    texts = [(0, before), *zip(map(int, marked[::2]), marked[1::2], strict=True)]
    for page, text in texts:
        yield from document_blocks.parse_markdown(text, page if has_pages else 0)


def extract_pdf(path: Path, settings: ExtractionSettings) -> Iterator[Part]:
    """Yield the blocks of a PDF file."""
    from components.data_curation.reading import pdf_extractor

    return pdf_extractor.extract_pdf(path, settings)


MARKDOWN_PACKAGES = {"markdown_it": "markdown-it-py"}
OFFICE_PACKAGES = {"kreuzberg": "kreuzberg", **MARKDOWN_PACKAGES}
PDF_PACKAGES = {"pypdfium2": "pypdfium2", "pdfplumber": "pdfplumber"}
TEXT_EXTRACTORS = {
    ".md": Extractor(extract_markdown, MARKDOWN_PACKAGES),
    ".text": Extractor(extract_plain_text, {}),
    ".txt": Extractor(extract_plain_text, {}),
}
DOCUMENT_EXTRACTORS = {
    ".docx": Extractor(extract_office, OFFICE_PACKAGES),
    ".epub": Extractor(extract_office, OFFICE_PACKAGES),
    ".pdf": Extractor(extract_pdf, PDF_PACKAGES),
    ".pptx": Extractor(extract_office, OFFICE_PACKAGES),
}
EXTRACTORS = TEXT_EXTRACTORS | DOCUMENT_EXTRACTORS
