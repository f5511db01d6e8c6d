"""Readers for documents and spreadsheets: yields the sections or rows of a file, extracted in a child process."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.data_curation.reading import extraction_process, section_chunks
from components.data_curation.reading.csv_reader import parse_cell
from components.data_curation.reading.document_blocks import (
    Block,
    DocumentInfo,
    Part,
    TableRow,
    UnreadablePart,
    unwrap_lines,
)
from components.data_curation.reading.document_extractors import WEB_EXTRACTORS
from components.data_curation.reading.extraction_limits import ExtractionSettings
from components.data_curation.reading.file_lines import FileContent
from components.data_curation.reading.raw_records import (
    JsonObject,
    Record,
    TruncatedFileError,
    UnreadableRecord,
    file_suffix,
)
from components.data_curation.reading.section_chunks import SECTION_SEPARATOR, Chunk

if TYPE_CHECKING:
    from components.data_curation.config import DataCurationConfig

GROUP_CHARACTERS = 1_000_000  # of a plain text, held in memory


def read_document(content: FileContent, config: DataCurationConfig) -> Iterator[Record | UnreadableRecord]:
    """Yield the chunks of a document, numbered from 1, and its unreadable pages."""
    suffix, parts = file_suffix(Path(content.file)), _extract_parts(content, config)
    info = next((part for part in parts if isinstance(part, DocumentInfo)), DocumentInfo())
    blocks = [part for part in parts if isinstance(part, Block)]
    chunks = section_chunks.split_sections(blocks, section_chunks.load_budget(config))
    unreadable = [part for part in parts if isinstance(part, UnreadablePart)]
    extracted_from = "" if suffix in WEB_EXTRACTORS else suffix[1:]  # the web heuristics judge whole pages
    pages = max(0, info.pages - len(unreadable))
    for number, chunk in enumerate(chunks, 1):
        fields = _build_fields(info, chunk)
        yield Record(content.file, number, fields, extracted_from, tokens=chunk.tokens, pages=pages)
        pages = 0
    for part in unreadable:
        yield UnreadableRecord(content.file, part.number, part.reason)


def read_paragraphs(
    file: str, paragraphs: Iterable[Record | UnreadableRecord], config: DataCurationConfig
) -> Iterator[Record | UnreadableRecord]:
    """Yield the chunks of a plain text, numbered from 1, and its unreadable paragraphs.

    The text is a stream; a chunk ends after each GROUP_CHARACTERS.

    Args:
        file: the name of the file.
        paragraphs: the paragraphs as records.
        config: the stage's configuration.
    """
    budget, extracted_from = section_chunks.load_budget(config), file_suffix(Path(file))[1:]
    number = size = 0
    blocks: list[Block] = []
    for paragraph in itertools.chain(paragraphs, [None]):
        if isinstance(paragraph, UnreadableRecord):
            yield paragraph
            continue
        if paragraph is not None:
            blocks.append(Block("paragraph", unwrap_lines(paragraph.fields["text"])))
            size += len(blocks[-1].text)
        if blocks and (paragraph is None or size >= GROUP_CHARACTERS):
            for chunk in section_chunks.split_sections(blocks, budget):
                number += 1
                yield Record(file, number, {"text": chunk.text}, extracted_from, tokens=chunk.tokens)
            blocks, size = [], 0


def read_spreadsheet(content: FileContent, config: DataCurationConfig) -> Iterator[Record | UnreadableRecord]:
    """Yield the rows of the source's sheet below its header; `line` is the number of the row in the sheet."""
    for part in _extract_parts(content, config, content.settings.sheet):
        if isinstance(part, TableRow):
            cells = {name: parse_cell(cell) if isinstance(cell, str) else cell for name, cell in part.fields.items()}
            yield Record(content.file, part.number, cells)
        elif isinstance(part, UnreadablePart):
            yield UnreadableRecord(content.file, part.number, part.reason)


def _build_fields(info: DocumentInfo, chunk: Chunk) -> JsonObject:
    fields: JsonObject = {"text": chunk.text}
    if info.title:
        fields["title"] = info.title
    if chunk.section:
        fields["section"] = SECTION_SEPARATOR.join(chunk.section)
    if chunk.first_page:
        fields["page"] = chunk.first_page
    if chunk.last_page > chunk.first_page:
        fields["last_page"] = chunk.last_page
    if info.front_matter:
        fields["front_matter"] = info.front_matter
    return fields


def _extract_parts(content: FileContent, config: DataCurationConfig, sheet: str = "") -> list[Part]:
    """Return the parts of a file, which is copied to a temporary file for the child process."""
    suffix, limits = file_suffix(Path(content.file)), config.documents
    settings = ExtractionSettings(
        suffix,
        limits.max_pages,
        limits.max_expanded_bytes,
        limits.timeout_seconds,
        sheet,
        tuple(limits.ocr_languages) if limits.ocr == "tesseract" else (),
    )
    with tempfile.NamedTemporaryFile(prefix="tuneline-", suffix=suffix) as file:
        size = 0
        try:
            for piece in content.chunks:
                size += len(piece)
                if size > limits.max_expanded_bytes:
                    limit = limits.max_expanded_bytes
                    reason = f"longer than {limit:,} bytes (data_curation.documents.max_expanded_bytes)"
                    return [UnreadablePart(1, reason)]
                file.write(piece)
        except TruncatedFileError as error:
            return [UnreadablePart(1, str(error))]
        if not size:
            return []
        file.flush()
        return extraction_process.extract(Path(file.name), settings)
