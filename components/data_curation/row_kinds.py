"""The kind of a dataset's rows, which a sample of the sources decides before the rows are prepared.

All rows of a dataset have the columns of one kind, so rows of other kinds are quarantined. A larger share of them than
`max_other_kind_share` is an error, because it is likely a mistake in the list of sources.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from components.common.runtime.errors import InputError
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import file_readers, record_formats
from components.data_curation.reading.raw_records import COMPRESSION_SUFFIXES, NO_TEXT_REASON, Record, Source
from components.data_curation.rows import Kind, Row

MAX_SAMPLED_FILES = 100
SAMPLED_ROWS_PER_FILE = 100
MAX_SAMPLED_RECORDS_PER_FILE = 1_000  # bounds the sample of a file with many unreadable records
ESTIMATED_COMPRESSION_RATIO = 4  # of text with gzip, zstd or Parquet; measuring it requires reading the whole file
ESTIMATE_MARGIN = 2  # an estimated share is an error above this multiple of the limit; the exact check decides the rest


@dataclass
class KindCount:
    """The rows of a kind.

    Attributes:
        file: the file of the first row.
        line: the line of the first row.
        read: the number of rows that were read.
        rows: the number of rows; of a sample, estimated.
    """

    file: str
    line: int
    read: int = 1
    rows: float = 1.0


KindCounts = dict[Kind, KindCount]


def add_count(counts: KindCounts, kind: Kind, count: KindCount) -> None:
    """Add the rows to the counts of the kind; the first location stays."""
    total = counts.setdefault(kind, KindCount(count.file, count.line, 0, 0.0))
    total.read += count.read
    total.rows += count.rows


def sample_kinds(sources: Sequence[Source], config: DataCurationConfig) -> KindCounts:
    """Estimate the number of rows of each kind by the first rows of the files.

    Of many files about MAX_SAMPLED_FILES are read: one at a random position in each of as many equal ranges, because a
    fixed step may only find files of one kind. If they contain no row, the others are read too.

    Raises:
        InputError: a file can no longer be read.
    """
    counts: KindCounts = {}
    sampled = _choose_files(len(sources))
    for index in sampled:
        _sample_file(sources[index], config, counts)
    for index in sorted({*range(len(sources))}.difference(sampled)):
        if counts:
            break
        _sample_file(sources[index], config, counts)
    return counts


def _choose_files(count: int) -> list[int]:
    """Return the indexes of the sampled files, the same in every run."""
    if count <= MAX_SAMPLED_FILES:
        return list(range(count))
    generator, spacing = random.Random(0), count / MAX_SAMPLED_FILES  # noqa: S311 - not for security
    return sorted({int((number + generator.random()) * spacing) for number in range(MAX_SAMPLED_FILES)})


def _sample_file(source: Source, config: DataCurationConfig, counts: KindCounts) -> None:
    """Add the kinds of the first rows of a file, extrapolated to the size of the file."""
    found: list[tuple[Kind, KindCount]] = []
    sampled_bytes = 0
    without_ocr = config.documents.model_copy(update={"ocr": "none"})  # which takes seconds per page
    sampling = config.model_copy(update={"documents": without_ocr})
    with closing(file_readers.read_records(source, sampling)) as records:
        for number, record in enumerate(records, 1):
            if isinstance(record, Record):
                with suppress(record_formats.RecordFormatError):
                    rows = (
                        []
                        if record.excluded_by
                        else record_formats.parse_record(record, record.format or config.format)
                    )
                    found += [(row.kind, KindCount(row.file, row.line)) for row in rows]
                text = json.dumps(record.unmapped | record.fields, ensure_ascii=False)
                sampled_bytes += len(text.encode(errors="surrogatepass"))
            elif config.documents.ocr != "none" and record.reason.endswith(NO_TEXT_REASON):
                found.append(("text", KindCount(record.file, record.line)))
            if len(found) >= SAMPLED_ROWS_PER_FILE or number >= MAX_SAMPLED_RECORDS_PER_FILE:
                break
        is_complete = next(records, None) is None
    is_compressed = Path(source.name).suffix.lower() in (*COMPRESSION_SUFFIXES, ".ods", ".parquet", ".xlsx")
    file_bytes = source.bytes * ESTIMATED_COMPRESSION_RATIO if is_compressed else source.bytes
    scale = 1.0 if is_complete else max(1.0, file_bytes / max(1, sampled_bytes))
    for kind, count in found:
        add_count(counts, kind, replace(count, rows=scale))


def find_main_kind(counts: Mapping[Kind, KindCount]) -> Kind | None:
    """Return the kind of most rows, of equally frequent kinds the first; None without a row."""
    return max(counts, key=lambda kind: counts[kind].rows, default=None)


def check_mix(counts: Mapping[Kind, KindCount], main: Kind | None, limit: float, *, is_estimate: bool = False) -> None:
    """Raise InputError if several rows, and more than a share, are not of the main kind.

    Args:
        counts: the number of rows by kind.
        main: the kind of the dataset's rows.
        limit: the maximum share of rows of other kinds.
        is_estimate: whether the counts are estimated. The share must then exceed ESTIMATE_MARGIN times the limit.
    """
    total = sum(count.rows for count in counts.values())
    other_counts = [count for kind, count in counts.items() if kind != main]
    others = sum(count.rows for count in other_counts)
    margin, qualifier = (ESTIMATE_MARGIN, "an estimated ") if is_estimate else (1, "")
    if sum(count.read for count in other_counts) <= 1 or others <= margin * limit * total:
        return
    locations = ", ".join(f"{kind} ({count.file}:{count.line})" for kind, count in counts.items())
    raise InputError(
        f"the sources mix row kinds: {locations}; {qualifier}{others / total:.1%} of the rows are not of kind "
        f"{main}; data_curation.max_other_kind_share is {limit:g}",
        hint="Use sources of one kind, or set data_curation.format to parse all records in one format. To quarantine the "
        "rows of other kinds, increase data_curation.max_other_kind_share.",
    )


def describe_other_kind(row: Row, main: Kind) -> str:
    """Return the quarantine reason for a row that is not of the dataset's kind."""
    reason = f"a row of kind {row.kind} (format {row.format}); the rows of this dataset are of kind {main}"
    if main == "text" and row.format == "hh":
        reason += ". Set data_curation.format to text to keep transcripts as text"
    return reason
