"""Uploads the sealed files of a gateway to the bucket from a thread. Files that cannot be uploaded remain in the spool."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

from components.common.artifacts import artifact_folder, object_storage
from components.common.runtime import filesystem
from components.common.runtime.errors import BusyError, TunelineError
from components.common.workspace import job_folders
from pipelines.capture import tombstones, traffic_bucket, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.tombstones import Tombstone
from pipelines.capture.traffic_bucket import Listing
from pipelines.capture.traffic_files import TOMBSTONES, DayFolder

POLL_SECONDS = 5.0  # between two checks for sealed files and new tombstones
MAX_BACKOFF_SECONDS = 300.0
SEAL_SECONDS = 5.0  # time for the writer to seal its files after an erasure
CLOSE_SECONDS = 10.0  # for the last files at the end; the next start uploads the others
ID_FILENAME = "id"  # of the spool; it does not change when the host's name does

Outcome = Literal["uploaded", "failed"]

logger = logging.getLogger("tuneline.gateway")


class SpoolUploader:
    """Uploads each sealed file without the rows of erased subjects, and then removes it from the spool.

    Args:
        settings: the capture file.
        count: called with the outcome of an upload.

    Raises:
        ConfigurationError, EngineMissingError: see `traffic_bucket.check_bucket`.
    """

    def __init__(self, settings: CaptureSettings, count: Callable[[Outcome], None]) -> None:
        self._spool, self._count = traffic_bucket.get_spool(settings), count
        traffic_bucket.check_bucket(settings)
        job_folders.remove_abandoned_folders(settings.folder, traffic_bucket.COPY_PREFIX)
        for each in (settings.folder, self._spool.folder, self._spool.folder / TOMBSTONES):
            traffic_files.make_folder(each, settings.folder, settings.group_id)
        self._id = self._read_id()
        self._listed: Listing | None = None
        self._erased: dict[str, Tombstone] = {}
        self._searched: Listing | None = None  # tombstones whose rows were removed from all files of the spool
        self._is_failing = False
        self._stop_requested = threading.Event()
        self._refresh_tombstones()  # before the first row is written
        traffic_bucket.write_spool(self._spool, self._id, "")
        self._thread = threading.Thread(target=self._run, daemon=True, name="capture-upload")
        self._thread.start()

    def close(self) -> None:
        """Upload the remaining files. Call it after the writer has sealed them."""
        self._stop_requested.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("capture_upload_failed error=Timeout reason=the next start uploads the files")

    def _read_id(self) -> str:
        path = self._spool.folder / ID_FILENAME
        if not path.exists():
            artifact_folder.write_atomically(path, secrets.token_hex(8))
        return filesystem.read_text(path)

    def _run(self) -> None:
        delay, is_stopping = 0.0, False
        while not is_stopping:
            is_stopping = self._stop_requested.wait(delay)
            try:
                # Another gateway may have the same spool, and upload its files without the newest tombstones.
                with suppress(BusyError), job_folders.folder_lock(self._spool.folder):
                    self._upload_sealed(is_stopping)
            except Exception as error:  # no failure may end the thread
                self._report(error)
                delay = min(max(2 * delay, POLL_SECONDS), MAX_BACKOFF_SECONDS)
            else:
                delay, self._is_failing = POLL_SECONDS, False

    def _upload_sealed(self, is_stopping: bool) -> None:
        self._refresh_tombstones()
        days = traffic_files.list_days(self._spool.folder)
        before, is_sealed = self._listed, True
        if before != self._searched and self._searched is not None:  # at the start, the writer knows the tombstones
            is_sealed = not traffic_files.wait_for_sealed_files(days, SEAL_SECONDS)
        for day in traffic_files.list_days(self._spool.folder):
            traffic_files.recover(day)
            traffic_files.remove_temporary_files(day)
            for path in day.list_sealed():
                self._upload(day, path)
            self._remove_empty_folders(day)
        if is_sealed and before != self._searched and before is not None:
            traffic_bucket.write_spool(self._spool, self._id, traffic_bucket.get_tombstones_token(before))
            self._searched = before
        if is_stopping and not any(
            day.list_open() or day.list_sealed() for day in traffic_files.list_days(self._spool.folder)
        ):
            traffic_bucket.remove_spool(self._spool, self._id)

    def _upload(self, day: DayFolder, path: Path) -> None:
        """Upload a file; repeat it if a subject was erased meanwhile, because the erasure may not have found the object."""
        is_changed = True
        while is_changed:
            self._drop_erased(day, path)
            if path.stat().st_size:
                traffic_bucket.upload_file(self._spool, path)
            else:
                traffic_bucket.delete_file(self._spool, path)  # of an interrupted upload
            is_changed = self._refresh_tombstones()
        path.unlink(missing_ok=True)
        self._count("uploaded")

    def _drop_erased(self, day: DayFolder, path: Path) -> None:
        if tombstones.is_held(self._spool, day.model):
            return
        lines = list(traffic_files.read_lines(path))
        kept = [line for line in lines if not self._is_erased(line)]
        if len(kept) < len(lines):
            traffic_files.replace_lines(path, kept)

    def _is_erased(self, line: bytes) -> bool:
        row = traffic_files.parse_line(line)
        if row is None:  # damaged by a disk
            return any(subject.encode() in line for subject in self._erased)
        return tombstones.is_erased(row, self._erased)

    def _remove_empty_folders(self, day: DayFolder) -> None:
        if day.day < (traffic_files.now() - timedelta(days=1)).date():  # the writer creates no file there
            for folder in (*day.path.glob("[0-9][0-9]"), day.path):
                with suppress(OSError):
                    folder.rmdir()

    def _refresh_tombstones(self) -> bool:
        """Copy the tombstones of the bucket to the spool, where the writer reads them; return whether they changed."""
        listed, folder = traffic_bucket.list_files(self._spool, TOMBSTONES), self._spool.folder
        if listed == self._listed:
            return False
        known = self._listed or {}
        for name in (name for name in listed if listed[name] != known.get(name)):
            if (content := object_storage.read_object(f"{self._spool.bucket}/{name}")) is not None:
                artifact_folder.write_atomically(folder / name, content.decode())
        for path in (folder / TOMBSTONES).glob("*.json"):
            if f"{TOMBSTONES}/{path.name}" not in listed:
                path.unlink(missing_ok=True)
        self._erased = tombstones.read_tombstones(folder)
        self._listed = listed
        return True

    def _report(self, error: Exception) -> None:
        """Count a failure, and log the first of consecutive ones. Only errors of the bucket have a text without rows."""
        self._count("failed")
        if not self._is_failing:
            reason = error.message if isinstance(error, TunelineError) else "-"
            logger.error("capture_upload_failed error=%s reason=%s", type(error).__name__, reason)
        self._is_failing = True
