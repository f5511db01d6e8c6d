"""Shingles of a text: its word 5-grams, whose Jaccard similarity is the similarity of two texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


class ShingleIndex:
    """Index of several sets of shingles, each of which has a number.

    Attributes:
        sizes: the number of shingles of each set.
    """

    def __init__(self, sets: Sequence[np.ndarray]) -> None:
        self.sizes: np.ndarray = np.array([len(one) for one in sets])
        shingles: np.ndarray = np.concatenate(sets)
        order = np.argsort(shingles, kind="stable")
        self._shingles, self._owners = shingles[order], np.repeat(np.arange(len(sets)), self.sizes)[order]

    def count_shared(self, shingles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the sets that share some of these shingles, and how many each set shares."""
        begins: np.ndarray = np.asarray(np.searchsorted(self._shingles, shingles, "left"))
        ends: np.ndarray = np.asarray(np.searchsorted(self._shingles, shingles, "right"))
        is_shared = ends > begins
        pairs = zip(begins[is_shared].tolist(), ends[is_shared].tolist(), strict=True)
        owners = [self._owners[begin:end] for begin, end in pairs]
        counts = np.bincount(np.concatenate([self._owners[:0], *owners]))
        numbers = np.flatnonzero(counts)
        return numbers, counts[numbers]

    def find_similar(self, shingles: np.ndarray, threshold: float) -> dict[int, float]:
        """Return the Jaccard similarities of at least the threshold by number, of the sets that share shingles."""
        numbers, shared = self.count_shared(shingles)
        similarities = shared / (self.sizes[numbers] + len(shingles) - shared)
        is_similar = similarities >= threshold
        return dict(zip(numbers[is_similar].tolist(), similarities[is_similar].tolist(), strict=True))
