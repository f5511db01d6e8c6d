"""The interface between the database kinds and the extraction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from components.data_curation.databases.table_request import TableRequest

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class RowStream:
    """The schema of the rows, and the rows in batches."""

    schema: pyarrow.Schema
    batches: Iterator[pyarrow.RecordBatch]


@dataclass(frozen=True)
class OpenTable:
    """A table or a query's result that is ready to be read.

    Attributes:
        snapshot: the state of the data in words, such as "Delta version 3".
        details: facts about the state as JSON values, such as the snapshot ID.
        state_key: identifies the state, so that an extract of the same state is reused; "" if the database cannot
            identify it.
        read: reads the rows once.
        is_sorted: whether `read` returns the rows in the order of `order_by`.
    """

    snapshot: str
    read: Callable[[], RowStream]
    state_key: str = ""
    details: dict[str, str | int] = field(default_factory=dict)
    is_sorted: bool = False


@dataclass(frozen=True)
class DatabaseKind:
    """A kind of database.

    Attributes:
        title: the name of the product.
        schemes: the prefixes of its addresses.
        open: opens a table read-only.
        describe_error: returns the problem and the hint for an error text of the driver.
        suffixes: the suffixes of its files, which need no scheme.
        module: the Python package of the driver; "" for the standard library.
        distribution: the name of that package at pip.
        is_server: whether `order_by` is required, because the rows of a server are not sorted in memory.
        reads_queries: whether `table` or `query` selects the rows; otherwise the address names the table.
        reads_snapshots: whether `snapshot` selects an earlier version.
        list_tables: returns the names of the tables of a file, for hints.
    """

    title: str
    schemes: tuple[str, ...]
    open: Callable[[TableRequest], AbstractContextManager[OpenTable]]
    describe_error: Callable[[TableRequest, str], tuple[str, str]]
    suffixes: tuple[str, ...] = ()
    module: str = ""
    distribution: str = ""
    is_server: bool = False
    reads_queries: bool = True
    reads_snapshots: bool = False
    list_tables: Callable[[TableRequest], list[str]] | None = None
