"""Exact match, token F1, ROUGE-L and chrF: cases worked out by hand from their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.evaluation.metrics import words


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("  an   apple! ", "Apple", 1.0),
        ("U.S.A.", "usa", 1.0),
        ("theatre", "atre", 0.0),
        ("42", "43", 0.0),
        ("", "the", 1.0),
    ],
)
def test_exact_match_forgives_case_punctuation_articles_and_spaces_alone(answer: str, reference: str, same: float) -> None:
    assert words.exact_match(answer, [reference]) == same


def test_any_of_several_references_may_be_met() -> None:
    assert words.exact_match("Scorpio", ["Skorpio", "scorpio"]) == 1.0
    assert words.f1("New York", ["Boston", "York City"]) == pytest.approx(0.5)


def test_f1_counts_a_word_as_often_as_both_have_it() -> None:
    assert words.f1("cat cat dog", ["cat dog dog"]) == pytest.approx(2 / 3)
    assert words.f1("the cat sat", ["a cat"]) == pytest.approx(2 * (1 / 2) * 1 / (1 / 2 + 1))


WORDS = ["the", "The", "a", "cat,", "dog.", "dog's", "It's", "12", "—", "Œuvre", "_x_"]
SAYINGS = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@given(SAYINGS, SAYINGS)
def test_words_are_counted_as_squads_own_script_counts_them(answer: str, reference: str) -> None:
    from lm_eval.tasks.qasper import metrics as squad

    assert words.normalised(answer) == squad.normalize_answer(answer)
    if words.normalised(answer) or words.normalised(reference):
        assert words.f1(answer, [reference]) == pytest.approx(squad.f1_abstractive([answer], [reference]))


def test_texts_without_words_agree_with_each_other_alone() -> None:
    assert words.f1("the", ["a"]) == 1.0
    assert words.f1("", ["cat"]) == 0.0


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    # Lin 2004, section 3.1: three of four words in order, and two of them.
    assert words.rouge_l("police kill the gunman", ["police killed the gunman"]) == pytest.approx(0.75)
    assert words.rouge_l("the gunman kill police", ["police killed the gunman"]) == pytest.approx(0.5)
    assert words.rouge_l("police", ["nobody", "police"]) == pytest.approx(1.0)


def test_rouge_l_sees_nothing_of_other_scripts_and_chrf_does() -> None:
    assert words.rouge_l("кошка сидит", ["кошка сидит"]) == 0.0
    assert words.chrf("кошка сидит", ["кошка сидит"]) == pytest.approx(100.0)


def test_chrf_lies_between_nothing_shared_and_the_same_text() -> None:
    assert words.chrf("abc", ["xyz"]) == 0.0
    assert 20 < words.chrf("the cat sat on the mat", ["the cat is on the mat"]) < 90
    assert words.chrf("the cat sat", ["a dog ran", "the cat sat"]) == pytest.approx(100.0)
