"""Reads the first records of each source: to check the columns of its settings, to suggest columns, and for a preview."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import personal_data
from components.common.runtime.errors import ConfigurationError
from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters import redaction
from components.data_curation.reading import column_mapping, file_readers, record_formats
from components.data_curation.reading.raw_records import Record, Source, UnreadableRecord
from components.data_curation.reading.source_settings import ColumnTarget, SourceSettings
from components.data_curation.rows import CONTENT_COLUMNS

CHECKED_RECORDS = 100  # of a source, for its columns
# Hints for a source that could not be read, by a part of the reason.
COPY_HINT = "Replace {file} with a new copy or download of the original."
ENCODING_HINT = "Set the encoding of the file, as in data_curation.sources: [{{path: {file}, encoding: {encoding}}}], or convert it to UTF-8."
UNREADABLE_SOURCE_HINTS = {
    "UTF-16LE": ENCODING_HINT.replace("{encoding}", "UTF-16LE"),
    "UTF-16BE": ENCODING_HINT.replace("{encoding}", "UTF-16BE"),
    "requires OCR": "Set data_curation.documents.ocr to tesseract, or use a file with text.",
    "encrypted": "Use a decrypted copy of {file}.",
    "not UTF-8": ENCODING_HINT.replace("{encoding}", "cp1252"),
    "data without the .": "Rename the file so that its name ends with that suffix.",
    "truncated": COPY_HINT,
    "damaged": COPY_HINT,
    "WAT file": "Use the WARC or WET file of the same crawl; a WAT file contains no text.",
}


@dataclass
class SourcePreview:
    """The first records of a source.

    Attributes:
        source: the file.
        base: the folder of the configuration, to which paths in it are relative.
        columns: the keys of the records, in the order of their first appearance.
        read: the number of records.
        formats: the number of rows by record format.
        not_selected: the number of records that `where` does not select.
        rows: the content of the rows, redacted as in the dataset.
        unreadable: the records that cannot be read.
        missing: the columns of the settings that no record has.
        suggestion: columns by role, if no record has a known format.
    """

    source: Source
    base: Path
    columns: list[str] = field(default_factory=list)
    read: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    not_selected: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[UnreadableRecord] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    suggestion: dict[ColumnTarget, str] = field(default_factory=dict)

    @property
    def is_cached(self) -> bool:
        """Whether the file is a local copy, of a database or a data repository, whose path is not in the configuration."""
        return bool(self.source.extract or self.source.called)

    def build_suggestion(self) -> dict[str, Any]:
        """Return the source with the suggested columns, of a local copy the columns alone; {} without a suggestion."""
        if not self.suggestion or self.is_cached:
            return {"columns": dict(self.suggestion)} if self.suggestion else {}
        return column_mapping.build_entry(self.path, self.source.settings, self.suggestion)

    def format_suggestion(self) -> str:
        """Return the suggestion as YAML in one line; "" without a suggestion."""
        import yaml

        dumped: str = yaml.safe_dump(
            self.build_suggestion(), default_flow_style=True, sort_keys=False, allow_unicode=True, width=100_000
        )
        return dumped.strip() if self.suggestion else ""

    def format_missing(self) -> str:
        """Return the missing columns with similar names; "" if none is missing."""
        return _describe_missing(self.source, self.missing, self.columns) if self.missing else ""

    @property
    def path(self) -> str:
        """The path of the source, relative to the folder of the configuration if it is in this folder."""
        return self.source.uri.removeprefix(f"{self.base.resolve()}/")


def preview_source(source: Source, config: DataCurationConfig, limit: int, base: Path | None = None) -> SourcePreview:
    """Read the first `limit` records of a source as the curation would.

    Args:
        source: the file.
        config: the configuration of the stage.
        limit: the maximum number of records.
        base: the folder of the configuration, for the suggested path. Default: the current folder.

    Raises:
        InputError: the file can no longer be read.
    """
    raw = _read_first(source, config, limit)
    found = SourcePreview(source, base or Path.cwd(), read=len(raw))
    readable = [record for record in raw if isinstance(record, Record)]
    fields = [record.fields for record in readable]
    found.columns = column_mapping.list_columns(fields)
    found.missing = column_mapping.find_missing_columns(readable, source.settings) if readable else []
    for record in column_mapping.apply_settings(raw, source.settings):
        if isinstance(record, UnreadableRecord):
            found.unreadable.append(record)
            continue
        if record.excluded_by:
            found.not_selected += 1
            continue
        try:
            rows = record_formats.parse_record(record, record.format or config.format)
        except record_formats.RecordFormatError as error:
            found.unreadable.append(UnreadableRecord(record.file, record.line, str(error)))
            continue
        for row in rows:
            text_normalization.normalize_row(row)
            redaction.redact_row(row, config.personal_data)
            found.formats[row.format] += 1
            content = {name: row.content.get(name) for name in CONTENT_COLUMNS[row.kind]}
            found.rows.append({"line": row.line, "kind": row.kind, **content, "meta": row.meta})
    masked = (personal_data.mask(one.reason, config.personal_data.names) for one in found.unreadable)
    found.unreadable = [
        UnreadableRecord(one.file, one.line, reason) for one, reason in zip(found.unreadable, masked, strict=True)
    ]
    is_unknown = bool(found.unreadable) and not found.rows
    if fields and is_unknown and not source.settings.columns and not source.settings.template:
        found.suggestion = column_mapping.suggest_columns(fields)
    return found


def find_hint(record: UnreadableRecord) -> str:
    """Return the hint for an unreadable record; "" if its reason has none."""
    hints = (text for fragment, text in UNREADABLE_SOURCE_HINTS.items() if fragment in record.reason)
    return next(hints, "").format(file=record.file)


def check_columns(sources: Sequence[Source], config: DataCurationConfig) -> None:
    """Check that the first records of each source have the columns of its settings.

    Raises:
        ConfigurationError: none of these records has a column.
        InputError: a file can no longer be read.
    """
    for source in sources:
        settings = source.settings
        if not (settings.columns or settings.template or settings.where):
            continue
        records = [one for one in _read_first(source, config, CHECKED_RECORDS) if isinstance(one, Record)]
        missing = column_mapping.find_missing_columns(records, settings) if records else []
        if missing:
            columns = column_mapping.list_columns(record.fields for record in records)
            raise ConfigurationError(
                f"data_curation.sources: {_describe_missing(source, missing, columns)}",
                hint=_suggest_names(missing, columns),
            )


def _describe_missing(source: Source, missing: Sequence[str], columns: Sequence[str]) -> str:
    names = ", ".join(map(repr, missing))
    described = record_formats.describe_keys(dict.fromkeys(columns)).replace("keys", "columns", 1)
    return f"{source.name} has no column {names}; it has the {described}"


def _suggest_names(missing: Sequence[str], columns: Sequence[str]) -> str:
    similar = [(name, difflib.get_close_matches(name, columns, n=1)) for name in missing]
    corrections = [f"{matches[0]} instead of {name}" for name, matches in similar if matches]
    if corrections:
        return (
            f"Write {', '.join(corrections)}. A file with other columns needs its own entry in data_curation.sources."
        )
    return "Use the names of columns of this file, or give files with other columns their own entries."


def _read_first(source: Source, config: DataCurationConfig, limit: int) -> list[Record | UnreadableRecord]:
    """Return the first records with their own keys."""
    layout = source.settings.model_copy(update={"columns": {}, "template": "", "where": "", "format": ""})
    plain = source.model_copy(update={"settings": SourceSettings.model_validate(layout.model_dump())})
    with closing(file_readers.read_records(plain, config)) as records:
        return list(itertools.islice(records, limit))
