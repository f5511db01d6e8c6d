"""Data versioning: a curated dataset becomes a revision of a DVC data repository, and any revision comes back as the same dataset.

A revision counts as published when its tag exists, and the tag is pushed last, after the files were read back from the remote and
found whole. Jobs work in private clones, so a killed one leaves nothing but a folder that the next one sweeps up.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from components.common import artifacts
from components.common.artifacts import Artifact, Manifest
from components.common.errors import ArtifactDamagedError, OutputOccupiedError, of_the_machine
from components.common.jobs import private_folder
from components.common.progress import Reporter
from components.data_versioning import compare, publishing, repository, search, storage
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.place import Place, Version, located
from components.data_versioning.publishing import Publication
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.search import Query, Searched
from components.data_versioning.sources import obtain
from components.data_versioning.storage import Remote

__all__ = [
    "Query",
    "Version",
    "check",
    "described",
    "diff",
    "entries",
    "fetch",
    "find",
    "manifests",
    "obtain",
    "obtained",
    "publish",
    "show",
    "versions",
]


class Entry(Version):
    """A published revision with what its commit and its manifest say of it. `tags` are the user's own, beside `tag`."""

    date: str
    author: str
    message: str
    tags: list[str]
    rows: dict[str, Any]
    splits: dict[str, int]


def publish(
    dataset: Artifact, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter, message: str = "", tag: str = ""
) -> Version:
    """Publish a dataset as the next revision of its name; content that is published already keeps its revision (`created` false).

    `message` stands in the commit and its tag; `tag` names the revision as well. Either way the files have been read back from the
    remote and their digests checked; what the remote lacked or held damaged was written again. Two publishers at once both land. Raises
    EngineMissingError without git, UsageError for what can be no tag, DataVersioningError when the tag names another revision, or the
    repository or the remote cannot be written, and DiskFullError.
    """
    place, publication = Place.of(config, workdir), Publication(dataset, message.strip(), tag)
    with _machine(place), private_folder(place.jobs, "publish") as folder:
        place.prepare()
        place.refresh()
        if tag:
            repository.check_tag_name(tag)
        place.remote.check()
        found = publishing.published(publication, place, folder, reporter)
        if found is None:
            return _anew(publication, place, folder, reporter)
        if publication.message and publication.message != _said(place, found):
            reporter.note(f"{found.tag} was published before and keeps its own message")
        return publishing.land(lambda clone: publishing.join(publication, place, found, clone), place, folder, reporter)


def _anew(publication: Publication, place: Place, folder: Path, reporter: Reporter) -> Version:
    since = {v.tag for v in place.versions()}
    publishing.check_tag(publication, place, None)
    stored = folder / "stored"
    md5 = publishing.store(publication.dataset, place, stored, reporter)
    reporter.step("adding the revision to the data repository")
    return publishing.land(lambda clone: publishing.commit(publication, place, stored, md5, since, clone), place, folder, reporter)


def versions(config: DataVersioningConfig, *, workdir: Path) -> list[Version]:
    """The published revisions, oldest first; none when there is no repository yet."""
    place = Place.of(config, workdir)
    return place.versions() if place.refresh() else []


def manifests(config: DataVersioningConfig, *, workdir: Path) -> list[tuple[str, Manifest]]:
    """The published revisions' tags and what their datasets' manifests say, oldest first; none when there is no repository yet."""
    place = Place.of(config, workdir)
    return [(version.tag, place.manifest(version.rev)) for version in place.versions()] if place.refresh() else []


def entries(config: DataVersioningConfig, *, workdir: Path) -> list[Entry]:
    """The published revisions with date, author, message and counts, oldest first; none when there is no repository yet."""
    place = Place.of(config, workdir)
    return [_entry(place, version) for version in place.versions()] if place.refresh() else []


