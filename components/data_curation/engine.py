"""The Daft engine: which texts are nearly the same. Runs as a child process, on this machine or on a Ray cluster.

    python -m components.data_curation.engine similar FOLDER THRESHOLD [RAY_ADDRESS]
    python -m components.data_curation.engine prepare FOLDER RAY_ADDRESS

`prepare` spreads the row-level work of work.py over a Ray cluster. `similar` finds similar texts: FOLDER holds texts-*.parquet, with a
row's number (`place`), its words separated by single spaces (`words`), the words of its answer (`answer`, null where none counts), and the
128-bit hashes of both (`words_hash`, `answer_hash`). It receives pairs.parquet (pairs of places with the Jaccard similarity of their word
5-grams, from THRESHOLD on; of equal texts only the first is compared), then result.json with its digest.
Daft's native runner may crash while the interpreter exits, after its work is done: so the process ends with os._exit, and the parent
believes the result file alone.

MinHash: A. Broder, On the resemblance and containment of documents, 1997. With 32 bands of 4 rows a pair of similarity s becomes a
candidate with probability 1 − (1 − s⁴)³², which is 0.9998 at 0.7; every candidate is then compared exactly. Signatures go to disk, a
column a band, and the candidates are found band by band: memory holds one band of all rows (24 bytes a row), not all of them. On Ray the
signatures of the files and the bands are spread over the cluster's nodes, which must all see FOLDER.

Rows that share a long template fall into one bucket by the thousand, and all its pairs are the square of that. A bucket of more than
CROWD rows gives, for each of its rows, the pair with the bucket's first and those with the NEAR rows before it in the order of the next
band: a sorted neighbourhood (M. Hernández and S. Stolfo, The merge/purge problem for large databases, 1995). Copies of one text are found
by the former; rows that are alike beyond the template meet in other, smaller buckets too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BANDS, ROWS, NGRAM = 32, 4, 5
TEXTS = ("words", "answer")
CROWD, NEAR = 200, 20  # rows of a bucket from which on not all of its pairs are looked at, and how many before each row then are
PAIRS_AT_ONCE = 4_000_000  # candidate pairs held at once
SHINGLES_AT_ONCE = 4_000_000  # shingles compared at once: bounds memory at about 200 MB
WORDS_KNOWN = 1_000_000  # words whose numbers are kept


def similar(folder: Path, threshold: float, ray_address: str | None = None) -> None:
    """Write pairs.parquet and, last, result.json."""
    _use_runner(ray_address)
    files = sorted(folder.glob("texts-*.parquet"))
    pairs = [(name, *_similar(folder, files, name, threshold, on_ray=bool(ray_address))) for name in TEXTS]
    _write_pairs(folder / "pairs.parquet", pairs)
    digest = hashlib.sha256((folder / "pairs.parquet").read_bytes()).hexdigest()
    told = {"texts": [file.name for file in files], "files": {"pairs.parquet": digest}}
    _write_durably(folder / "result.json", json.dumps(told).encode())


def _use_runner(ray_address: str | None) -> None:
    """Have Daft work here, or on the Ray cluster at this address."""
    import daft

    if ray_address:
        daft.set_runner_ray(address=ray_address)
    else:
        daft.set_runner_native()


def prepare(folder: Path, ray_address: str) -> None:
    """Prepare every chunk that was handed out in the folder, on all nodes of a Ray cluster."""
    import daft
    from daft import DataType, col

    from components.data_curation.work import prepare_file

    _use_runner(ray_address)
    numbers = sorted(int(file.stem.rpartition("-")[2]) for file in folder.glob("raw-*.jsonl"))
    task = daft.func(lambda number: prepare_file(str(folder), number), return_dtype=DataType.int64())
    daft.from_pydict({"number": numbers}).into_partitions(len(numbers)).select(task(col("number"))).collect()


def _similar(folder: Path, files: list[Path], name: str, threshold: float, *, on_ray: bool) -> tuple[Any, Any]:
    """Pairs (a < b) of places of different texts and their similarities, sorted."""
    import numpy

    first = _distinct(files, name)
    if len(first) < 2:
        return numpy.empty((0, 2), dtype=numpy.int64), numpy.empty(0)
    numpy.save(folder / f"first-{name}.npy", first)
    _write_bands(files, name, folder / f"bands-{name}")
    bands = _candidates(folder, name, on_ray=on_ray)
    texts = _Shingles.write(folder, files, name, first, _named(bands, len(first)))
    found = [texts.verified(_pairs(keys), threshold) for keys in _ranges(bands, len(first))]
    return first[numpy.concatenate([pairs for pairs, _ in found])], numpy.concatenate([similarity for _, similarity in found])


def _distinct(files: list[Path], name: str) -> Any:
    """The places (int64, sorted) of the first row of every different text."""
    import numpy
    from pyarrow import parquet

    tables = [parquet.read_table(file, columns=["place", f"{name}_hash"]) for file in files]
    places = numpy.concatenate([table["place"].to_numpy() for table in tables])
    known = numpy.concatenate([table[f"{name}_hash"].is_valid().to_numpy() for table in tables])
    halves = numpy.concatenate([as_numbers(table[f"{name}_hash"]) for table in tables])[known]
    first = first_equal(halves)
    return places[known][first == numpy.arange(len(first))]


def as_numbers(column: Any) -> Any:
    """A column of 16-byte hashes as a uint64 array (rows, 2); a null is two zeros."""
    import numpy
    import pyarrow

    whole = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    filled = whole.fill_null(bytes(16))
    return numpy.frombuffer(filled.buffers()[1], dtype=numpy.uint64, count=2 * len(filled), offset=16 * filled.offset).reshape(-1, 2)


def first_equal(halves: Any) -> Any:
    """For every row of a uint64 array (rows, 2) the index of the first row that is equal to it."""
    import numpy

    order = numpy.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal rows stay in their order
    ordered = halves[order]
    begins: Any = numpy.ones(len(order), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first: Any = numpy.empty(len(order), dtype=numpy.int64)
    first[order] = order[numpy.flatnonzero(begins)][numpy.cumsum(begins) - 1]
    return first


def _write_bands(files: list[Path], name: str, folder: Path) -> None:
    """A Parquet folder with a column for every band of the texts' signatures, and their places."""
    import daft
    import daft.functions as functions
    from daft import col, element

    texts = daft.read_parquet([str(file) for file in files]).where(col(name).not_null())
    signature = functions.minhash(col(name), num_hashes=BANDS * ROWS, ngram_size=NGRAM, hash_function="xxhash")
    bands = functions.list_map(functions.chunk(signature, ROWS), functions.hash(element()))
    columns = [functions.get(col("bands"), band).alias(f"b{band}") for band in range(BANDS)]
    texts.select("place", bands.alias("bands")).select("place", *columns).write_parquet(str(folder), write_mode="overwrite")


