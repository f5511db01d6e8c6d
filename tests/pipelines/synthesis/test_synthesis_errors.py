"""Errors of `tuneline synthesize`: options, templates, endpoints and documents. Each is reported before rows are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.command import refusal, tuneline
from tests.pipelines.synthesis.documents import write_documents
from tests.pipelines.synthesis.stand_in_teacher import Reply, answer_from_passage, build_reply, serve_teacher

UNREACHABLE = "http://127.0.0.1:9/v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with documents in `docs`."""
    write_documents(tmp_path / "docs", 2)
    return tmp_path


def refuse(folder: Path, code: int, *options: object, teacher: str = UNREACHABLE, **extra: str) -> dict[str, str]:
    return refusal(code, "synthesize", "docs", "-o", "out", "--teacher", teacher, *options, cwd=folder, **extra)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-cost", "nan", "--input-price", 1), "Invalid value for '--max-cost': Input should be less than or equal to 1000000000"),
        (("--max-cost", 1), "--max-cost requires a price"),
        (("--probe", 5), "--probe requires --dry-run"),
        (("--judge-key", "KEY"), "--judge-model and --judge-key require --judge"),
        (("--template", "qa@0"), "--template: 'qa@0' is neither a template nor a readable file: No such file or directory"),
        (("--template", "qa@1", "--template", "preference@1"),
         "--template: qa@1 (sft) and preference@1 (preference) write rows of different kinds, which one dataset cannot hold"),
        (("--template", "own.yaml"), "--template: own.yaml: user has no placeholder {passage}"),
        (("--template", "damaged.yaml"), "--template: damaged.yaml: styles: Field required"),
    ],
)  # fmt: skip
def test_invalid_options_are_usage_errors(folder: Path, options: tuple[object, ...], message: str) -> None:
    (folder / "own.yaml").write_text("{kind: qa, styles: [a], system: b, user: c}")
    (folder / "damaged.yaml").write_text("{kind: qa, system: b, user: c}")
    error = refuse(folder, 2, *options)
    assert error["message"] == message
    assert error["hint"]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("https://user:secret@teacher.example/v1", "--teacher: url contains a user, password, query or fragment"),
        ("http://teacher.example/v1", "--teacher: url has scheme http, which would send the key unencrypted"),
    ],
)
def test_invalid_teacher_url_is_a_usage_error(folder: Path, teacher: str, message: str) -> None:
    error = refuse(folder, 2, "--teacher-key", "SECRET", teacher=teacher)
    assert error["message"].startswith(message)
    assert "secret" not in error["message"].replace("SECRET", "")


@pytest.mark.parametrize(
    ("teacher", "message", "hint"),
    [
        ("", "--teacher is empty", "Specify a URL"),
        ("127.0.0.1:8000/v1", "--teacher: '127.0.0.1:8000/v1' has no scheme", "Write http://127.0.0.1:8000/v1"),
        ("manuals@champion", "no registry exists yet, so model manuals does not exist", ""),
    ],
)
def test_teacher_that_cannot_be_opened_is_named(folder: Path, teacher: str, message: str, hint: str) -> None:
    """A registered version is looked up in the workdir's MLflow."""
    error = refuse(folder, 1 if "@" in teacher else 2, teacher=teacher)
    assert error["message"].startswith(message)
    assert error["hint"].startswith(hint)


def test_key_instead_of_a_variable_is_refused_and_not_printed(folder: Path) -> None:
    error = refuse(folder, 2, "--teacher-key", "sk-123-abc")
    assert error["message"] == "--teacher-key is not the name of an environment variable"
    assert "sk-123" not in str(error)


def test_options_of_an_endpoint_do_not_apply_to_a_local_model(folder: Path) -> None:
    error = refuse(folder, 2, "--teacher-model", "gpt", teacher="my-model")
    assert error["message"].startswith(
        "--teacher-model and --teacher-key apply to an endpoint; --teacher is 'my-model'"
    )


def test_missing_key_and_unreachable_teacher_are_errors_before_any_work(folder: Path) -> None:
    missing = refuse(folder, 2, "--teacher-key", "TUNELINE_NO_SUCH_KEY")
    assert missing["message"] == "--teacher-key: the environment variable TUNELINE_NO_SUCH_KEY is not set"
    error = refuse(folder, 1)
    assert error["message"].startswith(f"the teacher at {UNREACHABLE} does not answer: ConnectionRefusedError")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("reply", "code", "kind", "message"),
    [
        ((401, {"error": "bad key k-123456"}), 1, "engine_missing", "rejects the request: HTTP 401"),
        ((429, "slow down"), 75, "interrupted", "stopped answering: HTTP 429"),
        ((500, "<html>oops</html>"), 75, "interrupted", "stopped answering: HTTP 500"),
        ((200, "not JSON"), 75, "interrupted", "stopped answering: JSONDecodeError"),
        ((200, "[" * 200_000), 75, "interrupted", "stopped answering: ValueError"),
        ((200, {"choices": []}), 75, "interrupted", "stopped answering: the response has no message"),
        ((200, []), 75, "interrupted", "stopped answering: the response has no message"),
    ],
)  # fmt: skip
def test_failing_endpoint_stops_the_synthesis(folder: Path, reply: Reply, code: int, kind: str, message: str) -> None:
    answered: list[int] = []

    def fail_later(body: dict[str, Any]) -> Reply:
        answered.append(1)
        return answer_from_passage(body) if len(answered) <= 2 else reply

    with serve_teacher(fail_later) as teacher:
        options = ("--retries", 0, "--concurrency", 1, "--teacher-key", "TUNELINE_TEST_KEY")
        error = refuse(folder, code, *options, teacher=teacher.url, TUNELINE_TEST_KEY="k-123456")
    assert error["kind"] == kind
    assert message in error["message"]
    assert "k-123456" not in error["message"]
    assert len((folder / "out" / "answers.jsonl").read_text().splitlines()) == 2
    assert not (folder / "out" / "manifest.json").exists()


def test_documents_without_text_and_unusable_answers_are_input_errors(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "scan.pdf").write_bytes(b"%PDF-1.7\nbroken")
    with serve_teacher(lambda body: build_reply("I cannot help with that.")) as teacher:
        error = refuse(folder, 1, "--per-passage", 1, teacher=teacher.url)
        assert error["message"] == "no answer of stand-in passes the checks: 3 structure"
        asked = ("synthesize", "docs", "-o", "probe", "--teacher", teacher.url, "--dry-run", "--probe", 2)
        probe = tuneline(*asked, cwd=folder).stdout.splitlines()
        assert "requested: 100 rows; add documents for more rows" in probe
        assert probe[-2] == "probe: 0 of 2 answers accepted; rejected: 2 structure"
        assert probe[-1].startswith("first rejected answer: structure, ")
        assert probe[-1].endswith(": 'I cannot help with that.'")
        empty = refusal(1, "synthesize", "empty", "-o", "no", "--teacher", teacher.url, cwd=folder)
        assert empty["message"].startswith("the sources contain no passage: 1 unreadable, the first scan.pdf:1: ")
        (folder / "full").mkdir()
        (folder / "full" / "mine.txt").write_text("mine")
        occupied = refusal(2, "synthesize", "docs", "-o", "full", "--teacher", teacher.url, cwd=folder)
    assert occupied["kind"] == "output_occupied"
    assert (folder / "full" / "mine.txt").read_text() == "mine"
