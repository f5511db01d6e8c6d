"""Scores of a tool's removals: the removed documents compared with all true pairs of the corpus.

recall     share of the true pairs with at least one document removed
precision  share of the removed documents that are in a true pair
far        share of the removed documents without a true partner among the kept documents (tools that remove whole chains have many:
           if a is similar to b and b to c, they remove c for a)

A tool may keep any document of a pair or group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """The scores of one removal; recall_high is the recall of the pairs with a similarity of at least 0.8."""

    removed: int
    recall: float
    recall_high: float
    precision: float
    far: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score(removed: Iterable[int], pairs: Any, similarity: Any, documents: int, high: float = 0.8) -> Score:
    """Score the numbers of the removed documents against the true pairs (int64, pairs × 2) and their similarities."""
    import numpy

    gone: Any = numpy.zeros(documents, dtype=bool)
    gone[list(removed)] = True
    parted = gone[pairs].any(axis=1)
    paired: Any = numpy.zeros(documents, dtype=bool)
    paired[pairs.ravel()] = True
    served: Any = numpy.zeros(documents, dtype=bool)  # has a true partner that stays
    for mine, other in ((0, 1), (1, 0)):
        served[pairs[~gone[pairs[:, other]], mine]] = True
    high_pairs = similarity >= high
    return Score(
        removed=int(gone.sum()),
        recall=_share(parted),
        recall_high=_share(parted[high_pairs]),
        precision=_share(paired[gone]),
        far=1 - _share(served[gone]),
    )


def _share(flags: Any) -> float:
    return float(flags.mean()) if len(flags) else 1.0


def surplus(pairs: Any, documents: int) -> int:
    """Return the number of documents to remove if one of each connected group remains."""
    import numpy
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges: Any = (numpy.ones(len(pairs), dtype=numpy.int8), (pairs[:, 0], pairs[:, 1]))
    graph: Any = coo_array(edges, shape=(documents, documents))
    return documents - int(connected_components(graph, directed=False)[0])
