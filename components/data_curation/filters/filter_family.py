"""Registration of row filters: a filter is a function with a reject reason and a configuration switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.filters.reject_reasons import Rejection, RejectReason, register_reason

Section = TypeVar("Section")
Check = Callable[[MeasuredRow, Section], str | None]  # returns the detail of the rejection, or None for a kept row


@dataclass
class FilterFamily(Generic[Section]):
    """Filters that share a report group, a section of the configuration and the rows they apply to.

    Filters run in the order of their registration, and the first filter that returns a detail rejects the row.
    """

    group: str
    section: Callable[[DataCurationConfig], Section]
    applies: Callable[[MeasuredRow, Section], bool] = lambda row, config: True
    filters: list[tuple[RejectReason, str, Check[Section]]] = field(default_factory=list)

    def register(self, reason: str, switch: str = "", group: str = "") -> Callable[[Check[Section]], Check[Section]]:
        """Register the decorated function, which returns the detail of a rejection or None.

        Args:
            reason: the name of the reject reason.
            switch: the key of the section that enables the filter; "" for a filter that always runs.
            group: the group in the report; "" for the family's group.
        """
        declared = register_reason(reason, group or self.group)

        def add(check: Check[Section]) -> Check[Section]:
            self.filters.append((declared, switch, check))
            return check

        return add

    def find_rejection(self, row: MeasuredRow, config: DataCurationConfig) -> Rejection | None:
        """Return the rejection by the first filter that rejects the row, or None."""
        section = self.section(config)
        if self.applies(row, section):
            for reason, switch, check in self.filters:
                if (not switch or getattr(section, switch)) and (detail := check(row, section)):
                    return reason.reject(detail)
        return None
