"""Rows of a dataset artifact, read in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.common.artifacts.artifact_folder import Artifact

REJECTED, QUARANTINE = "rejected", "quarantine"
BATCH_ROWS = 4096
Row = dict[str, Any]


def list_splits(dataset: Artifact) -> list[str]:
    """Return the names of the splits, sorted."""
    files = [Path(file.path) for file in dataset.manifest.files if file.payload]
    return sorted(path.stem for path in files if path.suffix == ".parquet" and path.stem != REJECTED)


def read_rows(dataset: Artifact, table: str, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a split or the rejected rows. A table that does not exist has no rows.

    Args:
        dataset: The dataset artifact.
        table: Name of a split, or `rejected`.
        columns: Names of the columns to read; None for all columns.
    """
    import pyarrow.parquet as pq

    path = dataset.path / f"{table}.parquet"
    if not path.exists():
        return
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


def read_quarantine(dataset: Artifact) -> Iterator[Row]:
    """Yield the quarantined rows. A dataset without a quarantine file has no quarantined rows.

    Yields:
        {"source": file of the row, "line": number of its line, "why": reason of the quarantine}.
    """
    path = dataset.path / f"{QUARANTINE}.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                yield {"source": row.get("file"), "line": row.get("line"), "why": row.get("why")}
