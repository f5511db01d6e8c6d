"""The artifact store in a bucket."""

#     <address>/<content_sha256>/<path>                     a payload file: every writer writes the same bytes
#     <address>/<content_sha256>/_beside/<sha256>/<path>    another file (a report, a log), by its own digest
#     <address>/<content_sha256>/manifest.json              written last: readers ignore an artifact without manifest
#     <address>/keys/<stage>/<key>                          digest of the artifact built for a cache key
#     <address>/used/<content_sha256>                       modification time: last use of the artifact
#     <address>/removing/<content_sha256>/<owner tag>       lease of a job that removes the artifact
#
# S3 writes objects atomically, and only the manifest's object can change its content. Two writers of the same artifact
# therefore cannot publish the report of one writer with the manifest of the other, and readers need no lock.
#
# A job that uses an artifact records the use before it lists leases. A job that removes an artifact writes its lease
# before it reads uses. At least one of them therefore detects the other. Either the removal is cancelled, or the using
# job waits for the end of the removal and builds the artifact again.

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from components.common.artifacts import artifact_folder, object_storage
from components.common.artifacts.artifact_folder import Artifact, ArtifactFile, Manifest
from components.common.runtime import filesystem
from components.common.runtime.errors import ArtifactDamagedError, EngineMissingError
from components.common.runtime.reporters import Reporter
from components.common.workspace import job_folders

NON_PAYLOAD_FOLDER = "_beside"
MAX_UPLOAD_ATTEMPTS = 10  # if other jobs replace the artifact
POLL_INTERVAL_SECONDS = 0.1
USED_FOLDER, REMOVING_FOLDER = "used", "removing"
RESERVED_FOLDERS = (  # folders that are not artifacts
    "keys",
    "costs",
    "attempts",
    "pins",
    "signatures",
    "certificates",
    "checkpoints",
    USED_FOLDER,
    REMOVING_FOLDER,
)
REMOVAL_LEASE_SECONDS = 600.0  # an older lease is stale


def upload_artifact(address: str, artifact: Artifact, reporter: Reporter) -> None:
    """Upload the missing files of an artifact, then its manifest. Objects of an interrupted upload are reused.

    If another job replaces the local folder by a folder with the same content and another manifest, the replacement is
    uploaded.

    Raises:
        ArtifactDamagedError: the files differ from the manifest.
        EngineMissingError: the bucket does not answer.
    """
    home = f"{address}/{artifact.sha256}"
    claim_use(address, artifact.sha256)
    reporter.step(f"uploading to {address}")
    for _ in range(MAX_UPLOAD_ATTEMPTS):
        with suppress(FileNotFoundError):  # between the two renames of a job that replaces the folder
            content = filesystem.read_bytes(artifact.path / artifact_folder.MANIFEST_FILENAME)
            if object_storage.read_object(f"{home}/{artifact_folder.MANIFEST_FILENAME}") == content:
                return
            manifest = parse_manifest(address, artifact.sha256, content)
            sizes = object_storage.list_sizes(home)
            missing = [file for file in manifest.files if sizes.get(_get_object_name(file)) != file.bytes]
            moved = _count_bytes(missing, reporter)
            if all(_upload_file(artifact.path / file.path, home, file, moved) for file in missing):
                object_storage.write_object(f"{home}/{artifact_folder.MANIFEST_FILENAME}", content.decode())
                return
        time.sleep(POLL_INTERVAL_SECONDS)
    raise ArtifactDamagedError(
        f"the files in {artifact.path} differ from {artifact_folder.MANIFEST_FILENAME}; the artifact was not "
        f"uploaded to {home}",
        hint=f"Delete {artifact.path}; the next run of the step creates the artifact again.",
    )


def _upload_file(path: Path, home: str, file: ArtifactFile, moved: object_storage.BytesMovedCallback) -> bool:
    """Upload a file; return False if it differs from the manifest."""
    # Payload files are equal in every folder with this digest. Another job may replace other files during the upload,
    # so a private copy is verified and uploaded.
    if file.payload:
        object_storage.upload_file(path, f"{home}/{_get_object_name(file)}", moved)
        return True
    with tempfile.TemporaryDirectory() as own:
        copy = Path(own) / path.name
        filesystem.link_or_copy(path, copy)
        is_intact = artifact_folder.is_intact(copy, file)
        if is_intact:
            object_storage.upload_file(copy, f"{home}/{_get_object_name(file)}", moved)
    return is_intact


def fetch_artifact(
    address: str, sha256: str, content: bytes, folder: Path, local_copy: Path, reporter: Reporter
) -> Artifact:
    """Download an artifact to a new folder and verify every digest. Intact files in `local_copy` are not downloaded.

    Args:
        content: the manifest's bytes.

    Raises:
        ArtifactDamagedError: an object is missing or differs from the manifest.
        EngineMissingError: the bucket does not answer.
    """
    home, manifest = f"{address}/{sha256}", parse_manifest(address, sha256, content)
    local = {file.path for file in manifest.files if artifact_folder.is_intact(local_copy / file.path, file)}
    reporter.step(f"fetching the {manifest.kind} from {address}")
    moved = _count_bytes([file for file in manifest.files if file.path not in local], reporter)
    for file in manifest.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.path in local:
            filesystem.link_or_copy(local_copy / file.path, target)
            continue
        try:
            object_storage.download_file(f"{home}/{_get_object_name(file)}", target, file.bytes, moved)
        except FileNotFoundError:
            raise _damaged_error(home, f"{_get_object_name(file)} is missing") from None
        if not artifact_folder.is_intact(target, file):
            raise _damaged_error(home, f"{_get_object_name(file)} differs from the manifest")
    (folder / artifact_folder.MANIFEST_FILENAME).write_bytes(content)
    return Artifact(folder, manifest)


