"""Duplicate detection: finds the rows that repeat an earlier row, and the rows that must share a split.

A row is identified by its index among the compared rows: published rows first, then new rows in input order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from components.data_curation.comparison.hash_arrays import find_first_equal_rows
from components.data_curation.filters.reject_reasons import EXACT_DUPLICATE, NEAR_DUPLICATE, Rejection

HashColumns = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by name: uint64 (rows, 2), and whether it is set (bool)
SimilarPairs = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by name: int64 (pairs, 2), and similarities
PairsByLaterRow = Mapping[int, Sequence[tuple[int, float]]]  # by later row: earlier rows and their similarities


@dataclass
class DuplicateGraph:
    """Graph of equal and similar rows.

    The nodes after the rows represent shared values: answers, judged prompts and groups. A value's node connects its
    rows even if one of them is rejected.

    Attributes:
        published: the number of published rows, which are the first rows.
        first_exact: for every row, the first row with equal text (int64, (rows,)).
        first_words: for every row, the first row with equal words (int64, (rows,)).
        joined_pairs: pairs of rows and nodes, or of similar nodes (int64, (pairs, 2) each).
        word_pairs: pairs of similar first rows (int64, (pairs, 2), a < b).
        similarity: the Jaccard similarities of `word_pairs`.
        first_group_node: the first node of a group; the nodes of groups are the last.
    """

    published: int
    first_exact: np.ndarray
    first_words: np.ndarray
    joined_pairs: list[np.ndarray]
    word_pairs: np.ndarray
    similarity: np.ndarray
    first_group_node: int

    def collect_edges(self) -> np.ndarray:
        """Return all pairs of rows and nodes that belong together (int64, (pairs, 2))."""
        rows = np.arange(len(self.first_exact))
        equal = [np.stack([rows, first], axis=1)[first != rows] for first in (self.first_exact, self.first_words)]
        edges: np.ndarray = np.concatenate([*equal, self.word_pairs, *self.joined_pairs])
        return edges


def build_graph(hashes: HashColumns, published: int, pairs: SimilarPairs) -> DuplicateGraph:
    """Build the graph from the rows' hashes and the similar pairs of the engine.

    A similar pair represents all rows with the same two texts. A value has a node if several rows share it, or if it
    is similar to the value of another row.

    Args:
        hashes: the rows' hashes by "exact", "words", "answer", "prompt" and "group".
        published: the number of published rows, which are the first rows.
        pairs: the similar pairs by "words" and "answer".
    """
    no_pairs: np.ndarray = np.empty((0, 2), dtype=np.int64)
    first_exact, first_words = (find_first_equal_rows(hashes[name][0]) for name in ("exact", "words"))
    joined, next_node, first_group_node = [], len(first_exact), 0
    for name in ("answer", "prompt", "group"):
        first_group_node = next_node
        similar = pairs[name][0] if name in pairs else no_pairs
        halves, known = hashes[name]
        rows = np.flatnonzero(known)
        first = np.arange(len(known))
        first[rows] = rows[find_first_equal_rows(halves[known])]
        is_shared = np.bincount(first[rows], minlength=len(known)) > 1
        is_shared[first[similar].ravel()] = True
        node = np.cumsum(is_shared) - 1 + next_node  # by first row with a shared value
        next_node += int(is_shared.sum())
        members = rows[is_shared[first[rows]]]
        joined.append(np.concatenate([np.stack([members, node[first[members]]], axis=1), node[first[similar]]]))
    found, similarity = pairs.get("words", (no_pairs, np.empty(0)))
    word_pairs = np.sort(first_words[found], axis=1)
    return DuplicateGraph(published, first_exact, first_words, joined, word_pairs, similarity, first_group_node)


def find_duplicates(
    ids: Sequence[str],
    graph: DuplicateGraph,
    *,
    revision_labels: Sequence[str] | None = None,
    excluded: Collection[int] = (),
) -> dict[int, Rejection]:
    """Return the rejections, by index, of new rows that are duplicates or near-duplicates of an earlier kept row.

    Args:
        ids: the ids of all rows.
        graph: the equal and similar rows.
        revision_labels: the revision of each published row; None to compare new rows with new rows only.
        excluded: rows that are rejected for another reason, and represent no other rows.
    """
    if revision_labels is None:
        first_exact, first_words, pairs = _restrict_to_new_rows(graph)
    else:
        first_exact, first_words, pairs = graph.first_exact, graph.first_words, _group_pairs_by_later_row(graph)
    representative: dict[int, tuple[int, float]] = {}  # by first row with equal words: the kept row and the similarity
    rejections: dict[int, Rejection] = {}

    def describe(row: int) -> str:
        return f"{ids[row]} of {revision_labels[row]}" if revision_labels and row < graph.published else ids[row]

    rows = np.arange(len(first_exact))
    equal_rows = np.flatnonzero((first_exact != rows) | (first_words != rows))
    candidates = np.union1d(equal_rows, np.fromiter(pairs, np.int64, len(pairs)))
    for row in candidates[candidates >= graph.published].tolist():
        if row in excluded:
            continue
        first, equal = int(first_words[row]), int(first_exact[row])
        if first == row:
            kept = [
                (earlier, similarity)
                for earlier, similarity in pairs.get(row, ())
                if representative.get(earlier, (earlier, 1.0))[0] == earlier and earlier not in excluded
            ]
            representative[row] = max(kept, key=lambda pair: (pair[1], -pair[0]), default=(row, 1.0))
        kept_row, similarity = representative.get(first, (first, 1.0))
        if equal != row:
            represented = "" if kept_row == first == equal else f", a near-duplicate of {describe(kept_row)}"
            rejections[row] = EXACT_DUPLICATE.reject(f"equal to {describe(equal)}{represented}")
        elif kept_row != row:
            detail = f"similarity {similarity:.3f} to {describe(kept_row)}"
            rejections[row] = NEAR_DUPLICATE.reject(detail, similarity)
    return rejections


def _group_pairs_by_later_row(graph: DuplicateGraph) -> PairsByLaterRow:
    pairs = defaultdict(list)
    for (earlier, later), similarity in zip(graph.word_pairs.tolist(), graph.similarity.tolist(), strict=True):
        pairs[later].append((earlier, similarity))
    return pairs


def _restrict_to_new_rows(graph: DuplicateGraph) -> tuple[np.ndarray, np.ndarray, PairsByLaterRow]:
    """Return the first rows and the similar pairs among new rows only."""
    published = graph.published
    if not published:
        return graph.first_exact, graph.first_words, _group_pairs_by_later_row(graph)

    def first_new(first: np.ndarray) -> np.ndarray:
        _, index, inverse = np.unique(first[published:], return_index=True, return_inverse=True)
        first_rows: np.ndarray = np.concatenate([np.arange(published), index[inverse] + published])
        return first_rows

    words = first_new(graph.first_words)
    new_row = dict(zip(graph.first_words[published:].tolist(), words[published:].tolist(), strict=True))
    pairs = defaultdict(list)
    for later, row_pairs in _group_pairs_by_later_row(graph).items():
        for earlier, similarity in row_pairs:
            if earlier in new_row and later in new_row:
                low, high = sorted((new_row[earlier], new_row[later]))
                pairs[high].append((low, similarity))
    return first_new(graph.first_exact), words, pairs


def find_clusters(rows: int, edges: np.ndarray) -> np.ndarray:
    """Return the cluster number of every row (int64, (rows,)). Rows connected by a path of edges share a cluster.

    Args:
        rows: number of rows.
        edges: connected pairs (int64, (edges, 2)); numbers from `rows` on are nodes that stand for no row.
    """
    nodes = max(rows, int(edges.max(initial=-1)) + 1)
    graph = coo_array((np.ones(len(edges), dtype=np.int8), (edges[:, 0], edges[:, 1])), shape=(nodes, nodes))
    clusters: np.ndarray = connected_components(graph, directed=False)[1]
    return clusters[:rows]
