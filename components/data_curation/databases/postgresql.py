"""PostgreSQL through ADBC, in one read-only transaction with a statement timeout."""

# ADBC streams Arrow batches, so that memory is bounded without a server-side cursor. Snowflake and BigQuery have drivers
# with the same interface; psycopg2 would require a conversion of each value, and its licence is the LGPL.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from components.data_curation.databases import sql_text
from components.data_curation.databases.open_tables import OpenTable, RowStream
from components.data_curation.databases.query_timeout import describe_timeout
from components.data_curation.databases.table_request import CREDENTIALS_HINT, TableRequest

SCHEME = "sql+postgresql://"
CONNECT_TIMEOUT_SECONDS = 10
KEEPALIVE_IDLE_SECONDS = 30
BATCH_BYTES = 4_000_000
SNAPSHOT_QUERY = (
    "SELECT pg_current_snapshot()::text, current_setting('server_version'), current_database()::text, now()::text, "
    "pg_is_in_recovery(), has_function_privilege('pg_control_system()', 'execute'), "
    "has_function_privilege('pg_current_wal_lsn()', 'execute')"
)


def build_connection_uri(request: TableRequest) -> str:
    """Return libpq's URI with the password, the timeouts and the read-only session settings."""
    parts = urlsplit("postgresql://" + request.address.removeprefix(SCHEME))
    location = parts.netloc
    if request.secret:
        user, at, host = location.rpartition("@")
        location = f"{user}:{quote(request.secret, safe='')}{at or '@'}{host}"
    settings = {
        "default_transaction_read_only": "on",
        "default_transaction_isolation": "repeatable\\ read",
        "statement_timeout": str(max(1, round(request.settings.timeout_seconds * 1000))),
        "TimeZone": "UTC",
    }
    given = dict(parse_qsl(parts.query))
    options = " ".join([given.pop("options", ""), *(f"-c {name}={value}" for name, value in settings.items())]).strip()
    defaults = {
        "application_name": "tuneline",
        "connect_timeout": str(CONNECT_TIMEOUT_SECONDS),
        "keepalives_idle": str(KEEPALIVE_IDLE_SECONDS),
    }
    parameters = urlencode({**defaults, **given, "options": options}, quote_via=quote)
    return urlunsplit((parts.scheme, location, parts.path, parameters, ""))


@contextmanager
def open_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a query in a REPEATABLE READ, READ ONLY transaction."""
    from adbc_driver_postgresql import StatementOptions, dbapi

    settings = request.settings
    query = settings.query or f"SELECT * FROM {sql_text.quote_double(settings.table)}"  # noqa: S608
    statement = sql_text.build_statement(query, settings.order_by, sql_text.quote_double)
    # Cursors are closed before the connection, or the driver raises an error.
    with dbapi.connect(build_connection_uri(request)) as connection, connection.cursor() as cursor:
        cursor.execute(SNAPSHOT_QUERY)
        snapshot, version, database, time, is_replica, can_read_identity, can_read_lsn = cursor.fetchone()
        details: dict[str, str | int] = {
            "server_version": version,
            "database": database,
            "transaction_snapshot": snapshot,
        }
        if can_read_identity:
            cursor.execute("SELECT system_identifier::text FROM pg_control_system()")
            details["system_identifier"] = cursor.fetchone()[0]
        if can_read_lsn:
            cursor.execute(f"SELECT {'pg_last_wal_replay_lsn' if is_replica else 'pg_current_wal_lsn'}()::text")
            details["lsn"] = cursor.fetchone()[0]
        position = f", LSN {details['lsn']}" if details.get("lsn") else ""

        def read() -> RowStream:
            cursor.adbc_statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)})
            cursor.execute(statement)
            reader = cursor.fetch_record_batch()
            return RowStream(reader.schema, iter(reader))

        yield OpenTable(f"transaction {snapshot} at {time}{position}", read, details=details, is_sorted=True)


def describe_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of the driver or the server."""
    text = text.partition(" Query was: ")[0].partition(". SQLSTATE")[0]
    message = text.rpartition("ERROR:")[2].strip() or text
    if "password authentication failed" in text or "no password supplied" in text or "no pg_hba.conf entry" in text:
        return f"rejected the connection: {text.rpartition('failed: ')[2]}", CREDENTIALS_HINT
    if "statement timeout" in text:
        return describe_timeout(request.settings.timeout_seconds)
    if "Failed to connect" in text:
        reason = text.partition("Failed to connect: ")[2]
        return f"cannot be reached: {reason}", "Check host, port and database name, and whether the server is running."
    lost = ("server closed the connection", "terminating connection", "no connection to the server", "SSL SYSCALL")
    if any(part in text for part in lost):
        return f"closed the connection while the rows were read: {message}", "Rerun the command when the server is up."
    return f"rejected the query: {message}", "Check table, query and order_by, and the user's privileges."
