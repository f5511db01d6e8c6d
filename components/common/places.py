"""Where things lie: the store of finished artifacts, the state of unfinished work, the cache of base models.

A step finds them in its environment, because a path in a step's parameters would make its cache key differ from machine to machine.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from components.common import artifacts, jobs
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, InterruptedRunError, TunelineError

DEFAULT_WORKDIR = ".tuneline"
JOB = "job"  # a job's folder in the store is unfinished/job.<where>.<process>.<digits>
ASIDE = "aside"  # where in it an artifact lies whose place another one is about to take
LOOKS = 100  # at a place that is empty between two renames, a hundredth of a second apart
LOOKS_FOR_NOTHING = 3  # a look goes from folder to folder, while another job may move what is looked for


@dataclass(frozen=True)
class Workdir:
    """The folder a customization lives in: tracking store, data repository, artifact store, state, and one folder a run."""

    root: Path

    @staticmethod
    def from_environment() -> Workdir:
        """TUNELINE_WORKDIR, or .tuneline in the current folder."""
        return Workdir(Path(os.environ.get("TUNELINE_WORKDIR", DEFAULT_WORKDIR)).absolute())

    @property
    def store(self) -> Path:
        """Finished artifacts by content digest (TUNELINE_STORE on a cluster)."""
        return Path(os.environ.get("TUNELINE_STORE") or self.root / "store")

    @property
    def state(self) -> Path:
        """Checkpoints and other work in progress (TUNELINE_STATE on a cluster)."""
        return Path(os.environ.get("TUNELINE_STATE") or self.root / "state")

    @property
    def runs(self) -> Path:
        """One folder a run: its events, logs and report."""
        return self.root / "runs"

    @property
    def tracking_uri(self) -> str:
        """MLFLOW_TRACKING_URI, or the SQLite store of this workdir."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.root / 'mlflow.db'}"


@contextmanager
def state_at(folder: Path) -> Iterator[None]:
    """Have work in progress lie elsewhere for a while, wherever TUNELINE_STATE says: a dry run leaves nothing there."""
    before = os.environ.get("TUNELINE_STATE")
    os.environ["TUNELINE_STATE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TUNELINE_STATE")
        if before is not None:
            os.environ["TUNELINE_STATE"] = before


