"""Sources in databases: one test per kind, equal extracts of equal tables, limits, and errors before any work.

SQLite, DuckDB, Delta and Iceberg are the real engines on files. tests/engines/test_postgresql_sources.py runs a real
PostgreSQL server. Snowflake and BigQuery are stand-ins that replay the recorded behaviour of their ADBC drivers.
"""

from __future__ import annotations

import json
import sqlite3
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

TICKETS = [(i, f"Ticket {i}", f"Answer to ticket number {i}.") for i in range(1, 13)]
Read = Callable[..., Artifact]


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
    assert reporter.notes[-1].endswith("unchanged, not read again")
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


def test_duckdb_file(read: Read, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
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


def test_delta_table_is_read_at_a_version(read: Read, tmp_path: Path, reporter: NoteReporter) -> None:
    deltalake = pytest.importorskip("deltalake")
    folder = tmp_path / "tickets"
    deltalake.write_deltalake(str(folder), pyarrow.table({"id": [1, 2], "subject": ["a", "b"]}))
    first = read(f"delta://{folder}")
    deltalake.write_deltalake(str(folder), pyarrow.table({"id": [3], "subject": ["c"]}), mode="append")
    assert first.manifest.summary["snapshot"] == "Delta version 0"
    assert sorted(row["id"] for row in read_rows(read(f"delta://{folder}"))) == [1, 2, 3]
    pinned = read(f"delta://{folder}", snapshot="0", order_by=["id"])
    assert [row["id"] for row in read_rows(pinned)] == [1, 2]
    read(f"delta://{folder}", snapshot="0", order_by=["id"])
    assert reporter.notes[-1].endswith("Delta version 0; unchanged, not read again")
    assert "has no version 9" in expect_error(read, f"delta://{folder}", snapshot="9").message
    assert "expected a version number or a time" in expect_error(read, f"delta://{folder}", snapshot="x").message
    assert "does not exist" in expect_error(read, f"delta://{folder}2").message
    assert "table does not apply" in expect_error(read, f"delta://{folder}", table="t").message


@pytest.fixture
def iceberg_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A catalog in SQLite with one table. PyIceberg reads its variables once, at its import."""
    catalogs = pytest.importorskip("pyiceberg.catalog")
    from pyiceberg.utils.config import Config

    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path / 'catalog.db'}")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path / 'warehouse'}")
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())
    catalog = catalogs.load_catalog("lake")
    catalog.create_namespace("support")
    yield catalog
    catalog.close()


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
    assert reporter.notes[-1].endswith("unchanged, not read again")
    assert "has no snapshot 5" in expect_error(read, "iceberg://lake/support.tickets", snapshot="5").message
    assert "does not exist" in expect_error(read, "iceberg://lake/support.nope").message
    assert "which is not configured" in expect_error(read, "iceberg://nope/support.tickets").message
    assert "is not an Iceberg address" in expect_error(read, "iceberg://lake").message
