"""Redaction of personal data and secrets in a row, with counts by kind."""

from __future__ import annotations

from collections import Counter

from components.common.personal_data import PLACEHOLDERS
from components.common.personal_data.detectors import DETECTORS
from components.common.personal_data.json_redaction import Redactor
from components.common.personal_data.names_config import Action
from components.data_curation.config import PersonalDataConfig
from components.data_curation.filters.reject_reasons import PERSONAL_DATA, Rejection
from components.data_curation.rows import Row


def redact_row(row: Row, config: PersonalDataConfig) -> tuple[dict[str, int], Rejection | None]:
    """Redact the row's texts, source and meta in place, according to the action of each kind. The id is not redacted.

    Rejected rows are redacted too, so that rejected.parquet does not contain the values.

    Returns:
        The number of findings by kind, and the rejection if a kind with the action `drop` was found.

    Raises:
        ConfigurationError: the spaCy model cannot be loaded.
    """
    actions = get_actions(config)
    redactor = Redactor([kind for kind, action in actions.items() if action != "keep"], config.names, Counter())
    for name, value in row.content.items():
        is_json = name == "tools" and isinstance(value, str)
        row.content[name] = redactor.redact_json(value) if is_json else redactor.redact_value(value)
    if row.source != row.file:  # a file's name is not redacted, because the manifest's inputs list it
        row.source = redactor.redact_text(row.source)
    if row.meta:
        row.meta = redactor.redact_value(row.meta, use_keys=True)
    counts = {kind: redactor.counts[kind] for kind in PLACEHOLDERS if redactor.counts[kind]} if redactor.counts else {}
    rejected_kinds = [kind for kind in counts if actions[kind] == "drop"]
    return counts, PERSONAL_DATA.reject(", ".join(rejected_kinds)) if rejected_kinds else None


def get_actions(config: PersonalDataConfig) -> dict[str, Action]:
    """Return the configured action for every kind of personal data."""
    actions: dict[str, Action] = {kind: getattr(config, kind) for kind in DETECTORS}
    return {**actions, "person": config.names.person, "location": config.names.location}
