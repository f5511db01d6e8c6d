"""Process of one rank: reads its task from standard input, waits for the start, and prints its measurements.

Lines on standard input: the task as JSON, then "go". Lines on standard output: "ready", then the result as JSON. The
module imports the standard library only and runs without site-packages, so that hundreds of ranks start quickly.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Json = dict[str, Any]
BLOCK_BYTES = 4096  # alignment of direct I/O
WRITE_BYTES = READ_BYTES = 4 << 20  # per call, as safetensors files are written and read
MAX_OPEN_FILES = 512
MIN_STEPS = 5  # after the warm-up


class Storage:
    """Reads that bypass the page cache by O_DIRECT, or whose pages are dropped before and after."""

    def __init__(self, direct: bool) -> None:
        self._direct = direct
        self._local = threading.local()

    def open(self, path: str) -> int:
        """Open a file for reading, without its cached pages."""
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self._direct else 0))
        self._drop_cache(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Drop the file's cached pages and close it."""
        self._drop_cache(descriptor)
        os.close(descriptor)

    def _drop_cache(self, descriptor: int) -> None:
        if not self._direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, descriptor: int, offset: int, size: int) -> int:
        """Read up to `size` bytes into a reused aligned buffer; return the number of bytes."""
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        needed = min(-(-size // BLOCK_BYTES) * BLOCK_BYTES, READ_BYTES)
        if buffer is None or len(buffer) < needed:
            buffer = self._local.buffer = mmap.mmap(-1, needed)
        done = 0
        while done < size:
            view = memoryview(buffer)[: min(needed, -(-(size - done) // BLOCK_BYTES) * BLOCK_BYTES)]
            count = os.preadv(descriptor, [view], offset + done)
            if not count:
                break
            done += count
        return done


def supports_direct_io(path: str) -> bool:
    """Return whether a file can be read with O_DIRECT. tmpfs and some network file systems refuse it."""
    storage = Storage(direct=True)
    try:
        descriptor = storage.open(path)
        try:
            storage.read(descriptor, 0, BLOCK_BYTES)
        finally:
            storage.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


class Records:
    """Batches of records of one rank, in the files of a dataset."""

    def __init__(self, task: Json) -> None:
        self._task, self._storage = task, Storage(task["direct"])
        self._total = task["samples_per_file"] * len(task["files"])
        self._keeps_open = len(task["files"]) <= MAX_OPEN_FILES
        self._descriptors = [self._storage.open(path) for path in task["files"]] if self._keeps_open else []

    def read_batch(self, number: int) -> None:
        """Read the records of a step: the rank's next ones, as a distributed sampler assigns them, or random ones."""
        task = self._task
        first = (number * task["ranks"] + task["rank"]) * task["batch"]
        generator = random.Random(f"{task['rank']}.{number}")  # noqa: S311 - offsets, not secrets
        for position in range(task["batch"]):
            is_random = task["order"] == "random"
            sample = generator.randrange(self._total) if is_random else (first + position) % self._total
            file, index = divmod(sample, task["samples_per_file"])
            descriptor = self._descriptors[file] if self._keeps_open else self._storage.open(task["files"][file])
            count = self._storage.read(descriptor, index * task["stride"], task["stride"])
            if not self._keeps_open:
                self._storage.close(descriptor)
            if count != task["stride"]:
                raise OSError(errno.EIO, "the file is shorter than the data written to it", task["files"][file])


def emulate_training(task: Json, wait: Callable[[], None]) -> Json:
    """Read a batch and sleep for the computation, step after step; read ahead in threads if the workload does.

    The warm-up is the first step and a step per batch read ahead. Otherwise, batches read during the first step would
    make a slow storage seem faster.

    Returns:
        {"steps", "seconds", "bytes"} without the warm-up; {"first_step_seconds"}.
    """
    records, pool = Records(task), ThreadPoolExecutor(max(1, task["read_threads"]))
    pending: deque[Future[None]] = deque()
    ahead = task["read_threads"] * task["prefetch"]
    wait()
    begin = start = time.perf_counter()
    steps, first_step_seconds, warmup = 0, 0.0, 1 + ahead
    while True:
        if ahead:
            while len(pending) < ahead:
                pending.append(pool.submit(records.read_batch, steps + len(pending)))
            pending.popleft().result()
            pending.append(pool.submit(records.read_batch, steps + ahead))
        else:
            records.read_batch(steps)
        time.sleep(task["computation_seconds"])
        now, steps = time.perf_counter(), steps + 1
        if steps == 1:
            first_step_seconds = now - begin
        if steps == warmup:
            start = now
        is_long_enough = steps >= warmup + MIN_STEPS and now - start >= task["seconds"]
        if is_long_enough or steps == task["max_steps"]:
            break
    pool.shutdown(cancel_futures=True)
    measured = steps - warmup
    size = measured * task["batch"] * task["stride"]
    return {"steps": measured, "seconds": now - start, "bytes": size, "first_step_seconds": first_step_seconds}


def write_files(task: Json, wait: Callable[[], None]) -> Json:
    """Write files of `bytes` each and flush them, as a checkpoint of this rank.

    If `seconds` is not 0, write the files again and again, and stop after this duration, also within a file.

    Returns:
        {"bytes", "seconds"}.
    """
    block, written = bytearray(os.urandom(WRITE_BYTES)), 0
    wait()
    start = time.perf_counter()
    while True:
        for path in task["files"]:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                for offset in range(0, task["bytes"], WRITE_BYTES):
                    left = memoryview(block)[: min(WRITE_BYTES, task["bytes"] - offset)]
                    for position in range(0, len(left), BLOCK_BYTES):  # a unique number per block defeats deduplication
                        block[position : position + 16] = f"{task['rank']:04x}{written + position:012x}".encode()
                    written += len(left)
                    while left:
                        left = left[os.write(descriptor, left) :]
                    if task["seconds"] and time.perf_counter() - start >= task["seconds"]:
                        break
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if (seconds := time.perf_counter() - start) >= task["seconds"]:
            return {"bytes": written, "seconds": seconds}


def read_files(task: Json, wait: Callable[[], None]) -> Json:
    """Read files from their beginning, up to `bytes` in all.

    Returns:
        {"bytes", "seconds"}.
    """
    storage, done = Storage(task["direct"]), 0
    wait()
    start = time.perf_counter()
    for path in task["files"]:
        descriptor = storage.open(path)
        # No read starts at the end of a file, which is not a multiple of the blocks of direct I/O.
        size = min(os.fstat(descriptor).st_size, max(0, task["bytes"] - done))
        for offset in range(0, size, READ_BYTES):
            done += min(storage.read(descriptor, offset, min(READ_BYTES, size - offset)), size - offset)
        storage.close(descriptor)
    return {"bytes": done, "seconds": time.perf_counter() - start}


def write_small_files(task: Json, wait: Callable[[], None]) -> Json:
    """Write and flush small files.

    Returns:
        {"files", "bytes", "seconds"}.
    """
    wait()
    start = time.perf_counter()
    for number in range(task["count"]):
        descriptor = os.open(f"{task['folder']}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(descriptor, os.urandom(task["bytes"]))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    size = task["count"] * task["bytes"]
    return {"files": task["count"], "bytes": size, "seconds": time.perf_counter() - start}


def read_small_files(task: Json, wait: Callable[[], None]) -> Json:
    """Open, read and close random small files for `seconds`.

    Returns:
        {"files", "bytes", "seconds"}.
    """
    storage, files = Storage(task["direct"]), 0
    generator = random.Random(task["rank"])  # noqa: S311 - offsets, not secrets
    wait()
    start = time.perf_counter()
    while (seconds := time.perf_counter() - start) < task["seconds"]:
        path = f"{generator.choice(task['folders'])}/{generator.randrange(task['count'])}"
        descriptor = storage.open(path)
        storage.read(descriptor, 0, task["bytes"])
        storage.close(descriptor)
        files += 1
    return {"files": files, "bytes": files * task["bytes"], "seconds": seconds}


TASKS: dict[str, Callable[[Json, Callable[[], None]], Json]] = {
    "train": emulate_training,
    "write": write_files,
    "read": read_files,
    "write small files": write_small_files,
    "read small files": read_small_files,
}


def main() -> None:
    """Run the task of standard input. An error of the storage is a result with the key "error"."""
    task = json.loads(sys.stdin.readline())

    def wait() -> None:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit(1)  # the host's process has ended

    try:
        result = TASKS[task["kind"]](task, wait)
    except OSError as error:
        result = {"error": [error.errno or errno.EIO, error.strerror or str(error), error.filename or ""]}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
