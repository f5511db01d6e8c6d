"""Redaction of the texts in a JSON value, with counts by kind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from components.common.personal_data import redact
from components.common.personal_data.names_config import NamesConfig

MIN_SECRET_CHARACTERS = 16


@dataclass(frozen=True)
class Redactor:
    """Redacts texts and counts the findings.

    Attributes:
        kinds: kinds of findings to redact, keys of PLACEHOLDERS.
        names: the search for names.
        counts: number of findings so far by kind.
        is_thorough: redact the names of fields, numbers, and the values of fields named role, too.
    """

    kinds: Collection[str]
    names: NamesConfig
    counts: Counter[str]
    is_thorough: bool = False

    def redact_text(self, text: str, lead: str = "") -> str:
        """Return the text with placeholders; `lead` is context before it, such as its field name."""
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
            elif self.is_thorough and isinstance(inner, int | float) and not isinstance(inner, bool):
                text = self.redact_text(str(inner), lead)
                parent[key] = inner if text == str(inner) else text
            elif isinstance(inner, list):
                parent[key] = inner = list(inner)
                pending += [(inner, number, lead) for number in range(len(inner))]
            elif isinstance(inner, dict):
                parent[key] = inner = {self._redact_name(name): each for name, each in inner.items()}
                # Without `use_keys` the value is a message, whose role is not redacted.
                pending += [
                    (inner, name, f"{name}: " if use_keys else "")
                    for name in inner
                    if use_keys or self.is_thorough or name != "role"
                ]
        return holder[0]

    def _redact_name(self, name: str) -> str:
        # No secret is a short identifier.
        is_clean = not self.is_thorough or (len(name) < MIN_SECRET_CHARACTERS and name.isidentifier())
        return name if is_clean else self.redact_text(name)

    def redact_json(self, text: str) -> str:
        """Return JSON with its texts redacted; the text is unchanged if nothing is found."""
        before = self.counts.total()
        value = self.redact_value(json.loads(text), use_keys=True)
        # A repeated key hides an earlier value from the search, and an escape hides it from a search of the text.
        is_clean = self.counts.total() == before and not (self.is_thorough and "\\u" in text)
        return text if is_clean else json.dumps(value, ensure_ascii=False, sort_keys=True)
