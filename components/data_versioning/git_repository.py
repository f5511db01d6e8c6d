"""The data repository: a bare git repository that jobs clone, commit to and push to.

The repository is a folder, or a URL with a local mirror that is updated before every read. A job commits in its own
clone and pushes commit and tag in one atomic transaction.
"""

# If another job pushed first, git rejects the push and the job retries on the new commit. An interrupted job therefore
# leaves the repository unchanged.

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from components.common.runtime import filesystem, url_credentials
from components.common.runtime.errors import (
    ConfigurationError,
    DiskFullError,
    EngineMissingError,
    TunelineError,
    UsageError,
)
from components.common.workspace.job_folders import private_folder

GITCONFIG_PATH = Path(__file__).with_name("gitconfig")
STALE_LOCK_SECONDS = 10.0  # git holds the lock of a reference for milliseconds
NETWORK_TIMEOUT_SECONDS = 120.0  # a data repository is small: its files are in the DVC remote
# Variables that configure access to a server. The credential helper in GITCONFIG_PATH supplies name and password.
PASSED_VARIABLES = (
    "GIT_ASKPASS",
    "GIT_PASSWORD",
    "GIT_SSH",
    "GIT_SSH_COMMAND",
    "GIT_SSL_CAINFO",
    "GIT_SSL_CAPATH",
    "GIT_USERNAME",
)
CREDENTIAL_SOURCES = "GIT_USERNAME and GIT_PASSWORD, ~/.netrc or GIT_ASKPASS"
MAX_MIRROR_ATTEMPTS = 75  # with pauses of 0.2 seconds
DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")
VERSION_TAG = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)-v[0-9]+")  # the group is the name of the dataset
COLLISION_MESSAGES = ("[rejected]", "[remote rejected]", "cannot lock ref", "failed to update ref", "Unable to create")


class DataVersioningError(TunelineError):
    """Failure of the data repository or its remote: unknown revision, damaged object, no write access."""

    kind = "data_versioning"


class CollisionError(Exception):
    """Conflict with another job that pushed first or holds a lock. The message is git's; the caller retries."""


def is_url(address: str) -> bool:
    """Return whether the address is remote: a URL or ssh's host:path. A file:// URL is a local folder."""
    if "://" in address:
        return not address.startswith("file://")
    return ":" in address.partition("/")[0]


def to_folder(address: str) -> Path:
    """Return the folder of a path or a file:// URL."""
    return Path(unquote(urlsplit(address).path)) if address.startswith("file://") else Path(address)


def check_no_password(address: str, key: str) -> None:
    """Check that an address contains no password, because addresses are recorded with every version.

    Args:
        address: Path or URL.
        key: Name of the setting, for the message.

    Raises:
        ConfigurationError: the address contains a password.
    """
    if url_credentials.contains_password(address):
        host = urlsplit(url_credentials.split_credentials(address)[0]).hostname or "a server"
        raise ConfigurationError(
            f"{key}: the address of {host} contains a password; addresses are recorded with every version",
            hint="Remove the password from the address; "
            f"git reads credentials from {CREDENTIAL_SOURCES}, S3 clients from AWS_… variables.",
        )


def run_git(folder: Path, *arguments: str, stdin: str = "") -> str:
    """Run a git command without the user's configuration and return its output.

    Raises:
        DataVersioningError: git failed; the message is git's.
        DiskFullError: the disk is full.
        EngineMissingError: git is not installed.
    """
    result = _run(folder, arguments, stdin)
    if result.returncode:
        hint = "Check that the folder is a git repository with read and write access."
        raise _build_error(f"git {arguments[0]} failed in {folder}", result, hint)
    return result.stdout


def _build_error(failure: str, result: subprocess.CompletedProcess[str], hint: str) -> TunelineError:
    message = result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
    if any(text in message for text in DISK_FULL_MESSAGES):
        return DiskFullError(f"{failure}: no space is left: {message}", hint="Free space on the disk.")
    return DataVersioningError(f"{failure}: {message}", hint=hint)


