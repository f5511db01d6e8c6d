"""The registry of database kinds. A new kind is one entry."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from components.common.runtime.errors import EngineMissingError
from components.data_curation.databases import duckdb_files, postgresql, sql_text, sqlite, table_formats, warehouses
from components.data_curation.databases.open_tables import DatabaseKind
from components.data_curation.databases.table_request import SOURCES_KEY, TableRequest

KINDS = (
    DatabaseKind(
        "PostgreSQL",
        (postgresql.SCHEME,),
        postgresql.open_table,
        postgresql.describe_error,
        module="adbc_driver_postgresql",
        distribution="adbc-driver-postgresql",
        is_server=True,
    ),
    DatabaseKind(
        "SQLite",
        (sqlite.SCHEME,),
        sqlite.open_table,
        sqlite.describe_error,
        suffixes=(".sqlite", ".sqlite3", ".db"),
        list_tables=sqlite.list_tables,
    ),
    DatabaseKind(
        "DuckDB",
        (duckdb_files.SCHEME,),
        duckdb_files.open_table,
        duckdb_files.describe_error,
        suffixes=(".duckdb",),
        module="duckdb",
        distribution="duckdb",
    ),
    DatabaseKind(
        "Delta",
        (table_formats.DELTA_SCHEME, table_formats.DELTA_S3_SCHEME),
        table_formats.open_delta_table,
        table_formats.describe_delta_error,
        module="deltalake",
        distribution="deltalake",
        reads_queries=False,
        reads_snapshots=True,
    ),
    DatabaseKind(
        "Iceberg",
        (table_formats.ICEBERG_SCHEME,),
        table_formats.open_iceberg_table,
        table_formats.describe_iceberg_error,
        module="pyiceberg",
        distribution="pyiceberg",
        reads_queries=False,
        reads_snapshots=True,
    ),
    DatabaseKind(
        "Snowflake",
        (warehouses.SNOWFLAKE_SCHEME,),
        warehouses.open_snowflake_table,
        warehouses.describe_snowflake_error,
        module="adbc_driver_snowflake",
        distribution="adbc-driver-snowflake",
        is_server=True,
        reads_snapshots=True,
    ),
    DatabaseKind(
        "BigQuery",
        (warehouses.BIGQUERY_SCHEME,),
        warehouses.open_bigquery_table,
        warehouses.describe_bigquery_error,
        module="adbc_driver_bigquery",
        distribution="adbc-driver-bigquery",
        is_server=True,
        reads_snapshots=True,
    ),
)
SQL_SCHEME_PREFIX = "sql+"
# Addresses of databases as in SQLAlchemy, for an error that states the supported form.
DATABASE_URL = re.compile(
    r"(?:postgres(?:ql)?|sqlite|duckdb|snowflake|bigquery|mysql|mariadb|mssql|oracle)(?:\+\w+)?://", re.IGNORECASE
)


def is_table_address(address: str) -> bool:
    """Return whether an address is in a database: by its scheme, or by the suffix of a file."""
    return address.startswith(SQL_SCHEME_PREFIX) or bool(DATABASE_URL.match(address) or _find_kind(address))


def _find_kind(address: str) -> DatabaseKind | None:
    for kind in KINDS:
        if address.startswith(kind.schemes):
            return kind
        if "://" not in address and Path(address).suffix.lower() in kind.suffixes:
            return kind
    return None


def check_request(request: TableRequest) -> DatabaseKind:
    """Return the kind of a database, after checking the settings. Of a database, only the tables of a file are read.

    Raises:
        ConfigurationError: the scheme is unknown, or the settings do not fit the kind.
    """
    kind, settings = _find_kind(request.address), request.settings
    if kind is None:
        schemes = ", ".join(scheme for one in KINDS for scheme in one.schemes)
        raise request.error("has an unsupported scheme", f"Supported: {schemes}.")
    if kind.reads_queries and bool(settings.table) == bool(settings.query):
        problem = "has both table and query" if settings.table else "has neither table nor query"
        raise request.error(f"{problem}; expected one of them", _suggest_table(kind, request))
    if not kind.reads_queries and (settings.table or settings.query):
        key = "table" if settings.table else "query"
        raise request.error(
            f"is a {kind.title} table; {key} does not apply",
            f"Omit {key}; select rows and columns with where and columns.",
        )
    if kind.is_server and not settings.order_by:
        raise request.error(
            "has no order_by; a server returns rows in no defined order",
            "Set order_by to the columns of a unique key, for example order_by: [id].",
        )
    if settings.snapshot and not kind.reads_snapshots:
        raise request.error(f"has the key snapshot; {kind.title} cannot read an earlier version", "Omit snapshot.")
    return kind


def find_kind(request: TableRequest) -> DatabaseKind:
    """Return the kind of a database, after checking the request with its query, and that the driver is installed.

    Raises:
        ConfigurationError: the scheme is unknown, or the settings do not fit the kind.
        EngineMissingError: the driver's package is not installed.
    """
    kind, settings = check_request(request), request.settings
    if settings.query and (problem := sql_text.find_problem(settings.query)):
        raise request.error(problem, "Set query to one SELECT statement; tuneline does not write to databases.")
    if kind.module and importlib.util.find_spec(kind.module) is None:
        raise EngineMissingError(
            f"{SOURCES_KEY}: {request.address!r} requires the package {kind.distribution}, which is not installed",
            hint=f"Run: pip install {kind.distribution}, or pip install 'tuneline[databases]' for all databases.",
        )
    return kind


def _suggest_table(kind: DatabaseKind, request: TableRequest) -> str:
    """Return the hint for a source without a table, with the names of the tables if a file lists them."""
    tables = kind.list_tables(request) if kind.list_tables else []
    entry = f"{{path: {request.address}, table: {tables[0] if tables else 'NAME'}}}"
    named = f" Available tables: {', '.join(tables)}." if tables else ""
    return f"Set table, or query: SELECT …, in the configuration, as in data_curation.sources: [{entry}].{named}"
