"""Storage of a dataset's versions, and access to the published versions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from components.common.artifacts import artifact_folder
from components.common.artifacts.artifact_folder import Manifest
from components.common.runtime.counts import format_count
from components.common.workspace.artifact_store import Workdir
from components.data_versioning import dvc_project, git_repository, s3_remote
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.dvc_project import Project, Remote
from components.data_versioning.git_repository import DataVersioningError

MAX_NAMED_VERSIONS = 20  # listed in a hint


class Version(BaseModel):
    """A published revision of a dataset.

    Attributes:
        rev: Commit in the data repository.
        tag: Version tag, such as dataset-v1.
        md5: DVC's digest of the dataset's folder.
        path: The dataset's folder in the repository.
        repo: Folder or URL of the data repository.
        remote: Folder or URL of the DVC remote.
        uri: The revision in the form dvc://REPOSITORY@COMMIT:PATH.
        content_sha256: Digest of the dataset artifact.
        created: Whether the call that returned this object created the revision.
    """

    rev: str
    tag: str
    md5: str
    path: str
    repo: str
    remote: str
    uri: str
    content_sha256: str
    created: bool = False

    def to_mlflow_source(self) -> dict[str, str]:
        """Return the dataset source that MLflow records."""
        return {name: getattr(self, name) for name in ("repo", "path", "rev", "md5", "tag", "remote")}


@dataclass(frozen=True)
class VersionStore:
    """Repository, remote and job folders of a dataset's versions.

    Attributes:
        origin: Repository to clone from and push to.
        repository: Repository to read: `origin` itself if it is a folder, its local mirror if it is a URL.
        remote: DVC remote with the files.
        name: Name of the dataset.
        jobs_folder: Folder for the private folders of jobs.
    """

    origin: str
    repository: Path
    remote: Remote
    name: str
    jobs_folder: Path

    @staticmethod
    def from_config(config: DataVersioningConfig, workdir: Path) -> VersionStore:
        """Return the configured store; its relative paths are relative to `workdir`, never to the current folder.

        Raises:
            ConfigurationError: the address of the repository or the remote contains a password.
        """
        root = workdir.absolute()
        git_repository.check_no_password(config.repository, "data_versioning.repository")
        git_repository.check_no_password(config.remote, "data_versioning.remote")
        url = config.remote if "://" in config.remote else str(root / (config.remote or "dvc-remote"))
        jobs_folder = Workdir(root).state / "data_versioning"
        origin, repository = resolve_location(config.repository or "data-repository", root, jobs_folder)
        remote = Remote(url, s3_remote.resolve_endpoint(config.endpoint_url))
        return VersionStore(origin, repository, remote, config.name, jobs_folder)

    @property
    def dataset_path(self) -> str:
        """The dataset's folder in the repository."""
        return f"datasets/{self.name}"

    @property
    def tag_prefix(self) -> str:
        """The prefix of the version tags."""
        return f"{self.name}-v"

    @property
    def is_local(self) -> bool:
        """Whether the repository is a folder, local or mounted."""
        return self.origin == str(self.repository)

    def build_project(self, folder: Path) -> Project:
        """Return the DVC project in `folder` that tracks the dataset."""
        return Project(folder, self.dataset_path, self.remote)

    def refresh(self) -> bool:
        """Update the mirror of a URL, and return whether the repository exists.

        Raises:
            ConfigurationError: a local repository is a folder with other contents.
            DataVersioningError: the URL cannot be reached.
        """
        if self.is_local:
            return git_repository.is_repository(self.repository)
        git_repository.update_mirror(self.origin, self.repository)
        return True

    def create_repository(self) -> None:
        """Create a local repository unless it exists."""
        if self.is_local:
            git_repository.create_repository(self.repository)

    def build_version(self, tag: str, rev: str, md5: str, content_sha256: str, *, created: bool = False) -> Version:
        """Return the version with these fields; the other fields are those of the store."""
        return Version(
            rev=rev,
            tag=tag,
            md5=md5,
            path=self.dataset_path,
            repo=self.origin,
            remote=self.remote.url,
            uri=f"dvc://{self.origin}@{rev}:{self.dataset_path}",
            content_sha256=content_sha256,
            created=created,
        )

    def list_versions(self) -> list[Version]:
        """Return the published versions in `repository`, oldest first; a mirror is not updated first."""
        dvc_file = f"{self.dataset_path}.dvc"
        versions = []
        for tag, rev in git_repository.list_version_tags(self.repository, self.tag_prefix).items():
            if git_repository.has_file(self.repository, rev, dvc_file):  # a user's tag may look like a version tag
                md5 = dvc_project.parse_md5(git_repository.read_file(self.repository, rev, dvc_file))
                versions.append(self.build_version(tag, rev, md5, self.read_manifest(rev).content_sha256))
        return versions

    def list_current_versions(self) -> list[Version]:
        """Return the published versions, oldest first; empty if the repository does not exist yet."""
        return self.list_versions() if self.refresh() else []

    def read_manifest(self, rev: str) -> Manifest:
        """Return the manifest of a version's dataset, from git."""
        path = f"{self.dataset_path}.manifest.json"
        return artifact_folder.parse_manifest(git_repository.read_file(self.repository, rev, path))

    def find_version(self, rev: str) -> Version:
        """Return the published version with this tag, commit, or first seven or more digits of a commit.

        Raises:
            DataVersioningError: the version does not exist; the hint lists the latest published versions.
        """
        versions = self.list_current_versions()
        tagged = git_repository.list_tags(self.repository).get(rev) if versions else None
        matches = [v for v in versions if v.rev == tagged or (len(rev) >= 7 and v.rev.startswith(rev.lower()))]
        if not matches:
            raise DataVersioningError(f"{self.name} has no published revision {rev}", hint=describe_versions(versions))
        return next((v for v in reversed(matches) if v.tag == rev), matches[-1])


def describe_versions(versions: list[Version]) -> str:
    """Return a hint that lists the latest published versions."""
    names = ", ".join(f"{version.tag} ({version.rev[:12]})" for version in versions[-MAX_NAMED_VERSIONS:])
    names += f" and {format_count(len(versions) - MAX_NAMED_VERSIONS, 'earlier revision')}" * (
        len(versions) > MAX_NAMED_VERSIONS
    )
    return f"Choose a published revision: {names}." if names else "Publish the dataset."


def resolve_location(address: str, root: Path, jobs_folder: Path) -> tuple[str, Path]:
    """Return the address to clone and push to, and the folder to read: for a URL, a mirror next to `jobs_folder`.

    Args:
        address: Folder or URL of a repository.
        root: Folder to which a relative path is relative.
        jobs_folder: Folder for the private folders of jobs.
    """
    if git_repository.is_url(address):
        digest = hashlib.sha256(address.encode()).hexdigest()[:16]
        return address, jobs_folder.with_name("data_repositories") / f"{digest}.git"
    folder = root / git_repository.to_folder(address)
    return str(folder), folder
