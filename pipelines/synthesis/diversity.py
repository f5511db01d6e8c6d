"""Diversity of the questions in synthetic rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from components.common.row_comparison.words import find_words

SHOWN_OPENINGS = 10


def measure_diversity(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the diversity of the rows' questions.

    Returns:
        distinct_1, distinct_2 and distinct_3: different words, pairs and triples of words per word, pair and triple
        (distinct-n, Li et al., NAACL 2016); openings: the number of questions by their first word, the most frequent
        ones; documents: the number of rows by document.
    """
    turns = [turn for row in rows for turn in row.get("messages") or row["prompt"] if turn["role"] == "user"]
    questions = [find_words(turn["content"]) for turn in turns]
    figures: dict[str, Any] = {}
    for length in (1, 2, 3):
        grams = [
            tuple(words[begin : begin + length]) for words in questions for begin in range(len(words) - length + 1)
        ]
        figures[f"distinct_{length}"] = round(len(set(grams)) / len(grams), 4) if grams else 0.0
    openings = Counter(words[0] for words in questions if words).most_common(SHOWN_OPENINGS)
    return {
        **figures,
        "openings": dict(openings),
        "documents": dict(sorted(Counter(r["source"] for r in rows).items())),
    }
