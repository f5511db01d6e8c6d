"""Publication of a revision: uploads files to the remote, verifies them, and pushes a commit with tags.

The upload runs once. The push takes seconds; if another job pushed first, it is retried on the new commit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError
from components.common.runtime.reporters import Reporter
from components.data_versioning import git_repository
from components.data_versioning.dvc_project import Project
from components.data_versioning.git_repository import CollisionError, DataVersioningError
from components.data_versioning.version_store import Version, VersionStore

PUBLISH_TIMEOUT_SECONDS = 60.0  # maximum wait for other publishers or a lock
RETRY_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Publication:
    """A dataset to publish, with the user's message and tag. Both can be empty."""

    dataset: Artifact
    message: str
    tag: str

    def build_commit_message(self, tag: str) -> str:
        """Return the commit message: the version's tag, the user's message if any, and the digest."""
        digest = f"content_sha256 {self.dataset.sha256}"
        return f"{tag}: {self.message}\n\n{digest}\n" if self.message else f"{tag}: {self.dataset.sha256}\n"


def read_message(store: VersionStore, version: Version) -> str:
    """Return the user's message of a published revision, or ""."""
    commit = git_repository.run_git(store.repository, "show", "--no-patch", "--format=%B", version.rev)
    message, _, digest = commit.strip().removeprefix(f"{version.tag}: ").rpartition("\n\ncontent_sha256 ")
    return message.strip() if digest else ""


def check_tag(publication: Publication, store: VersionStore, published: Version | None) -> None:
    """Check that the user's tag, if any, does not exist or points to the revision `published`; tags are never moved.

    Raises:
        DataVersioningError: the tag points to another revision.
    """
    if not publication.tag:
        return
    rev = git_repository.list_tags(store.repository).get(publication.tag)
    if rev is None or (published and rev == published.rev):
        return
    holder = next((v.tag for v in store.list_versions() if v.rev == rev), rev[:12])
    raise DataVersioningError(
        f"the tag {publication.tag} already points to {holder}; tags are never moved",
        hint="Choose another --tag.",
    )


def find_published(publication: Publication, store: VersionStore, folder: Path, reporter: Reporter) -> Version | None:
    """Return the latest revision with this content, after verifying and repairing its objects in the remote.

    Returns:
        The revision; None if no revision has this content, or if this dataset lacks the files to repair the revision.

    Raises:
        ArtifactDamagedError: objects are still missing or damaged after the repair.
    """
    version = _find_by_content(publication, store)
    if version is None:
        return None
    reporter.step(f"checking {version.tag} in the remote")
    project = create_revision_project(store, version, folder / "published")
    damaged = project.fetch()
    if not damaged:
        return version
    reporter.note(f"{version.tag} is damaged in the remote: {', '.join(damaged.values())}")
    revision_dvc_file = project.dvc_file.read_text(encoding="utf-8")
    _track_files(publication.dataset, project)
    project.dvc_file.write_text(revision_dvc_file, encoding="utf-8")
    # Datasets with equal content can have different reports.
    if not all(project.get_object_path(oid).exists() for oid in damaged):
        reporter.note(f"{version.tag} cannot be repaired from this dataset; publishing a new revision")
        return None
    _verify_remote(project, store, reporter)
    reporter.note(f"{version.tag} was repaired in the remote")
    return version


def _find_by_content(publication: Publication, store: VersionStore) -> Version | None:
    versions = reversed(store.list_versions())
    return next((v for v in versions if v.content_sha256 == publication.dataset.sha256), None)


def upload(dataset: Artifact, store: VersionStore, folder: Path, reporter: Reporter) -> Project:
    """Upload the dataset's files to the remote, verify them, and return the project in `folder` that tracks them.

    Raises:
        ArtifactDamagedError: objects are missing or damaged immediately after the upload.
    """
    reporter.step(f"writing the files to {store.remote}")
    project = store.build_project(folder)
    project.dvc_file.parent.mkdir(parents=True, exist_ok=True)
    project.create()
    _track_files(dataset, project)
    project.push()
    _verify_remote(project, store, reporter)
    return project


def push_with_retry(
    attempt: Callable[[Path], Version], store: VersionStore, folder: Path, reporter: Reporter
) -> Version:
    """Call `attempt` until it pushes commit and tags without a conflict, each time on the latest commit.

    Args:
        attempt: Clones the data repository into the given folder, pushes, and returns the published revision.
        store: Storage of the dataset's versions.
        folder: Private folder for the clones.
        reporter: Receives progress.

    Raises:
        DataVersioningError: another job or a lock blocked the push for PUBLISH_TIMEOUT_SECONDS.
    """
    deadline = time.monotonic() + PUBLISH_TIMEOUT_SECONDS
    while True:
        store.refresh()
        try:
            return attempt(folder / "clone")
        except CollisionError as collision:
            if time.monotonic() > deadline:
                locks = ", ".join(map(str, git_repository.list_locks(store.repository))) if store.is_local else ""
                blocking = f"; lock files: {locks}" if locks else ""
                lines = [line.strip() for line in str(collision).splitlines() if "lock" in line or "rejected" in line]
                raise DataVersioningError(
                    f"the data repository {store.origin} accepted no push for {PUBLISH_TIMEOUT_SECONDS:.0f} seconds"
                    f"{blocking}: {lines[0] if lines else collision}",
                    hint="Remove lock files that no git process holds, then publish again; "
                    "the files are already in the remote.",
                ) from None
            reporter.note("another job is writing to the data repository; retrying on the latest commit")
            if store.is_local:
                git_repository.clear_stale_locks(store.repository)
        filesystem.remove_tree(folder / "clone")
        time.sleep(RETRY_PAUSE_SECONDS)


