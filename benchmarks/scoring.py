"""How well a tool removed duplicates, by one measure for all: the documents it removed against all true pairs of the corpus.

recall     of the true pairs, the share that no longer stand together: at least one of the two was removed
precision  of the removed documents, the share that are in a true pair
far        of the removed documents, the share with no true partner that stays, so that nothing left says the same (tools that remove
           whole chains have many: a is like b and b like c, so c goes for a)

Which document of a pair or group stays is left to the tool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """The measures of one removal; recall_high is that of the pairs with a similarity of 0.8 and more."""

    removed: int
    recall: float
    recall_high: float
    precision: float
    far: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score(removed: Iterable[int], pairs: Any, similarity: Any, documents: int, high: float = 0.8) -> Score:
    """Score the removed documents' numbers against the true pairs (int64, pairs × 2) and their similarities."""
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
    """How many documents would go if of every group that true pairs join, over any number of steps, one stayed."""
    import numpy
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges: Any = (numpy.ones(len(pairs), dtype=numpy.int8), (pairs[:, 0], pairs[:, 1]))
    graph: Any = coo_array(edges, shape=(documents, documents))
    return documents - int(connected_components(graph, directed=False)[0])