def _entry(place: Place, version: Version) -> Entry:
    author, date = repository.git(place.repository, "show", "--no-patch", "--format=%an%n%aI", version.rev).splitlines()
    summary = place.manifest(version.rev).summary
    tags = [name for name, rev in repository.names(place.repository).items() if rev == version.rev and name != version.tag]
    rows = summary.get("rows")
    counts = {"rows": rows if isinstance(rows, dict) else {}, "splits": summary.get("splits") or {}}
    return Entry(**version.model_dump(), author=author, date=date, message=_said(place, version), tags=sorted(tags), **counts)


def _said(place: Place, version: Version) -> str:
    commit = repository.git(place.repository, "show", "--no-patch", "--format=%B", version.rev)
    return publishing.message_of(commit, version.tag)


def show(rev: str, config: DataVersioningConfig, *, workdir: Path) -> dict[str, Any]:
    """A revision with what its commit and its manifest say: {…Entry, "summary", "inputs", "files"}."""
    place = Place.of(config, workdir)
    version = place.find(rev)
    told = place.manifest(version.rev).model_dump(include={"summary", "inputs", "files"})
    return {**_entry(place, version).model_dump(exclude={"created"}), **told}


def fetch(rev: str, output: Path, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter, overwrite: bool = False) -> Artifact:
    """Lay out a published revision in `output`, verified by DVC and then by its own manifest. `rev` is a tag, a commit, or the dvc:// URI
    that a model was registered with, whose repository and remote are looked at as `check` does.

    Raises DataVersioningError for an unknown revision, naming those that exist, and ArtifactDamagedError naming the objects that the
    remote lacks or holds damaged; `output` is not touched then.
    """
    place, version = _published(rev, config, workdir)
    key = str(place.manifest(version.rev).produced_by.get("key"))
    if output.exists() and not overwrite and (finished := _claim(output, key, version, overwrite=False)):
        return finished
    with obtained(version, place, reporter) as found:
        reporter.step(f"writing {output}")
        _claim(output, key, version, overwrite=overwrite)
        return _lay_out(found, output)


def _claim(output: Path, key: str, version: Version, *, overwrite: bool) -> Artifact | None:
    finished = artifacts.begin(output, key, overwrite=overwrite)
    if finished and finished.sha256 != version.content_sha256:
        raise OutputOccupiedError(f"{output} already holds another dataset ({finished.sha256[:12]})", hint="Choose another folder.")
    return finished


def check(uri: str, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter) -> tuple[Version, Manifest]:
    """The published revision that a dvc:// URI names and its dataset's manifest, once all of it was read back from the remote and agreed.

    Repository and remote are those that the URI and its commit name; where they have moved, those that `config` names. Raises
    DataVersioningError for an unknown revision, naming those that exist, and ArtifactDamagedError naming the objects that the remote
    lacks or holds damaged.
    """
    place, version = _published(uri, config, workdir)
    with obtained(version, place, reporter) as found:
        return version, found.manifest


def described(uri: str, config: DataVersioningConfig, *, workdir: Path) -> tuple[Version, Manifest]:
    """As check, of what git alone knows: nothing is fetched from the remote."""
    place, version = _published(uri, config, workdir)
    return version, place.manifest(version.rev)


def _published(rev: str, config: DataVersioningConfig, workdir: Path) -> tuple[Place, Version]:
    """The revision that a tag, a commit or a dvc:// URI names, and where it lies."""
    place = Place.of(config, workdir)
    if not rev.startswith("dvc://"):
        return place, place.find(rev)
    place, rev = _recorded(rev, place, workdir)
    known = place.versions() if place.refresh() else []
    version = next((v for v in reversed(known) if v.rev == rev), None)
    if version is None:
        there = ", ".join(f"{v.tag} ({v.rev[:12]})" for v in known) or "none"
        raise DataVersioningError(
            f"the data repository {place.origin} has no published revision {rev[:12]} of {place.name}", hint=f"There are: {there}."
        )
    return place, version