def commit_revision(
    publication: Publication, store: VersionStore, project: Project, known_tags: set[str], clone: Path
) -> Version:
    """Commit and push the next revision, or return an equal revision that another job has published meanwhile.

    Args:
        publication: The dataset to publish.
        store: Storage of the dataset's versions.
        project: Project of the uploaded files.
        known_tags: Version tags that existed before the upload.
        clone: New folder for the clone.

    Raises:
        DataVersioningError: the user's tag points to another revision, or the repository rejects the push.
        CollisionError: another job pushed first or holds a lock.
    """
    existing = _find_by_content(publication, store)
    if existing and existing.tag not in known_tags:
        return add_tag(publication, store, existing, clone)
    check_tag(publication, store, None)
    git_repository.clone(store.origin, clone)
    earlier = list(git_repository.list_version_tags(store.repository, store.tag_prefix))
    number = int(earlier[-1].removeprefix(store.tag_prefix)) + 1 if earlier else 1
    tag = f"{store.tag_prefix}{number}"
    committed = store.build_project(clone)
    committed.create()
    # The manifest next to the .dvc file describes a revision without access to the remote.
    (clone / "datasets").mkdir(exist_ok=True)
    shutil.copyfile(project.dvc_file, committed.dvc_file)
    manifest = publication.dataset.path / artifact_folder.MANIFEST_FILENAME
    shutil.copyfile(manifest, clone / f"{store.dataset_path}.manifest.json")
    gitignore = clone / "datasets" / ".gitignore"
    lines = set(gitignore.read_text(encoding="utf-8").split()) if gitignore.exists() else set()
    gitignore.write_text("".join(f"{line}\n" for line in sorted(lines | {f"/{store.name}"})), encoding="utf-8")
    rev = git_repository.commit(clone, publication.build_commit_message(tag))
    branch = git_repository.run_git(clone, "symbolic-ref", "HEAD").strip()
    _push_tags(publication, store, clone, rev, [tag, *filter(None, [publication.tag])], f"HEAD:{branch}")
    return store.build_version(tag, rev, project.read_md5(), publication.dataset.sha256, created=True)


def add_tag(publication: Publication, store: VersionStore, version: Version, clone: Path) -> Version:
    """Add the user's tag, if any, to a published revision, and return the revision.

    Raises:
        DataVersioningError: the tag points to another revision, or the repository rejects the push.
        CollisionError: another job pushed first or holds a lock.
    """
    check_tag(publication, store, version)
    if publication.tag and publication.tag not in git_repository.list_tags(store.repository):
        git_repository.clone(store.origin, clone)
        _push_tags(publication, store, clone, version.rev, [publication.tag])
    return version


def _push_tags(
    publication: Publication, store: VersionStore, clone: Path, rev: str, tags: list[str], *refs: str
) -> None:
    message = f"{publication.message}\n\n" if publication.message else ""
    for tag in tags:
        git_repository.create_tag(clone, tag, rev, f"{message}content_sha256 {publication.dataset.sha256}\n")
    git_repository.push(clone, store.origin, *refs, *(f"refs/tags/{tag}" for tag in tags))


def _verify_remote(project: Project, store: VersionStore, reporter: Reporter) -> None:
    """Read the pushed files back and replace damaged objects, which a push would skip."""
    reporter.step("verifying the files in the remote")
    for attempt in range(3):  # a second replacement, because damaged files are unknown until their list is replaced
        shutil.rmtree(project.folder / ".dvc" / "check", ignore_errors=True)
        damaged = project.fetch(cache="check")
        if not damaged:
            return
        if attempt < 2:
            reporter.note(f"replacing damaged objects in the remote: {', '.join(damaged.values())}")
            project.rewrite_objects(damaged)
    raise build_damage_error(damaged, store, "has missing or damaged objects immediately after the upload")


def build_damage_error(damaged: dict[str, str], store: VersionStore, failure: str) -> ArtifactDamagedError:
    """Return the error that lists damaged objects with their files.

    Args:
        damaged: Missing or damaged objects as {object id: file}.
        store: Storage of the dataset's versions.
        failure: Predicate of the message, such as "has missing or damaged objects".
    """
    objects = "; ".join(f"{file}, object {oid[:2]}/{oid[2:]}" for oid, file in damaged.items())
    return ArtifactDamagedError(
        f"the DVC remote {store.remote} {failure}: {objects}",
        hint="Publish the dataset again; publishing rewrites damaged objects.",
    )


def _track_files(dataset: Artifact, project: Project) -> None:
    """Copy only an artifact's files and manifest to the tracked folder, and add the folder to DVC."""
    for name in [*(file.path for file in dataset.manifest.files), artifact_folder.MANIFEST_FILENAME]:
        target = project.folder / project.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(dataset.path / name, target)
    project.track()


def create_revision_project(store: VersionStore, version: Version, folder: Path) -> Project:
    """Create a DVC project that tracks this revision only."""
    project = store.build_project(folder)
    project.dvc_file.parent.mkdir(parents=True, exist_ok=True)
    text = git_repository.read_file(store.repository, version.rev, f"{store.dataset_path}.dvc")
    project.dvc_file.write_text(text, encoding="utf-8")
    project.create()
    return project
