"""The dataset's files: Parquet for the rows, JSON lines for what could not be read. Equal rows give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from components.data_curation.readers import Unread
from components.data_curation.rows import CONTENT, Kind


def content_schema(kind: Kind) -> list[tuple[str, Any]]:
    """The columns that a kind of row has, and their types: messages are lists of role and content."""
    import pyarrow

    messages = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    types = {"tools": pyarrow.string(), "label": pyarrow.bool_(), "text": pyarrow.string()}
    return [(name, types.get(name, messages)) for name in CONTENT[kind]]


def split_schema(kind: Kind) -> Any:
    """The columns of a split: id, those of its kind, source, and meta as JSON or null."""
    import pyarrow

    texts = [(name, pyarrow.string()) for name in ("source", "meta")]
    return pyarrow.schema([("id", pyarrow.string()), *content_schema(kind), *texts])


def rejected_schema() -> Any:
    """The columns of the dropped rows: id, source (the file's name), line, reason, detail, text, own_source (as `source` in a split)."""
    import pyarrow

    types = {"line": pyarrow.int64(), "text": pyarrow.large_string()}
    names = ("id", "source", "line", "reason", "detail", "text", "own_source")
    return pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in names])


class Writer:
    """A Parquet file that grows table by table, with the same bytes however the rows come in: row groups of GROUP rows."""

    GROUP = 10_000

    def __init__(self, path: Path, schema: Any) -> None:
        from pyarrow import parquet

        self._file, self._schema = parquet.ParquetWriter(path, schema, compression="zstd"), schema
        self._waiting = schema.empty_table()

    def add(self, table: Any) -> None:
        """Append the rows of a table that has at least the file's columns."""
        import pyarrow

        self._waiting = pyarrow.concat_tables([self._waiting, table.select(self._schema.names).cast(self._schema)])
        while len(self._waiting) >= self.GROUP:
            self._file.write_table(self._waiting.slice(0, self.GROUP).combine_chunks())
            self._waiting = self._waiting.slice(self.GROUP)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if len(self._waiting) and error is None:
                self._file.write_table(self._waiting.combine_chunks())
        finally:
            self._file.close()


def write_quarantine(path: Path, unread: Iterable[Unread]) -> None:
    """Every unreadable place, one JSON object a line: file, line, why."""
    lines = [json.dumps({"file": one.file, "line": one.line, "why": one.why}, ensure_ascii=True) + "\n" for one in unread]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
