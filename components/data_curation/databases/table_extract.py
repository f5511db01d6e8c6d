"""Extraction of a table or a query's result into an artifact of the kind `extract`.

The artifact contains a Parquet file and request.json, with the query and the order of the rows. Its digest covers both:
equal rows of an equal query give an equal digest. The manifest's summary records from which database and snapshot the
rows were read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder, hashing
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.counts import format_count
from components.common.runtime.errors import TunelineError
from components.common.runtime.reporters import Reporter
from components.common.workspace import artifact_store
from components.data_curation.databases import arrow_types, database_registry
from components.data_curation.databases.open_tables import DatabaseKind, OpenTable
from components.data_curation.databases.table_request import TableRequest, build_request
from components.data_curation.reading.extracts import EXTRACT_KIND
from components.data_curation.reading.file_readers import to_json_value
from components.data_curation.reading.table_settings import TableSettings
from components.data_curation.reading.volatile_sql import is_volatile

if TYPE_CHECKING:
    import pyarrow

REQUEST_FILENAME = "request.json"
FORMAT_VERSION = 1  # part of the digest; increase it when equal rows are written as other bytes
ROW_GROUP_ROWS = 5_000  # fixed, so that the bytes do not depend on the driver's batches
COMPRESSION_LEVEL = 3
# Exceptions that are defects of tuneline and not errors of a database.
DEFECTS = (AttributeError, TypeError, LookupError, AssertionError, NameError, MemoryError)
MAX_ERROR_CHARACTERS = 400
BYTES_SHOWN_AS_MB = 1_000_000


def extract_table(
    address: str,
    settings: TableSettings,
    base: Path,
    store: Path,
    reporter: Reporter,
    scratch: Path | None = None,
    preview_rows: int = 0,
) -> Artifact:
    """Return the extract of a table, read now or found in the store for the same state of the table.

    Args:
        address: the address of the database.
        settings: the rows to read, and the limits.
        base: the base folder of relative paths.
        store: the artifact store.
        reporter: receives what was read.
        scratch: the folder of a new extract that is not stored, for a dry run.
        preview_rows: the number of rows to read into `scratch`, in any order, for a preview; 0 for all rows.

    Raises:
        ConfigurationError: the database cannot be read with these settings, or a limit is exceeded.
        EngineMissingError: the driver is not installed.
    """
    request = build_request(address, settings, base)
    kind = database_registry.find_kind(request)
    reporter.step(f"reading {request.address}")
    with _translated_errors(request, kind), kind.open(request) as table:
        key = _compute_key(request, table)
        if key and (sha256 := artifact_store.find_by_key(store, EXTRACT_KIND, key, use=scratch is None)):
            extract = artifact_store.load_artifact(store, sha256, EXTRACT_KIND, reporter=reporter)
            reporter.note(f"{describe_extract(extract)}; the stored rows are reused because the data is unchanged")
            return extract
        if scratch is not None:
            folder = scratch / hashing.digest([request.address, describe_request(request)])[:16]
            artifact_folder.claim_folder(folder, key, overwrite=True)
            extract = _write_extract(folder, request, kind, table, key, reporter, preview_rows)
            if not preview_rows:
                reporter.note(describe_extract(extract))
        else:
            with artifact_store.job_folder(store) as own:
                folder = own / EXTRACT_KIND
                artifact_folder.claim_folder(folder, key)
                extract = _store_extract(store, _write_extract(folder, request, kind, table, key, reporter), reporter)
            if key:
                artifact_store.write_note(store, f"keys/{EXTRACT_KIND}/{key}", extract.sha256 + "\n")
    return extract


def _store_extract(store: Path, built: Artifact, reporter: Reporter) -> Artifact:
    """Move an extract to the store. An extract with the same rows is kept, with the snapshot of its first reading."""
    if artifact_store.has_artifact(store, built.sha256):
        try:
            reporter.note(f"{describe_extract(built)}; equal to the stored rows")
            return artifact_store.load_artifact(store, built.sha256, EXTRACT_KIND, reporter=reporter)
        except TunelineError:  # damaged: replace it
            pass
    else:
        reporter.note(describe_extract(built))
    return artifact_store.add_artifact(store, built, reporter)


def describe_request(request: TableRequest) -> dict[str, Any]:
    """Return what is part of an extract's digest besides the rows."""
    settings = request.settings
    selection = {name: value for name in ("table", "query", "snapshot") if (value := getattr(settings, name))}
    return {"format": FORMAT_VERSION, **selection, "order_by": settings.order_by or "content"}


