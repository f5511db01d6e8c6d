"""Sources on S3, read from a real server."""

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from components.common.errors import ConfigurationError, InputError
from components.common.process import python_environment
from components.data_curation import remote
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import read
from components.data_curation.sources import list_sources, named

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
    """A bucket with the objects."""
    client = s3_server.client()
    client.create_bucket(Bucket="sources")
    for key, data in OBJECTS.items():
        client.put_object(Bucket="sources", Key=key, Body=data)
    return "s3://sources"


@pytest.fixture(autouse=True)
def environment(s3_server, bucket, monkeypatch):
    """This process talks to the server, and remembers no other."""
    s3_server.use(monkeypatch)
    remote._system.cache_clear()
    yield
    remote._system.cache_clear()


def refused(pattern, tmp_path):
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
    listed = list_sources([bucket + pattern], tmp_path)
    assert [one.uri for one in listed] == [f"{bucket}/{key}" for key in keys]
    assert [one.sha256 for one in listed] == [hashlib.sha256(OBJECTS[key]).hexdigest() for key in keys]
    assert [one.bytes for one in listed] == [len(OBJECTS[key]) for key in keys]
    assert [one.name for one in listed] == [key.rpartition("/")[2] for key in keys]


def test_they_are_listed_once_and_with_local_files_in_one_order(bucket, tmp_path):
    (tmp_path / "aa.jsonl").write_bytes(DATA)
    patterns = [f"{bucket}/raw", "aa.jsonl", f"{bucket}/raw/b.jsonl", f"{bucket}/*.txt"]
    listed = list_sources(patterns, tmp_path)
    assert [one.name for one in listed] == ["a.jsonl.gz", "aa.jsonl", "b.jsonl", "other.txt"]
    assert list_sources(patterns[::-1], tmp_path) == listed
    assert [one.uri for one in named("b.jsonl", patterns, tmp_path)] == [f"{bucket}/raw/b.jsonl"]
    assert named("gone.jsonl", [f"{bucket}/gone.jsonl", f"{bucket}-gone/x.jsonl"], tmp_path) == []


@pytest.mark.parametrize("key", ["raw/b.jsonl", "raw/deep/a.jsonl.gz"])
def test_their_rows_are_read(bucket, tmp_path, key):
    (source,) = list_sources([f"{bucket}/{key}"], tmp_path)
    found = list(read(source, DataCurationConfig()))
    assert [one.fields for one in found] == ROWS
    assert {one.file for one in found} == {key.rpartition("/")[2]}


def test_a_large_object_is_streamed_in_bounded_memory(s3_server, bucket, tmp_path):
    rows = 60_000
    line = json.dumps({"text": "x" * 980}).encode() + b"\n"
    s3_server.client().put_object(Bucket="sources", Key="large/rows.jsonl", Body=line * rows)
    script = f"""
import re, sys
from pathlib import Path
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import read
from components.data_curation.sources import list_sources
def held():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
config = DataCurationConfig()
(small,) = list_sources(["{bucket}/raw/b.jsonl"], Path())
before = [sum(1 for _ in read(small, config)), held()]
(large,) = list_sources(["{bucket}/large"], Path())
print(sum(1 for _ in read(large, config)), held() - before[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=python_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    count, kilobytes = map(int, done.stdout.split())
    assert count == rows
    assert kilobytes < 20_000, "an object of 60 MB was held in memory"


def test_an_object_that_changes_after_it_was_listed_is_refused_by_name(s3_server, bucket, tmp_path):
    client = s3_server.client()
    client.put_object(Bucket="sources", Key="changing/rows.jsonl", Body=DATA)
    (source,) = list_sources([f"{bucket}/changing"], tmp_path)
    client.put_object(Bucket="sources", Key="changing/rows.jsonl", Body=DATA[:-40])
    with pytest.raises(InputError) as error:
        list(read(source, DataCurationConfig()))
    assert error.value.message == "s3://sources/changing/rows.jsonl changed while it was read"
    client.delete_object(Bucket="sources", Key="changing/rows.jsonl")
    with pytest.raises(InputError) as error:
        list(read(source, DataCurationConfig()))
    assert error.value.message == "'s3://sources/changing/rows.jsonl' does not exist"
    assert error.value.hint.startswith("It could be read when the sources were listed: see that it is still there")


def test_what_is_not_there_is_told_apart(s3_server, tmp_path):
    known = "Known are .csv, .htm"
    what, hint = refused("s3://sources/raw/missing.jsonl", tmp_path)
    assert what == "does not exist"
    assert "`aws s3 ls s3://sources/`" in hint
    for pattern in ("s3://no-such-bucket/rows.jsonl", "s3://no-such-bucket/*.jsonl", "s3://no-such-bucket"):
        what, hint = refused(pattern, tmp_path)
        assert what == f"is in a bucket that does not exist at {s3_server.endpoint}"
        assert hint == "Check the name 'no-such-bucket', and that AWS_ENDPOINT_URL is the right store."
    what, hint = refused("s3://sources/raw/*.csv", tmp_path)
    assert what == "matches no file of a known kind"
    assert hint.startswith(known)
    what, hint = refused("s3://sources/raw/picture.png", tmp_path)
    assert what == "has the suffix '.png', which no reader knows"
    assert hint.startswith(known)


def test_keys_that_are_wrong_or_missing_are_told(monkeypatch, s3_server, tmp_path):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for pattern in ("s3://sources/other.txt", "s3://sources/*.txt"):
        what, hint = refused(pattern, tmp_path)
        assert what.startswith(f"may not be read with these keys: {s3_server.endpoint} says ")
        assert hint == f"Check {KEYS}, and what they may read in sources."
        assert "wrong" not in what
    remote._system.cache_clear()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    what, hint = refused("s3://sources/other.txt", tmp_path)
    assert what == "cannot be asked for without keys: Unable to locate credentials"
    assert hint == f"Set {KEYS}."
    remote._system.cache_clear()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    what, hint = refused("s3://sources/other.txt", tmp_path)
    assert what == "cannot be asked for without keys: The config profile (nobody) could not be found"


def test_an_endpoint_that_refuses_or_never_answers_is_told_within_seconds(monkeypatch, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        what, hint = refused("s3://sources/other.txt", tmp_path)  # nobody listens
        assert what.startswith(f"cannot be asked for: http://127.0.0.1:{port} does not answer: Could not connect")
        assert hint == "Check AWS_ENDPOINT_URL and the network between here and there."
        remote._system.cache_clear()
        listener.listen()  # somebody listens and says nothing
        began = time.monotonic()
        what, _ = refused("s3://sources/other.txt", tmp_path)
        assert time.monotonic() - began < 20
        assert what.startswith(f"cannot be asked for: http://127.0.0.1:{port} does not answer: ")


def test_the_endpoint_of_s3_alone_wins_over_the_general_one(monkeypatch, s3_server, bucket, tmp_path):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    assert len(list_sources([f"{bucket}/other.txt"], tmp_path)) == 1


@pytest.mark.parametrize("address", ["s3://", "s3:///rows.jsonl", "s3://*/rows.jsonl", "s3://me:secret@sources/rows.jsonl"])
def test_an_address_without_a_bucket_or_with_keys_in_it_is_refused_and_keys_are_not_shown(tmp_path, address):
    with pytest.raises(ConfigurationError) as error:
        list_sources([address], tmp_path)
    assert error.value.message.endswith("' names no bucket")
    assert "secret" not in error.value.message + error.value.hint
    assert (
        error.value.hint
        == f"Write s3://bucket/key, with * for any part of the key; keys to get in are never part of it: they come from {KEYS}."
    )
