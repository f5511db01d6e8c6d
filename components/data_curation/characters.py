"""Which characters are normal in a text, and what becomes of the others. Code points by the Unicode Standard 15."""

from __future__ import annotations

import re
from functools import cache

# Encodings that UTF-8 is most often misread as (those that ftfy repairs).
MISREAD_AS = ("latin-1", "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp437")
# Any unusual character at all: one quick look that spares nearly every text the rest.
UNUSUAL_ASCII = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
UNUSUAL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufdd0-\ufdef\ufeff\ufff9-\ufffc"
    r"\ufffe\uffff\U000e0000-\U000e007f]"
)
LINE_BREAKS = re.compile(r"\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
SPACES = re.compile(r"[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
# Colours and cursor movements of a terminal (ECMA-48 control sequences) go as a whole: without their escape they would look like text.
TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Never meant in a text: controls but tab and line feed, soft hyphens, byte-order marks, word joiners and invisible operators, deprecated
# format characters, annotation anchors, object replacements, noncharacters.
NEVER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u180e\u2060-\u2064\u206a-\u206f\ufdd0-\ufdef\ufeff\ufff9-\ufffc\ufffe\uffff]")
# Joiners shape letters of these scripts (Arabic, Syriac, N'Ko, Indic, Tibetan, Myanmar, Khmer, Mongolian and more).
JOINING = r"\u0600-\u08ff\u0900-\u0dff\u0f00-\u109f\u1700-\u18af\u1900-\u1cff\ua800-\uabff\ufb50-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff"
EMOJI = r"\u00a9\u00ae\u203c-\u3299\U0001f000-\U0001faff"
JOINERS = re.compile(
    rf"(?<![{JOINING}])\u200c|(?<![{JOINING}{EMOJI}\ufe0f\U000e007f])\u200d|(?<=[{EMOJI}\ufe0f\U000e007f])\u200d(?![{EMOJI}])"
)
# A zero-width space says where a line may break in scripts that write no spaces; elsewhere it is debris.
UNSPACED = r"\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9df"
ZERO_WIDTH_SPACE = re.compile(rf"(?<![{UNSPACED}])\u200b|\u200b(?![{UNSPACED}])")
# Overrides reorder what is seen (Boucher and Anderson 2021, arXiv 2111.00169); the others are needed beside right-to-left letters only.
OVERRIDES = re.compile(r"[\u202d\u202e]")
DIRECTIONS = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
# Tags make the flags of England, Scotland and Wales; elsewhere they are a hidden text.
TAGS = re.compile(r"(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f)|[\U000e0000-\U000e007f]")


def replaced(text: str) -> str:
    """The text with line feeds and plain spaces only, and without the characters that are never meant where they stand."""
    text = SPACES.sub(" ", LINE_BREAKS.sub("\n", TERMINAL.sub("", text)))
    text = NEVER.sub("", text)
    if text.isascii():
        return text
    text = (OVERRIDES if RIGHT_TO_LEFT.search(text) else DIRECTIONS).sub("", text)
    return TAGS.sub(r"\1", ZERO_WIDTH_SPACE.sub("", JOINERS.sub("", text)))


def repaired(text: str) -> str:
    """The text with UTF-8 that was read in another encoding put right, line by line; nothing else of it changes."""
    quick, exact = _misread()
    if not quick.search(text):
        return text
    import ftfy

    return "\n".join(str(ftfy.fix_encoding(line)) if quick.search(line) and exact.search(line) else line for line in text.split("\n"))


@cache
def _misread() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What a lead byte of UTF-8 and the byte after it, or a lone C1 control, look like when misread; many such pairs are innocent.

    The first finds a pair from any two encodings and is fast, the second a pair from one encoding.
    """
    pairs = [(_images(0xC2, 0xF5, encoding), _images(0x80, 0xC0, encoding)) for encoding in MISREAD_AS]
    leads, following = ("".join(images) for images in zip(*pairs, strict=True))
    exact = "|".join(f"[{lead}][{after}]" for lead, after in pairs)
    return re.compile(f"[{leads}][{following}]|[\x80-\x9f]"), re.compile(f"{exact}|[\x80-\x9f]")


def _images(start: int, stop: int, encoding: str) -> str:
    """The characters that these bytes are in an encoding, ready to stand in a character class."""
    return re.escape("".join(sorted(set(bytes(range(start, stop)).decode(encoding, errors="ignore")))))
