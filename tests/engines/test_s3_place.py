"""The first step of a pipeline whose store is a bucket of a real service: it takes the note of the trial, or says what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from components.common.places import Workdir
from components.common.progress import Plain
from pipelines import place
from pipelines.findings import Finding
from tests.engines.s3_server import S3

pytestmark = pytest.mark.s3


def store(tmp_path: Path) -> Finding:
    found = place._here({"mounts": [], "variables": [], "authorities": ""}, Workdir(tmp_path / "workdir"), Plain(sys.stdout))
    return next(one for one in found if one["name"].startswith("store "))


def test_a_store_in_a_bucket_takes_a_note_each_time_and_wrong_keys_are_told(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(monkeypatch)
    monkeypatch.setenv("TUNELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TUNELINE_STORE", "s3://place-of-the-runs/tuneline")
    s3_server.client().create_bucket(Bucket="place-of-the-runs")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        refused = store(tmp_path)
    assert (refused["ok"], refused["needed"]) == (False, True)
    assert "is refused to these keys" in refused["found"]
    for _ in range(2):
        assert store(tmp_path)["found"] == "takes a note and gives it back"
    (kept,) = s3_server.client().list_objects_v2(Bucket="place-of-the-runs")["Contents"]
    assert kept["Key"] == "tuneline/keys/check_the_platform/trial"
