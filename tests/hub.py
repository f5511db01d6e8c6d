"""A fake Hugging Face hub with one repository and one commit. It implements the endpoints that the client uses for a download."""

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

from components.common.artifacts import hashing

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/tiny"


@dataclass
class Repository:
    """Content and behaviour of the hub: the files of a folder, the model card, gating, and missing or corrupt files.

    `downloads` lists the downloaded files in order. `url` is set while the server runs.
    """

    folder: Path
    card: dict[str, Any] = field(default_factory=dict)
    gated: str | bool = False
    token: str = ""
    missing_files: set[str] = field(default_factory=set)
    corrupt_files: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)
    url: str = ""

    def files(self) -> dict[str, Path]:
        """Return the files by name."""
        return {
            path.relative_to(self.folder).as_posix(): path for path in sorted(self.folder.rglob("*")) if path.is_file()
        }

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables that point the client to this hub only."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_TOKEN": "",
            "HF_HUB_DISABLE_XET": "1",
        }


@contextmanager
def serving(repository: Repository) -> Iterator[Repository]:
    """Serve the repository on a free local port."""
    handler = type("Handler", (_HubHandler,), {"repository": repository})
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


class _HubHandler(BaseHTTPRequestHandler):
    repository: Repository

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if NAME not in path:
            self._send_json(404, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})
        elif not path.endswith(NAME) and not any(f"/{revision}" in path for revision in ("main", COMMIT)):
            self._send_json(404, {"error": "Revision not found"}, **{"X-Error-Code": "RevisionNotFound"})
        elif "/resolve/" in path:
            self._send_file(path.partition("/resolve/")[2].partition("/")[2])
        elif "/tree/" in path:
            self._send_json(
                200,
                [
                    {"type": "file", "path": name, "size": size, "oid": "1" * 40}
                    for name, size in self._file_sizes().items()
                ],
            )
        else:
            siblings = [
                {"rfilename": name, "size": size, **self._lfs_entry(name, size)}
                for name, size in self._file_sizes().items()
            ]
            model_info = {
                "id": NAME,
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "gated": self.repository.gated,
            }
            self._send_json(200, {**model_info, "cardData": self.repository.card})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file_sizes(self) -> dict[str, int]:
        return {name: path.stat().st_size for name, path in self.repository.files().items()}

    def _lfs_entry(self, name: str, size: int) -> dict[str, Any]:
        """Return the LFS entry of a weights file."""
        if not name.endswith(".safetensors"):
            return {}
        return {"lfs": {"size": size, "sha256": hashing.sha256_file(self.repository.files()[name]), "pointerSize": 134}}

    def _send_file(self, name: str) -> None:
        if self.repository.gated and self.headers.get("Authorization") != f"Bearer {self.repository.token}":
            self._send_json(403, {"error": f"Access to model {NAME} is restricted"}, **{"X-Error-Code": "GatedRepo"})
            return
        if name in self.repository.missing_files:
            self._send_json(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound"})
            return
        data = self.repository.files()[name].read_bytes()
        if name in self.repository.corrupt_files:
            data = bytes(reversed(data))
        self.send_response(200)
        for key, value in {"ETag": '"tag"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.repository.downloads.append(name)
            self.wfile.write(data)

    def _send_json(self, status: int, value: Any, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
