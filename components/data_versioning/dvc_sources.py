"""Sources in other DVC repositories: dvc://REPOSITORY@REVISION:PATH, fetched with every digest verified."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.common.artifacts import artifact_folder, hashing
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError, ConfigurationError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders, liveness
from components.data_versioning import dvc_project, git_repository, s3_remote
from components.data_versioning.git_repository import DataVersioningError

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo

URI_HINT = "Write dvc://REPOSITORY@REVISION:PATH, for example dvc:///srv/git/corpus.git@v3:raw/letters.jsonl."
RETENTION_SECONDS = 7 * 24 * 3600.0  # for an unused copy
MAX_LISTED_NAMES = 10  # names listed in a message
UPSTREAM_CACHE = "origin-cache"  # remote name for the cache of a repository without a remote


@dataclass(frozen=True)
class DvcUri:
    """Parts of a dvc:// URI: a git repository (path or URL), a revision, and a path in the repository."""

    repo: str
    rev: str
    path: str


def parse_uri(uri: str) -> DvcUri:
    """Parse a dvc:// URI.

    Raises:
        ConfigurationError: the URI is invalid, or contains a password.
    """
    match = re.fullmatch(r"dvc://(.+)@([^@:]+):([^:]+)", uri)
    if not match:
        raise ConfigurationError(
            f"{uri!r} is not a DVC source; expected the form dvc://REPOSITORY@REVISION:PATH", hint=URI_HINT
        )
    repo, rev, path = match[1], match[2], match[3].strip("/")
    git_repository.check_no_password(repo, "a dvc:// source")
    if rev.startswith("-") or not path or ".." in Path(path).parts:
        raise ConfigurationError(
            f"{uri!r} is not a DVC source; expected a revision without a leading hyphen and a path in the repository",
            hint=URI_HINT,
        )
    return DvcUri(repo, rev, path)


def fetch_source(uri: str, folder: Path, reporter: Reporter) -> Path:
    """Fetch the file or folder of a dvc:// URI, and return the path of the copy below `folder`; the name is unchanged.

    Each content has its own folder, which concurrent jobs can fill. A job's copy does not change if the revision moves
    to another commit. Reuses an intact copy of the same commit, and deletes copies that are unused for a week.

    Raises:
        ConfigurationError: the URI or its path is invalid.
        DataVersioningError: the repository or the remote is not accessible.
        ArtifactDamagedError: files are missing from the remote or damaged; the message lists them.
    """
    source = parse_uri(uri)
    reporter.step(f"fetching {source.path} at {source.rev}")
    with job_folders.private_folder(folder.absolute(), ".obtain") as work:
        clone = work / "clone"
        commit = _clone(source, clone)
        copies = _SourceCopies(folder.absolute() / hashing.digest(uri)[:16], Path(source.path).name, work)
        copy = copies.find(commit) or copies.add(_fetch_path(source, clone), commit)
        copies.delete_unused(copy)
    return copy


