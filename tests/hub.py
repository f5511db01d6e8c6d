"""A stand-in for the Hugging Face hub, as much of it as its client asks for when it fetches a model: one repository, one commit.

The hub itself cannot be reached from a test.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from components.common import hashing

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/tiny"


@dataclass
class Repository:
    """What the hub has: the files of a folder, a card's front matter, a gate and the token that opens it, files that nobody gets, and
    files that come with other bytes.

    `given` is what was fetched, in order; `url` where it is while it serves.
    """

    folder: Path
    card: dict[str, Any] = field(default_factory=dict)
    gated: str | bool = False
    token: str = ""
    withheld: set[str] = field(default_factory=set)
    garbled: set[str] = field(default_factory=set)
    given: list[str] = field(default_factory=list)
    url: str = ""

    def files(self) -> dict[str, Path]:
        """Its files by their names."""
        return {path.relative_to(self.folder).as_posix(): path for path in sorted(self.folder.rglob("*")) if path.is_file()}

    def environment(self, home: Path) -> dict[str, str]:
        """The variables by which the client finds it and nothing else."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_TOKEN": "", "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def serving(repository: Repository) -> Iterator[Repository]:
    """Serve it on a free port of this machine."""
    handler = type("Ours", (_Hub,), {"repository": repository})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    repository.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield repository
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    repository: Repository

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if NAME not in path:
            self._say(404, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})
        elif not path.endswith(NAME) and not any(f"/{revision}" in path for revision in ("main", COMMIT)):
            self._say(404, {"error": "Revision not found"}, **{"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" in path:
            self._file(path.partition("/resolve/")[2].partition("/")[2])
        elif "/tree/" in path:
            self._say(200, [{"type": "file", "path": name, "size": size, "oid": "1" * 40} for name, size in self._sizes().items()])
        else:
            siblings = [{"rfilename": name, "size": size, **self._large(name, size)} for name, size in self._sizes().items()]
            about = {"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "gated": self.repository.gated}
            self._say(200, {**about, "cardData": self.repository.card})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _sizes(self) -> dict[str, int]:
        return {name: path.stat().st_size for name, path in self.repository.files().items()}

    def _large(self, name: str, size: int) -> dict[str, Any]:
        """What the hub says of a file that it keeps under its digest."""
        if not name.endswith(".safetensors"):
            return {}
        return {"lfs": {"size": size, "sha256": hashing.sha256_file(self.repository.files()[name]), "pointerSize": 134}}

    def _file(self, name: str) -> None:
        if self.repository.gated and self.headers.get("Authorization") != f"Bearer {self.repository.token}":
            self._say(403, {"error": f"Access to model {NAME} is restricted"}, **{"X-Error-Code": "GatedRepo"})
            return
        if name in self.repository.withheld:
            self._say(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound"})
            return
        data = self.repository.files()[name].read_bytes()
        if name in self.repository.garbled:
            data = bytes(reversed(data))
        self.send_response(200)
        for key, value in {"ETag": '"tag"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.repository.given.append(name)
            self.wfile.write(data)

    def _say(self, status: int, value: Any, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""