def _candidates(folder: Path, name: str, *, on_ray: bool) -> list[Any]:
    """By band, the sorted keys (see _keys) of the pairs that share it; they stay on disk."""
    import numpy

    if on_ray:
        _band_by_band_on_ray(folder, name)
    else:
        for band in range(BANDS):
            write_band_pairs(str(folder), name, band)
    return [numpy.load(_of_band(folder, name, band), mmap_mode="r") for band in range(BANDS)]


def _keys(pairs: Any) -> Any:
    """Pairs of numbers below 2³² as one number each (uint64, (pairs,)), in the order of the pairs."""
    import numpy

    return (pairs[:, 0].astype(numpy.uint64) << numpy.uint64(32)) | pairs[:, 1].astype(numpy.uint64)


def _pairs(keys: Any) -> Any:
    """The pairs (int64, (pairs, 2)) that the keys stand for."""
    import numpy

    return numpy.stack([keys >> numpy.uint64(32), keys & numpy.uint64(0xFFFFFFFF)], axis=1).astype(numpy.int64)


def _ranges(bands: list[Any], rows: int) -> Iterator[Any]:
    """The different keys of all bands, sorted, for one range of earlier rows after the other: memory holds some millions at a time."""
    import numpy

    counts: Any = numpy.zeros(rows, dtype=numpy.int64)
    for keys in bands:
        counts += numpy.bincount((keys >> numpy.uint64(32)).astype(numpy.int64), minlength=rows)
    part = numpy.cumsum(counts) // PAIRS_AT_ONCE
    cuts = (numpy.flatnonzero(numpy.diff(part)) + 1).astype(numpy.uint64) << numpy.uint64(32)
    ends = [numpy.r_[0, numpy.searchsorted(keys, cuts), len(keys)] for keys in bands]
    for number in range(len(cuts) + 1):
        yield numpy.unique(numpy.concatenate([keys[end[number] : end[number + 1]] for keys, end in zip(bands, ends, strict=True)]))


