"""Sources in other DVC repositories: dvc://REPOSITORY@REVISION:PATH, fetched with every digest checked."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.common import artifacts, hashing, jobs, liveness
from components.common.errors import ArtifactDamagedError, ConfigurationError, TunelineError
from components.common.progress import Reporter
from components.data_versioning import repository, s3, storage
from components.data_versioning.repository import DataVersioningError

FORM = "Write dvc://REPOSITORY@REVISION:PATH, for example dvc:///srv/git/corpus.git@v3:raw/letters.jsonl."
KEPT = 7 * 24 * 3600.0  # seconds for which a copy is kept that no job has asked for
UPSTREAM = "origin-cache"  # the cache of a repository without a remote


@dataclass(frozen=True)
class Address:
    """What a dvc:// URI names: a git repository (path or URL), a revision of it, and a path in it."""

    repo: str
    rev: str
    path: str


def parse(uri: str) -> Address:
    """The parts of a dvc:// URI. Raises ConfigurationError for anything else."""
    match = re.fullmatch(r"dvc://(.+)@([^@:]+):([^:]+)", uri)
    if not match:
        raise ConfigurationError(f"{uri!r} is no DVC source", hint=FORM)
    repo, rev, path = match[1], match[2], match[3].strip("/")
    repository.check_no_password(repo, "a dvc:// source")
    if rev.startswith("-") or not path or ".." in Path(path).parts:
        raise ConfigurationError(f"{uri!r} is no DVC source: the revision or the path cannot be meant", hint=FORM)
    return Address(repo, rev, path)


def obtain(uri: str, folder: Path, reporter: Reporter) -> Path:
    """Fetch the file or folder that a dvc:// URI names; returns where it lies: below `folder`, under its own name.

    What a URI names has a place of its own for every content, which several jobs may fill at once: what a job was given stays as it is
    when the revision comes to name another commit, and is called the same while the content is. What was fetched of the same commit
    before, and is still what it was then, is not fetched again; what no job has asked for in a week goes.
    Whatever DVC tracks is compared with the digests in the repository, and whatever git tracks is git's own. Raises ConfigurationError
    for a URI that names nothing, DataVersioningError when repository or remote cannot be used, and ArtifactDamagedError, naming the
    files, when the remote holds them damaged or not at all.
    """
    address = parse(uri)
    reporter.step(f"fetching {address.path} at {address.rev}")
    with jobs.private_folder(folder.absolute(), ".obtain") as work:
        clone = _clone(address, work / "clone")
        commit = repository.git(clone, "rev-parse", "HEAD").strip()
        copies = _Copies(folder.absolute() / hashing.digest(uri)[:16], Path(address.path).name, work)
        there = copies.of(commit) or copies.put(_fetched(address, clone), commit)
        copies.forget_others(there)
    return there


@dataclass(frozen=True)
class _Copies:
    """What a URI has named: each content in a folder of its own, and a note for every commit that says which was its."""

    home: Path
    name: str
    work: Path  # this job's own folder beside

    def of(self, commit: str) -> Path | None:
        """The copy of a commit, if it is there as it was when it was fetched."""
        try:
            return self._whole(self._note(commit).read_text(encoding="utf-8").strip())
        except FileNotFoundError:
            return None

    def _whole(self, sha256: str) -> Path | None:
        """The copy with this content. Being asked for makes it young again, so that no job forgets it now."""
        path = self.home / sha256[:16] / self.name
        try:
            os.utime(path.parent)
            return path if _contents(path) == sha256 else None
        except OSError:
            return None

    def put(self, found: Path, commit: str) -> Path:
        """Move what was fetched to its place, by one rename, and note it. Another job's copy that is whole stays."""
        made, sha256 = self.work / "made", _contents(found)
        made.mkdir()
        found.rename(made / self.name)
        self.home.mkdir(parents=True, exist_ok=True)
        kept = jobs.settle(made, self.home / sha256[:16], lambda: self._whole(sha256), self.work / "aside")
        artifacts.write_atomically(self._note(commit), sha256 + "\n")
        return kept or self.home / sha256[:16] / self.name

    def _note(self, commit: str) -> Path:
        return self.home / f"{commit[:16]}.commit"

    def forget_others(self, path: Path) -> None:
        """Remove the copies that are too old for any job to be reading them, and the notes that name none."""
        for other in self.home.iterdir():
            with suppress(FileNotFoundError):  # another job was first
                if other.suffix == ".commit":
                    self._forget_note(other)
                elif other.is_dir() and other != path.parent and liveness.silence(other) > KEPT:
                    jobs.put_aside(other, self.work / "forgotten")

    def _forget_note(self, note: Path) -> None:
        if not (self.home / note.read_text(encoding="utf-8")[:16]).exists():
            note.unlink()


