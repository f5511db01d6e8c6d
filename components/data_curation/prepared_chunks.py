"""The prepared rows of a curation, in a folder of chunks. Memory holds one chunk, and the hashes of all rows."""

from __future__ import annotations

import gc
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
from typing import TYPE_CHECKING

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime import cpu_cores, process_control
from components.common.runtime.errors import EngineMissingError, TunelineError
from components.data_curation import chunk_worker
from components.data_curation.chunk_worker import ChunkSummary
from components.data_curation.comparison import engine_process
from components.data_curation.comparison.split_assignment import SPLITS
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.decontamination import EvaluationIndex
from components.data_curation.reading import file_readers
from components.data_curation.reading.raw_records import Record, Source, UnreadableRecord, count_characters
from components.data_curation.rows import CONTENT_COLUMNS, Kind, Row

if TYPE_CHECKING:
    import pyarrow

MAX_CHUNK_ROWS = 2_000
MAX_CHUNK_CHARACTERS = 8_000_000  # bounds the memory of one chunk
RAY_CONNECT_TIMEOUT_SECONDS = 10.0
STANDARD_ERROR_DESCRIPTOR = 2
MIN_PARALLEL_BYTES = 16_000_000  # below this size of the sources, starting processes takes longer than the work
FIRST_SOURCE_CHUNK = 500_000  # chunks of earlier revisions have lower numbers

Records = list[Record | UnreadableRecord]


@dataclass(frozen=True)
class EarlierRevision:
    """A published dataset and its label."""

    label: str
    dataset: Artifact


