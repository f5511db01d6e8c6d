"""The number that an answer to a word problem ends with, as GSM8K asks for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

# OpenAI's pattern (openai/grade-school-math, dataset.py); `A:` alone on its line is how their published solutions write the mark.
MARKED = re.compile(r"(?:#### |^A: (?=[-\d.,]+\s*$))(-?[\d.,]*\d[\d.,]*)", re.MULTILINE | re.ASCII)
MARK = re.compile(r"(?:####[ \t]*|^A:[ \t]*(?=\S+\s*$))", re.MULTILINE)
CURRENCY = r"(?:\\?[$€£¥₹][ \t]?)?"
AFTER_MARK = re.compile(rf"(?P<sign>[-−]?){CURRENCY}(?P<inner>[-−]?)(?P<digits>[\d,]*\d(?:\.\d+)?|\.\d+)", re.ASCII)
# A minus belongs to a number unless it stands behind a word, a number or a bracket: 10-12 are two positive numbers.
NUMBER = re.compile(
    rf"(?P<sign>(?:(?<![\w)\].])[-−])?){CURRENCY}(?P<inner>(?:(?<![\w)\].])[-−])?)"
    r"(?P<digits>(?<![A-Za-z_\d])\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|(?<![A-Za-z_\d])\d+(?:\.\d+)?|(?<![\w.])\.\d+)",
    re.ASCII,
)
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
LATEX = re.compile(r"\{,\}|\\[,!;: ]")


def marked_number(text: str) -> str:
    """The digits after the first `#### ` (or a line `A: 72`) without commas, exactly as OpenAI's own script extracts them; "" without."""
    found = MARKED.search(text)
    return found[1].replace(",", "") if found else ""


def final_number(text: str) -> Decimal | None:
    r"""The number an answer ends with; None where it has none.

    It is the one after the first `####`, else in the last \boxed{}, else the last one of the text. Commas between thousands, currency
    signs, decimals and minus signs are understood; words, fractions, powers and per cent signs are not.
    """
    marked = MARK.search(text)
    after = AFTER_MARK.match(text, marked.end()) if marked else None
    if after:
        return _value(after)
    plain = LATEX.sub(lambda found: "," if found[0] == "{,}" else "", text)
    boxes = [found for box in BOXED.findall(plain) if (found := _last(box))]
    last = boxes[-1] if boxes else _last(plain)
    return _value(last) if last else None


def _last(text: str) -> re.Match[str] | None:
    found = None
    for found in NUMBER.finditer(text):  # noqa: B007
        pass
    return found


def _value(found: re.Match[str]) -> Decimal | None:
    sign = "-" if found["sign"] or found["inner"] else ""
    try:
        return Decimal(sign + found["digits"].replace(",", ""))
    except InvalidOperation:
        return None


def same_number(answer: str, references: Sequence[str]) -> float:
    """1.0 where the answer's final number equals that of a reference in value (18 = 18.00), else 0.0."""
    said = final_number(answer)
    return float(said is not None and any(said == final_number(reference) for reference in references))


def same_marked_number(answer: str, references: Sequence[str]) -> float:
    """1.0 where the digits marked in the answer are those marked in a reference, else 0.0: OpenAI's published verdict, mark for mark."""
    said = marked_number(answer)
    return float(bool(said) and any(said == marked_number(reference) for reference in references))
