"""Questions of evaluation items in training rows: the index gives the result of a comparison of all pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from components.common.row_comparison.question_containment import QuestionIndex, hash_runs
from components.common.row_comparison.shingles import hash_shingles

SHINGLES = st.frozensets(st.integers(0, 30), max_size=16)


def to_array(shingles: Collection[int]) -> np.ndarray:
    array: np.ndarray = np.array(sorted(shingles), dtype=np.int64)
    return array


def compare_all_pairs(
    items: Sequence[tuple[frozenset[int], frozenset[int]]],
    text: frozenset[int],
    turns: Sequence[frozenset[int]],
    threshold: float,
) -> dict[int, float]:
    """Return the share of the question that is shared, by item, without an index."""
    uses = Counter(shingle for _, words in items for shingle in words)
    rare = {shingle for shingle, count in uses.items() if count <= min(9, max(len(items) // 2, 1))}
    found = dict[int, float]()
    for number, (question, words) in enumerate(items):
        own = question & rare
        shares = [len(own & text) / len(own)] if len(own) >= 4 else []
        shares += [len(turn & words) / len(turn) for turn in turns if len(turn & words & rare) >= 4]
        if max(shares, default=0.0) >= threshold:
            found[number] = max(shares)
    return found


@settings(max_examples=60)
@given(
    st.lists(st.tuples(SHINGLES, SHINGLES), min_size=1, max_size=12),
    SHINGLES,
    st.lists(SHINGLES, max_size=3),
    st.sampled_from([0.5, 0.7, 1.0]),
)
def test_questions_equal_a_comparison_of_all_pairs(
    items: list[tuple[frozenset[int], frozenset[int]]],
    text: frozenset[int],
    turns: list[frozenset[int]],
    threshold: float,
) -> None:
    items = [(question & words, words) for question, words in items]  # a question is a part of the item
    index = QuestionIndex([to_array(one) for one, _ in items], [to_array(one) for _, one in items], threshold)
    found = index.find_items(to_array(text | frozenset().union(*turns)), [to_array(turn) for turn in turns])
    assert found == compare_all_pairs(items, text | frozenset().union(*turns), turns, threshold)


def test_short_runs_have_no_shingles() -> None:
    words = ["one", "two", "three", "four", "five", "six"]
    assert hash_runs([words[:4], []], lambda text: hash_shingles(text, {})).tolist() == []
    assert len(hash_runs([words[:4], words, words], lambda text: hash_shingles(text, {}))) == 2
