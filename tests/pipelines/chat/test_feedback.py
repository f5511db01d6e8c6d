"""Feedback on answers, through the gateway's routes."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.gateway import api_keys
from pipelines.gateway.errors import RequestError
from pipelines.gateway.feedback import (
    MAX_CORRECTION_CHARACTERS,
    AnswerOrigin,
    Feedback,
    FeedbackFile,
    erase_feedback,
    parse_feedback,
    read_feedback,
)
from tests.pipelines.chat.fake_models import FakeModels, running_gateway

ID = "chatcmpl-0123456789abcdef01234567"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a gateway, and its feedback file."""
    path = tmp_path_factory.mktemp("gateway") / "feedback.jsonl"
    with running_gateway(FakeModels(), feedback=path) as url:
        yield url, path


def post(url: str, path: str, body: object, key: str = "") -> tuple[int, dict[str, Any]]:
    """Return the status and the object of an answer."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(url: str, key: str = "") -> str:
    """Return the id of an answer."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}]}
    status, answer = post(url, "/v1/chat/completions", body, key)
    assert status == 200, answer
    return str(answer["id"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_feedback_is_stored_with_the_exact_id_and_the_version_that_answered(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "feedback.jsonl"
    with running_gateway(FakeModels(), feedback=path) as url:
        answer_id = ask(url)
        assert post(url, "/v1/feedback", {"id": answer_id, "rating": "down"})[0] == 200
        correction = "Better:\n\u2028 “text” \x1b[31m"
        assert post(url, "/v1/feedback", {"id": answer_id, "rating": "down", "correction": correction})[0] == 200
        assert post(url, "/v1/feedback", {"id": answer_id, "rating": None})[0] == 200
        assert post(url, "/v1/feedback", {"id": ID, "rating": "up"})[0] == 200
    lines = read_lines(path)
    for line in lines:
        assert line.pop("time").endswith("+00:00")
    origin = {"id": answer_id, "model": "echo", "version": "7", "key": "anonymous"}
    assert lines == [
        {**origin, "rating": "down", "correction": None},
        {**origin, "rating": "down", "correction": correction},
        {**origin, "rating": None, "correction": None},
        {"id": ID, "model": None, "version": None, "key": "anonymous", "rating": "up", "correction": None},
    ]
    assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0, "only the owner may write, only the group may read"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "rating, correction and labels are missing"),
        ({"id": ID}, "rating, correction and labels are missing"),
        ({"rating": "up"}, "id: Field required"),
        ({"id": "../x", "rating": "up"}, "id: String should match"),
        ({"id": ID + "\n", "rating": "up"}, "id: String should match"),
        ({"id": ID, "rating": "sideways"}, "rating: Input should be 'up' or 'down'"),
        ({"id": ID, "rating": True}, "rating: Input should be 'up' or 'down'"),
        ({"id": ID, "correction": ""}, "correction: String should have at least 1"),
        ({"id": ID, "correction": "x" * (MAX_CORRECTION_CHARACTERS + 1)}, "correction: String should have at most"),
        ({"id": ID, "correction": "\ud800"}, "lone surrogate"),
        ({"id": ID, "rating": "up", "model": "mine"}, "model: Extra inputs are not permitted"),
        ([], "the body is a JSON list"),
    ],
)
def test_invalid_feedback_is_refused_and_not_stored(gateway: tuple[str, Path], body: object, message: str) -> None:
    url, path = gateway
    status, answer = post(url, "/v1/feedback", body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert path.read_bytes() == b""


def test_gateway_without_a_feedback_file_refuses_feedback() -> None:
    with running_gateway(FakeModels()) as url:
        status, answer = post(url, "/v1/feedback", {"id": ID, "rating": "up"})
        with urllib.request.urlopen(f"{url}/chat/config.json", timeout=30) as response:
            assert json.load(response) == {"feedback": False}
    assert status == 404
    assert "--feedback FILE" in answer["error"]["message"]


def test_feedback_needs_a_key_with_the_scope_and_the_answers_own_key(tmp_path: Path) -> None:
    keys, path = tmp_path / "keys.yaml", tmp_path / "feedback.jsonl"
    alice, bob = (api_keys.create_key(keys, name, {"models": ["echo"]}) for name in ("alice", "bob"))
    monitor = api_keys.create_key(keys, "monitor", {"scopes": ["metrics"]})
    slow = api_keys.create_key(keys, "slow", {"requests_per_minute": 1})
    with running_gateway(FakeModels(), feedback=path, keys=keys) as url:
        body = {"id": ask(url, alice), "rating": "up"}
        statuses = [post(url, "/v1/feedback", body, key)[0] for key in ("", "tl-wrong", monitor, bob, alice)]
        assert statuses == [401, 401, 403, 404, 200]
        limited = [post(url, "/v1/feedback", {"id": ID, "rating": "up"}, slow)[0] for _ in range(4)]
    assert (limited[0], limited[-1]) == (200, 429)
    assert [line["key"] for line in read_lines(path)] == ["alice", *["slow"] * limited.count(200)]


def test_full_file_refuses_feedback_and_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    with running_gateway(FakeModels(), feedback=path, max_feedback_bytes=500) as url:
        answers = [post(url, "/v1/feedback", {"id": ID, "rating": "up"}) for _ in range(10)]
    stored = [status for status, _ in answers].count(200)
    assert 1 <= stored < 10
    assert answers[-1][0] == 507
    assert answers[-1][1]["error"]["code"] == "feedback_full"
    assert len(read_lines(path)) == stored
    assert path.stat().st_size <= 500


def test_line_after_a_cut_line_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    path.write_text('{"id": "cut')
    FeedbackFile(path, 1 << 20).append(Feedback(id=ID, rating="up"), AnswerOrigin("echo", "7", "team"), "team")
    cut, line, end = path.read_text().split("\n")
    assert (cut, json.loads(line)["id"], end) == ('{"id": "cut', ID, "")


def test_labels_and_author_are_stored_and_personal_data_is_redacted(tmp_path: Path) -> None:
    file = FeedbackFile(tmp_path / "feedback.jsonl", 1 << 20)
    fields = {"labels": ["tone", "of ann@example.org"], "author": "reviewer-3", "correction": "Mail ann@example.org"}
    file.append(parse_feedback({"id": ID, **fields}), None, "team")
    (line,) = read_feedback(tmp_path / "feedback.jsonl")
    assert (line["labels"], line["author"], line["correction"]) == (
        ["tone", "of <EMAIL>"],
        "reviewer-3",
        "Mail <EMAIL>",
    )


def test_erased_lines_are_overwritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"
    file = FeedbackFile(path, 1 << 20)
    for number in range(3):
        file.append(Feedback(id=f"chatcmpl-{number}", correction=f"text {number}"), None, "team")

    size = path.stat().st_size
    with path.open("r+b") as lines:  # an interrupted erasure has overwritten half of the first line
        lines.write(b" " * 20)
    assert erase_feedback(path, lambda line: line["id"] == "chatcmpl-1") == 2
    assert path.stat().st_size == size
    assert [line["id"] for line in read_feedback(path)] == ["chatcmpl-2"]
    assert b"text 1" not in path.read_bytes()


def test_unwritable_file_is_reported_to_the_client_without_its_path(tmp_path: Path) -> None:
    file = FeedbackFile(tmp_path / "feedback.jsonl", 1 << 20)
    (tmp_path / "feedback.jsonl").unlink()
    (tmp_path / "feedback.jsonl").mkdir()
    with pytest.raises(RequestError) as caught:
        file.append(Feedback(id=ID, rating="up"), None, "team")
    assert caught.value.status == 507
    assert str(tmp_path) not in caught.value.message


def test_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "feedback.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FeedbackFile(tmp_path / "feedback.jsonl", 1 << 20)
    assert not (tmp_path / "elsewhere").exists()
