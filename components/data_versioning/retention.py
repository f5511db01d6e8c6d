"""Objects of the DVC remote that no commit names: what publications left there that were killed before their revision was there.

Every commit that any branch or tag reaches is looked at, the user's own among them, and every file of DVC in it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import yaml

from components.common import jobs, liveness
from components.common.errors import ConfigurationError, TunelineError
from components.data_versioning import repository, search, sources
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.place import Place, located
from components.data_versioning.repository import DataVersioningError

OBJECTS = Path("files") / "md5"  # in a remote


@dataclass(frozen=True)
class Object:
    """An object in the remote: its id, where it lies, its bytes, and the seconds since it was written."""

    oid: str
    path: Path
    bytes: int
    unused: float


@dataclass(frozen=True)
class Held:
    """The objects of the remote that no commit names, and why they could not be told, "" where they were."""

    unnamed: list[Object]
    why_not: str = ""


def revisions(config: DataVersioningConfig, *, workdir: Path) -> list[tuple[str, str]]:
    """The tag and the dataset's digest of every revision of every dataset in the repository; none where there is no repository yet.

    Raises DataVersioningError and EngineMissingError where it cannot be read.
    """
    place = Place.of(config, workdir)
    every = search.every(place) if place.refresh() else []
    return [(version.tag, version.content_sha256) for one in every for version in one.versions()]


def address(config: DataVersioningConfig, *, workdir: Path) -> str:
    """Where the data repository of a configuration is, as people are told of it."""
    return Place.of(config, workdir).origin


def is_missing(config: DataVersioningConfig, *, workdir: Path) -> bool:
    """Whether there is no data repository in its folder; of a URL `revisions` asks. Raises ConfigurationError for what cannot be one."""
    place = Place.of(config, workdir)
    return place.is_here and not repository.exists(place.repository)


def elsewhere(uris: Collection[str], config: DataVersioningConfig, *, workdir: Path) -> list[str]:
    """The repositories that addresses of revisions (dvc://repository@commit:path) lead to and that are not this one. One that was moved, or
    is reached by another address, is known by the commit. Raises as `revisions`."""
    place = Place.of(config, workdir)
    named = [address for uri in sorted(uris) if (address := _parsed(uri)) and not _is(place, address.repo, workdir)]
    if not named:
        return []
    if not place.refresh():
        return sorted({one.repo for one in named})
    asked = "".join(f"{one.rev}^{{commit}}\n" for one in named)
    told = repository.git(place.repository, "cat-file", "--batch-check=%(objecttype)", stdin=asked).splitlines()
    return sorted({one.repo for one, kind in zip(named, told, strict=True) if kind != "commit"})


def _parsed(uri: str) -> sources.Address | None:
    try:
        return sources.parse(uri) if uri.startswith("dvc://") else None
    except ConfigurationError:
        return None


def _is(place: Place, repo: str, workdir: Path) -> bool:
    """Whether an address leads to the repository of a place."""
    origin, folder = located(repo, workdir.absolute(), place.jobs)
    return origin == place.origin or (place.is_here and origin == str(folder) and folder.resolve() == place.repository.resolve())


def held(config: DataVersioningConfig, *, workdir: Path, own_remote: bool = False) -> Held:
    """Look at the remote, where that is a folder in the work folder, or another one that serves this repository alone (`own_remote`).

    Raises as `revisions`.
    """
    place = Place.of(config, workdir)
    there_is = place.refresh()
    why_not = _not_ours(place, workdir.absolute(), own_remote=own_remote) if there_is else "there is no data repository"
    if why_not:
        return Held([], why_not)
    try:
        named = _named(place)
    except (TunelineError, ValueError, yaml.YAMLError) as error:
        return Held([], getattr(error, "message", str(error)))
    return Held([one for one in _objects(Path(place.remote.url)) if one.oid not in named])


def _not_ours(place: Place, root: Path, *, own_remote: bool) -> str:
    """Why the objects of the remote are not told; "" where they are."""
    if "://" in place.remote.url:
        return f"{place.remote} is no folder: in a clone of the repository `dvc gc --cloud --all-commits` removes what no commit names"
    if not own_remote and not (Path(place.remote.url) / OBJECTS).resolve().is_relative_to(root.resolve()):
        return f"{place.remote} may serve other repositories as well; --own-remote says that it does not"
    return ""


def _objects(remote: Path) -> Iterator[Object]:
    """What lies in the remote. An object that another job moves meanwhile is left out."""
    for folder in jobs.listed(remote / OBJECTS):
        now = liveness.now(folder)
        for path in jobs.listed(folder):
            if len(folder.name) == 2 and path.is_file():
                told = path.stat()
                yield Object(folder.name + path.name, path, told.st_size, now - told.st_mtime)


def _named(place: Place) -> frozenset[str]:
    """The ids of all objects that any commit names. Raises DataVersioningError where that cannot be told for sure."""
    return _named_by(place, repository.git(place.repository, "for-each-ref"))


@lru_cache(maxsize=1)
def _named_by(place: Place, references: str) -> frozenset[str]:
    """The same as long as the branches and tags are where they were."""
    found: set[str] = set()
    for blob in _files_of_dvc(place):
        found |= set(_digests(yaml.safe_load(repository.git(place.repository, "cat-file", "blob", blob))))
    return frozenset(found | {oid for listing in found if listing.endswith(".dir") for oid in _listed(place, listing)})


def _files_of_dvc(place: Place) -> set[str]:
    """The blobs that any commit has under a name of DVC's. `rev-list --objects` would say one name of each blob only, which may be one that
    it was given later; so what each commit adds or changes is looked at, of a merge by the side of each parent."""
    told = repository.git(place.repository, "log", "--all", "--root", "-m", "--raw", "--no-renames", "--no-abbrev", "--format=")
    changes = (line.partition("\t") for line in told.splitlines() if line.startswith(":"))
    named = ((change.split()[3], PurePath(path.strip('"'))) for change, _, path in changes)
    return {blob for blob, path in named if blob.strip("0") and (path.suffix == ".dvc" or path.name == "dvc.lock")}


def _digests(said: Any) -> Iterator[str]:
    """Whatever stands under `md5` in a file of DVC."""
    if isinstance(said, dict):
        if "md5" in said:
            yield str(said["md5"])
        for value in said.values():
            yield from _digests(value)
    elif isinstance(said, list):
        for value in said:
            yield from _digests(value)


def _listed(place: Place, oid: str) -> Iterator[str]:
    """The ids of the files of a directory. One whose list is lost cannot be told from others, so nothing is."""
    path = Path(place.remote.url) / OBJECTS / oid[:2] / oid[2:]
    try:
        yield from (entry["md5"] for entry in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        raise DataVersioningError(
            f"the list of files {oid[:2]}/{oid[2:]} of a revision is lost or damaged in {place.remote}, so no object there is removed",
            hint="Publish the dataset again: that repairs it.",
        ) from None


def remove(one: Object, config: DataVersioningConfig, *, workdir: Path, unused: float) -> bool:
    """Remove an object that no commit names, unless somebody publishes right now or it was written within so many seconds.

    Who begins to publish at this moment reads back what it relies on, and writes again what is missing. Raises as `held`.
    """
    place = Place.of(config, workdir)
    if any(not jobs.is_abandoned(job, "publish") for job in place.jobs.glob("publish.*.*.*")):
        return False
    if not place.refresh() or one.oid in _named(place):
        return False
    try:
        if liveness.silence(one.path) < unused:
            return False
        one.path.unlink()
    except FileNotFoundError:
        return False
    return True
