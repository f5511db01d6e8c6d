"""Curation sources on a real S3 server."""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from components.common.runtime.errors import ConfigurationError, InputError
from components.common.runtime.process_control import build_python_environment
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import remote_files
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.source_files import find_sources_by_name, list_sources

pytestmark = pytest.mark.s3

ROWS = [{"text": f"row number {number} with some words"} for number in range(200)]
DATA = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
OBJECTS = {
    "raw/b.jsonl": DATA,
    "raw/deep/a.jsonl.gz": gzip.compress(DATA),
    "raw/deep/.hidden/c.jsonl": DATA,
    "raw/picture.png": b"\x89PNG",
    "other.txt": b"one\ntwo\n",
}
KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


@pytest.fixture(scope="module")
def bucket(s3_server):
    """A bucket with OBJECTS."""
    client = s3_server.client()
    client.create_bucket(Bucket="sources")
    for key, data in OBJECTS.items():
        client.put_object(Bucket="sources", Key=key, Body=data)
    return "s3://sources"


@pytest.fixture(autouse=True)
def environment(s3_server, bucket, monkeypatch):
    """Point this process to the server and clear cached file systems."""
    s3_server.use(monkeypatch)
    remote_files._open_file_system.cache_clear()
    yield
    remote_files._open_file_system.cache_clear()


def get_listing_error(pattern, tmp_path):
    with pytest.raises(ConfigurationError) as error:
        list_sources([pattern], tmp_path)
    assert error.value.message.startswith(f"data_curation.sources: '{pattern}' ")
    return error.value.message.removeprefix(f"data_curation.sources: '{pattern}' "), error.value.hint


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("/raw/b.jsonl", ["raw/b.jsonl"]),
        ("/raw/*.jsonl", ["raw/b.jsonl"]),
        ("/**/*.jsonl.gz", ["raw/deep/a.jsonl.gz"]),
        ("/raw/", ["raw/deep/a.jsonl.gz", "raw/b.jsonl"]),
        ("/raw", ["raw/deep/a.jsonl.gz", "raw/b.jsonl"]),
        ("", ["raw/deep/a.jsonl.gz", "raw/b.jsonl", "other.txt"]),
    ],
)
def test_objects_globs_and_prefixes_are_listed_with_digest_and_size(bucket, tmp_path, pattern, keys):
    sources = list_sources([bucket + pattern], tmp_path)
    assert [source.uri for source in sources] == [f"{bucket}/{key}" for key in keys]
    assert [source.sha256 for source in sources] == [hashlib.sha256(OBJECTS[key]).hexdigest() for key in keys]
    assert [source.bytes for source in sources] == [len(OBJECTS[key]) for key in keys]
    assert [source.name for source in sources] == [key.rpartition("/")[2] for key in keys]


def test_local_and_remote_sources_are_listed_once_in_one_order(bucket, tmp_path):
    (tmp_path / "aa.jsonl").write_bytes(DATA)
    patterns = [f"{bucket}/raw", "aa.jsonl", f"{bucket}/raw/b.jsonl", f"{bucket}/*.txt"]
    sources = list_sources(patterns, tmp_path)
    assert [source.name for source in sources] == ["a.jsonl.gz", "aa.jsonl", "b.jsonl", "other.txt"]
    assert list_sources(patterns[::-1], tmp_path) == sources
    assert [source.uri for source in find_sources_by_name("b.jsonl", patterns, tmp_path)] == [f"{bucket}/raw/b.jsonl"]
    assert find_sources_by_name("gone.jsonl", [f"{bucket}/gone.jsonl", f"{bucket}-gone/x.jsonl"], tmp_path) == []


@pytest.mark.parametrize("key", ["raw/b.jsonl", "raw/deep/a.jsonl.gz"])
def test_rows_of_objects_are_read(bucket, tmp_path, key):
    (source,) = list_sources([f"{bucket}/{key}"], tmp_path)
    records = list(read_records(source, DataCurationConfig()))
    assert [record.fields for record in records] == ROWS
    assert {record.file for record in records} == {key.rpartition("/")[2]}


