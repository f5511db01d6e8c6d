"""Parts of a task's items: by source, by category, and by how many tokens the model reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from components.evaluation.task import Item

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)  # upper ends; fixed, so that slices of two evaluations are the same ones


def slices(items: Sequence[Item], by: str) -> dict[str, list[int]]:
    """The items' indices by slice, in the slices' order. Items that say nothing of `by` are in none."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        name = length_slice(item.length) if by == "length" else getattr(item, by)
        if name:
            found.setdefault(name, []).append(index)
    return dict(sorted(found.items(), key=lambda one: items[one[1][0]].length if by == "length" else one[0]))


def parts(items: Sequence[Item], kinds: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Every slice of these kinds as ("source words", indices); a kind with one slice is all items again, and left out."""
    for by in kinds:
        found = slices(items, by)
        if len(found) > 1:
            yield from ((f"{by} {name}", indices) for name, indices in found.items())


def length_slice(tokens: int) -> str:
    """The length slice of so many tokens; "" for none."""
    below = 0
    for upper in LENGTHS:
        if 0 < tokens <= upper:
            return f"{below + 1} to {upper} tokens"
        below = upper
    return f"over {below} tokens" if tokens else ""
