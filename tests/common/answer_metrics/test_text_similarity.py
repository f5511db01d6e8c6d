"""Exact match, token F1, ROUGE-L and chrF: cases computed by hand from their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.common.answer_metrics import squad_metrics, text_similarity


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
def test_exact_match_ignores_case_punctuation_articles_and_spaces(answer: str, reference: str, same: float) -> None:
    assert squad_metrics.exact_match(answer, [reference]) == same


def test_best_of_several_references_counts() -> None:
    assert squad_metrics.exact_match("Scorpio", ["Skorpio", "scorpio"]) == 1.0
    assert squad_metrics.f1("New York", ["Boston", "York City"]) == pytest.approx(0.5)


def test_f1_counts_repeated_words() -> None:
    assert squad_metrics.f1("cat cat dog", ["cat dog dog"]) == pytest.approx(2 / 3)
    assert squad_metrics.f1("the cat sat", ["a cat"]) == pytest.approx(2 * (1 / 2) * 1 / (1 / 2 + 1))


WORDS = ["the", "The", "a", "cat,", "dog.", "dog's", "It's", "12", "—", "Œuvre", "_x_"]
PHRASES = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@given(PHRASES, PHRASES)
def test_f1_matches_squad_script(answer: str, reference: str) -> None:
    from lm_eval.tasks.qasper import metrics as squad

    assert squad_metrics.normalize_answer(answer) == squad.normalize_answer(answer)
    if squad_metrics.normalize_answer(answer) or squad_metrics.normalize_answer(reference):
        assert squad_metrics.f1(answer, [reference]) == pytest.approx(squad.f1_abstractive([answer], [reference]))


def test_texts_without_words_match_only_each_other() -> None:
    assert squad_metrics.f1("the", ["a"]) == 1.0
    assert squad_metrics.f1("", ["cat"]) == 0.0


def test_rouge_l_is_f_measure_of_longest_common_subsequence() -> None:
    # Lin 2004, section 3.1: three of four words in order, and two of them.
    assert text_similarity.rouge_l("police kill the gunman", ["police killed the gunman"]) == pytest.approx(0.75)
    assert text_similarity.rouge_l("the gunman kill police", ["police killed the gunman"]) == pytest.approx(0.5)
    assert text_similarity.rouge_l("police", ["nobody", "police"]) == pytest.approx(1.0)


def test_rouge_l_ignores_other_scripts_and_chrf_does_not() -> None:
    assert text_similarity.rouge_l("кошка сидит", ["кошка сидит"]) == 0.0
    assert text_similarity.chrf("кошка сидит", ["кошка сидит"]) == pytest.approx(100.0)


def test_chrf_range() -> None:
    assert text_similarity.chrf("abc", ["xyz"]) == 0.0
    assert 20 < text_similarity.chrf("the cat sat on the mat", ["the cat is on the mat"]) < 90
    assert text_similarity.chrf("the cat sat", ["a dog ran", "the cat sat"]) == pytest.approx(100.0)
