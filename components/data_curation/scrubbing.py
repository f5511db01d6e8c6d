"""Personal data and secrets in a row: counted by kind, and redacted to a typed placeholder, dropped with the row, or kept."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from components.common.personal_data import PLACEHOLDERS, redact
from components.common.personal_data.config import Action, NamesConfig
from components.common.personal_data.kinds import KINDS
from components.data_curation.config import PersonalDataConfig
from components.data_curation.drops import Drop
from components.data_curation.rows import Row

UNTOUCHED = ("role",)  # a message's keys that hold no text


def scrub(row: Row, config: PersonalDataConfig) -> tuple[dict[str, int], Drop | None]:
    """Redact in place what stands in the row's texts, its source and its meta, as each kind's action says; its id stays.

    Returns the count of findings by kind, whatever their action, and the reason to drop the row where a kind's action is `drop`: it
    names the kinds alone. A row that is dropped is redacted too, so that no rejected row carries the value. Raises ConfigurationError
    when the model for names cannot be used.
    """
    done = actions(config)
    scrubber = _Scrubber([kind for kind, action in done.items() if action != "keep"], config.names, Counter())
    for name, value in row.content.items():
        row.content[name] = scrubber.json(value) if name == "tools" and isinstance(value, str) else scrubber.value(value)
    if row.source != row.file:  # the name of a file is its owner's, and the manifest's inputs have it too
        row.source = scrubber.text(row.source)
    if row.meta:
        row.meta = scrubber.value(row.meta, led=True)
    counts = {kind: scrubber.counts[kind] for kind in PLACEHOLDERS if scrubber.counts[kind]} if scrubber.counts else {}
    dropped = [kind for kind in counts if done[kind] == "drop"]
    return counts, Drop("personal_data", ", ".join(dropped)) if dropped else None


def actions(config: PersonalDataConfig) -> dict[str, Action]:
    found: dict[str, Action] = {kind: getattr(config, kind) for kind in KINDS}
    return {**found, "person": config.names.person, "location": config.names.location}


@dataclass(frozen=True)
class _Scrubber:
    """The kinds to redact, and the count of what was found so far."""

    kinds: list[str]
    names: NamesConfig
    counts: Counter[str]

    def text(self, text: str, lead: str = "") -> str:
        text, counts = redact(text, self.kinds, self.names, lead)
        if counts:
            self.counts.update(counts)
        return text

    def value(self, value: Any, led: bool = False) -> Any:
        """A copy of a value with all its texts redacted; `led`: a text's key tells what it is, as in {"phone": "5550100"}.

        By a list of what is to be done, not by recursion: a source's values may be nested as deeply as they can be read.
        """
        holder = [value]
        todo: list[tuple[Any, Any, str]] = [(holder, 0, "")]
        while todo:
            place, key, lead = todo.pop()
            inner = place[key]
            if isinstance(inner, str):
                place[key] = self.text(inner, lead)
            elif isinstance(inner, list):
                place[key] = inner = list(inner)
                todo += [(inner, number, lead) for number in range(len(inner))]
            elif isinstance(inner, dict):
                place[key] = inner = dict(inner)
                todo += [(inner, name, f"{name}: " if led else "") for name in inner if led or name not in UNTOUCHED]
        return holder[0]

    def json(self, text: str) -> str:
        """JSON with the texts in it redacted, as JSON; unchanged where nothing is found."""
        before = self.counts.total()
        after = self.value(json.loads(text), led=True)
        return text if self.counts.total() == before else json.dumps(after, ensure_ascii=False, sort_keys=True)
