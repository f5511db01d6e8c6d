"""Recall, precision and cost of the personal data detectors.

    python -m benchmarks.personal_data annotated generated_small.json    texts with spans, in Presidio's format
    python -m benchmarks.personal_data generated --texts 20000            sentences filled by Faker (pip install faker)
    python -m benchmarks.personal_data phones generated_small.json       phone numbers: tuneline, presidio and phonenumbers
    python -m benchmarks.personal_data counted texts.jsonl                findings by kind in any texts, and the cost per text

`--model` is the folder of a spaCy model that finds names (pip install presidio-analyzer spacy). A structured finding is correct if it equals
the annotated span, and a name if it overlaps a name. No value is ever printed. `phones` also compares the engines on sentences filled by
Faker; it requires presidio-analyzer, which installs phonenumbers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.personal_data import find
from components.common.personal_data.names_config import NamesConfig

# What Presidio's data sets call our kinds.
ENTITIES = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "CREDIT_CARD": "credit_card",
    "IBAN_CODE": "iban",
    "US_SSN": "us_ssn",
    "IP_ADDRESS": "ip_address",
    "PERSON": "person",
    "LOCATION": "location",
    "ADDRESS": "location",
}
BY_OVERLAP = ("person", "location")
LOCALES = (
    *("en_US", "en_GB", "en_AU", "en_IN", "en_CA", "de_DE", "de_AT", "fr_FR", "es_ES", "it_IT", "nl_NL", "pt_BR"),
    *("sv_SE", "pl_PL", "ja_JP", "zh_CN", "ru_RU"),
)
# Sentences that say what stands in them, and ones that do not.
SAID = {
    "phone": (
        "Please call {} before noon.",
        "Phone: {}",
        "My mobile number is {}, ask for me.",
        "You can reach us at {}.",
    ),
    "credit_card": ("My card {} expires soon.", "Credit card: {}"),
    "us_ssn": ("His social security number is {}.", "SSN: {}"),
    "ip_address": ("Requests from the address {} are blocked.", "client_ip={}"),
    "email": ("Send it to {}, please.", "E-mail: {}"),
    "iban": ("Transfer it to IBAN {} today.", "IBAN: {}"),
}
UNSAID = ("It was {} then.", "{}", "We have {}; no more.", "name,{},city")
# What Faker makes that is none of our kinds, but has digits like them.
OTHERS = (
    "date",
    "iso8601",
    "isbn10",
    "isbn13",
    "ean13",
    "pricetag",
    "uuid4",
    "md5",
    "mac_address",
    "ipv4_private",
    "coordinate",
    "postcode",
)

# Regions of the national formats that `phonenumbers` searches for: those of LOCALES.
PHONE_REGIONS = ("US", "GB", "AU", "IN", "DE", "AT", "FR", "ES", "IT", "NL", "BR", "SE", "PL", "JP", "CN", "RU")

Span = tuple[str, int, int]
Finder = Callable[[str], list[Span]]


@dataclass
class Score:
    """Annotated and found spans by kind, and the number of correct ones."""

    annotated: Counter[str] = field(default_factory=Counter)
    recalled: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    texts: int = 0
    seconds: float = 0.0

    def add(self, text: str, wanted: list[Span], finder: Finder) -> None:
        """Count one text."""
        started = time.process_time()
        found = finder(text)
        self.seconds += time.process_time() - started
        self.texts += 1
        self.annotated.update(kind for kind, _, _ in wanted)
        self.found.update(kind for kind, _, _ in found)
        self.recalled.update(one[0] for one in wanted if any(_same(one, other) for other in found))
        self.right.update(one[0] for one in found if any(_same(one, other) for other in wanted))

    def table(self) -> str:
        """Return a Markdown table with a row per kind."""
        lines = ["| kind | annotated | found | right | recall | precision |", "|---|---|---|---|---|---|"]
        for kind in sorted(self.annotated | self.found):
            recall, precision = (
                _share(self.recalled[kind], self.annotated[kind]),
                _share(self.right[kind], self.found[kind] if self.annotated else 0),
            )
            lines.append(
                f"| {kind} | {self.annotated[kind]:,} | {self.found[kind]:,} | {self.right[kind]:,} | {recall} | {precision} |"
            )
        cost = self.seconds / max(self.texts, 1) * 1e6
        return "\n".join([*lines, "", f"{self.texts:,} texts, {cost:.0f} µs of CPU per text"])


def _same(a: Span, b: Span) -> bool:
    if a[0] in BY_OVERLAP:
        return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
    return a == b


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "–"


def make_finder(names: NamesConfig) -> Finder:
    """Return a finder of all kinds."""
    return lambda text: [(one.kind, one.start, one.end) for one in find(text, names)]


def read_annotated(path: Path) -> Iterator[tuple[str, list[Span]]]:
    """Yield texts with spans from a JSON list of {"full_text", "spans": [{"entity_type", "start_position", "end_position"}]}."""
    for row in json.loads(path.read_text(encoding="utf-8")):
        spans = ((ENTITIES.get(s["entity_type"], ""), s["start_position"], s["end_position"]) for s in row["spans"])
        yield row["full_text"], [span for span in spans if span[0]]


def annotated(path: Path, names: NamesConfig) -> Score:
    """Return the score on annotated texts."""
    score = Score()
    for text, spans in read_annotated(path):
        score.add(text, [s for s in spans if names.model or s[0] not in BY_OVERLAP], make_finder(names))
    return score


def make_phone_finders() -> dict[str, Finder]:
    """Return a finder of phone numbers per engine."""
    import phonenumbers  # type: ignore[import-not-found,unused-ignore]
    from presidio_analyzer.predefined_recognizers import PhoneRecognizer  # type: ignore[import-not-found,unused-ignore]

    recognizer, find_all = PhoneRecognizer(), make_finder(NamesConfig())

    def find_by_phonenumbers(text: str) -> list[Span]:
        matches = (match for region in PHONE_REGIONS for match in phonenumbers.PhoneNumberMatcher(text, region))
        return sorted({("phone", match.start, match.end) for match in matches})

    return {
        "tuneline": lambda text: [span for span in find_all(text) if span[0] == "phone"],
        "presidio": lambda text: [("phone", one.start, one.end) for one in recognizer.analyze(text, ["PHONE_NUMBER"])],
        "phonenumbers": find_by_phonenumbers,
    }


def generate_phones(sentences: Iterable[str], texts: int, seed: int) -> Iterator[tuple[str, list[Span]]]:
    """Yield sentences with a phone number of Faker, each with its span."""
    chance = random.Random(seed)  # noqa: S311
    makers, _ = _makers(seed)
    for number in range(texts):
        value = makers["phone"][number % len(LOCALES)]()
        before, after = chance.choice(list(sentences)).split("{}")
        yield before + value + after, [("phone", len(before), len(before) + len(value))]


def compare_phone_engines(paths: list[Path], texts: int, seed: int) -> str:
    """Return a Markdown table of the engines' recall, precision and cost on annotated and generated texts."""
    corpora = {path.name: list(read_annotated(path)) for path in paths}
    corpora["generated, named"] = list(generate_phones(SAID["phone"], texts, seed))
    corpora["generated, not named"] = list(generate_phones(UNSAID, texts, seed))
    lines = [
        "| texts | engine | annotated | found | right | recall | precision | µs per text |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for corpus, rows in corpora.items():
        for engine, finder in make_phone_finders().items():
            score = Score()
            for text, spans in rows:
                score.add(text, [span for span in spans if span[0] == "phone"], finder)
            wanted, found, right = score.annotated["phone"], score.found["phone"], score.right["phone"]
            shares = f"{_share(score.recalled['phone'], wanted)} | {_share(right, found)}"
            cost = score.seconds / len(rows) * 1e6
            lines.append(f"| {corpus} | {engine} | {wanted:,} | {found:,} | {right:,} | {shares} | {cost:.0f} |")
    return "\n".join(lines)


def generated(texts: int, seed: int) -> tuple[Score, Score, Score]:
    """Return the scores on sentences that name the kind of their value, on sentences that do not, and on other text with digits."""
    chance = random.Random(seed)  # noqa: S311
    makers, others = _makers(seed)
    said, unsaid, wrong = Score(), Score(), Score()
    finder = make_finder(NamesConfig())
    for number in range(texts):
        kind = list(makers)[number % len(makers)]
        value = chance.choice(makers[kind])()
        for score, sentences in ((said, SAID[kind]), (unsaid, UNSAID)):
            before, after = chance.choice(sentences).split("{}")
            score.add(before + value + after, [(kind, len(before), len(before) + len(value))], finder)
        wrong.add(chance.choice(UNSAID).format(chance.choice(others)()), [], finder)
    return said, unsaid, wrong


def _makers(seed: int) -> tuple[dict[str, list[Callable[[], str]]], list[Callable[[], str]]]:
    """Return makers of values by kind, and of other values. Faker's IBANs of en_IN and zh_CN are omitted: they have the country GB and lack a character."""
    from faker import Faker  # type: ignore[import-not-found,unused-ignore]

    Faker.seed(seed)
    fakes = [Faker(locale) for locale in LOCALES]
    usual = fakes[0]
    makers: dict[str, list[Callable[[], str]]] = {
        "phone": [fake.phone_number for fake in fakes],
        "email": [fake.email for fake in fakes],
        "iban": [fake.iban for fake in fakes if fake.locales not in (["en_IN"], ["zh_CN"])],
        "credit_card": [usual.credit_card_number],
        "us_ssn": [usual.ssn],
        "ip_address": [usual.ipv4_public],
    }
    return makers, [
        lambda fake=fake, name=name: str(getattr(fake, name)()) for fake in (usual, fakes[1]) for name in OTHERS
    ]  # type: ignore[misc]


def texts_of(path: Path) -> Iterator[str]:
    """Yield every string in a JSON Lines file, or every line of any other file; both may be gzipped."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in raw.decode("utf-8", "replace").splitlines():
        yield from _strings(json.loads(line)) if ".jsonl" in path.name and line else [line]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def counted(texts: Iterable[str], names: NamesConfig) -> Score:
    """Count the findings by kind in texts without annotations."""
    score = Score()
    for text in texts:
        score.add(text, [], make_finder(names))
    return score


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("annotated", "generated", "phones", "counted"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--texts", type=int, default=20_000, help="Number of texts to generate.")
    parser.add_argument("--cut", type=int, help="Number of characters after which to cut each text.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="", help="Folder of a spaCy model.")
    given = parser.parse_intermixed_args()
    names = NamesConfig(model=given.model)
    if given.what == "phones":
        print(compare_phone_engines(given.files, given.texts, given.seed))
        return
    if given.what == "generated":
        titles = ("named by their sentence", "not named", "other text with digits; every finding is wrong")
        for title, score in zip(titles, generated(given.texts, given.seed), strict=True):
            print(f"{title}\n\n{score.table()}\n")
        return
    for path in given.files:
        score = (
            annotated(path, names)
            if given.what == "annotated"
            else counted((t[: given.cut] for t in texts_of(path)), names)
        )
        print(f"{path.name}\n\n{score.table()}\n")


if __name__ == "__main__":
    main()