def _run(folder: Path, arguments: tuple[str, ...], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run git with the configuration in GITCONFIG_PATH only; the current user is the author."""
    program = shutil.which("git")
    if program is None:
        raise EngineMissingError(
            "data versioning requires git, which is not installed",
            hint="Install git, for instance: apt install git",
        )
    try:
        author = getpass.getuser()
    except (KeyError, OSError):
        author = f"uid{os.getuid()}"  # a container user without a name
    environment = {
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=15",
        **{
            name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in PASSED_VARIABLES
        },
        "GIT_CONFIG_GLOBAL": str(GITCONFIG_PATH),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": author,
        "GIT_AUTHOR_EMAIL": f"{author}@localhost",
        "GIT_COMMITTER_NAME": "tuneline",
        "GIT_COMMITTER_EMAIL": "tuneline@localhost",
        "LC_ALL": "C",
    }
    command = [program, "-C", str(folder), *arguments]
    uses_network = arguments[0] in ("clone", "fetch", "push")
    try:
        return subprocess.run(
            command,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            timeout=NETWORK_TIMEOUT_SECONDS if uses_network else None,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {NETWORK_TIMEOUT_SECONDS:.0f} seconds")


def is_repository(repository: Path) -> bool:
    """Return whether the folder is a bare git repository; False if the folder is empty or does not exist.

    Raises:
        ConfigurationError: the folder is a working copy or has other contents.
    """
    if (repository / ".git").exists():
        raise ConfigurationError(
            f"data_versioning.repository: {repository} is a working copy; expected a bare repository, "
            "which jobs can push to",
            hint=f"Create a bare clone: git clone --bare {repository} {repository}.git",
        )
    if (repository / "HEAD").exists():
        return True
    if repository.is_file() or (repository.is_dir() and any(repository.iterdir())):
        raise ConfigurationError(
            f"data_versioning.repository: {repository} is neither empty nor a git repository",
            hint="Choose a new or an empty folder.",
        )
    return False


def create_repository(repository: Path) -> None:
    """Create the repository unless it exists. A rename publishes it, so concurrent processes do not conflict.

    Raises:
        ConfigurationError: the folder is a working copy or has other contents.
    """
    if is_repository(repository):
        return
    with private_folder(repository.parent, f".{repository.name}-new") as folder:
        run_git(folder, "init", "--quiet", "--bare", "--initial-branch=main", "--template=", "made")
        try:
            filesystem.rename(folder / "made", repository)
        except OSError:
            if not is_repository(repository):
                raise


def update_mirror(url: str, folder: Path) -> None:
    """Create or update `folder`, a mirror of the URL.

    Raises:
        DataVersioningError: the URL cannot be reached, or another process holds a lock in the mirror.
    """
    if not folder.exists():
        with private_folder(folder.parent, f".{folder.name}-new") as new:
            _contact(url, new, "clone", "--quiet", "--mirror", "--template=", "--", url, "made")
            try:
                filesystem.rename(new / "made", folder)
            except OSError:
                if not folder.exists():
                    raise
        return
    for _ in range(MAX_MIRROR_ATTEMPTS):
        try:
            _contact(url, folder, "fetch", "--quiet", "--prune", "--no-write-fetch-head", "origin")
            return
        except CollisionError:
            clear_stale_locks(folder)
            time.sleep(0.2)
    raise DataVersioningError(
        f"{folder}, the mirror of {url}, is still locked after {MAX_MIRROR_ATTEMPTS} attempts",
        hint=f"Remove {folder} if no other job uses it; the next command creates it again.",
    )


def _contact(url: str, folder: Path, *arguments: str) -> None:
    """Run a git command that contacts a URL. Raises CollisionError for a lock, else DataVersioningError."""
    result = _run(folder, arguments)
    if not result.returncode:
        return
    if arguments[0] == "fetch" and any(text in result.stderr for text in COLLISION_MESSAGES):
        raise CollisionError(result.stderr.strip())
    hint = (
        f"Run `git ls-remote {url}` to check the address, the network and the credentials "
        f"(ssh keys, {CREDENTIAL_SOURCES})."
    )
    raise _build_error(f"the data repository {url} cannot be reached", result, hint)


def clone(address: str, folder: Path) -> Path:
    """Clone the repository into `folder`, and return `folder`.

    Raises:
        DataVersioningError: the repository cannot be reached.
    """
    _contact(address, folder.parent, "clone", "--quiet", "--template=", "--", address, str(folder))
    return folder


def commit(folder: Path, message: str) -> str:
    """Commit all files that are not ignored, even in an unchanged tree, and return the commit."""
    run_git(folder, "add", "--all")
    run_git(folder, "commit", "--quiet", "--allow-empty", "--no-verify", "--cleanup=verbatim", "--message", message)
    return run_git(folder, "rev-parse", "HEAD").strip()


def create_tag(folder: Path, name: str, rev: str, message: str) -> None:
    """Create or replace an annotated tag in the clone. A push fails if the repository has a different tag `name`."""
    run_git(folder, "tag", "--annotate", "--force", "--cleanup=verbatim", "--message", message, name, rev)


def check_tag_name(name: str) -> None:
    """Check the name of a user's tag.

    Raises:
        UsageError: git does not accept the name, or the name looks like a commit or is reserved for versions.
    """
    if VERSION_TAG.fullmatch(name):
        raise UsageError(
            f"--tag {name}: tags that end in -v1, -v2, … are reserved for versions",
            hint=f"Choose another name, for instance {'-'.join(name.rsplit('-v', 1))}.",
        )
    result = _run(Path.cwd(), ("check-ref-format", f"refs/tags/{name}"))
    if name.startswith("-") or result.returncode or re.fullmatch(r"[0-9a-f]{7,64}", name):
        raise UsageError(
            f"--tag {name!r} is not a valid tag name; expected a name that git accepts and that is not a commit ID",
            hint="Use letters, digits, dots and hyphens, for instance release-2026-11.",
        )


def push(folder: Path, address: str, *refs: str) -> None:
    """Push all references in one atomic transaction.

    Args:
        folder: Clone with the references.
        address: Address of the data repository, for messages.
        refs: Names of the references, or mappings in the form SOURCE:TARGET.

    Raises:
        CollisionError: another job pushed first or holds a lock.
        DataVersioningError: the repository rejected the push.
        DiskFullError: the repository's disk is full.
    """
    result = _run(folder, ("push", "--quiet", "--atomic", "origin", *refs))
    if result.returncode == 0:
        return
    is_full = any(text in result.stderr for text in DISK_FULL_MESSAGES)
    if not is_full and any(text in result.stderr for text in COLLISION_MESSAGES):
        raise CollisionError(result.stderr.strip())
    hint = "Check that you have write access and that the repository is reachable."
    raise _build_error(f"the data repository {address} rejected the new revision", result, hint)


def list_locks(repository: Path) -> list[Path]:
    """Return git's lock files in a bare repository."""
    return [*repository.glob("*.lock"), *(repository / "refs").rglob("*.lock")]


def clear_stale_locks(repository: Path) -> None:
    """Remove stale lock files. A running git process holds such a lock for milliseconds only."""
    for lock in list_locks(repository):
        with suppress(FileNotFoundError):
            if time.time() - lock.stat().st_mtime > STALE_LOCK_SECONDS:
                lock.unlink()


def list_version_tags(repository: Path, prefix: str) -> dict[str, str]:
    """Return the tags <prefix><number> and their commits as {tag: commit}, in the order of their numbers."""
    numbered = {
        int(tag.removeprefix(prefix)): (tag, rev)
        for tag, rev in list_tags(repository).items()
        if tag.startswith(prefix) and tag.removeprefix(prefix).isdecimal()
    }
    return dict(numbered[number] for number in sorted(numbered))


def list_tags(repository: Path) -> dict[str, str]:
    """Return every tag and its commit as {tag: commit}. Resolves tags that point to other tags.

    Raises:
        DataVersioningError: the object of a tag is missing.
    """
    tags = run_git(repository, "for-each-ref", "--format=%(refname:strip=2)", "refs/tags").splitlines()
    queries = "".join(f"refs/tags/{tag}^{{}}\n" for tag in tags)
    commits = run_git(repository, "cat-file", "--batch-check=%(objectname)", stdin=queries).splitlines()
    broken = [tag for tag, line in zip(tags, commits, strict=True) if line.endswith(" missing")]
    if broken:
        raise DataVersioningError(
            f"{repository} lacks the object of its tag {broken[0]}",
            hint="Restore the repository, for instance from a snapshot.",
        )
    return dict(zip(tags, commits, strict=True))


def list_newest_refs(clone: Path) -> tuple[list[str], list[str]]:
    """Return the tags and branches of a clone's origin, newest first."""
    tags, branches = (
        run_git(clone, "for-each-ref", "--sort=-creatordate", f"--format=%(refname:lstrip={depth})", refs).split()
        for refs, depth in (("refs/tags", 2), ("refs/remotes/origin", 3))
    )
    return tags, [branch for branch in branches if branch != "HEAD"]


def has_file(repository: Path, rev: str, path: str) -> bool:
    """Return whether `rev` is a commit with this file.

    Raises:
        DataVersioningError: the repository does not contain the object `rev`.
    """
    is_commit = run_git(repository, "cat-file", "-t", rev).strip() == "commit"
    return is_commit and bool(run_git(repository, "ls-tree", "--name-only", rev, "--", path).strip())


def read_file(repository: Path, rev: str, path: str) -> str:
    """Return the text of a file in a commit.

    Raises:
        DataVersioningError: the commit or the file does not exist.
    """
    return run_git(repository, "cat-file", "blob", f"{rev}:{path}")
