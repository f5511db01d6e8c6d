"""Read and write rates in the shape of the work, both sides at once.

What is read was written by the other side, and the kernel was asked to forget it, so that on two hosts it comes from the storage. On one
host the writer's pages may still be there: such figures are those of memory, and are told so. A block of random data is written again and
again: nothing is gained by compression, but much on storage that keeps equal blocks once.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipelines.storage.filesystem import Filesystem, keep
from pipelines.storage.side import MIB, Side

LARGE = 4 * MIB  # bytes a write of a checkpoint, as safetensors files are written
STREAMED = MIB  # bytes a read of a stream
STREAMS = 4  # as many as a training's data loader has workers
SMALL = 64 * 1024  # bytes of a random read or write, a page of a Parquet column
TINY = 4096  # bytes of one of many files


def checkpoints(side: Side) -> dict[str, Any]:
    """One large file a side, written from its beginning to its end and forced out; the other steps read it."""
    block = os.urandom(LARGE)
    side.meet("begin")
    began = time.perf_counter()
    try:
        _write(side.fs, _large(side, side.rank), block, side.plan.size)
    except OSError:
        with suppress(OSError):  # it may not even have been made
            side.fs.unlink(_large(side, side.rank))  # where the space was too little, the sides have to go on talking
        raise
    return {"bytes": side.plan.size, "seconds": time.perf_counter() - began, "block": LARGE}


def _write(fs: Filesystem, path: Path, block: bytes, size: int) -> None:
    """A file of so many bytes, a block again and again, forced out."""
    with _opened(fs, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        for done in range(0, size, len(block)):
            fs.write(descriptor, block[: min(len(block), size - done)])
        fs.fsync(descriptor)


def training(side: Side) -> dict[str, Any]:
    """The other side's large file read by four streams, each a quarter of it from beginning to end."""
    path, share = _large(side, 1 - side.rank), side.plan.size // STREAMS
    side.appears(path)
    _forget(side.fs, path)
    side.meet("begin")
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        done = sum(pool.map(lambda n: _stream(side.fs, path, n * share, (n + 1) * share), range(STREAMS)))
    return {"bytes": done, "seconds": time.perf_counter() - began, "block": STREAMED, "streams": STREAMS}


def _stream(fs: Filesystem, path: Path, offset: int, end: int) -> int:
    """Bytes read between two offsets."""
    began, buffer = offset, bytearray(min(STREAMED, max(1, end - offset)))
    with _opened(fs, path, os.O_RDONLY) as descriptor:
        while offset < end and (came := fs.read_at(descriptor, buffer, offset)):
            offset += came
    return offset - began


def preparation(side: Side) -> dict[str, Any]:
    """Random reads in the other side's large file, then random writes in the own one, forced out at the end."""
    places = max(1, side.plan.size // SMALL)
    chosen = random.Random(side.rank)  # noqa: S311 - offsets, no secrets
    _forget(side.fs, _large(side, 1 - side.rank))
    side.meet("begin")
    with _opened(side.fs, _large(side, 1 - side.rank), os.O_RDONLY) as descriptor:
        buffer = bytearray(SMALL)
        reads = _timed(side.plan.seconds / 2, lambda: side.fs.read_at(descriptor, buffer, chosen.randrange(places) * SMALL))
    side.meet("read")
    block = os.urandom(SMALL)
    with _opened(side.fs, _large(side, side.rank), os.O_WRONLY) as descriptor:
        began = time.perf_counter()
        count, _ = _timed(side.plan.seconds / 2, lambda: side.fs.write_at(descriptor, block, chosen.randrange(places) * SMALL))
        side.fs.fsync(descriptor)
        seconds = time.perf_counter() - began
    return {"reads": reads[0], "read_seconds": reads[1], "writes": count, "write_seconds": seconds, "block": SMALL}


def files(side: Side) -> dict[str, Any]:
    """Small files made and removed one after the other, as a Triton repository, a git clone or many checkpoints' parts are."""
    room = side.room()
    side.meet("begin")
    made = 0

    def make() -> None:
        nonlocal made
        keep(side.fs, room / str(made), bytes(TINY))
        made += 1

    count, seconds = _timed(side.plan.seconds / 2, make)
    began = time.perf_counter()
    for n in range(count):
        side.fs.unlink(room / str(n))
    return {"files": count, "make_seconds": seconds, "remove_seconds": time.perf_counter() - began, "block": TINY}


def _timed(seconds: float, work: Any) -> tuple[int, float]:
    """How often something was done in this time, and the time it really took."""
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds or not count:
        work()
        count += 1
    return count, spent


def _large(side: Side, rank: int) -> Path:
    """The large file of a side, which the steps share."""
    return side.folder / f"large.{rank}"


def _forget(fs: Filesystem, path: Path) -> None:
    with _opened(fs, path, os.O_RDONLY) as descriptor:
        fs.forget(descriptor)


@contextmanager
def _opened(fs: Filesystem, path: Path, flags: int) -> Iterator[int]:
    """A descriptor. Where its use fails, what closing it says as well is not told."""
    descriptor = fs.open(path, flags)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            fs.close(descriptor)
        raise
    fs.close(descriptor)
