"""DVC: adding files, moving them to and from the remote, and finding what the remote holds damaged.

DVC works in a private folder with `no_scm`, so it never meets the user's git configuration, and with caches, state and lock of its own,
so that no other process can be in its way. The repository that users see is a stock one all the same: `git clone`, `dvc pull`.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from components.common.errors import EngineMissingError, TunelineError, of_the_machine
from components.data_versioning import s3
from components.data_versioning.repository import DataVersioningError

REMOTE = "storage"
IGNORED = "/config.local\n/tmp\n/cache\n/site\n/check\n"


@dataclass(frozen=True)
class Remote:
    """Where the files of a data repository lie: a folder, or a URL with the address of its service where it is not the usual one."""

    url: str
    endpoint: str = ""

    def __str__(self) -> str:
        return self.url

    @property
    def is_s3(self) -> bool:
        """Whether it is a bucket."""
        return self.url.startswith("s3://")

    def settings(self) -> dict[str, Any]:
        """What stands in the repository's own configuration. `verify`: without it DVC hands out tampered objects as good ones."""
        return {"url": self.url, "verify": True, **({"endpointurl": self.endpoint} if self.is_s3 and self.endpoint else {})}

    def patient(self) -> dict[str, Any]:
        """The settings of a job: with them a dead server is noticed within seconds."""
        waiting = {"connect_timeout": s3.CONNECT_SECONDS, "read_timeout": s3.READ_SECONDS}
        return {**self.settings(), **(waiting if self.is_s3 else {})}

    def check(self) -> None:
        """Raise DataVersioningError where a bucket cannot be used, and EngineMissingError without DVC's part for it."""
        if not self.is_s3:
            return
        if importlib.util.find_spec("dvc_s3") is None:
            raise EngineMissingError("dvc-s3 is not installed, and the remote is s3://", hint="pip install 'tuneline[versioning]'")
        s3.check(self.url, self.endpoint)


def prepare(folder: Path, remote: Remote) -> None:
    """Make `folder` a DVC project whose remote is `remote`."""
    from dvc.config import Config

    control = folder / ".dvc"
    control.mkdir(exist_ok=True)
    (control / ".gitignore").write_text(IGNORED, encoding="utf-8")
    (control / "config").touch()
    with private_settings(control / "site"), Config(str(control), validate=False).edit("repo") as settings:
        settings["remote"].setdefault(REMOTE, {}).update(remote.settings())
        settings["core"]["remote"] = REMOTE
        settings["core"]["autostage"] = False


@contextmanager
def opened(folder: Path, remote: Remote, cache: str = "cache") -> Iterator[Any]:
    """DVC on a private folder, told to be quiet; its errors are raised as DataVersioningError.

    Every opening has a state database of its own: DVC notes there what the remote holds, and would trust that note next time.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    site = folder / ".dvc" / "site" / secrets.token_hex(4)
    settings = {
        "core": {"no_scm": True, "hardlink_lock": True, "analytics": False, "check_update": False, "autostage": False, "remote": REMOTE},
        "cache": {"type": ["reflink", "hardlink", "copy"], "dir": str(folder / ".dvc" / cache)},
        "remote": {REMOTE: remote.patient()},
    }
    with private_settings(site), s3.patience(), logged() as said:
        try:
            with Repo(str(folder), config=settings) as repo:
                yield repo
        except (DvcException, OSError) as error:
            raise failed(remote, error, said) from error


def failed(remote: Remote, error: Exception, said: list[str]) -> TunelineError:
    """What DVC, or the system under it, refused: a full disk as such, all else with DVC's own words."""
    words = "; ".join(dict.fromkeys([str(error).splitlines()[0] if str(error) else type(error).__name__, *said]))
    folders = [] if "://" in remote.url else [Path(remote.url)]
    if told := of_the_machine(error, folders) or of_the_machine(OSError(words), folders):
        return told
    return DataVersioningError(
        f"the DVC remote {remote} failed: {words}",
        hint="Check that the remote is there, that you may use it, and that its disk is not full.",
    )


