"""SQLite files through the standard library, opened read-only in one transaction."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from components.common.artifacts import hashing
from components.data_curation.databases import sql_text
from components.data_curation.databases.open_tables import OpenTable, RowStream
from components.data_curation.databases.query_timeout import describe_timeout, interrupting_after
from components.data_curation.databases.table_request import TableRequest

if TYPE_CHECKING:
    import pyarrow

SCHEME = "sql+sqlite://"
BATCH_ROWS = 5_000
LOCK_TIMEOUT_SECONDS = 10.0


def locate_file(request: TableRequest, scheme: str) -> Path:
    """Return the absolute path of a database file. Raises ConfigurationError if the file does not exist."""
    path = (request.base / Path(request.address.removeprefix(scheme)).expanduser()).absolute()
    if not path.is_file():
        raise request.error("does not exist", f"Check the path {path}; an address has the form {scheme}/folder/file.")
    return path


def digest_file(path: Path) -> str:
    """Return the digest of a database file and of its write-ahead log, which holds the newest transactions."""
    log = path.with_name(path.name + "-wal")
    digests = [hashing.sha256_file(path)]
    if log.exists() and log.stat().st_size:
        digests.append(hashing.sha256_file(log))
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _get_file_state(path: Path) -> list[tuple[int, int]]:
    """Return size and modification time of the file and of its write-ahead log."""
    files = (path, path.with_name(path.name + "-wal"))
    return [(state.st_size, state.st_mtime_ns) for file in files if file.exists() and (state := file.stat())]


@contextmanager
def open_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a query in one read transaction."""
    path, settings = locate_file(request, SCHEME), request.settings
    before = _get_file_state(path)
    sha256 = digest_file(path)
    query = settings.query or f"SELECT * FROM {sql_text.quote_double(settings.table)}"  # noqa: S608
    statement = sql_text.build_statement(query, settings.order_by, sql_text.quote_double)
    uri = f"file:{quote(str(path))}?mode=ro"
    with (
        closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=LOCK_TIMEOUT_SECONDS)) as connection,
        interrupting_after(settings.timeout_seconds, connection.interrupt),
    ):
        connection.execute("PRAGMA query_only = 1")
        connection.execute("PRAGMA trusted_schema = 0")
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # starts the read transaction
        is_unchanged = _get_file_state(path) == before
        details: dict[str, str | int] = {"sqlite_version": sqlite3.sqlite_version}
        yield OpenTable(
            f"file with digest {sha256[:12]}"
            if is_unchanged
            else "one transaction of a file that changed during the read",
            lambda: _read_rows(connection, statement),
            state_key=sha256 if is_unchanged else "",
            details={**details, "file_sha256": sha256} if is_unchanged else details,
            is_sorted=True,
        )


def _read_rows(connection: sqlite3.Connection, statement: str) -> RowStream:
    import pyarrow

    cursor = connection.execute(statement)
    names = [column[0] for column in cursor.description]
    types = _find_types(connection, statement, names)
    schema = pyarrow.schema(list(zip(names, types, strict=True)))
    return RowStream(schema, _iterate_batches(cursor, schema))


def _find_types(connection: sqlite3.Connection, statement: str, names: list[str]) -> list[pyarrow.DataType]:
    """Return the Arrow type of each column: SQLite declares types per value, so that all values are examined."""
    import pyarrow

    columns = ", ".join(f"group_concat(DISTINCT typeof({sql_text.quote_double(name)}))" for name in names)
    found = connection.execute(f"SELECT {columns} FROM (\n{statement}\n)").fetchone()  # noqa: S608
    types = []
    for text in found:
        kinds = set((text or "").split(",")) - {"null", ""}
        if kinds == {"integer"}:
            types.append(pyarrow.int64())
        elif kinds and kinds <= {"integer", "real"}:
            types.append(pyarrow.float64())
        else:
            types.append(pyarrow.binary() if kinds == {"blob"} else pyarrow.string())
    return types


def _iterate_batches(cursor: sqlite3.Cursor, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    while rows := cursor.fetchmany(BATCH_ROWS):
        columns = [
            pyarrow.array([_convert(value, column.type) for value in values], column.type)
            for values, column in zip(zip(*rows, strict=True), schema, strict=True)
        ]
        yield pyarrow.record_batch(columns, schema=schema)


def _convert(value: Any, column_type: pyarrow.DataType) -> Any:
    """Return a value of the column's type. Raises ValueError for binary data among text."""
    import pyarrow

    if value is None or not pyarrow.types.is_string(column_type) or isinstance(value, str):
        return float(value) if pyarrow.types.is_floating(column_type) and value is not None else value
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return str(value)


def list_tables(request: TableRequest) -> list[str]:
    """Return the names of the tables and views; [] if the file cannot be read."""
    uri = f"file:{quote(str(locate_file(request, SCHEME)))}?mode=ro"
    query = "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
    with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True, timeout=LOCK_TIMEOUT_SECONDS)) as connection:
        return [name for (name,) in connection.execute(query)]
    return []


def describe_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of SQLite."""
    if "interrupted" in text:
        return describe_timeout(request.settings.timeout_seconds)
    if "not a database" in text or "malformed" in text:
        return f"is not an intact SQLite database: {text}", "Check the file with: sqlite3 FILE 'PRAGMA integrity_check'"
    if "locked" in text:
        return (
            f"has been locked by another process for more than {LOCK_TIMEOUT_SECONDS:g} seconds",
            "Rerun the command later.",
        )
    if "no such table" in text:
        tables = ", ".join(list_tables(request))
        hint = f"Use one of the file's tables: {tables}." if tables else "Use a file that contains tables."
        return f"rejected the query: {text}", hint
    if "decode" in text:
        return f"contains text that is not UTF-8: {text}", "Convert the column in the query: SELECT hex(column)."
    if "unable to open" in text:
        return f"cannot be read: {text}", "Grant the current user read access to the file and its folder."
    return f"rejected the query: {text}", "Check table, query and order_by."
