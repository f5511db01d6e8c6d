"""A Delta table on a real S3 server: versions, wrong keys and an unreachable endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.reporters import SilentReporter
from components.data_curation.databases import table_extract
from components.data_curation.databases.table_formats import build_storage_options
from components.data_curation.reading.table_settings import TableSettings
from tests.engines.s3_server import S3

pytestmark = pytest.mark.s3
ADDRESS = "delta+s3://lake/support/tickets"


@pytest.fixture
def lake(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Any:
    deltalake = pytest.importorskip("deltalake")
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
