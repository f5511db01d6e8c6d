"""Dataset versions whose files lie in a real S3 server: what works, what is refused and how, and what a kill leaves."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from components.common import artifacts
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, TunelineError
from components.common.hashing import ROOT
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.search import Query
from components.data_versioning.stage import check, diff, entries, fetch, find, obtain, publish, show, versions
from tests.engines.s3_server import S3

pytestmark = [pytest.mark.s3, pytest.mark.dvc]
ROWS = {"train": ["a", "b", "c"], "test": ["d"]}
MORE = {"train": ["a", "b", "x", "y"], "test": ["d"]}
PATIENCE = 20.0  # seconds within which a dead server has to be told


@pytest.fixture
def bucket(s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of the test's own, and the keys to it in the environment."""
    s3_server.use(monkeypatch)
    name = f"b{abs(hash(str(tmp_path))) % 10**12}"
    s3_server.client().create_bucket(Bucket=name)
    return name


@pytest.fixture
def config(bucket: str) -> DataVersioningConfig:
    return DataVersioningConfig(remote=f"s3://{bucket}/data/versions")


def put(dataset: Artifact, config: DataVersioningConfig, workdir: Path, **said: str) -> Any:
    return publish(dataset, config, workdir=workdir, reporter=Silent(), **said)


def got(rev: str, config: DataVersioningConfig, workdir: Path) -> Artifact:
    fetched = fetch(rev, workdir / f"got-{rev}", config, workdir=workdir, reporter=Silent(), overwrite=True)
    return artifacts.read(fetched.path, "dataset")


def objects(server: S3, bucket: str) -> dict[str, bytes]:
    listed = server.client().list_objects_v2(Bucket=bucket).get("Contents", [])
    return {one["Key"]: server.client().get_object(Bucket=bucket, Key=one["Key"])["Body"].read() for one in listed}


def tamper(server: S3, bucket: str, key: str, whole: bytes) -> None:
    server.client().put_object(Bucket=bucket, Key=key, Body=bytes([whole[0] ^ 1]) + whole[1:])


def test_versions_in_a_bucket_come_back_and_can_be_listed_shown_compared_and_searched(
    tmp_path: Path, make_dataset, config: DataVersioningConfig
) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    first, second = put(one, config, tmp_path, message="The first."), put(two, config, tmp_path, tag="release-2026-11")
    assert (first.tag, second.tag, first.remote) == ("dataset-v1", "dataset-v2", config.remote)
    assert [got(rev, config, tmp_path).sha256 for rev in ("dataset-v1", "release-2026-11")] == [one.sha256, two.sha256]
    assert [(e.message, e.tags) for e in entries(config, workdir=tmp_path)] == [("The first.", []), ("", ["release-2026-11"])]
    assert show("dataset-v1", config, workdir=tmp_path)["summary"] == {"rows": 3}
    changes = diff("dataset-v1", "dataset-v2", config, workdir=tmp_path, reporter=Silent())
    assert (changes["rows"]["added"], changes["rows"]["removed"]) == (2, 1)
    searched = find(Query("row", "x"), config, workdir=tmp_path, reporter=Silent())
    assert [one.tag for one in searched.found] == ["dataset-v2"]
    assert check(first.uri, config, workdir=tmp_path, reporter=Silent())[0].tag == "dataset-v1"
    assert not put(one, config, tmp_path).created


