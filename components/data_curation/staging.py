"""Between reading and writing: all rows, prepared, in a folder of chunks. Memory holds a chunk at a time, and hashes of all rows."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common import cores, process
from components.common.artifacts import Artifact
from components.common.errors import EngineMissingError, TunelineError
from components.common.progress import Reporter
from components.data_curation import duplicates, readers, work
from components.data_curation.config import DataCurationConfig
from components.data_curation.readers import Record, Unread
from components.data_curation.rows import CONTENT, Kind, Row
from components.data_curation.sources import Source
from components.data_curation.splits import SPLITS
from components.data_curation.work import Done

CHUNK_ROWS = 2_000
CHUNK_CHARACTERS = 8_000_000  # of a chunk's longest column: bounds what one chunk holds in memory
PATIENCE = 10.0  # seconds until a Ray cluster must have answered
STANDARD_ERROR = 2
SMALL = 16_000_000  # bytes of sources below which starting further processes takes longer than the work

FIRST_CHUNK = 500_000  # the number of the sources' first; earlier revisions' chunks stand before it

Records = list[Record | Unread]


@dataclass(frozen=True)
class Earlier:
    """A dataset that was published before: what it is called, and where it lies."""

    label: str
    dataset: Artifact


@dataclass
class Staged:
    """The chunks in `folder`: those of earlier revisions first (with every row's split and revision), then those of the sources."""

    folder: Path
    kind: Kind
    published: list[Done] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    chunks: list[Done] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows of the sources."""
        return sum(done.rows for done in self.chunks)

    @property
    def unread(self) -> list[Unread]:
        """All places that could not be read."""
        return [one for done in self.chunks for one in done.unread]

    def forms(self) -> dict[str, int]:
        """Rows of the sources by the format they were read as."""
        counts: Counter[str] = Counter()
        for done in self.chunks:
            counts.update(done.forms)
        return dict(sorted(counts.items()))

    def table(self, done: Done, columns: Sequence[str] | None = None) -> Any:
        """A chunk's rows, or some columns of them."""
        from pyarrow import ipc, memory_map

        with memory_map(str(work.rows_file(self.folder, done.number))) as file, ipc.open_file(file) as chunk:
            wanted = None if columns is None else [chunk.schema.get_field_index(name) for name in columns]
        options = ipc.IpcReadOptions(included_fields=wanted)
        with memory_map(str(work.rows_file(self.folder, done.number))) as file, ipc.open_file(file, options=options) as chunk:
            return chunk.read_all()


def chunked(sources: Sequence[Source], config: DataCurationConfig) -> Iterator[Records]:
    """All records in the order of the files, some thousand at a time."""
    waiting: Records = []
    characters = 0
    for source in sources:
        for one in readers.read(source, config):
            waiting.append(one)
            characters += _size(one)
            if len(waiting) >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                yield waiting
                waiting, characters = [], 0
    if waiting:
        yield waiting


def _size(one: Record | Unread) -> int:
    return _length(one.fields) if isinstance(one, Record) else 0


def _length(value: Any) -> int:
    """About how many characters a value holds."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_length, inner))


def prepare(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    config: DataCurationConfig,
    folder: Path,
    reporter: Reporter,
) -> Generator[Done, None, None]:
    """Prepare every chunk of the sources in `folder`, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = enumerate(chunked(sources, config), FIRST_CHUNK)
    workers = config.workers or cores.threads()
    if config.engine == "ray":
        return _on_ray(chunks, benchmarks, config, folder)
    if workers == 1 or sum(source.bytes for source in sources) < SMALL:
        tools = work.tools(config, benchmarks, reporter)
        return (work.prepare(number, records, tools, folder) for number, records in chunks)
    work.hand_out_settings(folder, config, benchmarks)
    return _in_processes(chunks, folder, workers)


def _in_processes(chunks: Iterable[tuple[int, Records]], folder: Path, workers: int) -> Generator[Done, None, None]:
    """Chunks are handed to children as files; not many more wait than there are children."""
    children: list[subprocess.Popen[str]] = []
    own, threads = threading.local(), ThreadPoolExecutor(workers)

    def ask(number: int) -> Done:
        if not hasattr(own, "child"):
            own.child = _child(folder)
            children.append(own.child)
        return _asked(own.child, folder, number)

    waiting: deque[Future[Done]] = deque()
    try:
        for number, records in chunks:
            work.hand_out(folder, number, records)
            waiting.append(threads.submit(ask, number))
            while len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # children first: whoever waits for one goes on
        threads.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
        threads.shutdown()
        for child in children:  # one may have been started in between
            child.kill()
            child.communicate()


def _child(folder: Path) -> subprocess.Popen[str]:
    """A process that answers on a pipe of its own, in the place of its standard output: that is for what libraries print."""
    answers, told = os.pipe()
    try:
        child = subprocess.Popen(
            process.module_command("components.data_curation.work", str(folder), str(told)),
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR,
            pass_fds=[told],
            text=True,
            env=process.python_environment(OMP_NUM_THREADS="1"),
        )
    finally:
        os.close(told)
    child.stdout = os.fdopen(answers, encoding="utf-8")
    return child


def _asked(child: subprocess.Popen[str], folder: Path, number: int) -> Done:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        print(number, file=child.stdin, flush=True)
        answer = child.stdout.readline().strip()
    except BrokenPipeError:
        answer = ""
    if answer == str(number):
        return work.handed_back(folder, number)
    if answer:
        raise TunelineError.from_dict(json.loads(answer))
    raise EngineMissingError(
        f"a process that prepares rows ended in the middle (exit code {child.wait()})",
        hint="Exit code -9 is a lack of memory: set data_curation.workers lower, or use a larger machine.",
    )


def _on_ray(
    chunks: Iterable[tuple[int, Records]], benchmarks: Sequence[Source], config: DataCurationConfig, folder: Path
) -> Generator[Done, None, None]:
    """All chunks are handed out, then prepared by the cluster's nodes, which see the folder."""
    address, numbers = ray_address(config), []
    work.hand_out_settings(folder, config, benchmarks)
    for number, records in chunks:
        work.hand_out(folder, number, records)
        numbers.append(number)
    if numbers:
        duplicates.run_engine(folder, ["prepare", str(folder), address], lambda: _all_done(folder, numbers))
    return (work.handed_back(folder, number) for number in numbers)


def ray_address(config: DataCurationConfig) -> str:
    """Where the Ray cluster is; "auto" finds the one that this machine belongs to. Raises EngineMissingError where none answers."""
    if importlib.util.find_spec("ray") is None:
        raise EngineMissingError("Ray is not installed", hint="pip install 'tuneline[ray]', with the version of Ray that the cluster has")
    address = config.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.partition("://")[2].rpartition(":") if "://" in address else address.rpartition(":")
    if port.isdecimal():
        _check_answers(host, int(port), address)
    return address


def _check_answers(host: str, port: int, address: str) -> None:
    """Ray itself tries for minutes to find a cluster that is not there."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout=PATIENCE).close()
    except OSError as error:
        raise EngineMissingError(
            f"no Ray cluster answers at {address}: {error.strerror or error}",
            hint="Start it, or name another in data_curation.ray_address or RAY_ADDRESS; data_curation.engine native works without one.",
        ) from None


def _all_done(folder: Path, numbers: Sequence[int]) -> bool:
    return all(work.done_file(folder, number).exists() for number in numbers)


def add_earlier(staged: Staged, earlier: Sequence[Earlier], config: DataCurationConfig) -> None:
    """Prepare the rows of earlier revisions of the same kind, each row of equal content once, the first revision first."""
    seen: set[str] = set()
    for one in earlier:
        if one.dataset.manifest.summary.get("rows_kind") != staged.kind:
            continue
        for split in SPLITS:
            for rows in _published_rows(one.dataset.path / f"{split}.parquet", staged.kind):
                fresh = {digest: row for row in rows if (digest := row.digest()) not in seen}
                seen.update(fresh)
                if fresh:
                    done = work.prepare_published(len(staged.published), list(fresh.values()), config, staged.folder)
                    staged.published.append(done)
                staged.splits += [split] * len(fresh)
                staged.labels += [one.label] * len(fresh)
                staged.ids += [row.id for row in fresh.values()]


def _published_rows(path: Path, kind: Kind) -> Iterator[list[Row]]:
    from pyarrow import parquet

    if not path.exists():
        return
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=CHUNK_ROWS):
            yield [_row(told, kind, path.name) for told in batch.to_pylist()]


def _row(told: dict[str, Any], kind: Kind, file: str) -> Row:
    content = {name: told[name] for name in CONTENT[kind]}
    meta = json.loads(told["meta"]) if told["meta"] else {}
    return Row(kind=kind, content=content, own_id=told["id"], source=told["source"], meta=meta, file=file, line=0, id=told["id"])
