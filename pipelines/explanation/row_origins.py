"""Origins of training rows: source file and line, the dataset's revision, and what is no longer available."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from components.common.artifacts.artifact_folder import Artifact, ArtifactInput
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import Reporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters import redaction
from components.data_curation.reading import file_readers, record_formats
from components.data_curation.reading.extracts import EXTRACT_SCHEME
from components.data_curation.reading.raw_records import Record, Source
from components.data_curation.reading.source_settings import SourceSettings
from components.data_curation.stage import find_sources_by_name
from components.data_versioning import stage as versioning
from components.data_versioning.config import DataVersioningConfig
from pipelines.steps.curation_inputs import DEMO_SOURCE, demo_dataset_path

MAX_READ_BYTES = 1_000_000_000  # of a raw file that is read again to find lines
COUNTER = re.compile(r"-[0-9]+$")  # that curation appends to a repeated id


@dataclass
class Origins:
    """Origins of rows.

    Attributes:
        revision: URI of the latest revision with the dataset's content; "" if it was not published.
        lines: File and line by row id, such as raw.jsonl:12.
        notes: Raw files that were not searched, with the reason, and a newer revision of the dataset.
    """

    revision: str = ""
    lines: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_origins(
    ids: Collection[str], dataset: Artifact, config: DataVersioningConfig, work: Workdir, reporter: Reporter
) -> Origins:
    """Return the origins of rows. The dataset records no lines, so intact raw files are read again as curation reads them.

    Args:
        ids: Ids of the rows.
        dataset: Their dataset.
        config: Settings of the data repository.
        work: The workdir.
        reporter: Receives progress.
    """
    origins = Origins()
    try:
        versions = versioning.list_versions(config, workdir=work.root)
        same = [version for version in versions if version.content_sha256 == dataset.sha256]
        origins.revision = same[-1].uri if same else ""
        if same and versions[-1].content_sha256 != dataset.sha256:
            origins.notes.append(
                f"{versions[-1].tag} is newer than the dataset's revision {same[-1].tag}; `tuneline data find --row ID` "
                "lists the revisions that still contain a row"
            )
    except TunelineError as error:
        origins.notes.append(f"the data repository was not searched: {error.message}")
    try:
        curation = DataCurationConfig.model_validate(dataset.manifest.config)
    except ValidationError:
        origins.notes.append("the manifest has no curation settings, so no source lines were searched")
        return origins
    raw = [one for one in dataset.manifest.inputs if one.kind == "raw"]
    patterns = [str(demo_dataset_path(work)) if entry.path == DEMO_SOURCE else entry.path for entry in curation.sources]
    for recorded in raw:
        if len(origins.lines) == len(ids):
            break
        reporter.step(f"searching {recorded.uri}")
        source = _find_source(recorded, patterns, origins)
        if source is not None:
            _search_file(source, curation, ids, origins)
    return origins


def _find_source(recorded: ArtifactInput, patterns: Sequence[str], origins: Origins) -> Source | None:
    """Return the raw file if it is intact and not too large; otherwise add a note."""
    if recorded.uri.startswith(EXTRACT_SCHEME):
        origins.notes.append(f"{recorded.uri} is an extract of a database, which has no lines")
        return None
    files = find_sources_by_name(recorded.uri, patterns, Path.cwd())
    same = next((file for file in files if file.sha256 == recorded.content_sha256), None)
    if same is None:
        state = "has changed since curation" if files else "no longer exists: it was moved or erased"
        origins.notes.append(f"{recorded.uri} {state}; its digest at curation is {recorded.content_sha256[:12]}")
        return None
    if same.bytes > MAX_READ_BYTES:
        origins.notes.append(f"{recorded.uri} has {same.bytes:,} bytes and was not searched for lines")
        return None
    settings = SourceSettings.model_validate(recorded.settings or {})
    return same.model_copy(update={"settings": settings})


def _search_file(source: Source, curation: DataCurationConfig, ids: Collection[str], origins: Origins) -> None:
    """Add the first line of each row that the file contains. A row's id is its own id or the digest of its content."""
    wanted = {COUNTER.sub("", one): one for one in ids} | {one: one for one in ids}
    try:
        with closing(file_readers.read_records(source, curation)) as records:
            for record in records:
                if not isinstance(record, Record) or record.excluded_by:
                    continue
                try:
                    rows = record_formats.parse_record(record, record.format or curation.format)
                except record_formats.RecordFormatError:
                    continue
                for row in rows:
                    text_normalization.normalize_row(row)
                    redaction.redact_row(row, curation.personal_data)
                    found = wanted.get(row.own_id or row.digest()[:16])
                    if found:
                        origins.lines.setdefault(found, f"{source.name}:{row.line}")
    except TunelineError as error:
        origins.notes.append(f"{source.name} was not searched for lines: {error.message}")
