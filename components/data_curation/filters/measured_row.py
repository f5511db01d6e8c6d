"""A row with the measurements that several filters use, each computed at most once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from components.common.language_identification import identify_language
from components.data_curation.rows import Row

# Thai, Lao, Myanmar, Khmer, kana, Han: scripts that are written without spaces between words.
UNSPACED_SCRIPTS = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


class MeasuredRow:
    """A normalized, redacted row with its measurements."""

    def __init__(self, row: Row) -> None:
        self.row = row

    @cached_property
    def text(self) -> str:
        """The text of all turns."""
        return self.row.text()

    @cached_property
    def prompt(self) -> str:
        """The text of the user's turns."""
        return self.row.prompt()

    @cached_property
    def answers(self) -> list[str]:
        """All answers, as `Row.answers` returns them."""
        return self.row.answers()

    @cached_property
    def language(self) -> tuple[str, float]:
        """The language's ISO 639 code (und: undetermined) and the confidence."""
        return identify_language(self.text)

    @cached_property
    def words(self) -> list[str]:
        """Words, separated by white space."""
        return self.text.split()

    @cached_property
    def word_characters(self) -> int:
        """Number of characters in all words."""
        return sum(map(len, self.words))

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, stripped."""
        return [line for part in self.text.split("\n") if (line := part.strip())]

    @cached_property
    def line_characters(self) -> int:
        """Number of characters in all lines."""
        return sum(map(len, self.lines))

    @cached_property
    def repeated_lines(self) -> tuple[int, int]:
        """The number of lines that repeat an earlier line, and their number of characters."""
        return count_repeats(self.lines)

    @cached_property
    def has_spaced_words(self) -> bool:
        """Whether less than a fifth of the characters belong to scripts without spaces between words."""
        return self.text.isascii() or sum(1 for _ in UNSPACED_SCRIPTS.finditer(self.text)) * 5 < self.word_characters


def count_repeats(parts: Sequence[str]) -> tuple[int, int]:
    """Return the number of parts that repeat an earlier part, and their number of characters."""
    if len(set(parts)) == len(parts):
        return 0, 0
    repeats = [(part, times - 1) for part, times in Counter(parts).items() if times > 1]
    return sum(times for _, times in repeats), sum(len(part) * times for part, times in repeats)
