"""Snowflake and BigQuery through their ADBC drivers."""

# Tested with a stand-in that returns recorded behaviour: neither has a server that runs on one's own machine.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from urllib.parse import parse_qsl, unquote, urlsplit

from components.data_curation.databases import sql_text
from components.data_curation.databases.open_tables import OpenTable, RowStream
from components.data_curation.databases.query_timeout import describe_timeout
from components.data_curation.databases.table_request import CREDENTIALS_HINT, TableRequest

SNOWFLAKE_SCHEME, BIGQUERY_SCHEME = "sql+snowflake://", "sql+bigquery://"
SNOWFLAKE_FORM = "sql+snowflake://user@account/database/schema?warehouse=NAME&role=NAME"
LOGIN_TIMEOUT = "30s"
PRIVATE_KEY_MARK = "PRIVATE KEY-----"


def _parse_snapshot(request: TableRequest) -> str:
    """Return the snapshot's time as ISO 8601, which contains no quote; "" for the current version."""
    text = request.settings.snapshot
    if not text:
        return ""
    if request.settings.query:
        raise request.error("has snapshot and query", "Write the time in the query, or set table instead of query.")
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise request.error(
            f"has the snapshot {text!r}; expected a time with its offset", "Example: '2026-01-31T00:00:00+00:00'."
        )
    return time.isoformat()


# --- Snowflake --------------------------------------------------------------------------------------------------------


def build_snowflake_options(request: TableRequest) -> dict[str, str]:
    """Return the driver's options for an address. Raises ConfigurationError for a malformed address."""
    from adbc_driver_snowflake import DatabaseOptions

    parts = urlsplit(request.address)
    user, at, account = parts.netloc.rpartition("@")
    database, _, schema = parts.path.strip("/").partition("/")
    if not (user and at and account and database):
        raise request.error("is not a Snowflake address", f"Write {SNOWFLAKE_FORM}.")
    given = dict(parse_qsl(parts.query))
    optional = {
        DatabaseOptions.SCHEMA: schema,
        DatabaseOptions.WAREHOUSE: given.pop("warehouse", ""),
        DatabaseOptions.ROLE: given.pop("role", ""),
    }
    if given:
        raise request.error(f"has the unknown parameter {min(given)}", f"Write {SNOWFLAKE_FORM}.")
    options = {
        "username": unquote(user),
        DatabaseOptions.ACCOUNT.value: account,
        DatabaseOptions.DATABASE.value: database,
        DatabaseOptions.LOGIN_TIMEOUT.value: LOGIN_TIMEOUT,
        DatabaseOptions.CLIENT_STORE_TEMP_CRED.value: "false",
        **{option.value: value for option, value in optional.items() if value},
    }
    if PRIVATE_KEY_MARK in request.secret:
        options[DatabaseOptions.AUTH_TYPE.value] = "auth_jwt"
        options[DatabaseOptions.JWT_PRIVATE_KEY_VALUE.value] = request.secret
    elif request.secret:
        options["password"] = request.secret
    return options


@contextmanager
def open_snowflake_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a query, of a table at a time within its retention period."""
    from adbc_driver_snowflake import dbapi

    settings, time = request.settings, _parse_snapshot(request)
    at = f" AT(TIMESTAMP => '{time}'::TIMESTAMP_TZ)" if time else ""
    query = settings.query or f"SELECT * FROM {sql_text.quote_if_needed(settings.table)}{at}"  # noqa: S608
    statement = sql_text.build_statement(query, settings.order_by, sql_text.quote_if_needed)
    with dbapi.connect(db_kwargs=build_snowflake_options(request)) as connection, connection.cursor() as cursor:
        cursor.execute(f"ALTER SESSION SET STATEMENT_TIMEOUT_IN_SECONDS = {max(1, round(settings.timeout_seconds))}")
        cursor.execute("ALTER SESSION SET TIMEZONE = 'UTC'")
        cursor.execute("SELECT CURRENT_VERSION(), CURRENT_ACCOUNT(), CURRENT_TIMESTAMP()::VARCHAR")
        version, account, now = map(str, cursor.fetchone())
        details: dict[str, str | int] = {"server_version": version, "account": account, "read_at": now}
        yield _open_cursor(cursor, statement, time, now, details)


def describe_snowflake_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of the driver or the server."""
    if "ncorrect username or password" in text or "JWT token is invalid" in text or "password is empty" in text:
        return f"rejected the login: {text}", CREDENTIALS_HINT
    if "statement or warehouse timeout" in text or "000630" in text:
        return describe_timeout(request.settings.timeout_seconds)
    if "dial tcp" in text or "no such host" in text or "failed to connect" in text.lower():
        return f"cannot be reached: {text}", "Check the account in the address, and the network."
    if "Time travel data is not available" in text:
        return f"has no data at {request.settings.snapshot}: {text}", "Choose a time within the retention period."
    return f"rejected the query: {text}", "Check table, query, order_by, and the role's privileges."


