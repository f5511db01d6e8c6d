"""Sources by address: DVC repositories and the Hugging Face Hub, and addresses that cannot be meant.

The Hub cannot be reached from a test: its real client talks to a stand-in of ours that answers as the Hub's API does, in a process of its
own, since the client reads its settings when it is imported.
"""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from components.common.errors import ConfigurationError
from components.common.process import python_environment
from components.data_curation import remote
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import read
from components.data_curation.sources import Source, list_sources, named

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def refused(pattern, tmp_path, obtain=None):
    with pytest.raises(ConfigurationError) as error:
        list_sources([pattern], tmp_path, obtain)
    assert error.value.message.startswith(f"data_curation.sources: '{pattern}' ")
    return error.value.message.removeprefix(f"data_curation.sources: '{pattern}' "), error.value.hint


# --- dvc://


@pytest.fixture
def cached(tmp_path):
    """A file under a name of the cache's, and a folder."""
    (tmp_path / "cache" / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "ab12").write_bytes(LINES)
    for name in ("b.jsonl", "deep/a.txt", "picture.png"):
        (tmp_path / "cache" / "folder" / name).write_bytes(LINES)
    return tmp_path / "cache"


def test_a_file_of_a_revision_is_called_as_its_path_says_and_read_where_it_was_put(cached, tmp_path):
    asked = []

    def obtain(uri):
        asked.append(uri)
        return cached / "ab12"

    address = "dvc://git@example.com:team/data.git@v1.2:raw/tickets.jsonl"
    (source,) = list_sources([address], tmp_path, obtain)
    assert asked == [address]
    assert (source.name, source.uri, source.bytes) == ("tickets.jsonl", str(cached / "ab12"), len(LINES))
    assert Source(**source.model_dump()) == source
    found = list(read(source, DataCurationConfig()))
    assert [(one.file, one.fields["text"]) for one in found] == [("tickets.jsonl", "one"), ("tickets.jsonl", "two")]
    assert named("tickets.jsonl", [address], tmp_path, obtain) == [source]
    assert named("ab12", [address], tmp_path, obtain) == []


def test_a_folder_of_a_revision_is_listed_as_a_folder_is(cached, tmp_path):
    listed = list_sources(["dvc:///data/repository@main:raw"], tmp_path, lambda _: cached / "folder")
    assert [one.name for one in listed] == ["a.txt", "b.jsonl"]


def test_a_revision_that_nobody_fetches_is_refused(tmp_path):
    what, hint = refused("dvc://repo@v1:raw/a.jsonl", tmp_path)
    assert what == "is in a DVC repository, from which nothing is fetched here"
    assert hint == "Fetch it first, and name the file or the folder."
    assert named("a.jsonl", ["dvc://repo@v1:raw/a.jsonl"], tmp_path) == []


@pytest.mark.parametrize("address", ["dvc://repo", "dvc://repo@v1", "dvc://repo:path.jsonl", "dvc://@v1:path.jsonl"])
def test_an_address_that_lacks_a_part_is_refused(tmp_path, address):
    what, hint = refused(address, tmp_path, lambda _: tmp_path)
    assert what == "does not name a file of a revision"
    assert hint == "Write dvc://repository@revision:path, the path as in the repository."


