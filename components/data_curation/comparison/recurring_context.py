"""Leaves out of the compared texts the context that recurs across rows: system prompts, retrieved passages, templates.

`write_compared_texts` writes the texts that the engine compares; docs/how-to/data.md, "Near-duplicates", states the rule.
"""

# Rows of a chat or retrieval dataset share long prompts, and differ in the question and the answer. Compared with the
# whole text, different questions about one passage would be near-duplicates. One word stands for each part that is left
# out. The engine also compares the whole texts of the pairs that it finds, so that equal questions about different
# passages remain different rows.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from components.common.row_comparison.prompt_lines import CONTEXT_COLUMNS, PromptLines
from components.common.row_comparison.recurring_keys import select_recurring_keys
from components.data_curation.comparison.hash_arrays import convert_hashes, find_first_equal_rows

MIN_LINE_TEXTS = 3
MAX_KEYS_IN_MEMORY = 16_000_000


def write_compared_texts(files: Sequence[Path]) -> list[Path]:
    """Write for each file of texts a file whose `words` lack the recurring context; return the files to compare.

    Args:
        files: texts-*.parquet with the columns place, words, words_hash and CONTEXT_COLUMNS.
    """
    recurring = find_recurring_keys(files)
    if not len(recurring):
        return list(files)
    compared = list[Path]()
    for file in files:
        table = parquet.read_table(file, columns=["place", "words", "words_hash", *CONTEXT_COLUMNS])
        words, ends, starts = (table[name].to_pylist() for name in ("words", "line_ends", "turn_start"))
        owners, keys = _list_keys(table)
        is_recurring = np.isin(keys, recurring)
        owners, keys = owners[is_recurring], keys[is_recurring]
        rows, begins = np.unique(owners, return_index=True)
        for row, row_keys in zip(rows.tolist(), np.split(keys, begins)[1:], strict=True):
            lines = PromptLines(ends[row], starts[row])
            selected = lines.select_words(words[row].split(" "), frozenset(row_keys.tolist()))
            words[row] = " ".join(selected) or words[row]
        columns = {"place": table["place"], "words_hash": table["words_hash"]}
        columns["words"] = pyarrow.array(words, pyarrow.large_string())
        compared.append(file.with_name(file.name.replace("texts-", "compared-")))
        parquet.write_table(pyarrow.table(columns), compared[-1])
    return compared


def _list_keys(table: pyarrow.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys of a table's rows and, for each key, the number of its row (int64, (keys,) each)."""
    column = table["line_keys"].combine_chunks()
    owners: np.ndarray = np.repeat(np.arange(len(table)), np.diff(column.offsets.to_numpy()))
    return owners, column.flatten().to_numpy()


def find_recurring_keys(files: Sequence[Path]) -> np.ndarray:
    """Return the sorted keys of the lines and prefixes that recur across different texts (int64)."""
    tables = [parquet.read_table(file, columns=["words_hash"]) for file in files]
    hashes = pyarrow.concat_tables(tables)["words_hash"]
    is_first = find_first_equal_rows(convert_hashes(hashes)) == np.arange(len(hashes))
    firsts = np.split(is_first, np.cumsum([len(table) for table in tables])[:-1])

    def read_keys(number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a file's first rows with equal texts, and the keys of their answers."""
        table = parquet.read_table(files[number], columns=["line_keys", "answer_key"])
        table = table.filter(pyarrow.array(firsts[number]))
        owners, keys = _list_keys(table)
        return keys, table["answer_key"].to_numpy()[owners]

    parts = sum(len(read_keys(number)[0]) for number in range(len(files))) // MAX_KEYS_IN_MEMORY + 1
    recurring: list[np.ndarray] = []
    for part in range(parts):  # the keys of one part are in memory
        found: list[np.ndarray] = []
        for number in range(len(files)):
            keys, answers = read_keys(number)
            of_part = (keys >> 1) % parts == part
            found.append(np.stack([keys[of_part], answers[of_part]], axis=1))
        all_keys, all_answers = np.concatenate(found).T
        recurring.append(select_recurring_keys(all_keys, all_answers, MIN_LINE_TEXTS))
    all_recurring: np.ndarray = np.sort(np.concatenate(recurring))
    return all_recurring
