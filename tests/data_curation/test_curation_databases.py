"""Sources in databases: one test per kind, equal extracts of equal tables, limits, and errors before any work.

SQLite, DuckDB, Delta and Iceberg are the real engines on files. tests/engines/test_postgresql_sources.py runs a real
PostgreSQL server. Snowflake and BigQuery are stand-ins that replay the recorded behaviour of their ADBC drivers.
Tests of other databases than SQLite are long, because only the long tier installs their packages.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import EngineMissingError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.data_curation.databases import database_registry, table_extract
from components.data_curation.databases.sql_text import find_problem
from components.data_curation.reading.table_settings import TableSettings
from tests.pipelines.command import ROOT

TICKETS = [(i, f"Ticket {i}", f"Answer to ticket number {i}.") for i in range(1, 13)]
Read = Callable[..., Artifact]


def import_driver(name: str) -> Any:
    """Import a package; without it, fail if engines are required, as in CI, and skip otherwise."""
    is_required = os.environ.get("TUNELINE_ENGINES") == "required"
    return importlib.import_module(name) if is_required else pytest.importorskip(name)


class NoteReporter(SilentReporter):
    """A reporter that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def reporter() -> NoteReporter:
    return NoteReporter()


@pytest.fixture
def read(tmp_path: Path, reporter: NoteReporter) -> Read:
    """Read a table into the store of the test."""

    def read_table(address: str, **settings: Any) -> Artifact:
        return table_extract.extract_table(address, TableSettings(**settings), tmp_path, tmp_path / "store", reporter)

    return read_table


def test_preview_reads_the_first_rows_only(sqlite_file: Path, tmp_path: Path, reporter: NoteReporter) -> None:
    settings = TableSettings(table="tickets", order_by=["id"], max_rows=5)
    extract = table_extract.extract_table(
        str(sqlite_file), settings, tmp_path, tmp_path / "store", reporter, tmp_path / "scratch", preview_rows=4
    )
    assert len(read_rows(extract)) == 4, "the table has more rows than max_rows, which a preview does not reach"
    assert not list((tmp_path / "store").glob("*"))


@pytest.fixture
def sqlite_file(tmp_path: Path) -> Path:
    path = tmp_path / "support.sqlite"
    write_sqlite(path, TICKETS)
    return path


def write_sqlite(path: Path, rows: list[tuple[Any, ...]]) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS tickets (id INTEGER PRIMARY KEY, subject TEXT, reply TEXT)")
        connection.executemany("INSERT INTO tickets VALUES (?, ?, ?)", rows)


def read_rows(extract: Artifact) -> list[dict[str, Any]]:
    (file,) = extract.path.glob("*.parquet")
    rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    return rows


def expect_error(read: Read, address: str, **settings: Any) -> TunelineError:
    with pytest.raises(TunelineError) as caught:
        read(address, **settings)
    return caught.value


def test_sqlite_table_becomes_an_extract_with_its_provenance(read: Read, sqlite_file: Path) -> None:
    extract = read(f"sql+sqlite://{sqlite_file}", table="tickets", order_by=["id"])
    assert [tuple(row.values()) for row in read_rows(extract)] == TICKETS
    assert extract.manifest.kind == "extract"
    assert json.loads((extract.path / "request.json").read_text()) == {
        "format": 1,
        "order_by": ["id"],
        "table": "tickets",
    }
    summary = extract.manifest.summary
    assert (summary["rows"], summary["database"], summary["selection"]) == (12, "SQLite", "tickets")
    assert summary["state"]["file_sha256"][:12] in summary["snapshot"]


def test_unchanged_file_is_not_read_again(read: Read, sqlite_file: Path, reporter: NoteReporter) -> None:
    first = read(str(sqlite_file), table="tickets")
    second = read(str(sqlite_file), table="tickets")
    assert second.sha256 == first.sha256
    assert reporter.notes[-1].endswith("the stored rows are reused because the data is unchanged")
    write_sqlite(sqlite_file, [(13, "Ticket 13", "A new answer.")])
    assert read(str(sqlite_file), table="tickets").sha256 != first.sha256


