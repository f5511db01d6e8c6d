"""Questions of simulated users about Python's standard library, and the answers that its editors would write."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.data_curation import python_docs

TEXT_AND_DATA = (
    "calendar", "codecs", "collections", "configparser", "csv", "datetime", "difflib", "fractions", "itertools", "json",
    "logging", "math", "pathlib", "shutil", "statistics", "string", "tarfile", "textwrap", "unittest", "xml", "zipfile",
)  # fmt: skip
NETWORK_AND_CONCURRENCY = (
    "asyncio", "concurrent", "ftplib", "http", "imaplib", "multiprocessing", "poplib", "queue", "smtplib", "socket",
    "socketserver", "ssl", "threading", "urllib", "wsgiref", "xmlrpc",
)  # fmt: skip
PHRASINGS = (
    "What does `{name}` of the Python module `{module}` do?",
    "Explain `{name}` in Python's module `{module}`.",
    "When do I need `{name}` of `{module}` in Python?",
)
MIN_CHARACTERS, MAX_CHARACTERS = 30, 160  # of an answer: short ones train and generate in seconds


@dataclass(frozen=True)
class Question:
    """A question, with the sentence of the documentation that answers it."""

    module: str
    name: str
    text: str
    documentation: str

    @property
    def correction(self) -> str:
        """The answer in the style of the editors: it names the object and its module first."""
        return f"`{self.name}` belongs to the Python module `{self.module}`. {self.documentation}"


def read_questions(folder: Path, packages: tuple[str, ...]) -> list[Question]:
    """Return the questions about these packages of this machine's Python, in an order that is always the same."""
    path = folder / "python_docs.jsonl"
    if not path.exists():
        python_docs.build(path)
    questions = {(each.module, each.name): each for each in _parse(path) if each.module.split(".")[0] in packages}
    return random.Random(0).sample(list(questions.values()), len(questions))  # noqa: S311


def _parse(path: Path) -> Iterator[Question]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        location, _, name = row["source"].partition("/")[2].partition(":")
        documentation = " ".join(row["messages"][1]["content"].split("\n\n")[0].split())
        if name and MIN_CHARACTERS <= len(documentation) <= MAX_CHARACTERS:
            module = location.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            text = PHRASINGS[number % len(PHRASINGS)].format(name=name, module=module)
            yield Question(module, name, text, documentation)
