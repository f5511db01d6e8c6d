"""The curation benchmark measures against a truth of its own: that truth and the scores made from it are right."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest

from benchmarks import corpus, scoring


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.build(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=200, seed=3)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(small: corpus.Corpus, tmp_path: Path) -> None:
    again = corpus.build(tmp_path / "again.jsonl", documents=200, seed=3)
    other = corpus.build(tmp_path / "other.jsonl", documents=200, seed=4)
    assert again.path.read_bytes() == small.path.read_bytes()
    assert (again.sha256, again.documents) == (small.sha256, 200)
    assert other.sha256 != small.sha256


def test_documents_have_the_length_that_is_promised(small: corpus.Corpus) -> None:
    assert small.characters / small.documents == pytest.approx(corpus.CHARACTERS, rel=0.05)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8])
def test_the_true_pairs_are_those_that_comparing_all_with_all_finds(small: corpus.Corpus, threshold: float) -> None:
    texts = corpus.texts(small.path)
    sets = [corpus.shingles(text) for text in texts]
    expected = {
        (a, b): similarity for b in range(len(sets)) for a in range(b) if (similarity := corpus.jaccard(sets[a], sets[b])) >= threshold
    }
    pairs, similarities = corpus.true_pairs(texts, threshold)
    found = dict(zip(map(tuple, pairs.tolist()), similarities.tolist(), strict=True))
    assert len(expected) > 20
    assert found == pytest.approx(expected)


def test_true_pairs_of_texts_without_words_and_of_few_words_are_found_too() -> None:
    texts = ["!!!", "one two", "One, two.", "one two three four five six", "", "one two three four five seven"]
    pairs, similarities = corpus.true_pairs(texts, 0.3)
    assert dict(zip(map(tuple, pairs.tolist()), similarities.tolist(), strict=True)) == pytest.approx({(0, 4): 1, (1, 2): 1, (3, 5): 1 / 3})


@pytest.mark.parametrize("target", [0.5, 0.7, 0.95])
def test_an_edited_copy_is_as_similar_as_it_was_asked_to_be(target: float) -> None:
    rng = random.Random(5)
    pool = corpus.sentences()
    text = " ".join(" ".join(rng.choice(pool)) for _ in range(7))
    copy = corpus.near_copy(text, target, pool, rng)
    assert corpus.jaccard(corpus.shingles(text), corpus.shingles(copy)) == pytest.approx(target, abs=0.025)


def test_scores_of_a_removal_that_can_be_counted_by_hand() -> None:
    # True pairs: a chain 0-1-2, a pair 3-4, a very similar pair 5-6; 7, 8 and 9 stand alone.
    pairs = numpy.array([[0, 1], [1, 2], [3, 4], [5, 6]])
    similarity = numpy.array([0.75, 0.72, 0.7, 0.9])
    result = scoring.score([1, 2, 6, 9], pairs, similarity, documents=10)
    assert result.removed == 4
    assert result.recall == 3 / 4  # 3 and 4 still stand together
    assert result.recall_high == 1
    assert result.precision == 3 / 4  # 9 is in no pair
    assert result.far == 2 / 4  # 2, whose one partner went too, and 9
    assert scoring.surplus(pairs, 10) == 4


def test_removing_nothing_loses_all_recall_and_no_precision() -> None:
    result = scoring.score([], numpy.array([[0, 1]]), numpy.array([0.9]), documents=2)
    assert (result.recall, result.precision, result.far) == (0, 1, 0)
