"""The Daft engine: finds near-duplicate texts. Runs as a child process, on this machine or on a Ray cluster."""

#     python -m components.data_curation.engine similar FOLDER THRESHOLD [RAY_ADDRESS]
#     python -m components.data_curation.engine prepare FOLDER RAY_ADDRESS
#
# `prepare` distributes the row-level processing of chunk_worker.py over a Ray cluster. `similar` reads texts-*.parquet
# in FOLDER. Columns: `place` (a row's number), `words` (separated by single spaces), `answer` (the words of the answer,
# or null), the 128-bit hashes `words_hash` and `answer_hash`, and the lines of the prompt (CONTEXT_COLUMNS), of which
# those that recur across rows are not compared. `similar` writes pairs.parquet: the pairs of places
# with a Jaccard similarity of at least THRESHOLD between their word 5-grams. Of equal texts only the first is compared.
# Finally it writes result.json with the digest of pairs.parquet. Daft's native runner may crash while the interpreter
# exits, after its work is done. Therefore the process ends with os._exit, and the parent relies on the result file
# only.
#
# MinHash: A. Broder, On the resemblance and containment of documents, 1997. With 32 bands of 4 rows a pair of
# similarity s becomes a candidate with probability 1 − (1 − s⁴)³²: 0.9998 at 0.7. Every candidate is then compared
# exactly. Signatures are stored on disk, one column per band. Candidates are found band by band, so memory holds one
# band of all rows (24 bytes per row). On Ray the files' signatures and the bands are distributed over the nodes, which
# must all have access to FOLDER.
#
# Thousands of rows with a common long template share a bucket, and the number of pairs in a bucket is quadratic. In a
# bucket of more than MAX_FULL_BUCKET_ROWS rows, each row is paired with the bucket's first row. It is also paired with
# its NEIGHBOURHOOD_ROWS predecessors in the order of the next band. Source: the sorted neighbourhood of M. Hernández
# and S. Stolfo, The merge/purge problem for large databases, 1995. The pairs with the first row cover copies of one
# text; rows that are similar beyond the template also share other, smaller buckets.

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import dataset, parquet

from components.common.row_comparison.shingles import SHINGLE_WORDS, hash_shingles
from components.data_curation.comparison.hash_arrays import convert_hashes, find_first_equal_rows
from components.data_curation.comparison.recurring_context import write_compared_texts

BAND_COUNT, ROWS_PER_BAND = 32, 4
MAX_FULL_BUCKET_ROWS = 200  # larger buckets are compared by neighbourhood
NEIGHBOURHOOD_ROWS = 20
MAX_PAIRS_IN_MEMORY = 4_000_000
MAX_SHINGLES_IN_MEMORY = 4_000_000  # compared at once: about 200 MB
MAX_CACHED_WORDS = 1_000_000
LOW_HALF_BITS = np.uint64(32)


def write_similar_pairs(folder: Path, threshold: float, ray_address: str | None = None) -> None:
    """Write pairs.parquet and then result.json.

    Args:
        folder: contains texts-*.parquet.
        threshold: the minimum Jaccard similarity of a pair.
        ray_address: the Ray cluster's address; None to run on this machine.
    """
    _select_runner(ray_address)
    files = sorted(folder.glob("texts-*.parquet"))
    compared = {"words": write_compared_texts(files), "answer": files}
    found = [
        (name, *_find_similar(folder, paths, files, name, threshold, on_ray=bool(ray_address)))
        for name, paths in compared.items()
    ]
    pairs = np.concatenate([pairs for _, pairs, _ in found])
    columns = {
        "of": pyarrow.array([name for name, pairs, _ in found for _ in range(len(pairs))], pyarrow.string()),
        "a": pairs[:, 0],
        "b": pairs[:, 1],
        "similarity": np.concatenate([similarity for _, _, similarity in found]),
    }
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    data = sink.getvalue().to_pybytes()
    result = {
        "texts": [file.name for file in files],
        "files": {"pairs.parquet": hashlib.sha256(data).hexdigest()},
    }
    for name, content in {"pairs.parquet": data, "result.json": json.dumps(result).encode()}.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _select_runner(ray_address: str | None) -> None:
    import daft

    if ray_address:
        daft.set_runner_ray(address=ray_address)
    else:
        daft.set_runner_native()


