"""Leaves out of the compared texts the context that recurs across rows: system prompts, retrieved passages, templates.

Rows of a chat or retrieval dataset share long prompts, and differ in the question and the answer. Compared with the whole
text, different questions about one passage would be near-duplicates. What is compared of a row is therefore:

- the answer, always whole: everything after the last user turn;
- of the last user turn and what precedes it, the lines that are not part of MIN_LINE_ROWS different texts or more; of a
  longer line that begins as MIN_PREFIX_ROWS texts or more do, the rest;
- the whole last user turn if all of its lines recur: it then matches only equal turns, not each line's other uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from components.data_curation.comparison.hash_arrays import convert_hashes, find_first_equal_rows
from components.data_curation.prompt_lines import CONTEXT_COLUMNS, PromptLines

MIN_LINE_ROWS = 3
# Edited copies of a prompt also begin alike. A prefix therefore needs more rows than a line, which copies seldom share whole.
MIN_PREFIX_ROWS = 10
MAX_KEYS_IN_MEMORY = 16_000_000


def write_compared_texts(files: Sequence[Path]) -> list[Path]:
    """Write for each file of texts a file whose `words` lack the recurring context; return the files to compare.

    Args:
        files: texts-*.parquet with the columns place, words, words_hash and CONTEXT_COLUMNS.
    """
    recurring = find_recurring_keys(files)
    if not len(recurring):
        return list(files)
    keys, compared = frozenset(recurring.tolist()), list[Path]()
    for file in files:
        table = parquet.read_table(file, columns=["place", "words", "words_hash", *CONTEXT_COLUMNS])
        words, ends, starts = (table[name].to_pylist() for name in ("words", "line_ends", "turn_start"))
        row_keys = table["line_keys"].combine_chunks()
        owners: np.ndarray = np.repeat(np.arange(len(table)), np.diff(row_keys.offsets.to_numpy()))
        for row in np.unique(owners[np.isin(row_keys.flatten().to_numpy(), recurring)]).tolist():
            selected = PromptLines(ends[row], starts[row]).select_words(words[row].split(" "), keys)
            words[row] = " ".join(selected) or words[row]
        columns = {"place": table["place"], "words_hash": table["words_hash"]}
        compared.append(file.with_name(file.name.replace("texts-", "compared-")))
        parquet.write_table(
            pyarrow.table({**columns, "words": pyarrow.array(words, pyarrow.large_string())}), compared[-1]
        )
    return compared


def find_recurring_keys(files: Sequence[Path]) -> np.ndarray:
    """Return the sorted keys of the lines and prefixes that recur across different texts (int64)."""
    tables = [parquet.read_table(file, columns=["words_hash"]) for file in files]
    hashes = pyarrow.concat_tables(tables)["words_hash"]
    is_first = find_first_equal_rows(convert_hashes(hashes)) == np.arange(len(hashes))
    firsts = np.split(is_first, np.cumsum([len(table) for table in tables])[:-1])

    def read_keys(file: Path) -> pyarrow.ChunkedArray:
        return parquet.read_table(file, columns=["line_keys"])["line_keys"]

    parts = sum(len(read_keys(file).combine_chunks().flatten()) for file in files) // MAX_KEYS_IN_MEMORY + 1
    recurring: list[np.ndarray] = []
    for part in range(parts):  # the keys of one part are in memory
        found = list[np.ndarray]()
        for file, first in zip(files, firsts, strict=True):
            keys = read_keys(file).filter(pyarrow.array(first)).combine_chunks().flatten().to_numpy()
            found.append(keys[(keys >> 1) % parts == part])
        distinct, rows = np.unique(np.concatenate(found), return_counts=True)
        recurring.append(distinct[rows >= np.where(distinct & 1, MIN_PREFIX_ROWS, MIN_LINE_ROWS)])
    all_recurring: np.ndarray = np.sort(np.concatenate(recurring))
    return all_recurring
