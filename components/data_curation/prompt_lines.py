"""The lines of a row's prompt among the words of its compared text, with the keys by which recurring lines are found."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CONTEXT_COLUMNS = ("line_ends", "turn_start", "line_keys")
MIN_LINE_WORDS = 5  # of a line that is looked for in other rows: a shingle of the comparison
# The lengths of prefixes grow by an eighth of a power of two, so that at most an eighth of a shared beginning remains.
PREFIX_LENGTHS = tuple(eighths << power for power in range(1, 17) for eighths in range(8, 16))


@dataclass(frozen=True)
class PromptLines:
    """The lines of a row's prompt, as positions among the words of its compared text.

    Attributes:
        ends: the end of each line, ascending. The words after the last end are the answer.
        turn_start: the first word of the last user turn.
    """

    ends: Sequence[int]
    turn_start: int

    def list_keys(self, words: Sequence[str]) -> list[int]:
        """Return the distinct keys of the lines and of their prefixes, sorted. A key is odd for a prefix, even for a line."""
        keys = set[int]()
        for begin, end in pairwise([0, *self.ends]):
            if end - begin >= MIN_LINE_WORDS:
                keys.update(key for _, key in _build_keys(words[begin:end]))
        return sorted(keys)

    def select_words(self, words: Sequence[str], recurring: frozenset[int]) -> list[str]:
        """Return the words that are compared.

        Args:
            words: all words of the row.
            recurring: the keys that recur.
        """
        context, turn = list[str](), list[str]()
        for begin, end in pairwise([0, *self.ends]):
            line = words[begin:end]
            left_out = 0
            if len(line) >= MIN_LINE_WORDS:
                left_out = max((length for length, key in _build_keys(line) if key in recurring), default=0)
            (turn if begin >= self.turn_start else context).extend(line[left_out:])
        answer_start = self.ends[-1] if self.ends else 0
        whole_turn = words[self.turn_start : answer_start]
        if whole_turn and not turn:
            key = zlib.crc32(" ".join(whole_turn).encode())
            turn = [f"{key:x}:{word}" for word in whole_turn]
        return [*context, *turn, *words[answer_start:]]


def _build_keys(line: Sequence[str]) -> list[tuple[int, int]]:
    """Return the lengths in words and the keys of a line's prefixes, and of the line itself, ascending.

    A key has 62 bits of two checksums, which are much faster than a cryptographic hash. A false match needs the same key in
    several rows.
    """
    keys = list[tuple[int, int]]()
    begin, crc, adler = 0, 0, 1
    for length in (*(n for n in PREFIX_LENGTHS if n < len(line)), len(line)):
        part = " ".join([*line[begin:length], ""]).encode()
        crc, adler = zlib.crc32(part, crc), zlib.adler32(part, adler)
        checksum = ((crc << 30) ^ adler) & (2**62 - 1)
        keys.append((length, 2 * checksum + (length < len(line))))
        begin = length
    return keys
