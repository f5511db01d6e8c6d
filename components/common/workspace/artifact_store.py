"""The workdir and its artifact store.

Environment variables locate the folders of a workdir. Paths in the parameters of a step would make its cache key depend
on the machine.
"""

# A store is a folder, or a bucket with a local folder of copies. The bucket is authoritative: a copy that is damaged,
# or whose manifest differs from the bucket's manifest, is fetched again.

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlparse

from components.common.artifacts import artifact_folder, object_storage
from components.common.artifacts.artifact_folder import Artifact, Manifest
from components.common.runtime import filesystem
from components.common.runtime.errors import (
    ArtifactDamagedError,
    ConfigurationError,
    InterruptedRunError,
    TunelineError,
)
from components.common.runtime.reporters import Reporter, SilentReporter
from components.common.workspace import job_folders, liveness, s3_store

DEFAULT_WORKDIR = ".tuneline"
STORE_PREFIX = "store:"  # prefix of a digest: the artifact in the configured store
IDENTITY_FILENAME = "id"  # in a workdir: its unique ID
JOB_FOLDER_PREFIX = "job"  # unfinished/job.<owner tag> in the store
ASIDE_FOLDER = "aside"  # in a job folder: artifacts that the job replaces or removes
REMOVED_FOLDER = "gone"  # in a job folder: an artifact that was removed from the store
LINKED_STATE_FILENAME = "together.json"  # in a state folder: paths of state folders that depend on it
USE_RECORD_INTERVAL_SECONDS = 900.0  # for an artifact in a bucket
POLL_INTERVAL_SECONDS = 0.01  # for an artifact that is absent between two renames
MAX_POLLS = 100
MAX_EMPTY_POLLS = 3  # a poll is not atomic: another job may move the artifact between two folders


@dataclass(frozen=True)
class Workdir:
    """The workdir: tracking store, data repository, artifact store, state, and a folder per run."""

    root: Path

    @staticmethod
    def from_environment() -> Workdir:
        """Return the workdir at TUNELINE_WORKDIR, or .tuneline in the current folder."""
        return Workdir(Path(os.environ.get("TUNELINE_WORKDIR", DEFAULT_WORKDIR)).absolute())

    @property
    def store(self) -> Path:
        """The folder of artifacts by content digest (TUNELINE_STORE on a cluster). For a bucket: the local copies.

        Raises:
            ConfigurationError: TUNELINE_STORE is neither a folder nor s3://bucket/prefix.
        """
        configured = os.environ.get("TUNELINE_STORE") or str(self.root / "store")
        return _get_copies_folder(configured) if "://" in configured else Path(configured)

    @property
    def state(self) -> Path:
        """The folder of checkpoints and other unfinished work (TUNELINE_STATE on a cluster)."""
        return Path(os.environ.get("TUNELINE_STATE") or self.root / "state")

    @property
    def runs(self) -> Path:
        """The folder of runs; each run has a folder with its events, logs and report."""
        return self.root / "runs"

    @property
    def tracking_uri(self) -> str:
        """MLFLOW_TRACKING_URI. Default: the SQLite store of this workdir."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.root / 'mlflow.db'}"


def enter_workdir(workdir: Path, tracking_uri: str | None = None) -> Workdir:
    """Set the environment variables of a workdir for this process and its children.

    Args:
        workdir: folder of the store, state, tracking and runs.
        tracking_uri: URI of the MLflow server. "": the workdir's tracking URI. None: MLFLOW_TRACKING_URI is unchanged.
    """
    os.environ["TUNELINE_WORKDIR"] = str(workdir.absolute())
    work = Workdir.from_environment()
    if tracking_uri is not None:
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri or work.tracking_uri
    return work


def get_workdir_id(work: Workdir, *, create: bool = False) -> str:
    """Return the unique ID in the workdir's file `id`; "" if the file is missing.

    The ID distinguishes workdirs at the same path of different machines.

    Args:
        create: whether to create a missing file.
    """
    file = work.root / IDENTITY_FILENAME
    with suppress(OSError):
        if create and not file.exists():
            work.root.mkdir(parents=True, exist_ok=True)
            draft = work.root / f".{IDENTITY_FILENAME}.{job_folders.create_owner_tag()}"
            try:
                draft.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
                with suppress(FileExistsError):
                    filesystem.link(draft, file)  # atomic; fails if another job was first
            finally:
                draft.unlink(missing_ok=True)
        return filesystem.read_text(file).strip()
    return ""


@contextmanager
def override_state_folder(folder: Path) -> Iterator[None]:
    """Set TUNELINE_STATE to another folder within the block, so that a dry run writes no state to the workdir."""
    before = os.environ.get("TUNELINE_STATE")
    os.environ["TUNELINE_STATE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TUNELINE_STATE")
        if before is not None:
            os.environ["TUNELINE_STATE"] = before


def get_cache_folder() -> Path:
    """Return the cache folder, shared by all workdirs: TUNELINE_CACHE. Default: tuneline in the user's cache folder."""
    if explicit := os.environ.get("TUNELINE_CACHE"):
        return Path(explicit).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tuneline"


