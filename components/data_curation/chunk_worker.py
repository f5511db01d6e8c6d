"""Row-level processing: turns a chunk of records into files of prepared rows.

The result depends only on the chunk and the configuration. One process, several processes and the nodes of a Ray
cluster therefore produce the same bytes. A prepared row contains the hashes that the comparison of rows uses.
"""

#     python -m components.data_curation.chunk_worker FOLDER DESCRIPTOR      reads chunk numbers from standard input

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from components.common import personal_data
from components.common.row_comparison.prompt_lines import CONTEXT_COLUMNS
from components.common.runtime import filesystem, process_control
from components.common.runtime.errors import TunelineError, translate_system_error
from components.common.runtime.reporters import SilentReporter
from components.data_curation import text_normalization
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters import redaction, row_filters
from components.data_curation.filters.decontamination import EvaluationIndex
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.filters.reject_reasons import NOT_SELECTED, Rejection
from components.data_curation.normalized_words import (
    build_exact_key,
    normalize_answer,
    normalize_words,
    split_row_words,
)
from components.data_curation.parquet_files import get_content_columns
from components.data_curation.reading import record_formats
from components.data_curation.reading.raw_records import NO_TEXT_REASON, Record, Source, UnreadableRecord, file_suffix
from components.data_curation.row_kinds import KindCount, KindCounts, add_count, describe_other_kind
from components.data_curation.rows import CONTENT_COLUMNS, Kind, Row, to_json

CHUNK_STRIDE = 1 << 24  # a row's place is its chunk's number times this, plus its number in the chunk
SETTINGS_FILENAME = "work.json"
TEXT_NAMES = ("words", "answer")  # the texts that the engine compares
HASH_NAMES = ("exact", *TEXT_NAMES, "prompt", "group")


