"""Candidates of one test split are counted, and each has to pass with the confidence that is left."""

from __future__ import annotations

import math
from typing import Any

import pytest

from components.common.runtime.errors import RegistryError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import split_reuse
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.stage import auto_promote, promote, register
from tests.model_registry.conftest import NAME, Customization

CONFIG = ModelRegistryConfig(name=NAME)


class NoteRecorder(SilentReporter):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_error_probability_of_a_split_is_limited() -> None:
    factors = [split_reuse.compute_level_factor(failures) for failures in range(100_000)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert sum(factors) == pytest.approx(1.4, abs=1e-4)
    assert sum(factors) * 0.05 <= 0.07
    assert factors[1] == pytest.approx(0.4 * 6 / math.pi**2)
    assert [split_reuse.is_worn_out(failures) for failures in (0, 3, 4)] == [False, False, True]


@pytest.mark.mlflow
def test_candidate_after_failures_needs_more_confidence(registry: Any, customize: Customization) -> None:
    def submit(content: str, p: float, split: str = "5e7") -> tuple[dict[str, str], list[str]]:
        artifacts = customize(content, "accepted" if p <= 0.05 else "refused", acceptance_p=p, split=split)
        notes = NoteRecorder()
        registration = register(artifacts.model, artifacts.evaluation, artifacts.repository, CONFIG, reporter=notes)
        tags = {key.removeprefix("tuneline.split_"): value for key, value in registration.tags.items()}
        return {"failures": tags["failures"], "result": tags["result"]}, notes.notes

    assert submit("a", 0.04)[0] == {"failures": "0", "result": "passed"}
    assert submit("b", 0.3)[0] == {"failures": "0", "result": "failed"}
    tags, notes = submit("c", 0.04)
    assert tags == {"failures": "1", "result": "failed"}
    assert "1 earlier candidate failed on its test split, so its rules have to hold with 24.32% of" in notes[0]
    with pytest.raises(RegistryError, match="1 earlier candidate failed on its test split"):
        promote(NAME, "3", reporter=SilentReporter())
    recorder = NoteRecorder()
    assert auto_promote(CONFIG, "3", incumbent_sha256=None, reporter=recorder) is None
    assert "earlier candidates failed on its test split" in recorder.notes[0]
    assert submit("c", 0.04)[0] == tags, "a repeated registration counts nothing"
    assert submit("other split", 0.04, "0e7")[0] == {"failures": "0", "result": "passed"}
    assert submit("d", 0.0001)[0] == {"failures": "2", "result": "passed"}
    assert promote(NAME, "5", reporter=SilentReporter()).to == "5"
    submit("e", 0.9)
    _, notes = submit("f", 0.9)
    assert any(note.startswith("the test split is worn out: 4 candidates failed on it.") for note in notes)
