"""Captured traffic in an S3 bucket: a command works on a private copy of the files, and uploads its changes at the end.

Below its prefix, the bucket has the files of a traffic folder under the same names, and two kinds of its own:
`.lock/<owner tag>` is the lock of a command that changes files; `.spools/<id>.json` describes a gateway whose folder may
have rows that are not in the bucket, and the tombstones whose rows it has removed.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from components.common.artifacts import hashing, object_storage
from components.common.runtime.errors import BusyError, ConfigurationError, EngineMissingError
from components.common.workspace import job_folders, liveness
from pipelines.capture import traffic_files
from pipelines.capture.settings import CaptureSettings, load_settings

SPOOL, COPY_PREFIX = ".spool", ".copy"  # in the folder of the capture file
LOCK, SPOOLS = ".lock", ".spools"  # in the bucket
LOCK_STALE_AFTER_SECONDS = 600.0  # without a heartbeat; twice the time after which the owner writes nothing more
SPOOL_WAIT_SECONDS = 30.0  # for running gateways; they poll the tombstones every 5 seconds
POLL_SECONDS = 0.5
INDEX_FILENAME = ".index.json"  # of a copy: size, ETag and local state of each file at the end of the download
PARALLEL_FILES = 8
NOTES = (".tombstones/", ".exports/")  # uploaded after the rows: an erasure is finished when the rows are erased
# No other object is copied: a name must not lead out of the folder.
SHARED_NAME = re.compile(
    r"\.(tombstones|exports)/\w+\.json|[\w~%-][\w.~%-]*/\d{4}-\d\d-\d\d/(\d\d/\w[\w.-]*\.jsonl|rows\.parquet)", re.ASCII
)

Listing = dict[str, tuple[int, str]]  # size and ETag by name
Verify = Callable[[], None]


def check_capture_file(path: Path) -> None:
    """Check a capture file, and that its bucket can be used.

    Raises:
        ConfigurationError, EngineMissingError: see `load_settings` and `check_bucket`.
    """
    settings = load_settings(path)
    if settings.bucket:
        check_bucket(settings)


def check_bucket(settings: CaptureSettings) -> None:
    """Check that rows can be stored in the bucket, and erased from it.

    Raises:
        ConfigurationError: the bucket keeps versions, or the folder has rows that are not in the bucket.
        EngineMissingError: the bucket cannot be used.
    """
    if days := traffic_files.list_days(settings.folder):
        raise ConfigurationError(
            f"{days[0].path} has captured rows that are not in {settings.bucket}",
            hint="Move the days to the bucket with `aws s3 mv --recursive`, or set another folder.",
        )
    list_files(settings, traffic_files.TOMBSTONES)  # the credentials, before the permission to read the versioning
    keeps_versions = object_storage.keeps_versions(settings.bucket)
    if keeps_versions is None:
        raise ConfigurationError(
            f"the versioning of {settings.bucket} could not be checked: s3:GetBucketVersioning is not permitted",
            hint="Grant s3:GetBucketVersioning and s3:ListBucketVersions: in a bucket with versions, erased rows remain.",
        )
    if keeps_versions:
        raise ConfigurationError(
            f"{settings.bucket} keeps versions of deleted objects; erased rows would remain in them",
            hint="Use a bucket without versioning. If versioning is suspended, delete the versions below the prefix.",
        )


def get_spool(settings: CaptureSettings) -> CaptureSettings:
    """Return the settings of the folder in which a gateway stores its rows until they are uploaded."""
    return settings.model_copy(update={"folder": settings.folder / SPOOL})


def list_files(settings: CaptureSettings, below: str = "") -> Listing:
    """Return the files of the bucket, or those below a folder."""
    start = f"{below}/" if below else ""
    listed = object_storage.list_sizes_and_etags(f"{settings.bucket}/{below}".rstrip("/"))
    return {f"{start}{name}": entry for name, entry in listed.items() if SHARED_NAME.fullmatch(f"{start}{name}")}


def upload_file(settings: CaptureSettings, path: Path) -> None:
    """Upload a file of the folder under its name there, and check the size of the object.

    Raises:
        EngineMissingError: the bucket cannot be used, or has stored another size.
    """
    uri = _get_uri(settings, path)
    object_storage.upload_file(path, uri, _ignore_progress)
    size = object_storage.get_size(uri)
    if size != path.stat().st_size:
        raise EngineMissingError(
            f"{uri} has {size} bytes after the upload; expected {path.stat().st_size}",
            hint="Check the S3 service, and run the same command again.",
        )


def delete_file(settings: CaptureSettings, path: Path) -> None:
    """Delete the object of a file of the folder."""
    object_storage.delete_object(_get_uri(settings, path))


def _get_uri(settings: CaptureSettings, path: Path) -> str:
    return f"{settings.bucket}/{path.relative_to(settings.folder).as_posix()}"


def _ignore_progress(count: int) -> None:
    pass


@contextmanager
def open_copy(settings: CaptureSettings, *, below: str = "", changes: bool = False) -> Iterator[CaptureSettings]:
    """Provide the settings of a private copy of the files, which is removed at the end.

    Args:
        settings: the capture file.
        below: copy only the files below this folder. Default: all.
        changes: lock the bucket, and upload the changes of the copy. An exception discards them.

    Raises:
        BusyError: another command changes the traffic.
        ConfigurationError, EngineMissingError: see `check_bucket`.
    """
    traffic_files.make_folder(settings.folder, settings.folder, settings.group_id)
    with ExitStack() as stack:
        verify = None
        if changes:
            check_bucket(settings)
            verify = stack.enter_context(_locked(settings))
            object_storage.abort_multipart_uploads(settings.bucket)  # of killed commands
        folder = stack.enter_context(job_folders.private_folder(settings.folder, COPY_PREFIX, mode=0o700))
        copy = settings.model_copy(update={"folder": folder})
        _download(copy, below)
        yield copy
        if verify:
            _upload(copy, verify)


def _download(copy: CaptureSettings, below: str = "") -> None:
    """Make the copy equal to the bucket.

    Gateways and other commands may change the bucket meanwhile. The files are complete when a listing names no other
    file than the one before.
    """
    index = _read_index(copy)

    def download(name: str) -> None:
        path = copy.folder / name
        try:
            object_storage.download_file(f"{copy.bucket}/{name}", path, listed[name][0], _ignore_progress)
        except FileNotFoundError:  # just deleted; the next listing shows the reason
            path.unlink(missing_ok=True)
        else:
            index[name] = [*listed[name], *_identify(path)]

    while True:
        listed = list_files(copy, below)
        gone = [name for name in index if name not in listed]
        missing = [name for name, entry in listed.items() if index.get(name, [])[:2] != [*entry]]
        if not gone and not missing:
            break
        for name in gone:
            (copy.folder / name).unlink(missing_ok=True)
            del index[name]
        _call_in_parallel(download, missing)
    (copy.folder / INDEX_FILENAME).write_text(json.dumps(index), encoding="utf-8")


def _upload(copy: CaptureSettings, verify: Verify) -> None:
    """Upload new and changed files, delete removed ones, and then do the same with tombstones and records of exports.

    Killed at any moment, readers find each row once: they skip the sealed files that a Parquet file names, and these are
    deleted after its upload.
    """
    index = _read_index(copy)
    paths = (path for path in copy.folder.rglob("*") if path.is_file())
    local = {name: path for path in paths if SHARED_NAME.fullmatch(name := path.relative_to(copy.folder).as_posix())}
    changed = [name for name, path in local.items() if index.get(name, [])[2:] != _identify(path)]
    removed = [name for name in index if name not in local]

    def upload(name: str) -> None:
        verify()
        upload_file(copy, copy.folder / name)

    def delete(name: str) -> None:
        verify()
        delete_file(copy, copy.folder / name)

    for is_note in (False, True):
        _call_in_parallel(upload, (name for name in changed if name.startswith(NOTES) == is_note))
        _call_in_parallel(delete, (name for name in removed if name.startswith(NOTES) == is_note))


def _call_in_parallel(function: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        list(pool.map(function, names))


def _read_index(copy: CaptureSettings) -> dict[str, list[int | str]]:
    try:
        index: dict[str, list[int | str]] = json.loads((copy.folder / INDEX_FILENAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return index


def _identify(path: Path) -> list[int | str]:
    """Return what changes with a file."""
    status = path.stat()
    return [status.st_ino, status.st_mtime_ns, status.st_size]


def get_tombstones_token(listed: Listing) -> str:
    """Return a digest of the listed tombstones."""
    return hashing.digest(sorted((name, *entry) for name, entry in listed.items()))


def write_spool(settings: CaptureSettings, spool_id: str, token: str) -> None:
    """Record that a gateway has rows in its folder, but none of the subjects of these tombstones."""
    content = {"host": liveness.identify_host(), "folder": str(settings.folder), "tombstones": token}
    object_storage.write_object(f"{settings.bucket}/{SPOOLS}/{spool_id}.json", json.dumps(content))


def remove_spool(settings: CaptureSettings, spool_id: str) -> None:
    """Record that a gateway has uploaded all its rows."""
    object_storage.delete_object(f"{settings.bucket}/{SPOOLS}/{spool_id}.json")


def collect_pending(copy: CaptureSettings) -> list[str]:
    """Wait until the gateways have removed the rows of erased subjects and uploaded the others; download these.

    Call it after the upload of a tombstone.

    Returns:
        Descriptions of gateways that have not answered.
    """
    token = get_tombstones_token(list_files(copy, traffic_files.TOMBSTONES))
    deadline = time.monotonic() + SPOOL_WAIT_SECONDS
    while (pending := _list_pending(copy, token)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    _download(copy)
    return pending


def _list_pending(copy: CaptureSettings, token: str) -> list[str]:
    pending = []
    for name in object_storage.list_sizes_and_etags(f"{copy.bucket}/{SPOOLS}"):
        uri = f"{copy.bucket}/{SPOOLS}/{name}"
        content = object_storage.read_object(uri)
        spool = json.loads(content) if content else {"tombstones": token}  # the gateway has just ended
        if spool["tombstones"] != token:
            pending.append(
                f"the gateway on {spool['host']} may have rows in {spool['folder']}; start it and repeat the command, or "
                f"delete {uri} if the folder no longer exists"
            )
    return pending


@contextmanager
def _locked(settings: CaptureSettings) -> Iterator[Verify]:
    """Lock the bucket across machines.

    Each command writes its lock before it lists the others, so that of two commands at least one detects the other.

    Yields:
        A function that raises BusyError if the lock could not be renewed. A command calls it before it writes.
    """
    tag, mutex, is_released = job_folders.create_owner_tag(), threading.Lock(), False
    uri = f"{settings.bucket}/{LOCK}/{tag}"
    renewed = _read_clock()

    def renew() -> None:
        nonlocal renewed
        started = _read_clock()
        with mutex, suppress(EngineMissingError, OSError):
            if not is_released:
                object_storage.write_object(uri, "")
                renewed = started

    def verify() -> None:
        seconds = _read_clock() - renewed
        if seconds > LOCK_STALE_AFTER_SECONDS / 2:
            raise BusyError(
                f"the lock {uri} was not renewed for {seconds:.0f} seconds; another command may have taken it over",
                hint="Check the connection to the bucket, and repeat the command.",
            )

    object_storage.write_object(uri, "")
    try:
        _check_other_locks(settings, tag)
        with liveness.call_periodically(renew, liveness.HEARTBEAT_INTERVAL_SECONDS):
            yield verify
    finally:
        with mutex:
            is_released = True
            object_storage.delete_object(uri)


def _read_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # includes the time in which the machine is suspended


def _check_other_locks(settings: CaptureSettings, tag: str) -> None:
    """Delete the locks of ended commands.

    Raises:
        BusyError: a command that has not ended holds a lock.
    """
    locks = object_storage.list_sizes_and_times(f"{settings.bucket}/{LOCK}")
    now = locks[tag][1] if tag in locks else 0.0  # the clock of the service
    for owner, (_, renewed) in locks.items():
        host, _, process = owner.rpartition(".")[0].rpartition(".")
        is_gone = host == liveness.identify_host() and liveness.is_process_gone(process)
        if owner == tag:
            continue
        uri = f"{settings.bucket}/{LOCK}/{owner}"
        if not is_gone and now - renewed <= LOCK_STALE_AFTER_SECONDS:
            raise BusyError(
                f"process {process.partition('-')[0]} on {host.rpartition('-')[0]} is changing the traffic in "
                f"{settings.bucket}",
                hint=f"Repeat the command after that process has ended. If it was killed, delete {uri}, or wait "
                f"{LOCK_STALE_AFTER_SECONDS / 60:.0f} minutes.",
            )
        object_storage.delete_object(uri)
