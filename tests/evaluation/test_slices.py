"""Items are sliced by what they say of themselves."""

from __future__ import annotations

import pytest

from components.evaluation.slices import length_slice, parts, slices
from tests.evaluation.making import items


def test_items_without_a_source_are_in_no_slice() -> None:
    assert slices(items(4, source=["b", "", "a", "b"]), "source") == {"a": [2], "b": [0, 3]}


def test_lengths_are_sliced_at_fixed_ends_in_their_order() -> None:
    found = slices(items(5, length=[600, 64, 65, 5000, 1]), "length")
    assert found == {"1 to 64 tokens": [1, 4], "65 to 128 tokens": [2], "513 to 1024 tokens": [0], "over 4096 tokens": [3]}


@pytest.mark.parametrize(("tokens", "name"), [(0, ""), (1, "1 to 64 tokens"), (64, "1 to 64 tokens"), (4096, "2049 to 4096 tokens")])
def test_an_end_belongs_to_the_slice_below_it(tokens: int, name: str) -> None:
    assert length_slice(tokens) == name


def test_a_kind_with_one_slice_is_all_items_again_and_left_out() -> None:
    found = list(parts(items(3, source=["a", "a", "a"], category=["x", "y", "x"]), ["source", "category", "length"]))
    assert found == [("category x", [0, 2]), ("category y", [1])]
