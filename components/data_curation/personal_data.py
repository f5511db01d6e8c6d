"""Personal data and secrets: found, counted by kind, and redacted to a typed placeholder, dropped with their row, or kept.

Nothing here prints, logs or returns a value that was found: a finding is its kind and its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from components.data_curation import personal_data_names as names
from components.data_curation.cleaning import Drop
from components.data_curation.config import Action, NamesConfig, PersonalDataConfig
from components.data_curation.personal_data_kinds import DIGITS, KINDS
from components.data_curation.rows import Row

PLACEHOLDERS = {**{kind: detector.placeholder for kind, detector in KINDS.items()}, **names.PLACEHOLDERS}
ORDER = {kind: place for place, kind in enumerate(PLACEHOLDERS)}
NONE: Counter[str] = Counter()
UNTOUCHED = ("role",)  # a message's keys that hold no text


@dataclass(frozen=True)
class Finding:
    """Where personal data stands in a text: `start` inclusive, `end` exclusive, in characters."""

    kind: str
    start: int
    end: int


def find(text: str, names_config: NamesConfig | None = None) -> list[Finding]:
    """What personal data and secrets stand in the text, in their order; of findings that overlap the one whose kind is first in KINDS.

    Names and locations are looked for where `names_config` names a model. Raises ConfigurationError when that cannot be used.
    """
    found: list[Finding] = []
    digits = DIGITS.search(text) is not None
    for kind, detector in KINDS.items():
        if (digits or not detector.digits) and detector.may(text):
            found += [Finding(kind, start, end) for start, end in detector.spans(text)]
    if names_config and names_config.model:
        found += [Finding(kind, start, end) for kind, start, end in names.find(text, names_config)]
    return _apart(found) if len(found) > 1 else found


def _apart(found: Iterable[Finding]) -> list[Finding]:
    """Findings in their order, none overlapping another."""
    kept: list[Finding] = []
    for one in sorted(found, key=lambda one: (one.start, ORDER[one.kind], -one.end)):
        while kept and one.start < kept[-1].end and ORDER[one.kind] < ORDER[kept[-1].kind]:
            kept.pop()
        if not kept or one.start >= kept[-1].end:
            kept.append(one)
    return kept


def redact(text: str, kinds: Collection[str], names_config: NamesConfig | None = None, lead: str = "") -> tuple[str, Counter[str]]:
    """The text with placeholders for what was found of `kinds`, and the count of findings by kind, of other kinds too.

    It is searched again until nothing is left to redact: a placeholder may bring a number nearer to the word that says what it is, and so
    redacting a redacted text changes nothing. `lead` is what the text stands behind, such as the name of its field.
    """
    found = _behind(lead, text, names_config)
    counts = Counter(one.kind for one in found) if found else NONE
    while mine := [one for one in found if one.kind in kinds]:
        text = _replaced(text, mine)
        found = _behind(lead, text, names_config)
        counts.update(one.kind for one in found if one.kind in kinds)
    return text, counts


def _behind(lead: str, text: str, names_config: NamesConfig | None) -> list[Finding]:
    """What is found in the text when it stands behind `lead`."""
    if not lead:
        return find(text, names_config)
    by = len(lead)
    return [Finding(one.kind, one.start - by, one.end - by) for one in find(lead + text, names_config) if one.start >= by]


def _replaced(text: str, found: Iterable[Finding]) -> str:
    parts, done = [], 0
    for one in found:
        parts += [text[done : one.start], PLACEHOLDERS[one.kind]]
        done = one.end
    return "".join([*parts, text[done:]])


def masked(text: str, names_config: NamesConfig | None = None) -> str:
    """What is told to people of a text: with placeholders for all that was found in it, also of kinds that rows may keep."""
    return redact(text, PLACEHOLDERS, names_config)[0]


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
