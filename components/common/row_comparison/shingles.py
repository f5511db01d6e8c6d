"""Shingles of a text: its word 5-grams, whose Jaccard similarity is the similarity of two texts."""

from __future__ import annotations

import hashlib

import numpy as np

SHINGLE_WORDS = 5


def hash_shingles(text: str, word_hashes: dict[str, int]) -> np.ndarray:
    """Return the distinct word 5-grams of a text as sorted 63-bit hashes (int64); a shorter text is one shingle.

    Args:
        text: words with single spaces.
        word_hashes: cache of the hashes of words; updated.
    """
    words = text.split(" ")
    for word in words:
        if word not in word_hashes:
            word_hashes[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
    numbers = np.array([word_hashes[word] for word in words], dtype=np.uint64)
    width = min(SHINGLE_WORDS, len(numbers))
    total: np.ndarray = np.zeros(len(numbers) - width + 1, dtype=np.uint64)
    for i in range(width):
        total = (total ^ (total >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + numbers[i : i + len(total)]
    shingles: np.ndarray = np.unique(total >> np.uint64(1)).astype(np.int64)
    return shingles
