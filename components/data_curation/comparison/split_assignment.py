"""Assignment of rows to train, validation and test: by the hash of a row's duplicate cluster, or as published.

A published row keeps its split, and new rows of its cluster are assigned to the same split. A new row that is similar
to published rows of two splits is rejected.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.data_curation.config import Fractions
from components.data_curation.filters.reject_reasons import NEAR_DUPLICATE_ACROSS_SPLITS, Rejection
from components.data_curation.rows import hash_to_unit_interval

if TYPE_CHECKING:
    import numpy as np

SPLITS = ("train", "validation", "test")
FILL_PROBABILITY = 0.99  # that the number of rows in the error's hint fills every split


def assign_splits(
    digests: Sequence[str],
    clusters: Sequence[int],
    fractions: Fractions,
    seed: int,
    published: Sequence[str] = (),
    edges: np.ndarray | None = None,
    first_group_node: float = math.inf,
) -> tuple[list[str], dict[int, Rejection]]:
    """Assign every row to a split.

    The hash of the seed and the smallest content digest decides the split of a cluster without published rows.

    Args:
        digests: the content digests of all rows.
        clusters: the cluster of each row.
        fractions: the shares of the splits.
        seed: the seed of the hash.
        published: the splits of the first rows, which are published.
        edges: the result of `DuplicateGraph.collect_edges`, needed if `published` is not empty.
        first_group_node: the first node of a group in `edges`. A group whose published rows are in several splits
            still accepts new rows, in the split of its first published row.

    Returns:
        The split of every row, and the rejections of new rows that are similar to rows of two splits.
    """

    def split_by_hash(digest: str) -> str:
        number = hash_to_unit_interval(seed, digest)
        if number < fractions.test:
            return "test"
        return "validation" if number < fractions.test + fractions.validation else "train"

    possible = {cluster: {split_by_hash(digest)} for cluster, digest in _smallest_digests(digests, clusters).items()}
    published_splits: dict[int, set[str]] = defaultdict(set)
    for split, cluster in zip(published, clusters, strict=False):
        published_splits[cluster].add(split)
    possible.update(published_splits)
    split_clusters = {cluster for cluster, splits in possible.items() if len(splits) > 1}
    splits = ["" if cluster in split_clusters else next(iter(possible[cluster])) for cluster in clusters]
    if not split_clusters:
        return splits, {}
    assert edges is not None
    members = [row for row, cluster in enumerate(clusters) if cluster in split_clusters]
    forest, rejections = _separate_published(members, digests, published, edges, first_group_node)
    roots = [forest.find_root(row) for row in members]
    smallest = _smallest_digests([digests[row] for row in members], roots)
    for row, root in zip(members, roots, strict=True):
        splits[row] = forest.get_split(root) or split_by_hash(smallest[root])
    return splits, rejections


def _smallest_digests(digests: Sequence[str], clusters: Sequence[int]) -> dict[int, str]:
    smallest: dict[int, str] = {}
    for digest, cluster in zip(digests, clusters, strict=True):
        smallest[cluster] = min(digest, smallest.get(cluster, digest))
    return smallest


def _separate_published(
    members: Sequence[int],
    digests: Sequence[str],
    published: Sequence[str],
    edges: np.ndarray,
    first_group_node: float,
) -> tuple[_SplitForest, dict[int, Rejection]]:
    """Divide clusters with published rows of several splits into groups of one split, and reject rows in between."""
    published_digests = {digests[row]: split for row, split in enumerate(published)}
    neighbours, own_nodes = _find_neighbours(members, edges, len(digests))
    forest = _SplitForest({row: published_digests.get(digests[row], "") for row in members})
    rejections: dict[int, Rejection] = {}
    active_nodes: set[int] = set()  # nodes of kept rows, which connect a row with rows of similar values
    node_splits: dict[int, set[str]] = defaultdict(set)  # splits of published rows by their nodes
    for row in members:
        split = published_digests.get(digests[row])
        joined = [
            other for other in neighbours[row] if (other < row or other in active_nodes) and other not in rejections
        ]
        splits = forest.get_splits([*joined, row]).union(*(node_splits.get(other, ()) for other in joined))
        if len(splits) > 1 and split is None:
            rejections[row] = NEAR_DUPLICATE_ACROSS_SPLITS.reject(f"similar to rows in {' and '.join(sorted(splits))}")
            continue
        active_nodes.update(own_nodes[row])
        for node in own_nodes[row] if split is not None else ():
            if node < first_group_node:
                node_splits[node].add(published_digests[digests[row]])
        for other in [*own_nodes[row], *joined]:
            forest.join_if_same_split(other, row)
    return forest, rejections


def _find_neighbours(
    members: Sequence[int], edges: np.ndarray, rows: int
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the rows and nodes that each member is connected with, and its own nodes (numbers from `rows` on)."""
    inside = set(members)
    neighbours: dict[int, list[int]] = {row: [] for row in members}
    similar_nodes: dict[int, list[int]] = defaultdict(list)
    for a, b in edges.tolist():
        if a >= rows:
            similar_nodes[a].append(b)
            similar_nodes[b].append(a)
        elif a in inside and a != b:
            neighbours[a].append(b)
            if b < rows:
                neighbours[b].append(a)
    own_nodes = {row: [other for other in neighbours[row] if other >= rows] for row in members}
    for row in members:  # a row is also connected with the nodes that are similar to its own
        neighbours[row] += [similar for node in own_nodes[row] for similar in similar_nodes[node]]
    return neighbours, own_nodes


class _SplitForest:
    """A disjoint-set forest of connected rows, with the split of each set ("" if unknown)."""

    def __init__(self, splits: dict[int, str]) -> None:
        self._parents: dict[int, int] = {}
        self._splits = splits

    def find_root(self, row: int) -> int:
        """Return the row that represents the row's set."""
        while (parent := self._parents.get(row, row)) != row:
            self._parents[row] = row = self._parents.get(parent, parent)  # path halving
        return row

    def get_split(self, row: int) -> str:
        """Return the split of the row's set."""
        return self._splits.get(self.find_root(row), "")

    def get_splits(self, rows: Iterable[int]) -> set[str]:
        """Return the known splits of the rows' sets."""
        return {self.get_split(row) for row in rows} - {""}

    def join_if_same_split(self, first: int, second: int) -> None:
        """Join two sets, unless they are in different splits."""
        splits = self.get_splits((first, second))
        a, b = self.find_root(first), self.find_root(second)
        if len(splits) < 2 and a != b:
            self._splits[a] = next(iter(splits), "")
            self._parents[b] = a


def check_not_empty(sizes: dict[str, int], clusters: int, fractions: Fractions) -> None:
    """Raise InputError if the train or test split is empty.

    Args:
        sizes: the number of rows by split.
        clusters: the number of clusters of similar rows.
        fractions: the configured shares of the splits.
    """
    empty = [name for name in ("train", "test") if not sizes[name]]
    if not empty:
        return
    name = min(empty, key=lambda split: float(getattr(fractions, split)))
    share = getattr(fractions, name)
    needed = math.ceil(math.log(1 - FILL_PROBABILITY) / math.log(1 - share))
    raise InputError(
        f"too few rows for the split: with {format_count(sum(sizes.values()), 'row')} in "
        f"{format_count(clusters, 'group')} of similar rows, "
        f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty",
        hint=f"Add rows (about {needed} different rows are needed), or increase data_curation.fractions.{name} "
        f"({share:g}).",
    )