def _get_copies_folder(address: str) -> Path:
    """Return the folder of local copies of a bucket. It may be deleted when no job uses it."""
    if not object_storage.S3_ADDRESS_PATTERN.fullmatch(address):
        raise ConfigurationError(
            f"TUNELINE_STORE is {re.sub('//.*@', '//…@', address)}; expected a folder or s3://bucket/prefix",
            hint="Set TUNELINE_STORE to a folder or s3://bucket/prefix, and the S3 keys and endpoint in AWS_* variables.",
        )
    name = address.rstrip("/").removeprefix(object_storage.S3_SCHEME)
    readable = re.sub("[^a-z0-9.]+", "-", name.lower())[:60]
    return get_cache_folder() / "stores" / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _get_bucket(store: Path) -> str:
    """Return the address of the bucket whose copies are in `store`; "" if the store is a folder."""
    address = os.environ.get("TUNELINE_STORE", "").rstrip("/")
    return address if "://" in address and store == _get_copies_folder(address) else ""


def describe_store(store: Path) -> str:
    """Return the store's address for messages."""
    return _get_bucket(store) or str(store)


def get_artifact_uri(artifact: Artifact) -> str:
    """Return the artifact's URI, valid on every machine that has access to the store."""
    bucket = _get_bucket(artifact.path.parent)
    return f"{bucket}/{artifact.sha256}" if bucket else artifact.path.absolute().as_uri()


def build_artifact_uri(store: Path, sha256: str) -> str:
    """Return the URI in the store of an artifact with this digest. The artifact does not have to exist."""
    bucket = _get_bucket(store)
    return f"{bucket}/{sha256}" if bucket else (store / sha256).absolute().as_uri()


def resolve_artifact_uri(uri: str) -> Path | None:
    """Return the local folder of a recorded URI, after fetching an artifact in a bucket.

    Returns:
        The folder, which may no longer exist; None if the URI does not refer to an artifact store.

    Raises:
        ArtifactDamagedError: the artifact in the bucket is damaged.
        EngineMissingError: the bucket does not answer.
    """
    if uri.startswith("file://"):
        folder = Path(unquote(urlparse(uri).path))
        _touch_manifest(folder)
        return folder
    bucket, _, sha256 = uri.rpartition("/")
    if not object_storage.S3_ADDRESS_PATTERN.fullmatch(bucket):
        return None
    artifact = _fetch(_get_copies_folder(bucket), bucket, sha256, (), SilentReporter())
    return artifact.path if artifact else None


def build_sibling_uri(uri: str, sha256: str) -> str:
    """Return the URI of another artifact in the same store; "" if `uri` does not refer to an artifact store."""
    if uri.startswith("file://"):
        return (Path(unquote(urlparse(uri).path)).parent / sha256).as_uri()
    bucket = uri.rpartition("/")[0]
    return f"{bucket}/{sha256}" if object_storage.S3_ADDRESS_PATTERN.fullmatch(bucket) else ""


def get_store_address(uri: str) -> str:
    """Return the store of an artifact's URI as a value of TUNELINE_STORE; "" if `uri` does not refer to a store."""
    if uri.startswith("file://"):
        return str(Path(unquote(urlparse(uri).path)).parent)
    bucket = uri.rpartition("/")[0]
    return bucket if object_storage.S3_ADDRESS_PATTERN.fullmatch(bucket) else ""


