"""The published heuristics for web text. docs/reference/filters.md cites each threshold.

Gopher: Rae et al. 2021, arXiv 2112.11446, A.1.1 and table A1. C4: Raffel et al. 2020, arXiv 1910.10683, 2.2. FineWeb:
Penedo et al. 2024, arXiv 2406.17557.
"""

# A word is the text between white space; rules that count words skip texts in scripts that are written without spaces.
# Cheap and frequent rules of a family run first.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise

from components.common.runtime.counts import format_count
from components.data_curation.config import QualityConfig
from components.data_curation.filters.filter_family import FilterFamily
from components.data_curation.filters.measured_row import MeasuredRow, count_repeats
from components.data_curation.rows import Row

WEB_FORMATS = frozenset({"html", "warc", "wet"})
STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
BULLETS = ("•", "‣", "▪", "▫", "■", "□", "●", "○", "◦", "⁃", "–", "- ", "* ")
ELLIPSES = ("...", "…")
PUNCTUATION_ENDINGS = tuple(".!?\"'”’»…。！？।؟۔։።။។」』")
C4_TERMINAL_MARKS = (".", "!", "?", '"', "”")
SENTENCE_END = re.compile(r"[.!?…](?=[\"'”’»)\]]*(?:\s|\Z))|[。！？।؟۔።။]")
MIN_LINES_FOR_SHARES = 2  # a share of lines is meaningless for an article in a single line
UNSPACED_DENSITY = 3  # Latin characters per character of a script without spaces, for the same amount of text
POLICY_PHRASES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
CURLY_BRACKET = re.compile(r"[{}]")
LETTER_PATTERN = re.compile(r"[^\W\d_]")


def is_selected(row: Row, config: QualityConfig) -> bool:
    """Return whether `data_curation.quality.apply_to` selects this row."""
    if config.apply_to == "web":
        return row.format in WEB_FORMATS
    return config.apply_to == "all" or (config.apply_to == "text" and row.kind == "text")


WEB_HEURISTICS = FilterFamily[QualityConfig](
    "web heuristics", lambda config: config.quality, lambda row, config: is_selected(row.row, config)
)


def _check_share(label: str, part: float, whole: float, limit: float) -> str | None:
    return f"{label}: {part / whole:.3f}; expected at most {limit:g}" if part > limit * whole else None


# --- Gopher, quality --------------------------------------------------------------------------------------------------


