"""Text normalization: repaired encoding, NFC, line feeds, plain spaces, no stray invisible characters.

Code points follow the Unicode Standard 15. docs/reference/filters.md lists the rules.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from components.data_curation.rows import Row

BLANK_LINES = re.compile(r"\n{4,}")
# Encodings that UTF-8 is most often misread as (those that ftfy repairs).
MISREAD_ENCODINGS = (
    "latin-1",
    "cp1252",
    "cp1250",
    "cp1251",
    "cp1253",
    "cp1254",
    "cp1257",
    "iso8859-2",
    "mac-roman",
    "cp437",
)
# Any unusual character: a cheap search, after which most texts skip the other patterns.
UNUSUAL_ASCII_CHARACTERS = bytes([*range(0x09), *range(0x0B, 0x20), 0x7F])
UNUSUAL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufdd0-\ufdef\ufeff\ufff9-\ufffc"
    r"\ufffe\uffff\U000e0000-\U000e007f]"
)
LINE_BREAKS = re.compile(r"\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
UNUSUAL_SPACES = re.compile(r"[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# Terminal colours and cursor movements (ECMA-48), removed whole: without their escape they would look like text.
TERMINAL_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Removed from every text: controls except tab and line feed, soft hyphens, byte-order marks, word joiners, invisible
# operators, deprecated format characters, annotation anchors, object replacements, noncharacters.
FORBIDDEN_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u180e\u2060-\u2064\u206a-\u206f\ufdd0-\ufdef\ufeff\ufff9-\ufffc\ufffe\uffff]"
)
# Joiners shape letters of these scripts (Arabic, Syriac, N'Ko, Indic, Tibetan, Myanmar, Khmer, Mongolian and more).
JOINING_SCRIPTS = r"\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1700-\u18af\u1900-\u1cff\ua800-\uabff\ufb50-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff"
EMOJI_RANGES = r"\u00a9\u00ae\u203c-\u3299\U0001f000-\U0001faff"
STRAY_JOINERS = re.compile(
    rf"(?<![{JOINING_SCRIPTS}])\u200c|(?<![{JOINING_SCRIPTS}{EMOJI_RANGES}\ufe0f\U000e007f])\u200d|(?<=[{EMOJI_RANGES}\ufe0f\U000e007f])\u200d(?![{EMOJI_RANGES}])"
)
# A zero-width space allows a line break in scripts without spaces; elsewhere it is an artifact.
UNSPACED_SCRIPTS = r"\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9df"
ZERO_WIDTH_SPACE = re.compile(rf"(?<![{UNSPACED_SCRIPTS}])\u200b|\u200b(?![{UNSPACED_SCRIPTS}])")
# Overrides hide the order of characters (Boucher and Anderson 2021, arXiv 2111.00169); the other marks are needed
# only next to right-to-left letters.
DIRECTION_OVERRIDES = re.compile(r"[\u202d\u202e]")
DIRECTION_MARKS = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
# Tags make the flags of England, Scotland and Wales; elsewhere they are hidden text.
STRAY_TAGS = re.compile(r"(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f)|[\U000e0000-\U000e007f]")


def normalize_row(row: Row) -> None:
    """Normalize every text of a row in place, except its tools."""
    for name, value in row.content.items():
        if isinstance(value, list):
            row.content[name] = [{"role": m["role"], "content": normalize_text(m["content"])} for m in value]
        elif isinstance(value, str) and name != "tools":
            row.content[name] = normalize_text(value)


def normalize_text(text: str) -> str:
    """Return the text with repaired encoding, in NFC, with line feeds and plain spaces.

    Trailing spaces, more than two consecutive blank lines, and blank lines at the beginning and end are removed.
    Indentation and quotation marks are kept. A normalized text is returned unchanged.
    """
    before: str | None = None
    while text != before:  # a removal can join characters that then need repair or composition
        before, is_ascii = text, text.isascii()
        if not is_ascii:
            text = _repair_encoding(text)
        if _has_unusual_ascii(text) if is_ascii else UNUSUAL_CHARACTERS.search(text):
            text = UNUSUAL_SPACES.sub(" ", LINE_BREAKS.sub("\n", TERMINAL_SEQUENCES.sub("", text)))
            text = FORBIDDEN_CHARACTERS.sub("", text)
            if not text.isascii():
                text = (DIRECTION_OVERRIDES if RIGHT_TO_LEFT.search(text) else DIRECTION_MARKS).sub("", text)
                text = STRAY_TAGS.sub(r"\1", ZERO_WIDTH_SPACE.sub("", STRAY_JOINERS.sub("", text)))
        if not is_ascii:
            text = unicodedata.normalize("NFC", text)
        if " \n" in text or "\t\n" in text or text[-1:] in " \t":
            text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
        text = BLANK_LINES.sub("\n\n\n", text) if "\n\n\n\n" in text else text
        text = text.strip("\n")
    return text


def _has_unusual_ascii(text: str) -> bool:
    return len(text.encode().translate(None, delete=UNUSUAL_ASCII_CHARACTERS)) < len(text)


def _repair_encoding(text: str) -> str:
    """Restore UTF-8 that was decoded in another encoding, line by line."""
    quick, exact = _build_misread_patterns()
    if not quick.search(text):
        return text
    import ftfy

    return "\n".join(
        str(ftfy.fix_encoding(line)) if quick.search(line) and exact.search(line) else line for line in text.split("\n")
    )


@cache
def _build_misread_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return a fast and an exact pattern for a misread UTF-8 lead byte with the next byte, or a lone C1 control."""

    def decode_range(start: int, stop: int, encoding: str) -> str:
        return re.escape("".join(sorted(set(bytes(range(start, stop)).decode(encoding, errors="ignore")))))

    pairs = [(decode_range(0xC2, 0xF5, name), decode_range(0x80, 0xC0, name)) for name in MISREAD_ENCODINGS]
    leads, following = ("".join(characters) for characters in zip(*pairs, strict=True))
    # The exact pattern requires a pair in the same encoding. Many such pairs are correct text, so ftfy decides.
    exact = "|".join(f"[{lead}][{after}]" for lead, after in pairs)
    return re.compile(f"[{leads}][{following}]|[\x80-\x9f]"), re.compile(f"{exact}|[\x80-\x9f]")
