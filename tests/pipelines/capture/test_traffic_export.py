"""The export of captured traffic: held-back subjects, provenance, curation with other sources, and killed exports.

Fast tier, but for the curation with Daft: the exports run in this process or in a fork of it, and take milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import artifact_folder
from pipelines.capture import erasure, traffic_export
from pipelines.capture.settings import CaptureSettings
from pipelines.capture.traffic_export import ExportOptions, is_held_back
from pipelines.cli.captured_traffic import locked_traffic, read_latest_feedback
from tests.datasets import QUESTION_WORDS
from tests.pipelines.capture import traffic
from tests.pipelines.command import answer_in_process, refusal

FEEDBACK = ("--feedback", "feedback.jsonl")
SUBJECTS = 40


@pytest.fixture(autouse=True)
def skip_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (artifact_folder, os):
        monkeypatch.setattr(owner, "fsync", lambda _: None)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with five days of captured questions of 40 subjects, two each, all of them corrected."""
    settings = traffic.load(tmp_path)
    lines = []
    for number, (verb, noun) in enumerate(QUESTION_WORDS[: 2 * SUBJECTS]):
        start = traffic.DAY + timedelta(days=number % 5)
        subject = settings.hash_subject(f"user {number % SUBJECTS}")
        row = traffic.build_row(number, subject, int(start.timestamp()))
        row["request"]["messages"] = [{"role": "user", "content": f"How do I {verb} a {noun}?"}]
        row["tuneline"]["repository_sha256"] = "ab" * 32
        traffic.write_sealed(settings, start, [row])
        answer = f"To {verb} a {noun}, open desk {number} and ask the clerk for form {number}."
        lines.append(json.dumps({"id": f"chatcmpl-{number}", "model": "echo", "key": "a", "correction": answer}))
    (tmp_path / "feedback.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_no_subject_has_rows_on_both_sides_and_no_row_is_lost(home: Path) -> None:
    result = answer_in_process("traffic", "export", "-o", "rows", *FEEDBACK, "--held-back", 0.25, cwd=home)
    training, pairs, held_back = (
        read_rows(home / "rows", name) for name in ("conversations", "preferences", "held_back")
    )
    counts = [result[name] for name in ("conversations", "preferences", "held_back")]
    assert counts == [len(training), len(pairs), len(held_back)]
    assert len({row["id"] for row in training} | {row["id"] for row in held_back}) == 2 * SUBJECTS
    assert len(training) + len(held_back) == 2 * SUBJECTS
    assert {row["id"] for row in pairs} == {row["id"] for row in training}
    assert not {row["group"] for row in training} & {row["group"] for row in held_back}
    assert 4 <= len({row["group"] for row in held_back}) <= 18  # of 40 with probability 0.25
    (row,) = [row for row in training + held_back if row["id"] == "chatcmpl-7"]
    facts = {name: row["meta"][name] for name in ("response_id", "model_version", "repository_sha256", "day")}
    assert facts == {
        "response_id": "chatcmpl-7",
        "model_version": "echo:7",
        "repository_sha256": "ab" * 32,
        "day": "2026-11-25",
    }


def test_held_back_groups_stay_when_the_share_grows() -> None:
    groups = [f"subject {number}" for number in range(2000)]
    small, large = ({group for group in groups if is_held_back(group, share)} for share in (0.1, 0.3))
    assert small < large
    assert 150 < len(small) < 250
    assert not any(is_held_back(group, 0) for group in groups)


def test_conversation_of_a_held_back_subject_is_left_out_for_others(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    subjects = [settings.hash_subject(f"user {number}") for number in range(50)]
    held = next(subject for subject in subjects if is_held_back(subject, 0.5))
    other, third = [subject for subject in subjects if not is_held_back(subject, 0.5)][:2]
    rows = [traffic.build_row(number, subject) for number, subject in enumerate((held, other, third))]
    rows[1]["request"]["messages"] = [
        *rows[0]["request"]["messages"],
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "and then?"},
    ]
    traffic.write_sealed(settings, traffic.DAY, rows)
    exported = traffic_export.export(settings, {}, tmp_path / "rows", ExportOptions("", True, 0.5))
    assert (exported.conversations, exported.held_back, exported.left_out) == (1, 1, 1)
    assert read_rows(tmp_path / "rows", "conversations")[0]["id"] == "chatcmpl-2"


def test_repeated_export_is_accepted_and_other_rows_are_refused(home: Path) -> None:
    first = answer_in_process("traffic", "export", "-o", "rows", *FEEDBACK, cwd=home)
    answer_in_process("traffic", "compact", cwd=home)
    assert answer_in_process("traffic", "export", "-o", "rows", *FEEDBACK, cwd=home) == first
    error = refusal(2, "traffic", "export", "-o", "rows", *FEEDBACK, "--held-back", 0.5, cwd=home)
    assert "rows contains an export of other rows" in error["message"]
    (home / "rows" / "conversations.jsonl").write_text("")
    error = refusal(1, "traffic", "export", "-o", "rows", *FEEDBACK, cwd=home)
    assert "the exported rows in rows have changed" in error["message"]
    (home / "rows" / "export.json").write_text("{}")
    assert "rows is not an export" in refusal(1, "traffic", "export", "-o", "rows", *FEEDBACK, cwd=home)["message"]


def test_export_without_a_row_is_refused(home: Path) -> None:
    error = refusal(1, "traffic", "export", "-o", "rows", cwd=home)
    assert "yields a training row" in error["message"]
    assert "--unrated" in error["hint"]
    assert not (home / "rows").exists()


def test_dry_run_counts_and_writes_nothing(home: Path) -> None:
    (home / "c.yaml").write_text(json.dumps({"data_curation": {"sources": ["own.jsonl"]}}))
    messages = [{"role": "user", "content": "How do I close a gate?"}, {"role": "assistant", "content": "Turn it."}]
    (home / "own.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    before = sorted(path.name for path in home.iterdir())
    options = ("--held-back", 0.25, "--dataset", "dataset", "-c", "c.yaml", "--dry-run")
    result = answer_in_process("traffic", "export", "-o", "new/rows", *FEEDBACK, *options, cwd=home)
    assert result["dry_run"]
    assert result["dataset"]["rows"]["in"] == result["conversations"] + 1
    assert [name for name in sorted(path.name for path in home.iterdir()) if name != ".tuneline"] == before


@pytest.mark.long
@pytest.mark.daft
def test_rows_are_curated_with_the_other_sources(home: Path) -> None:
    """Long tier: Daft compares the rows. A row of the training data is a duplicate; a row in an evaluation set, and the held-back rows, are not trained."""
    exported = answer_in_process("traffic", "export", "-o", "rows", *FEEDBACK, "--held-back", 0.25, cwd=home)
    training, held_back = (read_rows(home / "rows", name) for name in ("conversations", "held_back"))
    same, evaluated, *_rest = training
    own = [{"messages": same["messages"]}, {"messages": held_back[0]["messages"]}]
    (home / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (home / "eval.jsonl").write_text(json.dumps({"messages": evaluated["messages"]}) + "\n")
    curation = {"sources": ["own.jsonl"], "decontamination": {"sets": ["eval.jsonl"]}}
    (home / "c.yaml").write_text(json.dumps({"data_curation": curation}))
    command = (
        "traffic",
        "export",
        "-o",
        "rows",
        *FEEDBACK,
        "--held-back",
        0.25,
        "--dataset",
        "dataset",
        "-c",
        "c.yaml",
    )
    result = answer_in_process(*command, cwd=home)
    rows = result["dataset"]["rows"]
    assert rows["in"] == exported["conversations"] + 2
    assert rows["rejected"]["exact_duplicate"] == 1
    assert rows["rejected"]["contaminated"] >= 2
    again = answer_in_process(*command, cwd=home)
    assert again["dataset"]["sha256"] == result["dataset"]["sha256"]


def test_objective_without_its_kind_of_rows_is_refused(home: Path) -> None:
    (home / "feedback.jsonl").write_text(json.dumps({"id": "chatcmpl-1", "model": "echo", "rating": "up"}) + "\n")
    answer_in_process("traffic", "export", "-o", "rows", *FEEDBACK, cwd=home)
    (home / "c.yaml").write_text(json.dumps({"fine_tuning": {"objective": "dpo"}}))
    command = ("traffic", "export", "-o", "rows", *FEEDBACK, "--dataset", "dataset", "-c", "c.yaml")
    error = refusal(1, *command, cwd=home)
    assert "rows has no preferences.jsonl, which the objective dpo requires" in error["message"]
    error = refusal(2, *command, "--set", "fine_tuning.objective=text", cwd=home)
    assert "objective is text, but captured traffic has no rows for this objective" in error["message"]
    assert error["hint"] == "Set fine_tuning.objective to an objective other than text."


def export_locked(home: Path) -> None:
    with locked_traffic(home / "capture.yaml", [home / "feedback.jsonl"]) as settings:
        latest = read_latest_feedback([home / "feedback.jsonl"])
        traffic_export.export(settings, latest, home / "rows", ExportOptions(held_back=0.25))


def test_export_killed_at_20_random_moments_neither_loses_nor_repeats_a_row(home: Path) -> None:
    """A forked process exports until it is killed; the output folder is then absent or complete."""
    started = time.perf_counter()
    export_locked(home)
    seconds = time.perf_counter() - started
    whole = {path.name: path.read_bytes() for path in (home / "rows").iterdir()}
    generator, unfinished = random.Random(1), 0
    for _ in range(20):
        for path in (home / "rows").iterdir():
            path.unlink()
        (home / "rows").rmdir()
        if (child := os.fork()) == 0:
            try:
                export_locked(home)
            finally:
                os._exit(0)
        time.sleep(generator.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += not (home / "rows").exists()
        if (home / "rows").exists():
            assert {path.name: path.read_bytes() for path in (home / "rows").iterdir()} == whole
        export_locked(home)
        assert {path.name: path.read_bytes() for path in (home / "rows").iterdir()} == whole
        assert not [path for path in home.iterdir() if path.name.startswith(".rows")]
    assert unfinished >= 5, "the kills came after the end of the export"


def test_erased_subject_is_in_no_byte_of_a_later_export(home: Path) -> None:
    settings: CaptureSettings = traffic.load(home)
    digest = settings.hash_subject("user 3")
    export_locked(home)
    assert digest.encode() in traffic.read_stored_bytes(home / "rows")
    for path in (home / "rows").iterdir():
        path.unlink()
    (home / "rows").rmdir()
    erasure.erase(settings, "user 3", "dpo", seal_seconds=0)
    export_locked(home)
    stored = traffic.read_stored_bytes(home / "rows")
    assert digest.encode() not in stored
    assert b"open desk 3 " not in stored
    assert b"open desk 4 " in stored


def test_held_back_answer_that_an_evaluation_cannot_compare_is_left_out(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    call = {"id": "x", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    rows = [
        traffic.build_row(0, "s"),
        traffic.build_row(1, "s", content=None, tool_calls=[call]),
        traffic.build_row(2, "s", content=" "),
        traffic.build_row(3, "s"),
    ]
    rows[3]["request"]["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "4"},
    ]
    traffic.write_sealed(settings, traffic.DAY, rows)
    exported = traffic_export.export(settings, {}, tmp_path / "rows", ExportOptions("", True, 1.0))
    assert (exported.conversations, exported.held_back, exported.left_out) == (0, 1, 3)
    assert [row["id"] for row in read_rows(tmp_path / "rows", "held_back")] == ["chatcmpl-0"]