def test_equal_tables_give_equal_extracts(read: Read, tmp_path: Path) -> None:
    for name, rows in (("forward", TICKETS), ("backward", TICKETS[::-1])):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite")) as connection, connection:
            connection.execute("CREATE TABLE tickets (id, subject, reply)")
            connection.executemany("INSERT INTO tickets VALUES (?, ?, ?)", rows)
    forward, backward = (read(f"{name}.sqlite", table="tickets") for name in ("forward", "backward"))
    assert forward.sha256 == backward.sha256
    assert sorted(row["id"] for row in read_rows(forward)) == list(range(1, 13))


def test_digest_covers_the_query(read: Read, sqlite_file: Path, tmp_path: Path) -> None:
    query = "SELECT id, subject FROM tickets WHERE id <= 3 -- the first; three"
    (tmp_path / "closed.sql").write_text(query + "\n;\n")
    inline = read(str(sqlite_file), query=query, order_by=["id"])
    other = read(str(sqlite_file), query=query.replace("<= 3", "< 4"), order_by=["id"])
    assert read_rows(inline) == read_rows(other)
    assert inline.sha256 != other.sha256
    from_file = read(str(sqlite_file), query="closed.sql", order_by=["id"])
    assert (from_file.path / "closed.parquet").exists()
    assert from_file.manifest.config["query"].startswith(query)
    assert len(from_file.manifest.summary["query_sha256"]) == 64


def test_values_of_sqlite_keep_their_types(read: Read, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "types.db")) as connection, connection:
        connection.execute("CREATE TABLE v (id, whole, real, mixed, text, empty, bytes)")
        connection.execute(
            "INSERT INTO v VALUES (1, 5, 1, 'a', 'ü', NULL, x'00ff'), (2, NULL, 0.5, 7, NULL, NULL, x'01')"
        )
    rows = read_rows(read("types.db", table="v", order_by=["id"]))
    assert list(rows[0].values()) == [1, 5, 1.0, "a", "ü", None, b"\x00\xff"]
    assert list(rows[1].values()) == [2, None, 0.5, "7", None, None, b"\x01"]


def test_row_group_size_does_not_depend_on_batches(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sqlite(tmp_path / "many.sqlite", [(i, f"Ticket {i}", "yes") for i in range(11_000)])
    first = read("many.sqlite", table="tickets", order_by=["id"])
    monkeypatch.setattr("components.data_curation.databases.sqlite.BATCH_ROWS", 777)
    (tmp_path / "copy.sqlite").write_bytes((tmp_path / "many.sqlite").read_bytes())
    assert read("copy.sqlite", table="tickets", order_by=["id"]).sha256 == first.sha256
    (file,) = first.path.glob("*.parquet")
    groups = parquet.ParquetFile(file).metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [5_000, 5_000, 1_000]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "has neither table nor query; expected one of them"),
        ({"table": "a", "query": "SELECT 1"}, "has both table and query; expected one of them"),
        ({"query": "DELETE FROM tickets"}, "query begins with DELETE; expected SELECT or WITH"),
        ({"query": "SELECT 1; DROP TABLE tickets"}, "query contains several statements; expected one SELECT"),
        ({"query": "WITH gone AS (SELECT 1) DELETE FROM tickets"}, "rejected the query: near"),
        ({"table": "nope"}, "rejected the query: no such table: nope"),
        ({"table": "tickets", "order_by": ["nope"]}, "has no column 'nope' for order_by"),
        ({"table": "tickets", "snapshot": "3"}, "has the key snapshot; SQLite cannot read an earlier version"),
        ({"table": "tickets", "max_rows": 5}, "has more than 5 rows (max_rows)"),
        ({"table": "tickets", "max_bytes": 50}, "has more than 50 bytes of rows (max_bytes)"),
        ({"query": "SELECT 1 AS a, id FROM tickets", "order_by": ["a"]}, "has several rows with a = 1"),
        ({"query": "missing.sql"}, "query: missing.sql cannot be read: No such file or directory"),
        ({"table": "tickets", "credentials_env": "NOT_SET"}, "the environment variable NOT_SET is not set"),
    ],
)
def test_wrong_settings_are_errors(read: Read, sqlite_file: Path, settings: dict[str, Any], message: str) -> None:
    before = sqlite_file.read_bytes()
    error = expect_error(read, str(sqlite_file), **settings)
    assert message in error.message
    assert error.hint
    assert error.message.startswith("data_curation.sources: ")
    assert sqlite_file.read_bytes() == before


