"""Readers for documents: extracts a file in a child process, and yields its sections as records."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.data_curation.reading import extraction_process, section_chunks
from components.data_curation.reading.document_blocks import Block, DocumentInfo, Part, UnreadablePart
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


def read_document(content: FileContent, config: DataCurationConfig) -> Iterator[Record | UnreadableRecord]:
    """Yield the chunks of a document, numbered from 1, and its unreadable pages."""
    suffix = file_suffix(Path(content.file))
    parts = _extract_parts(content, config, suffix)
    info = next((part for part in parts if isinstance(part, DocumentInfo)), DocumentInfo())
    blocks = [part for part in parts if isinstance(part, Block)]
    chunks = section_chunks.split_sections(blocks, section_chunks.load_budget(config))
    unreadable = [part for part in parts if isinstance(part, UnreadablePart)]
    pages = max(0, info.pages - len(unreadable))
    for number, chunk in enumerate(chunks, 1):
        fields = _build_fields(info, chunk)
        yield Record(content.file, number, fields, suffix[1:], tokens=chunk.tokens, pages=pages)
        pages = 0
    for part in unreadable:
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


def _extract_parts(content: FileContent, config: DataCurationConfig, suffix: str) -> list[Part]:
    """Return the parts of a file, which is copied to a temporary file for the child process."""
    limits = config.documents
    settings = ExtractionSettings(suffix, limits.max_pages, limits.max_expanded_bytes, limits.timeout_seconds)
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
