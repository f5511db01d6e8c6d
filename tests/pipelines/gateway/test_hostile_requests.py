"""Requests that end an unprotected Triton, and thousands of malformed ones: the service stays up and answers as before.

The attacks are in the fast tier: each takes less than two seconds. The fuzz test and the timeouts are long.
"""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.pipelines.gateway.gateway_process import CHAT, GatewayProcess

pytestmark = pytest.mark.triton
VALID: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8}
GOLDEN = [{**VALID, "messages": [{"role": "user", "content": text}]} for text in ("Name the fox.", "Grüße, 你好", "0")]
FUZZ_REQUESTS = 2_400
INFER_HEAD = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


def ask_golden(gateway: GatewayProcess) -> list[str]:
    answers = [gateway.send("POST", CHAT, body) for body in GOLDEN]
    return [json.loads(content)["choices"][0]["message"]["content"] for _, _, content in answers]


def encode_chunks(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


# Expected status codes; 0: the connection was closed, which may destroy an answer on its way. The first three end the HTTP server of Triton 2.51.
HUGE_SHAPE = b'{"inputs":[{"name":"text_input","shape":[9223372036854775807],"datatype":"BYTES","data":["x"]}]}'
ATTACKS: dict[str, tuple[bytes, set[int]]] = {
    "a huge shape": (INFER_HEAD + b"Content-Length: %d\r\n\r\n" % len(HUGE_SHAPE) + HUGE_SHAPE, {404}),
    "200 kB of brackets": (HEAD + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000, {400}),
    "3.6 MB in chunks of one byte": (encode_chunks(b"[" * 600_000, 1), {400}),
    "a body over the limit": (HEAD + b"Content-Length: 99999999\r\n\r\n" + b"x" * 100_000, {0, 413}),
    "an endless chunked body": (encode_chunks(b" " * 6_000_000, 65_536), {0, 413}),
    "an endless header": (HEAD + b"X-Long: " + b"a" * 300_000, {0, 431}),
    "endless headers": (HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(20_000)), {0, 431}),
    "an endless URL": (b"GET /" + b"a" * 300_000, {0, 431}),
    "endless trailers": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 4_000_000, {0, 400, 413}),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ", {400}),
    "length and chunks": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 50, {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "a compressed body": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", {415}),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_leaves_the_service_up(gateway: GatewayProcess, attack: tuple[bytes, set[int]]) -> None:
    data, expected = attack
    answers = ask_golden(gateway)
    assert status_of(gateway.send_raw(data)) in expected
    assert ask_golden(gateway) == answers
    assert gateway.process.poll() is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "attacker.example"}, 403),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://127.0.0.1:3000"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_a_web_page_cannot_use_a_local_gateway(gateway: GatewayProcess, headers: dict[str, str], status: int) -> None:
    assert gateway.send("POST", CHAT, VALID, headers)[0] == status


def test_answers_allow_no_other_origin(gateway: GatewayProcess) -> None:
    for method, path in (("OPTIONS", CHAT), ("POST", CHAT), ("GET", "/v1/models")):
        headers = gateway.send(method, path, VALID, {"Host": "LOCALHOST.:1", "Origin": "http://localhost:3000"})[1]
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/unknown", 404),
        ("GET", "/v2/repository/index", 404),
        ("POST", "/v2/repository/models/tiny/unload", 404),
        ("POST", "/v2/models/tiny/generate", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/v1/models/..%2F..%2Fetc", 404),
        ("GET", "/%ff%fe", 404),
    ],
)
def test_unknown_paths_and_methods_are_errors_in_the_same_form(
    gateway: GatewayProcess, method: str, path: str, status: int
) -> None:
    got, _, body = gateway.send(method, path)
    message = json.loads(body)["error"]["message"]
    assert (got, bool(message)) == (status, True)
    if path == "/unknown":
        assert message == "GET /unknown: not found; GET /v1/models lists the models, and /chat is the chat page"


