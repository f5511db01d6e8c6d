"""Finds evaluated rows that equal or nearly equal a training row.

Rows are compared as the curation compares them: by the Jaccard similarity of the word 5-grams, of the whole texts and of
the texts without recurring context.
"""

# A line of the prompt counts as context if two of the rows with different answers share it; the curation requires three
# rows, of which some may be missing here, because the dataset lacks rejected rows. The comparison is exact: each shingle
# of a training row is looked up among the shingles of the evaluated rows.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.common.row_comparison.prompt_lines import PromptLines
from components.common.row_comparison.shingles import hash_shingles
from components.common.row_comparison.words import MESSAGE_COLUMNS, split_prompt, split_words

DEFAULT_THRESHOLD = 0.7  # of data_curation.near_duplicate_threshold
MIN_LINE_TEXTS, MIN_LINE_ANSWERS, MANY_TEXTS = 2, 2, 10
READ_BATCH_ROWS = 10_000
MAX_CACHED_WORDS = 1_000_000


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

    Args:
        evaluated: the evaluated rows.
        read_trained: yields the training rows; called again if similar rows exist.
        threshold: minimum Jaccard similarity of two near-duplicates.
    """
    distinct = list({row.words: row for row in evaluated if row.words}.values())
    candidates = _find_similar_texts(distinct, read_trained(), threshold)
    if not candidates:
        return []
    involved = [row for trained, matches in candidates for row in (trained, *(distinct[index] for index in matches))]
    recurring = _find_recurring_keys(involved, [distinct, read_trained()])
    best: dict[int, Overlap] = {}
    for trained, matches in candidates:
        for index, similarity in matches.items():
            if trained.words != distinct[index].words:
                similarity = min(similarity, _compare_without_context(trained, distinct[index], recurring))
            if similarity >= threshold and (index not in best or similarity > best[index].similarity):
                best[index] = Overlap(distinct[index].id, trained.id, similarity)
    return [best[index] for index in sorted(best)]


def _find_similar_texts(
    evaluated: Sequence[ComparedRow], trained: Iterable[ComparedRow], threshold: float
) -> list[tuple[ComparedRow, dict[int, float]]]:
    """Return the training rows whose whole text is similar to evaluated rows, with these rows' similarities by index."""
    if not evaluated:
        return []
    word_hashes: dict[str, int] = {}
    sets = [hash_shingles(row.words, word_hashes) for row in evaluated]
    sizes: np.ndarray = np.array([len(shingles) for shingles in sets])
    owners: np.ndarray = np.repeat(np.arange(len(sets)), sizes)
    shingles: np.ndarray = np.concatenate(sets)
    order = np.argsort(shingles, kind="stable")
    shingles, owners = shingles[order], owners[order]
    found = []
    for row in trained:
        if len(word_hashes) > MAX_CACHED_WORDS:
            word_hashes.clear()
        own = hash_shingles(row.words, word_hashes)
        begins: np.ndarray = np.asarray(np.searchsorted(shingles, own, "left"))
        ends: np.ndarray = np.asarray(np.searchsorted(shingles, own, "right"))
        is_shared = ends > begins
        if not is_shared.any():
            continue
        ranges = [owners[begin:end] for begin, end in zip(begins[is_shared], ends[is_shared], strict=True)]
        indices, shared = np.unique(np.concatenate(ranges), return_counts=True)
        similarity = shared / (sizes[indices] + len(own) - shared)
        matches = {int(i): float(s) for i, s in zip(indices, similarity, strict=True) if s >= threshold}
        if matches:
            found.append((row, matches))
    return found


def _find_recurring_keys(involved: Iterable[ComparedRow], rows: Iterable[Iterable[ComparedRow]]) -> frozenset[int]:
    """Return the keys of the involved rows' lines and prefixes that recur in different texts of all rows."""
    relevant = {key for row in involved for key in row.lines.list_keys(row.words.split(" "))}
    texts: dict[int, set[str]] = defaultdict(set)
    answers: dict[int, set[int]] = defaultdict(set)
    for row in (row for part in rows for row in part):
        words = row.words.split(" ")
        for key in relevant.intersection(row.lines.list_keys(words)):
            if len(texts[key]) < MANY_TEXTS:
                texts[key].add(row.words)
                answers[key].add(row.lines.build_answer_key(words))
    return frozenset(
        key
        for key in relevant
        if len(texts[key]) >= MANY_TEXTS
        or (key & 1 == 0 and len(texts[key]) >= MIN_LINE_TEXTS and len(answers[key]) >= MIN_LINE_ANSWERS)
    )


def _compare_without_context(first: ComparedRow, second: ComparedRow, recurring: frozenset[int]) -> float:
    """Return the Jaccard similarity of two texts without their recurring context."""
    word_hashes: dict[str, int] = {}
    sets = []
    for row in (first, second):
        words = row.words.split(" ")
        selected = " ".join(row.lines.select_words(words, recurring)) or row.words
        sets.append(set(hash_shingles(selected, word_hashes).tolist()))
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])
