"""Sources in a real PostgreSQL server: types, one snapshot, limits, lost connections, and bounded memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ConfigurationError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace.artifact_store import Workdir
from components.data_curation.databases import postgresql as postgresql_source
from components.data_curation.databases import table_extract
from components.data_curation.reading.table_settings import TableSettings
from components.data_curation.stage import curate
from pipelines.config.customization_config import parse_values
from pipelines.steps.curation_inputs import list_inputs
from tests.engines import postgresql
from tests.engines.postgresql import PostgreSQL

pytestmark = pytest.mark.postgresql
Read = Callable[..., Artifact]
READER, PASSWORD = "reader", "p@ss/w:rd of the reader"
PASSWORD_VARIABLE = "READER_PASSWORD"
MANY_ROWS = 100_000
ROW_BYTES = 2_000
MAX_GROWTH_BYTES = 60_000_000  # of the peak memory; MANY_ROWS * ROW_BYTES are 200 MB
TYPES = {
    "amount": ("numeric(12,2)", "1234567890.50", "1234567890.50"),
    "prices": ("numeric[]", "{1.5,NULL}", ["1.5", None]),
    "opened": (
        "timestamptz",
        "2026-01-02 03:04:05.123456+02",
        datetime.fromisoformat("2026-01-02T01:04:05.123456+00:00"),
    ),
    "closed": ("timestamp", "2026-01-02 03:04:05", datetime(2026, 1, 2, 3, 4, 5)),
    "messages": ("jsonb", '[{"role": "user", "content": "ü"}]', '[{"role": "user", "content": "ü"}]'),
    "tags": ("text[]", '{a,NULL,"b c"}', ["a", None, "b c"]),
    "ticket": ("uuid", "269672f4-c749-4b45-8408-e02056bf8b43", "269672f4-c749-4b45-8408-e02056bf8b43"),
    "tickets": ("uuid[]", "{269672f4-c749-4b45-8408-e02056bf8b43}", ["269672f4-c749-4b45-8408-e02056bf8b43"]),
    "is_closed": ("boolean", "true", True),
    "score": ("double precision", "0.1", 0.1),
    "size": ("bigint", "9007199254740993", 9007199254740993),
}  # by column: type, value in SQL, value in the extract


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    with postgresql.run_server() as running:
        columns = ", ".join(f"{name} {sql_type}" for name, (sql_type, _, _) in TYPES.items())
        values = ", ".join(f"'{value}'" for _, value, _ in TYPES.values())
        running.execute(
            f"CREATE TABLE typed (id int PRIMARY KEY, {columns})",
            f"INSERT INTO typed VALUES (1, {values})",
            "INSERT INTO typed (id) VALUES (2)",
            "CREATE TABLE odd (id int, wait interval, host inet)",
            "INSERT INTO odd VALUES (1, '1 day', '10.0.0.1')",
            "CREATE TABLE many (id int PRIMARY KEY, body text)",
            f"INSERT INTO many SELECT i, repeat(md5(i::text), {ROW_BYTES // 32}) FROM generate_series(1, {MANY_ROWS}) i",
            f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'",
            f"GRANT SELECT ON typed TO {READER}",
        )
        yield running


@pytest.fixture
def address(server: PostgreSQL) -> str:
    return f"sql+{server.address('postgres')}"


@pytest.fixture
def read(address: str, tmp_path: Path) -> Read:
    def read_table(at: str = address, order_by: tuple[str, ...] = ("id",), **settings: Any) -> Artifact:
        return table_extract.extract_table(
            at, TableSettings(order_by=list(order_by), **settings), tmp_path, tmp_path / "store", SilentReporter()
        )

    return read_table


def read_rows(extract: Artifact) -> list[dict[str, Any]]:
    (file,) = extract.path.glob("*.parquet")
    rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    return rows


def expect_error(read: Read, *arguments: str, **settings: Any) -> TunelineError:
    with pytest.raises(TunelineError) as caught:
        read(*arguments, **settings)
    assert PASSWORD not in caught.value.message + caught.value.hint
    return caught.value


def test_types_of_postgresql(read: Read) -> None:
    full, empty = read_rows(read(table="typed"))
    assert full == {"id": 1, **{name: value for name, (_, _, value) in TYPES.items()}}
    assert empty == {"id": 2, **dict.fromkeys(TYPES)}


def test_type_without_json_value_is_refused_with_the_cast(read: Read) -> None:
    assert "column 'wait' has the unsupported type month_day_nano_interval" in expect_error(read, table="odd").message
    error = expect_error(read, query="SELECT id, host FROM odd")
    assert "column 'host' has the unsupported type inet" in error.message
    assert "CAST(column AS TEXT)" in error.hint
    rows = read_rows(read(query="SELECT id, CAST(host AS text) AS host, wait::text AS wait FROM odd"))
    assert rows == [{"id": 1, "host": "10.0.0.1/32", "wait": "1 day"}]
    error = expect_error(read, query="SELECT id, id AS a, wait::text AS a FROM odd")
    assert "column 'a' occurs several times; expected distinct names" in error.message


def test_extract_records_the_snapshot(read: Read, address: str) -> None:
    extract = read(table="typed")
    summary = extract.manifest.summary
    assert (summary["address"], summary["database"], summary["rows"]) == (address, "PostgreSQL", 2)
    state = summary["state"]
    assert set(state) == {"server_version", "database", "transaction_snapshot", "system_identifier", "lsn"}
    assert state["transaction_snapshot"] in summary["snapshot"]
    assert f"LSN {state['lsn']}" in summary["snapshot"]


def test_unchanged_table_gives_the_same_extract_and_a_changed_table_another(read: Read, server: PostgreSQL) -> None:
    server.execute("CREATE TABLE notes (id int PRIMARY KEY, body text)", "INSERT INTO notes VALUES (2, 'b'), (1, 'a')")
    first = read(table="notes")
    server.execute("CREATE TABLE notes2 AS TABLE notes", "VACUUM FULL notes")
    again = read(table="notes")
    assert again.sha256 == first.sha256
    assert again.manifest.summary == first.manifest.summary, "the snapshot of the first reading"
    server.execute("UPDATE notes SET body = 'c' WHERE id = 1")
    assert read(table="notes").sha256 != first.sha256


def test_rows_are_of_one_snapshot(read: Read, server: PostgreSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is inserted between the snapshot and the query is not part of the extract."""
    server.execute("CREATE TABLE live (id int PRIMARY KEY)", "INSERT INTO live VALUES (1)")
    original = table_extract._write_extract

    def insert_and_write(*arguments: Any) -> Artifact:
        server.execute("INSERT INTO live VALUES (2)")
        return original(*arguments)

    monkeypatch.setattr(table_extract, "_write_extract", insert_and_write)
    assert read_rows(read(table="live")) == [{"id": 1}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"table": "nope"}, 'rejected the query: relation "nope" does not exist'),
        ({"table": "typed", "order_by": ("nope",)}, 'rejected the query: column "nope" does not exist'),
        ({"query": "SELECT 1,, 2 AS id"}, 'rejected the query: syntax error at or near ","'),
        ({"query": "SELECT 1 / (id - 1) AS id FROM typed"}, "rejected the query: division by zero"),
        ({"query": "WITH gone AS (DELETE FROM typed RETURNING id) SELECT id FROM gone"}, "data-modifying statement"),
        ({"query": "SELECT id, nextval('counter') FROM typed"}, "cannot execute nextval() in a read-only transaction"),
        (
            {"query": "SELECT id, set_config('transaction_read_only', 'off', false) AS c FROM typed"},
            "transaction read-write mode must be set before any query",
        ),
        ({"query": "SELECT id % 1 AS key, id FROM typed", "order_by": ("key",)}, "has several rows with key = 0"),
        ({"query": "SELECT id, pg_sleep(5)::text FROM typed", "timeout_seconds": 0.3}, "within 0.3 seconds"),
        ({"table": "many", "max_rows": 1_000}, "has more than 1,000 rows (max_rows)"),
        ({"table": "many", "max_bytes": 50_000}, "has more than 50,000 bytes of rows (max_bytes)"),
    ],
)
def test_refused_queries_name_the_cause(read: Read, server: PostgreSQL, settings: dict[str, Any], message: str) -> None:
    server.execute("CREATE SEQUENCE IF NOT EXISTS counter")
    error = expect_error(read, **settings)
    assert isinstance(error, ConfigurationError)
    assert message in error.message
    assert error.hint
    assert len(read_rows(read(table="typed"))) == 2