def has_local_copy(store: Path, sha256: str) -> bool:
    """Return whether the artifact or a copy of it is on this machine."""
    return (store / sha256 / artifact_folder.MANIFEST_FILENAME).exists()


def has_artifact(store: Path, sha256: str) -> bool:
    """Return whether the store has the artifact. Does not verify its files.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    bucket = _get_bucket(store)
    return s3_store.read_manifest_bytes(bucket, sha256) is not None if bucket else has_local_copy(store, sha256)


def read_manifest(store: Path, sha256: str) -> Manifest | None:
    """Return an artifact's manifest; None if the artifact is not in the store.

    Raises:
        ArtifactDamagedError: the manifest is unreadable.
        EngineMissingError: the bucket does not answer.
    """
    if bucket := _get_bucket(store):
        content = s3_store.read_manifest_bytes(bucket, sha256)
        return s3_store.parse_manifest(bucket, sha256, content) if content else None
    return artifact_folder.read_manifest(store / sha256) if has_local_copy(store, sha256) else None


def list_artifacts(store: Path) -> list[str]:
    """Return the sorted digests of the finished artifacts.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    bucket = _get_bucket(store)
    names = s3_store.list_artifacts(bucket) if bucket else [path.name for path in job_folders.list_folder(store)]
    return [name for name in names if has_artifact(store, name)]


def load_artifact(store: Path, sha256: str, *kinds: str, reporter: Reporter | None = None) -> Artifact:
    """Return the artifact with this digest, with every file verified.

    Args:
        kinds: accepted kinds; without `kinds`, every kind is accepted.

    Raises:
        ArtifactDamagedError: the artifact is not in the store, or a file differs from its manifest.
        UsageError: the artifact's kind is not in `kinds`.
        EngineMissingError: the bucket does not answer.
    """
    bucket = _get_bucket(store)
    if not bucket:
        return _load_from_folder(store, sha256, kinds)
    artifact = _fetch(store, bucket, sha256, kinds, reporter or SilentReporter())
    if artifact is None:
        raise _missing_error(store, sha256)
    return artifact


def _missing_error(store: Path, sha256: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"{sha256} is not in the artifact store {describe_store(store)}",
        hint="Rerun the stage that creates the artifact.",
    )


def _fetch(store: Path, bucket: str, sha256: str, kinds: tuple[str, ...], reporter: Reporter) -> Artifact | None:
    """Return the local copy of an artifact in the bucket; fetch the artifact if there is no intact copy."""
    s3_store.claim_use(bucket, sha256)
    manifest = s3_store.read_manifest_bytes(bucket, sha256)
    if manifest is None:
        return None
    find_copy = partial(_find_copy, store, sha256, manifest)
    artifact = find_copy()
    if artifact is None:
        with job_folder(store) as own:
            fetched = s3_store.fetch_artifact(bucket, sha256, manifest, own / "fetched", store / sha256, reporter)
            existing = job_folders.move_into_place(fetched.path, store / sha256, find_copy, own / ASIDE_FOLDER)
        artifact = existing or Artifact(store / sha256, fetched.manifest)
    return artifact_folder.require_kind(artifact, kinds)


def _find_copy(store: Path, sha256: str, manifest: bytes) -> Artifact | None:
    """Return the intact local copy that has this manifest."""
    try:
        is_same = filesystem.read_bytes(store / sha256 / artifact_folder.MANIFEST_FILENAME) == manifest
        return _load_from_folder(store, sha256, ()) if is_same else None
    except (TunelineError, OSError):  # damaged, or just moved by another job
        return None


