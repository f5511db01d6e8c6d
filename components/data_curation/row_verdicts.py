"""Comparison of all rows: duplicate rejections, ids and splits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from components.data_curation.chunk_worker import HASH_NAMES
from components.data_curation.comparison import duplicates
from components.data_curation.comparison.duplicates import HashColumns, SimilarPairs
from components.data_curation.comparison.hash_arrays import convert_hashes
from components.data_curation.comparison.split_assignment import SPLITS, assign_splits
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.reject_reasons import Rejection
from components.data_curation.prepared_chunks import FIRST_SOURCE_CHUNK, PreparedRows
from components.data_curation.rows import make_unique_id

SimilarityFinder = Callable[[np.ndarray], SimilarPairs]


@dataclass(frozen=True)
class RowVerdicts:
    """The results of the comparison for the sources' rows, in input order.

    Attributes:
        ids: the id of every row.
        splits: the split of every row; "" for rejected rows.
        rejections: the rejections by index that need all rows. The chunks contain the rejections by filters.
        cluster_count: the number of clusters of rows that share a split.
        republished_rows: the number of kept rows that are also in an earlier revision.
        divided_groups: the number of `group_by` values with kept rows in several splits, caused by earlier revisions.
        renamed_ids: a description of the first row whose id was already in use, and the number of such rows.
    """

    ids: list[str]
    splits: list[str]
    rejections: dict[int, Rejection]
    cluster_count: int
    republished_rows: int
    divided_groups: int
    renamed_ids: tuple[str, int]

    def count_splits(self) -> dict[str, int]:
        """Return the number of rows by split."""
        counts = Counter(self.splits)
        return {name: counts[name] for name in SPLITS}

    def reject(self, rejections: Mapping[int, Rejection]) -> RowVerdicts:
        """Return the verdicts with kept rows rejected, by index."""
        splits = list(self.splits)
        for row in rejections:
            splits[row] = ""
        return replace(self, splits=splits, rejections={**self.rejections, **rejections})


def compare_rows(
    prepared: PreparedRows, config: DataCurationConfig, seed: int, find_similar: SimilarityFinder
) -> RowVerdicts:
    """Compare all rows that no filter rejected, and assign the kept rows to splits.

    Args:
        prepared: the rows of the sources and of earlier revisions.
        config: the stage's configuration.
        seed: the seed of the split assignment.
        find_similar: returns the similar pairs among the rows at the given places (int64, sorted). A pair consists of
            indices into the places.
    """
    ids: list[str] = []
    taken: dict[str, int] = {}
    first_renamed, renamed = "", 0
    for _, table in prepared.iterate_tables(["own_id", "digest", "file", "line"]):
        for row in table.to_pylist():
            ids.append(make_unique_id(row["own_id"] or row["digest"][:16], taken))
            if row["own_id"] not in ("", ids[-1]):
                first_renamed = first_renamed or f"{row['file']}:{row['line']} is now {ids[-1]}"
                renamed += 1
    rows = _collect_rows(prepared)
    published = len(prepared.published_splits)
    graph = duplicates.build_graph(rows.hashes, published, rows.find_pairs(find_similar))
    edges = graph.collect_edges()
    all_ids = [*prepared.published_ids, *(ids[row] for row in rows.numbers)]
    clusters = duplicates.find_clusters(len(all_ids), edges).tolist()
    splits, between_splits = assign_splits(
        rows.digests, clusters, config.fractions, seed, prepared.published_splits, edges, graph.first_group_node
    )
    if between_splits:  # rows with equal words are rejected with their first row
        first_words = enumerate(graph.first_words.tolist())
        between_splits |= {row: between_splits[first] for row, first in first_words if first in between_splits}
    labels = prepared.revision_labels if config.published == "drop" else None
    repeated = duplicates.find_duplicates(all_ids, graph, revision_labels=labels, excluded=between_splits)
    rejections = repeated | between_splits
    row_splits: np.ndarray = np.full(len(ids), "", dtype=object)
    for index, row in enumerate(rows.numbers, published):
        row_splits[row] = "" if index in rejections else splits[index]
    return RowVerdicts(
        ids,
        row_splits.tolist(),
        {int(rows.numbers[index - published]): rejection for index, rejection in rejections.items()},
        cluster_count=len(set(clusters[published:])),
        republished_rows=sum(index not in rejections for index in range(published, published + rows.republished_rows)),
        divided_groups=rows.count_divided_groups(row_splits[rows.numbers]),
        renamed_ids=(first_renamed, renamed),
    )


@dataclass(frozen=True)
class _ComparedRows:
    """The compared rows: published rows, then the sources' rows that are also in an earlier revision, then other rows.

    `numbers` are the indices of the sources' rows (int64). `places` (int64), `hashes` and content `digests` cover all
    compared rows. `republished_rows` is the number of the sources' rows that are also in an earlier revision.
    """

    numbers: np.ndarray
    places: np.ndarray
    hashes: HashColumns
    digests: list[str]
    republished_rows: int

    def find_pairs(self, find_similar: SimilarityFinder) -> SimilarPairs:
        """Return the similar pairs by index of the compared rows."""
        order = np.argsort(self.places)
        similar = find_similar(self.places[order])
        return {name: (order[pairs], similarity) for name, (pairs, similarity) in similar.items()}

    def count_divided_groups(self, splits: np.ndarray) -> int:
        """Count the values of group_by whose rows are in several of the `splits` ("" for rejected rows)."""
        halves, known = (column[len(self.digests) - len(splits) :] for column in self.hashes["group"])
        group_splits: dict[tuple[int, int], set[str]] = defaultdict(set)
        for group, split in zip(halves[known].tolist(), splits[known], strict=True):
            if split:
                group_splits[tuple(group)].add(split)
        return sum(len(names) > 1 for names in group_splits.values())


def _collect_rows(prepared: PreparedRows) -> _ComparedRows:
    """Return all rows that no filter rejected, in the order of _ComparedRows."""
    numbers: list[np.ndarray] = []
    places: list[np.ndarray] = []
    digests: list[str] = []
    hashes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in HASH_NAMES}
    begin = 0
    for chunk in [*prepared.published_chunks, *prepared.chunks]:
        if not chunk.rows:
            continue
        table = prepared.read_table(chunk, ["place", "reason", "digest", *(f"{name}_hash" for name in HASH_NAMES)])
        is_kept = table["reason"].is_null()
        if chunk.number >= FIRST_SOURCE_CHUNK:
            numbers.append(np.flatnonzero(is_kept.to_numpy()) + begin)
            begin += chunk.rows
        table = table.filter(is_kept)
        places.append(table["place"].to_numpy())
        digests += table["digest"].to_pylist()
        for name in HASH_NAMES:
            column = table[f"{name}_hash"]
            hashes[name].append((convert_hashes(column), column.is_valid().to_numpy()))
    published = len(prepared.published_splits)
    published_digests = set(digests[:published])
    is_published = np.array([digest in published_digests for digest in digests], dtype=bool)
    # Rows that repeat a published row come first, because the first of several similar rows is kept.
    order = np.argsort(~is_published, kind="stable")
    return _ComparedRows(
        np.concatenate(numbers)[order[published:] - published],
        np.concatenate(places)[order],
        {
            name: (np.concatenate([halves for halves, _ in parts])[order], np.concatenate([k for _, k in parts])[order])
            for name, parts in hashes.items()
        },
        [digests[row] for row in order.tolist()],
        int(is_published[published:].sum()),
    )


def count_filter_rejections(prepared: PreparedRows) -> Counter[str]:
    """Return the number of rows that the filters rejected, by reason."""
    counts: Counter[str] = Counter()
    for _, table in prepared.iterate_tables(["reason"]):
        counts.update(table["reason"].drop_null().to_pylist())
    return counts


def find_no_similar(_: np.ndarray) -> SimilarPairs:
    """Return no pairs: the `SimilarityFinder` of previews, which only find equal texts."""
    return {}