def test_password_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a server that requires passwords can refuse one."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with postgresql.run_server() as server:
        server.execute(
            f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'",
            "CREATE TABLE tickets (id int PRIMARY KEY, body text)",
            "INSERT INTO tickets VALUES (1, 'a')",
            "CREATE TABLE salaries (id int PRIMARY KEY)",
            f"GRANT SELECT ON tickets TO {READER}",
        )
        require_passwords(server)
        address = f"sql+postgresql://{READER}@127.0.0.1:{server.port}/postgres"

        def read(**settings: Any) -> Artifact:
            options = TableSettings(order_by=["id"], **settings)
            return table_extract.extract_table(address, options, tmp_path, tmp_path / "store", SilentReporter())

        extract = read(table="tickets", credentials_env=PASSWORD_VARIABLE)
        assert read_rows(extract) == [{"id": 1, "body": "a"}]
        assert (
            "permission denied for table salaries"
            in expect_error(read, table="salaries", credentials_env=PASSWORD_VARIABLE).message
        )
        assert (
            "rejected the connection: fe_sendauth: no password supplied" in expect_error(read, table="tickets").message
        )
        monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
        error = expect_error(read, table="tickets", credentials_env=PASSWORD_VARIABLE)
        assert f'rejected the connection: FATAL: password authentication failed for user "{READER}"' in error.message
        assert "credentials_env" in error.hint
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes()


