"""Train, validation and test: by the hash of a row's duplicate cluster, or where an earlier revision has put it.

A published row never moves. Its cluster goes where it lies; where two published rows of one cluster lie in different splits, a newcomer
that would join them is alike rows of two splits, and is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from components.common.errors import InputError
from components.data_curation.cleaning import Drop
from components.data_curation.config import Fractions
from components.data_curation.rows import chance

SPLITS = ("train", "validation", "test")
SURE = 0.99  # how likely the number of rows that an error asks for fills every part


def assign(
    digests: Sequence[str],
    clusters: Sequence[int],
    fractions: Fractions,
    seed: int,
    published: Sequence[str] = (),
    edges: Any = (),
    groups: int | None = None,
) -> tuple[list[str], dict[int, Drop]]:
    """The split of every row, and the rows that bridge two splits. `published` are the splits of the first rows, of earlier revisions.

    `edges` are those of duplicates.Likeness, and `groups` is the first number in them that stands for a group: one whose published rows
    lie in several splits takes newcomers all the same, into the split of the first.

    A cluster without published rows goes where the hash of the seed and of its smallest content digest sends it.
    """

    def by_hash(digest: str) -> str:
        return _split(chance(seed, digest), fractions)

    smallest = _smallest(digests, clusters)
    place = {cluster: {by_hash(digest)} for cluster, digest in smallest.items()}
    taken: dict[int, set[str]] = defaultdict(set)
    for split, cluster in zip(published, clusters, strict=False):
        taken[cluster].add(split)
    place.update(taken)
    torn = {cluster for cluster, found in place.items() if len(found) > 1}
    where = ["" if cluster in torn else next(iter(place[cluster])) for cluster in clusters]
    if not torn:
        return where, {}
    members = [row for row, cluster in enumerate(clusters) if cluster in torn]
    settled, bridges = _settle(members, digests, published, edges, groups)
    tops = [settled.top(row) for row in members]
    smallest = _smallest([digests[row] for row in members], tops)
    for row, top in zip(members, tops, strict=True):
        where[row] = settled.split(top) or by_hash(smallest[top])
    return where, bridges


def _smallest(digests: Sequence[str], clusters: Sequence[int]) -> dict[int, str]:
    """The smallest content digest of every cluster."""
    smallest: dict[int, str] = {}
    for digest, cluster in zip(digests, clusters, strict=True):
        smallest[cluster] = min(digest, smallest.get(cluster, digest))
    return smallest


def _settle(
    members: Sequence[int], digests: Sequence[str], published: Sequence[str], edges: Any, first_group: int | None
) -> tuple[_Groups, dict[int, Drop]]:
    """Part clusters that have published rows of several splits into groups of one split each; and the newcomers that lie between them.

    Newcomers join what they are alike in their order; one that is alike rows of two splits joins neither.
    """
    rows = len(digests)
    at_home = {digests[row]: split for row, split in enumerate(published)}
    neighbours, own = _neighbours(members, edges, rows)
    groups = _Groups({row: at_home.get(digests[row], "") for row in members})
    bridges: dict[int, Drop] = {}
    held: set[int] = set()  # what rows that stay have: only through these is a row joined with what is like its own
    homes: dict[int, set[str]] = defaultdict(set)  # where published rows lie that have it
    for row in members:
        before = [other for other in neighbours[row] if (other < row or other in held) and other not in bridges]
        splits = {groups.split(other) for other in [*before, row]}.union(*(homes[other] for other in before if other in homes)) - {""}
        if len(splits) > 1 and digests[row] not in at_home:
            bridges[row] = Drop("near_duplicate_across_splits", f"alike rows that lie in {' and '.join(sorted(splits))}")
            continue
        held.update(own[row])
        for common in own[row] if digests[row] in at_home else ():
            if first_group is None or common < first_group:
                homes[common].add(at_home[digests[row]])
        for other in [*own[row], *before]:
            groups.join_unless_apart(other, row)
    return groups, bridges


def _neighbours(members: Sequence[int], edges: Any, rows: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """What each member is joined with, and of that what it has in common with others itself (numbers from `rows` on).

    A row is joined with all that is like what it has in common, and rows that have something in common only with that.
    """
    inside = set(members)
    found: dict[int, list[int]] = {row: [] for row in members}
    common: dict[int, list[int]] = defaultdict(list)
    for a, b in edges.tolist():
        if a >= rows:
            common[a].append(b)
            common[b].append(a)
        elif a in inside and a != b:
            found[a].append(b)
            if b < rows:
                found[b].append(a)
    own = {row: [other for other in found[row] if other >= rows] for row in members}
    for row in members:
        found[row] += [like for other in found[row] if other >= rows for like in common[other]]
    return found, own


class _Groups:
    """Rows joined so far, and the split of each group ("" while none is known): a disjoint-set forest."""

    def __init__(self, split: dict[int, str]) -> None:
        self._above: dict[int, int] = {}
        self._split = split

    def top(self, row: int) -> int:
        """The row that stands for the row's group."""
        while (above := self._above.get(row, row)) != row:
            self._above[row] = row = self._above.get(above, above)
        return row

    def split(self, row: int) -> str:
        """The split of the row's group."""
        return self._split.get(self.top(row), "")

    def join_unless_apart(self, one: int, other: int) -> None:
        """Make one group of two, but not of two that lie in different splits."""
        splits = {self.split(one), self.split(other)} - {""}
        a, b = self.top(one), self.top(other)
        if len(splits) < 2 and a != b:
            self._split[a] = next(iter(splits), "")
            self._above[b] = a


def _split(number: float, fractions: Fractions) -> str:
    if number < fractions.test:
        return "test"
    return "validation" if number < fractions.test + fractions.validation else "train"


def check_filled(sizes: dict[str, int], clusters: int, fractions: Fractions) -> None:
    """Raise InputError where there is nothing to train on or nothing to test with."""
    empty = [name for name in ("train", "test") if not sizes[name]]
    if not empty:
        return
    name = min(empty, key=lambda one: float(getattr(fractions, one)))
    share = getattr(fractions, name)
    needed = math.ceil(math.log(1 - SURE) / math.log(1 - share))
    raise InputError(
        f"too few rows for the split: {sum(sizes.values())} rows in {clusters} groups of similar ones leave {' and '.join(empty)} empty",
        hint=f"With data_curation.fractions.{name} at {share:g} about {needed} different rows are needed: add rows, or raise it.",
    )