def _load_from_folder(store: Path, sha256: str, kinds: tuple[str, ...]) -> Artifact:
    folder = store / sha256
    while True:
        if not _wait_for_artifact(store, sha256):
            raise _missing_error(store, sha256)
        if _touch_manifest(folder):
            break
    while True:
        before = _get_folder_version(folder)
        try:
            artifact = artifact_folder.read(folder, *kinds)
            break
        except (OSError, TunelineError):  # retry if another job has replaced the artifact during the read
            filesystem.revalidate(store)  # with default options, an NFS client may have read the replaced folder
            if not _wait_for_artifact(store, sha256) or before == _get_folder_version(folder):
                raise
    if artifact.sha256 != sha256:
        raise ArtifactDamagedError(
            f"the artifact in {folder} has the digest {artifact.sha256}; expected {sha256}",
            hint=f"Delete {folder}; the next run of the stage creates the artifact again.",
        )
    return artifact


def _touch_manifest(folder: Path) -> bool:
    """Record the use of an artifact as its manifest's modification time; return False if the manifest is missing."""
    # `remove_artifact` reads this time after it has moved the artifact: it detects the use, or this call fails.
    try:
        os.utime(folder / artifact_folder.MANIFEST_FILENAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass  # another user's file, or a read-only file system
    return True


def mark_used(store: Path, sha256: str) -> None:
    """Record that an artifact is in use now, if the artifact is in the store."""
    if bucket := _get_bucket(store):
        s3_store.claim_use(bucket, sha256)
    _touch_manifest(store / sha256)


@contextmanager
def keep_in_use(store: Path, sha256: str) -> Iterator[None]:
    """Record periodically, within the block, that an artifact is in use."""
    with ExitStack() as contexts:
        contexts.enter_context(liveness.heartbeat(store / sha256 / artifact_folder.MANIFEST_FILENAME))
        if bucket := _get_bucket(store):
            record = partial(s3_store.record_use, bucket, sha256)
            contexts.enter_context(liveness.call_periodically(record, USE_RECORD_INTERVAL_SECONDS))
        yield


@contextmanager
def keep_paths_in_use(*paths: Path | str) -> Iterator[None]:
    """Record periodically, within the block, that the artifacts of these paths are in use.

    Args:
        paths: paths within artifact folders, or store:<digest>. Other paths are ignored.
    """
    with ExitStack() as contexts:
        for path in paths:
            folder = Path(path).resolve()
            if str(path).startswith(STORE_PREFIX):
                folder = Workdir.from_environment().store / str(path).removeprefix(STORE_PREFIX)
            for candidate in (folder, *folder.parents):
                store, sha256 = candidate.parent, candidate.name
                if re.fullmatch("[0-9a-f]{64}", sha256) and has_local_copy(store, sha256):
                    mark_used(store, sha256)
                    contexts.enter_context(keep_in_use(store, sha256))
                    break
        yield


def seconds_since_use(folder: Path) -> float:
    """Return the seconds since an artifact was used; for a folder without a manifest, since its last change.

    The file server's clock measures the time.

    Raises:
        FileNotFoundError: the folder does not exist.
    """

    def read_manifest_time() -> float:
        # Opening the manifest revalidates its attributes; an NFS client may cache the result of `stat` for a minute.
        with (folder / artifact_folder.MANIFEST_FILENAME).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime

    try:
        used = filesystem.retry_stale(read_manifest_time)
    except (FileNotFoundError, NotADirectoryError):
        used = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return liveness.get_file_server_time(folder.parent) - used


def remove_artifact(store: Path, sha256: str, unused: float) -> bool:
    """Remove an artifact unless it was used within the last `unused` seconds; return whether it was removed.

    In a folder, the artifact is moved aside by one rename, and restored if it was used since the first check. If this
    process is killed before the second check, the next job restores the artifact. If it is killed later, the next job
    deletes the remaining files. In a bucket, the manifest is deleted first.

    Raises:
        OSError: a file of the removed artifact cannot be deleted.
        EngineMissingError: the bucket does not answer.
    """
    if bucket := _get_bucket(store):
        return s3_store.remove_artifact(bucket, sha256, unused)
    return remove_local_copy(store, sha256, unused)


def remove_local_copy(store: Path, sha256: str, unused: float) -> bool:
    """Remove the local folder of an artifact as `remove_artifact` does, even if the store is a bucket.

    Raises:
        OSError: a file of the removed artifact cannot be deleted.
    """
    with job_folder(store) as own, suppress(FileNotFoundError):  # another job has removed or restored the artifact
        if seconds_since_use(store / sha256) < unused:
            return False
        moved = job_folders.move_aside(store / sha256, own / ASIDE_FOLDER)
        if seconds_since_use(moved) < unused:
            return False
        filesystem.rename(moved, own / REMOVED_FOLDER)  # after this rename, no job restores the artifact
        filesystem.remove_tree(own / REMOVED_FOLDER)
        return True
    return False


def measure_bucket_idle_times(store: Path) -> dict[str, tuple[int, float]] | None:
    """Return {digest: (bytes, seconds since the last use)} of all artifacts in the bucket, even unfinished artifacts.

    Returns None if the store is a folder.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    bucket = _get_bucket(store)
    return s3_store.measure_idle_times(bucket) if bucket else None


def _get_folder_version(folder: Path) -> tuple[int, int] | None:
    """Return a value that differs between an artifact and its replacement; the inode alone may be reused."""
    try:
        return folder.stat().st_ino, (folder / artifact_folder.MANIFEST_FILENAME).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def _wait_for_artifact(store: Path, sha256: str) -> bool:
    """Return whether the store has an artifact; wait for a job that replaces it and is between its two renames."""
    # After a second the artifact is put back, in case a job on another host has crashed. A running job then finds the
    # path occupied and moves the artifact aside again.
    manifest, empty_polls = store / sha256 / artifact_folder.MANIFEST_FILENAME, 0
    for _ in range(MAX_POLLS):
        empty_polls += not _find_moved_aside(store, sha256)
        if manifest.exists() or empty_polls == MAX_EMPTY_POLLS:
            return manifest.exists()
        remove_abandoned_jobs(store)
        time.sleep(POLL_INTERVAL_SECONDS)
        filesystem.revalidate(store)
    _put_back(store, _find_moved_aside(store, sha256))
    return manifest.exists()


def _find_moved_aside(store: Path, sha256: str) -> list[Path]:
    return [folder for job in _list_jobs(store) for folder in _list_moved_aside(job) if folder.name == sha256]


def _list_jobs(store: Path) -> list[Path]:
    jobs = job_folders.list_folder(store / "unfinished")
    return [job for job in jobs if job.name.startswith(f"{JOB_FOLDER_PREFIX}.")]


def _list_moved_aside(job: Path) -> list[Path]:
    filesystem.revalidate(job)  # the job may have created the folder after a previous look-up
    parents = job_folders.list_folder(job / ASIDE_FOLDER)
    return [folder for parent in parents for folder in job_folders.list_folder(parent)]


def job_folder(store: Path) -> AbstractContextManager[Path]:
    """Create a private folder of this job in the store, removed at the end. Removes folders of killed jobs first."""
    return job_folders.private_folder(store / "unfinished", JOB_FOLDER_PREFIX, rescue=partial(_rescue, store))


def remove_abandoned_jobs(store: Path) -> None:
    """Remove the job folders of killed jobs."""
    job_folders.remove_abandoned_folders(store / "unfinished", JOB_FOLDER_PREFIX, rescue=partial(_rescue, store))


def _rescue(store: Path, job: Path) -> None:
    """Restore the artifacts that a killed job moved aside, unless they have been replaced."""
    _put_back(store, _list_moved_aside(job))


def _put_back(store: Path, folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # a rename never replaces a folder that is not empty
            filesystem.rename(folder, store / folder.name)


def get_or_build(
    store: Path, stage: str, key: str, build: Callable[[Path], Artifact], reporter: Reporter | None = None
) -> tuple[Artifact, bool]:
    """Return the stored artifact for this key, or build and store the artifact.

    The note that maps the key to the digest is written last, so the call can be repeated after the process was killed.

    Args:
        key: digest of all inputs of the result.
        build: builds the artifact in the given folder, which is private to this job.

    Returns:
        The artifact, and whether it was already stored.

    Raises:
        ArtifactDamagedError: a file of the stored artifact has changed.
        EngineMissingError: the bucket does not answer.
    """
    remove_abandoned_jobs(store)
    sha256 = find_by_key(store, stage, key)
    if sha256:
        return load_artifact(store, sha256, reporter=reporter), True
    try:
        with job_folder(store) as own:
            artifact = add_artifact(store, build(own / f"{stage}-{key[:16]}"), reporter)
    except InterruptedRunError:
        raise
    except Exception:  # another job may have finished the work and removed the state that both used
        if sha256 := find_by_key(store, stage, key):
            return load_artifact(store, sha256, reporter=reporter), True
        raise
    if artifact.manifest.is_reusable:
        write_note(store, f"keys/{stage}/{key}", artifact.sha256 + "\n")
    return artifact, False


def list_unfinished(store: Path) -> tuple[list[Path], list[Path]]:
    """Return the artifacts that jobs have moved aside, and the job folders with other files."""
    remove_abandoned_jobs(store)
    moved_aside = [folder for job in _list_jobs(store) for folder in _list_moved_aside(job)]
    return moved_aside, [
        job for job in _list_jobs(store) if any(path.name != ASIDE_FOLDER for path in job_folders.list_folder(job))
    ]


def find_by_key(store: Path, stage: str, key: str, *, use: bool = True) -> str | None:
    """Return the digest of the artifact stored under this cache key, or None. Does not verify its files.

    Args:
        use: whether to record the artifact as in use.
    """
    sha256 = (read_note(store, f"keys/{stage}/{key}") or "").strip()
    if sha256 and use:
        mark_used(store, sha256)
    return sha256 if sha256 and has_artifact(store, sha256) else None


def write_note(store: Path, name: str, text: str) -> None:
    """Write a note, a small text with a name such as keys/<stage>/<key>, to the store."""
    if bucket := _get_bucket(store):
        object_storage.write_object(f"{bucket}/{name}", text)
        return
    (store / name).parent.mkdir(parents=True, exist_ok=True)
    artifact_folder.write_atomically(store / name, text)


def read_note(store: Path, name: str) -> str | None:
    """Return a note's text; None if the note does not exist."""
    if bucket := _get_bucket(store):
        content = object_storage.read_object(f"{bucket}/{name}")
        return content.decode("utf-8", errors="replace") if content is not None else None
    try:
        return filesystem.read_text(store / name, errors="replace")
    except FileNotFoundError:
        return None


def list_notes(store: Path, folder: str) -> list[str]:
    """Return the sorted names of the notes in a folder."""
    if bucket := _get_bucket(store):
        return sorted(object_storage.list_sizes(f"{bucket}/{folder}"))
    return [path.name for path in job_folders.list_folder(store / folder) if path.is_file()]


def remove_note(store: Path, name: str) -> None:
    """Remove a note if it exists."""
    if bucket := _get_bucket(store):
        object_storage.delete_object(f"{bucket}/{name}")
    else:
        (store / name).unlink(missing_ok=True)


def add_artifact(store: Path, built: Artifact, reporter: Reporter | None = None) -> Artifact:
    """Move a finished artifact to store/<content_sha256>, and upload it to the bucket. Safe with concurrent jobs.

    An intact stored artifact with the same content, inputs, configuration and summary is kept, and `built` is removed.
    Otherwise `built` replaces the stored artifact, which is moved aside first. If this job is killed between the two
    renames, the next job restores the stored artifact.

    Returns:
        The stored artifact.

    Raises:
        ArtifactDamagedError: the files differ from the manifest and are not uploaded.
        EngineMissingError: the bucket does not answer.
    """
    home = store / built.sha256

    def find_equal() -> Artifact | None:
        try:
            stored = _load_from_folder(store, built.sha256, ())
        except (TunelineError, FileNotFoundError):  # damaged, or just moved by another job
            return None
        old, new = stored.manifest, built.manifest
        is_equal = (old.inputs, old.config, old.summary) == (new.inputs, new.config, new.summary)
        return stored if is_equal else None

    with job_folder(store) as own:
        stored = job_folders.move_into_place(built.path, home, find_equal, own / ASIDE_FOLDER)
    if stored:
        filesystem.remove_tree(built.path)
    else:
        stored = Artifact(home, built.manifest)
    if bucket := _get_bucket(store):
        s3_store.upload_artifact(bucket, stored, reporter or SilentReporter())
    return stored
