"""Counts and examples for the report, collected row by row while the dataset is written.

They contain no detected personal data, even if the dataset keeps it:
examples are masked, and findings are only counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from components.common import personal_data
from components.common.personal_data.names_config import NamesConfig
from components.data_curation.filters.decontamination import find_contaminating_set
from components.data_curation.filters.reject_reasons import Rejection
from components.data_curation.quality_scoring.scorer_interface import ScorerStatistics
from components.data_curation.reading.raw_records import UnreadableRecord
from components.data_curation.token_statistics import TokenStatistics

MAX_EXAMPLES_PER_REASON = 3
MAX_EXAMPLE_CHARACTERS, MAX_EXAMPLE_LINES = 300, 12
MAX_UNREADABLE_RECORDS = 20
LENGTH_CLASSES = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)  # upper bounds in characters
LONGEST_CLASS = 0  # key of the rows above the last upper bound
KEPT, REJECTED, QUARANTINED = "kept", "rejected", "quarantined"


@dataclass(frozen=True)
class RejectedExample:
    """A rejected row for display: its location, the detail, and the start of its text."""

    detail: str
    location: str
    text: str


@dataclass
class PersonalDataCount:
    """Personal data of one kind: findings, rows with findings, and the action (redact, drop or keep)."""

    found: int = 0
    rows: int = 0
    action: str = ""


@dataclass
class DocumentCount:
    """Documents of one type: files, chunks, pages or slides that were read, and pages without text."""

    files: int = 0
    chunks: int = 0
    pages: int = 0
    pages_without_text: int = 0


@dataclass
class CurationStatistics:
    """Counts and examples of a curation.

    Attributes:
        names: the configuration for masking names.
        lengths: the number of kept rows per length class, see LENGTH_CLASSES.
        languages: the number of kept rows per language, in all rows or a sample of them.
        by_source: per file, the number of rows per result.
        personal: the findings per kind of personal data.
        examples: per reject reason, the first rejected rows.
        unread: the first unreadable records.
        evaluation_sets: per evaluation set, the numbers of items, of items that cannot be found by their questions, of
            unreadable records, and of rejected rows.
        contaminated_rows: per evaluation set, the number of rejected rows.
        similarities: per reject reason, the similarities of the rejected rows to the kept ones.
        documents: the counts per type of document, such as pdf.
        chunk_tokens: the number of chunks of documents per length class; the keys are upper bounds in tokens.
        extractors: the versions of the packages that extracted text from the documents.
        tokens: the token statistics; None if tokens were not counted. A note then gives the reason.
        quality_scores: the statistics of each scorer of rows.
        notes: sentences for the overview.
    """

    names: NamesConfig = field(default_factory=NamesConfig)
    lengths: Counter[int] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    by_source: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    personal: dict[str, PersonalDataCount] = field(default_factory=dict)
    examples: dict[str, list[RejectedExample]] = field(default_factory=dict)
    unread: list[UnreadableRecord] = field(default_factory=list)
    evaluation_sets: dict[str, dict[str, int]] = field(default_factory=dict)
    contaminated_rows: Counter[str] = field(default_factory=Counter)
    similarities: dict[str, list[float]] = field(default_factory=dict)
    documents: dict[str, DocumentCount] = field(default_factory=dict)
    chunk_tokens: Counter[int] = field(default_factory=Counter)
    extractors: dict[str, str] = field(default_factory=dict)
    tokens: TokenStatistics | None = None
    quality_scores: list[ScorerStatistics] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count_kept(self, file: str, characters: int) -> None:
        """Count a kept row of a file."""
        self.by_source[file][KEPT] += 1
        self.lengths[(*LENGTH_CLASSES, LONGEST_CLASS)[bisect_left(LENGTH_CLASSES, characters)]] += 1

    def count_rejected(self, rejection: Rejection, file: str, line: int, text: str) -> None:
        """Count a rejected row. The first rows of each reason become examples, with personal data masked."""
        self.by_source[file][REJECTED] += 1
        if evaluation_set := find_contaminating_set(rejection):
            self.contaminated_rows[evaluation_set] += 1
        examples = self.examples.setdefault(rejection.reason, [])
        if len(examples) < MAX_EXAMPLES_PER_REASON:
            detail, masked = (personal_data.mask(part, self.names) for part in (rejection.detail, text))
            start = "\n".join(masked.split("\n", MAX_EXAMPLE_LINES)[:MAX_EXAMPLE_LINES])[:MAX_EXAMPLE_CHARACTERS]
            shown = masked if masked == start else f"{start} …"
            examples.append(RejectedExample(detail, f"{file}:{line}", shown))

    def count_unreadable(self, unread: UnreadableRecord) -> None:
        """Count an unreadable record."""
        self.by_source[unread.file][QUARANTINED] += 1
        if len(self.unread) < MAX_UNREADABLE_RECORDS:
            self.unread.append(unread)
