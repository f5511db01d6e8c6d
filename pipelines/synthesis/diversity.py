"""Diversity of the questions in synthetic rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from components.common.row_comparison.words import find_words

SHOWN_OPENINGS = 10


@dataclass(frozen=True)
class Diversity:
    """Figures of the questions.

    Attributes:
        distinct_1: different words per word (distinct-1, Li et al., NAACL 2016).
        distinct_2: the same of pairs of words.
        distinct_3: the same of triples of words.
        openings: the number of questions by their first word, the most frequent ones.
        documents: the number of rows by document.
    """

    distinct_1: float
    distinct_2: float
    distinct_3: float
    openings: dict[str, int]
    documents: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


def measure_diversity(rows: Sequence[Mapping[str, Any]]) -> Diversity:
    """Return the diversity of the rows' questions."""
    turns = [turn for row in rows for turn in row.get("messages") or row["prompt"] if turn["role"] == "user"]
    questions = [find_words(turn["content"]) for turn in turns]
    shares = []
    for length in (1, 2, 3):
        grams = [
            tuple(words[begin : begin + length]) for words in questions for begin in range(len(words) - length + 1)
        ]
        shares.append(round(len(set(grams)) / len(grams), 4) if grams else 0.0)
    openings = Counter(words[0] for words in questions if words).most_common(SHOWN_OPENINGS)
    documents = Counter(row["source"] for row in rows)
    return Diversity(shares[0], shares[1], shares[2], dict(openings), dict(sorted(documents.items())))
