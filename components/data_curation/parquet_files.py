"""Schemas and a writer for the dataset's Parquet files. Equal rows produce equal bytes."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from components.data_curation.rows import CONTENT_COLUMNS, Kind

if TYPE_CHECKING:
    import pyarrow


def get_content_columns(kind: Kind) -> list[tuple[str, pyarrow.DataType]]:
    """Return the content columns of a kind of row and their types; messages are lists of role and content."""
    import pyarrow

    messages = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    types = {"tools": pyarrow.string(), "label": pyarrow.bool_(), "text": pyarrow.string()}
    return [(name, types.get(name, messages)) for name in CONTENT_COLUMNS[kind]]


def build_split_schema(kind: Kind) -> pyarrow.Schema:
    """Return the columns of a split: id, the kind's content, source, and meta as JSON or null."""
    import pyarrow

    string = pyarrow.string()
    return pyarrow.schema([("id", string), *get_content_columns(kind), ("source", string), ("meta", string)])


def build_rejected_schema() -> pyarrow.Schema:
    """Return the columns of rejected rows; `source` is the file's name, `own_source` the row's source as in a split."""
    import pyarrow

    types = {"line": pyarrow.int64(), "text": pyarrow.large_string()}
    names = ("id", "source", "line", "reason", "detail", "text", "own_source")
    return pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in names])


class ParquetRowWriter:
    """Writer of a Parquet file with row groups of ROW_GROUP_SIZE rows, regardless of the size of the added tables."""

    ROW_GROUP_SIZE = 10_000

    def __init__(self, path: Path, schema: pyarrow.Schema) -> None:
        from pyarrow import parquet

        self._file, self._schema = parquet.ParquetWriter(path, schema, compression="zstd"), schema
        self._pending = schema.empty_table()

    def add(self, table: pyarrow.Table) -> None:
        """Append the rows of a table that has at least the file's columns."""
        import pyarrow

        self._pending = pyarrow.concat_tables([self._pending, table.select(self._schema.names).cast(self._schema)])
        while len(self._pending) >= self.ROW_GROUP_SIZE:
            self._file.write_table(self._pending.slice(0, self.ROW_GROUP_SIZE).combine_chunks())
            self._pending = self._pending.slice(self.ROW_GROUP_SIZE)

    def __enter__(self) -> ParquetRowWriter:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if len(self._pending) and error is None:
                self._file.write_table(self._pending.combine_chunks())
        finally:
            self._file.close()
