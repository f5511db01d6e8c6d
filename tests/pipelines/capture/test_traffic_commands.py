"""`tuneline traffic`: what the commands print, write and refuse; and the rows for curation."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from components.common.workspace import job_folders
from components.data_versioning.row_search import Query
from pipelines.capture import traffic_files, training_rows
from pipelines.capture.training_rows import build_training_rows, select_feedback
from tests.pipelines.capture import traffic
from tests.pipelines.command import answer_in_process, refusal, run_in_process

YESTERDAY = traffic_files.now() - timedelta(days=1)
ID = "chatcmpl-1"
QUESTION = {"role": "user", "content": "question 1"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a capture file, captured rows of two subjects, and feedback. No gateway runs."""
    monkeypatch.setattr(traffic_files, "NOTICE_SECONDS", 0)
    settings = traffic.load(tmp_path)
    subjects = [settings.hash_subject(name) for name in ("jane", "john")]
    rows = [traffic.build_row(n, subjects[n % 2], int(YESTERDAY.timestamp())) for n in range(4)]
    traffic.write_sealed(settings, YESTERDAY, rows)
    lines = [
        {"id": "chatcmpl-0", "model": "echo", "key": "a", "rating": "down", "correction": "better 0"},
        {"id": "chatcmpl-1", "model": "echo", "key": "a", "rating": "up", "correction": None},
    ]
    text = "".join(json.dumps({**line, "time": YESTERDAY.isoformat()}) + "\n" for line in lines)
    (tmp_path / "feedback.jsonl").write_text(text)
    return tmp_path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_traffic_is_compacted_exported_erased_and_expired(home: Path) -> None:
    feedback = ("--feedback", "feedback.jsonl")
    (day,) = answer_in_process("traffic", "compact", cwd=home)["days"]
    assert (day["rows"], day["files"]) == (4, 1)
    exported = answer_in_process("traffic", "export", "-o", "rows", *feedback, "--unrated", cwd=home)
    assert (exported["conversations"], exported["preferences"]) == (4, 1)
    conversations = read_jsonl(home / "rows" / "conversations.jsonl")
    assert [row["messages"][-1]["content"] for row in conversations] == ["better 0", "answer 1", "answer 2", "answer 3"]
    assert {path.stat().st_mode & 0o777 for path in (home / "rows").iterdir()} == {0o600}
    (pair,) = read_jsonl(home / "rows" / "preferences.jsonl")
    assert [pair[name][0]["content"] for name in ("prompt", "chosen", "rejected")] == [
        "question 0",
        "better 0",
        "answer 0",
    ]
    erased = answer_in_process("traffic", "erase", "--subject", "jane", *feedback, cwd=home)
    assert (erased["rows"], erased["feedback"], erased["complete"], erased["derived"]) == (2, 1, True, None)
    # The row's hash finds the datasets that were curated from it.
    row = {**conversations[0], "meta": json.dumps({"meta": conversations[0]["meta"]})}
    assert Query("text", erased["subject"]).matches(row)
    exported = answer_in_process("traffic", "export", "-o", "rows-2", *feedback, cwd=home)
    assert (exported["conversations"], exported["preferences"]) == (1, 0)
    assert not (home / "rows-2" / "preferences.jsonl").exists()
    traffic.write_capture_file(home, models={"echo": {"retention_days": 1}})
    day_folder = next((home / "traffic" / "echo").iterdir())
    day_folder.rename(day_folder.with_name("2026-01-01"))
    (status,) = answer_in_process("traffic", "status", "--requests-per-day", 1000, cwd=home)["models"]
    assert (status["expired_days"], status["estimate"]["bytes_per_day"]) == (1, 2_000_000)
    text = (home / "feedback.jsonl").read_text()
    (home / "feedback.jsonl").write_text(text.replace(YESTERDAY.isoformat(), "2026-01-01T00:00:00+00:00"))
    expired = answer_in_process("traffic", "expire", *feedback, cwd=home)
    assert expired == {"days": [{"model": "echo", "day": "2026-01-01"}], "feedback": 1}
    assert (home / "feedback.jsonl").read_text().strip() == ""