def read_manifest_bytes(address: str, sha256: str) -> bytes | None:
    """Return the bytes of a manifest; None if the artifact is missing or unfinished.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    return object_storage.read_object(f"{address}/{sha256}/{artifact_folder.MANIFEST_FILENAME}")


def parse_manifest(address: str, sha256: str, content: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        ArtifactDamagedError: the manifest is unreadable, lists a file outside of the artifact, or belongs to another
            artifact.
    """
    home = f"{address}/{sha256}"
    try:
        manifest = artifact_folder.parse_manifest(content)
    except (ValueError, ValidationError):
        raise _damaged_error(home, f"{artifact_folder.MANIFEST_FILENAME} is not a valid manifest") from None
    if any(Path(file.path).is_absolute() or ".." in Path(file.path).parts for file in manifest.files):
        raise _damaged_error(home, f"{artifact_folder.MANIFEST_FILENAME} lists a file outside the artifact")
    if not sha256 == manifest.content_sha256 == manifest.compute_payload_sha256():
        raise _damaged_error(home, f"{artifact_folder.MANIFEST_FILENAME} belongs to another artifact")
    return manifest


def list_artifacts(address: str) -> list[str]:
    """Return the sorted digests of all artifacts, finished or not.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    return [name for name in object_storage.list_folders(address) if name not in RESERVED_FOLDERS]


def claim_use(address: str, sha256: str) -> None:
    """Record that an artifact is in use, and wait up to REMOVAL_LEASE_SECONDS for removals of the artifact.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    record_use(address, sha256)
    deadline = time.monotonic() + REMOVAL_LEASE_SECONDS
    while (
        leases := object_storage.list_sizes_and_times(f"{address}/{REMOVING_FOLDER}/{sha256}")
    ) and time.monotonic() < deadline:
        record_use(address, sha256)
        now = object_storage.get_modified_time(f"{address}/{USED_FOLDER}/{sha256}") or 0.0
        if all(now - started > REMOVAL_LEASE_SECONDS for _, started in leases.values()):
            return
        time.sleep(POLL_INTERVAL_SECONDS)


def record_use(address: str, sha256: str) -> None:
    """Record that an artifact is in use now. Has no effect without write permission."""
    with suppress(EngineMissingError):
        object_storage.write_object(f"{address}/{USED_FOLDER}/{sha256}", "")


def measure_idle_times(address: str) -> dict[str, tuple[int, float]]:
    """Return {digest: (bytes, seconds since the last use)} of all artifacts, finished or not.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    clock = f"{address}/{REMOVING_FOLDER}/.now.{job_folders.create_owner_tag()}"
    object_storage.write_object(clock, "")
    try:
        now = object_storage.get_modified_time(clock) or 0.0
        uses = object_storage.list_sizes_and_times(f"{address}/{USED_FOLDER}")
        used = {sha256: modified for sha256, (_, modified) in uses.items()}
        return {
            sha256: _measure_idle_time(address, sha256, used.get(sha256), now) for sha256 in list_artifacts(address)
        }
    finally:
        object_storage.delete_object(clock)


def _measure_idle_time(address: str, sha256: str, used: float | None, now: float) -> tuple[int, float]:
    """Return bytes and seconds since the last use; a write counts as a use."""
    objects = object_storage.list_sizes_and_times(f"{address}/{sha256}").values()
    return sum(size for size, _ in objects), now - max((*(modified for _, modified in objects), used or 0.0))


def remove_artifact(address: str, sha256: str, unused_for: float) -> bool:
    """Delete an artifact unless it was used within the last `unused_for` seconds; return whether it was deleted.

    The manifest is deleted first, so that the rest of an interrupted removal is never read. The next removal deletes
    the rest.

    Raises:
        EngineMissingError: the bucket does not answer.
    """
    home, lease = f"{address}/{sha256}", f"{address}/{REMOVING_FOLDER}/{sha256}/{job_folders.create_owner_tag()}"
    object_storage.write_object(lease, "")
    started = time.monotonic()
    try:
        now = object_storage.get_modified_time(lease) or 0.0
        used = object_storage.get_modified_time(f"{address}/{USED_FOLDER}/{sha256}")
        if _measure_idle_time(address, sha256, used, now)[1] < unused_for:
            return False
        object_storage.delete_object(f"{home}/{artifact_folder.MANIFEST_FILENAME}")
        for name in object_storage.list_sizes(home):
            if time.monotonic() - started > REMOVAL_LEASE_SECONDS / 2:  # the lease will soon be stale for waiting jobs
                return False
            object_storage.delete_object(f"{home}/{name}")
        object_storage.delete_object(f"{address}/{USED_FOLDER}/{sha256}")
    finally:
        object_storage.delete_object(lease)
    return True


def _get_object_name(file: ArtifactFile) -> str:
    return file.path if file.payload else f"{NON_PAYLOAD_FOLDER}/{file.sha256}/{file.path}"


def _count_bytes(files: list[ArtifactFile], reporter: Reporter) -> object_storage.BytesMovedCallback:
    """Return a callback that reports the progress of these files' transfer."""
    done, total = 0, sum(file.bytes for file in files)

    def moved(count: int) -> None:
        nonlocal done
        done += count
        reporter.progress(done, total, "bytes")

    return moved


def _damaged_error(home: str, problem: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"{home}/{problem}",
        hint=f"Restore the object, or delete all objects below {home}/; the next run of the step creates the artifact "
        "again.",
    )