def require_passwords(server: PostgreSQL) -> None:
    """Replace the trust of local users in pg_hba.conf for the reader."""
    import psycopg2

    with psycopg2.connect(server.address("postgres")) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW hba_file")
        row = cursor.fetchone()
        assert row
        file = Path(row[0])
    file.write_text(f"host all {READER} 127.0.0.1/32 scram-sha-256\n" + file.read_text())
    server.execute("SELECT pg_reload_conf()")
    time.sleep(0.5)


def find_backends(server: PostgreSQL) -> list[int]:
    """Return the processes of the server that answer tuneline."""
    import psycopg2

    with psycopg2.connect(server.address("postgres")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'tuneline'")
        return [pid for (pid,) in cursor.fetchall()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda address: address.replace("/postgres", "/nodb"), 'cannot be reached: .*database "nodb" does not exist'),
        (lambda address: address.replace("mlflow@", "nobody@"), 'cannot be reached: .*role "nobody" does not exist'),
        (lambda address: f"{address}?sslmode=require", "server does not support SSL, but SSL was required"),
        (lambda address: "sql+postgresql://a@127.0.0.1:1/b", "cannot be reached: .*Connection refused"),
        (lambda address: "sql+postgresql://a@host.invalid/b", "could not translate host name"),
    ],
)
def test_connection_errors_name_the_cause(read: Read, address: str, change: Callable[[str], str], message: str) -> None:
    error = expect_error(read, change(address), table="typed")
    assert re.search(message, error.message)


def test_killed_server_is_reported(tmp_path: Path) -> None:
    with postgresql.run_server() as server:
        server.execute("CREATE TABLE many AS SELECT i AS id FROM generate_series(1, 10000) i")
        address = f"sql+{server.address('postgres')}"
        settings = TableSettings(query="SELECT id, pg_sleep(0.01)::text AS slept FROM many", order_by=["id"])

        def kill() -> None:
            time.sleep(0.5)
            for pid in find_backends(server):
                os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(ConfigurationError, match="closed the connection while the rows were read"):
            table_extract.extract_table(address, settings, tmp_path, tmp_path / "store", SilentReporter())
        thread.join()


