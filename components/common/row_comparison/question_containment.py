"""Finds evaluation items whose question is in a training row, or that contain the question of a training row.

Items wrap a question: few-shot examples and instructions precede it, answer options follow it, and its reference may
differ. A training row may have it in an earlier turn. Neither the texts nor their specific words are then similar.
"""

# A shingle is evidence if only a few items have it: few-shot examples and templates of a task are in most of its items.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from components.common.row_comparison.recurring_keys import MANY_TEXTS
from components.common.row_comparison.shingles import SHINGLE_WORDS, ShingleIndex

MIN_QUESTION_SHINGLES = 4  # 8 words, the `shortest` text of data_curation.decontamination

HashText = Callable[[str], np.ndarray]


class QuestionIndex:
    """Index of the questions of evaluation items."""

    def __init__(self, questions: Sequence[np.ndarray], texts: Sequence[np.ndarray], threshold: float) -> None:
        """Index the items.

        Args:
            questions: the shingles of each item's question, without recurring context.
            texts: the shingles of each item's whole text.
            threshold: minimum share of a question's shingles.
        """
        self._texts, self._threshold = texts, threshold
        distinct, counts = np.unique(np.concatenate(texts), return_counts=True)
        common = distinct[counts > min(MANY_TEXTS - 1, max(len(texts) // 2, 1))]
        rare_questions = [_drop(shingles, common) for shingles in questions]
        self._questions = ShingleIndex(
            [one if len(one) >= MIN_QUESTION_SHINGLES else one[:0] for one in rare_questions]
        )
        self._rare_texts = ShingleIndex([_drop(shingles, common) for shingles in texts])

    def find_items(self, text: np.ndarray, questions: Sequence[np.ndarray]) -> dict[int, float]:
        """Return the items that share their question with a training row: the share of its shingles by item's number.

        Args:
            text: the shingles of the training row's whole text.
            questions: the shingles of each of its user turns, without recurring context.
        """
        numbers, counts = self._questions.count_shared(text)
        shares = counts / self._questions.sizes[numbers]
        found = {
            number: share
            for number, share in zip(numbers.tolist(), shares.tolist(), strict=True)
            if share >= self._threshold
        }
        for question in questions:
            numbers, counts = self._rare_texts.count_shared(question)
            for number in numbers[counts >= MIN_QUESTION_SHINGLES].tolist():
                shared = np.intersect1d(question, self._texts[number], assume_unique=True)
                share = len(shared) / len(question)
                if share >= self._threshold:
                    found[number] = max(share, found.get(number, 0.0))
        return found


def _drop(shingles: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """Return the shingles that are not among others, which are sorted."""
    if not len(dropped):
        return shingles
    places = np.minimum(np.searchsorted(dropped, shingles), len(dropped) - 1)
    kept: np.ndarray = shingles[dropped[places] != shingles]
    return kept


def hash_runs(runs: Iterable[Sequence[str]], hash_text: HashText) -> np.ndarray:
    """Return the sorted shingles of runs of words. Runs that are shorter than a shingle have none."""
    sets = [hash_text(" ".join(run)) for run in runs if len(run) >= SHINGLE_WORDS]
    return np.unique(np.concatenate(sets)) if sets else np.empty(0, dtype=np.int64)
