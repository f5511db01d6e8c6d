"""Data versioning: a curated dataset becomes a revision of a DVC data repository, and any revision comes back as the same dataset.

A revision counts as published when its tag exists, and the tag is pushed last, after the files were read back from the remote and
found whole. Jobs work in private clones, so a killed one leaves nothing but a folder that the next one sweeps up.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.common import artifacts
from components.common.artifacts import Artifact, Manifest
from components.common.errors import ArtifactDamagedError, OutputOccupiedError
from components.common.places import Workdir
from components.common.progress import Reporter
from components.data_versioning import repository, storage
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.jobs import private_folder
from components.data_versioning.repository import DataVersioningError

ATTEMPTS = 60
COLLISION_PAUSE = 0.5  # seconds


class Version(BaseModel):
    """A published revision of a dataset."""

    rev: str
    tag: str
    md5: str
    path: str
    repo: str
    remote: str
    uri: str
    content_sha256: str
    created: bool = False

    def source(self) -> dict[str, str]:
        """What MLflow records as the dataset's source."""
        return {"repo": self.repo, "path": self.path, "rev": self.rev, "md5": self.md5, "tag": self.tag, "remote": self.remote}


@dataclass(frozen=True)
class Place:
    """Where a dataset's versions lie, and where jobs work."""

    repository: Path
    remote: str
    name: str
    jobs: Path

    @staticmethod
    def of(config: DataVersioningConfig, workdir: Path) -> Place:
        """The place that a configuration means; its relative paths count from `workdir`, never from the current folder."""
        root = workdir.absolute()
        remote = config.remote if "://" in config.remote else str(root / (config.remote or "dvc-remote"))
        return Place(root / (config.repository or "data-repository"), remote, config.name, Workdir(root).state / "data_versioning")

    @property
    def path(self) -> str:
        """The dataset's folder in the repository."""
        return f"datasets/{self.name}"

    def version(self, tag: str, rev: str, md5: str, content_sha256: str, *, created: bool = False) -> Version:
        """The version that a tag names."""
        return Version(
            rev=rev,
            tag=tag,
            md5=md5,
            path=self.path,
            repo=str(self.repository),
            remote=self.remote,
            uri=f"dvc://{self.repository}@{rev}:{self.path}",
            content_sha256=content_sha256,
            created=created,
        )


def publish(dataset: Artifact, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter) -> Version:
    """Publish a dataset as the next revision of its name; content that is published already keeps its revision (`created` false).

    Either way the files have been read back from the remote and their digests checked; what the remote lacked or held damaged was
    written again. Two publishers at once both land. Raises EngineMissingError without git, DataVersioningError when the repository or
    the remote cannot be written.
    """
    place = Place.of(config, workdir)
    repository.create(place.repository)
    for _ in range(ATTEMPTS):
        with private_folder(place.jobs, "publish") as folder:
            version = _published(dataset, place, folder, reporter) or _new_version(dataset, place, folder, reporter)
        if version:
            return version
        reporter.note("another job published at the same moment: trying again on top of it")
        time.sleep(COLLISION_PAUSE)
    raise DataVersioningError(
        f"the data repository {place.repository} is being written by other jobs all the time",
        hint="Try again when they are done; the files are in the remote already.",
    )


def _published(dataset: Artifact, place: Place, folder: Path, reporter: Reporter) -> Version | None:
    """The latest revision with this content, once the remote was found, or made, to hold it whole."""
    found = next((v for v in reversed(_versions(place)) if v.content_sha256 == dataset.sha256), None)
    if found is None:
        return None
    reporter.step(f"checking {found.tag} in the remote")
    project = _project(place, found, folder / "published")
    damaged = storage.fetch(project, place.path, place.remote)
    if not damaged:
        return found
    reporter.note(f"{found.tag} is damaged in the remote: {', '.join(damaged.values())}")
    return found if _repaired(dataset, found, place, project, damaged, reporter) else None


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