def _compute_key(request: TableRequest, table: OpenTable) -> str:
    """Return the key of an extract by the state of its table; "" if the rows do not depend on a known state only."""
    if not table.state_key or is_volatile(request.settings.query):
        return ""
    versions = [importlib.metadata.version("pyarrow")]
    return hashing.digest([request.address, str(request.base), describe_request(request), table.state_key, versions])


def iterate_rows(extract: Artifact) -> Iterator[dict[str, Any]]:
    """Yield the rows of an extract as JSON values; the texts of JSON columns are parsed."""
    from pyarrow import parquet

    file = next(one.path for one in extract.manifest.files if one.path.endswith(".parquet"))
    for batch in parquet.ParquetFile(extract.path / file).iter_batches(ROW_GROUP_ROWS):
        for row in batch.to_pylist():
            yield {name: _parse_text(to_json_value(value)) for name, value in row.items()}


def _parse_text(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def describe_extract(extract: Artifact) -> str:
    """Return what was read from where, in one line."""
    summary = extract.manifest.summary
    size = (
        f"{summary['bytes'] / 1e6:,.1f} MB"
        if summary["bytes"] >= BYTES_SHOWN_AS_MB
        else f"{summary['bytes'] / 1e3:,.1f} kB"
    )
    return (
        f"{summary['rows']:,} row{'s' * (summary['rows'] != 1)} ({size}) of {summary['selection']} in {summary['address']}, "
        f"{summary['snapshot']}"
    )


def name_extract(request: TableRequest) -> str:
    """Return the file name of an extract: the table's name, the query file's name, or a digest of the query."""
    settings = request.settings
    name = settings.table.rpartition(".")[2] or request.query_name
    if settings.query and not name:
        name = f"query-{hashlib.sha256(settings.query.encode()).hexdigest()[:8]}"
    if not name:  # the address names the table
        name = re.split(r"[/.]", request.address.partition("?")[0].rstrip("/"))[-1]
    return re.sub(r"[^\w.-]+", "-", name) + ".parquet"


@contextmanager
def _translated_errors(request: TableRequest, kind: DatabaseKind) -> Iterator[None]:
    """Translate errors of the driver to ConfigurationError without credentials."""
    try:
        yield
    except TunelineError:
        raise
    except arrow_types.UnsupportedColumnError as error:
        hint = "Select the columns with query, and convert them: SELECT CAST(column AS TEXT) AS column …."
        raise request.error(str(error), hint) from None
    except DEFECTS:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # such as a full disk; drivers set no number
            raise
        text = " ".join(request.mask(str(error)).split())
        problem, hint = kind.describe_error(request, text)
        raise request.error(problem[:MAX_ERROR_CHARACTERS], hint) from None


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class _RowCounter:
    """The rows and bytes so far. Raises ConfigurationError above a limit."""

    request: TableRequest
    rows: int = 0
    bytes: int = 0

    def add(self, batch: pyarrow.RecordBatch) -> None:
        self.rows += batch.num_rows
        self.bytes += batch.nbytes
        settings, hint = self.request.settings, "Select fewer rows with query, or raise"
        if self.rows > settings.max_rows:
            raise self.request.error(
                f"has more than {format_count(settings.max_rows, 'row')} (max_rows)", f"{hint} max_rows."
            )
        if self.bytes > settings.max_bytes:
            raise self.request.error(
                f"has more than {settings.max_bytes:,} bytes of rows (max_bytes)", f"{hint} max_bytes."
            )


def _write_extract(
    folder: Path,
    request: TableRequest,
    kind: DatabaseKind,
    table: OpenTable,
    key: str,
    reporter: Reporter,
    preview_rows: int = 0,
) -> Artifact:
    """Write the rows, or the first `preview_rows` that arrive, and the request to a claimed folder, and publish it."""
    name, counter, described = name_extract(request), _RowCounter(request), describe_request(request)
    started = datetime.now(UTC)
    stream = table.read()
    schema = arrow_types.convert_schema(stream.schema)
    order_by = _find_columns(request, schema)
    arriving = _take_rows(stream.batches, preview_rows) if preview_rows else stream.batches
    batches: Iterator[pyarrow.RecordBatch] = (
        arrow_types.convert_batch(batch, schema) for batch in _count_batches(arriving, counter, reporter)
    )
    if not order_by and not preview_rows:
        batches = _sort_by_content(batches, schema)
    elif not preview_rows:
        if not table.is_sorted:
            batches = _sort_by_columns(batches, schema, order_by)
        batches = _check_order(batches, request, order_by)
    _write_parquet(folder / name, schema, batches)
    (folder / REQUEST_FILENAME).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    settings = request.settings
    summary = {
        "rows": counter.rows,
        "bytes": (folder / name).stat().st_size,
        "columns": schema.names,
        "address": request.address,
        "database": kind.title,
        "selection": settings.table or (f"query {name.removesuffix('.parquet')}" if settings.query else "the table"),
        **({"query_sha256": hashlib.sha256(settings.query.encode()).hexdigest()} if settings.query else {}),
        "snapshot": table.snapshot,
        "state": table.details,
        "driver": f"{kind.distribution} {importlib.metadata.version(kind.distribution)}" if kind.distribution else "",
        "extracted_at": started.isoformat(timespec="seconds"),
    }
    return artifact_folder.publish(
        folder,
        EXTRACT_KIND,
        payload=[name, REQUEST_FILENAME],
        inputs=[],
        config=described,
        seed=0,
        key=key,
        summary=summary,
    )


def _count_batches(
    batches: Iterator[pyarrow.RecordBatch], counter: _RowCounter, reporter: Reporter
) -> Iterator[pyarrow.RecordBatch]:
    for batch in batches:
        counter.add(batch)
        reporter.progress(counter.rows, None, "rows")
        yield batch


def _take_rows(batches: Iterator[pyarrow.RecordBatch], count: int) -> Iterator[pyarrow.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, count)
        count -= batch.num_rows
        if count <= 0:
            return


def _write_parquet(path: Path, schema: pyarrow.Schema, batches: Iterator[pyarrow.RecordBatch]) -> None:
    """Write row groups of ROW_GROUP_ROWS rows, with fixed settings."""
    import pyarrow
    from pyarrow import parquet

    options = {"compression": "zstd", "compression_level": COMPRESSION_LEVEL, "version": "2.6"}
    with parquet.ParquetWriter(path, schema, **options) as writer:
        pending: list[pyarrow.RecordBatch] = []
        rows = 0
        for batch in batches:
            pending.append(batch)
            rows += batch.num_rows
            while rows >= ROW_GROUP_ROWS:
                table = pyarrow.Table.from_batches(pending, schema)
                writer.write_table(table.slice(0, ROW_GROUP_ROWS).combine_chunks(), row_group_size=ROW_GROUP_ROWS)
                pending, rows = table.slice(ROW_GROUP_ROWS).to_batches(), rows - ROW_GROUP_ROWS
        if rows:
            writer.write_table(pyarrow.Table.from_batches(pending, schema).combine_chunks())


def _sort_by_content(batches: Iterator[pyarrow.RecordBatch], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    """Sort rows by the SHA-256 of their JSON text, which does not depend on a database's collation."""
    import pyarrow

    kept, digests = [], []
    for batch in batches:
        kept.append(batch)
        for row in batch.to_pylist():
            text = json.dumps(to_json_value(row), ensure_ascii=False, separators=(",", ":"))
            digests.append(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    table = pyarrow.Table.from_batches(kept, schema)
    order = sorted(range(len(digests)), key=digests.__getitem__)
    for begin in range(0, len(order), ROW_GROUP_ROWS):
        yield from table.take(pyarrow.array(order[begin : begin + ROW_GROUP_ROWS], pyarrow.int64())).to_batches()


def _sort_by_columns(
    batches: Iterator[pyarrow.RecordBatch], schema: pyarrow.Schema, order_by: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    table = pyarrow.Table.from_batches(list(batches), schema)
    return iter(table.sort_by([(column, "ascending") for column in order_by]).to_batches())


def _find_columns(request: TableRequest, schema: pyarrow.Schema) -> list[str]:
    """Return the columns of order_by in the spelling of the result, which may differ in case."""
    folded = {name.lower(): name for name in schema.names}  # Snowflake returns names in upper case
    columns = []
    for name in request.settings.order_by:
        column = name if name in schema.names else folded.get(name.lower())
        if column is None:  # SQLite sorts by an unknown name as by a constant text
            hint = f"Set order_by to existing columns: {', '.join(schema.names)}."
            raise request.error(f"has no column {name!r} for order_by", hint)
        columns.append(column)
    return columns


def _check_order(
    batches: Iterator[pyarrow.RecordBatch], request: TableRequest, order_by: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches. Raises ConfigurationError if two consecutive rows are equal in all columns of order_by."""
    last = None
    for batch in batches:
        for key in zip(*(batch.column(name).to_pylist() for name in order_by), strict=True):
            if key == last:
                shown = ", ".join(map(str, key))[:80]
                raise request.error(
                    f"has several rows with {', '.join(order_by)} = {shown}; order_by requires a unique key",
                    "Add columns to order_by until each row is unique.",
                )
            last = key
        yield batch