def cache_dir() -> Path:
    """Where converted base models are kept for all workdirs: TUNELINE_CACHE, else the user's cache folder."""
    explicit = os.environ.get("TUNELINE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(explicit).absolute() if explicit else base / "tuneline"


def stored(store: Path, sha256: str, *kinds: str) -> Artifact:
    """The artifact with this identity, checked. Raises ArtifactDamagedError when it is not in the store or not what it says."""
    folder = store / sha256
    if not _is_there(store, sha256):
        raise ArtifactDamagedError(f"{sha256} is not in the artifact store {store}", hint="Run the stage that makes it again.")
    found = _read(store, sha256, kinds)
    if found.sha256 != sha256:
        raise ArtifactDamagedError(f"{folder} holds {found.sha256}", hint=f"Remove {folder} and run the stage that makes it again.")
    return found


def _read(store: Path, sha256: str, kinds: tuple[str, ...]) -> Artifact:
    """The artifact, checked. Where another job puts a new one in its place meanwhile, that is read."""
    folder = store / sha256
    while True:
        before = _identity(folder)
        try:
            return artifacts.read(folder, *kinds)
        except (OSError, TunelineError):
            if not _is_there(store, sha256) or before == _identity(folder):
                raise


def _identity(folder: Path) -> tuple[int, int] | None:
    """What tells an artifact from the one that took its place; the inode alone may be used again."""
    try:
        return folder.stat().st_ino, (folder / artifacts.MANIFEST).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_there(store: Path, sha256: str) -> bool:
    """Whether the store has it. Between the two renames of a job that replaces it, or that was killed there, it is waited for.

    Where its owner is on another machine, and may be dead, it is put back after a second: nothing is lost by that, as an owner that lives
    finds the place taken, and moves it aside again.
    """
    manifest, nothing = store / sha256 / artifacts.MANIFEST, 0
    for _ in range(LOOKS):
        nothing += not _moved_aside(store, sha256)
        if manifest.exists() or nothing == LOOKS_FOR_NOTHING:
            return manifest.exists()
        tidy(store)
        time.sleep(0.01)
    for old in _moved_aside(store, sha256):
        _restore(store, old)
    return manifest.exists()


def _moved_aside(store: Path, sha256: str) -> list[Path]:
    return [old for job in _jobs(store) for old in _aside(job) if old.name == sha256]


def _jobs(store: Path) -> list[Path]:
    return [job for job in jobs.listed(store / "unfinished") if job.name.startswith(f"{JOB}.")]


def _aside(job: Path) -> list[Path]:
    """The artifacts that a job has moved aside."""
    return [old for place in jobs.listed(job / ASIDE) for old in jobs.listed(place)]


def workplace(store: Path) -> AbstractContextManager[Path]:
    """A folder in the store for this job alone, removed at the end. What killed jobs left there goes first."""
    return jobs.private_folder(store / "unfinished", JOB, rescue=partial(_put_back, store))


def tidy(store: Path) -> None:
    """Remove what killed jobs left in the store."""
    jobs.sweep(store / "unfinished", JOB, rescue=partial(_put_back, store))


def _put_back(store: Path, job: Path) -> None:
    """An artifact that a job had moved aside goes back where no other has taken its place yet: the job may have been killed before."""
    for old in _aside(job):
        _restore(store, old)


def _restore(store: Path, old: Path) -> None:
    with suppress(OSError):  # a rename replaces no folder that holds something
        old.rename(store / old.name)


def produce(store: Path, stage: str, key: str, build: Callable[[Path], Artifact]) -> tuple[Artifact, bool]:
    """The stored artifact for this key, built first where it is not there yet. Returns it and whether it was there.

    `key` is the digest of everything the result depends on. `build` fills the folder it is given, which is this job's own, and publishes
    it; the folder is then moved to its content address by a rename inside the store. The note that joins key and digest is written last,
    so a process killed at any point only repeats work.
    """
    tidy(store)
    known = noted(store, stage, key)
    if known:
        return stored(store, known), True
    try:
        with workplace(store) as own:
            artifact = adopt(store, build(own / f"{stage}-{key[:16]}"))
    except InterruptedRunError:
        raise
    except Exception:  # another job may have made it meanwhile, and removed the state that both worked on
        if known := noted(store, stage, key):
            return stored(store, known), True
        raise
    if artifact.manifest.lasting:
        note = _note(store, stage, key)
        note.parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_atomically(note, artifact.sha256 + "\n")
    return artifact, False


def unfinished(store: Path) -> tuple[list[Path], list[Path]]:
    """The artifacts that jobs have moved aside, which is for a moment unless they were killed; and the jobs' folders that hold more."""
    tidy(store)
    aside = [old for job in _jobs(store) for old in _aside(job)]
    return aside, [job for job in _jobs(store) if any(path.name != ASIDE for path in jobs.listed(job))]


def noted(store: Path, stage: str, key: str) -> str | None:
    """The digest of the stored artifact that was made under this key; None where there is none. Its files are not checked."""
    note = _note(store, stage, key)
    sha256 = note.read_text(encoding="utf-8").strip() if note.exists() else ""
    return sha256 if sha256 and (store / sha256 / artifacts.MANIFEST).exists() else None


def _note(store: Path, stage: str, key: str) -> Path:
    return store / "keys" / stage / key


def adopt(store: Path, built: Artifact) -> Artifact:
    """Move a finished artifact to store/<content_sha256>, whatever other jobs put there at the same time.

    Where the same content already lies intact and says the same, that is kept and this is dropped. Where this one says something new (a
    package that is proven now, other inputs), or that one is damaged, it takes the place: the old one is moved aside by the rename
    before, and comes back should this job be killed between the two.
    """
    home = store / built.sha256
    with workplace(store) as own:
        kept = jobs.settle(built.path, home, partial(_same, store, built), own / ASIDE)
    if kept is None:
        return Artifact(home, built.manifest)
    shutil.rmtree(built.path)
    return kept


def _same(store: Path, built: Artifact) -> Artifact | None:
    """The stored artifact with this one's content, if it is intact and says the same."""
    kept = _intact(store, built.sha256)
    return kept if kept and _says(kept) == _says(built) else None


def _intact(store: Path, sha256: str) -> Artifact | None:
    try:
        return stored(store, sha256)
    except (TunelineError, FileNotFoundError):  # not what it says, or another job just moved it aside
        return None


def _says(artifact: Artifact) -> tuple[object, ...]:
    """What an artifact says beside its content."""
    manifest = artifact.manifest
    return manifest.inputs, manifest.config, manifest.summary
