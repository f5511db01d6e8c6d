"""Finds evaluated rows that equal or nearly equal a training row.

Rows are compared as the curation compares them: by the Jaccard similarity of the word 5-grams, of the whole texts and of
the texts without recurring context.
"""

# A line of the prompt counts as context if two of the rows with different answers share it; the curation requires three
# rows, of which some may be missing here, because the dataset lacks rejected rows.
#
# The comparison is exact. Two texts of similarity t share at least t of the shingles of each, so a similar training row
# has one of any n - t·n + 1 of an evaluated row's n shingles. Only those are indexed that the fewest evaluated rows have
# (prefix filtering: Chaudhuri et al., A Primitive Operator for Similarity Joins in Data Cleaning, ICDE 2006).

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from components.common.row_comparison.prompt_lines import PromptLines
from components.common.row_comparison.recurring_keys import select_recurring_keys
from components.common.row_comparison.shingles import hash_shingles
from components.common.row_comparison.words import MESSAGE_COLUMNS, split_prompt, split_words

DEFAULT_THRESHOLD = 0.7  # of data_curation.near_duplicate_threshold
MIN_LINE_TEXTS = 2
MAX_OVERLAPS = 20  # of evaluated rows; the comparison ends there
READ_BATCH_ROWS = 1_000
MAX_CACHED_WORDS = 1_000_000
MAX_KEYS_IN_MEMORY = 16_000_000  # about 600 MB with the arrays of their sorting


@dataclass(frozen=True)
class ComparedRow:
    """A row's id, the words of its text, and the lines of its prompt among them."""

    id: str
    words: str
    lines: PromptLines


@dataclass(frozen=True)
class Overlap:
    """An evaluated row and the most similar training row. The similarity is 1 for equal words."""

    evaluated_id: str
    trained_id: str
    similarity: float


def build_row(row_id: str, content: Mapping[str, Any]) -> ComparedRow:
    """Return the row with the words of its content, such as `messages`."""
    words, lines = split_words(*split_prompt(content))
    return ComparedRow(row_id, " ".join(words), lines)


def build_item_row(row_id: str, prompt: str, reference: str) -> ComparedRow:
    """Return the row of an evaluation item."""
    words, lines = split_words([prompt] if prompt else [], [reference] if reference else [])
    return ComparedRow(row_id, " ".join(words), lines)


