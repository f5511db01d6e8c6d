"""The published heuristics for web text. docs/filters.md says where each threshold comes from.

Gopher: Rae et al. 2021, arXiv 2112.11446, A.1.1 and table A1. C4: Raffel et al. 2020, arXiv 1910.10683, 2.2. FineWeb: Penedo et al. 2024,
arXiv 2406.17557. A word is what stands between whitespace. Rules that count words, and so expect spaces between them, leave alone
texts in scripts that write none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice, pairwise

from components.data_curation.config import QualityConfig
from components.data_curation.drops import Drop
from components.data_curation.rows import Row

WEB = frozenset({"html", "warc", "wet"})
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
BULLETS = ("•", "‣", "▪", "▫", "■", "□", "●", "○", "◦", "⁃", "–", "- ", "* ")
ELLIPSES = ("...", "…")
ENDS = (".", "!", "?", '"', "'", "”", "’", "»", "…", "。", "！", "？", "।", "؟", "۔", "։", "።", "။", "។", "」", "』")
TERMINAL = (".", "!", "?", '"', "”")
SENTENCE_END = re.compile(r"[.!?…](?=[\"'”’»)\]]*(?:\s|\Z))|[。！？।؟۔።။]")
SEVERAL = 2  # lines from which a share of lines says something: a whole article in one line is no page of menus
DENSE = 3  # Latin characters that say as much as one of a script without spaces, about
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
CURLY = re.compile(r"[{}]")
LETTER = re.compile(r"[^\W\d_]")
# Thai, Lao, Myanmar, Khmer, kana, Han: written without spaces between words.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def applies(row: Row, config: QualityConfig) -> bool:
    """Whether the heuristics judge this row."""
    if config.apply_to == "web":
        return row.form in WEB
    return config.apply_to == "all" or (config.apply_to == "text" and row.kind == "text")


def drop(text: str, config: QualityConfig, language: str = "en") -> Drop | None:
    """Why a normal text is not kept, with what was measured and what is allowed; or None. The rules are asked in the order of RULES."""
    measured = Measured(text, language)
    for family, reason, rule in RULES:
        if getattr(config, family) and (detail := rule(measured, config)):
            return Drop(reason, detail)
    return None


class Measured:
    """What several rules count of a text, each counted when it is first asked for."""

    def __init__(self, text: str, language: str = "en") -> None:
        """`language` is the text's ISO 639 code, or und."""
        self.text = text
        self.language = language

    @cached_property
    def words(self) -> list[str]:
        """What stands between whitespace."""
        return self.text.split()

    @cached_property
    def letters(self) -> int:
        """Characters of all words."""
        return sum(map(len, self.words))

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, without the whitespace around them."""
        return [line for each in self.text.split("\n") if (line := each.strip())]

    @cached_property
    def paragraphs(self) -> list[str]:
        """What stands between blank lines."""
        return [paragraph for each in re.split(r"\n\s*\n", self.text) if (paragraph := each.strip())]

    @cached_property
    def spaced(self) -> bool:
        """Whether words are written with spaces between them: less than a fifth of the characters belong to scripts without."""
        return self.text.isascii() or sum(1 for _ in UNSPACED.finditer(self.text)) * 5 < self.letters

    @cached_property
    def repeated_lines(self) -> tuple[int, int]:
        """How many lines repeat an earlier one, and their characters."""
        return _repeated(self.lines)


def _repeated(parts: Sequence[str]) -> tuple[int, int]:
    if len(set(parts)) == len(parts):
        return 0, 0
    repeats = [(part, times - 1) for part, times in Counter(parts).items() if times > 1]
    return sum(times for _, times in repeats), sum(len(part) * times for part, times in repeats)


def _above(what: str, part: float, whole: float, limit: float) -> str | None:
    """The detail when part of whole is more than the limit."""
    return f"{what}: {part / whole:.3f}, at most {limit:g}" if part > limit * whole else None


# --- Gopher, quality --------------------------------------------------------------------------------------------------------------


def _word_count(m: Measured, c: QualityConfig) -> str | None:
    if not m.spaced or c.min_words <= len(m.words) <= c.max_words:
        return None
    return f"{len(m.words):,} words, {c.min_words:,} to {c.max_words:,} wanted"


def _mean_word_length(m: Measured, c: QualityConfig) -> str | None:
    mean = m.letters / len(m.words) if m.words else 0.0
    if not m.spaced or c.min_mean_word_length <= mean <= c.max_mean_word_length:
        return None
    return f"mean word length: {mean:.2f} characters, {c.min_mean_word_length:g} to {c.max_mean_word_length:g} wanted"


def _symbols(m: Measured, c: QualityConfig) -> str | None:
    ellipses = m.text.count("...") + m.text.count("…")
    if not m.spaced:
        return None
    return _above("hash signs for each word", m.text.count("#"), len(m.words), c.max_symbols_per_word) or _above(
        "ellipses for each word", ellipses, len(m.words), c.max_symbols_per_word
    )


def _bullet_lines(m: Measured, c: QualityConfig) -> str | None:
    return _above("lines that begin with a bullet", sum(line.startswith(BULLETS) for line in m.lines), len(m.lines), c.max_bullet_lines)


def _ellipsis_lines(m: Measured, c: QualityConfig) -> str | None:
    if "..." not in m.text and "…" not in m.text:
        return None
    return _above("lines that end with an ellipsis", sum(line.endswith(ELLIPSES) for line in m.lines), len(m.lines), c.max_ellipsis_lines)


def _alphabetic_words(m: Measured, c: QualityConfig) -> str | None:
    if not m.spaced:
        return None
    # isalpha() answers for nearly all words; the expression looks for a letter in the rest, such as "end." or "2nd".
    alphabetic = sum(1 for word in m.words if word.isalpha() or LETTER.search(word))
    if alphabetic >= c.min_alphabetic_words * len(m.words):
        return None
    return f"words with a letter: {alphabetic / len(m.words):.3f}, at least {c.min_alphabetic_words:g}"


def _stop_words(m: Measured, c: QualityConfig) -> str | None:
    if m.language != "en":
        return None
    found = len(STOP_WORDS.intersection(m.text.lower().split()))
    return f"{found} of the 8 stop words, {c.min_stop_words} wanted" if found < c.min_stop_words else None


# --- Gopher, repetition -----------------------------------------------------------------------------------------------------------


def _duplicate_lines(m: Measured, c: QualityConfig) -> str | None:
    count, characters = m.repeated_lines
    if not count:
        return None
    return _above("repeated lines", count, len(m.lines), c.max_duplicate_lines) or _above(
        "characters in repeated lines", characters, sum(map(len, m.lines)), c.max_duplicate_line_characters
    )


def _duplicate_paragraphs(m: Measured, c: QualityConfig) -> str | None:
    if "\n\n" not in m.text or not m.repeated_lines[0]:  # a paragraph cannot repeat where no line does
        return None
    count, characters = _repeated(m.paragraphs)
    return _above("repeated paragraphs", count, len(m.paragraphs), c.max_duplicate_lines) or _above(
        "characters in repeated paragraphs", characters, sum(map(len, m.paragraphs)), c.max_duplicate_line_characters
    )


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(pairwise(words)) if n == 2 else list(zip(*(islice(words, i, None) for i in range(n)), strict=False))


def _top_ngrams(m: Measured, c: QualityConfig) -> str | None:
    if not m.spaced:
        return None
    for n, limit in enumerate(c.max_top_ngram_characters, 2):
        counted = Counter(_ngrams(m.words, n))
        times = max(counted.values(), default=1)
        if times == 1:  # then no longer one repeats either
            return None
        characters = max(times * sum(map(len, ngram)) for ngram, count in counted.items() if count == times)
        if detail := _above(f"characters in the most common {n}-gram", characters, m.letters, limit):
            return detail
    return None


def _duplicate_ngrams(m: Measured, c: QualityConfig) -> str | None:
    if not m.spaced:
        return None
    for n, limit in enumerate(c.max_duplicate_ngram_characters, 5):
        ngrams = _ngrams(m.words, n)
        if len(set(ngrams)) == len(ngrams):  # then no longer one repeats either
            return None
        if detail := _above(f"characters in repeated {n}-grams", _covered(ngrams, m.words, n), m.letters, limit):
            return detail
    return None


def _covered(ngrams: Sequence[tuple[str, ...]], words: Sequence[str], n: int) -> int:
    """Characters of the words that lie in an n-gram seen before; none is counted twice."""
    seen: set[tuple[str, ...]] = set()
    characters, end = 0, 0
    for start, ngram in enumerate(ngrams):
        if ngram in seen:
            characters += sum(map(len, words[max(start, end) : start + n]))
            end = start + n
        seen.add(ngram)
    return characters


# --- C4 ---------------------------------------------------------------------------------------------------------------------------


def _lorem_ipsum(m: Measured, c: QualityConfig) -> str | None:
    return "the filler text lorem ipsum" if "lorem ipsum" in m.text.lower() else None


def _curly_bracket(m: Measured, c: QualityConfig) -> str | None:
    found = CURLY.search(m.text) if c.curly_bracket else None
    return f"a curly bracket at character {found.start():,}" if found else None


def _sentences(m: Measured, c: QualityConfig) -> str | None:
    kept = [line for line in m.lines if _c4_keeps(line, m, c)]
    count = sum(1 for _ in islice(SENTENCE_END.finditer("\n".join(kept)), c.min_sentences))
    if count >= c.min_sentences:
        return None
    return f"{count} sentences in the {len(kept)} of {len(m.lines)} lines that C4 keeps, {c.min_sentences} wanted"


def _c4_keeps(line: str, m: Measured, c: QualityConfig) -> bool:
    """Whether C4 keeps a line: words enough, no notice about JavaScript, cookies or policies, and an end if asked."""
    if (m.spaced and line.count(" ") + 1 < c.min_line_words) or (c.terminal_punctuation and not line.endswith(TERMINAL)):
        return False
    lower = line.lower()
    return "javascript" not in lower and not any(policy in lower for policy in POLICIES)


# --- FineWeb ----------------------------------------------------------------------------------------------------------------------


def _punctuated_lines(m: Measured, c: QualityConfig) -> str | None:
    count = sum(line.endswith(ENDS) for line in m.lines)
    if len(m.lines) < SEVERAL or count > c.min_punctuated_lines * len(m.lines):
        return None
    return f"lines that end with punctuation: {count / len(m.lines):.3f}, more than {c.min_punctuated_lines:g} wanted"


def _repeated_line_characters(m: Measured, c: QualityConfig) -> str | None:
    characters, whole = m.repeated_lines[1], sum(map(len, m.lines))
    if not characters or characters < c.max_repeated_line_characters * whole:
        return None
    return f"characters in repeated lines: {characters / whole:.3f}, less than {c.max_repeated_line_characters:g} wanted"


def _short_lines(m: Measured, c: QualityConfig) -> str | None:
    shortest = c.short_line_characters if m.spaced else c.short_line_characters // DENSE
    count = sum(len(line) < shortest for line in m.lines)
    if len(m.lines) < SEVERAL or count < c.max_short_lines * len(m.lines):
        return None
    return f"lines shorter than {shortest} characters: {count / len(m.lines):.3f}, less than {c.max_short_lines:g} wanted"


# By switch: the reason and its rule, the cheap and telling ones of a family first.
RULES: tuple[tuple[str, str, Callable[[Measured, QualityConfig], str | None]], ...] = (
    ("gopher", "gopher_word_count", _word_count),
    ("gopher", "gopher_mean_word_length", _mean_word_length),
    ("gopher", "gopher_symbols", _symbols),
    ("gopher", "gopher_bullet_lines", _bullet_lines),
    ("gopher", "gopher_ellipsis_lines", _ellipsis_lines),
    ("gopher", "gopher_alphabetic_words", _alphabetic_words),
    ("gopher", "gopher_stop_words", _stop_words),
    ("c4", "c4_lorem_ipsum", _lorem_ipsum),
    ("c4", "c4_curly_bracket", _curly_bracket),
    ("c4", "c4_sentences", _sentences),
    ("fineweb", "fineweb_punctuated_lines", _punctuated_lines),
    ("fineweb", "fineweb_repeated_lines", _repeated_line_characters),
    ("fineweb", "fineweb_short_lines", _short_lines),
    ("gopher_repetition", "gopher_duplicate_lines", _duplicate_lines),
    ("gopher_repetition", "gopher_duplicate_paragraphs", _duplicate_paragraphs),
    ("gopher_repetition", "gopher_top_ngrams", _top_ngrams),
    ("gopher_repetition", "gopher_duplicate_ngrams", _duplicate_ngrams),
)
