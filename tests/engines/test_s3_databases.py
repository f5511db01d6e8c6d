"""Databases and a real S3 server: a Delta table in a bucket, and extracts in an artifact store in a bucket."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.common.workspace import artifact_store
from components.common.workspace.artifact_store import Workdir
from components.data_curation.databases import table_extract
from components.data_curation.databases.table_formats import build_storage_options
from components.data_curation.reading.table_settings import TableSettings
from components.data_curation.stage import Source, load_extracts
from pipelines.config.customization_config import parse_values
from pipelines.steps.curation_inputs import list_inputs
from tests.engines.s3_server import S3

pytestmark = pytest.mark.s3
ADDRESS = "delta+s3://lake/support/tickets"


@pytest.fixture
def lake(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Any:
    import deltalake

    s3_server.use(monkeypatch)
    s3_server.client().create_bucket(Bucket="lake")
    location, options = ADDRESS.removeprefix("delta+"), build_storage_options()
    for ids, mode in (([2, 1], "error"), ([3], "append")):
        rows = pyarrow.table({"id": ids, "subject": [f"Ticket {i}" for i in ids]})
        deltalake.write_deltalake(location, rows, mode=mode, storage_options=options)
    return deltalake


def read(folder: Path, **settings: Any) -> Artifact:
    options = TableSettings(order_by=["id"], **settings)
    return table_extract.extract_table(ADDRESS, options, folder, folder / "store", SilentReporter())


def read_ids(extract: Artifact) -> list[int]:
    ids: list[int] = parquet.read_table(extract.path / "tickets.parquet")["id"].to_pylist()
    return ids


def test_delta_table_on_s3(lake: Any, s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ids(read(tmp_path)) == [1, 2, 3]
    first = read(tmp_path, snapshot="0")
    assert read_ids(first) == [1, 2]
    assert first.manifest.summary["snapshot"] == "Delta version 0"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigurationError, match="cannot be reached") as error:
        read(tmp_path)
    assert s3_server.secret_key not in error.value.message
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="cannot be reached") as error:
        read(tmp_path)
    assert "AWS_ENDPOINT_URL" in error.value.hint


def test_extract_in_a_bucket_is_read_on_another_machine(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(monkeypatch)
    s3_server.client().create_bucket(Bucket="extracts")
    monkeypatch.setenv("TUNELINE_STORE", "s3://extracts/store")
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "cache"))
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, prompt TEXT, completion TEXT)")
        connection.execute("INSERT INTO tickets VALUES (1, 'a', 'b')")
    entry = {"path": str(tmp_path / "a.sqlite"), "table": "tickets"}
    config = parse_values({"data_curation": {"sources": [entry], "published": "ignore"}}, "the test")
    work = Workdir(tmp_path / "workdir")
    plan = list_inputs(config, work, SilentReporter()).as_plan()["sources"]
    assert isinstance(plan, list)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "a.sqlite").unlink()

    def load(sha256: str, kind: str) -> Artifact:
        return artifact_store.load_artifact(work.store, sha256, kind)

    [source] = load_extracts([Source(**one) for one in plan], load)
    assert source.path.is_relative_to(tmp_path / "cache")
    assert parquet.read_table(source.path).to_pylist() == [{"id": 1, "prompt": "a", "completion": "b"}]
