"""Objects of the DVC remote that no commit references, left by publications that were interrupted before their commit.

Reads every DVC file in every commit that a branch or tag reaches, including branches and tags of users.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath

import yaml

from components.common.runtime.errors import ConfigurationError, TunelineError
from components.common.workspace import job_folders, liveness
from components.data_versioning import dvc_sources, git_repository, row_search
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.version_store import VersionStore, resolve_location

OBJECTS_FOLDER = Path("files") / "md5"  # in a remote


@dataclass(frozen=True)
class RemoteObject:
    """An object in the remote: its id, path, size, and the seconds since it was written."""

    oid: str
    path: Path
    bytes: int
    unused_seconds: float


@dataclass(frozen=True)
class UnreferencedObjects:
    """The objects of the remote that no commit references, or the reason why they cannot be determined."""

    objects: list[RemoteObject]
    unknown_reason: str = ""


def list_revisions(config: DataVersioningConfig, *, workdir: Path) -> list[tuple[str, str]]:
    """Return tag and dataset digest of all revisions of all datasets; empty if the repository does not exist yet.

    Raises:
        DataVersioningError: the repository cannot be read.
        EngineMissingError: git is not installed.
    """
    store = VersionStore.from_config(config, workdir)
    datasets = row_search.list_datasets(store) if store.refresh() else []
    return [(version.tag, version.content_sha256) for dataset in datasets for version in dataset.list_versions()]


def get_address(config: DataVersioningConfig, *, workdir: Path) -> str:
    """Return the address of the configured data repository, for messages."""
    return VersionStore.from_config(config, workdir).origin


def is_missing(config: DataVersioningConfig, *, workdir: Path) -> bool:
    """Return whether a local repository does not exist yet. `list_revisions` checks a URL.

    Raises:
        ConfigurationError: the folder has other contents.
    """
    store = VersionStore.from_config(config, workdir)
    return store.is_local and not git_repository.is_repository(store.repository)


def find_other_repositories(uris: Collection[str], config: DataVersioningConfig, *, workdir: Path) -> list[str]:
    """Return the repositories in these dvc://repository@commit:path URIs that differ from the configured repository.

    A commit identifies the configured repository under another address.

    Raises:
        DataVersioningError, EngineMissingError: as `list_revisions`.
    """
    store = VersionStore.from_config(config, workdir)
    others = []
    for uri in sorted(uris):
        try:
            dvc_uri = dvc_sources.parse_uri(uri)
        except ConfigurationError:  # not a dvc:// URI
            continue
        origin, folder = resolve_location(dvc_uri.repo, workdir.absolute(), store.jobs_folder)
        is_same_folder = origin == str(folder) and folder.resolve() == store.repository.resolve()
        if origin != store.origin and not (store.is_local and is_same_folder):
            others.append(dvc_uri)
    if not others or not store.refresh():
        return sorted({dvc_uri.repo for dvc_uri in others})
    queries = "".join(f"{dvc_uri.rev}^{{commit}}\n" for dvc_uri in others)
    kinds = git_repository.run_git(store.repository, "cat-file", "--batch-check=%(objecttype)", stdin=queries)
    return sorted({dvc_uri.repo for dvc_uri, kind in zip(others, kinds.splitlines(), strict=True) if kind != "commit"})


def find_unreferenced(config: DataVersioningConfig, *, workdir: Path, own_remote: bool = False) -> UnreferencedObjects:
    """Return the unreferenced objects of the remote.

    The remote has to be a folder in the workdir, or a folder that only this repository uses (`own_remote`).

    Raises:
        DataVersioningError, EngineMissingError: as `list_revisions`.
    """
    store = VersionStore.from_config(config, workdir)
    if not store.refresh():
        return UnreferencedObjects([], f"the data repository {store.origin} does not exist")
    if "://" in store.remote.url:
        return UnreferencedObjects(
            [],
            f"{store.remote} is not a folder: run `dvc gc --cloud --all-commits` in a clone of the repository "
            "to delete unreferenced objects",
        )
    objects = Path(store.remote.url) / OBJECTS_FOLDER
    if not own_remote and not objects.resolve().is_relative_to(workdir.absolute().resolve()):
        return UnreferencedObjects(
            [], f"other repositories may use {store.remote}; specify --own-remote if only this repository uses it"
        )
    try:
        referenced = _list_referenced(store)
    except (TunelineError, ValueError, yaml.YAMLError) as error:
        return UnreferencedObjects([], getattr(error, "message", str(error)))
    unreferenced = []
    for folder in job_folders.list_folder(objects):
        now = liveness.get_file_server_time(folder)
        for path in job_folders.list_folder(folder):
            oid = folder.name + path.name
            if len(folder.name) == 2 and path.is_file() and oid not in referenced:
                stat = path.stat()
                unreferenced.append(RemoteObject(oid, path, stat.st_size, now - stat.st_mtime))
    return UnreferencedObjects(unreferenced)


def _list_referenced(store: VersionStore) -> frozenset[str]:
    """Return the ids of all referenced objects. Raises DataVersioningError if they cannot be determined."""
    return _list_referenced_by(store, git_repository.run_git(store.repository, "for-each-ref"))


@lru_cache(maxsize=1)
def _list_referenced_by(store: VersionStore, references: str) -> frozenset[str]:
    """Return the ids of all referenced objects; cached until branches or tags (`references`) change."""
    # `git rev-list --objects` reports only one name of each blob, which may not be the name of a DVC file. Read the
    # changes of each commit instead; the changes of a merge relative to each parent.
    log = git_repository.run_git(
        store.repository, "log", "--all", "--root", "-m", "--raw", "--no-renames", "--no-abbrev", "--format="
    )
    blobs = set()
    for line in log.splitlines():
        change, _, name = line.partition("\t")
        if change.startswith(":"):
            blob, path = change.split()[3], PurePath(name.strip('"'))
            if blob.strip("0") and (path.suffix == ".dvc" or path.name == "dvc.lock"):
                blobs.add(blob)
    oids: set[str] = set()
    for blob in blobs:
        oids |= set(_find_md5s(yaml.safe_load(git_repository.run_git(store.repository, "cat-file", "blob", blob))))
    for oid in [oid for oid in oids if oid.endswith(".dir")]:
        path = Path(store.remote.url) / OBJECTS_FOLDER / oid[:2] / oid[2:]
        try:
            oids |= {entry["md5"] for entry in json.loads(path.read_text(encoding="utf-8"))}
        except (OSError, ValueError, KeyError, TypeError):  # its files are unknown, so no object may be deleted
            raise DataVersioningError(
                f"the list of files {oid[:2]}/{oid[2:]} of a revision is missing or damaged in {store.remote}, "
                "so no object is deleted",
                hint="Publish the dataset again, which repairs the list.",
            ) from None
    return frozenset(oids)


def _find_md5s(value: object) -> Iterator[str]:
    """Yield every value of `md5` in a DVC file."""
    if isinstance(value, dict):
        if "md5" in value:
            yield str(value["md5"])
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _find_md5s(item)


def remove_object(
    item: RemoteObject, config: DataVersioningConfig, *, workdir: Path, min_unused_seconds: float
) -> bool:
    """Delete an unreferenced object and return whether it was deleted.

    Keeps the object while another job publishes, or if it was written within `min_unused_seconds`. A concurrent
    publication verifies its objects and writes missing objects again.

    Raises:
        DataVersioningError, EngineMissingError: as `list_revisions`, or a list of referenced objects is damaged.
    """
    store = VersionStore.from_config(config, workdir)
    if any(not job_folders.is_abandoned(job, "publish") for job in store.jobs_folder.glob("publish.*.*.*")):
        return False
    if not store.refresh() or item.oid in _list_referenced(store):
        return False
    try:
        if liveness.seconds_since_heartbeat(item.path) < min_unused_seconds:
            return False
        item.path.unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    return True
