"""Slices of a task's items by source, category and number of input tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from components.common.length_buckets import get_length_bucket
from components.evaluation.task_interface import Item


def group_by_slice(items: Sequence[Item], by: str) -> dict[str, list[int]]:
    """Return the indices of the items by slice, ordered by length or name.

    Items without a value for `by` are omitted.

    Args:
        items: The task's items.
        by: "source", "category" or "length".
    """
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        name = get_length_bucket(item.length) if by == "length" else getattr(item, by)
        if name:
            groups.setdefault(name, []).append(index)
    return dict(sorted(groups.items(), key=lambda group: items[group[1][0]].length if by == "length" else group[0]))


def iterate_slices(items: Sequence[Item], kinds: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the item indices of every slice of these kinds.

    A kind with a single slice is skipped. A name consists of the kind and its value, such as "source words".

    Args:
        items: The task's items.
        kinds: Any of "source", "category" and "length".
    """
    for by in kinds:
        groups = group_by_slice(items, by)
        if len(groups) > 1:
            yield from ((f"{by} {name}", indices) for name, indices in groups.items())
