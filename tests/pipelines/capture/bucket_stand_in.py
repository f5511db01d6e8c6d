"""An S3 bucket in memory, in place of the functions of `object_storage`: the tests of a real server take seconds each."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.common.artifacts import object_storage
from components.common.runtime.errors import EngineMissingError

ADDRESS = "s3://captured/team-a"


class KilledError(BaseException):
    """Stands for SIGKILL: no later change of the bucket happens."""


class BucketStandIn:
    """Objects by address, with the consistency of S3: each change is atomic, and visible at once.

    Attributes:
        objects: content and time of each object.
        changes: number of changes so far.
        kill_at: number of the first change that does not happen any more, or None.
        is_reachable: whether the bucket answers.
        versions: the answer to the check of versions.
        before: called with each changed address before the change.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.changes = 0
        self.kill_at: int | None = None
        self.is_reachable = True
        self.versions: bool | None = False
        self.before: Callable[[str], object] = lambda _: None
        self._mutex = threading.RLock()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> BucketStandIn:
        for name in (
            "upload_file",
            "download_file",
            "write_object",
            "read_object",
            "delete_object",
            "get_size",
            "list_sizes_and_etags",
            "list_sizes_and_times",
            "keeps_versions",
            "abort_multipart_uploads",
        ):
            monkeypatch.setattr(object_storage, name, getattr(self, name))
        return self

    def list_names(self) -> list[str]:
        """Return the names of the objects below the address, without locks and spools."""
        names = (uri.removeprefix(f"{ADDRESS}/") for uri in sorted(self.objects))
        return [name for name in names if not name.startswith((".lock", ".spools"))]

    def read_all(self) -> bytes:
        """Return the bytes of all objects, without the tombstones."""
        return b"\n".join(content for uri, (content, _) in self.objects.items() if "/.tombstones/" not in uri)

    def _answer(self) -> None:
        if not self.is_reachable:
            raise EngineMissingError(f"{ADDRESS} cannot be reached", hint="Check the network.")

    def _change(self, uri: str, content: bytes | None) -> None:
        self.before(uri)
        self._answer()
        with self._mutex:
            if self.kill_at is not None and self.changes >= self.kill_at:
                raise KilledError
            self.changes += 1
            if content is None:
                self.objects.pop(uri, None)
            else:
                self.objects[uri] = content, time.time()

    def _find(self, uri: str) -> dict[str, tuple[bytes, float]]:
        self._answer()
        with self._mutex:
            return {
                name.removeprefix(f"{uri}/"): each for name, each in self.objects.items() if name.startswith(f"{uri}/")
            }

    def upload_file(self, path: Path, uri: str, moved: object_storage.BytesMovedCallback) -> None:
        self._change(uri, path.read_bytes())

    def write_object(self, uri: str, text: str) -> None:
        self._change(uri, text.encode())

    def delete_object(self, uri: str) -> None:
        self._change(uri, None)

    def download_file(self, uri: str, path: Path, size: int, moved: object_storage.BytesMovedCallback) -> None:
        self._answer()
        path.parent.mkdir(parents=True, exist_ok=True)
        if uri not in self.objects:
            raise FileNotFoundError(uri)
        path.write_bytes(self.objects[uri][0])

    def read_object(self, uri: str) -> bytes | None:
        self._answer()
        return self.objects.get(uri, (None, 0.0))[0]

    def get_size(self, uri: str) -> int | None:
        self._answer()
        return len(self.objects[uri][0]) if uri in self.objects else None

    def list_sizes_and_etags(self, uri: str) -> dict[str, tuple[int, str]]:
        return {
            name: (len(content), hashlib.md5(content, usedforsecurity=False).hexdigest())
            for name, (content, _) in self._find(uri).items()
        }

    def list_sizes_and_times(self, uri: str) -> dict[str, tuple[int, float]]:
        return {name: (len(content), changed) for name, (content, changed) in self._find(uri).items()}

    def keeps_versions(self, uri: str) -> bool | None:
        self._answer()
        return self.versions

    def abort_multipart_uploads(self, uri: str) -> None:
        self._answer()
