"""The lines of a row's prompt among the words of its compared text, with the keys by which recurring lines are found."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

CONTEXT_COLUMNS = ("line_ends", "turn_start", "line_keys", "answer_key")
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

    @property
    def answer_start(self) -> int:
        """The first word of the answer."""
        return self.ends[-1] if self.ends else 0

    def list_keys(self, words: Sequence[str]) -> list[int]:
        """Return the distinct keys of the lines and of their prefixes, sorted. A key is odd for a prefix, even for a line."""
        keys = set[int]()
        for begin, end in pairwise([0, *self.ends]):
            if end - begin >= MIN_LINE_WORDS:
                keys.update(key for _, key in _build_keys(words[begin:end]))
        return sorted(keys)

    def build_answer_key(self, words: Sequence[str]) -> int:
        """Return a key that rows with equal answers share."""
        return zlib.crc32(" ".join(words[self.answer_start :]).encode())

    def select_words(self, words: Sequence[str], recurring: Collection[int]) -> list[str]:
        """Return the words that are compared. A word that occurs in no text stands for each part that is left out.

        Args:
            words: all words of the row.
            recurring: the keys of the row that recur.
        """
        context, turn, is_turn_new = list[str](), list[str](), False
        for begin, end in pairwise([0, *self.ends]):
            line = words[begin:end]
            length, key = _find_recurring_part(line, recurring)
            selected = [f"={key:x}", *line[length:]] if length else line
            (turn if begin >= self.turn_start else context).extend(selected)
            is_turn_new |= begin >= self.turn_start and len(line) >= MIN_LINE_WORDS and length < len(line)
        if not is_turn_new:  # all lines recur: the turn matches only equal turns
            whole = words[self.turn_start : self.answer_start]
            name = zlib.crc32(" ".join(whole).encode())
            turn = [f"{name:x}={word}" for word in whole]
        return [*context, *turn, *words[self.answer_start :]]

    def select_question(
        self, words: Sequence[str], recurring: Collection[int], common: Collection[int]
    ) -> list[Sequence[str]]:
        """Return the runs of words of the last user turn that are specific to it.

        Args:
            words: all words of the row.
            recurring: the keys of the row that recur. They are left out.
            common: those in many texts. Only they are left out if all lines recur.
        """
        lines = [words[begin:end] for begin, end in pairwise([0, *self.ends]) if begin >= self.turn_start]
        for left_out in (recurring, common):
            runs, is_new = [list[str]()], False
            for line in lines:
                length, _ = _find_recurring_part(line, left_out)
                if length:
                    runs.append([])
                runs[-1] += line[length:]
                is_new |= len(line) >= MIN_LINE_WORDS and length < len(line)
            if is_new:
                break
        return [run for run in runs if run]


def _find_recurring_part(line: Sequence[str], recurring: Collection[int]) -> tuple[int, int]:
    """Return the length in words and the key of the longest part at the start of a line that recurs; 0 and 0 for none."""
    keys = _build_keys(line) if len(line) >= MIN_LINE_WORDS and recurring else []
    return max((pair for pair in keys if pair[1] in recurring), default=(0, 0))


def _build_keys(line: Sequence[str]) -> list[tuple[int, int]]:
    """Return the lengths in words and the keys of a line's prefixes, and of the line itself, ascending.

    A key has 62 bits of two checksums, which are much faster than a cryptographic hash. A false match needs the same key in
    several rows.
    """
    keys = list[tuple[int, int]]()
    begin, crc, adler = 0, 0, 1
    for length in (*PREFIX_LENGTHS[: bisect_left(PREFIX_LENGTHS, len(line))], len(line)):
        part = " ".join([*line[begin:length], ""]).encode()
        crc, adler = zlib.crc32(part, crc), zlib.adler32(part, adler)
        checksum = ((crc << 30) ^ adler) & (2**62 - 1)
        keys.append((length, 2 * checksum + (length < len(line))))
        begin = length
    return keys