def _recorded(uri: str, otherwise: Place, workdir: Path) -> tuple[Place, str]:
    """The place and the revision that dvc://REPOSITORY@REV:datasets/NAME means."""
    match = re.fullmatch(r"dvc://(.+)@([0-9a-f]{7,64}):datasets/([^/]+)", uri)
    if not match:
        raise DataVersioningError(f"{uri} names no revision", hint="A revision is written dvc://REPOSITORY@COMMIT:datasets/NAME.")
    named, rev, name = match[1], match[2], match[3]
    here = repository.is_url(named) or Path(named).exists()
    origin, folder = located(named, workdir.absolute(), otherwise.jobs) if here else (otherwise.origin, otherwise.repository)
    place = Place(origin, folder, otherwise.remote, name, otherwise.jobs)
    remote = _remote_of(place, rev) if place.refresh() else None
    kept = remote is not None and ("://" in remote.url or Path(remote.url).exists())
    return Place(origin, folder, remote if remote and kept else otherwise.remote, name, otherwise.jobs), rev


def _remote_of(place: Place, rev: str) -> Remote | None:
    """The remote that a commit's own DVC configuration names."""
    try:
        return storage.remote_of(repository.text(place.repository, rev, ".dvc/config"))
    except DataVersioningError:
        return None  # no such commit, which is told when the revision is looked for


@contextmanager
def _machine(place: Place) -> Iterator[None]:
    """A disk that is full, or may not be written, is told with the folder: of those that a job writes to."""
    try:
        yield
    except OSError as error:
        told = of_the_machine(error, [place.jobs, place.repository])
        if told is None:
            raise
        raise told from error


@contextmanager
def obtained(version: Version, place: Place, reporter: Reporter) -> Iterator[Artifact]:
    """A revision's dataset, fetched and checked, in a private folder that goes away at the end."""
    with _machine(place), private_folder(place.jobs, "fetch") as folder:
        reporter.step(f"fetching {version.tag}")
        place.remote.check()
        project = publishing.project_of(place, version, folder)
        damaged = storage.fetch(project, place.path, place.remote)
        if damaged:
            raise publishing.damage(damaged, place, "lacks objects or holds them damaged")
        found = artifacts.read(storage.checkout(project, place.path, place.remote), "dataset")
        if found.sha256 != version.content_sha256:
            raise ArtifactDamagedError(
                f"{version.tag} holds the dataset {found.sha256}, its commit names {version.content_sha256}",
                hint="The data repository was changed by other means: take another revision.",
            )
        yield found


def _lay_out(found: Artifact, output: Path) -> Artifact:
    """Copy a checked artifact into a claimed folder: files first, flushed, its manifest last."""
    for file in found.manifest.files:
        target = output / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found.path / file.path, target)
        with target.open("rb") as written:
            os.fsync(written.fileno())
    artifacts.write_atomically(output / artifacts.MANIFEST, (found.path / artifacts.MANIFEST).read_text(encoding="utf-8"))
    (output / artifacts.UNFINISHED).unlink(missing_ok=True)
    return Artifact(output, found.manifest)


def diff(rev1: str, rev2: str, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter, examples: int = 20) -> dict[str, Any]:
    """What `rev2` added to, removed from, changed and moved in `rev1`, row by row, and the reasons for dropped rows on both sides.

    The object that `tuneline data diff --json` prints; see compare.compare.
    """
    place = Place.of(config, workdir)
    old, new = place.find(rev1), place.find(rev2)
    with ExitStack() as both:
        before, after = (both.enter_context(obtained(version, place, reporter)) for version in (old, new))
        reporter.step("comparing rows")
        return {"from": old.tag, "to": new.tag, **compare.compare(before, after, examples)}


def find(query: Query, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter) -> Searched:
    """Every published revision of every dataset in the repository that holds what is looked for, and those that could not be searched."""
    place = Place.of(config, workdir)
    return search.revisions(query, place, obtained, reporter) if place.refresh() else Searched()
