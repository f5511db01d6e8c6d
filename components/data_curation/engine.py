"""The Daft engine: which rows say the same, and which say nearly the same. Runs as a child process.

    python -m components.data_curation.engine TEXTS.parquet FOLDER THRESHOLD

TEXTS has a row's number (`row`), its text for exact comparison (`exact`), its words for near duplicates (`words`) and its answer's words
(`answer`, null where none counts), words being separated by single spaces. FOLDER receives groups.parquet (for every row, the first row
with the same exact text, words, answer) and pairs.parquet (pairs of such first rows with the Jaccard similarity of their word 5-grams,
from THRESHOLD on), then result.json with their digests. Daft's native runner may crash while the interpreter exits, after its work is
done: so the process ends with os._exit, and the parent believes the result file alone.

MinHash: A. Broder, On the resemblance and containment of documents, 1997. With 32 bands of 4 rows a pair of similarity s becomes a
candidate with probability 1 − (1 − s⁴)³², which is 0.9998 at 0.7; every candidate is then compared exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

BANDS, ROWS, NGRAM = 32, 4, 5
PAIRS_AT_ONCE = 4_000_000  # candidate pairs held before equal ones are merged
SHINGLES_AT_ONCE = 8_000_000  # shingles compared at once: bounds memory at about 200 MB


def main(texts: Path, folder: Path, threshold: float) -> None:
    """Write groups.parquet, pairs.parquet and, last, result.json."""
    import daft

    daft.set_runner_native()
    frame = daft.read_parquet(str(texts))
    groups = {name: _groups(frame, name) for name in ("exact", "words", "answer")}
    pairs = [(name, *_similar(frame, name, groups[name], threshold)) for name in ("words", "answer")]
    rows = _write_groups(folder / "groups.parquet", groups)
    _write_pairs(folder / "pairs.parquet", pairs)
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("groups.parquet", "pairs.parquet")}
    _write_durably(folder / "result.json", json.dumps({"rows": rows, "files": files}).encode())


def _groups(frame: Any, name: str) -> Any:
    """An int64 array of (row, first row with the same text) for every row where `name` is not null, sorted by row."""
    import numpy
    from daft import col

    table = frame.where(col(name).not_null()).groupby(name).agg(col("row").list_agg().alias("rows")).select("rows").to_arrow()
    rows, ends = _lists(table["rows"])
    if not len(rows):
        return numpy.empty((0, 2), dtype=numpy.int64)
    starts = numpy.r_[0, ends[:-1]]
    first: Any = numpy.repeat(numpy.minimum.reduceat(rows, starts), ends - starts)
    return numpy.stack([rows, first], axis=1)[numpy.argsort(rows)]


def _lists(column: Any) -> tuple[Any, Any]:
    """A column of lists as one flat array and the end of each list in it."""
    import numpy

    lists = column.combine_chunks()
    flat = lists.flatten().to_numpy(zero_copy_only=False).astype(numpy.int64)
    return flat, numpy.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False).astype(numpy.int64))


def _similar(frame: Any, name: str, groups: Any, threshold: float) -> tuple[Any, Any]:
    """Pairs (a < b) of first rows and their similarities, sorted."""
    from daft import col

    first: Any = groups[groups[:, 0] == groups[:, 1], 0]
    texts = frame.select("row", name).where(col("row").is_in(first.tolist())).collect()
    candidates = _candidates(texts, name, int(first.max()) + 1 if len(first) else 1)
    return _verified(texts, name, candidates, threshold)


def _candidates(texts: Any, name: str, limit: int) -> Any:
    """Pairs that share a band of their MinHash signatures, as an int64 array (pairs, 2), sorted; rows are below `limit`."""
    import daft.functions as functions
    import numpy
    from daft import col, lit

    signature = functions.minhash(col(name), num_hashes=BANDS * ROWS, ngram_size=NGRAM, hash_function="xxhash")
    bands = texts.select("row", functions.chunk(signature, ROWS).alias("band"), lit(list(range(BANDS))).alias("number"))
    hashed = bands.explode("band", "number").select("row", functions.hash(col("band"), col("number")).alias("bucket"))
    buckets = hashed.groupby("bucket").agg(col("row").list_agg().alias("rows")).where(functions.length(col("rows")) > 1)
    codes: Any = numpy.empty(0, dtype=numpy.int64)
    for some in _codes(*_lists(buckets.select("rows").to_arrow()["rows"]), limit):
        codes = numpy.union1d(codes, some)
    return numpy.stack([codes // limit, codes % limit], axis=1)


def _codes(rows: Any, ends: Any, limit: int) -> Iterator[Any]:
    """All pairs a < b within each list, as the numbers a · limit + b, some millions at a time."""
    import numpy

    lengths = numpy.diff(ends, prepend=0)
    for length in numpy.unique(lengths):
        starts = (ends - lengths)[lengths == length]
        left, right = numpy.triu_indices(length, 1)
        step = max(1, PAIRS_AT_ONCE // len(left))
        for i in range(0, len(starts), step):
            lists = numpy.sort(rows[starts[i : i + step, None] + numpy.arange(length)], axis=1)
            yield numpy.unique(lists[:, left] * limit + lists[:, right])


def _verified(texts: Any, name: str, pairs: Any, threshold: float) -> tuple[Any, Any]:
    """The candidate pairs whose exact Jaccard similarity reaches the threshold, and that similarity."""
    import numpy

    if not len(pairs):
        return pairs, numpy.empty(0)
    wanted, places = numpy.unique(pairs, return_inverse=True)
    places = places.reshape(pairs.shape)
    table = texts.to_pydict()
    by_row = dict(zip(table["row"], table[name], strict=True))
    matrix = _incidence([by_row[int(row)] for row in wanted])
    sizes = numpy.diff(matrix.indptr)
    low, high = numpy.sort(sizes[places], axis=1).T
    near = low >= threshold * high  # sets of very different sizes cannot be similar
    pairs, places = pairs[near], places[near]
    shared = _intersections(matrix, sizes, places)
    similarity = shared / (sizes[places].sum(axis=1) - shared)
    enough = similarity >= threshold
    return pairs[enough], similarity[enough]


def _incidence(texts: list[str]) -> Any:
    """Sparse 0/1 matrix (texts × distinct shingles)."""
    import numpy
    from scipy.sparse import csr_array

    known: dict[str, int] = {}
    shingled = [_shingles(text, known) for text in texts]
    ends = numpy.cumsum([0, *map(len, shingled)])
    distinct, columns = numpy.unique(numpy.concatenate(shingled), return_inverse=True)
    return csr_array((numpy.ones(len(columns), dtype=numpy.int32), columns, ends), shape=(len(texts), len(distinct)))


def _shingles(text: str, known: dict[str, int]) -> Any:
    """The distinct word 5-grams of a text as 64-bit numbers; a text of fewer words is one shingle."""
    import numpy

    numbers = numpy.array([known.get(word) or known.setdefault(word, _number(word)) for word in text.split(" ")], dtype=numpy.uint64)
    width = min(NGRAM, len(numbers))
    total: Any = numpy.zeros(len(numbers) - width + 1, dtype=numpy.uint64)
    for i in range(width):
        total = (total ^ (total >> numpy.uint64(29))) * numpy.uint64(0x9E3779B97F4A7C15) + numbers[i : i + len(total)]
    return numpy.unique(total)


def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def _intersections(matrix: Any, sizes: Any, places: Any) -> Any:
    """How many shingles the texts of each pair share."""
    import numpy

    batch = numpy.cumsum(sizes[places].sum(axis=1)) // SHINGLES_AT_ONCE
    bounds = [0, *(numpy.flatnonzero(numpy.diff(batch)) + 1).tolist(), len(places)]
    parts = [matrix[places[i:j, 0]].multiply(matrix[places[i:j, 1]]).sum(axis=1) for i, j in pairwise(bounds) if j > i]
    return numpy.concatenate(parts) if parts else numpy.empty(0, dtype=numpy.int64)


def _write_groups(path: Path, groups: dict[str, Any]) -> int:
    import pyarrow

    exact = groups["exact"]
    columns = {"row": exact[:, 0], **{name: pyarrow.nulls(len(exact), pyarrow.int64()) for name in groups}}
    for name, array in groups.items():
        found = dict(zip(array[:, 0].tolist(), array[:, 1].tolist(), strict=True))
        columns[name] = pyarrow.array([found.get(row) for row in exact[:, 0].tolist()], pyarrow.int64())
    _write_table(path, pyarrow.table(columns))
    return len(exact)


def _write_pairs(path: Path, found: list[tuple[str, Any, Any]]) -> None:
    import numpy
    import pyarrow

    pairs = numpy.concatenate([pairs.reshape(-1, 2) for _, pairs, _ in found])
    names = [name for name, pairs, _ in found for _ in range(len(pairs))]
    similarity = numpy.concatenate([similarity for _, _, similarity in found])
    columns = {"of": pyarrow.array(names, pyarrow.string()), "a": pairs[:, 0], "b": pairs[:, 1], "similarity": similarity}
    _write_table(path, pyarrow.table(columns))


def _write_table(path: Path, table: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    _write_durably(path, sink.getvalue().to_pybytes())


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    os._exit(0)
