"""Server-sent events and refusals of servers, as `tuneline chat` reads them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from components.common.runtime.errors import EngineMissingError, TunelineError, UsageError
from pipelines.gateway.chat_client import Answer, ChatClient, read_events

PIECE = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
ASK = [{"role": "user", "content": "Hello"}]


@contextmanager
def serving(status: int, body: bytes, **headers: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the URL of a server that gives one response, and the headers of its requests."""
    requests: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815 - names of the standard library

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


def stream(url: str, key: str = "") -> Answer:
    answer = Answer()
    for _ in ChatClient(url, key).stream(answer, "m", ASK, {}):
        pass
    return answer


def test_events_end_at_done_and_other_lines_are_skipped() -> None:
    lines = [b": comment\n", b"event: message\r\n", b'data:{"a": 1}\r\n', b"\n", b"data:\n", b'data: {"b": 2}\n']
    assert list(read_events([*lines, b"data: [DONE]\n", b'data: {"c": 3}\n'])) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("line", [b"data: {\n", b"data: 3\n", b"data: []\n", b"data: \xff\n"])
def test_event_that_is_not_an_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        list(read_events([line]))


def test_answer_has_text_times_usage_and_version() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    with serving(200, PIECE + PIECE + usage + END, x_tuneline_model_version="4") as (url, requests):
        answer = stream(f"{url}/v1/", "secret")
    assert (answer.text, answer.finish_reason, answer.version) == ("HiHi", "stop", "4")
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 2}
    assert answer.first_token_seconds is not None
    assert 0 < answer.first_token_seconds <= answer.seconds
    assert (requests[0]["path"], requests[0]["authorization"]) == ("/v1/chat/completions", "Bearer secret")


@pytest.mark.parametrize(
    ("status", "body", "expected", "message"),
    [
        (401, b'{"error": {"message": "no key"}}', UsageError, "returned status 401: no key"),
        (404, b'{"detail": "Not Found here"}', UsageError, "Not Found here"),
        (400, b"<html>", UsageError, "returned status 400: Bad Request"),
        (429, b'{"error": "slow down"}', EngineMissingError, "slow down"),
        (503, b"", EngineMissingError, "Service Unavailable"),
        (307, b"", UsageError, "status 307"),
        (200, PIECE, EngineMissingError, "the connection closed before the answer was complete"),
        (200, PIECE + b"data: {\n\n", EngineMissingError, "the answer was interrupted"),
        (200, PIECE + b'data: {"choices": 3}\n\n', EngineMissingError, "the answer was interrupted"),
        (200, PIECE + b'data: {"error": {"message": "out of memory"}}\n\n', EngineMissingError, "out of memory"),
    ],
)
def test_failures_are_explained(status: int, body: bytes, expected: type[TunelineError], message: str) -> None:
    with serving(status, body) as (url, _), pytest.raises(expected, match=message):
        stream(url)


def test_key_is_not_sent_to_the_target_of_a_redirect() -> None:
    with (
        serving(200, END) as (other, requests),
        serving(307, b"", location=other) as (url, _),
        pytest.raises(UsageError, match="status 307"),
    ):
        stream(url, "secret")
    assert requests == []


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://host:port", "http://host:99999"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of a server"):
        ChatClient(url)


def test_password_and_unusable_key_are_refused_and_not_repeated() -> None:
    for url, key in (("http://user:hunter2@host", ""), ("http://host", "hunter2\n"), ("http://host", "hunter2ü")):
        with pytest.raises(UsageError) as caught:
            ChatClient(url, key)
        assert "hunter2" not in caught.value.message + caught.value.hint


def test_server_that_does_not_answer_or_has_no_models_is_named() -> None:
    with pytest.raises(EngineMissingError, match=r"http://127\.0\.0\.1:9/v1: "):
        ChatClient("http://127.0.0.1:9").list_models()
    with serving(200, b'{"models": []}') as (url, _), pytest.raises(EngineMissingError, match="not a list of models"):
        ChatClient(url).list_models()
