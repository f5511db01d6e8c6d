"""The interface of the scorers: the rows to score, their scores, and the statistics for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from components.common.runtime.reporters import Reporter
from components.data_curation.rows import CONTENT_COLUMNS

if TYPE_CHECKING:
    import numpy as np

    from components.data_curation.prepared_chunks import PreparedRows

SCORE_DIGITS = 4
MAX_BINS = 12  # of more bins, the empty ones at both ends are not shown


class RowScorer(Protocol):
    """A scorer of rows.

    Attributes:
        name: the name of the scorer in `meta`, the manifest and the report.
        bin_edges: the edges of the report's histogram, ascending.
        minimum: the lowest score of a kept row; None for no limit.
        maximum: the highest score of a kept row; None for no limit.
    """

    name: str
    bin_edges: Sequence[float]
    minimum: float | None
    maximum: float | None

    @property
    def description(self) -> str:
        """The meaning of the score, for the report."""

    def score(self, rows: KeptRows, reporter: Reporter) -> ScorerResult:
        """Score the rows."""


@dataclass(frozen=True)
class KeptRows:
    """The rows that are to be scored.

    Attributes:
        prepared: all rows.
        is_kept: whether each row is to be scored.
    """

    prepared: PreparedRows
    is_kept: np.ndarray

    @property
    def count(self) -> int:
        """Number of rows to score."""
        return int(self.is_kept.sum())

    def iterate_contents(self) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
        """Yield the indices and the contents (see rows.CONTENT_COLUMNS) of the rows to score, chunk by chunk."""
        import pyarrow

        for begin, table in self.prepared.iterate_tables(CONTENT_COLUMNS[self.prepared.kind]):
            mask = self.is_kept[begin : begin + len(table)]
            if mask.any():
                yield (mask.nonzero()[0] + begin).tolist(), table.filter(pyarrow.array(mask)).to_pylist()


@dataclass(frozen=True)
class ScorerResult:
    """The scores of one scorer.

    Attributes:
        scores: the score of every row of the sources, float64; NaN for rows without a score.
        figures: further figures for the manifest and the report, such as the AUC of a classifier.
        notes: sentences for the report.
    """

    scores: np.ndarray
    figures: dict[str, float | int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ScorerStatistics:
    """The scores of one scorer for the report.

    Attributes:
        scorer: the scorer.
        scores: the scores of the scored rows, float64.
        rejected: the number of rejected rows.
        unscored: the number of rows without a score, which are kept.
        figures: the figures of the scorer.
        notes: sentences for the report.
    """

    scorer: RowScorer
    scores: np.ndarray
    rejected: int
    unscored: int
    figures: dict[str, float | int]
    notes: list[str]

    def count_bins(self) -> list[tuple[str, int, bool]]:
        """Return the histogram: label, number of rows, and whether these rows are rejected. Thresholds are bin edges."""
        import numpy as np

        low, high = self.scorer.minimum, self.scorer.maximum
        edges = sorted({*self.scorer.bin_edges, *(limit for limit in (low, high) if limit is not None)})
        is_integer = all(isinstance(edge, int) for edge in edges)
        # A score equal to a threshold is kept, so the bins below a maximum include their upper edge.
        places = np.searchsorted(edges, self.scores, side="left" if high is not None else "right") - 1
        counts = np.bincount(np.clip(places, 0, len(edges) - 2), minlength=len(edges) - 1).tolist()
        bins = []
        for start, end, count in zip(edges, edges[1:], counts, strict=False):
            is_rejected = (low is not None and end <= low) or (high is not None and start >= high)
            bins.append((f"{start}" if is_integer else f"{start:,g}–{end:,g}", count, is_rejected))
        if len(bins) > MAX_BINS:
            filled = [number for number, count in enumerate(counts) if count]
            bins = bins[min(filled, default=0) : max(filled, default=0) + 1]
        return bins

    def summarize(self) -> dict[str, Any]:
        """Return the counts and figures for the manifest's summary."""
        import numpy as np

        middle = round(float(np.median(self.scores)), SCORE_DIGITS) if len(self.scores) else None
        counts = {"scored": len(self.scores), "unscored": self.unscored, "rejected": self.rejected, "median": middle}
        return {**counts, **self.figures}