def test_large_object_is_streamed_in_bounded_memory(s3_server, bucket, tmp_path):
    rows = 60_000
    line = json.dumps({"text": "x" * 980}).encode() + b"\n"
    s3_server.client().put_object(Bucket="sources", Key="large/rows.jsonl", Body=line * rows)
    script = f"""
import re, sys
from pathlib import Path
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.source_files import list_sources
def held():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
config = DataCurationConfig()
(small,) = list_sources(["{bucket}/raw/b.jsonl"], Path())
before = [sum(1 for _ in read_records(small, config)), held()]
(large,) = list_sources(["{bucket}/large"], Path())
print(sum(1 for _ in read_records(large, config)), held() - before[1])
"""
    process = subprocess.run(
        [sys.executable, "-c", script],
        env=build_python_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    count, kilobytes = map(int, process.stdout.split())
    assert count == rows
    assert kilobytes < 20_000, "an object of 60 MB was held in memory"


def test_object_changed_after_listing_is_rejected_by_name(s3_server, bucket, tmp_path):
    client = s3_server.client()
    client.put_object(Bucket="sources", Key="changing/rows.jsonl", Body=DATA)
    (source,) = list_sources([f"{bucket}/changing"], tmp_path)
    client.put_object(Bucket="sources", Key="changing/rows.jsonl", Body=DATA[:-40])
    with pytest.raises(InputError) as error:
        list(read_records(source, DataCurationConfig()))
    assert error.value.message == "s3://sources/changing/rows.jsonl changed while it was read"
    client.delete_object(Bucket="sources", Key="changing/rows.jsonl")
    with pytest.raises(InputError) as error:
        list(read_records(source, DataCurationConfig()))
    assert error.value.message == "'s3://sources/changing/rows.jsonl' does not exist"
    assert error.value.hint.startswith("Check that the source is still accessible")


def test_missing_object_bucket_and_suffix_have_distinct_errors(s3_server, tmp_path):
    supported = "a supported suffix: .csv, .docx"
    message, hint = get_listing_error("s3://sources/raw/missing.jsonl", tmp_path)
    assert message == "does not exist"
    assert "aws s3 ls s3://sources/" in hint
    for pattern in ("s3://no-such-bucket/rows.jsonl", "s3://no-such-bucket/*.jsonl", "s3://no-such-bucket"):
        message, hint = get_listing_error(pattern, tmp_path)
        assert message == f"is in a bucket that does not exist at {s3_server.endpoint}"
        assert hint == "Check the bucket name 'no-such-bucket' and AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL."
    message, hint = get_listing_error("s3://sources/raw/*.csv", tmp_path)
    assert message == "matches no supported file"
    assert hint.startswith(f"Use files with {supported}")
    message, hint = get_listing_error("s3://sources/raw/picture.png", tmp_path)
    assert message == "has the unsupported suffix '.png'"
    assert hint.startswith(f"Convert or rename the file to {supported}")


def test_wrong_and_missing_keys_are_reported(monkeypatch, s3_server, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for pattern in ("s3://sources/other.txt", "s3://sources/*.txt"):
        message, hint = get_listing_error(pattern, tmp_path)
        assert message.startswith(f"cannot be read with these credentials: {s3_server.endpoint} returned ")
        assert hint == f"Check {KEYS}, and their permissions on the bucket sources."
        assert "wrong" not in message
    remote_files._open_file_system.cache_clear()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    message, hint = get_listing_error("s3://sources/other.txt", tmp_path)
    assert message == "cannot be read without credentials: Unable to locate credentials"
    assert hint == f"Set {KEYS}."
    remote_files._open_file_system.cache_clear()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    message, hint = get_listing_error("s3://sources/other.txt", tmp_path)
    assert message == "cannot be read without credentials: The config profile (nobody) could not be found"


def test_unreachable_or_silent_endpoint_is_reported_within_seconds(monkeypatch, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        message, hint = get_listing_error("s3://sources/other.txt", tmp_path)  # no server listens
        assert message.startswith(f"cannot be read: the request to http://127.0.0.1:{port} failed: Could not connect")
        assert hint == "Check AWS_ENDPOINT_URL and the network."
        remote_files._open_file_system.cache_clear()
        listener.listen()  # a server listens and never answers
        start = time.monotonic()
        message, _ = get_listing_error("s3://sources/other.txt", tmp_path)
        assert time.monotonic() - start < 20
        assert message.startswith(f"cannot be read: the request to http://127.0.0.1:{port} failed: ")


def test_s3_endpoint_overrides_the_general_endpoint(monkeypatch, s3_server, bucket, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    assert len(list_sources([f"{bucket}/other.txt"], tmp_path)) == 1


@pytest.mark.parametrize(
    "address", ["s3://", "s3:///rows.jsonl", "s3://*/rows.jsonl", "s3://me:secret@sources/rows.jsonl"]
)
def test_invalid_address_is_rejected_without_showing_keys(tmp_path, address):
    with pytest.raises(ConfigurationError) as error:
        list_sources([address], tmp_path)
    assert error.value.message.endswith("' contains no valid bucket name")
    assert "secret" not in error.value.message + error.value.hint
    assert error.value.hint == f"Write s3://bucket/key, with * for any part of the key and credentials only in {KEYS}."