@contextmanager
def private_settings(folder: Path) -> Iterator[None]:
    """Keep DVC off the user's settings, which may be anything, and off /var/tmp, where its databases would be. Only the variables do."""
    names = ("DVC_SITE_CACHE_DIR", "DVC_GLOBAL_CONFIG_DIR", "DVC_SYSTEM_CONFIG_DIR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(folder)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def logged() -> Iterator[list[str]]:
    """Keep what DVC logs as errors, instead of letting it and its progress bars on the screen."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(_line(record))  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("dvc", "dvc_data", "dvc_objects")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.ERROR)
    try:
        yield said
    finally:
        for logger, (logger.handlers, level, logger.propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _line(record: logging.LogRecord) -> str:
    cause = record.exc_info[1] if record.exc_info else None
    return record.getMessage() + (f" ({cause})" if cause else "")


def add(folder: Path, path: str, remote: Remote) -> str:
    """Take the folder `path` of the project under DVC; returns its md5 (`….dir`). The files become read-only links into the cache."""
    with opened(folder, remote) as repo:
        repo.add([str(folder / path)])
    return _md5(folder, path)


def remote_of(config: str) -> Remote | None:
    """The remote that a project's .dvc/config names."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(config)
    except configparser.Error:
        return None
    section = f"'remote \"{REMOTE}\"'"
    url = parser.get(section, "url", fallback=None)
    return Remote(url, parser.get(section, "endpointurl", fallback="")) if url else None


def tracked_md5(dvc_file: str) -> str:
    """The md5 that a .dvc file names."""
    return str(yaml.safe_load(dvc_file)["outs"][0]["md5"])


def push(folder: Path, path: str, remote: Remote) -> None:
    """Copy what the remote does not have yet from the cache to the remote."""
    from dvc_objects.errors import ObjectFormatError

    try:
        with opened(folder, remote) as repo:
            repo.push([str(folder / f"{path}.dvc")])
    except ObjectFormatError:  # the remote has this very directory, its list of files unreadable
        rewrite(folder, [_md5(folder, path)], remote)
        with opened(folder, remote) as repo:
            repo.push([str(folder / f"{path}.dvc")])


def fetch(folder: Path, path: str, remote: Remote, cache: str = "cache") -> dict[str, str]:
    """Fetch a tracked folder's objects into the cache. Returns those that the remote lacks or holds damaged: {object id: file}.

    DVC drops a file's object whose bytes do not match its name, without raising; and it uses a directory's object before it has
    checked it. So what lies in the cache afterwards is looked at here, the directory's own bytes included.
    """
    from dvc.exceptions import DownloadError
    from dvc_objects.errors import ObjectFormatError

    with opened(folder, remote, cache) as repo:
        try:
            repo.fetch([str(folder / f"{path}.dvc")])
        except (DownloadError, ObjectFormatError):
            if not _reachable(repo, remote):
                raise
        return _damaged(repo.cloud.get_remote_odb(REMOTE), folder / ".dvc" / cache, _md5(folder, path), path)


def _md5(folder: Path, path: str) -> str:
    return tracked_md5((folder / f"{path}.dvc").read_text(encoding="utf-8"))


def _reachable(repo: Any, remote: Remote) -> bool:
    """Whether the remote is there at all, so that a missing object is the object's fault. A bucket has no folder that could be missing."""
    if remote.is_s3:
        remote.check()
        return True
    store = repo.cloud.get_remote_odb(REMOTE)
    return bool(store.fs.exists(store.path))


def _damaged(remote: Any, cache: Path, md5: str, path: str) -> dict[str, str]:
    listing = _listing(remote, cache, md5)
    if listing is None:
        return {md5: f"{path} (the list of its files)"}
    entries = json.loads(listing)
    return {entry["md5"]: f"{path}/{entry['relpath']}" for entry in entries if not _object(cache, entry["md5"]).exists()}


def _listing(remote: Any, cache: Path, md5: str) -> bytes | None:
    """The object that lists a directory's files, in the cache afterwards; None when it is lost or damaged.

    DVC leaves it in the remote when a file of the directory is missing there.
    """
    kept, place = _object(cache, md5), remote.oid_to_path(md5)
    if kept.exists():
        listing = kept.read_bytes()
    elif remote.fs.exists(place):
        listing = bytes(remote.fs.cat_file(place))
    else:
        return None
    if hashlib.md5(listing, usedforsecurity=False).hexdigest() != md5.removesuffix(".dir"):
        return None
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        kept.write_bytes(listing)
    return listing


def _object(cache: Path, oid: str) -> Path:
    return cache / "files" / "md5" / oid[:2] / oid[2:]


def cached(folder: Path, oid: str) -> bool:
    """Whether the cache has this object."""
    return _object(folder / ".dvc" / "cache", oid).exists()


def rewrite(folder: Path, oids: list[str], remote: Remote) -> None:
    """Write objects anew from the cache to the remote. A push would not: it takes what lies in the remote for whole."""
    with opened(folder, remote) as repo:
        store, cache = repo.cloud.get_remote_odb(REMOTE), repo.cache.local
        for oid in oids:
            place = store.oid_to_path(oid)
            if store.fs.exists(place):
                store.fs.remove(place)
            store.add(cache.oid_to_path(oid), cache.fs, oid)


def checkout(folder: Path, path: str, remote: Remote) -> Path:
    """Lay out a fetched folder in the project; returns it. The files are read-only links into the cache."""
    with opened(folder, remote) as repo:
        repo.checkout([str(folder / f"{path}.dvc")])
    return folder / path
