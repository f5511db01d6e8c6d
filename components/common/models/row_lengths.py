"""Row length that covers most rows of a dataset."""

from __future__ import annotations

import math
from collections.abc import Sequence

LENGTH_QUANTILE = 0.95  # longer rows are truncated: a batch costs as much as its longest row
LENGTH_MULTIPLE = 64  # tokens; matrix products on GPUs are fastest with multiples of 64 (NVIDIA, tensor core guide)


def find_covering_length(lengths: Sequence[int], quantile: float = LENGTH_QUANTILE) -> tuple[int, int]:
    """Return the number of tokens that `quantile` of the rows do not exceed, and its next LENGTH_MULTIPLE.

    Args:
        lengths: Tokens of each row. Empty: the result is (1, LENGTH_MULTIPLE).
        quantile: Share of the rows.
    """
    covered = sorted(lengths)[math.ceil(quantile * len(lengths)) - 1] if lengths else 1
    return covered, math.ceil(covered / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