def _new_version(dataset: Artifact, place: Place, folder: Path, reporter: Reporter) -> Version | None:
    """Commit and push the next revision; None when another job was first."""
    clone = repository.clone(place.repository, folder / "clone")
    tag = f"{place.name}-v{_next_number(place)}"
    reporter.step(f"publishing {tag}")
    storage.prepare(clone, place.remote)
    _copy(dataset, clone / place.path)
    md5 = storage.add(clone, place.path, place.remote)
    storage.push(clone, place.path, place.remote)
    _make_whole(clone, place, reporter)
    _describe(dataset, clone, place)
    rev = repository.commit(clone, f"{tag}: {dataset.sha256}")
    repository.git(clone, "tag", "--annotate", "--message", f"content_sha256 {dataset.sha256}", tag, rev)
    if not repository.push(clone, place.repository, tag):
        return None
    return place.version(tag, rev, md5, dataset.sha256, created=True)


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
        raise _damage(damaged, place, "did not keep what was written")


def _read_back(project: Path, place: Place) -> dict[str, str]:
    shutil.rmtree(project / ".dvc" / "check", ignore_errors=True)
    return storage.fetch(project, place.path, place.remote, cache="check")


def _damage(damaged: dict[str, str], place: Place, what: str) -> ArtifactDamagedError:
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


def _describe(dataset: Artifact, clone: Path, place: Place) -> None:
    """Beside the .dvc file stands the manifest, so that git alone can tell what a revision holds."""
    shutil.copyfile(dataset.path / artifacts.MANIFEST, clone / f"{place.path}.manifest.json")
    ignore = clone / "datasets" / ".gitignore"
    lines = set(ignore.read_text(encoding="utf-8").split()) if ignore.exists() else set()
    ignore.write_text("".join(f"{line}\n" for line in sorted(lines | {f"/{place.name}"})), encoding="utf-8")


def _next_number(place: Place) -> int:
    prefix = f"{place.name}-v"
    return max((int(tag.removeprefix(prefix)) for tag in repository.tags(place.repository, prefix)), default=0) + 1


def versions(config: DataVersioningConfig, *, workdir: Path) -> list[Version]:
    """The published revisions, oldest first; none when there is no repository yet."""
    place = Place.of(config, workdir)
    return _versions(place) if repository.exists(place.repository) else []


def _versions(place: Place) -> list[Version]:
    return [_version(place, tag, rev) for tag, rev in repository.tags(place.repository, f"{place.name}-v").items()]


def _version(place: Place, tag: str, rev: str) -> Version:
    md5 = storage.tracked_md5(repository.text(place.repository, rev, f"{place.path}.dvc"))
    return place.version(tag, rev, md5, _manifest(place, rev).content_sha256)


def _manifest(place: Place, rev: str) -> Manifest:
    return Manifest.model_validate(json.loads(repository.text(place.repository, rev, f"{place.path}.manifest.json")))


def _find(rev: str, config: DataVersioningConfig, workdir: Path) -> tuple[Version, Place]:
    """The published revision with this tag, commit, or first seven or more digits of a commit."""
    known = versions(config, workdir=workdir)
    found = [v for v in known if rev == v.tag or (len(rev) >= 7 and v.rev.startswith(rev.lower()))]
    if not found:
        there = ", ".join(f"{v.tag} ({v.rev[:12]})" for v in known) or "none yet"
        raise DataVersioningError(f"there is no published revision {rev} of {config.name}", hint=f"There are: {there}.")
    return found[-1], Place.of(config, workdir)


def show(rev: str, config: DataVersioningConfig, *, workdir: Path) -> dict[str, Any]:
    """A revision with what its commit and its manifest say: {…Version, "author", "date", "summary", "inputs", "files"}."""
    version, place = _find(rev, config, workdir)
    author, date = repository.git(place.repository, "show", "--no-patch", "--format=%an%n%aI", version.rev).splitlines()
    manifest = _manifest(place, version.rev)
    told = manifest.model_dump(include={"summary", "inputs", "files"})
    return {**version.model_dump(exclude={"created"}), "author": author, "date": date, **told}


