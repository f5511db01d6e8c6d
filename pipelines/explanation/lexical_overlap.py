"""Lexical baseline for training rows: words that a row shares with the question and its answer, rare words first.

A method that explains an answer by its training rows has to find more than these rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from components.common.row_comparison.words import find_words


class WordWeights:
    """Inverse document frequency of words.

    Args:
        texts: Text of every row.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.rows, counts = 0, Counter[str]()
        for text in texts:
            counts.update(set(find_words(text)))
            self.rows += 1
        # The smoothed weight of scikit-learn's TfidfTransformer: a word of every row has the weight 1.
        self._weights = {word: math.log((1 + self.rows) / (1 + count)) + 1 for word, count in counts.items()}

    def weigh(self, text: str) -> dict[str, float]:
        """Return the weights of the distinct words of a text that occur in some row."""
        return {word: self._weights[word] for word in sorted(set(find_words(text))) if word in self._weights}


def compute_similarity(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return the cosine of two word-weight vectors; 0 if either is empty."""
    shared = math.fsum(weight * second[word] for word, weight in first.items() if word in second)
    lengths = math.prod(math.sqrt(math.fsum(w * w for w in one.values())) for one in (first, second))
    return shared / lengths if lengths else 0.0


def score_rows(weights: WordWeights, texts: Iterable[str], query: str) -> list[float]:
    """Return the similarity of each text to the query, between 0 and 1."""
    query_weights = weights.weigh(query)
    return [compute_similarity(query_weights, weights.weigh(text)) for text in texts]


def select_highest(scores: Sequence[float], count: int) -> list[int]:
    """Return the indices of the highest scores; of equal scores, the first."""
    return sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:count]
