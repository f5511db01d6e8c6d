"""Finds evaluated rows that equal or nearly equal a training row.

Rows are compared as the curation compares them: by the Jaccard similarity of the word 5-grams, of the whole texts and of
the texts without recurring context. Items of evaluation sets are also compared by their questions (`QuestionIndex`).
"""

# A line of the prompt counts as context if two of the rows with different answers share it; the curation requires three
# rows, of which some may be missing here, because the dataset lacks rejected rows.
# Pairs are collected by their shingles without recurring context. Otherwise every pair of rows with a common long system
# prompt would be a candidate.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from components.common.row_comparison.prompt_lines import PromptLines
from components.common.row_comparison.question_containment import MIN_QUESTION_SHINGLES, QuestionIndex, hash_runs
from components.common.row_comparison.recurring_keys import MANY_TEXTS, select_recurring_keys
from components.common.row_comparison.shingles import ShingleIndex, hash_shingles
from components.common.row_comparison.words import MESSAGE_COLUMNS, split_prompt, split_words

DEFAULT_THRESHOLD = 0.7  # of data_curation.near_duplicate_threshold
MIN_LINE_TEXTS = 2
MAX_PAIRS_COMPARED_SINGLY = 10  # of one training row; more are compared by an index
MAX_OVERLAPS = 20  # of evaluated rows; the comparison ends there
READ_BATCH_ROWS = 1_000
MAX_CACHED_WORDS = 1_000_000
MAX_KEYS_IN_MEMORY = 16_000_000  # about 600 MB with the arrays of their sorting


@dataclass(frozen=True)
class ComparedRow:
    """A row's id, the words of its text, and the lines of its prompt among them.

    Attributes:
        is_external: whether the row is an item of an evaluation set, which wraps its question.
        earlier_turns: for each user turn before the last, the lines up to it.
    """

    id: str
    words: str
    lines: PromptLines
    is_external: bool = False
    earlier_turns: Sequence[PromptLines] = ()

    @property
    def last_turn(self) -> str:
        """The words of the last user turn."""
        return " ".join(self.words.split(" ")[self.lines.turn_start : self.lines.answer_start])


@dataclass(frozen=True)
class Overlap:
    """An evaluated row and the most similar training row.

    Attributes:
        similarity: 1 for equal words.
        is_question: whether only the questions are similar; `similarity` is then the shared part of a question.
    """

    evaluated_id: str
    trained_id: str
    similarity: float
    is_question: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """The order of overlaps: similar rows are above similar questions."""
        return not self.is_question, self.similarity


class _RecurringKeys(NamedTuple):
    """Sorted keys that recur (int64), and those of them in many texts."""

    all: np.ndarray
    common: np.ndarray


def parse_threshold(stated: object) -> float:
    """Return the similarity of near-duplicates that a dataset states, and the default for a value out of (0, 1]."""
    if isinstance(stated, bool) or not isinstance(stated, (int, float)) or not 0 < stated <= 1:
        return DEFAULT_THRESHOLD
    return float(stated)


def build_row(row_id: str, content: Mapping[str, Any]) -> ComparedRow:
    """Return the row with the words of its content, such as `messages`."""
    prompt, answer = split_prompt(content)
    words, lines = split_words(prompt, answer)
    return ComparedRow(row_id, " ".join(words), lines, earlier_turns=_list_earlier_turns(content, prompt))


def _list_earlier_turns(content: Mapping[str, Any], prompt: Sequence[str]) -> list[PromptLines]:
    """Return the lines up to each user turn before the last, which ends the prompt."""
    turns, ends = list[PromptLines](), list[int]()
    messages = content.get("messages") or content.get("prompt") or []
    if sum(message["role"] == "user" for message in messages) < 2:
        return turns
    for message, text in zip(messages, prompt[:-1], strict=False):
        start = ends[-1] if ends else 0
        ends += [start + end for end in split_words([text], [])[1].ends]
        if message["role"] == "user":
            turns.append(PromptLines(tuple(ends), start))
    return turns


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
        for overlap in index.find_overlaps(trained):
            known = best.get(overlap.evaluated_id)
            if overlap.rank > known.rank if known else len(best) < MAX_OVERLAPS:
                best[overlap.evaluated_id] = overlap
        if len(best) == MAX_OVERLAPS:
            break
    return list(best.values())


