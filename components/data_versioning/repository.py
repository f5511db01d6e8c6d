"""The data repository: a bare git repository that jobs clone, commit to and push back to. Git is the only lock.

It lies in a folder here, or behind a URL; of the latter a mirror is kept here, brought up to date before anything is read from it.

A job never works in the repository itself. It commits in a clone of its own and pushes commit and tag in one atomic transaction, which
git refuses when another job was first; then it starts over on top of that. So a killed job leaves the repository as it was.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from components.common import addresses
from components.common.errors import ConfigurationError, DiskFullError, EngineMissingError, TunelineError, UsageError
from components.common.jobs import private_folder

GITCONFIG = Path(__file__).with_name("gitconfig")
STALE_LOCK = 10.0  # seconds: git holds the lock of a reference for milliseconds
NETWORK_SECONDS = 120.0  # a data repository is small: its files are in the DVC remote
# How a user reaches a server; name and password are asked for by the credential helper of our file.
PASSED = ("GIT_ASKPASS", "GIT_PASSWORD", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "GIT_USERNAME")
ASKED = "GIT_USERNAME and GIT_PASSWORD, ~/.netrc or GIT_ASKPASS"
MIRROR_ATTEMPTS = 75  # of 0.2 seconds
FULL = ("No space left on device", "Disk quota exceeded")
VERSION = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)-v[0-9]+")  # the tag of a version, which names its dataset
COLLISIONS = ("[rejected]", "[remote rejected]", "cannot lock ref", "failed to update ref", "Unable to create")


class DataVersioningError(TunelineError):
    """The data repository or its remote refuses: an unknown revision, a damaged object, a remote that cannot be written."""

    kind = "data_versioning"


class Collision(Exception):  # noqa: N818 # no error: it is tried again
    """Another job was first, or holds a lock. Says what git said."""


def is_url(address: str) -> bool:
    """Whether git would fetch it from elsewhere: a URL, or host:path as ssh is written. file:// is a folder here."""
    if "://" in address:
        return not address.startswith("file://")
    return ":" in address.partition("/")[0]


def folder_of(address: str) -> Path:
    """The folder that a path or a file:// URL names."""
    return Path(unquote(urlsplit(address).path)) if address.startswith("file://") else Path(address)


def check_no_password(address: str, key: str) -> None:
    """Raise ConfigurationError for an address with a password: addresses are recorded with every version."""
    if addresses.holds_password(address):
        host = urlsplit(addresses.split(address)[0]).hostname
        raise ConfigurationError(
            f"{key}: the address of {host} holds a password, and addresses are recorded with every version",
            hint=f"Leave it out of the address: git takes it from {ASKED}, or use ssh; S3 keys come from AWS_… variables.",
        )


def git(folder: Path, *arguments: str, stdin: str | None = None) -> str:
    """The output of a git command in `folder`, run without the user's configuration. Raises DataVersioningError with git's own words."""
    done = _run(folder, arguments, stdin)
    if done.returncode:
        raise _failed(f"git {arguments[0]} failed in {folder}", done, "Check that the folder is a git repository you may read and write.")
    return done.stdout


def _failed(what: str, done: subprocess.CompletedProcess[str], hint: str) -> TunelineError:
    said = done.stderr.strip() or done.stdout.strip()
    if any(sign in said for sign in FULL):
        return DiskFullError(f"{what}: no space is left: {said}", hint="Free some space there. Run the same command again.")
    return DataVersioningError(f"{what}: {said}", hint=hint)


