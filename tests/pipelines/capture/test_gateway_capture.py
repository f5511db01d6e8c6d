"""Capture through the gateway's routes: what is stored of a request, and which requests are not."""

from __future__ import annotations

import http.client
import json
import stat
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers

from pipelines.capture import row_selection, traffic_writer
from pipelines.capture.row_selection import RowFilter
from pipelines.capture.traffic_rows import AnswerFacts, build_row, is_shadow
from pipelines.gateway import api_keys
from pipelines.gateway.traffic_capture import TrafficCapture
from pipelines.gateway.traffic_routes import set_route
from tests.pipelines.capture import traffic
from tests.pipelines.chat.fake_models import FakeModels, running_gateway

METRIC = "tuneline_gateway_captured_rows_total"
SUBJECT = "jane.doe@example.com"


@pytest.fixture(autouse=True)
def write_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_writer, "WRITE_SECONDS", 0.005)


def ask(url: str, text: str = "Hello", **fields: Any) -> tuple[int, bytes]:
    """Send a chat, and return the status and the body of its answer."""
    headers = {"content-type": "application/json", **fields.pop("headers", {})}
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], "user": SUBJECT, **fields}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    result = answer.status, answer.read()
    connection.close()
    return result


def test_whole_and_streamed_answers_are_stored_in_the_form_of_the_api(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    with running_gateway(FakeModels(), capture=settings) as url:
        whole = json.loads(ask(url)[1])
        events = ask(url, stream=True, metadata={"job": "nightly"})[1].decode().split("\n\n")
        chunks = [json.loads(each[6:]) for each in events if each.startswith("data: {")]
    first, second = traffic.read_rows(settings)
    assert list(first) == ["timestamp", "workload_id", "client_id", "request", "response", "tuneline"]
    assert first["response"] == whole
    subject = settings.hash_subject(SUBJECT)
    assert first["request"] == {
        "model": "echo",
        "messages": [{"role": "user", "content": "Hello"}],
        "user": subject,
    }
    facts = first["tuneline"]
    assert 0 <= facts.pop("first_token_seconds") <= facts.pop("seconds")
    assert facts == {
        **{"model": "echo", "version": "7", "model_sha256": "", "repository_sha256": "", "subject": subject},
        **{"consent": None, "sampling_rate": 1.0, "state": "complete", "status": 200, "finish_reasons": ["stop"]},
        "redactions": {},
    }
    assert (first["workload_id"], first["client_id"]) == ("echo", "anonymous")
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert second["response"]["choices"][0]["message"]["content"] == text
    assert second["response"]["id"] == chunks[0]["id"]
    assert second["response"]["usage"]["completion_tokens"] == 4
    assert (second["request"]["stream"], second["request"]["metadata"]) == (True, {"job": "nightly"})


def test_shadow_answers_are_stored_with_the_rows_of_their_requests(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    routes = tmp_path / "routes.yaml"
    set_route(routes, "echo", {"targets": [{"model": "echo"}], "shadow": {"model": "other", "share": 1}})
    models = FakeModels()
    with running_gateway(models, capture=settings, routes=routes) as url:
        answers = [json.loads(ask(url, text)[1]) for text in ("Write to ann@example.net", "break other")]
        deadline = time.monotonic() + 10
        while len(models.requests) < 4 or models.finished < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.05)  # until the shadow answers are queued
    rows = traffic.read_rows(settings)
    shadows = {row["tuneline"]["shadow_of"]: row for row in rows if is_shadow(row)}
    assert list(shadows) == [answer["id"] for answer in answers]
    assert len(rows) == 4
    row, failed = shadows.values()
    facts = row["tuneline"]
    assert (facts["model"], facts["version"], facts["state"]) == ("other", "8", "complete")
    assert facts["subject"] == settings.hash_subject(SUBJECT)
    assert row["request"] == {}, "the row of the client's answer has it"
    assert row["response"]["choices"][0]["message"]["content"].startswith("other 1 ")
    assert b"ann@" not in traffic.read_stored_bytes(settings.folder)
    assert failed["tuneline"]["state"] == "failed"
    assert [path.name for path in settings.folder.glob("[!.]*")] == ["echo"], "retention and legal hold are the model's"
    assert len(row_selection.list_newest(settings, RowFilter(), {}, 9)) == 2


def test_shadow_answer_is_not_stored_if_the_row_of_its_request_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, routes, models = traffic.load(tmp_path), tmp_path / "routes.yaml", FakeModels()
    set_route(routes, "echo", {"targets": [{"model": "echo"}], "shadow": {"model": "other", "share": 1}})
    submit, calls = traffic_writer.TrafficWriter.submit, []

    def drop_first(self: traffic_writer.TrafficWriter, *arguments: Any, **options: Any) -> bool:
        calls.append(arguments)
        return len(calls) > 1 and submit(self, *arguments, **options)

    monkeypatch.setattr(traffic_writer.TrafficWriter, "submit", drop_first)
    with running_gateway(models, capture=settings, routes=routes) as url:
        for text in ("dropped", "stored"):
            ask(url, text)
        deadline = time.monotonic() + 10
        while len(calls) < 3 or models.finished < 4:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.05)  # a row of the dropped request's shadow would be queued by now
        assert len(calls) == 3
    rows = traffic.read_rows(settings)
    assert [is_shadow(row) for row in rows] in ([False, True], [True, False])


