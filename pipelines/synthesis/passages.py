"""Passages of the sources: texts as the curation reads, splits, normalizes, redacts and filters them."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import personal_data
from components.common.artifacts import hashing
from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters import redaction, row_filters
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.reading import file_readers, record_formats
from components.data_curation.reading.raw_records import Record, Source, UnreadableRecord
from components.data_curation.source_preview import find_hint
from pipelines.steps.curation_inputs import list_raw_sources

PAGE_FIELDS = ("page", "last_page", "section", "title")
MAX_LISTED_FILES = 5
MIN_PASSAGE_WORDS = 12  # a heading or a caption alone contains no fact to ask for


@dataclass(frozen=True)
class Passage:
    """A passage of a document.

    Attributes:
        text: the text as Markdown.
        document: the name of the file.
        document_sha256: the digest of the file.
        line: the number of the passage in the file, as in a curated dataset.
        location: page, last_page, section and title, as far as they are known.
    """

    text: str
    document: str
    document_sha256: str
    line: int
    location: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """The digest of the text."""
        return hashing.digest(self.text)


@dataclass
class Passages:
    """The passages of all sources.

    Attributes:
        passages: different passages, in the order of the sources.
        inputs: the source files, for the manifest.
        unreadable: the records and pages that cannot be read.
        rejected: the number of passages by reject reason of the curation; `short_passage` and `exact_duplicate` are
            added here.
    """

    passages: list[Passage] = field(default_factory=list)
    inputs: list[ArtifactInput] = field(default_factory=list)
    unreadable: list[UnreadableRecord] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def documents(self) -> int:
        """The number of documents with passages."""
        return len({passage.document_sha256 for passage in self.passages})


def read_passages(curation: DataCurationConfig, work: Workdir, reporter: Reporter) -> Passages:
    """Return the passages of `data_curation.sources`.

    Text files are split like documents unless `data_curation.text_unit` states another unit. Personal data is redacted
    before a passage is sent to a teacher.

    Raises:
        ConfigurationError: a source does not exist.
        InputError: no source contains a passage.
    """
    if curation.text_unit == "auto":
        curation = curation.model_copy(update={"text_unit": "section"})
    found, seen = Passages(), set[str]()
    with tempfile.TemporaryDirectory(prefix="tuneline-synthesis-") as folder:
        sources = list_raw_sources(curation, work, reporter, work.store, Path(folder))
        for number, source in enumerate(sources, 1):
            found.inputs.append(ArtifactInput(kind="raw", content_sha256=source.sha256, uri=source.name))
            with closing(file_readers.read_records(source, curation)) as records:
                for record in records:
                    _add_record(record, source, curation, found, seen)
            reporter.progress(number, len(sources), "files")
    if not found.passages:
        _raise_empty(found)
    used = {passage.document_sha256 for passage in found.passages}
    if unused := [source.name for source in sources if source.sha256 not in used]:
        names = ", ".join(unused[:MAX_LISTED_FILES]) + (", …" if len(unused) > MAX_LISTED_FILES else "")
        contribute = "contributes" if len(unused) == 1 else "contribute"
        reporter.note(f"{len(unused)} of {len(sources)} files {contribute} no passage: {names}")
    return found


def _add_record(
    record: Record | UnreadableRecord, source: Source, curation: DataCurationConfig, found: Passages, seen: set[str]
) -> None:
    try:
        if isinstance(record, UnreadableRecord):
            raise record_formats.RecordFormatError(record.reason)
        if record.excluded_by:
            found.rejected["not_selected"] += 1
            return
        rows = record_formats.parse_record(record, record.format or curation.format)
        if rows[0].kind != "text":
            raise record_formats.RecordFormatError(f"a row of kind {rows[0].kind}; expected plain text or a document")
    except record_formats.RecordFormatError as error:
        reason = personal_data.mask(str(error), curation.personal_data.names)
        found.unreadable.append(UnreadableRecord(record.file, record.line, reason))
        return
    for row in rows:
        text_normalization.normalize_row(row)
        _, private = redaction.redact_row(row, curation.personal_data)
        measured = MeasuredRow(row)
        rejection = row_filters.find_rejection(measured, curation) or private
        text = row.content["text"]
        location = {name: row.meta[name] for name in PAGE_FIELDS if row.meta.get(name)}
        passage = Passage(text, row.file, source.sha256, row.line, location)
        if rejection:
            found.rejected[rejection.reason] += 1
        elif len(text.split()) < MIN_PASSAGE_WORDS and text.isascii():
            found.rejected["short_passage"] += 1
        elif passage.sha256 in seen:
            found.rejected["exact_duplicate"] += 1
        else:
            seen.add(passage.sha256)
            found.passages.append(passage)


def _raise_empty(found: Passages) -> None:
    reasons = [f"{count} {reason}" for reason, count in sorted(found.rejected.items())]
    hint = "Use documents with text; --set data_curation.documents.ocr=tesseract reads scanned pages."
    if found.unreadable:
        first = found.unreadable[0]
        reasons.append(f"{len(found.unreadable)} unreadable, the first {first.file}:{first.line}: {first.reason}")
        hint = find_hint(first) or hint
    raise InputError(f"the sources contain no passage: {'; '.join(reasons) or 'they are empty'}", hint=hint)