def read_rows(path: Path) -> Iterator[ComparedRow]:
    """Yield the rows of a dataset's split."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = [name for name in ("id", "text", *MESSAGE_COLUMNS) if name in file.schema_arrow.names]
        for batch in file.iter_batches(READ_BATCH_ROWS, columns=names):
            for row in batch.to_pylist():
                yield build_row(str(row.pop("id")), row)


def find_overlaps(
    evaluated: Sequence[ComparedRow], read_trained: Callable[[], Iterable[ComparedRow]], threshold: float
) -> list[Overlap]:
    """Return the evaluated rows that are similar to a training row, each with the most similar row.

    After `MAX_OVERLAPS` evaluated rows, the remaining training rows are not compared.

    Args:
        evaluated: the evaluated rows.
        read_trained: yields the training rows; called several times.
        threshold: minimum Jaccard similarity of two near-duplicates, of their whole texts and without recurring context.
    """
    distinct = list({row.words: row for row in evaluated if row.words}.values())
    if not distinct:
        return []
    recurring = _find_recurring_keys(lambda: chain(distinct, read_trained()))
    index = _EvaluatedIndex(distinct, recurring, threshold)
    best: dict[str, Overlap] = {}
    for trained in read_trained():
        for row, similarity in index.find_similar(trained):
            if row.id in best:
                if similarity > best[row.id].similarity:
                    best[row.id] = Overlap(row.id, trained.id, similarity)
            elif len(best) < MAX_OVERLAPS:
                best[row.id] = Overlap(row.id, trained.id, similarity)
        if len(best) == MAX_OVERLAPS:
            break
    return list(best.values())


class _EvaluatedIndex:
    """Index of the shingles of the evaluated rows' texts without recurring context."""

    def __init__(self, rows: Sequence[ComparedRow], recurring: np.ndarray, threshold: float) -> None:
        self._rows, self._recurring, self._threshold = rows, recurring, threshold
        self._word_hashes: dict[str, int] = {}
        self._numbers = {row.words: number for number, row in enumerate(rows)}
        self._specific = [hash_shingles(self._select_text(row), self._word_hashes) for row in rows]
        self._whole = [hash_shingles(row.words, self._word_hashes) for row in rows]
        self._owners = self._index_rare_shingles()
        self._indexed: np.ndarray = np.array(sorted(self._owners), dtype=np.int64)

    def _index_rare_shingles(self) -> dict[int, list[int]]:
        """Return the rows' numbers by shingle, for as many of each row's rarest shingles as the threshold requires."""
        _, inverse, counts = np.unique(np.concatenate(self._specific), return_inverse=True, return_counts=True)
        frequencies = np.split(counts[inverse], np.cumsum([len(shingles) for shingles in self._specific])[:-1])
        owners: dict[int, list[int]] = defaultdict(list)
        for number, (shingles, frequency) in enumerate(zip(self._specific, frequencies, strict=True)):
            required = max(math.ceil(self._threshold * len(shingles) - 1e-9), 1)
            rarest = np.argsort(frequency, kind="stable")[: len(shingles) - required + 1]
            for shingle in shingles[rarest].tolist():
                owners[shingle].append(number)
        return owners

    def find_similar(self, trained: ComparedRow) -> list[tuple[ComparedRow, float]]:
        """Return the evaluated rows that are similar to a training row, with their similarities."""
        if len(self._word_hashes) > MAX_CACHED_WORDS:
            self._word_hashes.clear()
        specific = hash_shingles(self._select_text(trained), self._word_hashes)
        places = np.minimum(np.searchsorted(self._indexed, specific), len(self._indexed) - 1)
        shared = specific[self._indexed[places] == specific].tolist()
        equal = self._numbers.get(trained.words)
        candidates = {number for shingle in shared for number in self._owners[shingle]} - {equal}
        found = [] if equal is None else [(self._rows[equal], 1.0)]
        whole = hash_shingles(trained.words, self._word_hashes) if candidates else specific
        for number in sorted(candidates):
            similarity = measure_similarity(self._specific[number], specific)
            if similarity >= self._threshold:
                similarity = min(similarity, measure_similarity(self._whole[number], whole))
            if similarity >= self._threshold:
                found.append((self._rows[number], similarity))
        return found

    def _select_text(self, row: ComparedRow) -> str:
        """Return the text of a row without recurring context, and the whole text of a row without such context."""
        words = row.words.split(" ")
        keys: np.ndarray = np.array(row.lines.list_keys(words), dtype=np.int64)
        places = np.minimum(np.searchsorted(self._recurring, keys), max(len(self._recurring) - 1, 0))
        recurring = keys[self._recurring[places] == keys].tolist() if len(self._recurring) else []
        return " ".join(row.lines.select_words(words, frozenset(recurring))) if recurring else row.words


def measure_similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets of shingles, which are sorted."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _find_recurring_keys(read_rows: Callable[[], Iterable[ComparedRow]]) -> np.ndarray:
    """Return the sorted keys of the lines and prefixes that recur in different texts of the rows (int64).

    The keys are divided into as many parts as fit in memory. The rows are read once for each part.
    """
    recurring: list[np.ndarray] = []
    parts, part = 1, 0
    while part < parts:
        keys, count = list[np.ndarray](), 0
        for owned in _list_keys(read_rows()):
            keys.append(owned[(owned[:, 0] >> 1) % parts == part])
            count += len(keys[-1])
            while part == 0 and count > MAX_KEYS_IN_MEMORY:
                parts *= 2
                keys = [pairs[(pairs[:, 0] >> 1) % parts == 0] for pairs in keys]
                count = sum(map(len, keys))
        all_keys, all_answers = np.concatenate(keys).T
        recurring.append(select_recurring_keys(all_keys, all_answers, MIN_LINE_TEXTS))
        part += 1
    all_recurring: np.ndarray = np.sort(np.concatenate(recurring))
    return all_recurring


def _list_keys(rows: Iterable[ComparedRow]) -> Iterator[np.ndarray]:
    """Yield the keys of each different text beside the key of its answer (int64, (keys, 2))."""
    texts = set[int]()
    for row in rows:
        text = hash(row.words)
        if text in texts:
            continue
        texts.add(text)
        words = row.words.split(" ")
        keys: np.ndarray = np.array(row.lines.list_keys(words), dtype=np.int64)
        yield np.stack([keys, np.full(len(keys), row.lines.build_answer_key(words))], axis=1)
