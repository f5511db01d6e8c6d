"""All row filters, in order: size, conversations, language and, as the most expensive, the heuristics for web text."""

from __future__ import annotations

from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.conversation_filters import CONVERSATION_FILTERS
from components.data_curation.filters.language_filter import LANGUAGE_FILTERS
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.filters.reject_reasons import Rejection
from components.data_curation.filters.size_filters import SIZE_FILTERS
from components.data_curation.filters.web_heuristics import WEB_HEURISTICS

FAMILIES = (SIZE_FILTERS, CONVERSATION_FILTERS, LANGUAGE_FILTERS, WEB_HEURISTICS)


def find_rejection(row: MeasuredRow, config: DataCurationConfig) -> Rejection | None:
    """Return the rejection by the first filter that rejects a normalized row, or None."""
    rejections = (family.find_rejection(row, config) for family in FAMILIES)
    return next((rejection for rejection in rejections if rejection), None)
