"""128-bit hashes of texts as numpy arrays of two 64-bit halves."""

from __future__ import annotations

import numpy as np
import pyarrow


def convert_hashes(column: pyarrow.Array | pyarrow.ChunkedArray) -> np.ndarray:
    """Convert a column of 16-byte hashes to uint64 (rows, 2); a null becomes two zeros."""
    whole = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
    filled = whole.fill_null(bytes(16))
    halves: np.ndarray = np.frombuffer(
        filled.buffers()[1], dtype=np.uint64, count=2 * len(filled), offset=16 * filled.offset
    )
    return halves.reshape(-1, 2)


def find_first_equal_rows(halves: np.ndarray) -> np.ndarray:
    """Return for every row of a uint64 array (rows, 2) the index of the first equal row (int64, (rows,))."""
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal rows keep their order
    ordered = halves[order]
    is_start: np.ndarray = np.ones(len(order), dtype=bool)
    is_start[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first: np.ndarray = np.empty(len(order), dtype=np.int64)
    first[order] = order[np.flatnonzero(is_start)][np.cumsum(is_start) - 1]
    return first
