"""Where a dataset's versions lie, and what a published version is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from components.common.artifacts import Manifest
from components.common.places import Workdir
from components.data_versioning import repository, s3, storage
from components.data_versioning.config import DataVersioningConfig
from components.data_versioning.repository import DataVersioningError
from components.data_versioning.storage import Remote


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
    """Where a dataset's versions lie, and where jobs work. `origin` is what is cloned and pushed to, `repository` what is read:
    the same folder, or of a URL its mirror here."""

    origin: str
    repository: Path
    remote: Remote
    name: str
    jobs: Path

    @staticmethod
    def of(config: DataVersioningConfig, workdir: Path) -> Place:
        """The place that a configuration means; its relative paths count from `workdir`, never from the current folder."""
        root = workdir.absolute()
        repository.check_no_password(config.repository, "data_versioning.repository")
        repository.check_no_password(config.remote, "data_versioning.remote")
        url = config.remote if "://" in config.remote else str(root / (config.remote or "dvc-remote"))
        address = config.repository or "data-repository"
        jobs = Workdir(root).state / "data_versioning"
        return Place(*located(address, root, jobs), Remote(url, s3.endpoint(config.endpoint_url)), config.name, jobs)

    @property
    def path(self) -> str:
        """The dataset's folder in the repository."""
        return f"datasets/{self.name}"

    @property
    def prefix(self) -> str:
        """How the tags of its versions begin."""
        return f"{self.name}-v"

    @property
    def is_here(self) -> bool:
        """Whether the repository is a folder of this machine, or mounted on it."""
        return self.origin == str(self.repository)

    def refresh(self) -> bool:
        """Bring a URL's mirror up to date. False where there is no repository in its folder yet."""
        if self.is_here:
            return repository.exists(self.repository)
        repository.mirror(self.origin, self.repository)
        return True

    def prepare(self) -> None:
        """Make the repository where there is none in its folder."""
        if self.is_here:
            repository.create(self.repository)

    def version(self, tag: str, rev: str, md5: str, content_sha256: str, *, created: bool = False) -> Version:
        """The version that a tag names."""
        return Version(
            rev=rev,
            tag=tag,
            md5=md5,
            path=self.path,
            repo=self.origin,
            remote=self.remote.url,
            uri=f"dvc://{self.origin}@{rev}:{self.path}",
            content_sha256=content_sha256,
            created=created,
        )

    def versions(self) -> list[Version]:
        """The published versions, oldest first, as the repository here has them. A tag of that form may also be somebody's own."""
        tags = repository.tags(self.repository, self.prefix)
        return [self._version(tag, rev) for tag, rev in tags.items() if repository.holds(self.repository, rev, f"{self.path}.dvc")]

    def _version(self, tag: str, rev: str) -> Version:
        md5 = storage.tracked_md5(repository.text(self.repository, rev, f"{self.path}.dvc"))
        return self.version(tag, rev, md5, self.manifest(rev).content_sha256)

    def manifest(self, rev: str) -> Manifest:
        """The manifest of a version's dataset, as git has it."""
        return Manifest.model_validate(json.loads(repository.text(self.repository, rev, f"{self.path}.manifest.json")))

    def find(self, rev: str) -> Version:
        """The published version with this tag, commit, or first seven or more digits of a commit.

        Raises DataVersioningError naming those that exist.
        """
        there_is = self.refresh()
        known = self.versions() if there_is else []
        named = repository.names(self.repository).get(rev) if there_is else None
        found = [v for v in known if v.rev == named or (len(rev) >= 7 and v.rev.startswith(rev.lower()))]
        exact = [v for v in found if v.tag == rev]
        if not found:
            there = ", ".join(f"{v.tag} ({v.rev[:12]})" for v in known) or "none yet"
            raise DataVersioningError(f"there is no published revision {rev} of {self.name}", hint=f"There are: {there}.")
        return (exact or found)[-1]


def located(address: str, root: Path, jobs: Path) -> tuple[str, Path]:
    """Where to clone from and push to, and the folder to read: of a URL a mirror beside the jobs' folder."""
    if repository.is_url(address):
        digest = hashlib.sha256(address.encode()).hexdigest()[:16]
        return address, jobs.with_name("data_repositories") / f"{digest}.git"
    folder = root / repository.folder_of(address)
    return str(folder), folder
