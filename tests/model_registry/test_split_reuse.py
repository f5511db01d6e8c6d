"""Candidates of one test split are counted, and each has to pass with the confidence that is left."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.artifacts.artifact_folder import Artifact
from components.common.runtime.errors import RegistryError
from components.common.runtime.reporters import SilentReporter
from components.model_registry import registry_history, split_reuse
from components.model_registry.config import ModelRegistryConfig
from components.model_registry.history_audit import audit
from components.model_registry.registry_history import Entry
from components.model_registry.stage import Registration, auto_promote, promote, register
from tests.model_registry.conftest import (
    NAME,
    Customization,
    CustomizationArtifacts,
    kill_before_write,
    open_registry,
)

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


def test_rules_of_the_suite_spend_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its items are those of every evaluation: as splits, they would be worn out after four failed candidates."""
    rules = [
        {"metric": "held_out.loss", "acceptance_p": 0.001, "confidence": 0.95},
        {"metric": "suite_memorisation.leaked", "acceptance_p": 0.04, "confidence": 0.95},
    ]
    tasks = {"held_out": {"items_sha256": "5e7"}, "suite_memorisation": {"items_sha256": "5e8"}}
    content = {"rules": rules, "tasks": tasks, "verdict": "accepted"}
    monkeypatch.setattr(split_reuse.evidence, "read_content", lambda evaluation: content)
    measurement = split_reuse._read_measurement(Artifact.__new__(Artifact))
    assert measurement is not None
    assert measurement.splits == ["5e7"]
    assert measurement.error_share == pytest.approx(0.02)
    assert measurement.passes(failures=1)


def submit(artifacts: CustomizationArtifacts) -> tuple[Registration, dict[str, str], list[str]]:
    notes = NoteRecorder()
    registration = register(artifacts.model, artifacts.evaluation, artifacts.repository, CONFIG, reporter=notes)
    tags = {key.removeprefix("tuneline.split_"): value for key, value in registration.tags.items()}
    return registration, {"failures": tags["failures"], "result": tags["result"]}, notes.notes


@pytest.fixture
def submit_candidate(customize: Customization) -> Callable[..., tuple[Registration, dict[str, str], list[str]]]:
    """A function that registers a candidate with a p-value on a split, and returns the registration, tags and notes."""

    def build_and_submit(content: str, p: float, split: str = "5e7") -> tuple[Registration, dict[str, str], list[str]]:
        return submit(customize(content, "accepted" if p <= 0.05 else "refused", acceptance_p=p, split=split))

    return build_and_submit


Submit = Callable[..., tuple[Registration, dict[str, str], list[str]]]


@pytest.mark.mlflow
def test_candidate_after_failures_needs_more_confidence(registry: Any, submit_candidate: Submit) -> None:
    assert submit_candidate("a", 0.04)[1] == {"failures": "0", "result": "passed"}
    assert submit_candidate("b", 0.3)[1] == {"failures": "0", "result": "failed"}
    _, tags, notes = submit_candidate("c", 0.04)
    assert tags == {"failures": "1", "result": "failed"}
    assert "1 earlier candidate failed on its test split, so its rules must hold with 24.32% of" in notes[0]
    with pytest.raises(RegistryError, match="1 earlier candidate failed on its test split"):
        promote(NAME, "3", reporter=SilentReporter())
    recorder = NoteRecorder()
    assert auto_promote(CONFIG, "3", incumbent_sha256=None, reporter=recorder) is None
    assert "earlier candidates failed on its test split" in recorder.notes[0]
    assert submit_candidate("c", 0.04)[1] == tags, "a repeated registration counts nothing"
    assert submit_candidate("other split", 0.04, "0e7")[1] == {"failures": "0", "result": "passed"}
    assert submit_candidate("d", 0.0001)[1] == {"failures": "2", "result": "passed"}
    assert promote(NAME, "5", reporter=SilentReporter()).to == "5"
    submit_candidate("e", 0.9)
    _, _, notes = submit_candidate("f", 0.9)
    assert any(note.startswith("the test split was reused too often: 4 candidates failed on it.") for note in notes)
    trials = [entry for entry in registry_history.read(registry, NAME) if entry.kind == "trial"]
    assert [entry.to for entry in trials] == ["2", "3", "5", "6", "7"]
    assert trials[0].reason == "failed on test split 5e7"
    assert audit(NAME, reporter=SilentReporter()).clean


@pytest.mark.mlflow
@pytest.mark.parametrize("value", ["0", "abc", "-5"])
def test_edited_tags_and_deleted_versions_keep_the_count(registry: Any, submit_candidate: Submit, value: str) -> None:
    for content in ("a", "b"):
        submit_candidate(content, 0.3)
    version = submit_candidate("c", 0.04)[0].version
    for tag in (split_reuse.FAILURES_TAG, split_reuse.EVALUATION_TAG, split_reuse.RESULT_TAG):
        registry.set_model_version_tag(NAME, version, tag, value)
    for failed in ("1", "2"):
        registry.delete_model_version(NAME, failed)
    with pytest.raises(RegistryError, match="2 earlier candidates failed on its test split"):
        promote(NAME, version, reporter=SilentReporter())
    assert submit_candidate("d", 0.04)[1] == {"failures": "3", "result": "failed"}


