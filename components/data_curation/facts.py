"""What the report shows, gathered row by row. Facts of two parts of the rows can be merged, and go through JSON.

No personal data stands in them: texts arrive with it redacted, and of what was found only the kinds are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from components.data_curation import contamination
from components.data_curation.drops import Drop
from components.data_curation.readers import Unread
from components.data_curation.rows import Row
from components.data_curation.tokens import TokenStatistics

EXAMPLES = 3  # of each reason
SHOWN, LINES = 300, 12  # characters and lines of an example
PLACES = 20  # unreadable places
LENGTHS = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)  # characters: the upper ends of the classes
LONGER = 0  # the class of what is longer than all of them
KEPT, REJECTED, QUARANTINED = "kept", "rejected", "quarantined"


@dataclass(frozen=True)
class Sample:
    """A dropped row as a person sees it: why, where it stood, and how its text begins."""

    reason: str
    detail: str
    where: str
    text: str


@dataclass
class Personal:
    """Personal data of one kind: how often it was found, in how many rows, and what was done (redact, drop or keep)."""

    found: int = 0
    rows: int = 0
    action: str = ""


@dataclass
class Facts:
    """Counts and examples of a curation.

    `lengths` and `languages` count kept rows, the former by class (see LENGTHS); `by_source` what became of each file's rows. `samples` are
    the first of each reason, `unread` the first unreadable places. `sets` says of each evaluation set how many items it has and how many
    are too short to be looked for, `leaked` how many rows held text of it. `tokens` is missing where a note says why.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    by_source: dict[str, Counter[str]] = field(default_factory=dict)
    personal: dict[str, Personal] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    sets: dict[str, dict[str, int]] = field(default_factory=dict)
    leaked: Counter[str] = field(default_factory=Counter)
    tokens: TokenStatistics | None = None
    notes: list[str] = field(default_factory=list)

    def keep(self, file: str, characters: int, language: str = "") -> None:
        """Count a row of a file that is kept; `language` where it was identified."""
        self._count(file, KEPT)
        self.lengths[next((top for top in LENGTHS if characters <= top), LONGER)] += 1
        if language:
            self.languages[language] += 1

    def reject(self, why: Drop, file: str, line: int, text: str) -> None:
        """Count a dropped row; its text, with personal data redacted, is kept as an example while there are few of its reason."""
        self._count(file, REJECTED)
        if leak := contamination.set_of(why):
            self.leaked[leak] += 1
        some = self.samples.setdefault(why.reason, [])
        if len(some) < EXAMPLES:
            some.append(Sample(why.reason, why.detail, f"{file}:{line}", _short(text)))

    def miss(self, unread: Unread) -> None:
        """Count an unreadable place."""
        self._count(unread.file, QUARANTINED)
        if len(self.unread) < PLACES:
            self.unread.append(unread)

    def scrub(self, found: Mapping[str, int], actions: Mapping[str, str]) -> None:
        """Count a row's personal data by kind, with what was done about each kind."""
        for kind, count in found.items():
            one = self.personal.setdefault(kind, Personal())
            one.found, one.rows, one.action = one.found + count, one.rows + 1, actions.get(kind, one.action)

    def as_json(self) -> dict[str, Any]:
        """The facts as values of JSON."""
        return {
            "lengths": {str(top): count for top, count in self.lengths.items()},
            "languages": dict(self.languages),
            "by_source": {name: dict(counts) for name, counts in self.by_source.items()},
            "personal": {kind: asdict(one) for kind, one in self.personal.items()},
            "samples": {reason: [asdict(one) for one in some] for reason, some in self.samples.items()},
            "unread": [asdict(one) for one in self.unread],
            "sets": {name: dict(counts) for name, counts in self.sets.items()},
            "leaked": dict(self.leaked),
            "tokens": asdict(self.tokens) if self.tokens else None,
            "notes": list(self.notes),
        }

    def _count(self, file: str, fate: str) -> None:
        self.by_source.setdefault(file, Counter())[fate] += 1


def of(kept: Iterable[Row], dropped: Iterable[tuple[Row, Drop]], unread: Iterable[Unread]) -> Facts:
    """The facts of rows that are all at hand."""
    facts = Facts()
    for row in kept:
        facts.keep(row.file, len(row.text()))
    for row, why in dropped:
        facts.reject(why, row.file, row.line, row.text())
    for place in unread:
        facts.miss(place)
    return facts


def merge(a: Facts, b: Facts) -> Facts:
    """The facts of rows in two parts, `a` before `b`. Of tokens, sets and actions, which are not counted by row, the later ones stand."""
    return Facts(
        lengths=a.lengths + b.lengths,
        languages=a.languages + b.languages,
        by_source={name: a.by_source.get(name, Counter()) + b.by_source.get(name, Counter()) for name in {**a.by_source, **b.by_source}},
        personal={kind: _both(a.personal.get(kind), b.personal.get(kind)) for kind in {**a.personal, **b.personal}},
        samples={why: (a.samples.get(why, []) + b.samples.get(why, []))[:EXAMPLES] for why in {**a.samples, **b.samples}},
        unread=(a.unread + b.unread)[:PLACES],
        sets={**a.sets, **b.sets},
        leaked=a.leaked + b.leaked,
        tokens=b.tokens or a.tokens,
        notes=_distinct([*a.notes, *b.notes]),
    )


def _both(a: Personal | None, b: Personal | None) -> Personal:
    a, b = a or Personal(), b or Personal()
    return Personal(a.found + b.found, a.rows + b.rows, b.action or a.action)


def _short(text: str) -> str:
    begins = "\n".join(text.split("\n", LINES)[:LINES])[:SHOWN]
    return text if text == begins else f"{begins} …"


def _distinct(notes: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(notes))


def from_json(values: Mapping[str, Any]) -> Facts:
    """The facts that `as_json` gave, also after JSON made texts of all keys."""
    tokens = values["tokens"]
    return Facts(
        lengths=Counter({int(top): count for top, count in values["lengths"].items()}),
        languages=Counter(values["languages"]),
        by_source={name: Counter(counts) for name, counts in values["by_source"].items()},
        personal={kind: Personal(**one) for kind, one in values["personal"].items()},
        samples={reason: [Sample(**one) for one in some] for reason, some in values["samples"].items()},
        unread=[Unread(**one) for one in values["unread"]],
        sets={name: dict(counts) for name, counts in values["sets"].items()},
        leaked=Counter(values["leaked"]),
        tokens=TokenStatistics(**{**tokens, **{name: _numbered(tokens[name]) for name in ("percentiles", "histogram")}})
        if tokens
        else None,
        notes=list(values["notes"]),
    )


def _numbered(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(number): count for number, count in counts.items()}
