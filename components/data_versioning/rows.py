"""The rows of a dataset artifact, read in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.common.artifacts import Artifact

REJECTED, QUARANTINE = "rejected", "quarantine"
BATCH = 4096  # rows


def splits(dataset: Artifact) -> list[str]:
    """The names of its splits, sorted."""
    files = [Path(file.path) for file in dataset.manifest.files if file.payload]
    return sorted(path.stem for path in files if path.suffix == ".parquet" and path.stem != REJECTED)


def rows(dataset: Artifact, table: str, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a split, or of what was rejected; none where there is no such table."""
    import pyarrow.parquet as pq

    path = dataset.path / f"{table}.parquet"
    if not path.exists():
        return
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=columns):
            yield from batch.to_pylist()


def quarantined(dataset: Artifact) -> Iterator[dict[str, Any]]:
    """What could not be read: {"file", "line", "why"}."""
    path = dataset.path / f"{QUARANTINE}.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines)
