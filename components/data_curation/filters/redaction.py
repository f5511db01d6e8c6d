"""Redaction of personal data and secrets in a row, with counts by kind."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from components.common.personal_data import PLACEHOLDERS, redact
from components.common.personal_data.detectors import DETECTORS
from components.common.personal_data.names_config import Action, NamesConfig
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
    redactor = _Redactor([kind for kind, action in actions.items() if action != "keep"], config.names, Counter())
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


@dataclass(frozen=True)
class _Redactor:
    """The kinds to redact, and the number of findings so far by kind."""

    kinds: list[str]
    names: NamesConfig
    counts: Counter[str]

    def redact_text(self, text: str, lead: str = "") -> str:
        text, counts = redact(text, self.kinds, self.names, lead)
        if counts:
            self.counts.update(counts)
        return text

    def redact_value(self, value: Any, use_keys: bool = False) -> Any:
        """Return a copy of a JSON value with redacted texts.

        `use_keys` lets a text's key classify it, as in {"phone": "5550100"}. A work list replaces recursion,
        because values may be nested deeply.
        """
        if isinstance(value, str):
            return self.redact_text(value)
        holder = [value]
        pending: list[tuple[Any, Any, str]] = [(holder, 0, "")]
        while pending:
            parent, key, lead = pending.pop()
            inner = parent[key]
            if isinstance(inner, str):
                parent[key] = self.redact_text(inner, lead)
            elif isinstance(inner, list):
                parent[key] = inner = list(inner)
                pending += [(inner, number, lead) for number in range(len(inner))]
            elif isinstance(inner, dict):
                parent[key] = inner = dict(inner)
                # Without `use_keys` the value is a message, whose role is not redacted.
                pending += [
                    (inner, name, f"{name}: " if use_keys else "") for name in inner if use_keys or name != "role"
                ]
        return holder[0]

    def redact_json(self, text: str) -> str:
        """Return JSON with its texts redacted; the text is unchanged if nothing is found."""
        before = self.counts.total()
        value = self.redact_value(json.loads(text), use_keys=True)
        return text if self.counts.total() == before else json.dumps(value, ensure_ascii=False, sort_keys=True)