def test_a_password_in_an_address_is_never_shown(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        list_sources(["dvc://me:hunter2@example.com/data.git"], tmp_path, lambda _: tmp_path)
    assert error.value.message == "data_curation.sources: 'dvc://me@example.com/data.git' does not name a file of a revision"


def test_a_file_of_a_revision_that_no_reader_knows_is_refused(cached, tmp_path):
    what, hint = refused("dvc://repo@v1:raw/table.xlsx", tmp_path, lambda _: cached / "ab12")
    assert what == "has the suffix '.xlsx', which no reader knows"
    assert hint.startswith("Known are .csv, ")


# --- addresses that are none


@pytest.mark.parametrize("address", ["gs://bucket/a.jsonl", "https://example.com/a.jsonl", "file:///data/a.jsonl"])
def test_an_address_of_an_unknown_kind_is_refused(tmp_path, address):
    what, hint = refused(address, tmp_path)
    assert what == f"begins with {address.partition('://')[0]}://, from where nothing is read"
    assert hint == "Read are files, s3://, hf:// and dvc://."


@pytest.mark.parametrize(
    "address", ["hf://org/name@main/a.jsonl", "hf://datasets/name", "hf://spaces/org/name/a.jsonl", "hf://datasets/org/name@"]
)
def test_an_address_on_the_hub_that_names_no_dataset_is_refused(tmp_path, address):
    what, hint = refused(address, tmp_path)
    assert what == "names no dataset"
    assert hint == "Write hf://datasets/org/name@revision/path, best with a commit hash as the revision."


def test_an_address_is_remote_by_its_scheme():
    assert [remote.is_remote(uri) for uri in ("s3://b/k", "hf://datasets/o/n", "/data/s3/a", "dvc://r@v:p")] == [True, True, False, False]


# --- hf://

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"train.jsonl": LINES, "data/more.jsonl": LINES * 3, "README.md": b"# A dataset\n", "picture.png": b"\x89PNG"}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as its client's file system asks for: one dataset, org/name, of which one revision is there."""

    token = ""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.say(401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        if "/datasets/org/name" not in path:
            return self.say(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if not any(f"/{revision}" in path for revision in ("main", COMMIT)) and path != "/api/datasets/org/name":
            return self.say(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        if "/resolve/" in path:
            return self.file(path.partition("/resolve/")[2].partition("/")[2])
        if "/tree/" in path:
            return self.say(200, tree(path.partition("/tree/")[2].partition("/")[2]))
        return self.say(200, {"id": "org/name", "sha": COMMIT, "siblings": [], "private": False})

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.say(401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        try:
            paths = json.loads(asked)["paths"]
        except ValueError:
            from urllib.parse import parse_qs

            paths = parse_qs(asked)["paths"]
        return self.say(200, [entry for path in paths for entry in [entry_of(path)] if entry])

    def file(self, name):
        data = FILES.get(name)
        if data is None:
            return self.say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        first, last = 0, len(data) - 1
        if asked := self.headers.get("Range"):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("ETag", '"tag"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : last + 1])
        return None

    def say(self, status, value, headers=None):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def entry_of(path):
    if path in FILES:
        return {"type": "file", "path": path, "size": len(FILES[path]), "oid": "1" * 40}
    return {"type": "directory", "path": path, "oid": "2" * 40} if any(name.startswith(f"{path}/") for name in FILES) else None


def tree(folder):
    within = [name for name in FILES if not folder or name.startswith(f"{folder}/")]
    folders = {str(parent) for name in within for parent in Path(name).parents if str(parent) not in (".", folder)}
    return [entry_of(path) for path in (*sorted(folders), *within)]


@pytest.fixture
def hub():
    """The stand-in, and its address."""
    handler = type("Ours", (Hub,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def look(pattern, endpoint, tmp_path, **environment):
    """What list_sources and read say of a pattern, in a process of its own."""
    script = """
import json, sys
from pathlib import Path
from components.common.errors import TunelineError
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import read
from components.data_curation.sources import list_sources
try:
    listed = list_sources([sys.argv[1]], Path())
    print(json.dumps([[s.uri, s.name, s.bytes, [r.fields["text"] for r in read(s, DataCurationConfig())]] for s in listed]))
except TunelineError as error:
    print(json.dumps(error.as_dict()))
"""
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", **environment}
    done = subprocess.run(
        [sys.executable, "-c", script, pattern],
        env=python_environment(**settings),
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (f"hf://datasets/org/name@{COMMIT}/train.jsonl", ["train.jsonl"]),
        ("hf://datasets/org/name@main/**/*.jsonl", ["data/more.jsonl", "train.jsonl"]),
        ("hf://datasets/org/name@main/data", ["data/more.jsonl"]),
        ("hf://datasets/org/name/train.jsonl", ["train.jsonl"]),
    ],
)
def test_files_of_a_dataset_on_the_hub_are_listed_and_read(hub, tmp_path, pattern, names):
    listed = look(pattern, hub[0], tmp_path)
    assert [(name, size) for _, name, size, _ in listed] == [(Path(name).name, len(FILES[name])) for name in names]
    assert all(uri.startswith("hf://datasets/org/name") and uri.endswith(name) for (uri, *_), name in zip(listed, names, strict=True))
    assert all(
        texts == [json.loads(line)["text"] for line in FILES[name].splitlines()] for (*_, texts), name in zip(listed, names, strict=True)
    )


@pytest.mark.parametrize(
    ("pattern", "environment", "what", "hint"),
    [
        ("hf://datasets/org/name@main/gone.jsonl", {}, "does not exist, or not for this token", "Check name, revision and path; a private"),
        ("hf://datasets/org/other@main/a.jsonl", {}, "does not exist, or not for this token", "Check name, revision and path; a private"),
        ("hf://datasets/org/name@main/*.csv", {}, "matches no file of a known kind", "Known are .csv"),
        ("hf://datasets/org/name@main/train.jsonl", {"HF_HUB_OFFLINE": "1"}, "cannot be asked for: HF_HUB_OFFLINE is set", "Unset it, or"),
        ("hf://datasets/org/name@main/train.jsonl", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be asked for: ", "Check HF_ENDPOINT"),
    ],
)
def test_what_the_hub_does_not_give_is_told(hub, tmp_path, pattern, environment, what, hint):
    error = look(pattern, hub[0], tmp_path, **environment)
    assert error["kind"] == "configuration"
    assert error["message"].startswith(f"data_curation.sources: '{pattern}' {what}")
    assert error["hint"].startswith(hint)


def test_a_private_dataset_needs_its_token(hub, tmp_path):
    endpoint, handler = hub
    handler.token = "hf_secret"
    pattern = "hf://datasets/org/name@main/train.jsonl"
    error = look(pattern, endpoint, tmp_path)
    assert error["message"].startswith(f"data_curation.sources: '{pattern}' ")
    assert "HF_TOKEN" in error["hint"]
    assert "hf_secret" not in json.dumps(error)
    assert [name for _, name, _, _ in look(pattern, endpoint, tmp_path, HF_TOKEN="hf_secret")] == ["train.jsonl"]