def prepare_on_ray(folder: Path, ray_address: str) -> None:
    """Prepare every raw chunk of the folder, on all nodes of a Ray cluster."""
    from components.data_curation.chunk_worker import prepare_raw_chunk

    _select_runner(ray_address)
    numbers = sorted(int(file.stem.rpartition("-")[2]) for file in folder.glob("raw-*.jsonl"))
    _run_on_ray(lambda number: prepare_raw_chunk(str(folder), number), numbers)


def _run_on_ray(task: Callable[[int], int], numbers: Sequence[int]) -> None:
    """Run the task once for each number, each in its own partition."""
    import daft
    from daft import DataType, col

    run = daft.func(task, return_dtype=DataType.int64())
    daft.from_pydict({"number": list(numbers)}).into_partitions(len(numbers)).select(run(col("number"))).collect()


def _find_similar(
    folder: Path, files: list[Path], whole_files: list[Path], name: str, threshold: float, *, on_ray: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the similar pairs of distinct texts as places (a < b), sorted, and their similarities.

    Args:
        folder: the engine's folder.
        files: the compared texts.
        whole_files: the same texts with the recurring context. Pairs must be similar in both.
        name: the compared column.
        threshold: the minimum Jaccard similarity of a pair.
        on_ray: whether the runner is a Ray cluster.
    """
    import daft
    import daft.functions as functions
    from daft import col, element

    table = pyarrow.concat_tables([parquet.read_table(file, columns=["place", f"{name}_hash"]) for file in files])
    table = table.filter(table[f"{name}_hash"].is_valid())
    first_equal = find_first_equal_rows(convert_hashes(table[f"{name}_hash"]))
    # The places (int64, sorted) of the first row of every distinct text.
    first: np.ndarray = table["place"].to_numpy()[first_equal == np.arange(len(first_equal))]
    if len(first) < 2:
        return np.empty((0, 2), dtype=np.int64), np.empty(0)
    np.save(folder / f"first-{name}.npy", first)
    texts = daft.read_parquet([str(file) for file in files]).where(col(name).not_null())
    signature = functions.minhash(
        col(name), num_hashes=BAND_COUNT * ROWS_PER_BAND, ngram_size=SHINGLE_WORDS, hash_function="xxhash"
    )
    hashes = functions.list_map(functions.chunk(signature, ROWS_PER_BAND), functions.hash(element()))
    columns = [functions.get(col("bands"), band).alias(f"b{band}") for band in range(BAND_COUNT)]
    banded = texts.select("place", hashes.alias("bands")).select("place", *columns)
    banded.write_parquet(str(folder / f"bands-{name}"), write_mode="overwrite")
    if on_ray:
        _run_on_ray(lambda band: write_band_pairs(str(folder), name, band), range(BAND_COUNT))
    else:
        for band in range(BAND_COUNT):
            write_band_pairs(str(folder), name, band)
    bands = [np.load(_get_band_path(folder, name, band), mmap_mode="r") for band in range(BAND_COUNT)]
    is_paired: np.ndarray = np.zeros(len(first), dtype=bool)
    for keys in bands:
        is_paired[_unpack_pairs(keys).ravel()] = True
    shingles = _ShingleFile.write(folder / f"shingles-{name}.bin", files, name, first, is_paired)
    found = [shingles.verify_pairs(_unpack_pairs(keys), threshold) for keys in _merge_bands(bands, len(first))]
    similar, similarity = (np.concatenate(parts) for parts in zip(*found, strict=True))
    if files != whole_files:
        is_paired = np.isin(np.arange(len(first)), similar)
        whole = _ShingleFile.write(folder / f"whole-{name}.bin", whole_files, name, first, is_paired)
        whole_similarity = whole.measure_pairs(similar)
        is_similar = whole_similarity >= threshold
        similar, similarity = similar[is_similar], np.minimum(similarity, whole_similarity)[is_similar]
    return first[similar], similarity


def _unpack_pairs(keys: np.ndarray) -> np.ndarray:
    """Return the pairs (int64, (pairs, 2)) of the keys that `write_band_pairs` writes."""
    pairs: np.ndarray = np.stack([keys >> LOW_HALF_BITS, keys & np.uint64(0xFFFFFFFF)], axis=1).astype(np.int64)
    return pairs


def _merge_bands(bands: list[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    """Yield the distinct keys of all bands, sorted, in parts that bound the memory."""
    counts: np.ndarray = np.zeros(rows, dtype=np.int64)
    for keys in bands:
        counts += np.bincount((keys >> LOW_HALF_BITS).astype(np.int64), minlength=rows)
    part = np.cumsum(counts) // MAX_PAIRS_IN_MEMORY
    cuts = (np.flatnonzero(np.diff(part)) + 1).astype(np.uint64) << LOW_HALF_BITS
    ends = [np.r_[0, np.searchsorted(keys, cuts), len(keys)] for keys in bands]
    for number in range(len(cuts) + 1):
        ranges = [keys[end[number] : end[number + 1]] for keys, end in zip(bands, ends, strict=True)]
        yield np.unique(np.concatenate(ranges))


def _get_band_path(folder: Path, name: str, band: int) -> Path:
    return folder / f"pairs-{name}-{band:02}.npy"


def write_band_pairs(folder: str, name: str, band: int) -> int:
    """Write the sorted, distinct keys of the pairs of texts that share a bucket of one band.

    Args:
        folder: the engine's folder.
        name: the compared texts, "words" or "answer".
        band: the band's number from 0.

    Returns:
        The number of keys before duplicates are removed.
    """
    columns = [f"b{band}", f"b{(band + 1) % BAND_COUNT}"]
    table = dataset.dataset(str(Path(folder) / f"bands-{name}"), format="parquet").to_table(columns=["place", *columns])
    places, first = table["place"].to_numpy(), np.load(Path(folder) / f"first-{name}.npy")
    is_first = np.isin(places, first, assume_unique=True)
    rows = np.asarray(np.searchsorted(first, places[is_first]))
    buckets = (table[column].to_numpy()[is_first] for column in columns)
    pairs: np.ndarray = find_pairs_in_buckets(rows, *buckets).astype(np.uint64)
    keys = (pairs[:, 0] << LOW_HALF_BITS) | pairs[:, 1]  # rows are below 2³²: one sortable key for each pair
    with _get_band_path(Path(folder), name, band).open("wb") as file:
        np.save(file, np.unique(keys))
    return len(keys)


def find_pairs_in_buckets(rows: np.ndarray, buckets: np.ndarray, next_band: np.ndarray) -> np.ndarray:
    """Return pairs a < b of rows in equal buckets (int64, (pairs, 2)).

    In a large bucket, each row is paired with the first row, and with the NEIGHBOURHOOD_ROWS rows before it in the
    order of `next_band`. Such a pair may occur twice.

    Args:
        rows: the numbers of the rows (int64, (rows,)).
        buckets: the hash of each row's signature in the band, which is the row's bucket.
        next_band: the hash of each row's signature in the next band.
    """
    order = np.lexsort((rows, buckets))
    rows, buckets, next_band = rows[order], buckets[order], next_band[order]
    ends = np.r_[np.flatnonzero(buckets[1:] != buckets[:-1]) + 1, len(buckets)]
    lengths = np.diff(ends, prepend=0)
    pairs: list[np.ndarray] = [np.empty((0, 2), dtype=np.int64)]
    for length in np.unique(lengths[(lengths > 1) & (lengths <= MAX_FULL_BUCKET_ROWS)]):
        starts = (ends - lengths)[lengths == length]
        left, right = np.triu_indices(length, 1)
        step = max(1, MAX_PAIRS_IN_MEMORY // len(left))
        for i in range(0, len(starts), step):
            lists = rows[starts[i : i + step, None] + np.arange(length)]
            pairs.append(np.stack([lists[:, left].ravel(), lists[:, right].ravel()], axis=1))
    is_large = lengths > MAX_FULL_BUCKET_ROWS
    for end, length in zip(ends[is_large], lengths[is_large], strict=True):
        bucket = rows[end - length : end]
        near = bucket[np.lexsort((bucket, next_band[end - length : end]))]
        neighbours = [(near[:-i], near[i:]) for i in range(1, NEIGHBOURHOOD_ROWS + 1)]
        first = np.broadcast_to(bucket[:1], length - 1), bucket[1:]
        pairs += [np.sort(np.stack(pair, axis=1), axis=1) for pair in (first, *neighbours)]
    found: np.ndarray = np.concatenate(pairs)
    return found


@dataclass(frozen=True)
class _ShingleFile:
    """Shingles of the texts on disk. A row's shingles are `shingles[offsets[row]:offsets[row + 1]]` (int64, sorted)."""

    shingles: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def write(path: Path, files: list[Path], name: str, first: np.ndarray, is_paired: np.ndarray) -> _ShingleFile:
        """Write the shingles of the paired rows; other rows have no shingles."""
        lengths: np.ndarray = np.zeros(len(first) + 1, dtype=np.int64)
        word_hashes = dict[str, int]()
        with path.open("wb") as out:
            for file in files:
                places = parquet.read_table(file, columns=["place"])["place"].to_numpy()
                if not (chosen := np.isin(places, first[is_paired], assume_unique=True)).any():
                    continue
                rows = np.asarray(np.searchsorted(first, places[chosen])).tolist()
                texts = parquet.read_table(file, columns=[name])[name].filter(chosen).to_pylist()
                for row, text in zip(rows, texts, strict=True):
                    shingles = hash_shingles(text, word_hashes)
                    lengths[row + 1] = len(shingles)
                    out.write(shingles.tobytes())
                    if len(word_hashes) > MAX_CACHED_WORDS:
                        word_hashes.clear()
        is_empty = not path.stat().st_size  # an empty file cannot be mapped
        shingles = np.empty(0, dtype=np.int64) if is_empty else np.memmap(path, dtype=np.int64, mode="r")
        return _ShingleFile(shingles, np.cumsum(lengths))

    def verify_pairs(self, pairs: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of rows whose exact Jaccard similarity reaches the threshold, and their similarities."""
        low, high = np.sort(np.diff(self.offsets)[pairs], axis=1).T
        pairs = pairs[low >= threshold * high]  # the similarity is at most low / high
        similarity = self.measure_pairs(pairs)
        is_similar = similarity >= threshold
        return pairs[is_similar], similarity[is_similar]

    def measure_pairs(self, pairs: np.ndarray) -> np.ndarray:
        """Return the exact Jaccard similarities of pairs of rows (float64, (pairs,))."""
        from scipy.sparse import csr_array

        together = np.diff(self.offsets)[pairs].sum(axis=1)
        batch = np.cumsum(together) // MAX_SHINGLES_IN_MEMORY
        bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(pairs)]
        counts = []
        # The product of sparse 0/1 matrices (rows × all 63-bit hashes) counts the shared hashes.
        for i, j in pairwise(bounds):
            matrices = []
            for rows in pairs[i:j].T:
                lengths = self.offsets[rows + 1] - self.offsets[rows]
                ends = np.concatenate([[0], np.cumsum(lengths)])
                columns = self.shingles[np.repeat(self.offsets[rows] - ends[:-1], lengths) + np.arange(ends[-1])]
                ones: np.ndarray = np.ones(len(columns), dtype=np.int8)
                matrices.append(csr_array((ones, columns, ends), shape=(len(rows), 2**63 - 1)))
            counts.append(np.diff(matrices[0].multiply(matrices[1]).indptr))
        shared = np.concatenate(counts)
        similarity: np.ndarray = shared / (together - shared)
        return similarity


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare_on_ray(Path(sys.argv[2]), sys.argv[3])
    else:
        write_similar_pairs(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
    os._exit(0)