class _EvaluatedIndex:
    """Index of the shingles of the evaluated rows' texts without recurring context, and of their questions."""

    def __init__(self, rows: Sequence[ComparedRow], recurring: _RecurringKeys, threshold: float) -> None:
        self._rows, self._recurring, self._threshold = rows, recurring, threshold
        self._word_hashes: dict[str, int] = {}
        self._numbers = {row.words: number for number, row in enumerate(rows)}
        self._specific = ShingleIndex([self._hash_text(self._select_text(row)) for row in rows])
        self._whole = [self._hash_text(row.words) for row in rows]
        self._whole_index = ShingleIndex(self._whole)
        self._external = [number for number, row in enumerate(rows) if row.is_external]
        if self._external:
            questions = [self._hash_questions(rows[number])[0] for number in self._external]
            texts = [self._whole[number] for number in self._external]
            # Items of evaluation sets were not separated by the curation's threshold.
            self._questions = QuestionIndex(questions, texts, min(threshold, DEFAULT_THRESHOLD))

    def find_overlaps(self, trained: ComparedRow) -> list[Overlap]:
        """Return the overlaps of the evaluated rows with a training row."""
        if len(self._word_hashes) > MAX_CACHED_WORDS:
            self._word_hashes.clear()
        similar = self._specific.find_similar(self._hash_text(self._select_text(trained)), self._threshold)
        equal = self._numbers.get(trained.words)
        found = {} if equal is None else {equal: Overlap(self._rows[equal].id, trained.id, 1.0)}
        if not similar and not self._external:
            return list(found.values())
        whole = self._hash_text(trained.words)
        if len(similar) > MAX_PAIRS_COMPARED_SINGLY:
            similar_whole = self._whole_index.find_similar(whole, self._threshold)
        else:
            similar_whole = {number: measure_similarity(self._whole[number], whole) for number in similar}
        for number, similarity in similar.items():
            similarity = min(similarity, similar_whole.get(number, 0.0))
            if similarity >= self._threshold and number != equal:
                found[number] = Overlap(self._rows[number].id, trained.id, similarity)
        if self._external:
            for item, share in self._questions.find_items(whole, self._hash_questions(trained)).items():
                number = self._external[item]
                found.setdefault(number, Overlap(self._rows[number].id, trained.id, share, is_question=True))
        return list(found.values())

    def _select_text(self, row: ComparedRow) -> str:
        """Return the text of a row without recurring context, and the whole text of a row without such context."""
        words = row.words.split(" ")
        recurring = _select_keys(row.lines.list_keys(words), self._recurring.all)
        return " ".join(row.lines.select_words(words, recurring)) if recurring else row.words

    def _hash_questions(self, row: ComparedRow) -> list[np.ndarray]:
        """Return the shingles of a row's user turns without recurring context, the last turn first.

        The question of an item with too few of them includes the reference.
        """
        words = row.words.split(" ")
        keys = row.lines.list_keys(words)
        recurring, common = (_select_keys(keys, selected) for selected in self._recurring)
        turns = [lines.select_question(words, recurring, common) for lines in (row.lines, *row.earlier_turns)]
        questions = [hash_runs(runs, self._hash_text) for runs in turns]
        if row.is_external and len(questions[0]) < MIN_QUESTION_SHINGLES:
            last = turns[0][-1] if turns[0] else []
            runs = [*turns[0][:-1], [*last, *words[row.lines.answer_start :]]]
            return [hash_runs(runs, self._hash_text)]
        return questions

    def _hash_text(self, text: str) -> np.ndarray:
        return hash_shingles(text, self._word_hashes)


def _select_keys(keys: Sequence[int], selected: np.ndarray) -> frozenset[int]:
    """Return those of a row's keys that are selected. The selected keys are sorted."""
    if not len(selected):
        return frozenset()
    own: np.ndarray = np.array(keys, dtype=np.int64)
    places = np.minimum(np.searchsorted(selected, own), len(selected) - 1)
    return frozenset(own[selected[places] == own].tolist())


def measure_similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets of shingles, which are sorted."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def _find_recurring_keys(read_rows: Callable[[], Iterable[ComparedRow]]) -> _RecurringKeys:
    """Return the keys of the lines and prefixes that recur in different texts of the rows.

    The keys are divided into as many parts as fit in memory. The rows are read once for each part.
    """
    found: dict[int, list[np.ndarray]] = {MIN_LINE_TEXTS: [], MANY_TEXTS: []}
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
        for min_texts, selected in found.items():
            selected.append(select_recurring_keys(all_keys, all_answers, min_texts))
        part += 1
    return _RecurringKeys(*(np.sort(np.concatenate(selected)) for selected in found.values()))


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
