"""The data repository: a bare git repository that jobs clone, commit to and push back to. Git is the only lock.

A job never works in the repository itself. It commits in a clone of its own and pushes commit and tag in one atomic transaction, which
git refuses when another job was first; then it starts over on top of that. So a killed job leaves the repository as it was.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from pathlib import Path

from components.common.errors import ConfigurationError, EngineMissingError, TunelineError
from components.data_versioning.jobs import private_folder

GITCONFIG = Path(__file__).with_name("gitconfig")
STALE_LOCK = 10.0  # seconds: git holds the lock of a reference for milliseconds
COLLISIONS = ("[rejected]", "[remote rejected]", "cannot lock ref", "failed to update ref", "Unable to create")


class DataVersioningError(TunelineError):
    """The data repository or its remote refuses: an unknown revision, a damaged object, a remote that cannot be written."""

    kind = "data_versioning"


def git(folder: Path, *arguments: str, stdin: str | None = None) -> str:
    """The output of a git command in `folder`, run without the user's configuration. Raises DataVersioningError with git's own words."""
    done = _run(folder, arguments, stdin)
    if done.returncode:
        raise DataVersioningError(
            f"git {arguments[0]} failed in {folder}: {done.stderr.strip() or done.stdout.strip()}",
            hint="Check that the folder is a git repository you may read and write, and that its disk is not full.",
        )
    return done.stdout


def _run(folder: Path, arguments: tuple[str, ...], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("git")
    if program is None:
        raise EngineMissingError(
            "git is not installed, and dataset versions are git commits", hint="Install git, for instance: apt install git"
        )
    command = [program, "-C", str(folder), *arguments]
    return subprocess.run(command, env=_environment(), input=stdin or "", capture_output=True, text=True, encoding="utf-8", check=False)


def _environment() -> dict[str, str]:
    """Git's settings come from our file alone; whoever runs the job is the author."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    author = _user()
    return {
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


def clone(repository: Path, folder: Path) -> Path:
    """A working copy of the repository in `folder`."""
    git(folder.parent, "clone", "--quiet", "--template=", str(repository), str(folder))
    return folder


def commit(folder: Path, message: str) -> str:
    """Commit everything in the working copy that is not ignored; returns the commit. An unchanged tree makes a commit too."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", message)
    return git(folder, "rev-parse", "HEAD").strip()


def push(folder: Path, repository: Path, tag: str) -> bool:
    """Push the commit and its tag together, or neither. False when another job was first or holds a lock."""
    branch = git(folder, "symbolic-ref", "--short", "HEAD").strip()
    done = _run(folder, ("push", "--quiet", "--atomic", "origin", f"HEAD:refs/heads/{branch}", f"refs/tags/{tag}"))
    if done.returncode == 0:
        return True
    if not any(sign in done.stderr for sign in COLLISIONS):
        raise DataVersioningError(
            f"the data repository {repository} does not take the new revision: {done.stderr.strip()}",
            hint="Check that you may write there and that its disk is not full.",
        )
    clear_stale_locks(repository)
    return False


def clear_stale_locks(repository: Path) -> None:
    """Remove git's lock files that a killed process left. A living one holds such a lock for milliseconds, so age tells them apart."""
    for lock in [*repository.glob("*.lock"), *(repository / "refs").rglob("*.lock")]:
        try:
            if time.time() - lock.stat().st_mtime > STALE_LOCK:
                lock.unlink()
        except FileNotFoundError:
            continue


def tags(repository: Path, prefix: str) -> dict[str, str]:
    """Commits by tag, for the tags <prefix><number>, in the order of their numbers."""
    listed = git(repository, "for-each-ref", "--format=%(refname:strip=2) %(objectname) %(*objectname)", f"refs/tags/{prefix}*")
    found = {words[0]: words[-1] for words in (line.split() for line in listed.splitlines())}
    numbered = {tag: rev for tag, rev in found.items() if tag.removeprefix(prefix).isdecimal()}
    return dict(sorted(numbered.items(), key=lambda item: int(item[0].removeprefix(prefix))))


def text(repository: Path, rev: str, path: str) -> str:
    """The text of a file in a commit."""
    return git(repository, "cat-file", "blob", f"{rev}:{path}")