# --- BigQuery ---------------------------------------------------------------------------------------------------------


def build_bigquery_options(request: TableRequest) -> dict[str, str]:
    """Return the driver's options for an address. Raises ConfigurationError for a malformed address."""
    from adbc_driver_bigquery import DatabaseOptions

    parts = urlsplit(request.address)
    dataset = parts.path.strip("/")
    location = dict(parse_qsl(parts.query)).get("location", "")
    if not parts.netloc or "/" in dataset:
        raise request.error("is not a BigQuery address", "Write sql+bigquery://project/dataset?location=EU.")
    options = {DatabaseOptions.PROJECT_ID.value: parts.netloc}
    if dataset:
        options[DatabaseOptions.DATASET_ID.value] = dataset
    if location:
        options[DatabaseOptions.LOCATION.value] = location
    if request.secret:  # otherwise the driver uses GOOGLE_APPLICATION_CREDENTIALS or the machine's identity
        options[DatabaseOptions.AUTH_TYPE.value] = DatabaseOptions.AUTH_VALUE_JSON_CREDENTIAL_STRING.value
        options[DatabaseOptions.AUTH_CREDENTIALS.value] = request.secret
    return options


@contextmanager
def open_bigquery_table(request: TableRequest) -> Iterator[OpenTable]:
    """Open a query, of a table at a time within the last days."""
    from adbc_driver_bigquery import StatementOptions, dbapi

    settings, time = request.settings, _parse_snapshot(request)
    as_of = f" FOR SYSTEM_TIME AS OF TIMESTAMP '{time}'" if time else ""
    query = settings.query or f"SELECT * FROM {sql_text.quote_backticks(settings.table)}{as_of}"  # noqa: S608
    statement = sql_text.build_statement(query, settings.order_by, sql_text.quote_backticks)
    with dbapi.connect(db_kwargs=build_bigquery_options(request)) as connection, connection.cursor() as cursor:
        timeout = str(max(1, round(settings.timeout_seconds * 1000)))
        cursor.adbc_statement.set_options(**{StatementOptions.JOB_TIMEOUT.value: timeout})
        cursor.execute("SELECT CAST(CURRENT_TIMESTAMP() AS STRING)")
        now = str(cursor.fetchone()[0])
        yield _open_cursor(cursor, statement, time, now, {"read_at": now})


def describe_bigquery_error(request: TableRequest, text: str) -> tuple[str, str]:
    """Return the problem and a hint for an error of the driver or the server."""
    if "credentials" in text or "auth:" in text or "oauth2" in text or "401" in text:
        hint = "Set credentials_env to a variable with the JSON key of a service account, or set "
        return f"rejected the credentials: {text}", hint + "GOOGLE_APPLICATION_CREDENTIALS."
    if "timeout" in text.lower() or "timed out" in text:
        return describe_timeout(request.settings.timeout_seconds)
    if "dial tcp" in text or "no such host" in text:
        return f"cannot be reached: {text}", "Check the network."
    return (
        f"rejected the query: {text}",
        "Check project, dataset, table, query, order_by and the account's permissions.",
    )


def _open_cursor(cursor: object, statement: str, time: str, now: str, details: dict[str, str | int]) -> OpenTable:
    def read() -> RowStream:
        cursor.execute(statement)  # type: ignore[attr-defined]
        reader = cursor.fetch_record_batch()  # type: ignore[attr-defined]
        return RowStream(reader.schema, iter(reader))

    snapshot = f"table at {time}" if time else f"query at {now}"
    details = {**details, "snapshot_time": time} if time else details
    return OpenTable(snapshot, read, details=details, is_sorted=True)
