"""Metrics for the final number of an answer to a word problem, as in GSM8K."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

# OpenAI's pattern (openai/grade-school-math, dataset.py). OpenAI's published solutions also mark the number by a
# separate line such as `A: 72`.
MARKED_NUMBER = re.compile(r"(?:#### |^A: (?=[-\d.,]+\s*$))(-?[\d.,]*\d[\d.,]*)", re.MULTILINE | re.ASCII)
ANSWER_MARK = re.compile(r"(?:####[ \t]*|^A:[ \t]*(?=\S+\s*$))", re.MULTILINE)
CURRENCY = r"(?:\\?[$€£¥₹][ \t]?)?"
NUMBER_AFTER_MARK = re.compile(
    rf"(?P<sign>[-−]?){CURRENCY}(?P<inner>[-−]?)(?P<digits>[\d,]*\d(?:\.\d+)?|\.\d+)", re.ASCII
)
# A minus sign belongs to a number unless it follows a word, a number or a bracket: 10-12 are two positive numbers.
NUMBER = re.compile(
    rf"(?P<sign>(?:(?<![\w)\].])[-−])?){CURRENCY}(?P<inner>(?:(?<![\w)\].])[-−])?)"
    r"(?P<digits>(?<![A-Za-z_\d])\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|(?<![A-Za-z_\d])\d+(?:\.\d+)?|(?<![\w.])\.\d+)",
    re.ASCII,
)
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
LATEX = re.compile(r"\{,\}|\\[,!;: ]")


def extract_marked_number(text: str) -> str:
    """Return the digits after the first `#### ` (or in a line `A: 72`) without commas; "" without a mark.

    The result equals that of OpenAI's script.
    """
    match = MARKED_NUMBER.search(text)
    return match[1].replace(",", "") if match else ""


def extract_final_number(text: str) -> Decimal | None:
    r"""Return the final number of an answer; None if the answer contains no number.

    The final number is the number after the first `####`, else in the last \boxed{}, else the last number of the
    text. Supported: thousands separators, currency signs, decimals and minus signs. Not supported: number words,
    fractions, powers and per cent signs.
    """
    mark = ANSWER_MARK.search(text)
    number = NUMBER_AFTER_MARK.match(text, mark.end()) if mark else None
    if not number:
        plain = LATEX.sub(lambda match: "," if match[0] == "{,}" else "", text)
        boxed = [match for box in BOXED.findall(plain) for match in list(NUMBER.finditer(box))[-1:]]
        numbers = boxed or list(NUMBER.finditer(plain))
        number = numbers[-1] if numbers else None
    if not number:
        return None
    sign = "-" if number["sign"] or number["inner"] else ""
    try:
        return Decimal(sign + number["digits"].replace(",", ""))
    except InvalidOperation:
        return None


def score_final_number(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the answer's final number equals that of a reference in value (18 = 18.00), else 0.0."""
    number = extract_final_number(answer)
    return float(number is not None and any(number == extract_final_number(reference) for reference in references))


def score_marked_number(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the answer's marked digits equal those of a reference, else 0.0, as in OpenAI's script."""
    number = extract_marked_number(answer)
    return float(bool(number) and any(number == extract_marked_number(reference) for reference in references))
