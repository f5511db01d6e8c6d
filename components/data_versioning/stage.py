"""Data versioning stage: publishes datasets as revisions of a DVC data repository, and fetches revisions.

A revision is published when its tag exists. The tag is pushed last, after the files were read back from the remote and
verified. Each job works in a private clone; the next job deletes the folder of an interrupted job.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError, OutputOccupiedError, translate_system_error
from components.common.runtime.reporters import Reporter
from components.common.workspace.job_folders import private_folder
from components.data_versioning import dvc_project, git_repository, revision_diff, revision_publishing, row_search
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.dvc_sources import fetch_source
from components.data_versioning.git_repository import DataVersioningError
from components.data_versioning.revision_publishing import Publication
from components.data_versioning.row_search import Query, SearchResult
from components.data_versioning.version_store import Version, VersionStore, describe_versions, resolve_location

__all__ = [
    "Entry",
    "Query",
    "SearchResult",
    "Version",
    "check_revision",
    "describe",
    "diff",
    "fetch",
    "fetch_source",
    "fetched",
    "list_entries",
    "list_manifests",
    "list_versions",
    "publish",
    "search_rows",
    "show",
]


class Entry(Version):
    """A published revision with the contents of its commit and manifest.

    Attributes:
        date: Time of the commit in ISO 8601 format.
        author: Author of the commit.
        message: The user's message; "" if no message was given.
        tags: The user's tags.
        rows: Row counts in the manifest's summary.
        splits: Number of rows of each split.
    """

    date: str
    author: str
    message: str
    tags: list[str]
    rows: dict[str, Any]
    splits: dict[str, int]


def publish(
    dataset: Artifact,
    config: DataVersioningConfig,
    *,
    workdir: Path,
    reporter: Reporter,
    message: str = "",
    tag: str = "",
) -> Version:
    """Publish a dataset as the next revision, or return the revision with the same content (`created` is False).

    All files are read back from the remote and verified; missing or damaged files are written again. Concurrent
    calls do not conflict.

    Args:
        dataset: The dataset to publish.
        config: The data repository.
        workdir: Folder to which the relative paths in `config` are relative.
        reporter: Receives progress.
        message: The user's message, for commit and tag.
        tag: A further tag for the revision.

    Raises:
        EngineMissingError: git is not installed.
        UsageError: the tag is invalid.
        DataVersioningError: the tag points to another revision, or repository or remote cannot be written.
        ArtifactDamagedError: objects are missing or damaged immediately after the upload.
        DiskFullError: a disk is full.
    """
    store, publication = VersionStore.from_config(config, workdir), Publication(dataset, message.strip(), tag)
    with _translate_disk_errors(store), private_folder(store.jobs_folder, "publish") as folder:
        store.create_repository()
        store.refresh()
        if tag:
            git_repository.check_tag_name(tag)
        store.remote.check()
        version = revision_publishing.find_published(publication, store, folder, reporter)
        if version:
            if publication.message and publication.message != revision_publishing.read_message(store, version):
                reporter.note(f"{version.tag} already exists; its message is not changed")
            attempt = partial(revision_publishing.add_tag, publication, store, version)
        else:
            known_tags = {known.tag for known in store.list_versions()}
            revision_publishing.check_tag(publication, store, None)
            project = revision_publishing.upload(dataset, store, folder / "stored", reporter)
            reporter.step("adding the revision to the data repository")
            attempt = partial(revision_publishing.commit_revision, publication, store, project, known_tags)
        return revision_publishing.push_with_retry(attempt, store, folder, reporter)


def check_remote(config: DataVersioningConfig, *, workdir: Path, is_read: bool) -> None:
    """Check the access to the remote, without reading the objects.

    Args:
        config: The data repository.
        workdir: Folder to which the relative paths in `config` are relative.
        is_read: Whether published revisions are read; the remote's folder must then exist.

    Raises:
        DataVersioningError: the remote does not exist, or its bucket is not accessible.
        EngineMissingError: DVC's S3 plugin is not installed.
    """
    remote = VersionStore.from_config(config, workdir).remote
    remote.check()
    if is_read and "://" not in remote.url and not Path(remote.url).is_dir():
        raise DataVersioningError(
            f"the DVC remote {remote} does not exist",
            hint="Mount the remote, or set data_versioning.remote.",
        )


def list_versions(config: DataVersioningConfig, *, workdir: Path) -> list[Version]:
    """Return the published revisions, oldest first; empty if the repository does not exist yet."""
    return VersionStore.from_config(config, workdir).list_current_versions()


def list_manifests(config: DataVersioningConfig, *, workdir: Path) -> list[tuple[str, Manifest]]:
    """Return the published revisions' tags and manifests, oldest first; empty if the repository does not exist yet."""
    store = VersionStore.from_config(config, workdir)
    return [(version.tag, store.read_manifest(version.rev)) for version in store.list_current_versions()]