def test_unknown_table_lists_the_tables(read: Read, sqlite_file: Path) -> None:
    assert expect_error(read, str(sqlite_file), table="ticket").hint == "Use one of the file's tables: tickets."


def test_missing_table_is_suggested(read: Read, sqlite_file: Path) -> None:
    hint = expect_error(read, str(sqlite_file)).hint
    assert hint.endswith(
        f"data_curation.sources: [{{path: {sqlite_file}, table: tickets}}]. Available tables: tickets."
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("postgresql://reader@db.example/support", "has an unsupported scheme"),
        ("mysql+pymysql://reader@db.example/support", "has an unsupported scheme"),
        ("sql+postgresql://[::1/support", "has no order_by"),
    ],
)
def test_wrong_addresses_are_errors(read: Read, address: str, message: str) -> None:
    assert database_registry.is_table_address(address)
    assert message in expect_error(read, address, table="tickets").message


def test_query_that_depends_on_the_time_is_read_again(sqlite_file: Path, tmp_path: Path) -> None:
    for query, is_reused in (("SELECT * FROM tickets", True), ("SELECT *, date('now') AS today FROM tickets", False)):
        notes: list[str] = []

        class Reporter(SilentReporter):
            def note(self, text: str, notes: list[str] = notes) -> None:
                notes.append(text)

        for _ in range(2):
            settings = TableSettings(query=query)
            table_extract.extract_table(str(sqlite_file), settings, tmp_path, tmp_path / "store", Reporter())
        assert ("stored rows are reused" in notes[-1]) is is_reused


