"""Train, validation and test: by the hash of a row's duplicate cluster.

A row's place depends on its cluster alone: other rows come and go without moving it, but one that joins its cluster with a smaller digest
moves the cluster. Earlier published placements are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from components.common.errors import InputError
from components.data_curation.config import Fractions
from components.data_curation.rows import Row, chance

SPLITS = ("train", "validation", "test")
SURE = 0.99  # how likely the number of rows that an error asks for fills every part


def assign(rows: Sequence[Row], clusters: Sequence[int], fractions: Fractions, seed: int) -> list[str]:
    """The split of every row. A cluster goes where the hash of the seed and of its smallest content digest sends it."""
    smallest: dict[int, str] = {}
    for row, cluster in zip(rows, clusters, strict=True):
        digest = row.digest()
        smallest[cluster] = min(digest, smallest.get(cluster, digest))
    place = {cluster: _split(chance(seed, digest), fractions) for cluster, digest in smallest.items()}
    return [place[cluster] for cluster in clusters]


def _split(number: float, fractions: Fractions) -> str:
    if number < fractions.test:
        return "test"
    return "validation" if number < fractions.test + fractions.validation else "train"


def check_filled(sizes: dict[str, int], clusters: int, fractions: Fractions) -> None:
    """Raise InputError where there is nothing to train on or nothing to test with."""
    empty = [name for name in ("train", "test") if not sizes[name]]
    if not empty:
        return
    share = min(getattr(fractions, name) for name in empty)
    needed = math.ceil(math.log(1 - SURE) / math.log(1 - share))
    raise InputError(
        f"too few rows for the split: {sum(sizes.values())} rows in {clusters} groups of similar ones leave {' and '.join(empty)} empty",
        hint=f"With data_curation.fractions.{empty[0]} at {share:g} about {needed} different rows are needed: add rows, or raise it.",
    )