@pytest.mark.mlflow
def test_candidate_that_is_evaluated_again_keeps_its_failure(
    registry: Any, customize: Customization, submit_candidate: Submit
) -> None:
    submit_candidate("a", 0.3)
    assert submit_candidate("a", 0.04)[1] == {"failures": "1", "result": "failed"}
    assert submit_candidate("b", 0.04)[1] == {"failures": "2", "result": "failed"}


@pytest.mark.mlflow
def test_later_failures_do_not_count(registry: Any, submit_candidate: Submit) -> None:
    submit_candidate("a", 0.04)
    submit_candidate("b", 0.3)
    assert submit_candidate("a", 0.04)[1] == {"failures": "0", "result": "passed"}
    assert promote(NAME, "1", reporter=SilentReporter()).to == "1"


@pytest.mark.mlflow
def test_killed_registration_counts_its_failure_once(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, customize: Customization
) -> None:
    artifacts = customize("a", "refused", acceptance_p=0.3, split="5e7")
    for write in range(6, 40, 3):
        folder = tmp_path / str(write)
        folder.mkdir()
        client = open_registry(empty_store, folder, monkeypatch)
        with kill_before_write(monkeypatch, write) as kills:
            submit(artifacts)
        assert submit(artifacts)[1] == {"failures": "0", "result": "failed"}
        trials = [e for e in registry_history.read(client, NAME) if (e.kind, e.state) == ("trial", "done")]
        assert len(trials) == 1
        if not kills:
            return
    raise AssertionError("every registration was killed")


def build_history(*trials: tuple[str, str, str]) -> list[Entry]:
    """Return sealed trials from version, evaluation and reason."""
    entries: list[Entry] = []
    for version, evaluation, reason in trials:
        entry = Entry(
            number=len(entries) + 1, kind="trial", to=version, evaluation=evaluation, reason=reason, state="done"
        )
        seal = registry_history.compute_seal(entry, entries[-1].seal if entries else "")
        entries.append(entry.model_copy(update={"seal": seal}))
    return entries


def test_failures_are_counted_by_evaluation_and_split() -> None:
    entries = build_history(
        ("1", "e1", "failed on test split s1 s2"),
        ("1", "e2", "failed on test split s1"),
        ("2", "e1", "failed on test split s1"),
        ("3", "e3", "passed on test split s1"),
        ("4", "e4", "failed on test split s3"),
    )
    assert split_reuse.count_failures(entries, "9", "e9", ["s1"]) == 2
    assert split_reuse.count_failures(entries, "9", "e9", ["s2", "s3"]) == 2
    assert split_reuse.count_failures(entries, "9", "e9", ["s4"]) == 0
    assert split_reuse.count_failures(entries, "1", "e1", ["s1"]) == 1, "its own other evaluation"
    assert split_reuse.count_failures(entries, "2", "e1", ["s1"]) == 1


def test_edited_entry_counts_as_a_failure() -> None:
    entries = build_history(("1", "e1", "failed on test split s1"), ("2", "e2", "failed on test split s1"))
    entries[1] = entries[1].model_copy(update={"reason": "passed on test split s2"})
    assert split_reuse.count_failures(entries, "9", "e9", ["s1"]) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": []},
        {"rules": 3},
        {"rules": ["metric"]},
        {"rules": [{"metric": "a.b", "acceptance_p": 0.01, "confidence": 1}]},
        {"rules": [{"metric": "a.b", "acceptance_p": 0.01}]},
        {"rules": [{"metric": "a.b", "acceptance_p": "x", "confidence": 0.95}]},
        {"rules": [{"metric": "a.b", "acceptance_p": -1, "confidence": 0.95}]},
    ],
)
def test_damaged_evaluation_is_an_objection(tmp_path: Path, changes: dict[str, Any]) -> None:
    rules = [{"metric": "a.b", "acceptance_p": 0.01, "confidence": 0.95}]
    content = {"tasks": {"a": {"items_sha256": "5e7"}}, "rules": rules, "verdict": "accepted", **changes}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    found = split_reuse.list_objections(
        SimpleNamespace(name=NAME, version="1"),  # type: ignore[arg-type]
        SimpleNamespace(path=tmp_path, sha256="e1"),  # type: ignore[arg-type]
    )
    assert len(found) == 1
    assert found[0].startswith("its evaluation cannot be read (")


def test_candidate_at_the_boundary_passes_without_earlier_failures() -> None:
    assert split_reuse.Measurement(["s1"], 1.0 + 1e-9, True).passes(0)
    assert not split_reuse.Measurement(["s1"], 1.0, True).passes(1)
    assert not split_reuse.Measurement(["s1"], 0.0, False).passes(0)