@dataclass
class PreparedRows:
    """Prepared chunks in `folder`: of the sources (`chunks`), and of earlier revisions (`published_chunks`).

    `published_splits`, `revision_labels` and `published_ids` have an entry for every published row. `evaluation_sets`
    are the counts of `EvaluationIndex.sets`.
    """

    folder: Path
    kind: Kind
    published_chunks: list[ChunkSummary] = field(default_factory=list)
    published_splits: list[str] = field(default_factory=list)
    revision_labels: list[str] = field(default_factory=list)
    published_ids: list[str] = field(default_factory=list)
    chunks: list[ChunkSummary] = field(default_factory=list)
    evaluation_sets: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows of the sources."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def unread(self) -> list[UnreadableRecord]:
        """All unreadable records of the sources."""
        return [record for chunk in self.chunks for record in chunk.unread]

    def count_formats(self) -> dict[str, int]:
        """Return the number of the sources' rows by record format."""
        counts: Counter[str] = Counter()
        for chunk in self.chunks:
            counts.update(chunk.formats)
        return dict(sorted(counts.items()))

    def iterate_tables(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pyarrow.Table]]:
        """Yield (number of rows before the chunk, table of the chunk) for each chunk of the sources.

        Args:
            columns: the names of the columns to read; None for all columns.
        """
        begin = 0
        for chunk in self.chunks:
            if chunk.rows:
                yield begin, self.read_table(chunk, columns)
                begin += chunk.rows

    def read_table(self, chunk: ChunkSummary, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """Return a chunk's rows with the named `columns`, or with all columns."""
        from pyarrow import ipc, memory_map

        path = str(chunk_worker.get_rows_path(self.folder, chunk.number))
        fields = None
        if columns is not None:
            with memory_map(path) as file, ipc.open_file(file) as reader:
                fields = [reader.schema.get_field_index(name) for name in columns]
        options = ipc.IpcReadOptions(included_fields=fields)
        with memory_map(path) as file, ipc.open_file(file, options=options) as reader:
            return reader.read_all()


def read_chunks(sources: Sequence[Source], config: DataCurationConfig) -> Iterator[Records]:
    """Yield all records in the order of the files, in chunks of bounded rows and characters."""
    chunk: Records = []
    characters = 0
    for source in sources:
        for record in file_readers.read_records(source, config):
            chunk.append(record)
            characters += count_characters([record.fields, record.unmapped]) if isinstance(record, Record) else 0
            if len(chunk) >= MAX_CHUNK_ROWS or characters >= MAX_CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    if chunk:
        yield chunk


def prepare_chunks(
    sources: Sequence[Source],
    benchmarks: Sequence[Source],
    kind: Kind | None,
    index: EvaluationIndex | None,
    config: DataCurationConfig,
    folder: Path,
) -> Generator[ChunkSummary, None, None]:
    """Prepare the sources' chunks in `folder`, and yield their summaries in order.

    The work runs on Ray, in worker processes, or in this process if the sources are below MIN_PARALLEL_BYTES.

    Args:
        sources: the raw files.
        benchmarks: the evaluation sets, of which every worker process builds its own index.
        kind: the kind of the dataset's rows; None if no record is readable.
        index: the index of the evaluation sets for this process; None without decontamination.
        config: the stage's configuration.
        folder: the folder of the chunks; on Ray, all nodes must have access to it.

    Raises:
        EngineMissingError: the Ray cluster is unreachable, or a worker process crashed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunks = enumerate(read_chunks(sources, config), FIRST_SOURCE_CHUNK)
    workers = config.workers or cpu_cores.get_thread_count()
    if config.engine == "ray":  # all nodes have access to the folder
        address, numbers = resolve_ray_address(config), []
        chunk_worker.write_settings(folder, kind, config, benchmarks)
        for number, records in chunks:
            chunk_worker.write_raw_chunk(folder, number, records)
            numbers.append(number)
        if numbers:
            summaries = [chunk_worker.get_summary_path(folder, number) for number in numbers]
            arguments = ["prepare", str(folder), address]
            engine_process.run_engine(folder, arguments, lambda: all(path.exists() for path in summaries))
        return (chunk_worker.collect_chunk(folder, number) for number in numbers)
    if workers == 1 or sum(source.bytes for source in sources) < MIN_PARALLEL_BYTES:
        gc.freeze()  # the garbage collector's scans of the imported modules take an eighth of the time
        return (chunk_worker.prepare_chunk(number, records, kind, config, index, folder) for number, records in chunks)
    chunk_worker.write_settings(folder, kind, config, benchmarks)
    return _prepare_in_processes(chunks, folder, workers)


def _prepare_in_processes(
    chunks: Iterable[tuple[int, Records]], folder: Path, workers: int
) -> Generator[ChunkSummary, None, None]:
    """Prepare chunks in worker processes, with at most two pending chunks per worker."""
    children: list[subprocess.Popen[str]] = []
    local, threads = threading.local(), ThreadPoolExecutor(workers)

    def request(number: int) -> ChunkSummary:
        """Prepare a chunk in this thread's worker. Raises the worker's error, or EngineMissingError after a crash."""
        if not hasattr(local, "child"):
            local.child = _start_worker(folder)
            children.append(local.child)
        try:
            print(number, file=local.child.stdin, flush=True)
            answer = local.child.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer == str(number):
            return chunk_worker.collect_chunk(folder, number)
        if answer:
            raise TunelineError.from_dict(json.loads(answer))
        raise EngineMissingError(
            f"a worker process crashed while preparing rows (exit code {local.child.wait()})",
            hint="If the exit code is -9 (out of memory), lower data_curation.workers, or use a larger machine.",
        )

    pending: deque[Future[ChunkSummary]] = deque()
    try:
        for number, records in chunks:
            chunk_worker.write_raw_chunk(folder, number, records)
            pending.append(threads.submit(request, number))
            while len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:  # killing the workers ends the threads that wait for them
        threads.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
        threads.shutdown()
        for child in children:  # a thread may have started another worker meanwhile
            child.kill()
            child.communicate()


def _start_worker(folder: Path) -> subprocess.Popen[str]:
    """Start a worker that answers on a separate pipe, because libraries may print to its standard output."""
    answers, descriptor = os.pipe()
    try:
        child = subprocess.Popen(
            process_control.build_module_command("components.data_curation.chunk_worker", str(folder), str(descriptor)),
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR_DESCRIPTOR,
            pass_fds=[descriptor],
            text=True,
            env=process_control.build_python_environment(OMP_NUM_THREADS="1"),
        )
    finally:
        os.close(descriptor)
    child.stdout = os.fdopen(answers, encoding="utf-8")
    return child


def resolve_ray_address(config: DataCurationConfig) -> str:
    """Return the Ray cluster's address; "auto" is the cluster on this machine.

    Raises:
        EngineMissingError: Ray is not installed, or the cluster is unreachable.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineMissingError(
            "data_curation.engine: ray requires the package ray, which is not installed",
            hint="Run: pip install 'tuneline[ray]', with the Ray version of the cluster.",
        )
    address = config.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():  # Ray itself retries an unreachable cluster for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_CONNECT_TIMEOUT_SECONDS).close()
        except OSError as error:
            raise EngineMissingError(
                f"no Ray cluster answers at {address}: {error.strerror or error}",
                hint="Start the cluster, set data_curation.ray_address or RAY_ADDRESS to a running cluster, or set "
                "data_curation.engine to native.",
            ) from None
    return address


def add_earlier_revisions(
    prepared: PreparedRows, earlier: Sequence[EarlierRevision], config: DataCurationConfig
) -> None:
    """Prepare the rows of earlier revisions of the same kind, and add them to `prepared`.

    Of equal rows, the row of the first revision is used.
    """
    from pyarrow import parquet

    seen: set[str] = set()
    for revision in earlier:
        if revision.dataset.manifest.summary.get("rows_kind") != prepared.kind:
            continue
        for split in SPLITS:
            path = revision.dataset.path / f"{split}.parquet"
            for batch in parquet.ParquetFile(path).iter_batches(batch_size=MAX_CHUNK_ROWS) if path.exists() else ():
                rows = [
                    Row(
                        kind=prepared.kind,
                        content={name: fields[name] for name in CONTENT_COLUMNS[prepared.kind]},
                        own_id=fields["id"],
                        source=fields["source"],
                        meta=json.loads(fields["meta"]) if fields["meta"] else {},
                        file=path.name,
                        line=0,
                        id=fields["id"],
                    )
                    for fields in batch.to_pylist()
                ]
                new = {digest: row for row in rows if (digest := row.digest()) not in seen}
                seen.update(new)
                if new:
                    number = len(prepared.published_chunks)
                    prepared.published_chunks.append(
                        chunk_worker.prepare_published_chunk(number, list(new.values()), config, prepared.folder)
                    )
                prepared.published_splits += [split] * len(new)
                prepared.revision_labels += [revision.label] * len(new)
                prepared.published_ids += [row.id for row in new.values()]
