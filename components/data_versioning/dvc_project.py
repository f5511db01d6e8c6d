"""DVC project in a private folder: adds files, transfers them to and from the remote, and detects damaged objects.

The folder uses `no_scm` and its own caches, state and lock, so neither the user's git configuration nor another process
interferes. The data repository is a standard DVC repository: `git clone` and `dvc pull` work.
"""

from __future__ import annotations

import configparser
import errno
import hashlib
import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.common.runtime.environment import patched_environment
from components.common.runtime.errors import EngineMissingError, TunelineError, translate_system_error
from components.data_versioning import s3_remote
from components.data_versioning.git_repository import DataVersioningError

if TYPE_CHECKING:
    from dvc.repo import Repo

REMOTE_NAME = "storage"
GITIGNORE = "/config.local\n/tmp\n/cache\n/site\n/check\n"
# Settings of every private folder. Hard-link locks work on mounts without flock.
CORE_SETTINGS = {"no_scm": True, "hardlink_lock": True, "analytics": False, "check_update": False}


@dataclass(frozen=True)
class Remote:
    """DVC remote of a data repository.

    Attributes:
        url: Folder or URL.
        endpoint: Address of the S3 service; "" for Amazon S3.
    """

    url: str
    endpoint: str = ""

    def __str__(self) -> str:
        return self.url

    @property
    def is_s3(self) -> bool:
        """Whether the remote is in S3."""
        return self.url.startswith("s3://")

    def build_dvc_settings(self) -> dict[str, Any]:
        """Return the settings for DVC's configuration. Without `verify`, DVC accepts tampered objects."""
        endpoint = {"endpointurl": self.endpoint} if self.is_s3 and self.endpoint else {}
        return {"url": self.url, "verify": True, **endpoint}

    def check(self) -> None:
        """Check the access to a remote in S3; no other remote is checked.

        Raises:
            DataVersioningError: the bucket is not accessible.
            EngineMissingError: DVC's S3 plugin is not installed.
        """
        if not self.is_s3:
            return
        if importlib.util.find_spec("dvc_s3") is None:
            raise EngineMissingError(
                f"the DVC remote {self.url} requires the package dvc-s3, which is not installed",
                hint="Run: pip install 'tuneline[versioning]'",
            )
        s3_remote.check_bucket(self.url, self.endpoint)


def translate_error(remote: Remote, error: Exception, logged: list[str]) -> TunelineError:
    """Convert an error to a system error, such as DiskFullError, or else to DataVersioningError with DVC's message.

    Args:
        logged: messages that DVC logged during the operation.
    """
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    message = "; ".join(dict.fromkeys([first_line, *logged]))
    folders = [] if "://" in remote.url else [Path(remote.url)]
    if machine_error := translate_system_error(error, folders) or translate_system_error(OSError(message), folders):
        return machine_error
    return DataVersioningError(
        f"a DVC operation with {remote} failed: {message}",
        hint="Check that the remote exists, that you have access, and that its disk is not full.",
    )


def isolated_settings(folder: Path) -> AbstractContextManager[None]:
    """Set DVC's folder variables, so that DVC neither reads the user's settings nor writes to /var/tmp."""
    names = ("DVC_SITE_CACHE_DIR", "DVC_GLOBAL_CONFIG_DIR", "DVC_SYSTEM_CONFIG_DIR")
    return patched_environment(dict.fromkeys(names, str(folder)))


