"""Writes captured rows from a thread: a bounded queue, a file per hour, and a flush to the disk each second."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.common.workspace import job_folders, liveness
from pipelines.capture import tombstones, traffic_files
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_files import OPEN_PREFIX, Row

WRITE_SECONDS = 0.2  # between two writes: the rows of this time are lost if the process is killed
FLUSH_SECONDS = 1.0  # between two flushes to the disk: the rows of this time are lost if the machine stops
CLOSE_SECONDS = 10.0  # for the queued rows at the end; a disk that hangs does not delay the exit further
YIELD_SECONDS = 2e-5  # after each row, so that the event loop does not wait for the interpreter lock

Outcome = Literal["written", "dropped", "too_large", "no_consent", "no_subject", "erased", "failed"]

logger = logging.getLogger("tuneline.gateway")


@dataclass(frozen=True)
class _Waiting:
    model: str
    label: str
    size: int
    build: Callable[[], Row]


@dataclass
class _OpenFile:
    path: Path
    descriptor: int
    opened: float
    is_flushed: bool = True


class TrafficWriter:
    """Appends rows to separate files, one per model and hour.

    Args:
        settings: the folder, and the limits of the queue.
        count: called with a model and the outcome of a row.
    """

    def __init__(self, settings: CaptureSettings, count: Callable[[str, Outcome], None]) -> None:
        self._settings, self._count = settings, count
        self._queue: deque[_Waiting] = deque()
        # Each counter has one writing thread, so that no lock is needed.
        self._submitted_bytes = self._taken_bytes = 0
        self._files: dict[Path, _OpenFile] = {}
        self._flushed = self._beaten = time.monotonic()
        self._is_failing = False
        self._stop_requested = threading.Event()
        for each in (settings.folder, settings.folder / traffic_files.TOMBSTONES):
            traffic_files.make_folder(each, settings.folder, settings.group_id)
        self._erased = self._read_erasure_time()
        self._tombstones = tombstones.read_tombstones(settings.folder)
        self._thread = threading.Thread(target=self._run, daemon=True, name="capture")
        self._thread.start()

    def submit(self, model: str, size: int, build: Callable[[], Row], *, label: str = "") -> bool:
        """Queue a row, or drop it if the queue is full. Return whether it was queued.

        Args:
            model: name of the model that answered the client.
            size: size of the request in bytes.
            build: returns the redacted row; called in the thread of the writer.
            label: name under which the row is counted. Default: the model.
        """
        label = label or model
        if size > self._settings.max_row_kib << 10:
            self._count(label, "too_large")
        elif (
            len(self._queue) >= self._settings.queue_rows
            or self._submitted_bytes - self._taken_bytes + size > self._settings.queue_mib << 20
        ):
            self._count(label, "dropped")
        else:
            self._submitted_bytes += size
            self._queue.append(_Waiting(model, label, size, build))
            return True
        return False

    def close(self) -> None:
        """Write the queued rows, and seal the files."""
        self._stop_requested.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("capture_failed error=Timeout reason=the disk does not respond")

    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            is_stopping = self._stop_requested.wait(WRITE_SECONDS)
            try:
                self._write_queued(None if is_stopping else time.monotonic() + WRITE_SECONDS)
                self._maintain(is_stopping)
            except Exception as error:  # no failure may end the thread
                self._report(error)

    def _write_queued(self, deadline: float | None) -> None:
        hour = traffic_files.now()
        while self._queue and (deadline is None or time.monotonic() < deadline):
            waiting = self._queue.popleft()
            self._taken_bytes += waiting.size
            try:
                row = waiting.build()
                if tombstones.is_erased(row, self._tombstones):
                    self._count(waiting.label, "erased")
                    continue
                line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
                self._append(traffic_files.get_hour_folder(self._settings.folder, waiting.model, hour), line)
            except Exception as error:
                self._report(error)
                self._count(waiting.label, "failed")
            else:
                self._is_failing = False
                self._count(waiting.label, "written")
            time.sleep(YIELD_SECONDS)

    def _append(self, folder: Path, line: bytes) -> None:
        file = self._files.get(folder)
        if file is None:
            traffic_files.make_folder(folder, self._settings.folder, self._settings.group_id)
            path = folder / f"{OPEN_PREFIX}.{job_folders.create_owner_tag()}"
            descriptor = traffic_files.create_file(path, self._settings.group_id)
            file = self._files[folder] = _OpenFile(path, descriptor, time.monotonic())
        written = os.write(file.descriptor, line)
        file.is_flushed = False
        if written != len(line):  # the disk is full
            os.ftruncate(file.descriptor, os.fstat(file.descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _maintain(self, is_stopping: bool) -> None:
        """Flush the files each second; seal those of an earlier hour, and all of them after an erasure or at the end.

        With a bucket, seal the files that are due for the upload.
        """
        now = time.monotonic()
        if not is_stopping and now - self._flushed < FLUSH_SECONDS:
            return
        self._flushed = now
        erased = self._read_erasure_time()
        seal_all = is_stopping or erased != self._erased
        if seal_all:
            self._erased, self._tombstones = erased, tombstones.read_tombstones(self._settings.folder)
        is_heartbeat_due = now - self._beaten >= liveness.HEARTBEAT_INTERVAL_SECONDS
        self._beaten = now if is_heartbeat_due else self._beaten
        hour = f"{traffic_files.now():%Y-%m-%d/%H}"
        for folder, file in list(self._files.items()):
            if not file.is_flushed:
                os.fsync(file.descriptor)
                file.is_flushed = True
            is_upload_due = self._settings.bucket and now - file.opened >= self._settings.upload_seconds
            if seal_all or is_upload_due or not folder.as_posix().endswith(hour):
                del self._files[folder]
                os.close(file.descriptor)
                traffic_files.seal(file.path)
            elif is_heartbeat_due:
                os.utime(file.path)

    def _report(self, error: Exception) -> None:
        """Log the first of consecutive failures, without its values: they may be text of a request."""
        if not self._is_failing:
            reason = error.strerror if isinstance(error, OSError) else ""
            logger.error("capture_failed error=%s reason=%s", type(error).__name__, reason or "-")
        self._is_failing = True

    def _read_erasure_time(self) -> int:
        """Return a value that changes when a subject is erased."""
        try:
            return (self._settings.folder / traffic_files.TOMBSTONES).stat().st_mtime_ns
        except FileNotFoundError:
            return 0
