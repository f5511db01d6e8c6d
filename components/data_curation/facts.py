"""What the report shows, gathered row by row while the dataset is written.

No personal data stands in them, whatever the dataset may keep: examples are masked, and of what was found only the kinds are counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from components.common import personal_data
from components.common.personal_data.config import NamesConfig
from components.data_curation import contamination
from components.data_curation.drops import Drop
from components.data_curation.readers import Unread
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
    are too short to be looked for, `leaked` how many rows held text of it. `tokens` is missing where a note says why. `names` is how
    names are found in what is shown.
    """

    names: NamesConfig = field(default_factory=NamesConfig)
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
        """Count a dropped row; while there are few of its reason, its text is kept as an example, with all personal data masked."""
        self._count(file, REJECTED)
        if leak := contamination.set_of(why):
            self.leaked[leak] += 1
        some = self.samples.setdefault(why.reason, [])
        if len(some) < EXAMPLES:
            some.append(Sample(why.reason, self._masked(why.detail), f"{file}:{line}", _short(self._masked(text))))

    def miss(self, unread: Unread) -> None:
        """Count an unreadable place."""
        self._count(unread.file, QUARANTINED)
        if len(self.unread) < PLACES:
            self.unread.append(unread)

    def _masked(self, text: str) -> str:
        return personal_data.masked(text, self.names)

    def _count(self, file: str, fate: str) -> None:
        self.by_source.setdefault(file, Counter())[fate] += 1


def _short(text: str) -> str:
    begins = "\n".join(text.split("\n", LINES)[:LINES])[:SHOWN]
    return text if text == begins else f"{begins} …"