def list_entries(config: DataVersioningConfig, *, workdir: Path) -> list[Entry]:
    """Return the published revisions with date, author, message and counts, oldest first."""
    store = VersionStore.from_config(config, workdir)
    return [_read_entry(store, version) for version in store.list_current_versions()]


def _read_entry(store: VersionStore, version: Version) -> Entry:
    details = git_repository.run_git(store.repository, "show", "--no-patch", "--format=%an%n%aI", version.rev)
    author, date = details.splitlines()
    summary = store.read_manifest(version.rev).summary
    tags = git_repository.list_tags(store.repository).items()
    rows = summary.get("rows")
    return Entry(
        **version.model_dump(),
        author=author,
        date=date,
        message=revision_publishing.read_message(store, version),
        tags=sorted(name for name, rev in tags if rev == version.rev and name != version.tag),
        rows=rows if isinstance(rows, dict) else {},
        splits=summary.get("splits") or {},
    )


def show(rev: str, config: DataVersioningConfig, *, workdir: Path) -> dict[str, Any]:
    """Return a revision with the contents of its commit and manifest.

    Returns:
        The fields of `Entry` except "created", and the manifest's "summary", "inputs" and "files".

    Raises:
        DataVersioningError: the revision is unknown; the hint lists the published revisions.
    """
    store = VersionStore.from_config(config, workdir)
    version = store.find_version(rev)
    manifest = store.read_manifest(version.rev).model_dump(include={"summary", "inputs", "files"})
    return {**_read_entry(store, version).model_dump(exclude={"created"}), **manifest}


def fetch(
    rev: str, output: Path, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter, overwrite: bool = False
) -> Artifact:
    """Write a published revision to `output`, verified by DVC and by its own manifest.

    Args:
        rev: A tag, a commit, or the dvc:// URI in a model's manifest, which is resolved as in `check_revision`.
        output: Folder of the dataset artifact.
        config: The data repository.
        workdir: Folder to which the relative paths in `config` are relative.
        reporter: Receives progress.
        overwrite: Replace another artifact in `output`.

    Raises:
        DataVersioningError: the revision is unknown; the hint lists the published revisions.
        ArtifactDamagedError: objects are missing from the remote or damaged. `output` is unchanged.
        OutputOccupiedError: `output` contains another artifact without `overwrite`, or other files.
    """
    store, version = _resolve(rev, config, workdir)
    key = str(store.read_manifest(version.rev).produced_by.get("key"))
    if output.exists() and not overwrite and (finished := _claim(output, key, version, overwrite=False)):
        return finished
    with fetched(version, store, reporter) as dataset:
        reporter.step(f"writing {output}")
        _claim(output, key, version, overwrite=overwrite)
        for file in dataset.manifest.files:
            target = output / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(dataset.path / file.path, target)
            with target.open("rb") as written:
                os.fsync(written.fileno())
        manifest = filesystem.read_text(dataset.path / artifact_folder.MANIFEST_FILENAME)
        artifact_folder.write_atomically(
            output / artifact_folder.MANIFEST_FILENAME, manifest
        )  # last: completes the artifact
        (output / artifact_folder.UNFINISHED_MARKER).unlink(missing_ok=True)
        return Artifact(output, dataset.manifest)


def _claim(output: Path, key: str, version: Version, *, overwrite: bool) -> Artifact | None:
    finished = artifact_folder.claim_folder(output, key, overwrite=overwrite)
    if finished and finished.sha256 != version.content_sha256:
        raise OutputOccupiedError(
            f"{output} already contains the dataset {finished.sha256[:12]}; expected {version.content_sha256[:12]}",
            hint="Choose another folder.",
        )
    return finished


def check_revision(
    uri: str, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter
) -> tuple[Version, Manifest]:
    """Fetch and verify the published revision of a dvc:// URI, and return it with its dataset's manifest.

    Uses the repository and remote in the URI and its commit, or those in `config` if they moved.

    Raises:
        DataVersioningError: the revision is unknown; the hint lists the published revisions.
        ArtifactDamagedError: objects are missing from the remote or damaged.
    """
    store, version = _resolve(uri, config, workdir)
    with fetched(version, store, reporter) as dataset:
        return version, dataset.manifest


def describe(uri: str, config: DataVersioningConfig, *, workdir: Path) -> tuple[Version, Manifest]:
    """Return the same values as `check_revision`, from git, without access to the remote.

    Raises:
        DataVersioningError: the revision is unknown; the hint lists the published revisions.
    """
    store, version = _resolve(uri, config, workdir)
    return version, store.read_manifest(version.rev)