def fetch(rev: str, output: Path, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter, overwrite: bool = False) -> Artifact:
    """Lay out a published revision (tag or commit) in `output`, verified by DVC and then by its own manifest.

    Raises DataVersioningError for an unknown revision, naming those that exist, and ArtifactDamagedError naming the objects that the
    remote lacks or holds damaged; `output` is not touched then.
    """
    version, place = _find(rev, config, workdir)
    key = str(_manifest(place, version.rev).produced_by.get("key"))
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
    place, rev = _recorded(uri, Place.of(config, workdir))
    known = _versions(place) if repository.exists(place.repository) else []
    version = next((v for v in reversed(known) if v.rev == rev), None)
    if version is None:
        there = ", ".join(f"{v.tag} ({v.rev[:12]})" for v in known) or "none"
        raise DataVersioningError(
            f"the data repository {place.repository} has no published revision {rev[:12]} of {place.name}", hint=f"There are: {there}."
        )
    with obtained(version, place, reporter) as found:
        return version, found.manifest


def _recorded(uri: str, otherwise: Place) -> tuple[Place, str]:
    """The place and the revision that dvc://REPOSITORY@REV:datasets/NAME means."""
    match = re.fullmatch(r"dvc://(.+)@([0-9a-f]{7,64}):datasets/([^/]+)", uri)
    if not match:
        raise DataVersioningError(f"{uri} names no revision", hint="A revision is written dvc://REPOSITORY@COMMIT:datasets/NAME.")
    named, rev, name = Path(match[1]), match[2], match[3]
    repo = named if named.exists() else otherwise.repository
    remote = _remote_of(repo, rev) if repository.exists(repo) else None
    here = remote is not None and ("://" in remote or Path(remote).exists())
    return Place(repo, remote if remote and here else otherwise.remote, name, otherwise.jobs), rev


def _remote_of(repo: Path, rev: str) -> str | None:
    """The remote that a commit's own DVC configuration names."""
    try:
        return storage.remote_of(repository.text(repo, rev, ".dvc/config"))
    except DataVersioningError:
        return None  # no such commit, which is told when the revision is looked for


@contextmanager
def obtained(version: Version, place: Place, reporter: Reporter) -> Iterator[Artifact]:
    """A revision's dataset, fetched and checked, in a private folder that goes away at the end."""
    with private_folder(place.jobs, "fetch") as folder:
        reporter.step(f"fetching {version.tag}")
        project = _project(place, version, folder)
        damaged = storage.fetch(project, place.path, place.remote)
        if damaged:
            raise _damage(damaged, place, "lacks objects or holds them damaged")
        found = artifacts.read(storage.checkout(project, place.path, place.remote), "dataset")
        if found.sha256 != version.content_sha256:
            raise ArtifactDamagedError(
                f"{version.tag} holds the dataset {found.sha256}, its commit names {version.content_sha256}",
                hint="The data repository was changed by other means: take another revision.",
            )
        yield found


def _project(place: Place, version: Version, folder: Path) -> Path:
    """A DVC project that tracks just this revision."""
    tracking = folder / f"{place.path}.dvc"
    tracking.parent.mkdir(parents=True)
    tracking.write_text(repository.text(place.repository, version.rev, f"{place.path}.dvc"), encoding="utf-8")
    storage.prepare(folder, place.remote)
    return folder


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
    """Rows by id, split by split: what `rev2` added to and removed from `rev1`.

    {"from", "to": tags, "splits": {split: {"added", "removed", "kept": counts, "examples": {"added": [id…], "removed": [id…]}}}}
    """
    (old, place), (new, _) = _find(rev1, config, workdir), _find(rev2, config, workdir)
    with obtained(old, place, reporter) as before, obtained(new, place, reporter) as after:
        splits = {name: _split_diff(before, after, name, examples) for name in _splits(before, after)}
    return {"from": old.tag, "to": new.tag, "splits": splits}


def _splits(*datasets: Artifact) -> Sequence[str]:
    names = {Path(f.path).stem for d in datasets for f in d.manifest.files if f.payload and f.path.endswith(".parquet")}
    return sorted(names - {"rejected"})


def _split_diff(before: Artifact, after: Artifact, split: str, examples: int) -> dict[str, Any]:
    old, new = _ids(before, split), _ids(after, split)
    added, removed = sorted(new - old), sorted(old - new)
    shown = {"added": added[:examples], "removed": removed[:examples]}
    return {"added": len(added), "removed": len(removed), "kept": len(old & new), "examples": shown}


def _ids(dataset: Artifact, split: str) -> set[str]:
    import pyarrow.parquet as pq

    path = dataset.path / f"{split}.parquet"
    return set(pq.read_table(path, columns=["id"]).column("id").to_pylist()) if path.exists() else set()