def test_no_key_is_written_anywhere_and_a_stock_dvc_pull_gives_the_dataset(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset("one", ROWS)
    put(dataset, config, tmp_path)
    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    own = (tmp_path / "clone" / ".dvc" / "config").read_text()
    assert f"endpointurl = {s3_server.endpoint}" in own
    for secret in (s3_server.access_key, s3_server.secret_key):
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    subprocess.run([sys.executable, "-m", "dvc", "pull", "-q"], cwd=tmp_path / "clone", env=environment, check=True)
    assert artifacts.read(tmp_path / "clone" / "datasets" / "dataset", "dataset").sha256 == dataset.sha256


def test_the_endpoint_may_stand_in_the_configuration(
    tmp_path: Path, make_dataset, bucket: str, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    config = DataVersioningConfig(remote=f"s3://{bucket}", endpoint_url=s3_server.endpoint)
    dataset = make_dataset("one", ROWS)
    put(dataset, config, tmp_path)
    assert got("dataset-v1", config, tmp_path).sha256 == dataset.sha256


def test_every_tampered_or_lost_object_is_refused_by_name(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    put(make_dataset("one", ROWS), config, tmp_path)
    for key, whole in objects(s3_server, bucket).items():
        if not whole:
            continue
        name = "/".join(key.split("/")[-2:])
        for damage in (
            lambda k=key, w=whole: tamper(s3_server, bucket, k, w),
            lambda k=key: s3_server.client().delete_object(Bucket=bucket, Key=k),
        ):
            damage()
            with pytest.raises(ArtifactDamagedError) as refused:
                got("dataset-v1", config, tmp_path)
            assert name in refused.value.message
            assert "Restore these objects from a snapshot" in refused.value.hint
            assert not (tmp_path / "got-dataset-v1").exists()
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=whole)
    got("dataset-v1", config, tmp_path)


def test_publishing_again_repairs_what_was_tampered_with_or_lost(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    dataset = make_dataset("one", ROWS)
    first = put(dataset, config, tmp_path)
    stored = objects(s3_server, bucket)
    for key, whole in stored.items():
        if whole:
            tamper(s3_server, bucket, key, whole)
    again = put(dataset, config, tmp_path)
    assert (again.rev, again.created) == (first.rev, False)
    assert objects(s3_server, bucket) == stored
    s3_server.client().delete_object(Bucket=bucket, Key=next(iter(stored)))
    put(dataset, config, tmp_path)
    assert objects(s3_server, bucket) == stored
    assert got("dataset-v1", config, tmp_path).sha256 == dataset.sha256


def test_a_new_version_does_not_rest_on_a_tampered_object_of_an_older_one(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    put(make_dataset("one", ROWS), config, tmp_path)
    for key, whole in objects(s3_server, bucket).items():
        if whole:
            tamper(s3_server, bucket, key, whole)
    two = make_dataset("two", MORE)
    put(two, config, tmp_path)
    assert got("dataset-v2", config, tmp_path).sha256 == two.sha256


def refused(dataset: Artifact, config: DataVersioningConfig, workdir: Path) -> TunelineError:
    began = time.monotonic()
    with pytest.raises(DataVersioningError) as told:
        put(dataset, config, workdir)
    assert time.monotonic() - began < PATIENCE
    assert versions(config, workdir=workdir) == []
    return told.value


def test_a_server_that_is_not_there_is_told_at_once_and_the_next_try_works(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset("one", ROWS)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes a connection and never answers
        for port in (9, silent.getsockname()[1]):
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            error = refused(dataset, config, tmp_path)
            assert f"http://127.0.0.1:{port} does not answer, so {config.remote} cannot be used" in error.message
            assert "data_versioning.endpoint_url" in error.hint
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    assert put(dataset, config, tmp_path).created


def test_wrong_and_missing_keys_are_told_as_that_and_the_next_try_works(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset("one", ROWS)
    for name, value, sign in (
        ("AWS_SECRET_ACCESS_KEY", "wrong", "refuses the secret key (SignatureDoesNotMatch)"),
        ("AWS_ACCESS_KEY_ID", "nobody", "does not know the access key (InvalidAccessKeyId)"),
        ("AWS_ACCESS_KEY_ID", "", "there are no keys for"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value) if value else patch.delenv(name)
            error = refused(dataset, config, tmp_path)
            assert sign in error.message
            assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in error.hint
            assert "wrong" not in error.message
    assert put(dataset, config, tmp_path).created


def test_a_bucket_that_does_not_exist_is_told_as_that(tmp_path: Path, make_dataset, bucket: str) -> None:
    error = refused(make_dataset("one", ROWS), DataVersioningConfig(remote=f"s3://{bucket}-not/x"), tmp_path)
    assert f"s3://{bucket}-not/x cannot be used" in error.message
    assert "has no such bucket (NoSuchBucket)" in error.message
    assert "Create the bucket" in error.hint


def test_a_server_that_goes_away_between_two_jobs_leaves_the_last_version(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_dataset("one", ROWS)
    put(one, config, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataVersioningError, match="does not answer"):
        put(make_dataset("two", MORE), config, tmp_path)
    with pytest.raises(DataVersioningError, match="does not answer"):
        got("dataset-v1", config, tmp_path)
    assert [v.content_sha256 for v in versions(config, workdir=tmp_path)] == [one.sha256]
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    assert got("dataset-v1", config, tmp_path).sha256 == one.sha256


def test_a_source_in_a_bucket_is_obtained_whole_or_not_at_all(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    dataset = make_dataset("one", ROWS)
    version = put(dataset, config, tmp_path)
    uri = f"dvc://{tmp_path / 'data-repository'}@dataset-v1:datasets/dataset/train.parquet"
    copied = obtain(uri, tmp_path / "sources", Silent())
    assert copied.read_bytes() == (dataset.path / "train.parquet").read_bytes()
    for key, whole in objects(s3_server, bucket).items():
        if whole and not key.endswith(version.md5[2:]):
            tamper(s3_server, bucket, key, whole)
    with pytest.raises(ArtifactDamagedError, match=r"lacks objects of datasets/dataset/train\.parquet") as lost:
        obtain(uri, tmp_path / "other", Silent())
    assert "Restore them there" in lost.value.hint
    assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == []


PUBLISHER = """
import sys
from pathlib import Path
from components.common import artifacts
from components.common.progress import Silent
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import publish
version = publish(artifacts.read(Path(sys.argv[1])), DataVersioningConfig(remote=sys.argv[3]), workdir=Path(sys.argv[2]), reporter=Silent())
print(version.tag)
"""


def start(dataset: Artifact, config: DataVersioningConfig, workdir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUBLISHER, str(dataset.path), str(workdir), config.remote]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd="/", env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def told(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return output.strip()


def test_two_publishers_at_once_both_land(tmp_path: Path, make_dataset, config: DataVersioningConfig) -> None:
    datasets = [make_dataset("one", ROWS), make_dataset("two", MORE)]
    tags = [told(process) for process in [start(dataset, config, tmp_path) for dataset in datasets]]
    assert sorted(tags) == ["dataset-v1", "dataset-v2"]
    assert [got(tag, config, tmp_path).sha256 for tag in tags] == [dataset.sha256 for dataset in datasets]


def test_a_publisher_killed_at_any_moment_leaves_the_last_version_whole(tmp_path: Path, make_dataset, config: DataVersioningConfig) -> None:
    one, two = make_dataset("one", ROWS), make_dataset("two", MORE)
    began = time.monotonic()
    told(start(one, config, tmp_path))
    whole = time.monotonic() - began
    chance = random.Random(7)
    for number in range(5):
        victim = start(two, config, tmp_path)
        time.sleep(whole * (0.3 + 0.7 * (number + chance.random()) / 5))
        victim.kill()
        victim.communicate()
        for version in versions(config, workdir=tmp_path):
            assert got(version.tag, config, tmp_path).sha256 == version.content_sha256
    put(two, config, tmp_path)
    assert [v.content_sha256 for v in versions(config, workdir=tmp_path)] == [one.sha256, two.sha256]
    assert got("dataset-v2", config, tmp_path).sha256 == two.sha256
    assert list((tmp_path / "state" / "data_versioning").iterdir()) == []