@WEB_HEURISTICS.register("gopher_word_count", "gopher")
def reject_word_count(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts with too few or too many words."""
    count = len(row.words)
    if not row.has_spaced_words or config.min_words <= count <= config.max_words:
        return None
    return f"{format_count(count, 'word')}; expected {config.min_words:,} to {config.max_words:,}"


@WEB_HEURISTICS.register("gopher_mean_word_length", "gopher")
def reject_mean_word_length(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts of very short or very long words."""
    mean = row.word_characters / len(row.words) if row.words else 0.0
    shortest, longest = config.min_mean_word_length, config.max_mean_word_length
    if not row.has_spaced_words or shortest <= mean <= longest:
        return None
    return f"mean word length: {mean:.2f} characters; expected {shortest:g} to {longest:g}"


@WEB_HEURISTICS.register("gopher_symbols", "gopher")
def reject_symbols(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts with many hash signs or ellipses."""
    if not row.has_spaced_words:
        return None
    words, limit = len(row.words), config.max_symbols_per_word
    ellipses = row.text.count("...") + row.text.count("…")
    return _check_share("hash signs per word", row.text.count("#"), words, limit) or _check_share(
        "ellipses per word", ellipses, words, limit
    )


@WEB_HEURISTICS.register("gopher_bullet_lines", "gopher")
def reject_bullet_lines(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts that consist mostly of lines with bullets."""
    count = sum(line.startswith(BULLETS) for line in row.lines)
    return _check_share("share of lines that begin with a bullet", count, len(row.lines), config.max_bullet_lines)


@WEB_HEURISTICS.register("gopher_ellipsis_lines", "gopher")
def reject_ellipsis_lines(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts with many lines that end with an ellipsis, such as lists of teasers."""
    if "..." not in row.text and "…" not in row.text:
        return None
    count = sum(line.endswith(ELLIPSES) for line in row.lines)
    return _check_share("share of lines that end with an ellipsis", count, len(row.lines), config.max_ellipsis_lines)


@WEB_HEURISTICS.register("gopher_alphabetic_words", "gopher")
def reject_alphabetic_words(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts of numbers and symbols."""
    if not row.has_spaced_words:
        return None
    # isalpha() decides for nearly all words; the pattern finds a letter in the rest, such as "end." or "2nd".
    count = sum(1 for word in row.words if word.isalpha() or LETTER_PATTERN.search(word))
    if count >= config.min_alphabetic_words * len(row.words):
        return None
    return (
        f"share of words with a letter: {count / len(row.words):.3f}; expected at least {config.min_alphabetic_words:g}"
    )


@WEB_HEURISTICS.register("gopher_stop_words", "gopher")
def reject_stop_words(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject English texts without common words."""
    if row.language[0] != "en":
        return None
    count = len(STOP_WORDS.intersection(row.text.lower().split()))
    minimum = config.min_stop_words
    return f"{count} of the 8 stop words; expected at least {minimum}" if count < minimum else None


# --- C4 ---------------------------------------------------------------------------------------------------------------


@WEB_HEURISTICS.register("c4_lorem_ipsum", "c4")
def reject_lorem_ipsum(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject filler text."""
    return "the filler text lorem ipsum" if "lorem ipsum" in row.text.lower() else None


@WEB_HEURISTICS.register("c4_curly_bracket", "c4")
def reject_curly_bracket(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts with a curly bracket, which usually contain code."""
    match = CURLY_BRACKET.search(row.text) if config.curly_bracket else None
    return f"a curly bracket at character {match.start():,}" if match else None


@WEB_HEURISTICS.register("c4_sentences", "c4")
def reject_sentences(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts with few sentences in the lines that C4 keeps.

    C4 keeps lines with enough words, without a notice on JavaScript, cookies or policies, and, if configured, with
    terminal punctuation.
    """
    counted = []
    for line in row.lines:
        if row.has_spaced_words and line.count(" ") + 1 < config.min_line_words:
            continue
        if config.terminal_punctuation and not line.endswith(C4_TERMINAL_MARKS):
            continue
        lower = line.lower()
        if "javascript" not in lower and not any(phrase in lower for phrase in POLICY_PHRASES):
            counted.append(line)
    count = sum(1 for _ in islice(SENTENCE_END.finditer("\n".join(counted)), config.min_sentences))
    if count >= config.min_sentences:
        return None
    lines = f"the {len(counted)} of {len(row.lines)} lines that C4 keeps"
    return f"{format_count(count, 'sentence')} in {lines}; expected at least {config.min_sentences}"


# --- FineWeb ----------------------------------------------------------------------------------------------------------


@WEB_HEURISTICS.register("fineweb_punctuated_lines", "fineweb")
def reject_punctuated_lines(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts whose lines rarely end with punctuation."""
    count, lines = sum(line.endswith(PUNCTUATION_ENDINGS) for line in row.lines), len(row.lines)
    if lines < MIN_LINES_FOR_SHARES or count > config.min_punctuated_lines * lines:
        return None
    return f"share of lines that end with punctuation: {count / lines:.3f}; expected more than {config.min_punctuated_lines:g}"


@WEB_HEURISTICS.register("fineweb_repeated_lines", "fineweb")
def reject_repeated_line_characters(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts with many characters in repeated lines."""
    characters, limit = row.repeated_lines[1], config.max_repeated_line_characters
    if not characters or characters < limit * row.line_characters:
        return None
    return (
        f"share of characters in repeated lines: {characters / row.line_characters:.3f}; expected less than {limit:g}"
    )


@WEB_HEURISTICS.register("fineweb_short_lines", "fineweb")
def reject_short_lines(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts of short lines."""
    shortest = (
        config.short_line_characters if row.has_spaced_words else config.short_line_characters // UNSPACED_DENSITY
    )
    count, lines = sum(len(line) < shortest for line in row.lines), len(row.lines)
    if lines < MIN_LINES_FOR_SHARES or count < config.max_short_lines * lines:
        return None
    return f"share of lines shorter than {shortest} characters: {count / lines:.3f}; expected less than {config.max_short_lines:g}"


# --- Gopher, repetition -----------------------------------------------------------------------------------------------


@WEB_HEURISTICS.register("gopher_duplicate_lines", "gopher_repetition")
def reject_duplicate_lines(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts that repeat lines."""
    return _check_repetition("lines", row.lines, row.repeated_lines, config)


@WEB_HEURISTICS.register("gopher_duplicate_paragraphs", "gopher_repetition")
def reject_duplicate_paragraphs(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts that repeat paragraphs."""
    if "\n\n" not in row.text or not row.repeated_lines[0]:  # a repeated paragraph repeats its lines
        return None
    paragraphs = [paragraph for part in re.split(r"\n\s*\n", row.text) if (paragraph := part.strip())]
    return _check_repetition("paragraphs", paragraphs, count_repeats(paragraphs), config)


def _check_repetition(label: str, parts: Sequence[str], repeats: tuple[int, int], config: QualityConfig) -> str | None:
    count, characters = repeats
    if not count:
        return None
    return _check_share(f"share of repeated {label}", count, len(parts), config.max_duplicate_lines) or _check_share(
        f"share of characters in repeated {label}",
        characters,
        sum(map(len, parts)),
        config.max_duplicate_line_characters,
    )


@WEB_HEURISTICS.register("gopher_top_ngrams", "gopher_repetition")
def reject_top_ngrams(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts dominated by a short n-gram."""
    if not row.has_spaced_words:
        return None
    for n, limit in enumerate(config.max_top_ngram_characters, 2):
        counts = Counter(_build_ngrams(row.words, n))
        times = max(counts.values(), default=1)
        if times == 1:  # then longer n-grams do not repeat either
            return None
        characters = max(times * sum(map(len, ngram)) for ngram, count in counts.items() if count == times)
        label = f"share of characters in the most common {n}-gram"
        if detail := _check_share(label, characters, row.word_characters, limit):
            return detail
    return None


@WEB_HEURISTICS.register("gopher_duplicate_ngrams", "gopher_repetition")
def reject_duplicate_ngrams(row: MeasuredRow, config: QualityConfig) -> str | None:
    """Reject texts that repeat long n-grams."""
    if not row.has_spaced_words:
        return None
    for n, limit in enumerate(config.max_duplicate_ngram_characters, 5):
        ngrams = _build_ngrams(row.words, n)
        if len(set(ngrams)) == len(ngrams):  # then longer n-grams do not repeat either
            return None
        seen: set[tuple[str, ...]] = set()
        characters, end = 0, 0  # of the words in repeated n-grams, each word once
        for start, ngram in enumerate(ngrams):
            if ngram in seen:
                characters += sum(map(len, row.words[max(start, end) : start + n]))
                end = start + n
            seen.add(ngram)
        if detail := _check_share(f"share of characters in repeated {n}-grams", characters, row.word_characters, limit):
            return detail
    return None


def _build_ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(pairwise(words)) if n == 2 else list(zip(*(islice(words, i, None) for i in range(n)), strict=False))
