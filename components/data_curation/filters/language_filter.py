"""The language filter: keeps rows in the configured languages."""

from __future__ import annotations

from components.common.language_identification import HAN_SCRIPT
from components.data_curation.config import LanguageConfig
from components.data_curation.filters.filter_family import FilterFamily
from components.data_curation.filters.measured_row import MeasuredRow

LANGUAGE_FILTERS = FilterFamily[LanguageConfig](
    "language", lambda config: config.language, lambda row, config: bool(config.keep)
)


@LANGUAGE_FILTERS.register("language")
def reject_language(row: MeasuredRow, config: LanguageConfig) -> str | None:
    """Reject rows in another language, and in undetermined languages if `drop_undetermined` is set."""
    code, confidence = row.language
    expected = " or ".join(config.keep)
    if code == HAN_SCRIPT and not {"zh", "ja"}.isdisjoint(config.keep):
        return None
    if confidence < config.min_confidence:
        return f"undetermined ({code} {confidence:.2f}); expected {expected}" if config.drop_undetermined else None
    return None if code in config.keep else f"{code} ({confidence:.2f}); expected {expected}"
