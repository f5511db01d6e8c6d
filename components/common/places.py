"""Where things lie: the store of finished artifacts, the state of unfinished work, the cache of base models.

A step finds them in its environment, because a path in a step's parameters would make its cache key differ from machine to machine.

A store is a folder, or a bucket with a folder here that holds copies of what was read from it or written to it. What the bucket has is what
there is: a copy whose manifest is another one by now is fetched again, and one that was damaged as well.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlparse

from components.common import artifacts, bucket_store, buckets, jobs, liveness
from components.common.artifacts import Artifact, Manifest
from components.common.errors import ArtifactDamagedError, ConfigurationError, InterruptedRunError, TunelineError
from components.common.progress import Reporter, Silent

DEFAULT_WORKDIR = ".tuneline"
STORE = "store:"  # before a digest: what lies in the artifact store under it, wherever that is
IDENTITY = "id"  # the file in a workdir that tells it from others
JOB = "job"  # a job's folder in the store is unfinished/job.<where>.<process>.<digits>
ASIDE = "aside"  # where in it an artifact lies whose place another one is about to take
TOGETHER = "together.json"  # in a folder of the state: a list of others there, as paths in the state, that are of use only with it
GONE = "gone"  # where in it an artifact lies that left the store
USED_EVERY = 900.0  # seconds between two notes in a bucket that an artifact is in use
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
        """Finished artifacts by content digest (TUNELINE_STORE on a cluster); of a store in a bucket, the folder with the copies here.

        Raises ConfigurationError for a TUNELINE_STORE that is neither a folder nor s3://bucket/prefix.
        """
        named = os.environ.get("TUNELINE_STORE") or str(self.root / "store")
        return _copies(named) if "://" in named else Path(named)

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


def identity(work: Workdir, *, make: bool = False) -> str:
    """What tells a workdir from every other, also from one at the same place of another machine: a text in its file `id`, which is made
    with `make` where it is missing. "" where there is none, or none may be made."""
    file = work.root / IDENTITY
    with suppress(OSError):
        if make and not file.exists():
            work.root.mkdir(parents=True, exist_ok=True)
            draft = work.root / f".{IDENTITY}.{jobs.mark()}"
            try:
                draft.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
                with suppress(FileExistsError):
                    os.link(draft, file)  # fails where another job was first, and is whole as soon as it is there
            finally:
                draft.unlink(missing_ok=True)
        return file.read_text(encoding="utf-8").strip()
    return ""


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


def _copies(address: str) -> Path:
    """Where what is read from a bucket is kept, which may be emptied when nobody works with it."""
    if not buckets.ADDRESS.fullmatch(address):
        raise ConfigurationError(
            f"TUNELINE_STORE: {re.sub('//.*@', '//…@', address)} is no store",
            hint="Name a folder, or s3://bucket/prefix; keys and the service's address come from the environment, never from here.",
        )
    name = address.rstrip("/").removeprefix(buckets.S3)
    return cache_dir() / "stores" / f"{re.sub('[^a-z0-9.]+', '-', name.lower())[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _bucket(store: Path) -> str:
    """The address of the store that a folder holds copies of; "" for a store that is the folder itself."""
    named = os.environ.get("TUNELINE_STORE", "").rstrip("/")
    return named if "://" in named and store == _copies(named) else ""


def address(store: Path) -> str:
    """Where a store is, as people are told of it."""
    return _bucket(store) or str(store)


def uri(artifact: Artifact) -> str:
    """Where an artifact lies, for whoever looks for it from another machine."""
    bucket = _bucket(artifact.path.parent)
    return f"{bucket}/{artifact.sha256}" if bucket else artifact.path.absolute().as_uri()


def uri_of(store: Path, sha256: str) -> str:
    """Where a store has, or would have, an artifact with this identity."""
    bucket = _bucket(store)
    return f"{bucket}/{sha256}" if bucket else (store / sha256).absolute().as_uri()


def folder_of(uri: str) -> Path | None:
    """The folder that a recorded URI leads to, which may be gone; what lies in a bucket is fetched. None where it names no such place.

    Raises ArtifactDamagedError, EngineMissingError.
    """
    if uri.startswith("file://"):
        folder = Path(unquote(urlparse(uri).path))
        _is_marked(folder)
        return folder
    bucket, _, sha256 = uri.rpartition("/")
    if not buckets.ADDRESS.fullmatch(bucket):
        return None
    bucket_store.use(bucket, sha256)
    said = bucket_store.manifest(bucket, sha256)
    return _fetched(_copies(bucket), bucket, sha256, said, (), Silent()).path if said else None


def beside(uri: str, sha256: str) -> str:
    """The URI of another artifact in the store that this URI leads into; "" where it leads into none."""
    if uri.startswith("file://"):
        return (Path(unquote(urlparse(uri).path)).parent / sha256).as_uri()
    bucket = uri.rpartition("/")[0]
    return f"{bucket}/{sha256}" if buckets.ADDRESS.fullmatch(bucket) else ""


def is_here(store: Path, sha256: str) -> bool:
    """Whether an artifact, or the copy of one, lies on this machine."""
    return (store / sha256 / artifacts.MANIFEST).exists()


def holds(store: Path, sha256: str) -> bool:
    """Whether the store has the artifact. Its files are not checked. Raises EngineMissingError for a bucket that does not answer."""
    bucket = _bucket(store)
    return bucket_store.manifest(bucket, sha256) is not None if bucket else is_here(store, sha256)


def manifest(store: Path, sha256: str) -> Manifest | None:
    """What an artifact's manifest says, its files unchecked; None where the store has none. Raises ArtifactDamagedError."""
    if bucket := _bucket(store):
        said = bucket_store.manifest(bucket, sha256)
        return bucket_store.parsed(bucket, sha256, said) if said else None
    return artifacts.read_manifest(store / sha256) if is_here(store, sha256) else None


