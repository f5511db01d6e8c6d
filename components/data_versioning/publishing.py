"""Publishing: the files go to the remote and are read back, then a commit and its tags say that they are a revision.

The first part is done once, however large the dataset is; the second takes moments, and is done again on top of whatever another job
published meanwhile.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.common import artifacts
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError
from components.common.progress import Reporter
from components.data_versioning import repository, storage
from components.data_versioning.place import Place, Version
from components.data_versioning.repository import Collision, DataVersioningError

PATIENCE = 60.0  # seconds that other publishers, or a lock, may take
PAUSE = 0.5  # seconds


@dataclass(frozen=True)
class Publication:
    """What is published: a dataset, what the user says of it, and a tag of the user's own ("": none)."""

    dataset: Artifact
    message: str
    tag: str

    def describe(self, tag: str) -> str:
        """The commit's message; without the user's words it is the digest alone."""
        digest = f"content_sha256 {self.dataset.sha256}"
        return f"{tag}: {self.message}\n\n{digest}\n" if self.message else f"{tag}: {self.dataset.sha256}\n"


def message_of(commit: str, tag: str) -> str:
    """The user's words in a commit's message, "" where there are none."""
    words = commit.strip().removeprefix(f"{tag}: ")
    said, _, digest = words.rpartition("\n\ncontent_sha256 ")
    return said.strip() if digest and said else ""


def check_tag(publication: Publication, place: Place, published: Version | None) -> None:
    """Raise where the user's tag names another revision: tags are never moved."""
    if not publication.tag:
        return
    repository.check_tag_name(publication.tag)
    rev = repository.names(place.repository).get(publication.tag)
    if rev is None or (published and rev == published.rev):
        return
    holder = next((v.tag for v in place.versions() if v.rev == rev), rev[:12])
    raise DataVersioningError(
        f"the tag {publication.tag} names {holder} already, and tags are never moved",
        hint="Choose another --tag, or publish without one.",
    )


def published(publication: Publication, place: Place, folder: Path, reporter: Reporter) -> Version | None:
    """The latest revision with this content, once the remote was found, or made, to hold it whole."""
    found = _with_content(publication, place)
    if found is None:
        return None
    reporter.step(f"checking {found.tag} in the remote")
    project = project_of(place, found, folder / "published")
    damaged = storage.fetch(project, place.path, place.remote)
    if not damaged:
        return found
    reporter.note(f"{found.tag} is damaged in the remote: {', '.join(damaged.values())}")
    return found if _repaired(publication.dataset, found, place, project, damaged, reporter) else None


def _with_content(publication: Publication, place: Place) -> Version | None:
    return next((v for v in reversed(place.versions()) if v.content_sha256 == publication.dataset.sha256), None)


def _repaired(dataset: Artifact, version: Version, place: Place, project: Path, damaged: dict[str, str], reporter: Reporter) -> bool:
    """Write a revision's damaged objects again from a dataset with the same content; False when its reports differ too much for that."""
    tracking = project / f"{place.path}.dvc"
    before = tracking.read_text(encoding="utf-8")
    _copy(dataset, project / place.path)
    storage.add(project, place.path, place.remote)
    tracking.write_text(before, encoding="utf-8")
    if not all(storage.cached(project, oid) for oid in damaged):
        reporter.note(f"{version.tag} cannot be repaired from this dataset, so it is published anew")
        return False
    _make_whole(project, place, reporter)
    reporter.note(f"{version.tag} was repaired in the remote")
    return True


def store(dataset: Artifact, place: Place, folder: Path, reporter: Reporter) -> str:
    """Bring the dataset's files to the remote and read them back; `folder` becomes a project that tracks them. Returns their md5."""
    reporter.step(f"writing the files to {place.remote}")
    (folder / place.path).parent.mkdir(parents=True)
    storage.prepare(folder, place.remote)
    _copy(dataset, folder / place.path)
    md5 = storage.add(folder, place.path, place.remote)
    storage.push(folder, place.path, place.remote)
    _make_whole(folder, place, reporter)
    return md5


def land(attempt: Callable[[Path], Version], place: Place, folder: Path, reporter: Reporter) -> Version:
    """Try until the commit and its tags are in the repository, on top of what others publish at the same time.

    Raises DataVersioningError when another job, or a lock that nobody lifts, does not let it through.
    """
    end = time.monotonic() + PATIENCE
    while True:
        place.refresh()
        try:
            return attempt(folder / "clone")
        except Collision as collision:
            if time.monotonic() > end:
                raise _locked(place, str(collision)) from None
            reporter.note("another job is writing to the data repository: trying again on top of it")
            _unlock(place)
        shutil.rmtree(folder / "clone")
        time.sleep(PAUSE)


def _unlock(place: Place) -> None:
    if place.is_here:
        repository.clear_stale_locks(place.repository)


