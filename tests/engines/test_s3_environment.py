"""The store check in the first step of a pipeline whose store is a bucket on a real S3 server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from components.common.reporting.check_findings import CheckResult
from components.common.runtime.reporters import PlainTextReporter
from components.common.workspace.artifact_store import Workdir
from pipelines.steps import platform_check
from tests.engines.s3_server import S3

pytestmark = pytest.mark.s3


def check_store(tmp_path: Path) -> CheckResult:
    results = platform_check._check_pod(
        {"mounts": [], "variables": [], "notifications": {}, "authorities": ""},
        Workdir(tmp_path / "workdir"),
        PlainTextReporter(sys.stdout),
    )
    return next(result for result in results if result["name"].startswith("store "))


def test_store_check_writes_a_note_and_reports_wrong_keys(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(monkeypatch)
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TUNELINE_STORE", "s3://place-of-the-runs/tuneline")
    s3_server.client().create_bucket(Bucket="place-of-the-runs")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        result = check_store(tmp_path)
    assert (result["ok"], result["needed"]) == (False, True)
    assert "is not permitted with these credentials" in result["found"]
    for _ in range(2):
        assert check_store(tmp_path)["found"] == "a test object was written and read back"
    (note,) = s3_server.client().list_objects_v2(Bucket="place-of-the-runs")["Contents"]
    assert note["Key"] == "tuneline/keys/check_the_platform/trial"
