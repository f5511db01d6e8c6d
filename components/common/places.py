"""Where things lie: the store of finished artifacts, the state of unfinished work, the cache of base models.

A step finds them in its environment, because a path in a step's parameters would make its cache key differ from machine to machine.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from components.common import artifacts, jobs
from components.common.artifacts import Artifact
from components.common.errors import ArtifactDamagedError, TunelineError

DEFAULT_WORKDIR = ".tuneline"
JOB = "job"  # a job's folder in the store is unfinished/job.<host>.<process>.<digits>
ASIDE = "aside"  # where in it an artifact lies whose place another one is about to take
LOOKS = 100  # at a place that is empty between two renames, a hundredth of a second apart


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
        before = _inode(folder)
        try:
            return artifacts.read(folder, *kinds)
        except (OSError, TunelineError):
            if not _is_there(store, sha256) or _inode(folder) == before:
                raise


def _inode(folder: Path) -> int | None:
    return folder.stat().st_ino if folder.exists() else None


def _is_there(store: Path, sha256: str) -> bool:
    """Whether the store has it. Between the two renames of a job that replaces it, or that was killed there, it is waited for."""
    manifest = store / sha256 / artifacts.MANIFEST
    for _ in range(LOOKS):
        if manifest.exists() or not any((store / "unfinished").glob(f"{JOB}.*/{ASIDE}/*/{sha256}")):
            break
        tidy(store)
        time.sleep(0.01)
    return manifest.exists()


def workplace(store: Path) -> AbstractContextManager[Path]:
    """A folder in the store for this job alone, removed at the end. What killed jobs left there goes first."""
    return jobs.private_folder(store / "unfinished", JOB, rescue=partial(_put_back, store))


def tidy(store: Path) -> None:
    """Remove what killed jobs left in the store."""
    jobs.sweep(store / "unfinished", JOB, rescue=partial(_put_back, store))


def _put_back(store: Path, job: Path) -> None:
    """An artifact that a job had moved aside goes back where no other has taken its place yet: the job may have been killed before."""
    for old in (job / ASIDE).glob("*/*"):
        with suppress(OSError):
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
    with workplace(store) as own:
        artifact = adopt(store, build(own / f"{stage}-{key[:16]}"))
    note = _note(store, stage, key)
    note.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_atomically(note, artifact.sha256 + "\n")
    return artifact, False


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
    except ArtifactDamagedError:
        return None


def _says(artifact: Artifact) -> tuple[object, ...]:
    """What an artifact says beside its content."""
    manifest = artifact.manifest
    return manifest.inputs, manifest.config, manifest.summary