@contextmanager
def captured_errors() -> Iterator[list[str]]:
    """Yield a list that collects the messages of DVC's logged errors, and prevent DVC from printing them."""
    messages: list[str] = []

    def collect(record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        messages.append(record.getMessage() + (f" ({cause})" if cause else ""))

    handler = logging.Handler(logging.ERROR)
    handler.emit = collect  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("dvc", "dvc_data", "dvc_objects")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.ERROR)
    try:
        yield messages
    finally:
        for logger, (logger.handlers, level, logger.propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def without_reflinks() -> Iterator[None]:
    """Make DVC write an object to a temporary name and rename it, so that concurrent publishers do not conflict.

    DVC first tries to reflink to the object's own path. On a file system without reflinks, this attempt truncates and
    deletes an object that another job has just written, or fails with EACCES if the object is already read-only.
    """
    from dvc_objects.fs.local import FsspecLocalFileSystem

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    original = FsspecLocalFileSystem.reflink
    FsspecLocalFileSystem.reflink = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        FsspecLocalFileSystem.reflink = original  # type: ignore[method-assign]


def parse_remote(config: str) -> Remote | None:
    """Return the remote in the text of a .dvc/config; None if the text is invalid or contains no remote."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(config)
    except configparser.Error:
        return None
    section = f"'remote \"{REMOTE_NAME}\"'"
    url = parser.get(section, "url", fallback=None)
    return Remote(url, parser.get(section, "endpointurl", fallback="")) if url else None


def parse_md5(dvc_file: str) -> str:
    """Return the md5 in the text of a .dvc file."""
    return str(yaml.safe_load(dvc_file)["outs"][0]["md5"])


@dataclass(frozen=True)
class Project:
    """A DVC project in a private folder that tracks one folder of the data repository.

    Attributes:
        folder: Folder of the project.
        path: Tracked folder, relative to `folder`.
        remote: Remote that stores its files.
    """

    folder: Path
    path: str
    remote: Remote

    @property
    def dvc_file(self) -> Path:
        """The .dvc file of the tracked folder."""
        return self.folder / f"{self.path}.dvc"

    def create(self) -> None:
        """Make the folder a DVC project with this remote."""
        from dvc.config import Config

        control = self.folder / ".dvc"
        control.mkdir(exist_ok=True)
        (control / ".gitignore").write_text(GITIGNORE, encoding="utf-8")
        (control / "config").touch()
        with isolated_settings(control / "site"), Config(str(control), validate=False).edit("repo") as settings:
            settings["remote"].setdefault(REMOTE_NAME, {}).update(self.remote.build_dvc_settings())
            settings["core"]["remote"] = REMOTE_NAME
            settings["core"]["autostage"] = False

    @contextmanager
    def open(self, cache: str = "cache") -> Iterator[Repo]:
        """Open the DVC repository without console output, and convert DVC's errors to TunelineError.

        Each use has its own state database. DVC records the objects of the remote there, and would not check the remote
        again with the same database.

        Args:
            cache: Name of the cache folder in .dvc.

        Raises:
            DataVersioningError: a DVC operation in the block failed.
            DiskFullError, NotWritableError: the operation could not write to a disk.
        """
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        timeouts = s3_remote.TIMEOUTS if self.remote.is_s3 else {}  # an unreachable server is detected within seconds
        settings = {
            "core": {**CORE_SETTINGS, "autostage": False, "remote": REMOTE_NAME},
            "cache": {"type": ["reflink", "hardlink", "copy"], "dir": str(self.folder / ".dvc" / cache)},
            "remote": {REMOTE_NAME: {**self.remote.build_dvc_settings(), **timeouts}},
        }
        site = self.folder / ".dvc" / "site" / secrets.token_hex(4)
        with isolated_settings(site), s3_remote.limited_retries(), captured_errors() as logged:
            try:
                with Repo(str(self.folder), config=settings) as repo:
                    yield repo
            except (DvcException, OSError) as error:
                raise translate_error(self.remote, error, logged) from error

    def read_md5(self) -> str:
        """Return the md5 of the tracked folder (`….dir`)."""
        return parse_md5(self.dvc_file.read_text(encoding="utf-8"))

    def track(self) -> None:
        """Add the folder to DVC. Its files become read-only links to the cache."""
        with self.open() as repo:
            repo.add([str(self.folder / self.path)])

    def push(self) -> None:
        """Copy objects that the remote lacks from the cache to the remote."""
        from dvc_objects.errors import ObjectFormatError

        try:
            with self.open() as repo, without_reflinks():
                repo.push([str(self.dvc_file)])
        except ObjectFormatError:  # the remote has an unreadable list of files for this directory
            self.rewrite_objects([self.read_md5()])
            with self.open() as repo, without_reflinks():
                repo.push([str(self.dvc_file)])

    def fetch(self, cache: str = "cache") -> dict[str, str]:
        """Fetch the folder's objects into the cache and return the missing or damaged objects: {object id: file}.

        DVC silently discards a file's object with wrong bytes, and uses a directory's object before it verifies the
        object. This method therefore checks the cache after the fetch, including the digest of the directory's object.

        Args:
            cache: Name of the cache folder in .dvc.

        Raises:
            DataVersioningError: the remote is not accessible.
        """
        from dvc.exceptions import DownloadError
        from dvc_objects.errors import ObjectFormatError

        with self.open(cache) as repo:
            store = repo.cloud.get_remote_odb(REMOTE_NAME)
            try:
                repo.fetch([str(self.dvc_file)])
            except (DownloadError, ObjectFormatError):  # objects are missing, or the whole remote
                self.remote.check()
                if not self.remote.is_s3 and not store.fs.exists(store.path):  # a bucket has no folder to check
                    raise
            md5 = self.read_md5()
            listing = _read_listing(store, self.get_object_path(md5, cache), md5)
        if listing is None:
            return {md5: f"{self.path} (the list of its files)"}
        return {
            entry["md5"]: f"{self.path}/{entry['relpath']}"
            for entry in json.loads(listing)
            if not self.get_object_path(entry["md5"], cache).exists()
        }

    def get_object_path(self, oid: str, cache: str = "cache") -> Path:
        """Return the path of an object in the cache. The object may not exist."""
        return self.folder / ".dvc" / cache / "files" / "md5" / oid[:2] / oid[2:]

    def rewrite_objects(self, oids: Iterable[str]) -> None:
        """Replace objects in the remote with those in the cache. A push skips objects that the remote has."""
        with self.open() as repo, without_reflinks():
            store, cache = repo.cloud.get_remote_odb(REMOTE_NAME), repo.cache.local
            for oid in oids:
                path = store.oid_to_path(oid)
                if store.fs.exists(path):
                    store.fs.remove(path)
                store.add(cache.oid_to_path(oid), cache.fs, oid)

    def checkout(self) -> Path:
        """Write the fetched folder into the project and return it. Files are read-only links to the cache."""
        with self.open() as repo:
            repo.checkout([str(self.dvc_file)])
        return self.folder / self.path


def _read_listing(store: Any, cached: Path, md5: str) -> bytes | None:
    """Return the object that lists a directory's files, and add it to the cache; None if it is missing or damaged."""
    # DVC does not fetch the object if a file of the directory is missing in the remote.
    stored = store.oid_to_path(md5)
    if cached.exists():
        listing = cached.read_bytes()
    elif store.fs.exists(stored):
        listing = bytes(store.fs.cat_file(stored))
    else:
        return None
    if hashlib.md5(listing, usedforsecurity=False).hexdigest() != md5.removesuffix(".dir"):
        return None
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(listing)
    return listing