def test_copies_of_requests_without_consent_are_not_stored(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path, consent={"policy": "required"})
    routes = tmp_path / "routes.yaml"
    set_route(routes, "echo", {"targets": [{"model": "echo"}], "shadow": {"model": "other", "share": 1}})
    models = FakeModels()
    with running_gateway(models, capture=settings, routes=routes) as url:
        ask(url)
        while models.finished < 2:
            time.sleep(0.005)
    assert traffic.read_rows(settings) == []


def test_no_personal_data_is_in_the_stored_bytes(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    card, key = "4111 1111 1111 1111", "AKIAIOSFODNN7EXAMPLF"
    fields = {
        "messages": [
            {"role": "system", "content": f"Mail {SUBJECT}.\nCard {card}"},
            {"role": "user", "content": [{"type": "text", "text": "john@"}, {"type": "text", "text": "example.org"}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": '{"phone": "555\\u0031234567"}'}},
                    {"id": "2", "function": {"name": "f", "arguments": '{"a": "bob\\u0040example.com", "a": 1}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": f"aws {key}"},
            {"role": "user", "content": "Write to ann@example.net"},
        ],
        "metadata": {"mary@example.com": "x", "phone": "5559876543", "card": 4242424242424242},
        "safety_identifier": "person-4711",
    }
    with running_gateway(FakeModels(), capture=settings) as url:
        assert ask(url, **fields)[0] == 200
    stored = traffic.read_stored_bytes(settings.folder)
    secrets = (SUBJECT, card, key, "john", "5551234567", "u0031", "ann@", "mary", "5559876543", "person-4711")
    secrets += ("4242424242424242", "bob")
    for secret in secrets:
        assert secret.encode() not in stored, secret
    (row,) = traffic.read_rows(settings)
    assert "Write to <EMAIL>" in row["response"]["choices"][0]["message"]["content"]
    assert row["request"]["messages"][1]["content"] == [{"type": "text", "text": "<EMAIL>"}]
    assert row["tuneline"]["redactions"]["email"] == 5
    assert settings.hash_subject("person-4711").encode() not in stored, "another person's hash is not needed"


def test_schemas_are_redacted_and_seeds_are_not() -> None:
    schema = {"properties": {"role": {"enum": ["eve@example.com"]}, "card": {"const": 4242424242424242}}}
    request = {
        "model": "echo",
        "prompt": "Hello",
        "messages": None,
        "response_format": schema,
        "seed": 4242424242424242,
    }
    facts = AnswerFacts("echo", "7", "", "", None, None, 1.0, "complete", 200, 0.1, 0.1)
    response = {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": "stop", "text": "Hi"}]}
    row = build_row(request, response, facts, timestamp=0, workload="echo", client="team-a")
    assert row["request"].pop("response_format") == {
        "properties": {"role": {"enum": ["<EMAIL>"]}, "card": {"const": "<CREDIT_CARD>"}}
    }
    assert row["request"] == {"model": "echo", "prompt": "Hello", "seed": 4242424242424242}


def test_aborted_and_failed_streams_are_stored_with_their_text(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    with running_gateway(FakeModels(), capture=settings) as url:
        assert ask(url, "break", stream=True)[0] == 200
        assert ask(url, "refuse")[0] == 400, "no answer: not captured"
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        body = {"model": "echo", "messages": [{"role": "user", "content": "endless"}], "user": "a", "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().read(100)
        connection.close()
    states = {row["tuneline"]["state"]: row for row in traffic.read_rows(settings)}
    assert set(states) == {"failed", "aborted"}
    assert states["aborted"]["response"]["choices"][0]["finish_reason"] is None
    assert states["aborted"]["response"]["choices"][0]["message"]["content"].startswith("word ")


@pytest.mark.parametrize(
    ("consent", "header", "stored"),
    [
        ({}, {}, False),
        ({}, {"x-tuneline-consent": "no"}, False),
        ({}, {"X-Tuneline-Consent": " Granted "}, True),
        ({"policy": "unless_refused"}, {}, True),
        ({"policy": "unless_refused"}, {"x-tuneline-consent": "no"}, False),
        ({"header": "X-May-Store", "granted": ["ja"]}, {"x-may-store": "ja"}, True),
        ({"policy": "not_asked"}, {"x-tuneline-consent": "no"}, True),
    ],
)
def test_only_requests_with_consent_are_captured(
    tmp_path: Path, consent: dict[str, Any], header: dict[str, str], stored: bool
) -> None:
    registry = CollectorRegistry()
    capture = TrafficCapture(traffic.load(tmp_path, consent=consent), registry)
    request = capture.select("echo", {"user": SUBJECT}, 100, Headers(header), "team-a")
    capture.close()
    refused = registry.get_sample_value(METRIC, {"model": "echo", "outcome": "no_consent"}) or 0
    assert (request is not None, refused) == (stored, not stored)


def test_author_of_feedback_is_stored_as_a_keyed_hash(tmp_path: Path) -> None:
    capture = TrafficCapture(traffic.load(tmp_path), CollectorRegistry())
    capture.close()
    assert capture.hash_author("reviewer") == traffic.load(tmp_path).hash_subject("reviewer")


def test_models_without_capture_and_requests_without_a_subject_are_not_captured(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    capture = TrafficCapture(traffic.load(tmp_path), registry)
    assert capture.select("other", {"user": SUBJECT}, 100, {}, "team-a") is None
    assert capture.select("echo", {"user": ""}, 100, {}, "team-a") is None
    capture.close()
    assert registry.get_sample_value(METRIC, {"model": "echo", "outcome": "no_subject"}) == 1


def test_sampling_rate_is_the_share_of_captured_requests(tmp_path: Path) -> None:
    capture = TrafficCapture(traffic.load(tmp_path, models={"echo": {"sampling_rate": 0.25}}), CollectorRegistry())
    count = sum(capture.select("echo", {"user": SUBJECT}, 9, {}, "") is not None for _ in range(4000))
    capture.close()
    assert 850 < count < 1150


def test_subject_can_be_the_key_or_a_header(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    secret = api_keys.create_key(keys, "alice", {})
    headers = {"authorization": f"Bearer {secret}", "x-customer": "c-17"}
    for number, (source, subject) in enumerate({"key": "alice", "header X-Customer": "c-17"}.items()):
        key_file = str(tmp_path / "subject.key")
        settings = traffic.load(tmp_path, folder=f"traffic-{number}", subject={"source": source, "key_file": key_file})
        with running_gateway(FakeModels(), capture=settings, keys=keys) as url:
            assert ask(url, headers=headers)[0] == 200
        (row,) = traffic.read_rows(settings)
        assert row["tuneline"]["subject"] == settings.hash_subject(subject)
        assert (row["client_id"] == "alice") == (source != "key"), "the name of the subject is not stored"


def test_only_owner_and_group_can_read(tmp_path: Path) -> None:
    settings = traffic.load(tmp_path)
    with running_gateway(FakeModels(), capture=settings) as url:
        ask(url)
    paths = list(settings.folder.rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) & 0o777 for path in paths if path.is_file()} == {0o640}
    assert {stat.S_IMODE(path.stat().st_mode) & 0o777 for path in [settings.folder, *paths] if path.is_dir()} == {0o750}