def _fetched(address: Address, clone: Path) -> Path:
    """Where in the clone the source lies, fetched by DVC unless it is git's."""
    path = clone / address.path
    if (clone / ".dvc").is_dir() or not path.exists():
        _fetch(address, clone)
    _follow_links(path, clone)
    return path


def _follow_links(path: Path, clone: Path) -> None:
    """Put the file in the place of every link to one. A link cannot be followed once it is elsewhere."""
    for link in [path, *(path.rglob("*") if path.is_dir() else [])]:
        target = Path(os.path.realpath(link))  # resolve() raises for one that leads to itself
        if not link.is_symlink() and target == clone.resolve() / link.relative_to(clone):
            continue
        inside = target.is_relative_to(clone.resolve()) and ".git" not in target.relative_to(clone.resolve()).parts
        if not inside or not target.is_file():
            raise ConfigurationError(
                f"{link.relative_to(clone)} in the repository is a link, or below one, that leads to no file of the repository",
                hint="Name the files themselves.",
            )
        content = shutil.copyfile(target, clone / ".git" / "linked")
        link.unlink()
        content.rename(link)


def _contents(path: Path) -> str:
    """The digest of a file, or of all files of a folder."""
    if path.is_file():
        return hashing.sha256_file(path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return hashing.digest([[str(file.relative_to(path)), hashing.sha256_file(file)] for file in files])


def _clone(address: Address, folder: Path) -> Path:
    """The repository at the revision, in a folder of its own."""
    origin = address.repo if repository.is_url(address.repo) else str(repository.folder_of(address.repo).absolute())
    if not repository.is_url(address.repo) and not Path(origin).exists():
        raise ConfigurationError(f"{address.repo} of a dvc:// source does not exist", hint=FORM)
    repository.clone(origin, folder)
    repository.git(folder, "checkout", "--quiet", "--detach", _commit(address, folder))
    return folder


def _commit(address: Address, clone: Path) -> str:
    """The commit that the revision names. A clone has a branch of its own for the default one only; the others are origin's."""
    for rev in (address.rev, f"origin/{address.rev}"):
        with suppress(DataVersioningError):
            return repository.git(clone, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}").strip()
    tags, branches = (", ".join(names[:10]) or "none" for names in repository.newest_names(clone))
    raise DataVersioningError(
        f"{address.repo} has no revision {address.rev}",
        hint=f"Its tags are: {tags}. Its branches are: {branches}. A commit will do as well.",
    )


def _fetch(address: Address, clone: Path) -> None:
    """Lay out what DVC tracks at the path, and take every digest again: DVC uses a folder's list of files before it has checked it.

    What git holds there, and DVC does not track, is there already.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    path = str(clone / address.path)
    with storage.private_settings(clone / ".dvc" / "site"), s3.patience(), storage.logged() as said:
        try:
            with Repo(str(clone), config=_settings(address, clone)) as repo:
                outs = _outs(repo, address)
                if not outs:
                    return
                _check_remote(repo)
                _pull(repo, [path if _below(path, out.fs_path) else out.fs_path for out in outs], address, said)
                _verify(repo, outs, address)
                _tidy(outs, path)
        except (DvcException, OSError) as error:
            raise _failed(address, error, said) from error


def _settings(address: Address, clone: Path) -> dict[str, Any]:
    """The repository's own settings, made safe: remotes verify, nothing is asked, the cache is this job's."""
    from dvc.config import Config

    if not (clone / ".dvc").is_dir():
        raise DataVersioningError(f"{address.repo} is no DVC repository: {address.path} is neither in git nor in DVC there", hint=FORM)
    own = Config(str(clone / ".dvc"), validate=False)
    remotes = {name: dict(remote) for name, remote in own["remote"].items()}
    default = own["core"].get("remote")
    origin = repository.folder_of(address.repo).absolute() / ".dvc"
    if not repository.is_url(address.repo) and origin.is_dir():
        there = Config(str(origin), validate=False)  # its relative paths are meant from there
        remotes.update({name: dict(remote) for name, remote in there["remote"].items()})
        default = default or there["core"].get("remote")
        if not default:
            default, remotes[UPSTREAM] = UPSTREAM, {"url": there["cache"].get("dir") or str(origin / "cache")}
    for remote in remotes.values():
        remote["verify"] = True
        if str(remote["url"]).startswith("s3://"):
            remote.update({"connect_timeout": s3.CONNECT_SECONDS, "read_timeout": s3.READ_SECONDS})
    core = {"no_scm": True, "hardlink_lock": True, "analytics": False, "check_update": False, **({"remote": default} if default else {})}
    return {"core": core, "remote": remotes, "cache": {"type": ["hardlink", "copy"], "dir": str(clone / ".dvc" / "private-cache")}}


def _check_remote(repo: Any) -> None:
    """Ask a bucket for its first key, so that a wrong key or a dead server is told as that."""
    remote = repo.config["remote"].get(repo.config["core"].get("remote") or "", {})
    storage.Remote(str(remote.get("url", "")), s3.endpoint(str(remote.get("endpointurl") or ""))).check()


def _outs(repo: Any, address: Address) -> list[Any]:
    """What DVC keeps of the path, below it or above it; nothing where all of it is git's. Raises DataVersioningError where it is nobody's.

    What a stage makes and git holds (a file of metrics) is git's own; what a stage below a folder would make, and never did, is not there.
    """
    path = str(Path(repo.root_dir) / address.path)
    outs = [out for out in _index(repo, address, path) if out.use_cache]
    within = [out for out in outs if _below(out.fs_path, path) or _below(path, out.fs_path)]
    made = [out for out in within if out.hash_info]
    if not made and not os.path.lexists(path):
        if within:
            hint = f"At {address.rev} no dvc.lock names it: name a revision for which `dvc repro` was run."
            raise DataVersioningError(f"{address.path} is what a stage of {address.repo} makes, and it was never made", hint=hint)
        some = ", ".join(sorted(str(Path(out.fs_path).relative_to(repo.root_dir)) for out in outs)[:10]) or "nothing"
        raise DataVersioningError(f"{address.path} is not in {address.repo} at {address.rev}", hint=f"DVC tracks there: {some}.")
    return made


def _index(repo: Any, address: Address, path: str) -> list[Any]:
    """All that DVC knows of; nothing where it cannot read its own files, and the path is one file, which git holds."""
    from dvc.exceptions import DvcException

    try:
        return list(repo.index.outs)
    except DvcException as error:
        if Path(path).is_file():
            return []
        hint = "Mend it there, or name files that git holds one by one."
        raise DataVersioningError(f"DVC cannot read {address.repo} at {address.rev}: {str(error).splitlines()[0]}", hint=hint) from error


def _below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _tidy(outs: list[Any], path: str) -> None:
    """A folder is given without DVC's own files in it."""
    for stage in {out.stage.path for out in outs if out.stage.path.endswith(".dvc")}:
        if _below(stage, path):
            Path(stage).unlink(missing_ok=True)


def _pull(repo: Any, targets: list[str], address: Address, said: list[str]) -> None:
    from dvc.exceptions import CheckoutError, DownloadError
    from dvc_objects.errors import ObjectFormatError

    try:
        repo.pull(targets)
    except (CheckoutError, DownloadError, ObjectFormatError) as error:
        raise _lost(address, "; ".join(dict.fromkeys([str(error).splitlines()[0], *said]))) from None


def _verify(repo: Any, outs: list[Any], address: Address) -> None:
    """Raise ArtifactDamagedError for every file that is not what the repository says."""
    wrong = [name for out in outs for name in _wrong(out, Path(repo.root_dir) / address.path)]
    if wrong:
        raise _lost(address, ", ".join(str(Path(name).relative_to(repo.root_dir)) for name in wrong))
    if not (Path(repo.root_dir) / address.path).exists():
        raise DataVersioningError(f"{address.path} is not in {address.repo} at {address.rev}", hint="Check the path.")


def _wrong(out: Any, wanted: Path) -> list[str]:
    """The files of an out, at or below `wanted`, whose digests are not those that the repository names."""
    if not out.hash_info or not out.hash_info.isdir:
        return [] if out.hash_info and _digest(out.fs_path, out.hash_info.name) == out.hash_info.value else [out.fs_path]
    tree = out.get_obj()
    if tree is None:
        return [out.fs_path]
    named = tree.hash_info.value
    tree.digest()
    if tree.hash_info.value != named or named != out.hash_info.value:
        return [out.fs_path]
    files = [(Path(out.fs_path, *key), info) for key, _, info in tree]
    return [str(path) for path, info in files if _below(str(path), str(wanted)) and _digest(str(path), info.name) != info.value]


def _digest(path: str, name: str) -> str | None:
    from dvc.fs import localfs
    from dvc_data.hashfile.hash import hash_file

    return str(hash_file(path, localfs, name)[1].value) if Path(path).exists() else None


def _lost(address: Address, what: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"the DVC remote of {address.repo} lacks objects of {address.path} at {address.rev}, or holds them damaged: {what}",
        hint="Restore them there, for instance from a snapshot, or have them pushed again by who holds them.",
    )


def _failed(address: Address, error: Exception, said: list[str]) -> TunelineError:
    return storage.failed(storage.Remote(f"of {address.repo}"), error, said)