def test_lost_connection_is_reported(read: Read, server: PostgreSQL, tmp_path: Path) -> None:
    def terminate() -> None:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tuneline'"
        time.sleep(0.5)
        server.execute(query)

    thread = threading.Thread(target=terminate)
    thread.start()
    error = expect_error(read, query="SELECT id, pg_sleep(0.01)::text AS slept FROM many")
    thread.join()
    assert "closed the connection while the rows were read" in error.message
    assert not list((tmp_path / "store").glob("[0-9a-f]*/manifest.json"))


@pytest.mark.long
def test_memory_is_bounded_for_many_rows(address: str, tmp_path: Path) -> None:
    """Reading 200 MB needs no more memory than reading 10 MB, up to MAX_GROWTH_BYTES. Needs 3 seconds of CPU."""
    program = (
        "import json, resource, sys\n"
        "from pathlib import Path\n"
        "from components.common.runtime.reporters import SilentReporter\n"
        "from components.data_curation.databases.table_extract import extract_table\n"
        "from components.data_curation.reading.table_settings import TableSettings\n"
        "folder = Path(sys.argv[2])\n"
        "def read(query):\n"
        "    settings = TableSettings(query=query, order_by=['id'])\n"
        "    extract = extract_table(sys.argv[1], settings, folder, folder / 'store', SilentReporter())\n"
        "    return extract, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "_, before = read('SELECT * FROM many WHERE id <= 5000')\n"
        "extract, after = read('SELECT * FROM many')\n"
        "print(json.dumps([extract.manifest.summary['rows'], after - before]))\n"
    )
    command = [sys.executable, "-c", program, address, str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    rows, growth = json.loads(output)
    assert rows == MANY_ROWS
    assert growth < MAX_GROWTH_BYTES


@pytest.mark.daft
def test_curation_of_a_table_conserves_rows_and_hits_the_cache(
    address: str, server: PostgreSQL, tmp_path: Path
) -> None:
    server.execute(
        "CREATE TABLE tickets (id int PRIMARY KEY, messages jsonb, status text)",
        "INSERT INTO tickets SELECT i, jsonb_build_array(jsonb_build_object('role', 'user', 'content', "
        "'Question ' || md5(i::text)), jsonb_build_object('role', 'assistant', 'content', 'Answer ' || md5((-i)::text)"
        " || md5((i + 1000)::text))), CASE WHEN i % 4 = 0 THEN 'open' ELSE 'closed' END FROM generate_series(1, 200) i",
        "INSERT INTO tickets VALUES (201, NULL, 'closed'), (202, '[]', 'closed')",
    )
    source = {"path": address, "table": "tickets", "order_by": ["id"], "where": "status = 'closed'"}
    source["columns"] = {"messages": "messages"}
    config = parse_values({"data_curation": {"sources": [source]}}, "the test")
    work = Workdir(tmp_path / "workdir")
    first = list_inputs(config, work, SilentReporter())
    again = list_inputs(config, work, SilentReporter())
    assert again.as_plan() == first.as_plan(), "the plan is the cache key of the curation"
    assert str(tmp_path) not in json.dumps(first.as_plan()["sources"])
    dataset = curate(first.sources, tmp_path / "dataset", config.data_curation, seed=1, reporter=SilentReporter())
    rows = dataset.manifest.summary["rows"]
    counts = Counter(rows["rejected"])
    assert rows["in"] == 202
    assert rows["in"] == rows["kept"] + counts.total() + rows["quarantined"]
    assert (rows["kept"], counts["not_selected"]) == (150, 50)
    server.execute("UPDATE tickets SET status = 'closed' WHERE id = 4")
    assert list_inputs(config, work, SilentReporter()).as_plan() != first.as_plan()


def test_connection_is_read_only_with_a_timeout() -> None:
    from components.data_curation.databases.table_request import build_request

    settings = TableSettings(table="a", order_by=["id"], timeout_seconds=1.5)
    request = build_request("sql+postgresql://a@b:5/c?options=-c%20search_path%3Dd", settings, Path())
    uri = postgresql_source.build_connection_uri(request)
    assert uri.startswith("postgresql://a@b:5/c?")
    assert "-c%20search_path%3Dd%20-c%20default_transaction_read_only%3Don" in uri
    assert "statement_timeout%3D1500" in uri
