"""Extraction of the final number of an answer in its usual spellings."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.common.answer_metrics import numeric_answers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 48 + 24 = 72 clips.\n#### 72", "72"),
        ("#### 1,200", "1200"),
        ("#### -5", "-5"),
        ("#### $2,500.50", "2500.50"),
        ("#### 72\n\nQuestion: and then 5?\n#### 9", "72"),
        ("So he pays 4 dollars.\nA: 18", "18"),
        ("The answer is 42.", "42"),
        ("It costs $1,234.50 in all", "1234.50"),
        ("She owes -$7", "-7"),
        ("a loss of −3.5 points", "-3.5"),
        ("a range of 10-12", "12"),
        ("It is 20% (half of 40%)", "40"),
        (r"hence \boxed{36}, which is 6 squared", "36"),
        (r"\boxed{\$1{,}080}", "1080"),
        (r"first \boxed{4}, then \boxed{-5}", "-5"),
        (r"\boxed{\text{none}} or 8", "8"),
        ("0.50", "0.5"),
        (".5 of it", "0.5"),
        ("12,34", "34"),
        ("**Answer: 72**", "72"),
        ("5 litres of H2O", "5"),
        ("7 sheets of A40 paper", "7"),
        ("Rs.72", "72"),
        ("€ 9", "9"),
        ("109,200,000", "109200000"),
    ],
)
def test_final_number_in_many_spellings(text: str, number: str) -> None:
    assert numeric_answers.extract_final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no number at all", "seventy-two", "H2O", "...", "#### none"])
def test_text_without_number(text: str) -> None:
    assert numeric_answers.extract_final_number(text) is None
    assert numeric_answers.score_final_number(text, ["72"]) == 0.0


def test_final_numbers_compare_by_value_and_marked_by_digits() -> None:
    assert numeric_answers.score_final_number("It is 18.00", ["#### 18"]) == 1.0
    assert numeric_answers.score_marked_number("#### 18.00", ["#### 18"]) == 0.0
    assert numeric_answers.score_marked_number("#### 1,800", ["#### 1800"]) == 1.0


def test_number_without_mark_is_not_marked_number() -> None:
    assert numeric_answers.score_final_number("It is 18", ["#### 18"]) == 1.0
    assert numeric_answers.score_marked_number("It is 18", ["#### 18"]) == 0.0


def test_letter_before_sentence_is_not_mark() -> None:
    assert numeric_answers.extract_marked_number("A: 3 apples and 4 pears are 7") == ""
    assert numeric_answers.extract_final_number("A: 3 apples and 4 pears are 7") == 7


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["#### {:,}", "The answer is {:,}.", "so\n\\boxed{{{:,}}}", "it is {}", "A: {}"]),
)
def test_integers_round_trip_in_every_spelling(number: int, spelling: str) -> None:
    assert numeric_answers.extract_final_number(spelling.format(number)) == number


@given(st.text())
def test_any_text_is_parsed_without_error(text: str) -> None:
    number = numeric_answers.extract_final_number(text)
    assert number is None or number.is_finite()
