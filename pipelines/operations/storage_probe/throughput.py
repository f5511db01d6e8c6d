"""Read and write rates of tuneline's typical workloads, measured on both participants at once.

Each participant reads the file that its partner wrote, after it advised the kernel to drop its cached pages.
"""

# On two hosts, the data therefore comes from the storage; on one host, the pages may still be cached, and the result
# reports this. The data is one random block, written repeatedly: storage cannot compress it, but can deduplicate its
# blocks.

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pipelines.operations.storage_probe.participant import MIB_BYTES, Figures, Participant
from pipelines.operations.storage_probe.probed_filesystem import Filesystem, open_file, write_durably

CHECKPOINT_BLOCK_BYTES = 4 * MIB_BYTES  # per write, as safetensors files are written
STREAM_BLOCK_BYTES = MIB_BYTES  # per read of a stream
STREAM_COUNT = 4  # the number of data loader workers of a training run
RANDOM_BLOCK_BYTES = 64 * 1024  # per random read or write: a page of a Parquet column
SMALL_FILE_BYTES = 4096


def measure_checkpoint_writes(side: Participant) -> Figures:
    """Write one large file sequentially and flush it; later steps read the file.

    Returns:
        {"bytes", "seconds", "block": bytes per write}.

    Raises:
        OSError: the write failed; the file is removed.
    """
    block, path, size = os.urandom(CHECKPOINT_BLOCK_BYTES), _get_large_file(side, side.rank), side.plan.size
    side.exchange("begin")
    start = time.perf_counter()
    try:
        with open_file(side.fs, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            for offset in range(0, size, len(block)):
                side.fs.write(descriptor, block[: min(len(block), size - offset)])
            side.fs.fsync(descriptor)
    except OSError:
        # If the storage is full, free space for the participants' messages. The file may not exist.
        with suppress(OSError):
            side.fs.unlink(path)
        raise
    return {"bytes": size, "seconds": time.perf_counter() - start, "block": CHECKPOINT_BLOCK_BYTES}


def measure_training_reads(side: Participant) -> Figures:
    """Read the partner's large file in four concurrent streams, each of which reads a quarter sequentially.

    Returns:
        {"bytes", "seconds", "block": bytes per read, "streams": number of streams}.
    """
    path, share = _get_large_file(side, 1 - side.rank), side.plan.size // STREAM_COUNT

    def read_stream(number: int) -> int:
        """Read one share of the file and return the number of bytes."""
        begin, end = number * share, (number + 1) * share
        offset, buffer = begin, bytearray(min(STREAM_BLOCK_BYTES, max(1, share)))
        with open_file(side.fs, path, os.O_RDONLY) as descriptor:
            while offset < end and (count := side.fs.read_at(descriptor, buffer, offset)):
                offset += count
        return offset - begin

    side.wait_for_path(path)
    _drop_cache(side.fs, path)
    side.exchange("begin")
    start = time.perf_counter()
    with ThreadPoolExecutor(STREAM_COUNT) as pool:
        total = sum(pool.map(read_stream, range(STREAM_COUNT)))
    return {
        "bytes": total,
        "seconds": time.perf_counter() - start,
        "block": STREAM_BLOCK_BYTES,
        "streams": STREAM_COUNT,
    }


def measure_random_access(side: Participant) -> Figures:
    """Read random blocks of the partner's large file, then write and flush random blocks of this participant's file.

    Returns:
        {"reads", "writes"}: numbers of operations; {"read_seconds", "write_seconds"}; "block": bytes per operation.
    """
    own, others, half = _get_large_file(side, side.rank), _get_large_file(side, 1 - side.rank), side.plan.seconds / 2
    block_count = max(1, side.plan.size // RANDOM_BLOCK_BYTES)
    generator = random.Random(side.rank)  # noqa: S311 - offsets, not secrets

    def choose_offset() -> int:
        return generator.randrange(block_count) * RANDOM_BLOCK_BYTES

    _drop_cache(side.fs, others)
    side.exchange("begin")
    with open_file(side.fs, others, os.O_RDONLY) as descriptor:
        buffer = bytearray(RANDOM_BLOCK_BYTES)
        reads, read_seconds = _repeat(half, lambda: side.fs.read_at(descriptor, buffer, choose_offset()))
    side.exchange("read")
    block = os.urandom(RANDOM_BLOCK_BYTES)
    with open_file(side.fs, own, os.O_WRONLY) as descriptor:
        start = time.perf_counter()
        writes, _ = _repeat(half, lambda: side.fs.write_at(descriptor, block, choose_offset()))
        side.fs.fsync(descriptor)
        write_seconds = time.perf_counter() - start
    return {
        "reads": reads,
        "read_seconds": read_seconds,
        "writes": writes,
        "write_seconds": write_seconds,
        "block": RANDOM_BLOCK_BYTES,
    }


def measure_small_files(side: Participant) -> Figures:
    """Create and remove small files one by one, as for Triton repositories, git clones and sharded checkpoints.

    Returns:
        {"files": number of files, "make_seconds", "remove_seconds", "block": bytes per file}.
    """
    folder, names = side.folder_for(), itertools.count()
    side.exchange("begin")
    count, seconds = _repeat(
        side.plan.seconds / 2, lambda: write_durably(side.fs, folder / str(next(names)), bytes(SMALL_FILE_BYTES))
    )
    start = time.perf_counter()
    for number in range(count):
        side.fs.unlink(folder / str(number))
    return {
        "files": count,
        "make_seconds": seconds,
        "remove_seconds": time.perf_counter() - start,
        "block": SMALL_FILE_BYTES,
    }


def _repeat(seconds: float, work: Callable[[], object]) -> tuple[int, float]:
    """Repeat a call for `seconds`, at least once; return the number of calls and the elapsed seconds."""
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        work()
        count += 1
    return count, elapsed


def _get_large_file(side: Participant, rank: int) -> Path:
    """Return the path of a rank's large file, which several steps share."""
    return side.folder / f"large.{rank}"


def _drop_cache(fs: Filesystem, path: Path) -> None:
    with open_file(fs, path, os.O_RDONLY) as descriptor:
        fs.drop_cache(descriptor)