def test_status_and_erasure_are_readable(home: Path) -> None:
    status = run_in_process("traffic", "status", "--requests-per-day", 100000, cwd=home).stdout
    assert "echo: 100,000 requests per day need" in status
    assert "measured" in status
    traffic.write_capture_file(home, models={"echo": {"legal_hold": True}})
    result = run_in_process("traffic", "erase", "--subject", "jane", cwd=home)
    assert result.returncode == 1
    assert "echo is under a legal hold: its rows remain" in result.stdout
    assert "is not finished: run `tuneline traffic erase` again" in run_in_process("traffic", "status", cwd=home).stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"echo": {"sampling_rate": 2}}}, "models.echo.sampling_rate: found 2; expected 1.0 or less"),
        ({"modles": {}}, "modles: unknown key (did you mean models?)"),
        ({"subject": {"source": "user"}}, "subject: key_file is not set"),
        ({"subject": {"key_file": "gone.key"}}, "gone.key cannot be read: No such file or directory"),
        ({"subject": {"key_file": "capture.yaml", "source": "ip"}}, "subject.source: found 'ip'"),
        ({"group": "no-such-group"}, "group 'no-such-group' does not exist on this machine"),
        ({"folder": 3}, "folder: found 3"),
    ],
)
def test_invalid_capture_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    traffic.write_capture_file(tmp_path, **changes)
    error = refusal(2, "traffic", "status", cwd=tmp_path)
    assert message in error["message"]
    assert error["hint"]


def test_unreadable_capture_file_is_refused(tmp_path: Path) -> None:
    assert "capture.yaml cannot be read" in refusal(2, "traffic", "status", cwd=tmp_path)["message"]
    (tmp_path / "capture.yaml").write_text("- folder")
    assert "is not a mapping of settings" in refusal(2, "traffic", "status", cwd=tmp_path)["message"]


def test_short_key_is_refused(tmp_path: Path) -> None:
    traffic.write_capture_file(tmp_path)
    (tmp_path / "subject.key").write_text("short")
    assert "has 5 bytes; expected at least 16" in refusal(2, "traffic", "compact", cwd=tmp_path)["message"]


def test_wrong_arguments_are_refused(home: Path) -> None:
    assert "--subject is empty" in refusal(2, "traffic", "erase", "--subject", " ", cwd=home)["message"]
    error = refusal(1, "traffic", "erase", "--subject", "jane", "--workdir", "gone", cwd=home)
    assert "--workdir: gone does not exist" in error["message"]
    assert (
        "gone.jsonl does not exist" in refusal(1, "traffic", "expire", "--feedback", "gone.jsonl", cwd=home)["message"]
    )
    assert "not an empty folder" in refusal(2, "traffic", "export", "-o", ".", cwd=home)["message"]
    before = (home / "capture.yaml").read_bytes()
    error = refusal(1, "traffic", "expire", "--feedback", "capture.yaml", cwd=home)
    assert "capture.yaml is not a feedback file" in error["message"]
    assert (home / "capture.yaml").read_bytes() == before
    with job_folders.folder_lock(home / "traffic"):
        assert refusal(1, "traffic", "compact", cwd=home)["kind"] == "busy"
    traffic.write_capture_file(home, subject={"source": "none"})
    assert "the captured rows have no subject" in refusal(2, "traffic", "erase", "--subject", "a", cwd=home)["message"]
    traffic.write_capture_file(home, folder="gone")
    assert "gone does not exist" in refusal(1, "traffic", "compact", cwd=home)["message"]


def test_damaged_tombstone_is_named(home: Path) -> None:
    answer_in_process("traffic", "erase", "--subject", "jane", cwd=home)
    (tombstone,) = (home / "traffic").rglob("*.json")
    tombstone.write_text("{")
    error = refusal(1, "traffic", "compact", cwd=home)
    assert f"{tombstone.name} is damaged" in error["message"]


def test_interrupted_export_leaves_no_rows(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> Any:
        yield from ()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_rows, "read_training_rows", interrupt)
    refusal(1, "traffic", "export", "-o", "rows", "--unrated", cwd=home)
    assert not [path for path in home.iterdir() if "rows" in path.name]


def build(row: dict[str, Any], include_unrated: bool = True, **feedback: object) -> Any:
    return build_training_rows(row, feedback or None, include_unrated=include_unrated)


def test_training_rows_come_from_corrections_and_well_rated_whole_answers() -> None:
    row = traffic.build_row(1)
    assert build(row, include_unrated=False).conversation is None
    assert build(row, rating="down").conversation is None
    assert build(row, rating="up").conversation["messages"] == [QUESTION, {"role": "assistant", "content": "answer 1"}]
    same = build(row, correction="answer 1")
    assert same.conversation is not None
    assert same.preference is None, "the correction equals the answer"
    row["tuneline"]["state"] = "aborted"
    assert build(row, rating="up").conversation is None
    assert build(row, correction="better").preference["rejected"] == [{"role": "assistant", "content": "answer 1"}]
    parts = [{"type": "text", "text": "question"}, {"type": "text", "text": " 1"}]
    row["request"]["messages"] = [{"role": "user", "content": parts}]
    assert build(row, correction="better").preference["prompt"] == [QUESTION]
    del row["request"]["messages"]
    assert build(row, correction="better").conversation is None