@dataclass
class ChunkSummary:
    """Counts of a prepared chunk.

    Attributes:
        number: the chunk's number.
        rows: the number of rows.
        kinds: the number of rows by kind. Rows of other kinds than the dataset's are among `unread`.
        unread: the unreadable records.
        personal: per kind of personal data, the number of findings and of rows that contain them.
        files: the names of the rows' files.
        formats: the number of rows per record format.
        documents: per type of document, the numbers of chunks, of pages that were read, and of pages without text.
        chunk_tokens: the number of chunks of documents per length class: the lowest power of two that is not shorter.
        grouped: the number of rows with a `group_by` value.
        redacted_groups: the number of rows whose `group_by` value was redacted.
    """

    number: int
    rows: int = 0
    kinds: KindCounts = field(default_factory=dict)
    unread: list[UnreadableRecord] = field(default_factory=list)
    personal: dict[str, list[int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=dict)
    documents: dict[str, list[int]] = field(default_factory=dict)
    chunk_tokens: dict[str, int] = field(default_factory=dict)
    grouped: int = 0
    redacted_groups: int = 0


@dataclass
class PreparedRow:
    """A row, its rejection if any, and the value of its `group_by` field."""

    row: Row
    rejection: Rejection | None
    group: str | None


def prepare_chunk(
    number: int,
    records: Iterable[Record | UnreadableRecord],
    kind: Kind | None,
    config: DataCurationConfig,
    benchmarks: EvaluationIndex | None,
    folder: Path,
) -> ChunkSummary:
    """Parse, clean, redact and filter the records of a chunk, and write its files (see `write_chunk`).

    Args:
        number: the chunk's number.
        records: the chunk's records.
        kind: the kind of the dataset's rows; records of other kinds are quarantined. None if no record is readable.
        config: the stage's configuration.
        benchmarks: the index of the evaluation sets; None without decontamination.
        folder: the folder of the chunks.

    Returns:
        The counts of the chunk.
    """
    summary, prepared = ChunkSummary(number), []
    for record in records:
        _count_document(record, summary)
        try:
            rows = _parse_and_count_rows(record, kind, summary, config) if isinstance(record, Record) else []
            unselected = (
                NOT_SELECTED.reject(record.excluded_by) if isinstance(record, Record) and record.excluded_by else None
            )
        except record_formats.RecordFormatError as error:
            rows, record = [], UnreadableRecord(record.file, record.line, str(error))
        if isinstance(record, UnreadableRecord):  # the reason may quote the data
            reason = personal_data.mask(record.reason, config.personal_data.names)
            summary.unread.append(replace(record, reason=reason))
        for row in rows:
            text_normalization.normalize_row(row)
            text = row.text()  # before redaction, because evaluation items are not redacted
            group = _get_group_value(row, config.group_by)  # before redaction, which makes values equal
            findings, private = redaction.redact_row(row, config.personal_data)
            summary.grouped += group is not None
            summary.redacted_groups += group != _get_group_value(row, config.group_by)
            for name, count in findings.items():
                totals = summary.personal.setdefault(name, [0, 0])
                totals[0] += count
                totals[1] += 1
            rejection = unselected or row_filters.find_rejection(MeasuredRow(row), config) or private
            if not rejection and benchmarks:
                rejection = benchmarks.find_contamination(text)
            prepared.append(PreparedRow(row, rejection, group))
    return write_chunk(summary, prepared, config, folder)


def _count_document(record: Record | UnreadableRecord, summary: ChunkSummary) -> None:
    """Count a chunk of a document, or a page without text."""
    if isinstance(record, UnreadableRecord):
        if record.reason.endswith(NO_TEXT_REASON):
            summary.documents.setdefault(file_suffix(Path(record.file))[1:], [0, 0, 0])[2] += 1
    elif record.tokens:
        counts = summary.documents.setdefault(file_suffix(Path(record.file))[1:], [0, 0, 0])
        counts[0] += 1
        counts[1] += record.pages
        length_class = str(1 << max(record.tokens - 1, 0).bit_length())
        summary.chunk_tokens[length_class] = summary.chunk_tokens.get(length_class, 0) + 1


def _parse_and_count_rows(
    record: Record, kind: Kind | None, summary: ChunkSummary, config: DataCurationConfig
) -> list[Row]:
    """Parse a record, add its rows to the counts by kind, and return them.

    Raises:
        RecordFormatError: the record is invalid, or its rows, all of one kind, are not of the dataset's kind.
    """
    if record.excluded_by:  # may be of any format
        return [_build_unselected_row(record, kind or "sft")]
    rows = record_formats.parse_record(record, record.format or config.format)
    for row in rows:
        add_count(summary.kinds, row.kind, KindCount(row.file, row.line))
    if kind and rows[0].kind != kind:
        raise record_formats.RecordFormatError(describe_other_kind(rows[0], kind))
    return rows


def _build_unselected_row(record: Record, kind: Kind) -> Row:
    """Return a row of the dataset's kind whose text is the record."""
    text = json.dumps(record.fields, ensure_ascii=False).encode(errors="replace").decode()
    turn = [{"role": "user", "content": text}]
    values = {
        "text": text,
        "messages": turn,
        "prompt": turn,
        "chosen": [],
        "rejected": [],
        "completion": [],
        "label": False,
    }
    content = {name: values.get(name) for name in CONTENT_COLUMNS[kind]}
    return Row(kind, content, "", record.file, {}, record.file, record.line, format="not selected")


def prepare_published_chunk(number: int, rows: Sequence[Row], config: DataCurationConfig, folder: Path) -> ChunkSummary:
    """Write a chunk of published rows, which are neither cleaned nor filtered."""
    prepared = []
    for row in rows:
        group = _get_group_value(row, config.group_by)
        if group and any(placeholder in group for placeholder in personal_data.PLACEHOLDERS.values()):
            group = None  # the original group is unknown
        prepared.append(PreparedRow(row, None, group))
    return write_chunk(ChunkSummary(number), prepared, config, folder)


def _get_group_value(row: Row, key: str) -> str | None:
    is_source = key.lower() == "source" and (key == "source" or key not in row.meta)  # Row.source may be from "Source"
    value = row.source if is_source else row.meta.get(key)
    return json.dumps(value, sort_keys=True) if key and value is not None else None


def write_chunk(
    summary: ChunkSummary, prepared: Sequence[PreparedRow], config: DataCurationConfig, folder: Path
) -> ChunkSummary:
    """Write rows-*.arrow with every row, and texts-*.parquet with the texts that the engine compares.

    No file is written for an empty chunk.

    Returns:
        The summary, completed with the counts of the rows.
    """
    import pyarrow
    from pyarrow import ipc, parquet

    summary.rows, summary.files = len(prepared), sorted({item.row.file for item in prepared})
    summary.formats = dict(Counter(item.row.format for item in prepared))
    if not prepared:
        return summary
    kind = prepared[0].row.kind
    rows = [_build_columns(item, summary.number * CHUNK_STRIDE + i, kind, config) for i, item in enumerate(prepared)]
    string, number, digest = pyarrow.string(), pyarrow.int64(), pyarrow.binary(16)
    texts = ["own_id", "source", "meta", "file", "reason", "detail", "digest"]
    columns = [*get_content_columns(kind), *((name, string) for name in texts)]
    columns += [(name, number) for name in ("place", "line", "characters")]
    columns += [(f"{name}_hash", digest) for name in HASH_NAMES]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns))
    options = ipc.IpcWriteOptions(compression="lz4")
    with (
        pyarrow.OSFile(str(get_rows_path(folder, summary.number)), "wb") as sink,
        ipc.new_file(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
    compared = [("place", number), *((name, pyarrow.large_string()) for name in TEXT_NAMES)]
    compared += [(f"{name}_hash", digest) for name in TEXT_NAMES]
    compared += zip(CONTEXT_COLUMNS, (pyarrow.list_(number), number, pyarrow.list_(number), number), strict=True)
    kept = [row for row in rows if row["reason"] is None]
    compared_texts = pyarrow.Table.from_pylist(kept, schema=pyarrow.schema(compared))
    parquet.write_table(compared_texts, folder / f"texts-{summary.number:09}.parquet")
    return summary


def remove_chunks(folder: Path) -> None:
    """Remove the files of all chunks (see `write_chunk`)."""
    for path in [*folder.glob("rows-*.arrow"), *folder.glob("texts-*.parquet")]:
        path.unlink(missing_ok=True)


def get_rows_path(folder: Path, number: int) -> Path:
    """Return the path of a chunk's rows."""
    return folder / f"rows-{number:09}.arrow"


def _build_columns(prepared: PreparedRow, place: int, kind: Kind, config: DataCurationConfig) -> dict[str, Any]:
    """Return the columns of a row in both files."""
    row, text = prepared.row, prepared.row.text()
    columns = {
        **{name: row.content.get(name) for name in CONTENT_COLUMNS[kind]},
        "place": place,
        "own_id": row.own_id,
        "source": row.source,
        "meta": to_json(row.meta),
        "file": row.file,
        "line": row.line,
        "reason": prepared.rejection.reason if prepared.rejection else None,
        "detail": prepared.rejection.detail if prepared.rejection else None,
        "digest": row.digest(),
        "characters": len(text),
    }
    if prepared.rejection:
        return columns
    word_list, lines = split_row_words(row)
    words = " ".join(word_list)
    answer = normalize_answer(row, config.answer_min_words, word_list, lines)
    prompt = normalize_words(row.prompt()) if kind in ("preference", "unpaired") else None
    values = {
        "exact": build_exact_key(kind, text),
        "words": words,
        "answer": answer,
        "prompt": prompt,
        "group": prepared.group,
    }
    hashes = {  # of 128 bits: among a billion texts, the probability of a collision is 1e-21
        f"{name}_hash": hashlib.blake2b(value.encode(), digest_size=16).digest()
        for name, value in values.items()
        if value is not None
    }
    found = (lines.ends, lines.turn_start, lines.list_keys(word_list), lines.build_answer_key(word_list))
    context = dict(zip(CONTEXT_COLUMNS, found, strict=True))
    return {**columns, "words": words, "answer": answer, **context, **hashes}


# --- worker processes -------------------------------------------------------------------------------------------------


def get_raw_path(folder: Path, number: int) -> Path:
    """Return the path of a chunk's records for a worker."""
    return folder / f"raw-{number:09}.jsonl"


def get_summary_path(folder: Path, number: int) -> Path:
    """Return the path of the summary that a worker writes."""
    return folder / f"done-{number:09}.json"


def write_settings(folder: Path, kind: Kind | None, config: DataCurationConfig, benchmarks: Sequence[Source]) -> None:
    """Write the workers' settings."""
    sets = [one.model_dump() for one in benchmarks]
    settings = {"kind": kind, "config": config.model_dump(mode="json"), "benchmarks": sets}
    (folder / SETTINGS_FILENAME).write_text(json.dumps(settings), encoding="utf-8")


def write_raw_chunk(folder: Path, number: int, records: Iterable[Record | UnreadableRecord]) -> None:
    """Write a chunk's records for a worker."""
    with get_raw_path(folder, number).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(vars(one)) + "\n" for one in records)


def prepare_raw_chunk(folder: str, number: int) -> int:
    """Prepare a chunk written by `write_raw_chunk`; return its number of rows."""
    process_control.restrict_new_files()  # a Ray worker does not inherit the umask of the step
    path = Path(folder)
    kind, config, benchmarks = _load_settings((path / SETTINGS_FILENAME).read_text(encoding="utf-8"))
    with get_raw_path(path, number).open(encoding="utf-8") as file:
        lines = map(json.loads, file)
        records = (UnreadableRecord(**fields) if "reason" in fields else Record(**fields) for fields in lines)
        summary = prepare_chunk(number, records, kind, config, benchmarks, path)
    partial = get_summary_path(path, number).with_suffix(".half")
    partial.write_text(json.dumps(asdict(summary)), encoding="utf-8")
    filesystem.rename(partial, get_summary_path(path, number))
    return summary.rows


def collect_chunk(folder: Path, number: int) -> ChunkSummary:
    """Return a worker's summary; remove its files except the prepared rows."""
    fields = json.loads(get_summary_path(folder, number).read_text(encoding="utf-8"))
    get_raw_path(folder, number).unlink(missing_ok=True)
    get_summary_path(folder, number).unlink(missing_ok=True)
    fields["kinds"] = {kind: KindCount(**count) for kind, count in fields["kinds"].items()}
    fields["unread"] = [UnreadableRecord(**one) for one in fields["unread"]]
    return ChunkSummary(**fields)


@functools.lru_cache(maxsize=1)
def _load_settings(settings: str) -> tuple[Kind | None, DataCurationConfig, EvaluationIndex | None]:
    """Return the kind of the rows, the configuration and the index of the evaluation sets. Each process builds the index once."""
    fields = json.loads(settings)
    config = DataCurationConfig(**fields["config"])
    sets = [Source(**one) for one in fields["benchmarks"]]
    return fields["kind"], config, EvaluationIndex.build(sets, config, SilentReporter()) if sets else None


def run_worker(folder: str, descriptor: int) -> None:
    """Prepare the chunks whose numbers are read from standard input, one per line, until end of file.

    Args:
        folder: the folder of the chunks.
        descriptor: the file descriptor for the results. Each line is the chunk's number, or an error as JSON.
    """
    process_control.die_with_process(os.getppid())
    answers = os.fdopen(descriptor, "w", encoding="utf-8")
    gc.freeze()  # see prepared_chunks.prepare_chunks
    for line in sys.stdin:
        try:
            prepare_raw_chunk(folder, int(line))
            answer: object = int(line)
        except TunelineError as error:
            answer = error.as_dict()
        except Exception as error:
            machine_error = translate_system_error(error, [Path(folder)])
            if machine_error is None:
                raise
            answer = machine_error.as_dict()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    run_worker(sys.argv[1], int(sys.argv[2]))
