"""The files of captured traffic: FOLDER/MODEL/DAY/HOUR/*.jsonl, and FOLDER/MODEL/DAY/rows.parquet after compaction.

Each gateway appends to a separate file `open.<owner tag>`, and seals it by renaming it to `<owner tag>.jsonl`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from components.common.artifacts import artifact_folder
from components.common.runtime import filesystem
from components.common.runtime.errors import InputError, get_first_line
from components.common.workspace import job_folders

FOLDER_MODE, FILE_MODE = 0o2750, 0o640  # the owner writes, the group reads; new files get the folder's group
OPEN_PREFIX = "open"
PARQUET_FILENAME = "rows.parquet"
TOMBSTONES = ".tombstones"
ROWS_PER_BATCH = 2000
NOTICE_SECONDS = 1.5  # in which a running gateway notices a new tombstone
POLL_SECONDS = 0.1

Row = dict[str, Any]


@dataclass(frozen=True)
class DayFolder:
    """Captured traffic of one model on one day (UTC)."""

    model: str
    day: date
    path: Path

    @property
    def parquet(self) -> Path:
        """The compacted rows."""
        return self.path / PARQUET_FILENAME

    def list_sealed(self) -> list[Path]:
        """Return the sealed files that are not part of the compacted rows."""
        compacted = read_compacted_names(self.parquet)
        return [path for path in sorted(self.path.glob("*/*.jsonl")) if get_name(path) not in compacted]

    def list_open(self) -> list[Path]:
        """Return the files that a gateway writes, or left behind."""
        return sorted(self.path.glob(f"*/{OPEN_PREFIX}.*"))


def get_hour_folder(folder: Path, model: str, time: datetime) -> Path:
    """Return the folder of the rows that are written at this time (UTC)."""
    name = quote(model, safe="")
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    return folder / name / f"{time:%Y-%m-%d}" / f"{time:%H}"


def list_days(folder: Path, model: str | None = None) -> list[DayFolder]:
    """Return the day folders of all models, or of one, sorted by model and day."""
    found = []
    for path in sorted(folder.glob("[!.]*/[0-9]*-*-*")):
        with suppress(ValueError):
            day = DayFolder(unquote(path.parent.name), date.fromisoformat(path.name), path)
            if model in (None, day.model):
                found.append(day)
    return found


def make_folder(path: Path, root: Path, group_id: int) -> None:
    """Create a folder below the root, and the root itself, with the modes of captured traffic."""
    for each in [*reversed([p for p in path.parents if p.is_relative_to(root)]), path]:
        if not each.exists():
            each.mkdir(parents=each == root, exist_ok=True)
            if group_id >= 0:
                os.chown(each, -1, group_id)
            each.chmod(FOLDER_MODE)


def create_file(path: Path, group_id: int) -> int:
    """Create a file to append to, and return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if group_id >= 0:
        os.fchown(descriptor, -1, group_id)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def seal(path: Path) -> Path:
    """Cut a partial last line of an open file, and rename the file; remove a file without rows.

    Returns:
        The sealed file, which does not exist if there was no row.
    """
    sealed = path.with_name(f"{path.name.removeprefix(f'{OPEN_PREFIX}.')}.jsonl")
    with path.open("r+b") as file:
        size = _find_last_line_end(file.fileno())
        os.ftruncate(file.fileno(), size)
        os.fsync(file.fileno())
    if size:
        filesystem.rename(path, sealed)
    else:
        path.unlink(missing_ok=True)
    artifact_folder.fsync(path.parent)
    return sealed


def _find_last_line_end(descriptor: int) -> int:
    """Return the size of a file without its partial last line."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - (1 << 16))
        position = os.pread(descriptor, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def recover(day: DayFolder) -> None:
    """Seal the open files of gateways that have ended."""
    for path in day.list_open():
        if job_folders.is_abandoned(path, OPEN_PREFIX):
            with suppress(FileNotFoundError):  # sealed by another process
                seal(path)


def wait_for_sealed_files(days: Collection[DayFolder], seconds: float) -> list[str]:
    """Seal the files that gateways left behind, and return those that running gateways have not sealed."""
    time.sleep(min(seconds, NOTICE_SECONDS))  # a gateway may just open a file
    before = {path for day in days for path in day.list_open()}
    deadline = time.monotonic() + seconds
    while True:
        for day in days:
            recover(day)
        remaining = before & {path for day in days for path in day.list_open()}
        if not remaining or time.monotonic() >= deadline:
            return sorted(map(str, remaining))
        time.sleep(POLL_SECONDS)


def get_name(path: Path) -> str:
    """Return HOUR/FILE, the name of a sealed file in its day."""
    return f"{path.parent.name}/{path.name}"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def parse_line(line: bytes) -> Row | None:
    """Return the row of a line; None if a disk has damaged it."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "tuneline" in row else None


def read_day(day: DayFolder) -> Iterator[Row]:
    """Yield the compacted and the sealed rows of a day. Call it under the lock, because compaction removes files."""
    sealed = day.list_sealed()
    if day.parquet.exists():
        yield from read_parquet(day.parquet)
    for path in sealed:
        yield from (row for line in read_lines(path) if (row := parse_line(line)) is not None)


def count_damaged_lines(day: DayFolder) -> int:
    """Return the number of lines of the sealed files that a disk has damaged, which `read_day` skips."""
    return sum(parse_line(line) is None for path in day.list_sealed() for line in read_lines(path))


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a compacted file.

    Raises:
        InputError: the file is damaged.
    """
    import pyarrow
    import pyarrow.parquet as pq

    try:
        opened = pq.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise _damaged_error(path, error) from None
    with opened as file:
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=["row"]):
            for text in batch.column(0).to_pylist():
                yield json.loads(text)


def _damaged_error(path: Path, error: Exception) -> InputError:
    return InputError(
        f"the captured rows in {path} cannot be read: {get_first_line(error)}",
        hint="Restore the file from a backup, or delete it and lose its rows.",
    )


def read_compacted_names(parquet: Path) -> frozenset[str]:
    """Return the names of the sealed files whose rows a compacted file contains."""
    if not parquet.exists():
        return frozenset()
    import pyarrow
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(parquet).metadata or {}
    except pyarrow.ArrowInvalid as error:
        raise _damaged_error(parquet, error) from None
    return frozenset(json.loads(metadata.get(b"tuneline.files", b"[]")))


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file, atomically and with the modes of captured traffic, by what `write` writes to a path."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        os.close(create_file(temporary, -1))
        write(temporary)
        artifact_folder.fsync(temporary)
        filesystem.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    artifact_folder.fsync(path.parent)


def replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the lines of a file, which may come from the file itself."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(lines)

    replace_file(path, write)


def remove_temporary_files(day: DayFolder) -> None:
    """Remove the temporary files of an interrupted replacement. Call it under the lock."""
    # Not all hidden files: a file server has its own, such as .nfs… and .snapshot.
    for path in [*day.path.glob(f".{PARQUET_FILENAME}.*"), *day.path.glob("*/.*.jsonl.*")]:
        path.unlink(missing_ok=True)


def now() -> datetime:
    """Return the current time (UTC)."""
    return datetime.now(UTC)