def _named(bands: list[Any], rows: int) -> Any:
    """Which rows are in a pair (bool, (rows,))."""
    import numpy

    named: Any = numpy.zeros(rows, dtype=bool)
    for keys in bands:
        for ends in _pairs(keys).T:
            named[ends] = True
    return named


def _band_by_band_on_ray(folder: Path, name: str) -> None:
    import daft
    from daft import DataType, col

    def write(band: int) -> int:
        return write_band_pairs(str(folder), name, band)

    task = daft.func(write, return_dtype=DataType.int64())
    daft.from_pydict({"band": list(range(BANDS))}).into_partitions(BANDS).select(task(col("band"))).collect()


def _of_band(folder: Path, name: str, band: int) -> Path:
    return folder / f"pairs-{name}-{band:02}.npy"


def write_band_pairs(folder: str, name: str, band: int) -> int:
    """Write the sorted keys of the pairs of rows, counted among the different texts, that share one band; returns how many there are."""
    import numpy
    from pyarrow import dataset

    columns = [f"b{band}", f"b{(band + 1) % BANDS}"]
    table = dataset.dataset(str(Path(folder) / f"bands-{name}"), format="parquet").to_table(columns=["place", *columns])
    places, first = table["place"].to_numpy(), numpy.load(Path(folder) / f"first-{name}.npy")
    chosen = numpy.isin(places, first, assume_unique=True)
    rows = numpy.searchsorted(first, places[chosen])
    keys = _keys(pairs_in_buckets(rows, *(table[column].to_numpy()[chosen] for column in columns)))
    with _of_band(Path(folder), name, band).open("wb") as file:
        numpy.save(file, numpy.unique(keys))
    return len(keys)


def pairs_in_buckets(rows: Any, buckets: Any, further: Any) -> Any:
    """Pairs a < b of rows in equal buckets (int64, (pairs, 2)): all but in a crowd, whose rows are put in order by `further`; in a crowd
    a pair may come twice."""
    import numpy

    order = numpy.lexsort((rows, buckets))
    rows, buckets, further = rows[order], buckets[order], further[order]
    ends = numpy.r_[numpy.flatnonzero(buckets[1:] != buckets[:-1]) + 1, len(buckets)]
    lengths = numpy.diff(ends, prepend=0)
    crowds = [slice(end - length, end) for end, length in zip(ends[lengths > CROWD], lengths[lengths > CROWD], strict=True)]
    none: Any = numpy.empty((0, 2), dtype=numpy.int64)
    crowded = (_pairs_in_crowd(rows[crowd], further[crowd]) for crowd in crowds)
    return numpy.concatenate([none, *_pairs_of_lists(rows, ends, lengths), *crowded])


