"""Compaction: the sealed files of a day become one Parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.capture import tombstones, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import ROWS_PER_BATCH, DayFolder, Row

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("id", "timestamp", "workload_id", "client_id", "model", "version", "subject", "state", "row")


def compact(settings: CaptureSettings, today: date) -> list[dict[str, Any]]:
    """Compact the days before today; rows of erased subjects are left out. Call it under the lock.

    An interrupted call is completed by the next one: the Parquet file names the files that it contains.

    Returns:
        A list of {"model", "day", "files", "rows", "bytes"} of the days that had sealed files.
    """
    erased = tombstones.read_tombstones(settings.folder)
    compacted = []
    for day in traffic_files.list_days(settings.folder):
        if day.day >= today:
            continue
        traffic_files.recover(day)
        remove_compacted(day)
        if sealed := day.list_sealed():
            is_held = tombstones.is_held(settings, day.model)
            rows = (row for row in traffic_files.read_day(day) if is_held or not tombstones.is_erased(row, erased))
            names = sorted(map(traffic_files.get_name, sealed))
            count = write_parquet(day.parquet, rows, names)
            size = day.parquet.stat().st_size
            remove_compacted(day)
            compacted.append(
                {"model": day.model, "day": str(day.day), "files": len(sealed), "rows": count, "bytes": size}
            )
    return compacted


def remove_compacted(day: DayFolder) -> None:
    """Remove the sealed files whose rows the Parquet file contains, and what an interrupted call left."""
    traffic_files.remove_temporary_files(day)
    for name in traffic_files.read_compacted_names(day.parquet):
        (day.path / name).unlink(missing_ok=True)
    for hour in day.path.glob("[0-9][0-9]"):
        with suppress(OSError):  # it has other files
            hour.rmdir()


def write_parquet(path: Path, rows: Iterable[Row], names: Iterable[str]) -> int:
    """Write rows to a Parquet file atomically, and return their number.

    Args:
        path: the file.
        rows: the rows, which may come from the file that is replaced.
        names: names of the sealed files that the rows come from.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = sorted({*traffic_files.read_compacted_names(path), *names})
    types = {"timestamp": pa.int64()}
    fields = [pa.field(name, types.get(name, pa.string())) for name in COLUMNS]
    schema = pa.schema(fields, metadata={"tuneline.files": json.dumps(names)})
    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for batch in _iterate_batches(rows, schema):
                writer.write_batch(batch)
                count += len(batch)

    traffic_files.replace_file(path, write)
    return count


def _iterate_batches(rows: Iterable[Row], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    source = iter(rows)
    while batch := list(islice(source, ROWS_PER_BATCH)):
        columns = [
            {
                "id": row["response"]["id"],
                **{name: row[name] for name in ("timestamp", "workload_id", "client_id")},
                **{name: row["tuneline"][name] for name in ("model", "version", "subject", "state")},
                "row": json.dumps(row, separators=(",", ":")),
            }
            for row in batch
        ]
        yield pa.RecordBatch.from_pylist(columns, schema=schema)
