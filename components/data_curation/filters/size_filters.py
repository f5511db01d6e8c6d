"""Filters for empty, short and long rows, and for preference pairs without a preference."""

from __future__ import annotations

from components.common.runtime.counts import format_count
from components.data_curation.config import DataCurationConfig
from components.data_curation.filters.filter_family import FilterFamily
from components.data_curation.filters.measured_row import MeasuredRow
from components.data_curation.filters.reject_reasons import SIZE_GROUP

SIZE_FILTERS = FilterFamily[DataCurationConfig](SIZE_GROUP, lambda config: config)


@SIZE_FILTERS.register("empty_prompt")
def reject_empty_prompt(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject conversations without a user's text."""
    return "the prompt is empty" if row.row.kind != "text" and not row.prompt.strip() else None


@SIZE_FILTERS.register("short_prompt")
def reject_short_prompt(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject conversations whose user turns are shorter than `min_prompt_characters` in total."""
    length = len(row.prompt.strip())
    if row.row.kind == "text" or length >= config.min_prompt_characters:
        return None
    return f"{format_count(length, 'character')}; expected at least {config.min_prompt_characters}"


@SIZE_FILTERS.register("empty_text")
def reject_empty_text(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject empty texts."""
    return "the text is empty" if row.row.kind == "text" and not row.text.strip() else None


@SIZE_FILTERS.register("empty_answer")
def reject_empty_answer(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject conversations without an answer or with an empty answer."""
    if row.row.kind == "text" or (row.answers and all(answer.strip() for answer in row.answers)):
        return None
    return "an answer is empty" if row.answers else "no turn has the role assistant"


@SIZE_FILTERS.register("short_text")
def reject_short_text(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject texts shorter than `min_answer_characters`."""
    return _check_minimum(row, config) if row.row.kind == "text" else None


@SIZE_FILTERS.register("short_answer")
def reject_short_answer(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject conversations with an answer shorter than `min_answer_characters`."""
    return _check_minimum(row, config) if row.row.kind != "text" else None


def _check_minimum(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    shortest = min(len(answer.strip()) for answer in row.answers)
    minimum = config.min_answer_characters
    return f"{format_count(shortest, 'character')}; expected at least {minimum}" if shortest < minimum else None


@SIZE_FILTERS.register("no_preference")
def reject_no_preference(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject preference pairs of equal answers."""
    content = row.row.content
    is_tie = row.row.kind == "preference" and content["chosen"] == content["rejected"]
    return "the chosen answer equals the rejected answer" if is_tie else None


@SIZE_FILTERS.register("long_row")
def reject_long_row(row: MeasuredRow, config: DataCurationConfig) -> str | None:
    """Reject rows that are longer than `max_row_characters`."""
    length, limit = len(row.text), config.max_row_characters
    return f"{length:,} characters; expected at most {limit:,}" if length > limit else None
