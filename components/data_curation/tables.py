"""The dataset's files: Parquet for the rows, JSON lines for what could not be read. Equal rows give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from components.data_curation.cleaning import Drop
from components.data_curation.readers import Unread
from components.data_curation.rows import CONTENT, Kind, Row, as_json


def write_split(path: Path, kind: Kind, rows: Sequence[Row]) -> None:
    """A split: id, the columns of its kind (messages as lists of role and content), source, and meta as JSON or null."""
    records = [
        {"id": r.id, **{name: r.content.get(name) for name in CONTENT[kind]}, "source": r.source, "meta": as_json(r.meta)} for r in rows
    ]
    _write(path, records, _schema(kind))


def write_rejected(path: Path, dropped: Iterable[tuple[Row, Drop]]) -> None:
    """Every dropped row with its reason: id, source (the file's name), line, reason, detail, text."""
    import pyarrow

    records = [
        {"id": row.id, "source": row.file, "line": row.line, "reason": why.reason, "detail": why.detail, "text": row.text()}
        for row, why in dropped
    ]
    text = [(name, pyarrow.large_string() if name == "text" else pyarrow.string()) for name in ("id", "source", "reason", "detail", "text")]
    text.insert(2, ("line", pyarrow.int64()))
    _write(path, records, pyarrow.schema(text))


def write_quarantine(path: Path, unread: Iterable[Unread]) -> None:
    """Every unreadable place, one JSON object a line: file, line, why."""
    lines = [json.dumps({"file": one.file, "line": one.line, "why": one.why}, ensure_ascii=True) + "\n" for one in unread]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def _schema(kind: Kind) -> Any:
    import pyarrow

    messages = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    types = {"tools": pyarrow.string(), "label": pyarrow.bool_(), "text": pyarrow.string()}
    content = [(name, types.get(name, messages)) for name in CONTENT[kind]]
    return pyarrow.schema([("id", pyarrow.string()), *content, ("source", pyarrow.string()), ("meta", pyarrow.string())])


def _write(path: Path, records: list[dict[str, Any]], schema: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, len(records), 10_000):
            writer.write_table(pyarrow.Table.from_pylist(records[start : start + 10_000], schema=schema))
