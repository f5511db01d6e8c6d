"""DuckDB files, opened read-only and without access to other files, extensions or the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from components.data_curation.databases import sql_text
from components.data_curation.databases.open_tables import OpenTable, RowStream
from components.data_curation.databases.query_timeout import describe_timeout, interrupting_after
from components.data_curation.databases.sqlite import digest_file, locate_file
from components.data_curation.databases.table_request import TableRequest

SCHEME = "sql+duckdb://"
BATCH_ROWS = 5_000
SETTINGS = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "threads": "1",
}


@contextmanager
def open_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a query. A process that writes to the file holds a lock, so that the file does not change meanwhile."""
    import duckdb

    path, settings = locate_file(request, SCHEME), request.settings
    query = settings.query or f"SELECT * FROM {sql_text.quote_double(settings.table)}"  # noqa: S608
    statement = sql_text.build_statement(query, settings.order_by, sql_text.quote_double)
    with (
        duckdb.connect(str(path), read_only=True, config=SETTINGS) as connection,
        interrupting_after(settings.timeout_seconds, connection.interrupt),
    ):
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET lock_configuration = true")
        sha256 = digest_file(path)

        def read() -> RowStream:
            reader = connection.sql(statement).to_arrow_reader(BATCH_ROWS)
            return RowStream(reader.schema, iter(reader))

        yield OpenTable(
            f"file with digest {sha256[:12]}",
            read,
            state_key=sha256,
            details={"file_sha256": sha256, "duckdb_version": duckdb.__version__},
            is_sorted=True,
        )


def describe_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of DuckDB."""
    if "Interrupted" in text:
        return describe_timeout(request.settings.timeout_seconds)
    if "not a valid DuckDB database" in text:
        return "is not a DuckDB database", "Check the path; a Parquet or CSV file needs no scheme."
    if "set lock on file" in text:
        return "is locked by a process that writes to it", "Rerun the command when that process has closed the file."
    if "different version" in text or "newer version" in text:
        return f"cannot be read by this version of DuckDB: {text}", "Install the DuckDB version that wrote the file."
    if "disabled by configuration" in text:
        return f"rejected the query: {text}", "Read only tables of the file; list other files as separate sources."
    return f"rejected the query: {text}", "Check table, query and order_by."
