"""Remote sources: DVC repositories, the Hugging Face Hub and invalid addresses.

Tests have no network: the real Hub client talks to a local fake of the Hub's API. The client reads its settings at import, so it runs in a
separate process.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from components.common.artifacts.hashing import canonical_json
from components.common.runtime.errors import ConfigurationError
from components.common.runtime.process_control import build_python_environment
from components.common.runtime.reporters import SilentReporter
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading import remote_files
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.raw_records import Source
from components.data_curation.reading.source_files import find_sources_by_name, list_sources
from components.data_curation.stage import preview_curation

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def catch_refusal(pattern, tmp_path, fetch=None):
    with pytest.raises(ConfigurationError) as error:
        list_sources([pattern], tmp_path, fetch)
    assert error.value.message.startswith(f"data_curation.sources: '{pattern}' ")
    return error.value.message.removeprefix(f"data_curation.sources: '{pattern}' "), error.value.hint


# --- file names that are not UTF-8

LATIN_1_NAME = os.fsdecode(b"caf\xe9.jsonl")


@pytest.mark.parametrize("pattern", ["raw", "raw/*.jsonl", "raw/caf?.jsonl"])
def test_file_name_that_is_not_utf8_is_escaped_in_every_output(tmp_path, pattern):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / LATIN_1_NAME).write_bytes(LINES + b"{broken\n")
    (source,) = list_sources([pattern], tmp_path)
    assert (source.name, source.uri) == ("caf%E9.jsonl", f"file://{tmp_path}/raw/caf%E9.jsonl")
    assert source.path == tmp_path / "raw" / LATIN_1_NAME
    canonical_json(source.model_dump())
    config = DataCurationConfig(sources=[pattern])
    with preview_curation([source], config, seed=1, reporter=SilentReporter()) as result:
        rows = result.prepared.read_table(result.prepared.chunks[0], ["file", "source"]).to_pylist()
        assert rows == [{"file": "caf%E9.jsonl", "source": "caf%E9.jsonl"}] * 2
        assert [(record.file, record.line) for record in result.prepared.unread] == [("caf%E9.jsonl", 3)]
    assert find_sources_by_name(source.name, [pattern], tmp_path) == [source]


def test_folder_name_that_is_not_utf8_is_escaped(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xe9")
    folder.mkdir()
    (folder / "a 100%.jsonl").write_bytes(LINES)
    (source,) = list_sources(["."], folder)
    assert source.path == folder / "a 100%.jsonl"
    assert list(read_records(source, DataCurationConfig()))


def test_percent_sign_in_a_file_name_is_no_escape(tmp_path):
    (tmp_path / "caf%E9.jsonl").write_bytes(LINES)
    (source,) = list_sources(["caf%E9.jsonl"], tmp_path)
    assert (source.uri, source.path) == (str(tmp_path / "caf%E9.jsonl"), tmp_path / "caf%E9.jsonl")


def test_pattern_that_is_not_utf8_is_refused_with_a_glob_for_it(tmp_path):
    (tmp_path / LATIN_1_NAME).write_bytes(LINES)
    with pytest.raises(ConfigurationError, match=r"contains bytes that are not UTF-8$") as error:
        list_sources([LATIN_1_NAME], tmp_path)
    assert error.value.hint == "Use the file's folder, or a glob with ? for each of these bytes: 'caf?.jsonl'."
    assert len(list_sources(["caf?.jsonl"], tmp_path)) == 1


def test_suggested_glob_matches_the_other_characters_literally(tmp_path):
    name = "[a]*" + LATIN_1_NAME
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(ConfigurationError) as error:
        list_sources([name], tmp_path)
    assert error.value.hint.endswith(": '[[]a][*]caf?.jsonl'.")
    assert len(list_sources(["[[]a][*]caf?.jsonl"], tmp_path)) == 1


# --- dvc://


@pytest.fixture
def cache_folder(tmp_path):
    """Create a cache with a file under a cache name and a folder."""
    (tmp_path / "cache" / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "ab12").write_bytes(LINES)
    for name in ("b.jsonl", "deep/a.txt", "picture.png"):
        (tmp_path / "cache" / "folder" / name).write_bytes(LINES)
    return tmp_path / "cache"


def test_dvc_file_is_named_by_its_path_and_read_from_the_cache(cache_folder, tmp_path):
    requested = []

    def fetch(uri):
        requested.append(uri)
        return cache_folder / "ab12"

    address = "dvc://git@example.com:team/data.git@v1.2:raw/tickets.jsonl"
    (source,) = list_sources([address], tmp_path, fetch)
    assert requested == [address]
    assert (source.name, source.uri, source.bytes) == ("tickets.jsonl", str(cache_folder / "ab12"), len(LINES))
    assert Source(**source.model_dump()) == source
    records = list(read_records(source, DataCurationConfig()))
    assert [(item.file, item.fields["text"]) for item in records] == [
        ("tickets.jsonl", "one"),
        ("tickets.jsonl", "two"),
    ]
    assert find_sources_by_name("tickets.jsonl", [address], tmp_path, fetch) == [source]
    assert find_sources_by_name("ab12", [address], tmp_path, fetch) == []


def test_dvc_folder_is_listed_like_a_local_one(cache_folder, tmp_path):
    sources = list_sources(["dvc:///data/repository@main:raw"], tmp_path, lambda _: cache_folder / "folder")
    assert [item.name for item in sources] == ["a.txt", "b.jsonl"]


def test_dvc_source_without_a_fetcher_is_refused(tmp_path):
    message, hint = catch_refusal("dvc://repo@v1:raw/a.jsonl", tmp_path)
    assert message == "is in a DVC repository, which this command does not fetch"
    assert hint == "Set the local path of a fetched file or folder."
    assert find_sources_by_name("a.jsonl", ["dvc://repo@v1:raw/a.jsonl"], tmp_path) == []


@pytest.mark.parametrize("address", ["dvc://repo", "dvc://repo@v1", "dvc://repo:path.jsonl", "dvc://@v1:path.jsonl"])
def test_incomplete_dvc_address_is_refused(tmp_path, address):
    message, hint = catch_refusal(address, tmp_path, lambda _: tmp_path)
    assert message == "is not a valid DVC address"
    assert hint == "Write dvc://repository@revision:path, with the path in the repository."


def test_password_in_an_address_is_not_shown(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        list_sources(["dvc://me:hunter2@example.com/data.git"], tmp_path, lambda _: tmp_path)
    assert error.value.message == "data_curation.sources: 'dvc://me@example.com/data.git' is not a valid DVC address"


def test_dvc_file_with_an_unsupported_suffix_is_refused(cache_folder, tmp_path):
    message, hint = catch_refusal("dvc://repo@v1:table.rtf", tmp_path, lambda _: cache_folder / "ab12")
    assert message == "has the unsupported suffix '.rtf'"
    assert hint.startswith("Convert or rename the file to a supported suffix: .csv, ")


# --- invalid addresses


@pytest.mark.parametrize("address", ["gs://bucket/a.jsonl", "https://example.com/a.jsonl", "file:///data/a.jsonl"])
def test_unsupported_scheme_is_refused(tmp_path, address):
    message, hint = catch_refusal(address, tmp_path)
    assert message == f"has the unsupported scheme {address.partition('://')[0]}://"
    assert hint == "Use a local path, or an s3://, hf:// or dvc:// address."


@pytest.mark.parametrize(
    "address",
    ["hf://org/name@main/a.jsonl", "hf://datasets/name", "hf://spaces/org/name/a.jsonl", "hf://datasets/org/name@"],
)
def test_hub_address_without_a_dataset_is_refused(tmp_path, address):
    message, hint = catch_refusal(address, tmp_path)
    assert message == "is not the address of a dataset"
    assert hint == "Write hf://datasets/org/name@revision/path, preferably with a commit hash as the revision."


def test_scheme_decides_if_an_address_is_remote():
    assert [remote_files.is_remote(uri) for uri in ("s3://b/k", "hf://datasets/o/n", "/data/s3/a", "dvc://r@v:p")] == [
        True,
        True,
        False,
        False,
    ]


# --- hf://

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"train.jsonl": LINES, "data/more.jsonl": LINES * 3, "README.md": b"# A dataset\n", "picture.png": b"\x89PNG"}


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hub's API that the client's file system uses, with one revision of the dataset org/name."""

    token = ""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send_json(401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        if "/datasets/org/name" not in path:
            return self.send_json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if not any(f"/{revision}" in path for revision in ("main", COMMIT)) and path != "/api/datasets/org/name":
            return self.send_json(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        if "/resolve/" in path:
            return self.send_file(path.partition("/resolve/")[2].partition("/")[2])
        if "/tree/" in path:
            return self.send_json(200, build_tree(path.partition("/tree/")[2].partition("/")[2]))
        return self.send_json(200, {"id": "org/name", "sha": COMMIT, "siblings": [], "private": False})

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send_json(401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        try:
            paths = json.loads(body)["paths"]
        except ValueError:
            from urllib.parse import parse_qs

            paths = parse_qs(body)["paths"]
        return self.send_json(200, [entry for path in paths for entry in [build_entry(path)] if entry])

    def send_file(self, name):
        data = FILES.get(name)
        if data is None:
            return self.send_json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        first, last = 0, len(data) - 1
        if body := self.headers.get("Range"):
            begin, _, end = body.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
        self.send_response(206 if body else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("ETag", '"tag"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : last + 1])
        return None

    def send_json(self, status, value, headers=None):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def build_entry(path):
    if path in FILES:
        return {"type": "file", "path": path, "size": len(FILES[path]), "oid": "1" * 40}
    return (
        {"type": "directory", "path": path, "oid": "2" * 40}
        if any(name.startswith(f"{path}/") for name in FILES)
        else None
    )


def build_tree(folder):
    names = [name for name in FILES if not folder or name.startswith(f"{folder}/")]
    folders = {str(parent) for name in names for parent in Path(name).parents if str(parent) not in (".", folder)}
    return [build_entry(path) for path in (*sorted(folders), *names)]


@pytest.fixture
def hub():
    """Start the fake Hub; yield its address and its handler class."""
    handler = type("TestHub", (FakeHub,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def list_in_process(pattern, endpoint, tmp_path, **environment):
    """Return the result, or the error, of list_sources and read_records for a pattern in a separate process."""
    script = """
import json, sys
from pathlib import Path
from components.common.runtime.errors import TunelineError
from components.data_curation.config import DataCurationConfig
from components.data_curation.reading.file_readers import read_records
from components.data_curation.reading.source_files import list_sources
try:
    listed = list_sources([sys.argv[1]], Path())
    print(json.dumps([[s.uri, s.name, s.bytes, [r.fields["text"] for r in read_records(s, DataCurationConfig())]] for s in listed]))
except TunelineError as error:
    print(json.dumps(error.as_dict()))
"""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "",
        **environment,
    }
    completed = subprocess.run(
        [sys.executable, "-c", script, pattern],
        env=build_python_environment(**settings),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (f"hf://datasets/org/name@{COMMIT}/train.jsonl", ["train.jsonl"]),
        ("hf://datasets/org/name@main/**/*.jsonl", ["data/more.jsonl", "train.jsonl"]),
        ("hf://datasets/org/name@main/data", ["data/more.jsonl"]),
        ("hf://datasets/org/name/train.jsonl", ["train.jsonl"]),
    ],
)
def test_hub_dataset_files_are_listed_and_read(hub, tmp_path, pattern, names):
    sources = list_in_process(pattern, hub[0], tmp_path)
    assert [(name, size) for _, name, size, _ in sources] == [(Path(name).name, len(FILES[name])) for name in names]
    assert all(
        uri.startswith("hf://datasets/org/name") and uri.endswith(name)
        for (uri, *_), name in zip(sources, names, strict=True)
    )
    assert all(
        texts == [json.loads(line)["text"] for line in FILES[name].splitlines()]
        for (*_, texts), name in zip(sources, names, strict=True)
    )


@pytest.mark.parametrize(
    ("pattern", "environment", "message", "hint"),
    [
        (
            "hf://datasets/org/name@main/gone.jsonl",
            {},
            "does not exist, or HF_TOKEN has no access to it",
            "Check the name, revision and path, or set HF_TOKEN for a private",
        ),
        (
            "hf://datasets/org/other@main/a.jsonl",
            {},
            "does not exist, or HF_TOKEN has no access to it",
            "Check the name, revision and path, or set HF_TOKEN for a private",
        ),
        (
            "hf://datasets/org/name@main/*.csv",
            {},
            "matches no supported file",
            "Use files with a supported suffix: .csv",
        ),
        (
            "hf://datasets/org/name@main/train.jsonl",
            {"HF_HUB_OFFLINE": "1"},
            "cannot be read: HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or",
        ),
        (
            "hf://datasets/org/name@main/train.jsonl",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "cannot be read: ",
            "Check HF_ENDPOINT",
        ),
    ],
)
def test_hub_failures_are_reported(hub, tmp_path, pattern, environment, message, hint):
    error = list_in_process(pattern, hub[0], tmp_path, **environment)
    assert error["kind"] == "configuration"
    assert error["message"].startswith(f"data_curation.sources: '{pattern}' {message}")
    assert error["hint"].startswith(hint)


def test_private_hub_dataset_needs_a_token(hub, tmp_path):
    endpoint, handler = hub
    handler.token = "hf_secret"
    pattern = "hf://datasets/org/name@main/train.jsonl"
    error = list_in_process(pattern, endpoint, tmp_path)
    assert error["message"].startswith(f"data_curation.sources: '{pattern}' ")
    assert "HF_TOKEN" in error["hint"]
    assert "hf_secret" not in json.dumps(error)
    assert [name for _, name, _, _ in list_in_process(pattern, endpoint, tmp_path, HF_TOKEN="hf_secret")] == [
        "train.jsonl"
    ]
