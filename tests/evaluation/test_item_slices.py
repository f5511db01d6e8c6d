"""Items are grouped into slices by source, category and length."""

from __future__ import annotations

import pytest

from components.common.length_buckets import get_length_bucket
from components.evaluation.item_slices import group_by_slice, iterate_slices
from tests.evaluation.task_builders import build_items


def test_items_without_source_are_in_no_slice() -> None:
    assert group_by_slice(build_items(4, source=["b", "", "a", "b"]), "source") == {"a": [2], "b": [0, 3]}


def test_length_buckets_are_fixed_and_ordered() -> None:
    slices = group_by_slice(build_items(5, length=[600, 64, 65, 5000, 1]), "length")
    assert slices == {
        "1 to 64 tokens": [1, 4],
        "65 to 128 tokens": [2],
        "513 to 1024 tokens": [0],
        "over 4096 tokens": [3],
    }


@pytest.mark.parametrize(
    ("tokens", "name"), [(0, ""), (1, "1 to 64 tokens"), (64, "1 to 64 tokens"), (4096, "2049 to 4096 tokens")]
)
def test_bucket_end_is_inclusive(tokens: int, name: str) -> None:
    assert get_length_bucket(tokens) == name


def test_kind_with_single_slice_is_skipped() -> None:
    slices = list(
        iterate_slices(
            build_items(3, source=["a", "a", "a"], category=["x", "y", "x"]), ["source", "category", "length"]
        )
    )
    assert slices == [("category x", [0, 2]), ("category y", [1])]