def _run(folder: Path, arguments: tuple[str, ...], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("git")
    if program is None:
        raise EngineMissingError(
            "git is not installed, and dataset versions are git commits", hint="Install git, for instance: apt install git"
        )
    command = [program, "-C", str(folder), *arguments]
    limit = NETWORK_SECONDS if arguments[0] in ("clone", "fetch", "push") else None
    how: dict[str, Any] = {"capture_output": True, "text": True, "encoding": "utf-8", "check": False, "timeout": limit}
    try:
        return subprocess.run(command, env=_environment(), input=stdin or "", **how)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {NETWORK_SECONDS:.0f} seconds")


def _environment() -> dict[str, str]:
    """Git's settings come from our file alone; whoever runs the job is the author."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in PASSED}
    author = _user()
    return {
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=15",
        **kept,
        "GIT_CONFIG_GLOBAL": str(GITCONFIG),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": author,
        "GIT_AUTHOR_EMAIL": f"{author}@localhost",
        "GIT_COMMITTER_NAME": "tuneline",
        "GIT_COMMITTER_EMAIL": "tuneline@localhost",
        "LC_ALL": "C",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"  # a container's user without a name


def exists(repository: Path) -> bool:
    """Whether a data repository lies there. Raises ConfigurationError for a folder that cannot be one."""
    if (repository / ".git").exists():
        raise ConfigurationError(
            f"data_versioning.repository: {repository} is a working copy; a data repository is bare, so that jobs can push to it",
            hint=f"Make a bare one of it: git clone --bare {repository} {repository}.git",
        )
    if (repository / "HEAD").exists():
        return True
    if repository.is_file() or (repository.is_dir() and any(repository.iterdir())):
        raise ConfigurationError(
            f"data_versioning.repository: {repository} is not empty and not a git repository", hint="Name a new or an empty folder."
        )
    return False


def create(repository: Path) -> None:
    """Make the repository where there is none yet. It appears whole, by a rename; of two processes that do this, one is kept."""
    if exists(repository):
        return
    with private_folder(repository.parent, f".{repository.name}-new") as folder:
        git(folder, "init", "--quiet", "--bare", "--initial-branch=main", "--template=", "made")
        try:
            (folder / "made").rename(repository)
        except OSError:
            if not exists(repository):
                raise


def mirror(url: str, folder: Path) -> None:
    """Make `folder` a bare copy of what the URL holds now. Raises DataVersioningError when it cannot be reached."""
    if not folder.exists():
        with private_folder(folder.parent, f".{folder.name}-new") as new:
            _reach(url, new, "clone", "--quiet", "--mirror", "--template=", "--", url, "made")
            try:
                (new / "made").rename(folder)
            except OSError:
                if not folder.exists():
                    raise
        return
    for _ in range(MIRROR_ATTEMPTS):
        try:
            _reach(url, folder, "fetch", "--quiet", "--prune", "--no-write-fetch-head", "origin")
            return
        except Collision:
            clear_stale_locks(folder)
            time.sleep(0.2)
    raise DataVersioningError(
        f"{folder}, the copy of {url}, is locked", hint=f"Remove {folder} when no other job uses it: it is made anew."
    )


def _reach(url: str, folder: Path, *arguments: str) -> None:
    done = _run(folder, arguments)
    if done.returncode and any(sign in done.stderr for sign in COLLISIONS):
        raise Collision(done.stderr.strip())
    if done.returncode:
        raise _unreachable(url, done)


def _unreachable(url: str, done: subprocess.CompletedProcess[str]) -> TunelineError:
    hint = f"Check the address, the network and your access (ssh keys, {ASKED}): `git ls-remote {url}` has to work."
    return _failed(f"the data repository {url} cannot be reached", done, hint)


def clone(address: str, folder: Path) -> Path:
    """A working copy of the repository in `folder`."""
    done = _run(folder.parent, ("clone", "--quiet", "--template=", "--", address, str(folder)))
    if done.returncode:
        raise _unreachable(address, done)
    return folder


def commit(folder: Path, message: str) -> str:
    """Commit everything in the working copy that is not ignored; returns the commit. An unchanged tree makes a commit too."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--no-verify", "--cleanup=verbatim", "--message", message)
    return git(folder, "rev-parse", "HEAD").strip()


def tag(folder: Path, name: str, rev: str, message: str) -> None:
    """An annotated tag. The working copy forgets another one of that name: what counts is what the push comes to."""
    git(folder, "tag", "--annotate", "--force", "--cleanup=verbatim", "--message", message, name, rev)


