"""Extracts the parts of a document in a child process, see `extraction_worker`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

from components.common.runtime import process_control
from components.common.runtime.counts import format_count
from components.common.runtime.errors import EngineMissingError
from components.data_curation.reading.document_blocks import PART_TYPES, Part, UnreadablePart
from components.data_curation.reading.extraction_limits import UNREADABLE_EXIT_CODE, ExtractionSettings

WORKER_MODULE = "components.data_curation.reading.extraction_worker"
MAX_ANSWER_BYTES = 100_000_000  # of a file's parts, which this process holds in memory
STOP_GRACE_SECONDS = 30  # after the timeout; the child normally ends by itself
# One thread: allocators reserve address space for every thread, and RLIMIT_AS counts it.
THREAD_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "1",
}


def extract(path: Path, settings: ExtractionSettings) -> list[Part]:
    """Return the parts of a file.

    If the file cannot be read or exceeds a limit, the only part is an UnreadablePart with the reason: a file is read as
    far as its pages are readable, or not at all, so that equal files give equal rows.

    Raises:
        EngineMissingError: the child process ended unexpectedly.
    """
    with _lock:
        worker = _get_worker()
        request = {"path": str(path), "settings": asdict(settings)}
        seconds = settings.timeout_seconds + STOP_GRACE_SECONDS
        end = time.monotonic() + seconds
        timer = threading.Timer(seconds, worker.process.kill)
        timer.start()
        try:
            return worker.extract(request, settings)
        except _WorkerEndedError:
            worker.stop()
            if time.monotonic() >= end:
                return [UnreadablePart(1, describe_exit(-signal.SIGALRM, settings))]
            raise EngineMissingError(
                f"the process that extracts documents ended (exit code {worker.process.returncode})",
                hint="If the exit code is -9 (out of memory), use a machine or container with more memory.",
            ) from None
        except BaseException:
            worker.stop()
            raise
        finally:
            timer.cancel()


class _WorkerEndedError(Exception):
    """The child process ended, although it has read no file to its end."""


class _Worker:
    """A running child process."""

    def __init__(self) -> None:
        read, write = os.pipe()
        try:
            self.process = subprocess.Popen(
                process_control.build_module_command(WORKER_MODULE, str(write)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[write],
                text=True,
                env=process_control.build_python_environment(**THREAD_VARIABLES),
            )
        finally:
            os.close(write)
        self._answers: IO[bytes] = os.fdopen(read, "rb")
        self._owner = os.getpid()

    def is_usable(self) -> bool:
        """Return whether the process runs and belongs to this process, not to its parent before a fork."""
        return self._owner == os.getpid() and self.process.poll() is None

    def extract(self, request: object, settings: ExtractionSettings) -> list[Part]:
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise _WorkerEndedError from None
        size, lines = 0, list[bytes]()
        for line in self._answers:
            size += len(line)
            if size > MAX_ANSWER_BYTES:
                self.stop()
                return [UnreadablePart(1, f"more than {MAX_ANSWER_BYTES:,} bytes of extracted text")]
            if line[:1] == b"[":
                lines.append(line)
            elif line.strip():
                break
        else:
            raise _WorkerEndedError
        if (code := int(line)) not in (0, UNREADABLE_EXIT_CODE):
            return [UnreadablePart(1, describe_exit(code, settings))]
        parts = [PART_TYPES[name](**fields) for name, fields in map(json.loads, lines)]
        return parts if code == 0 else parts[-1:]

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self._answers):
            if pipe:
                with contextlib.suppress(BrokenPipeError):  # a request that the process has not read
                    pipe.close()


def describe_exit(code: int, settings: ExtractionSettings) -> str:
    """Return the reason for a file whose process did not exit with code 0."""
    if code == -signal.SIGKILL:
        return "the text extraction was killed; the memory of this machine or container may be exhausted"
    if -code in (signal.SIGALRM, signal.SIGXCPU):
        return (
            f"the text extraction did not end within {format_count(settings.timeout_seconds, 'second')} "
            "(data_curation.documents.timeout_seconds)"
        )
    return f"the text extraction crashed ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


_lock = threading.Lock()
_workers: list[_Worker] = []


def _get_worker() -> _Worker:
    """Return the running child process, or start it."""
    if not _workers or not _workers[0].is_usable():
        _workers[:] = [_Worker()]
    return _workers[0]


@atexit.register
def stop_worker() -> None:
    """Stop the child process, if it runs."""
    for worker in _workers:
        if worker.is_usable():
            worker.stop()
    _workers.clear()