@dataclass(frozen=True)
class _SourceCopies:
    """Copies of a source, with one folder per content. A note for each commit contains the digest of its content."""

    folder: Path
    name: str
    work: Path  # this job's private folder, on the same file system

    def find(self, commit: str) -> Path | None:
        """Return the intact copy of a commit, or None."""
        with suppress(FileNotFoundError):
            return self._find_intact(filesystem.read_text(self._get_note(commit)).strip())
        return None

    def _find_intact(self, sha256: str) -> Path | None:
        """Return the intact copy with this digest; reset its age, so that no other job deletes it."""
        path = self.folder / sha256[:16] / self.name
        with suppress(OSError):
            os.utime(path.parent)
            if _hash_contents(path) == sha256:
                return path
        return None

    def add(self, fetched: Path, commit: str) -> Path:
        """Rename fetched files to their folder and write the note; return another job's intact copy if it exists."""
        new, sha256 = self.work / "made", _hash_contents(fetched)
        new.mkdir(exist_ok=True)  # over NFS, a mkdir whose answer was lost is repeated
        filesystem.rename(fetched, new / self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / sha256[:16]
        existing = job_folders.move_into_place(new, target, lambda: self._find_intact(sha256), self.work / "aside")
        artifact_folder.write_atomically(self._get_note(commit), sha256 + "\n")
        return existing or target / self.name

    def _get_note(self, commit: str) -> Path:
        return self.folder / f"{commit[:16]}.commit"

    def delete_unused(self, copy: Path) -> None:
        """Delete other copies that are unused for RETENTION_SECONDS, and notes without a copy."""
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another job deleted it first
                if path.suffix == ".commit":
                    if not (self.folder / filesystem.read_text(path)[:16]).exists():
                        path.unlink()
                elif (
                    path.is_dir() and path != copy.parent and liveness.seconds_since_heartbeat(path) > RETENTION_SECONDS
                ):
                    job_folders.move_aside(path, self.work / "forgotten")


def _fetch_path(source: DvcUri, clone: Path) -> Path:
    """Return the source's path in the clone, after fetching it with DVC unless git tracks it."""
    path, root = clone / source.path, clone.resolve()
    if (clone / ".dvc").is_dir() or not path.exists():
        _fetch_from_dvc(source, clone)
    # A link would break when it is moved, so its target replaces it.
    for link in [path, *(path.rglob("*") if path.is_dir() else [])]:
        target = Path(os.path.realpath(link))  # resolve() raises for a link to itself
        if not link.is_symlink() and target == root / link.relative_to(clone):
            continue
        is_inside = target.is_relative_to(root) and ".git" not in target.relative_to(root).parts
        if not is_inside or not target.is_file():
            raise ConfigurationError(
                f"{link.relative_to(clone)} in the repository is a link, or in a linked folder, "
                "and its target is not a file of the repository",
                hint="Replace the path in the source with the path of the target files.",
            )
        content = shutil.copyfile(target, clone / ".git" / "linked")
        filesystem.rename(content, link)
    return path


def _hash_contents(path: Path) -> str:
    """Return the digest of a file, or of all files of a folder."""
    if path.is_file():
        return hashing.sha256_file(path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return hashing.digest([[str(file.relative_to(path)), hashing.sha256_file(file)] for file in files])


def _clone(source: DvcUri, folder: Path) -> str:
    """Clone the repository, check out the revision and return its commit."""
    origin = source.repo
    if not git_repository.is_url(origin):
        origin = str(git_repository.to_folder(origin).absolute())
        if not Path(origin).exists():
            raise ConfigurationError(f"the repository {source.repo} of a dvc:// source does not exist", hint=URI_HINT)
    git_repository.clone(origin, folder)
    for rev in (source.rev, f"origin/{source.rev}"):  # only the default branch has a local branch in the clone
        with suppress(DataVersioningError):
            commit = git_repository.run_git(folder, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}").strip()
            break
    else:
        tags, branches = (
            ", ".join(names[:MAX_LISTED_NAMES])
            + f" and {len(names) - MAX_LISTED_NAMES} more" * (len(names) > MAX_LISTED_NAMES)
            or "not available"
            for names in git_repository.list_newest_refs(folder)
        )
        raise DataVersioningError(
            f"{source.repo} has no revision {source.rev}",
            hint=f"Choose a tag ({tags}), a branch ({branches}) or a commit.",
        )
    git_repository.run_git(folder, "checkout", "--quiet", "--detach", commit)
    return commit


def _fetch_from_dvc(source: DvcUri, clone: Path) -> None:
    """Fetch the files that DVC tracks at the path, and verify every digest."""
    from dvc.exceptions import CheckoutError, DownloadError, DvcException
    from dvc.repo import Repo
    from dvc_objects.errors import ObjectFormatError

    with (
        dvc_project.isolated_settings(clone / ".dvc" / "site"),
        s3_remote.limited_retries(),
        dvc_project.captured_errors() as logged,
    ):
        try:
            with Repo(str(clone), config=_build_settings(source, clone)) as repo:
                path = str(Path(repo.root_dir) / source.path)
                outputs = _find_outputs(repo, source, path)
                if not outputs:
                    return  # git tracks all files
                # The check of a bucket returns clearer errors than DVC.
                remote = repo.config["remote"].get(repo.config["core"].get("remote", ""), {})
                endpoint = s3_remote.resolve_endpoint(str(remote.get("endpointurl", "")))
                dvc_project.Remote(str(remote.get("url", "")), endpoint).check()
                targets = [path if _is_below(path, output.fs_path) else output.fs_path for output in outputs]
                try:
                    repo.pull(targets)
                except (CheckoutError, DownloadError, ObjectFormatError) as error:
                    damage = "; ".join(dict.fromkeys([str(error).splitlines()[0], *logged]))
                else:  # DVC uses a directory's list of files without verifying the list
                    damaged = [name for output in outputs for name in _find_damaged(output, path)]
                    damage = ", ".join(str(Path(name).relative_to(repo.root_dir)) for name in damaged)
                if damage:
                    raise ArtifactDamagedError(
                        f"objects of {source.path} at {source.rev} are missing from the DVC remote of {source.repo} "
                        f"or damaged: {damage}",
                        hint="Restore the objects in the remote, for instance from a snapshot.",
                    )
                if not Path(path).exists():
                    message = f"{source.path} is not in {source.repo} at {source.rev}"
                    raise DataVersioningError(message, hint="Check the path.")
                for dvc_file in {output.stage.path for output in outputs}:
                    if dvc_file.endswith(".dvc") and _is_below(dvc_file, path):
                        Path(dvc_file).unlink(missing_ok=True)  # DVC's own files are not part of the source
        except (DvcException, OSError) as error:
            raise dvc_project.translate_error(dvc_project.Remote(source.repo), error, logged) from error


def _build_settings(source: DvcUri, clone: Path) -> dict[str, Any]:
    """Return the repository's DVC settings with verification by every remote and a private cache."""
    from dvc.config import Config

    if not (clone / ".dvc").is_dir():
        raise DataVersioningError(
            f"{source.repo} is not a DVC repository, and git does not track {source.path} in it", hint=URI_HINT
        )
    settings = Config(str(clone / ".dvc"), validate=False)
    remotes = {name: dict(remote) for name, remote in settings["remote"].items()}
    default = settings["core"].get("remote")
    origin = git_repository.to_folder(source.repo).absolute() / ".dvc"
    if not git_repository.is_url(source.repo) and origin.is_dir():
        original = Config(str(origin), validate=False)  # its relative paths are relative to the original folder
        remotes.update({name: dict(remote) for name, remote in original["remote"].items()})
        default = default or original["core"].get("remote")
        if not default:
            default = UPSTREAM_CACHE
            remotes[UPSTREAM_CACHE] = {"url": original["cache"].get("dir") or str(origin / "cache")}
    for remote in remotes.values():
        remote["verify"] = True
        if str(remote["url"]).startswith("s3://"):
            remote.update(s3_remote.TIMEOUTS)
    return {
        "core": {**dvc_project.CORE_SETTINGS, **({"remote": default} if default else {})},
        "remote": remotes,
        "cache": {"type": ["hardlink", "copy"], "dir": str(clone / ".dvc" / "private-cache")},
    }


def _find_outputs(repo: Repo, source: DvcUri, path: str) -> list[Output]:
    """Return DVC's outputs at, below or above the path; empty if git tracks all files. Raises DataVersioningError."""
    from dvc.exceptions import DvcException

    try:
        outputs = [output for output in repo.index.outs if output.use_cache]  # git tracks the others, such as metrics
    except DvcException as error:
        if Path(path).is_file():
            return []  # git tracks this file, so DVC is not needed
        raise DataVersioningError(
            f"DVC cannot read {source.repo} at {source.rev}: {str(error).splitlines()[0]}",
            hint="Fix the DVC files in that repository.",
        ) from error
    related = [output for output in outputs if _is_below(output.fs_path, path) or _is_below(path, output.fs_path)]
    existing = [output for output in related if output.hash_info]  # the others belong to stages that never ran
    if existing or os.path.lexists(path):
        return existing
    if related:
        raise DataVersioningError(
            f"DVC tracks {source.path} in {source.repo}, but {source.rev} records no content for the path",
            hint="Choose a revision with the path in dvc.lock, which `dvc repro` writes.",
        )
    tracked = sorted(str(Path(output.fs_path).relative_to(repo.root_dir)) for output in outputs)
    names = ", ".join(tracked[:MAX_LISTED_NAMES]) + f" and {len(tracked) - MAX_LISTED_NAMES} more" * (
        len(tracked) > MAX_LISTED_NAMES
    )
    raise DataVersioningError(
        f"{source.path} is not in {source.repo} at {source.rev}",
        hint=f"Choose one of the paths that DVC tracks: {names}." if tracked else "Check the path.",
    )


def _is_below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _find_damaged(output: Output, path: str) -> list[str]:
    """Return the files of an output, at or below `path`, whose digests differ from the recorded digests."""
    expected = output.hash_info
    if not expected or not expected.isdir:
        is_intact = expected and _hash_file(output.fs_path, expected.name) == expected.value
        return [] if is_intact else [output.fs_path]
    tree = output.get_obj()
    if tree is None:
        return [output.fs_path]
    listed = tree.hash_info.value
    tree.digest()
    if tree.hash_info.value != listed or listed != expected.value:
        return [output.fs_path]
    files = [(str(Path(output.fs_path, *key)), info) for key, _, info in tree]
    return [file for file, info in files if _is_below(file, path) and _hash_file(file, info.name) != info.value]


def _hash_file(path: str, name: str) -> str | None:
    """Return a file's digest by DVC's hash function `name`; None if it is missing."""
    from dvc.fs import localfs
    from dvc_data.hashfile.hash import hash_file

    return str(hash_file(path, localfs, name)[1].value) if Path(path).exists() else None