def _locked(place: Place, said: str) -> DataVersioningError:
    locks = [str(lock) for lock in repository.locks(place.repository)] if place.is_here else []
    held = f"; {', '.join(locks)} is in the way" if locks else ""
    why = next((line.strip() for line in said.splitlines() if "lock" in line or "rejected" in line), said)
    return DataVersioningError(
        f"the data repository {place.origin} let nothing through for {PATIENCE:.0f} seconds{held}: {why}",
        hint="Look which job is writing there; a lock file that no git process holds may be removed. "
        "Then publish again: the files are in the remote already.",
    )


def commit(publication: Publication, place: Place, stored: Path, md5: str, since: set[str], clone: Path) -> Version:
    """The next revision, in a fresh clone of the repository, pushed; or the one with the same content that another job made meanwhile.

    Raises Collision when another job was first.
    """
    same = _with_content(publication, place)
    if same and same.tag not in since:
        return join(publication, place, same, clone)
    check_tag(publication, place, None)
    repository.clone(place.origin, clone)
    tag = f"{place.prefix}{_next_number(place)}"
    storage.prepare(clone, place.remote)
    _describe(publication.dataset, clone, place, stored)
    rev = repository.commit(clone, publication.describe(tag))
    tags = [tag, *([publication.tag] if publication.tag else [])]
    _push(publication, place, clone, rev, tags, f"HEAD:{repository.head(clone)}")
    return place.version(tag, rev, md5, publication.dataset.sha256, created=True)


def join(publication: Publication, place: Place, version: Version, clone: Path) -> Version:
    """A revision that is there already, with the user's tag as well."""
    check_tag(publication, place, version)
    if publication.tag and publication.tag not in repository.names(place.repository):
        repository.clone(place.origin, clone)
        _push(publication, place, clone, version.rev, [publication.tag])
    return version


def _push(publication: Publication, place: Place, clone: Path, rev: str, tags: list[str], *refs: str) -> None:
    words = f"{publication.message}\n\n" if publication.message else ""
    for tag in tags:
        repository.tag(clone, tag, rev, f"{words}content_sha256 {publication.dataset.sha256}\n")
    repository.push(clone, place.origin, *refs, *(f"refs/tags/{tag}" for tag in tags))


def _next_number(place: Place) -> int:
    return max((int(tag.removeprefix(place.prefix)) for tag in repository.tags(place.repository, place.prefix)), default=0) + 1


def _make_whole(project: Path, place: Place, reporter: Reporter) -> None:
    """Read back what was pushed. DVC does not push an object that the remote already has, so an old damaged one is replaced here.

    Twice at most: a damaged list of files hides which of the files are damaged.
    """
    reporter.step("reading it back from the remote")
    for _ in range(2):
        damaged = _read_back(project, place)
        if not damaged:
            return
        reporter.note(f"damaged in the remote, and written again: {', '.join(damaged.values())}")
        storage.rewrite(project, list(damaged), place.remote)
    if damaged := _read_back(project, place):
        raise damage(damaged, place, "did not keep what was written")


def _read_back(project: Path, place: Place) -> dict[str, str]:
    shutil.rmtree(project / ".dvc" / "check", ignore_errors=True)
    return storage.fetch(project, place.path, place.remote, cache="check")


def damage(damaged: dict[str, str], place: Place, what: str) -> ArtifactDamagedError:
    """The error that names every damaged object and the file it is of."""
    objects = "; ".join(f"{file}, object {oid[:2]}/{oid[2:]}" for oid, file in damaged.items())
    return ArtifactDamagedError(
        f"the DVC remote {place.remote} {what}: {objects}",
        hint="Restore these objects from a snapshot of the remote, or publish the same dataset again: that writes them anew.",
    )


def _copy(dataset: Artifact, folder: Path) -> None:
    """Copy an artifact's files and manifest, nothing else, to a new folder."""
    for name in [*(file.path for file in dataset.manifest.files), artifacts.MANIFEST]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(dataset.path / name, target)


def _describe(dataset: Artifact, clone: Path, place: Place, stored: Path) -> None:
    """What DVC tracks, and beside it the manifest, so that git alone can tell what a revision holds."""
    (clone / "datasets").mkdir(exist_ok=True)
    shutil.copyfile(stored / f"{place.path}.dvc", clone / f"{place.path}.dvc")
    shutil.copyfile(dataset.path / artifacts.MANIFEST, clone / f"{place.path}.manifest.json")
    ignore = clone / "datasets" / ".gitignore"
    lines = set(ignore.read_text(encoding="utf-8").split()) if ignore.exists() else set()
    ignore.write_text("".join(f"{line}\n" for line in sorted(lines | {f"/{place.name}"})), encoding="utf-8")


def project_of(place: Place, version: Version, folder: Path) -> Path:
    """A DVC project that tracks just this revision."""
    tracking = folder / f"{place.path}.dvc"
    tracking.parent.mkdir(parents=True)
    tracking.write_text(repository.text(place.repository, version.rev, f"{place.path}.dvc"), encoding="utf-8")
    storage.prepare(folder, place.remote)
    return folder