def test_query_beyond_the_timeout_is_interrupted(read: Read, sqlite_file: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n WHERE i < 0"
    error = expect_error(read, str(sqlite_file), query=endless, timeout_seconds=0.05)
    assert "did not complete the query within 0.05 seconds (timeout_seconds)" in error.message


@pytest.mark.parametrize("name", ["missing.db", "text.db"])
def test_file_that_is_no_database_is_an_error(read: Read, tmp_path: Path, name: str) -> None:
    (tmp_path / "text.db").write_text("not a database" * 500)
    error = expect_error(read, name, table="tickets")
    assert ("does not exist" if name == "missing.db" else "is not an intact SQLite database") in error.message


def test_password_in_an_address_is_refused(read: Read) -> None:
    for address in (
        "sql+postgresql://reader:hunter2@db.example/support",
        "sql+postgresql://reader@db.example/support?password=hunter2",
        "sql+snowflake://reader@account/db/schema?token=hunter2",
    ):
        error = expect_error(read, address, table="tickets", order_by=["id"])
        assert "contains a password" in error.message
        assert "credentials_env" in error.hint
        assert "hunter2" not in error.message + error.hint


def test_server_requires_an_order(read: Read) -> None:
    error = expect_error(read, "sql+postgresql://reader@db.example/support", table="tickets")
    assert "has no order_by; a server returns rows in no defined order" in error.message


def test_unknown_scheme_lists_the_supported_schemes(read: Read) -> None:
    error = expect_error(read, "sql+oracle://db.example/support", table="tickets")
    assert "sql+postgresql://" in error.hint


def test_missing_driver_names_the_command_that_installs_it(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_registry.importlib.util, "find_spec", lambda name: None)
    error = expect_error(read, "sql+duckdb:///a.duckdb", table="tickets")
    assert isinstance(error, EngineMissingError)
    assert "pip install duckdb" in error.hint


def test_page_and_extra_list_every_kind() -> None:
    page = (ROOT / "docs" / "how-to" / "data.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    packages = [re.split(r"[\[>]", requirement)[0] for requirement in extras["databases"]]
    for kind in database_registry.KINDS:
        [row] = [line for line in page.splitlines() if line.startswith("|") and f"`{kind.schemes[0]}" in line]
        assert kind.title in row
        assert all(f"`{suffix}`" in row for suffix in kind.suffixes)
        assert not kind.distribution or kind.distribution in packages
        assert f"| `{kind.distribution}` |" in row if kind.distribution else row.endswith("| none |")


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("SELECT ';' AS \"a;b\" /* ; */ -- ;\n;", ""),
        ("  (SELECT 1) UNION (SELECT 2)", ""),
        ("with a as (select 1) select * from a", ""),
        ("SELECT $body$ ; $body$", ""),
        ("", "query is empty"),
        ("-- nothing", "query is empty"),
        ("EXPLAIN SELECT 1", "query begins with EXPLAIN; expected SELECT or WITH"),
        ("SELECT 1; SELECT 2", "query contains several statements; expected one SELECT"),
    ],
)
def test_query_is_one_select_statement(query: str, problem: str) -> None:
    assert find_problem(query) == problem


def test_write_ahead_log_is_part_of_the_state(read: Read, sqlite_file: Path) -> None:
    with closing(sqlite3.connect(sqlite_file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        first = read(str(sqlite_file), table="tickets")
        with connection:
            connection.execute("UPDATE tickets SET reply = 'changed' WHERE id = 1")
        assert (sqlite_file.parent / "support.sqlite-wal").stat().st_size
        second = read(str(sqlite_file), table="tickets")
    assert second.sha256 != first.sha256


# --- DuckDB, Delta, Iceberg -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_duckdb_file(read: Read, tmp_path: Path) -> None:
    duckdb = import_driver("duckdb")
    with duckdb.connect(str(tmp_path / "a.duckdb")) as connection:
        connection.execute(
            "CREATE TABLE t (id INT, tags TEXT[], price DECIMAL(9,2), opened TIMESTAMPTZ, who STRUCT(name TEXT))"
        )
        connection.execute(
            "INSERT INTO t VALUES (1, ['a', NULL], 1.5, '2026-01-02 03:00:00+02', {'name': 'Ada'}), (2, NULL, NULL, NULL, NULL)"
        )
    extract = read("a.duckdb", table="t", order_by=["id"])
    first, second = read_rows(extract)
    assert (first["tags"], str(first["price"]), first["who"]) == (["a", None], "1.50", {"name": "Ada"})
    assert first["opened"].isoformat() == "2026-01-02T01:00:00+00:00"
    assert set(second.values()) == {2, None}
    assert read("a.duckdb", table="t", order_by=["id"]).sha256 == extract.sha256
    outside = tmp_path / "outside.csv"
    outside.write_text("a\n1\n")
    error = expect_error(read, "a.duckdb", query=f"SELECT * FROM read_csv('{outside}')")
    assert "disabled by configuration" in error.message
    error = expect_error(
        read, "a.duckdb", query="SELECT count(*) FROM range(100000000) a, range(10000) b", timeout_seconds=0.1
    )
    assert "(timeout_seconds)" in error.message
    error = expect_error(read, "a.duckdb", query="SELECT INTERVAL 1 DAY AS wait")
    assert "column 'wait' has the unsupported type month_day_nano_interval" in error.message
    (tmp_path / "bad.duckdb").write_bytes(b"x" * 5000)
    assert "is not a DuckDB database" in expect_error(read, "bad.duckdb", table="t").message


@pytest.mark.long
def test_delta_table_is_read_at_a_version(read: Read, tmp_path: Path, reporter: NoteReporter) -> None:
    deltalake = import_driver("deltalake")
    folder = tmp_path / "tickets"
    deltalake.write_deltalake(str(folder), pyarrow.table({"id": [1, 2], "subject": ["a", "b"]}))
    first = read(f"delta://{folder}")
    deltalake.write_deltalake(str(folder), pyarrow.table({"id": [3], "subject": ["c"]}), mode="append")
    assert first.manifest.summary["snapshot"] == "Delta version 0"
    assert sorted(row["id"] for row in read_rows(read(f"delta://{folder}"))) == [1, 2, 3]
    pinned = read(f"delta://{folder}", snapshot="0", order_by=["id"])
    assert [row["id"] for row in read_rows(pinned)] == [1, 2]
    read(f"delta://{folder}", snapshot="0", order_by=["id"])
    assert reporter.notes[-1].endswith("Delta version 0; the stored rows are reused because the data is unchanged")
    assert "has no version 9" in expect_error(read, f"delta://{folder}", snapshot="9").message
    assert "expected a version number or a time" in expect_error(read, f"delta://{folder}", snapshot="x").message
    assert "does not exist" in expect_error(read, f"delta://{folder}2").message
    assert "table does not apply" in expect_error(read, f"delta://{folder}", table="t").message


@pytest.fixture
def iceberg_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A catalog in SQLite with one table. PyIceberg reads its variables once, at its import."""
    catalogs = import_driver("pyiceberg.catalog")
    from pyiceberg.utils.config import Config

    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path / 'catalog.db'}")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path / 'warehouse'}")
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())
    catalog = catalogs.load_catalog("lake")
    catalog.create_namespace("support")
    yield catalog
    catalog.close()


@pytest.mark.long
def test_iceberg_table_is_read_at_a_snapshot(read: Read, iceberg_catalog: Any, reporter: NoteReporter) -> None:
    first_rows = pyarrow.table({"id": [2, 1], "subject": ["b", "a"]})
    table = iceberg_catalog.create_table("support.tickets", schema=first_rows.schema)
    table.append(first_rows)
    snapshot = str(table.current_snapshot().snapshot_id)
    first = read("iceberg://lake/support.tickets", order_by=["id"])
    assert [row["id"] for row in read_rows(first)] == [1, 2]
    assert first.manifest.summary["snapshot"] == f"Iceberg snapshot {snapshot}"
    table.append(pyarrow.table({"id": [3], "subject": ["c"]}))
    assert len(read_rows(read("iceberg://lake/support.tickets", order_by=["id"]))) == 3
    pinned = read("iceberg://lake/support.tickets", snapshot=snapshot, order_by=["id"])
    assert read_rows(pinned) == read_rows(first)
    read("iceberg://lake/support.tickets", snapshot=snapshot, order_by=["id"])
    assert reporter.notes[-1].endswith("the stored rows are reused because the data is unchanged")
    assert "has no snapshot 5" in expect_error(read, "iceberg://lake/support.tickets", snapshot="5").message
    assert "does not exist" in expect_error(read, "iceberg://lake/support.nope").message
    assert "which is not configured" in expect_error(read, "iceberg://nope/support.tickets").message
    assert "is not an Iceberg address" in expect_error(read, "iceberg://lake").message


# --- Snowflake, BigQuery: stand-ins -----------------------------------------------------------------------------------

# The rows, the types with their metadata and the errors were recorded from adbc-driver-snowflake 1.11.0 with the
# emulator fakesnow 0.12.1, and the errors of BigQuery from adbc-driver-bigquery 1.11.0 without a server. No account of
# either service was available: the session settings and the clauses of time travel were never sent to a real server.
SNOWFLAKE_ROWS = pyarrow.table(
    {
        "ID": pyarrow.array([1, 2], pyarrow.decimal128(38, 0)),
        "SUBJECT": [None, "b"],
        "PRICE": pyarrow.array([None, 1.5]).cast(pyarrow.decimal128(10, 2)),
        "OPENED": pyarrow.array([None, 1_767_225_600_000_000_001], pyarrow.timestamp("ns")),
        "V": [None, '{"a":1}'],
    }
).replace_schema_metadata({"logicalType": "TEXT"})
SNOWFLAKE_FACTS = ("9.38.1", "fakesnow", "2026-11-26 03:02:11.346719+00")


class RecordedDriver:
    """A connection and cursor of an ADBC driver that replays results and records what it was sent."""

    def __init__(self, facts: tuple[str, ...], rows: pyarrow.Table, error: Exception | None = None) -> None:
        self.facts, self.rows, self.error = facts, rows, error
        self.statements: list[str] = []
        self.options: dict[str, str] = {}
        self.statement_options: dict[str, str] = {}
        self.adbc_statement = self

    def connect(self, db_kwargs: dict[str, str]) -> RecordedDriver:
        self.options = db_kwargs
        return self

    def set_options(self, **options: str) -> None:
        self.statement_options |= options

    def __enter__(self) -> RecordedDriver:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def cursor(self) -> RecordedDriver:
        return self

    def execute(self, statement: str) -> None:
        self.statements.append(statement)
        if self.error and statement.startswith("SELECT * FROM"):
            raise self.error

    def fetchone(self) -> tuple[str, ...]:
        return self.facts

    def fetch_record_batch(self) -> pyarrow.RecordBatchReader:
        return self.rows.to_reader(max_chunksize=1)


def install_driver(monkeypatch: pytest.MonkeyPatch, name: str, driver: RecordedDriver) -> None:
    dbapi = import_driver(f"{name}.dbapi")
    monkeypatch.setattr(dbapi, "connect", driver.connect)


SNOWFLAKE = "sql+snowflake://reader@myorg-myaccount/SUPPORT/PUBLIC?warehouse=SMALL&role=READER"


@pytest.mark.long
def test_snowflake_stand_in(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RecordedDriver(SNOWFLAKE_FACTS, SNOWFLAKE_ROWS)
    install_driver(monkeypatch, "adbc_driver_snowflake", driver)
    monkeypatch.setenv("SNOWFLAKE_PASSWORD", "hunter2")
    time = "2026-01-31T00:00:00+00:00"
    settings = {"table": "tickets", "order_by": ["id"], "credentials_env": "SNOWFLAKE_PASSWORD", "snapshot": time}
    extract = read(SNOWFLAKE, **settings, timeout_seconds=90)
    assert driver.statements == [
        "ALTER SESSION SET STATEMENT_TIMEOUT_IN_SECONDS = 90",
        "ALTER SESSION SET TIMEZONE = 'UTC'",
        "SELECT CURRENT_VERSION(), CURRENT_ACCOUNT(), CURRENT_TIMESTAMP()::VARCHAR",
        f"SELECT * FROM (\nSELECT * FROM tickets AT(TIMESTAMP => '{time}'::TIMESTAMP_TZ)\n) AS extracted_rows\nORDER BY id",
    ]
    expected = {
        "username": "reader",
        "password": "hunter2",
        "adbc.snowflake.sql.account": "myorg-myaccount",
        "adbc.snowflake.sql.db": "SUPPORT",
        "adbc.snowflake.sql.schema": "PUBLIC",
        "adbc.snowflake.sql.warehouse": "SMALL",
        "adbc.snowflake.sql.role": "READER",
    }
    assert expected.items() <= driver.options.items()
    first, second = read_rows(extract)
    assert [str(value) for value in second.values()] == ["2", "b", "1.50", "2026-01-01 00:00:00", '{"a":1}']
    assert list(first.values())[1:] == [None] * 4
    assert extract.manifest.summary["snapshot"] == f"table at {time}"
    assert b"hunter2" not in b"".join(path.read_bytes() for path in extract.path.iterdir())
    monkeypatch.setenv("SNOWFLAKE_PASSWORD", "-----BEGIN PRIVATE KEY-----\nkey\n-----END PRIVATE KEY-----")
    read(SNOWFLAKE, **settings)
    assert driver.options["adbc.snowflake.sql.auth_type"] == "auth_jwt"
    assert "password" not in driver.options


@pytest.mark.long
@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (
            "NOT_FOUND: [Snowflake] 002003 (42S02): Catalog Error: Table with name NOPE does not exist!. SQLSTATE: 42S02",
            "rejected the query: NOT_FOUND: [Snowflake] 002003 (42S02): Catalog Error: Table with name NOPE",
        ),
        ("IO: [Snowflake] 260002: password is empty. Vendor code: 260002", "rejected the login"),
        ('IO: Post "http://127.0.0.1:1/session/v1/login-request?requestId=7c9a": dial tcp 127.0.0.1:1: connect: connection refused', "cannot be reached"),
    ],
)  # fmt: skip
def test_snowflake_errors(read: Read, monkeypatch: pytest.MonkeyPatch, recorded: str, message: str) -> None:
    driver = RecordedDriver(SNOWFLAKE_FACTS, SNOWFLAKE_ROWS, RuntimeError(recorded))
    install_driver(monkeypatch, "adbc_driver_snowflake", driver)
    error = expect_error(read, SNOWFLAKE, table="nope", order_by=["id"])
    assert message in error.message
    assert error.hint


@pytest.mark.long
def test_malformed_warehouse_addresses(read: Read) -> None:
    import_driver("adbc_driver_snowflake")
    import_driver("adbc_driver_bigquery")
    settings = {"table": "t", "order_by": ["id"]}
    error = expect_error(read, "sql+snowflake://account/db", **settings)
    assert "is not a Snowflake address" in error.message
    error = expect_error(read, "sql+snowflake://u@account/db?warehous=x", **settings)
    assert "has the unknown parameter warehous" in error.message
    assert "is not a BigQuery address" in expect_error(read, "sql+bigquery://p/d/t", **settings).message
    error = expect_error(read, SNOWFLAKE, query="SELECT 1 AS id", order_by=["id"], snapshot="2026-01-01T00:00:00Z")
    assert "has snapshot and query" in error.message
    error = expect_error(read, SNOWFLAKE, **settings, snapshot="'; DROP TABLE t; --")
    assert "expected a time with its offset" in error.message


@pytest.mark.long
def test_bigquery_stand_in(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pyarrow.table({"id": [1, 2], "subject": ["a", None], "tags": [["x"], []]})
    driver = RecordedDriver(("2026-11-26 03:02:11.346719+00",), rows)
    install_driver(monkeypatch, "adbc_driver_bigquery", driver)
    monkeypatch.setenv("BIGQUERY_KEY", '{"type": "service_account", "private_key": "hunter2"}')
    address, time = "sql+bigquery://my-project/support?location=EU", "2026-01-31T00:00:00+00:00"
    settings = {"table": "tickets", "order_by": ["id"], "credentials_env": "BIGQUERY_KEY", "snapshot": time}
    extract = read(address, **settings, timeout_seconds=90)
    assert driver.statements[-1] == (
        f"SELECT * FROM (\nSELECT * FROM `tickets` FOR SYSTEM_TIME AS OF TIMESTAMP '{time}'\n) AS extracted_rows\nORDER BY `id`"
    )
    expected = {
        "adbc.bigquery.sql.project_id": "my-project",
        "adbc.bigquery.sql.dataset_id": "support",
        "adbc.bigquery.sql.location": "EU",
        "adbc.bigquery.sql.auth_type": "adbc.bigquery.sql.auth_type.json_credential_string",
    }
    assert expected.items() <= driver.options.items()
    assert driver.statement_options == {"adbc.bigquery.sql.query.job_timeout": "90000"}
    assert read_rows(extract)[0] == {"id": 1, "subject": "a", "tags": ["x"]}
    assert b"hunter2" not in b"".join(path.read_bytes() for path in extract.path.iterdir())
    driver.error = RuntimeError("UNKNOWN: [BigQuery] bigquery: constructing client: auth: email must be provided")
    error = expect_error(read, address, table="other", order_by=["id"])
    assert "rejected the credentials" in error.message


@pytest.mark.long
def test_secret_in_a_drivers_message_is_masked(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RecordedDriver(
        SNOWFLAKE_FACTS, SNOWFLAKE_ROWS, RuntimeError("no login for hunter2 at https://u:pw9@host/")
    )
    install_driver(monkeypatch, "adbc_driver_snowflake", driver)
    monkeypatch.setenv("SNOWFLAKE_PASSWORD", "hunter2")
    error = expect_error(read, SNOWFLAKE, table="t", order_by=["id"], credentials_env="SNOWFLAKE_PASSWORD")
    assert "hunter2" not in error.message
    assert "pw9" not in error.message
    assert "no login for *** at https://***@host/" in error.message