def test_last_feedback_of_each_key_counts() -> None:
    lines = [
        {"id": ID, "key": "a", "rating": "down", "correction": "first"},
        {"id": ID, "key": "a", "rating": None, "correction": None},
        {"id": "chatcmpl-2", "key": "a", "correction": "a"},
        {"id": "chatcmpl-2", "key": "b", "rating": None},
    ]
    assert {name: line.get("correction") for name, line in select_feedback(lines).items()} == {"chatcmpl-2": "a"}


def test_answers_are_listed_newest_first_and_filtered(home: Path) -> None:
    settings = traffic.load(home)
    older = traffic.build_row(9, timestamp=int(traffic.DAY.timestamp()))
    older["tuneline"] |= {"version": "6", "state": "aborted"}
    traffic.write_sealed(settings, traffic.DAY, [older])
    answer_in_process("traffic", "compact", cwd=home)
    feedback = ("--feedback", "feedback.jsonl")

    def list_ids(*options: object) -> list[str]:
        answers = answer_in_process("traffic", "list", *feedback, *options, cwd=home)["answers"]
        return [each["id"].removeprefix("chatcmpl-") for each in answers]

    assert list_ids() == ["3", "2", "1", "0", "9"]
    assert list_ids("--limit", 2) == ["3", "2"]
    assert list_ids("--rating", "up") == ["1"]
    assert list_ids("--rating", "down") == ["0"]
    assert list_ids("--rating", "none") == ["3", "2", "9"]
    assert list_ids("--version", "6") == list_ids("--state", "aborted") == ["9"]
    assert list_ids("--days", traffic.DAY.date()) == list_ids("--days", f"..{traffic.DAY.date()}") == ["9"]
    assert list_ids("--days", f"{YESTERDAY.date()}..") == ["3", "2", "1", "0"]
    assert list_ids("--model", "other") == []
    text = run_in_process("traffic", "list", *feedback, cwd=home).stdout
    assert "question 3" in text
    assert text.index("chatcmpl-3") < text.index("chatcmpl-9")
    answer_in_process("traffic", "erase", "--subject", "jane", *feedback, cwd=home)
    # A gateway may seal its file after the erasure.
    traffic.write_sealed(settings, YESTERDAY, [traffic.build_row(4, settings.hash_subject("jane"))])
    assert list_ids() == ["3", "1", "9"]


def test_answer_is_shown_with_request_and_feedback(home: Path) -> None:
    shown = answer_in_process("traffic", "show", "chatcmpl-0", "--feedback", "feedback.jsonl", cwd=home)
    assert shown["request"]["messages"][0]["content"] == shown["prompt"] == "question 0"
    assert shown["response"]["choices"][0]["message"]["content"] == "answer 0"
    assert (shown["rating"], shown["feedback"]["correction"]) == ("down", "better 0")
    text = run_in_process("traffic", "show", "chatcmpl-0", "--feedback", "feedback.jsonl", cwd=home).stdout
    assert "[user]\nquestion 0\n\n[answer]\nanswer 0\n\n[correction]\nbetter 0" in text
    assert "feedback" not in run_in_process("traffic", "show", "chatcmpl-0", cwd=home).stdout
    answer_in_process("traffic", "erase", "--subject", "jane", cwd=home)
    error = refusal(1, "traffic", "show", "chatcmpl-0", cwd=home)
    assert "no captured answer has the ID chatcmpl-0" in error["message"]


def test_damaged_compacted_file_is_named(home: Path) -> None:
    answer_in_process("traffic", "compact", cwd=home)
    (path,) = (home / "traffic").rglob("rows.parquet")
    path.write_bytes(b"damaged")
    assert f"{path} cannot be read" in refusal(1, "traffic", "list", cwd=home)["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--state", "done"), "--state is 'done'; expected complete, aborted, failed"),
        (("--rating", "up"), "--rating requires --feedback"),
        (("--days", "11-23"), "--days is '11-23'; expected FROM..TO"),
        (("--days", "2026-11-23..2026-11-22"), "--days 2026-11-23..2026-11-22 contains no day"),
    ],
)
def test_invalid_filters_are_refused(home: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refusal(2, "traffic", "list", *options, cwd=home)["message"]