def check_tag_name(name: str) -> None:
    """Raise UsageError for what git takes for no tag, and for what the versions of a dataset are called, this one's or another's."""
    if VERSION.fullmatch(name):
        raise UsageError(
            f"--tag {name}: tags that end in -v1, -v2, … are given by tuneline",
            hint=f"Choose another name, for instance {'-'.join(name.rsplit('-v', 1))}.",
        )
    done = _run(Path.cwd(), ("check-ref-format", f"refs/tags/{name}"))
    if name.startswith("-") or done.returncode or re.fullmatch(r"[0-9a-f]{7,64}", name):
        raise UsageError(f"--tag {name!r} cannot be the name of a tag", hint="Take letters, digits, dots and hyphens: release-2026-11.")


def push(folder: Path, address: str, *refs: str) -> None:
    """Push these together, or none of them. Raises Collision when another job was first or holds a lock."""
    done = _run(folder, ("push", "--quiet", "--atomic", "origin", *refs))
    if done.returncode == 0:
        return
    if not any(sign in done.stderr for sign in FULL) and any(sign in done.stderr for sign in COLLISIONS):
        raise Collision(done.stderr.strip())
    raise _failed(
        f"the data repository {address} does not take the new revision", done, "Check that you may write there, and that it can be reached."
    )


def head(folder: Path) -> str:
    """The branch that a working copy is on, as a reference."""
    return git(folder, "symbolic-ref", "HEAD").strip()


def locks(repository: Path) -> list[Path]:
    """Git's lock files in a bare repository."""
    return [*repository.glob("*.lock"), *(repository / "refs").rglob("*.lock")]


def clear_stale_locks(repository: Path) -> None:
    """Remove git's lock files that a killed process left. A living one holds such a lock for milliseconds, so age tells them apart."""
    for lock in locks(repository):
        try:
            if time.time() - lock.stat().st_mtime > STALE_LOCK:
                lock.unlink()
        except FileNotFoundError:
            continue


def tags(repository: Path, prefix: str) -> dict[str, str]:
    """Commits by tag, for the tags <prefix><number>, in the order of their numbers."""
    found = {tag: rev for tag, rev in names(repository).items() if tag.startswith(prefix)}
    numbered = {tag: rev for tag, rev in found.items() if tag.removeprefix(prefix).isdecimal()}
    return dict(sorted(numbered.items(), key=lambda item: int(item[0].removeprefix(prefix))))


def names(repository: Path) -> dict[str, str]:
    """Every tag with the commit it names, also over other tags (a signed one of a tag)."""
    tags = git(repository, "for-each-ref", "--format=%(refname:strip=2)", "refs/tags").splitlines()
    asked = "".join(f"refs/tags/{tag}^{{}}\n" for tag in tags)
    told = git(repository, "cat-file", "--batch-check=%(objectname)", stdin=asked).splitlines()
    broken = [tag for tag, line in zip(tags, told, strict=True) if line.endswith(" missing")]
    if broken:
        raise DataVersioningError(f"{repository} lacks what its tag {broken[0]} names", hint="Restore it, for instance from a snapshot.")
    return dict(zip(tags, told, strict=True))


def newest_names(clone: Path) -> tuple[list[str], list[str]]:
    """The tags of what was cloned, and its branches, the newest first."""
    listed = (
        git(clone, "for-each-ref", "--sort=-creatordate", f"--format=%(refname:lstrip={depth})", refs)
        for refs, depth in (("refs/tags", 2), ("refs/remotes/origin", 3))
    )
    tags, branches = (lines.split() for lines in listed)
    return tags, [branch for branch in branches if branch != "HEAD"]


def holds(repository: Path, rev: str, path: str) -> bool:
    """Whether it is a commit that holds a file. Raises DataVersioningError where the repository is damaged, so that none looks absent."""
    is_commit = git(repository, "cat-file", "-t", rev).strip() == "commit"
    return is_commit and bool(git(repository, "ls-tree", "--name-only", rev, "--", path).strip())


def text(repository: Path, rev: str, path: str) -> str:
    """The text of a file in a commit."""
    return git(repository, "cat-file", "blob", f"{rev}:{path}")
