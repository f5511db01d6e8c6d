"""Repetition within an answer."""

from __future__ import annotations

import re

# Repetition within an answer. Natural English of this length repeats almost no sequence of four words; the limit of
# 0.3 leaves room for lists. Rae et al. 2021 (arXiv 2112.11446, A1.1) filter web pages by the same kind of measure.
NGRAM_WORDS = 4
MIN_NGRAMS = 8
MAX_REPEATED_SHARE = 0.3
CHECKED_CHARACTERS = 4000  # bounds the time of the search for loops
LOOP_PATTERN = re.compile(r"([^\n]{2,60}?\S?)\1{4,}|(\w)\2{19,}")  # five times a text, or twenty times a letter
MIN_LOOP_CHARACTERS = 20


def is_repetitive(answer: str) -> bool:
    """Return whether an answer repeats its words or ends in a loop."""
    text = answer[:CHECKED_CHARACTERS]
    words = text.lower().split()
    ngrams = [tuple(words[start : start + NGRAM_WORDS]) for start in range(len(words) - NGRAM_WORDS + 1)]
    if len(ngrams) >= MIN_NGRAMS and 1 - len(set(ngrams)) / len(ngrams) > MAX_REPEATED_SHARE:
        return True
    loops = (match[0] for match in LOOP_PATTERN.finditer(text))
    return any(len(loop) >= MIN_LOOP_CHARACTERS and any(c.isalnum() for c in loop) for loop in loops)
