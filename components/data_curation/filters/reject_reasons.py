"""Registry of reject reasons. The manifest counts rejections by name of the reason, the report by its group.

Row filters register their reasons through `FilterFamily`; the reasons of other steps are defined here.
"""

from __future__ import annotations

from dataclasses import dataclass

DUPLICATE_GROUP, SIZE_GROUP = "duplicates", "empty, short or long"


@dataclass(frozen=True)
class Rejection:
    """Rejection of a row: the name of the reason, and a detail for the reader.

    `similarity` is that of a near-duplicate to the kept row.
    """

    reason: str
    detail: str
    similarity: float | None = None


@dataclass(frozen=True)
class RejectReason:
    """A registered reject reason; `meaning` explains it in the report's table of duplicates."""

    name: str
    group: str
    meaning: str = ""

    def reject(self, detail: str, similarity: float | None = None) -> Rejection:
        """Return a rejection for this reason; `detail` describes the row."""
        return Rejection(self.name, detail, similarity)


REJECT_REASONS: dict[str, RejectReason] = {}


def register_reason(name: str, group: str, meaning: str = "") -> RejectReason:
    """Register a reject reason, or return the reason that is already registered under the name."""
    return REJECT_REASONS.setdefault(name, RejectReason(name, group, meaning))


def get_reason_group(name: str) -> str:
    """Return the report's group of a reason; "other" for an unknown reason."""
    return REJECT_REASONS[name].group if name in REJECT_REASONS else "other"


PERSONAL_DATA = register_reason("personal_data", "personal data")
CONTAMINATED = register_reason("contaminated", "evaluation items")
EXACT_DUPLICATE = register_reason(
    "exact_duplicate", DUPLICATE_GROUP, "equals a kept row except for letter case and white space"
)
NEAR_DUPLICATE = register_reason("near_duplicate", DUPLICATE_GROUP, "is nearly equal to a kept row")
NEAR_DUPLICATE_ACROSS_SPLITS = register_reason(
    "near_duplicate_across_splits", DUPLICATE_GROUP, "is similar to published rows of two splits"
)
