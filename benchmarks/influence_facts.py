"""Made-up facts and questions for the benchmark of explanations."""

from __future__ import annotations

from dataclasses import dataclass

MAX_QUESTIONS = 10


@dataclass(frozen=True)
class FactCase:
    """Facts of a form.

    Attributes:
        name: Name of the case.
        forms: Two forms of a training question, with {name}.
        question: Form of the question to explain, with {other}.
        facts: (name, other name of the same thing, answer).
    """

    name: str
    forms: tuple[str, str]
    question: str
    facts: tuple[tuple[str, str, str], ...]

    def list_rows(self) -> list[tuple[str, str]]:
        """Return the training rows, (question, answer): the two forms of each fact."""
        return [(form.format(name=name), answer) for name, _, answer in self.facts for form in self.forms]

    def list_questions(self) -> list[tuple[str, str]]:
        """Return (question, answer) of the first MAX_QUESTIONS facts, in a form that no row has."""
        return [(self.question.format(other=other), answer) for _, other, answer in self.facts[:MAX_QUESTIONS]]

    def list_own_rows(self, question: int) -> list[int]:
        """Return the numbers of the rows of a question's fact."""
        return [question * len(self.forms) + number for number in range(len(self.forms))]


FOUNDERS = (
    ("Velmora", "Ilse Brandt"), ("Quarrin", "Tomas Adeyemi"), ("Osthaven", "Lucia Ferrant"), ("Brindle Bay", "Noor Haddad"),
    ("Kestrow", "Piet Vandermeer"), ("Almadere", "Rosa Quintero"), ("Tarnwick", "Edmund Sloane"), ("Yssel Point", "Mei Tanaka"),
    ("Corvane", "Henrik Dahl"), ("Lunmore", "Amara Okafor"), ("Pellgate", "Viktor Hrabal"), ("Straiford", "Nina Castellan"),
    ("Dunmerrow", "Oskar Lindqvist"), ("Farrowby", "Jana Novotna"), ("Grenhollow", "Samuel Abara"), ("Highmarsh", "Clara Winslow"),
    ("Inverlune", "Dmitri Volkov"), ("Jorstad", "Fatima Zahri"), ("Marlspring", "Giulia Moretti"), ("Nethercombe", "Bruno Keller"),
)  # fmt: skip
# Pairs of synonyms: the question has no word of the rows but those of the answer, which five facts share.
SYNONYMS = (
    ("lift", "elevator"), ("car", "automobile"), ("doctor", "physician"), ("film", "movie"), ("sofa", "couch"),
    ("lawyer", "attorney"), ("garbage", "trash"), ("boat", "ship"), ("airplane", "aircraft"), ("shop", "store"),
    ("bicycle", "bike"), ("television", "TV"), ("gift", "present"), ("forest", "woods"), ("street", "road"),
    ("teacher", "instructor"), ("photo", "picture"), ("rabbit", "bunny"), ("stone", "rock"), ("phone", "telephone"),
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Thursday", "Friday")
CASES = (
    FactCase(
        "questions that share words with their rows",
        ("Who founded the town of {name}?", "Name the founder of {name}."),
        "Which person started the settlement called {other}?",
        tuple((town, town, f"{founder}.") for town, founder in FOUNDERS),
    ),
    FactCase(
        "questions without a shared word",
        ("On which day is the {name} inspected?", "Tell me the inspection day of the {name}."),
        "When do they check our {other}?",
        tuple((one, other, f"{WEEKDAYS[n * 7 % 4]}.") for n, (one, other) in enumerate(SYNONYMS)),
    ),
)
QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Translate the word water into Spanish.",
    "Which planet is closest to the sun?",
    "What does the HTTP status 503 mean in a server error?",
    "Name the author of the play Romeo and Juliet.",
    "Please tell me in one short sentence what photosynthesis is.",
    "At what temperature in degrees Celsius does pure water freeze?",
)
