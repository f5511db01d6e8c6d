"""Passages and prompts of the sources: texts as the curation reads, splits, normalizes, redacts and filters them."""

from __future__ import annotations

import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import personal_data
from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import ArtifactInput
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters import redaction, row_filters
from components.data_curation.filters.decontamination import EvaluationIndex
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.reading import file_readers, record_formats
from components.data_curation.reading.raw_records import Record, Source, UnreadableRecord
from components.data_curation.reading.source_files import list_evaluation_sets
from components.data_curation.reading.source_settings import SourceEntry
from components.data_curation.rows import Row
from components.data_curation.source_preview import find_hint
from pipelines.steps.curation_inputs import list_raw_sources
from pipelines.synthesis.row_kinds import Reads

TRAINING_FILENAME = "train.parquet"
PAGE_FIELDS = ("page", "last_page", "section", "title")
MAX_LISTED_FILES = 5
MIN_PASSAGE_WORDS = 12  # a heading or a caption alone contains no fact to ask for


@dataclass(frozen=True)
class Passage:
    """A passage of a document, or the prompt of a row.

    Attributes:
        text: the text as Markdown; of a prompt, the text of its messages.
        document: the name of the file.
        document_sha256: the digest of the file.
        line: the number of the passage in the file, as in a curated dataset; of a prompt, the line of its row.
        location: page, last_page, section and title, as far as they are known; of a prompt, row_id and row_meta.
        messages: of a prompt, the conversation up to the last user turn.
        source: of a prompt, the source of its row.
    """

    text: str
    document: str
    document_sha256: str
    line: int
    location: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()
    source: str = ""

    @property
    def sha256(self) -> str:
        """The digest of the text, or of the messages."""
        return hashing.digest(self.messages or self.text)


@dataclass
class Passages:
    """The passages of all sources.

    Attributes:
        passages: different passages or prompts, in the order of the sources.
        inputs: the source files and the evaluation sets, for the manifest.
        unreadable: the records and pages that cannot be read.
        rejected: the number of passages by reject reason of the curation; `short_passage`, `has_tools` and
            `exact_duplicate` are added here.
    """

    passages: list[Passage] = field(default_factory=list)
    inputs: list[ArtifactInput] = field(default_factory=list)
    unreadable: list[UnreadableRecord] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)

    def add(self, passage: Passage) -> None:
        """Add a passage; count an equal one as rejected."""
        if passage.sha256 in self._seen:
            self.rejected["exact_duplicate"] += 1
        else:
            self._seen.add(passage.sha256)
            self.passages.append(passage)

    @property
    def documents(self) -> int:
        """The number of documents with passages."""
        return len({passage.document_sha256 for passage in self.passages})


def read_passages(
    curation: DataCurationConfig, work: Workdir, reporter: Reporter, reads: Reads = "passage"
) -> Passages:
    """Return the passages, or the prompts of the rows, in `data_curation.sources`.

    Text files are split like documents unless `data_curation.text_unit` states another unit. Personal data is redacted
    before a text is sent to a teacher. Of a dataset, only the prompts of its training split are read. Prompts that share
    text with an evaluation set are rejected before they are paid for.

    Raises:
        ConfigurationError: a source or an evaluation set does not exist.
        InputError: no source contains a passage or prompt.
    """
    found = Passages()
    index = None
    if reads == "passage" and curation.text_unit == "auto":
        curation = curation.model_copy(update={"text_unit": "section"})
    if reads == "prompt":
        curation = curation.model_copy(update={"sources": [_select_training_split(one) for one in curation.sources]})
        if sets := list_evaluation_sets(curation.decontamination.sets, Path.cwd()):
            index = EvaluationIndex.build(sets, curation, reporter)
            found.inputs += [
                ArtifactInput(kind="evaluation_set", content_sha256=one.sha256, uri=one.name) for one in sets
            ]
    with tempfile.TemporaryDirectory(prefix="tuneline-synthesis-") as folder:
        sources = list_raw_sources(curation, work, reporter, work.store, Path(folder))
        for number, source in enumerate(sources, 1):
            found.inputs.append(ArtifactInput(kind="raw", content_sha256=source.sha256, uri=source.name))
            with closing(file_readers.read_records(source, curation)) as records:
                for record in records:
                    for row in _parse_rows(record, curation, found, reads):
                        if reads == "prompt":
                            _add_prompt(row, source, curation, index, found)
                        else:
                            _add_passage(row, source, curation, found)
            reporter.progress(number, len(sources), "files")
    if not found.passages:
        _raise_empty(found, reads)
    used = {passage.document_sha256 for passage in found.passages}
    if unused := [source.name for source in sources if source.sha256 not in used]:
        names = ", ".join(unused[:MAX_LISTED_FILES]) + (", …" if len(unused) > MAX_LISTED_FILES else "")
        contribute = "contributes" if len(unused) == 1 else "contribute"
        reporter.note(f"{len(unused)} of {len(sources)} files {contribute} no {reads}: {names}")
    return found