def listed(store: Path) -> list[str]:
    """The digests of the finished artifacts in a store, sorted."""
    if bucket := _bucket(store):
        return [sha256 for sha256 in bucket_store.listed(bucket) if bucket_store.manifest(bucket, sha256) is not None]
    return [folder.name for folder in jobs.listed(store) if (folder / artifacts.MANIFEST).exists()]


def stored(store: Path, sha256: str, *kinds: str, reporter: Reporter | None = None) -> Artifact:
    """The artifact with this identity, checked. Raises ArtifactDamagedError when it is not in the store or not what it says."""
    if bucket := _bucket(store):
        bucket_store.use(bucket, sha256)
        said = bucket_store.manifest(bucket, sha256)
        if said is None:
            raise _missing(store, sha256)
        return _fetched(store, bucket, sha256, said, kinds, reporter or Silent())
    return _in_folder(store, sha256, kinds)


def _missing(store: Path, sha256: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(f"{sha256} is not in the artifact store {address(store)}", hint="Run the stage that makes it again.")


def _fetched(store: Path, bucket: str, sha256: str, said: bytes, kinds: tuple[str, ...], reporter: Reporter) -> Artifact:
    """The copy here of what the bucket has, with the manifest that stands there now."""
    if copy := _copy_of(store, sha256, said):
        return artifacts.of_kind(copy, kinds)
    with workplace(store) as own:
        found = bucket_store.fetch(bucket, sha256, said, own / "fetched", store / sha256, reporter)
        kept = jobs.settle(found.path, store / sha256, partial(_copy_of, store, sha256, said), own / ASIDE)
    return artifacts.of_kind(kept or Artifact(store / sha256, found.manifest), kinds)


def _copy_of(store: Path, sha256: str, said: bytes) -> Artifact | None:
    """The whole copy that has this manifest."""
    try:
        same = (store / sha256 / artifacts.MANIFEST).read_bytes() == said
        return _in_folder(store, sha256, ()) if same else None
    except (TunelineError, OSError):  # damaged since, or another job just moved it aside
        return None


def _in_folder(store: Path, sha256: str, kinds: tuple[str, ...]) -> Artifact:
    folder = store / sha256
    while True:
        if not _is_there(store, sha256):
            raise _missing(store, sha256)
        if _is_marked(folder):
            break
    found = _read(store, sha256, kinds)
    if found.sha256 != sha256:
        raise ArtifactDamagedError(f"{folder} holds {found.sha256}", hint=f"Remove {folder} and run the stage that makes it again.")
    return found


def _is_marked(folder: Path) -> bool:
    """Set the manifest's time of change, which says when the artifact was used last. False where there is none: whoever takes an artifact
    out of the store looks at that time after it was moved away, so that either the mark is seen or the artifact is missed here."""
    try:
        os.utime(folder / artifacts.MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass  # it is another user's, or the file system is read-only: the time stays that of its making
    return True


def mark_used(store: Path, sha256: str) -> None:
    """Say that an artifact is in use now, where the store has it."""
    if bucket := _bucket(store):
        bucket_store.use(bucket, sha256)
    _is_marked(store / sha256)


@contextmanager
def in_use(store: Path, sha256: str) -> Iterator[None]:
    """Say again and again that an artifact is in use."""
    with ExitStack() as both:
        both.enter_context(liveness.beating(store / sha256 / artifacts.MANIFEST))
        if bucket := _bucket(store):
            both.enter_context(liveness.repeating(partial(bucket_store.note_use, bucket, sha256), USED_EVERY))
        yield


@contextmanager
def using(*named: Path | str) -> Iterator[None]:
    """Say again and again that what these paths lead to is in use, where it lies in a store; others are nobody's business."""
    with ExitStack() as all_:
        for folder in filter(None, map(_in_a_store, named)):
            mark_used(folder.parent, folder.name)
            all_.enter_context(in_use(folder.parent, folder.name))
        yield


def _in_a_store(named: Path | str) -> Path | None:
    """The artifact's folder in a store that a path leads to or into, or that store:<digest> names."""
    if str(named).startswith(STORE):
        path = Workdir.from_environment().store / str(named).removeprefix(STORE)
    else:
        path = Path(named).absolute().resolve()
    homes = (one for one in (path, *path.parents) if re.fullmatch("[0-9a-f]{64}", one.name))
    return next((one for one in homes if is_here(one.parent, one.name)), None)


def unused_for(folder: Path) -> float:
    """Seconds since the artifact in a folder was used, by its file server's clock; without a manifest, since anything in it changed.

    It is opened for that: over NFS a look alone may be answered from what was seen a minute ago. Raises FileNotFoundError.
    """
    try:
        with (folder / artifacts.MANIFEST).open("rb") as file:
            used = os.fstat(file.fileno()).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        used = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return liveness.now(folder.parent) - used


def remove(store: Path, sha256: str, unused: float) -> bool:
    """Take an artifact out of the store, whole, unless it was used within so many seconds. Returns whether it is gone.

    In a folder it is moved away by one rename, then looked at, and put back where somebody used it meanwhile; killed before that it is put
    back by the next job, and killed after it what is left is swept up. In a bucket its manifest goes first. Raises OSError where something
    of it cannot be deleted, though it is out of the store by then.
    """
    if bucket := _bucket(store):
        return bucket_store.remove(bucket, sha256, unused)
    return remove_copy(store, sha256, unused)


def remove_copy(store: Path, sha256: str, unused: float) -> bool:
    """As `remove`, of the copy here where the store is a bucket."""
    with workplace(store) as own, suppress(FileNotFoundError):  # another job took it, or waited for it and put it back
        if unused_for(store / sha256) < unused:
            return False
        moved = jobs.put_aside(store / sha256, own / ASIDE)
        if unused_for(moved) < unused:
            return False
        moved.rename(own / GONE)  # from here on nobody puts it back
        shutil.rmtree(own / GONE)
        return True
    return False


def unused_in_bucket(store: Path) -> dict[str, tuple[int, float]] | None:
    """What lies in a store that is a bucket, finished or not: by digest the bytes, and the seconds since it was used. None: a folder."""
    bucket = _bucket(store)
    return bucket_store.unused(bucket) if bucket else None


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


def produce(
    store: Path, stage: str, key: str, build: Callable[[Path], Artifact], reporter: Reporter | None = None
) -> tuple[Artifact, bool]:
    """The stored artifact for this key, built first where it is not there yet. Returns it and whether it was there.

    `key` is the digest of everything the result depends on. `build` fills the folder it is given, which is this job's own, and publishes
    it; the folder is then moved to its content address by a rename inside the store, and written to the bucket where the store is one. The
    note that joins key and digest is written last, so a process killed at any point only repeats work.
    """
    tidy(store)
    known = noted(store, stage, key)
    if known:
        return stored(store, known, reporter=reporter), True
    try:
        with workplace(store) as own:
            artifact = adopt(store, build(own / f"{stage}-{key[:16]}"), reporter)
    except InterruptedRunError:
        raise
    except Exception:  # another job may have made it meanwhile, and removed the state that both worked on
        if known := noted(store, stage, key):
            return stored(store, known, reporter=reporter), True
        raise
    if artifact.manifest.lasting:
        write_note(store, f"keys/{stage}/{key}", artifact.sha256 + "\n")
    return artifact, False


def unfinished(store: Path) -> tuple[list[Path], list[Path]]:
    """The artifacts that jobs have moved aside, which is for a moment unless they were killed; and the jobs' folders that hold more."""
    tidy(store)
    aside = [old for job in _jobs(store) for old in _aside(job)]
    return aside, [job for job in _jobs(store) if any(path.name != ASIDE for path in jobs.listed(job))]


def noted(store: Path, stage: str, key: str, *, use: bool = True) -> str | None:
    """The digest of the stored artifact that was made under this key, now marked as used if it is to be; None where there is none. Its
    files are not checked."""
    sha256 = (read_note(store, f"keys/{stage}/{key}") or "").strip()
    if sha256 and use:
        mark_used(store, sha256)
    return sha256 if sha256 and holds(store, sha256) else None


def write_note(store: Path, name: str, text: str) -> None:
    """Keep a small text in the store, under a name like keys/<stage>/<key>."""
    if bucket := _bucket(store):
        buckets.write(f"{bucket}/{name}", text)
        return
    (store / name).parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_atomically(store / name, text)


def read_note(store: Path, name: str) -> str | None:
    """A small text that the store keeps; None where there is none."""
    if bucket := _bucket(store):
        kept = buckets.read(f"{bucket}/{name}")
        return kept.decode("utf-8", errors="replace") if kept is not None else None
    try:
        return (store / name).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def notes(store: Path, folder: str) -> list[str]:
    """The names of the notes that the store keeps in a folder of notes, sorted."""
    if bucket := _bucket(store):
        return sorted(buckets.sizes(f"{bucket}/{folder}"))
    return [path.name for path in jobs.listed(store / folder) if path.is_file()]


def remove_note(store: Path, name: str) -> None:
    """Remove a note; one that is not there is none to remove."""
    if bucket := _bucket(store):
        buckets.delete(f"{bucket}/{name}")
    else:
        (store / name).unlink(missing_ok=True)


def adopt(store: Path, built: Artifact, reporter: Reporter | None = None) -> Artifact:
    """Move a finished artifact to store/<content_sha256>, whatever other jobs put there at the same time.

    Where the same content already lies intact and says the same, that is kept and this is dropped. Where this one says something new (a
    package that is proven now, other inputs), or that one is damaged, it takes the place: the old one is moved aside by the rename
    before, and comes back should this job be killed between the two. Where the store is a bucket, that has it too when this returns.
    """
    settled = _settled(store, built)
    if bucket := _bucket(store):
        bucket_store.upload(bucket, settled, reporter or Silent())
    return settled


def _settled(store: Path, built: Artifact) -> Artifact:
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
        return _in_folder(store, sha256, ())
    except (TunelineError, FileNotFoundError):  # not what it says, or another job just moved it aside
        return None


def _says(artifact: Artifact) -> tuple[object, ...]:
    """What an artifact says beside its content."""
    manifest = artifact.manifest
    return manifest.inputs, manifest.config, manifest.summary