def _pairs_of_lists(places: Any, ends: Any, lengths: Any) -> Iterator[Any]:
    """All pairs a < b within each sorted list that is no crowd, some millions at a time."""
    import numpy

    for length in numpy.unique(lengths[(lengths > 1) & (lengths <= CROWD)]):
        starts = (ends - lengths)[lengths == length]
        left, right = numpy.triu_indices(length, 1)
        step = max(1, PAIRS_AT_ONCE // len(left))
        for i in range(0, len(starts), step):
            lists = places[starts[i : i + step, None] + numpy.arange(length)]
            yield numpy.stack([lists[:, left].ravel(), lists[:, right].ravel()], axis=1)


def _pairs_in_crowd(places: Any, further: Any) -> Any:
    """Pairs a < b of one long sorted list: with its first, and with the NEAR before in the order of `further`."""
    import numpy

    near = places[numpy.lexsort((places, further))]
    ends = [(near[:-i], near[i:]) for i in range(1, NEAR + 1)]
    first = numpy.broadcast_to(places[:1], len(places) - 1), places[1:]
    return numpy.concatenate([numpy.sort(numpy.stack(pair, axis=1), axis=1) for pair in (first, *ends)])


@dataclass(frozen=True)
class _Shingles:
    """The shingles of the texts to compare, on disk: `flat` (int64) has those of a row from `ends[row]` to `ends[row + 1]`, sorted."""

    flat: Any
    ends: Any

    @staticmethod
    def write(folder: Path, files: Iterable[Path], name: str, first: Any, wanted: Any) -> _Shingles:
        """Those of the rows that are `wanted`; the others get none."""
        import numpy

        lengths: Any = numpy.zeros(len(first) + 1, dtype=numpy.int64)
        path, known = folder / f"shingles-{name}.bin", dict[str, int]()
        with path.open("wb") as out:
            for row, text in _texts_of(files, name, first, wanted):
                shingles = _shingles(text, known)
                lengths[row + 1] = len(shingles)
                out.write(shingles.tobytes())
                if len(known) > WORDS_KNOWN:
                    known.clear()
        flat: Any = numpy.memmap(path, dtype=numpy.int64, mode="r") if path.stat().st_size else numpy.empty(0, dtype=numpy.int64)
        return _Shingles(flat, numpy.cumsum(lengths))

    def verified(self, pairs: Any, threshold: float) -> tuple[Any, Any]:
        """The pairs of rows whose exact Jaccard similarity reaches the threshold, and that similarity."""
        import numpy

        sizes = numpy.diff(self.ends)
        low, high = numpy.sort(sizes[pairs], axis=1).T
        pairs = pairs[low >= threshold * high]  # sets of very different sizes cannot be similar
        together = sizes[pairs].sum(axis=1)
        batch = numpy.cumsum(together) // SHINGLES_AT_ONCE
        bounds = [0, *(numpy.flatnonzero(numpy.diff(batch)) + 1).tolist(), len(pairs)]
        shared = numpy.concatenate([self._shared(pairs[i:j]) for i, j in pairwise(bounds)])
        similarity = shared / (together - shared)
        enough = similarity >= threshold
        return pairs[enough], similarity[enough]

    def _shared(self, pairs: Any) -> Any:
        """How many shingles the texts of each pair share."""
        import numpy

        left, right = (self._matrix(rows) for rows in pairs.T)
        return numpy.diff(left.multiply(right).indptr)

    def _matrix(self, rows: Any) -> Any:
        """Sparse 0/1 matrix (rows × all 63-bit numbers)."""
        import numpy
        from scipy.sparse import csr_array

        sizes = self.ends[rows + 1] - self.ends[rows]
        ends = numpy.concatenate([[0], numpy.cumsum(sizes)])
        columns = self.flat[numpy.repeat(self.ends[rows] - ends[:-1], sizes) + numpy.arange(ends[-1])]
        return csr_array((numpy.ones(len(columns), dtype=numpy.int8), columns, ends), shape=(len(rows), 2**63 - 1))


def _texts_of(files: Iterable[Path], name: str, first: Any, wanted: Any) -> Iterator[tuple[int, str]]:
    """The rows that are wanted, in their order, with their texts."""
    import numpy
    from pyarrow import parquet

    places = first[wanted]
    for file in files:
        there = parquet.read_table(file, columns=["place"])["place"].to_numpy()
        if (chosen := numpy.isin(there, places, assume_unique=True)).any():
            rows: Any = numpy.searchsorted(first, there[chosen])
            yield from zip(rows.tolist(), parquet.read_table(file, columns=[name])[name].filter(chosen).to_pylist(), strict=True)


def _shingles(text: str, known: dict[str, int]) -> Any:
    """The distinct word 5-grams of a text as sorted 63-bit numbers (int64); a text of fewer words is one shingle."""
    import numpy

    numbers = numpy.array([known.get(word) or known.setdefault(word, _number(word)) for word in text.split(" ")], dtype=numpy.uint64)
    width = min(NGRAM, len(numbers))
    total: Any = numpy.zeros(len(numbers) - width + 1, dtype=numpy.uint64)
    for i in range(width):
        total = (total ^ (total >> numpy.uint64(29))) * numpy.uint64(0x9E3779B97F4A7C15) + numbers[i : i + len(total)]
    return numpy.unique(total >> numpy.uint64(1)).astype(numpy.int64)


def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def _write_pairs(path: Path, found: list[tuple[str, Any, Any]]) -> None:
    import numpy
    import pyarrow
    from pyarrow import parquet

    pairs = numpy.concatenate([pairs.reshape(-1, 2) for _, pairs, _ in found])
    names = [name for name, pairs, _ in found for _ in range(len(pairs))]
    similarity = numpy.concatenate([similarity for _, _, similarity in found])
    columns = {"of": pyarrow.array(names, pyarrow.string()), "a": pairs[:, 0], "b": pairs[:, 1], "similarity": similarity}
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    _write_durably(path, sink.getvalue().to_pybytes())


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]), sys.argv[3])
    else:
        similar(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
    os._exit(0)