def _select_training_split(entry: SourceEntry) -> SourceEntry:
    """Return the training rows of a dataset's folder; another source as it is."""
    folder = Path(entry.path)
    is_dataset = (folder / artifact_folder.MANIFEST_FILENAME).is_file() and (folder / TRAINING_FILENAME).is_file()
    return entry.model_copy(update={"path": str(folder / TRAINING_FILENAME)}) if is_dataset else entry


def _parse_rows(
    record: Record | UnreadableRecord, curation: DataCurationConfig, found: Passages, reads: Reads
) -> list[Row]:
    """Return the rows of a record; [] if it is counted as unreadable or not selected."""
    try:
        if isinstance(record, UnreadableRecord):
            raise record_formats.RecordFormatError(record.reason)
        if record.excluded_by:
            found.rejected["not_selected"] += 1
            return []
        rows = record_formats.parse_record(record, record.format or curation.format)
        if (rows[0].kind == "text") != (reads == "passage"):
            expected = "plain text or a document" if reads == "passage" else "a conversation"
            raise record_formats.RecordFormatError(f"a row of kind {rows[0].kind}; expected {expected}")
    except record_formats.RecordFormatError as error:
        reason = personal_data.mask(str(error), curation.personal_data.names)
        found.unreadable.append(UnreadableRecord(record.file, record.line, reason))
        return []
    return rows


def _add_passage(row: Row, source: Source, curation: DataCurationConfig, found: Passages) -> None:
    text_normalization.normalize_row(row)
    _, private = redaction.redact_row(row, curation.personal_data)
    rejection = row_filters.find_rejection(MeasuredRow(row), curation) or private
    text = row.content["text"]
    location = {name: row.meta[name] for name in PAGE_FIELDS if row.meta.get(name)}
    passage = Passage(text, row.file, source.sha256, row.line, location)
    if rejection:
        found.rejected[rejection.reason] += 1
    elif len(text.split()) < MIN_PASSAGE_WORDS and text.isascii():
        found.rejected["short_passage"] += 1
    else:
        found.add(passage)


def _add_prompt(
    row: Row,
    source: Source,
    curation: DataCurationConfig,
    index: EvaluationIndex | None,
    found: Passages,
) -> None:
    """Add the conversation of a row up to its last user turn. The answer of the row is not filtered, as it is replaced."""
    text_normalization.normalize_row(row)
    messages, text = _extract_prompt(row)
    contamination = index.find_contamination(text) if index else None
    row.content = {"messages": list(messages), "tools": row.content.get("tools")}
    _, private = redaction.redact_row(row, curation.personal_data)  # evaluation items are not redacted
    messages, text = _extract_prompt(row)
    location = {"row_id": row.own_id, "row_meta": row.meta}
    passage = Passage(
        text,
        row.file,
        source.sha256,
        row.line,
        {name: value for name, value in location.items() if value},
        messages,
        row.source,
    )
    if rejection := private or contamination:
        found.rejected[rejection.reason] += 1
    elif not messages or not messages[-1]["content"].strip():
        found.rejected["empty_prompt"] += 1
    elif row.content.get("tools") or any(message["role"] == "tool" for message in messages):
        found.rejected["has_tools"] += 1
    else:
        found.add(passage)


def _extract_prompt(row: Row) -> tuple[tuple[dict[str, str], ...], str]:
    """Return the messages up to the last user turn, and their text."""
    messages = row.content.get("messages") or row.content.get("prompt") or []
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return tuple(messages[: last + 1]), "\n".join(message["content"] for message in messages[: last + 1])


def _raise_empty(found: Passages, reads: Reads) -> None:
    reasons = [f"{count} {reason}" for reason, count in sorted(found.rejected.items())]
    hint = (
        "Use documents with text; --set data_curation.documents.ocr=tesseract reads scanned pages."
        if reads == "passage"
        else "Use rows with prompts, such as those of a dataset; for documents, use --template qa@1."
    )
    if found.unreadable:
        first = found.unreadable[0]
        reasons.append(f"{len(found.unreadable)} unreadable, the first {first.file}:{first.line}: {first.reason}")
        hint = find_hint(first) or hint
    raise InputError(f"the sources contain no {reads}: {'; '.join(reasons) or 'they are empty'}", hint=hint)