def test_errors_of_the_inside_stay_inside(gateway: GatewayProcess) -> None:
    body = gateway.send("POST", CHAT, {**VALID, "messages": [{"role": "user", "content": "x" * 300_000}]})[2].decode()
    assert json.loads(body)["error"]["message"]
    for secret in ("127.0.0.1", "unix:", "grpc", "/tmp", "Traceback", "tiny_stream"):
        assert secret not in body


@pytest.mark.long
def test_slow_heads_and_bodies_are_closed(gateway: GatewayProcess) -> None:
    with (
        socket.create_connection(("127.0.0.1", gateway.port)) as slow_head,
        socket.create_connection(("127.0.0.1", gateway.port)) as slow_body,
    ):
        slow_head.sendall(b"POST / HTTP/1.1\r\nX-Slow: ")
        slow_body.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        slow_head.settimeout(60)
        slow_body.settimeout(60)
        assert b"408" in slow_head.recv(1000)
        assert b"408" in slow_body.recv(1000)


@pytest.mark.long
def test_idle_connections_do_not_keep_others_out(gateway: GatewayProcess) -> None:
    idle = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(500)]
    assert gateway.send("POST", CHAT, VALID)[0] == 200
    for connection in idle:
        connection.close()


def mutate_json(choices: random.Random) -> bytes:
    """Return a valid request with one to three fields replaced by values of other types, or its text damaged."""
    strange: list[Any] = [
        None, True, False, 0, -1, 1.5, 1e308, -1e308, 2**31, 2**63, 2**70, "", "x", "\x00", "😀" * 50, "\u2028", [], {},
        [[]], [None], {"a": {}}, [1] * 100, {"type": "text"}, [{"type": "text", "text": 1}], "a" * 70_000,
    ]  # fmt: skip
    names = [
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop",
        "stream", "stream_options", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "logit_bias",
        "frequency_penalty", "presence_penalty", "prompt", "user", "functions", "__proto__", "self", "extra_body",
    ]  # fmt: skip
    body: dict[str, Any] = json.loads(json.dumps(VALID))
    for _ in range(choices.randint(1, 3)):
        value = choices.choice(strange)
        if choices.random() < 0.4:
            body["messages"][0][choices.choice(["role", "content", "name", "tool_calls", "tool_call_id", "x"])] = value
        else:
            body[choices.choice(names)] = value
        if (
            not isinstance(body.get("messages"), list)
            or not body["messages"]
            or not isinstance(body["messages"][0], dict)
        ):
            break
    data = json.dumps(body).encode()
    if choices.random() < 0.3:
        damaged = bytearray(data)
        for _ in range(choices.randint(1, 8)):
            damaged[choices.randrange(len(damaged))] = choices.randrange(256)
        data = bytes(damaged)
    return data[: choices.randrange(len(data))] if choices.random() < 0.1 else data


@pytest.mark.long
def test_malformed_requests_never_fail_the_gateway(gateway: GatewayProcess) -> None:
    choices = random.Random(20)
    answers, memory = ask_golden(gateway), gateway.get_resident_mib()
    bodies = [mutate_json(choices) for _ in range(FUZZ_REQUESTS)]
    paths = [CHAT, CHAT, CHAT, "/v1/completions"]
    requests = [(choices.choice(paths), body) for body in bodies]

    def send(request: tuple[str, bytes]) -> int:
        return gateway.send("POST", request[0], request[1])[0]

    with ThreadPoolExecutor(2) as pool:  # fewer than the model's slots: no request may meet a full queue
        statuses = Counter(pool.map(send, requests))
    assert sum(statuses.values()) == FUZZ_REQUESTS
    assert not [status for status in statuses if status >= 500], statuses
    assert statuses[400] > FUZZ_REQUESTS / 2
    assert ask_golden(gateway) == answers
    assert gateway.get_resident_mib() < memory + 64