def _resolve(rev: str, config: DataVersioningConfig, workdir: Path) -> tuple[VersionStore, Version]:
    """Return the store and the revision of a tag, commit or dvc:// URI; config replaces addresses that moved."""
    store = VersionStore.from_config(config, workdir)
    if not rev.startswith("dvc://"):
        return store, store.find_version(rev)
    match = re.fullmatch(r"dvc://(.+)@([0-9a-f]{7,64}):datasets/([^/]+)", rev)
    if not match:
        raise DataVersioningError(
            f"{rev} is not the URI of a revision", hint="Use the form dvc://REPOSITORY@COMMIT:datasets/NAME."
        )
    address, commit, name = match.groups()
    store = replace(store, name=name)
    if git_repository.is_url(address) or Path(address).exists():
        origin, repository = resolve_location(address, workdir.absolute(), store.jobs_folder)
        store = replace(store, origin=origin, repository=repository)
    versions = store.list_current_versions()
    version = next((v for v in reversed(versions) if v.rev == commit), None)
    if version is None:
        raise DataVersioningError(
            f"the data repository {store.origin} has no published revision {commit[:12]} of {store.name}",
            hint=describe_versions(versions),
        )
    remote = None
    with suppress(DataVersioningError):  # a commit without DVC's configuration: the configured remote has its files
        remote = dvc_project.parse_remote(git_repository.read_file(store.repository, commit, ".dvc/config"))
    if remote and ("://" in remote.url or Path(remote.url).exists()):
        store = replace(store, remote=remote)
        version = version.model_copy(update={"remote": remote.url})
    return store, version


@contextmanager
def _translate_disk_errors(store: VersionStore) -> Iterator[None]:
    """Convert errors of a full or read-only disk to TunelineError with the affected folder."""
    try:
        yield
    except OSError as error:
        machine_error = translate_system_error(error, [store.jobs_folder, store.repository])
        if machine_error is None:
            raise
        raise machine_error from error


@contextmanager
def fetched(version: Version, store: VersionStore, reporter: Reporter) -> Iterator[Artifact]:
    """Fetch, verify and yield a revision's dataset in a private folder, which is deleted at the end of the block.

    Raises:
        ArtifactDamagedError: objects are missing or damaged, or the dataset differs from the revision's commit.
    """
    with _translate_disk_errors(store), private_folder(store.jobs_folder, "fetch") as folder:
        reporter.step(f"fetching {version.tag}")
        store.remote.check()
        project = revision_publishing.create_revision_project(store, version, folder)
        damaged = project.fetch()
        if damaged:
            raise revision_publishing.build_damage_error(damaged, store, "has missing or damaged objects")
        dataset = artifact_folder.read(project.checkout(), "dataset")
        if dataset.sha256 != version.content_sha256:
            raise ArtifactDamagedError(
                f"{version.tag} contains the dataset {dataset.sha256}; its commit records {version.content_sha256}",
                hint="Choose another revision; the data repository was changed without tuneline.",
            )
        yield dataset


def diff(
    rev1: str, rev2: str, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter, examples: int = 20
) -> dict[str, Any]:
    """Return the rows that `rev2` added, removed, changed and moved relative to `rev1`, and the reject reasons of both.

    `tuneline data diff --json` prints this object.

    Args:
        rev1: Tag or commit of the first revision.
        rev2: Tag or commit of the second revision.
        config: The data repository.
        workdir: Folder to which the relative paths in `config` are relative.
        reporter: Receives progress.
        examples: Maximum number of row ids of each kind of change.

    Returns:
        {"from": tag of `rev1`, "to": tag of `rev2`}, and the keys of `revision_diff.compare_datasets`.

    Raises:
        DataVersioningError: a revision is unknown; the hint lists the published revisions.
        ArtifactDamagedError: objects are missing from the remote or damaged.
    """
    store = VersionStore.from_config(config, workdir)
    old, new = store.find_version(rev1), store.find_version(rev2)
    with ExitStack() as datasets:
        before, after = (datasets.enter_context(fetched(version, store, reporter)) for version in (old, new))
        reporter.step("comparing rows")
        return {"from": old.tag, "to": new.tag, **revision_diff.compare_datasets(before, after, examples)}


def search_rows(query: Query, config: DataVersioningConfig, *, workdir: Path, reporter: Reporter) -> SearchResult:
    """Search all published revisions of all datasets in the repository."""
    store = VersionStore.from_config(config, workdir)
    return row_search.search_revisions(query, store, fetched, reporter) if store.refresh() else SearchResult()
