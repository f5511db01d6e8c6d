"""Registry of reject reasons. The manifest counts rejections by name of the reason, the report by its group.

Row filters register their reasons through `FilterFamily`; the reasons of other steps are defined here.
"""

from __future__ import annotations

from dataclasses import dataclass

DUPLICATE_GROUP, SIZE_GROUP = "duplicates", "empty, short or long"


@dataclass(frozen=True)
class RejectReason:
    """A declared reject reason. The report counts it in its group; `meaning` explains duplicates in the report."""

    name: str
    group: str
    meaning: str = ""

    def reject(self, detail: str, similarity: float | None = None) -> Rejection:
        """Return a rejection for this reason; `detail` describes the row."""
        return Rejection(self, detail, similarity)


@dataclass(frozen=True)
class Rejection:
    """Rejection of a row: its declared reason, a detail for the reader, and a near-duplicate's similarity to the kept row."""

    declared_reason: RejectReason
    detail: str
    similarity: float | None = None

    @property
    def reason(self) -> str:
        """The name of the reason."""
        return self.declared_reason.name


REJECT_REASONS: dict[str, RejectReason] = {}


def register_reason(name: str, group: str, meaning: str = "") -> RejectReason:
    """Declare a reject reason in a group of the report. Filters may share a reason if they declare the same group.

    Raises:
        ValueError: the group is empty, or the reason is already declared in another group.
    """
    if not group:
        raise ValueError(f"the reject reason {name} has no group; expected a group of the report")
    reason = REJECT_REASONS.setdefault(name, RejectReason(name, group, meaning))
    if reason.group != group:
        raise ValueError(f"the reject reason {name} is in the group {group!r}; expected {reason.group!r}, as before")
    return reason


PERSONAL_DATA = register_reason("personal_data", "personal data")
NOT_SELECTED = register_reason("not_selected", "not selected")
CONTAMINATED = register_reason("contaminated", "evaluation items")
EXACT_DUPLICATE = register_reason(
    "exact_duplicate", DUPLICATE_GROUP, "equals a kept row except for letter case and white space"
)
NEAR_DUPLICATE = register_reason("near_duplicate", DUPLICATE_GROUP, "is nearly equal to a kept row")
NEAR_DUPLICATE_ACROSS_SPLITS = register_reason(
    "near_duplicate_across_splits", DUPLICATE_GROUP, "is similar to published rows of two splits"
)
SEMANTIC_DUPLICATE = register_reason("semantic_duplicate", DUPLICATE_GROUP, "has nearly the same meaning as a kept row")
LOW_QUALITY_SCORE = register_reason("low_quality_score", "quality scores")
