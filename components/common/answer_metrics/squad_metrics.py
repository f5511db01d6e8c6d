"""Metrics of SQuAD: exact match and token F1. They need no package beyond Python's library, so every step can use them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and English articles.

    The normalisation is that of SQuAD (Rajpurkar et al., arXiv 1606.05250).
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the normalised answer is one of the normalised references, else 0.0."""
    normalized = normalize_answer(answer)
    return float(any(normalized == normalize_answer(reference) for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the best token F1 with a reference, 0 to 1.

    As in SQuAD 2.0's script, a text without words matches only another text without words.
    """
    words = normalize_answer(answer).split()
    best = 0.0
    for reference in references:
        expected = normalize_answer(reference).split()
        if shared := (Counter(words) & Counter(expected)).total():
            precision, recall = shared / len(words), shared / len(expected)
            best = max(best, 2 * precision * recall / (precision + recall))
        elif words == expected:
            best = 1.0
    return best
