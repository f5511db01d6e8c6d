"""Dataset versions stored on a real S3 server: operations, errors, tampering and kills."""

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

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.artifacts.code_digest import ROOT
from components.common.runtime.errors import ArtifactDamagedError, TunelineError
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.row_search import Query
from components.data_versioning.stage import (
    check_revision,
    diff,
    fetch,
    fetch_source,
    list_entries,
    list_versions,
    publish,
    search_rows,
    show,
)
from tests.engines.s3_server import S3

pytestmark = [pytest.mark.s3, pytest.mark.dvc]
ROWS = {"train": ["a", "b", "c"], "test": ["d"]}
MORE = {"train": ["a", "b", "x", "y"], "test": ["d"]}
ERROR_DEADLINE_SECONDS = 20.0  # limit for the report of an unreachable server


@pytest.fixture
def bucket(s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket; the environment has its keys."""
    s3_server.use(monkeypatch)
    name = f"b{abs(hash(str(tmp_path))) % 10**12}"
    s3_server.client().create_bucket(Bucket=name)
    return name


@pytest.fixture
def config(bucket: str) -> DataVersioningConfig:
    return DataVersioningConfig(remote=f"s3://{bucket}/data/versions")


def publish_dataset(dataset: Artifact, config: DataVersioningConfig, workdir: Path, **options: str) -> Any:
    return publish(dataset, config, workdir=workdir, reporter=SilentReporter(), **options)


def fetch_version(rev: str, config: DataVersioningConfig, workdir: Path) -> Artifact:
    fetched = fetch(rev, workdir / f"got-{rev}", config, workdir=workdir, reporter=SilentReporter(), overwrite=True)
    return artifact_folder.read(fetched.path, "dataset")


def read_objects(server: S3, bucket: str) -> dict[str, bytes]:
    entries = server.client().list_objects_v2(Bucket=bucket).get("Contents", [])
    return {
        entry["Key"]: server.client().get_object(Bucket=bucket, Key=entry["Key"])["Body"].read() for entry in entries
    }


def tamper(server: S3, bucket: str, key: str, content: bytes) -> None:
    server.client().put_object(Bucket=bucket, Key=key, Body=bytes([content[0] ^ 1]) + content[1:])


def test_versions_in_bucket_can_be_fetched_listed_diffed_and_searched(
    tmp_path: Path, make_dataset, config: DataVersioningConfig
) -> None:
    dataset_one, dataset_two = make_dataset("one", ROWS), make_dataset("two", MORE)
    first, second = (
        publish_dataset(dataset_one, config, tmp_path, message="The first."),
        publish_dataset(dataset_two, config, tmp_path, tag="release-2026-11"),
    )
    assert (first.tag, second.tag, first.remote) == ("dataset-v1", "dataset-v2", config.remote)
    assert [fetch_version(rev, config, tmp_path).sha256 for rev in ("dataset-v1", "release-2026-11")] == [
        dataset_one.sha256,
        dataset_two.sha256,
    ]
    assert [(e.message, e.tags) for e in list_entries(config, workdir=tmp_path)] == [
        ("The first.", []),
        ("", ["release-2026-11"]),
    ]
    assert show("dataset-v1", config, workdir=tmp_path)["summary"] == {"rows": 3}
    changes = diff("dataset-v1", "dataset-v2", config, workdir=tmp_path, reporter=SilentReporter())
    assert (changes["rows"]["added"], changes["rows"]["removed"]) == (2, 1)
    search_result = search_rows(Query("row", "x"), config, workdir=tmp_path, reporter=SilentReporter())
    assert [version.tag for version in search_result.found] == ["dataset-v2"]
    assert check_revision(first.uri, config, workdir=tmp_path, reporter=SilentReporter())[0].tag == "dataset-v1"
    assert not publish_dataset(dataset_one, config, tmp_path).created


def test_keys_are_never_written_and_stock_dvc_pulls_the_dataset(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset("one", ROWS)
    publish_dataset(dataset, config, tmp_path)
    subprocess.run(["git", "clone", "-q", str(tmp_path / "data-repository"), str(tmp_path / "clone")], check=True)
    dvc_config = (tmp_path / "clone" / ".dvc" / "config").read_text()
    assert f"endpointurl = {s3_server.endpoint}" in dvc_config
    for secret in (s3_server.access_key, s3_server.secret_key):
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    environment = {**os.environ, "DVC_SITE_CACHE_DIR": str(tmp_path / "site"), "DVC_NO_ANALYTICS": "1"}
    subprocess.run([sys.executable, "-m", "dvc", "pull", "-q"], cwd=tmp_path / "clone", env=environment, check=True)
    assert artifact_folder.read(tmp_path / "clone" / "datasets" / "dataset", "dataset").sha256 == dataset.sha256


def test_endpoint_is_read_from_the_configuration(
    tmp_path: Path, make_dataset, bucket: str, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    config = DataVersioningConfig(remote=f"s3://{bucket}", endpoint_url=s3_server.endpoint)
    dataset = make_dataset("one", ROWS)
    publish_dataset(dataset, config, tmp_path)
    assert fetch_version("dataset-v1", config, tmp_path).sha256 == dataset.sha256


def test_tampered_or_lost_object_is_rejected_by_name(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    publish_dataset(make_dataset("one", ROWS), config, tmp_path)
    for key, content in read_objects(s3_server, bucket).items():
        if not content:
            continue
        name = "/".join(key.split("/")[-2:])
        for damage in (
            lambda k=key, w=content: tamper(s3_server, bucket, k, w),
            lambda k=key: s3_server.client().delete_object(Bucket=bucket, Key=k),
        ):
            damage()
            with pytest.raises(ArtifactDamagedError) as error:
                fetch_version("dataset-v1", config, tmp_path)
            assert name in error.value.message
            assert "Publish the dataset again" in error.value.hint
            assert not (tmp_path / "got-dataset-v1").exists()
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=content)
    fetch_version("dataset-v1", config, tmp_path)


def test_publishing_again_repairs_tampered_or_lost_objects(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    dataset = make_dataset("one", ROWS)
    first = publish_dataset(dataset, config, tmp_path)
    stored = read_objects(s3_server, bucket)
    for key, content in stored.items():
        if content:
            tamper(s3_server, bucket, key, content)
    republished = publish_dataset(dataset, config, tmp_path)
    assert (republished.rev, republished.created) == (first.rev, False)
    assert read_objects(s3_server, bucket) == stored
    s3_server.client().delete_object(Bucket=bucket, Key=next(iter(stored)))
    publish_dataset(dataset, config, tmp_path)
    assert read_objects(s3_server, bucket) == stored
    assert fetch_version("dataset-v1", config, tmp_path).sha256 == dataset.sha256


def test_new_version_does_not_reuse_tampered_objects(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    publish_dataset(make_dataset("one", ROWS), config, tmp_path)
    for key, content in read_objects(s3_server, bucket).items():
        if content:
            tamper(s3_server, bucket, key, content)
    dataset_two = make_dataset("two", MORE)
    publish_dataset(dataset_two, config, tmp_path)
    assert fetch_version("dataset-v2", config, tmp_path).sha256 == dataset_two.sha256


def expect_publish_error(dataset: Artifact, config: DataVersioningConfig, workdir: Path) -> TunelineError:
    start = time.monotonic()
    with pytest.raises(DataVersioningError) as error:
        publish_dataset(dataset, config, workdir)
    assert time.monotonic() - start < ERROR_DEADLINE_SECONDS
    assert list_versions(config, workdir=workdir) == []
    return error.value


def test_unreachable_server_is_reported_and_next_attempt_succeeds(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset("one", ROWS)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        for port in (9, silent.getsockname()[1]):
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            error = expect_publish_error(dataset, config, tmp_path)
            assert f"cannot reach the S3 service http://127.0.0.1:{port} for {config.remote}" in error.message
            assert "data_versioning.endpoint_url" in error.hint
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    assert publish_dataset(dataset, config, tmp_path).created


def test_wrong_and_missing_keys_are_reported_and_next_attempt_succeeds(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset("one", ROWS)
    for name, value, reason in (
        ("AWS_SECRET_ACCESS_KEY", "wrong", "rejects the secret key (SignatureDoesNotMatch)"),
        ("AWS_ACCESS_KEY_ID", "nobody", "rejects the access key (InvalidAccessKeyId)"),
        ("AWS_ACCESS_KEY_ID", "", "no keys are set for"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value) if value else patch.delenv(name)
            error = expect_publish_error(dataset, config, tmp_path)
            assert reason in error.message
            assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in error.hint
            assert "wrong" not in error.message
    assert publish_dataset(dataset, config, tmp_path).created


def test_missing_bucket_is_reported(tmp_path: Path, make_dataset, bucket: str) -> None:
    error = expect_publish_error(
        make_dataset("one", ROWS), DataVersioningConfig(remote=f"s3://{bucket}-not/x"), tmp_path
    )
    assert f"s3://{bucket}-not/x cannot be used" in error.message
    assert "has no such bucket (NoSuchBucket)" in error.message
    assert "Create the bucket" in error.hint


def test_server_loss_leaves_the_last_version(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset_one = make_dataset("one", ROWS)
    publish_dataset(dataset_one, config, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataVersioningError, match="cannot reach"):
        publish_dataset(make_dataset("two", MORE), config, tmp_path)
    with pytest.raises(DataVersioningError, match="cannot reach"):
        fetch_version("dataset-v1", config, tmp_path)
    assert [v.content_sha256 for v in list_versions(config, workdir=tmp_path)] == [dataset_one.sha256]
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    assert fetch_version("dataset-v1", config, tmp_path).sha256 == dataset_one.sha256


def test_source_in_bucket_is_fetched_completely_or_not_at_all(
    tmp_path: Path, make_dataset, config: DataVersioningConfig, s3_server: S3, bucket: str
) -> None:
    dataset = make_dataset("one", ROWS)
    version = publish_dataset(dataset, config, tmp_path)
    uri = f"dvc://{tmp_path / 'data-repository'}@dataset-v1:datasets/dataset/train.parquet"
    source = fetch_source(uri, tmp_path / "sources", SilentReporter())
    assert source.read_bytes() == (dataset.path / "train.parquet").read_bytes()
    for key, content in read_objects(s3_server, bucket).items():
        if content and not key.endswith(version.md5[2:]):
            tamper(s3_server, bucket, key, content)
    with pytest.raises(ArtifactDamagedError, match=r"objects of datasets/dataset/train\.parquet at") as error:
        fetch_source(uri, tmp_path / "other", SilentReporter())
    assert "Restore the objects in the remote" in error.value.hint
    assert [path for path in (tmp_path / "other").rglob("*") if path.is_file()] == []


PUBLISHER_SCRIPT = """
import sys
from pathlib import Path
from components.common.artifacts import artifact_folder
from components.common.runtime.reporters import SilentReporter
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.stage import publish
version = publish(artifact_folder.read(Path(sys.argv[1])), DataVersioningConfig(remote=sys.argv[3]), workdir=Path(sys.argv[2]), reporter=SilentReporter())
print(version.tag)
"""


def start_publisher(dataset: Artifact, config: DataVersioningConfig, workdir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUBLISHER_SCRIPT, str(dataset.path), str(workdir), config.remote]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd="/", env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_tag(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return output.strip()


def test_concurrent_publishers_both_succeed(tmp_path: Path, make_dataset, config: DataVersioningConfig) -> None:
    datasets = [make_dataset("one", ROWS), make_dataset("two", MORE)]
    tags = [wait_for_tag(process) for process in [start_publisher(dataset, config, tmp_path) for dataset in datasets]]
    assert sorted(tags) == ["dataset-v1", "dataset-v2"]
    assert [fetch_version(tag, config, tmp_path).sha256 for tag in tags] == [dataset.sha256 for dataset in datasets]


def test_killed_publisher_leaves_the_last_version_intact(
    tmp_path: Path, make_dataset, config: DataVersioningConfig
) -> None:
    dataset_one, dataset_two = make_dataset("one", ROWS), make_dataset("two", MORE)
    start = time.monotonic()
    wait_for_tag(start_publisher(dataset_one, config, tmp_path))
    duration = time.monotonic() - start
    rng = random.Random(7)
    for attempt in range(5):
        publisher = start_publisher(dataset_two, config, tmp_path)
        time.sleep(duration * (0.3 + 0.7 * (attempt + rng.random()) / 5))
        publisher.kill()
        publisher.communicate()
        for version in list_versions(config, workdir=tmp_path):
            assert fetch_version(version.tag, config, tmp_path).sha256 == version.content_sha256
    publish_dataset(dataset_two, config, tmp_path)
    assert [v.content_sha256 for v in list_versions(config, workdir=tmp_path)] == [
        dataset_one.sha256,
        dataset_two.sha256,
    ]
    assert fetch_version("dataset-v2", config, tmp_path).sha256 == dataset_two.sha256
    assert list((tmp_path / "state" / "data_versioning").iterdir()) == []
