"""Personal data and secrets: found in texts, counted by kind, and redacted to a typed placeholder.

Nothing here prints, logs or returns a value that was found: a finding is its kind and its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from components.common.personal_data import names
from components.common.personal_data.config import NamesConfig
from components.common.personal_data.kinds import DIGITS, KINDS

PLACEHOLDERS = {**{kind: detector.placeholder for kind, detector in KINDS.items()}, **names.PLACEHOLDERS}
ORDER = {kind: place for place, kind in enumerate(PLACEHOLDERS)}
NONE: Counter[str] = Counter()


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
