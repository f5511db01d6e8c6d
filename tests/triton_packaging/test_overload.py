"""The real Triton server under overload, with cancelled requests and with malformed requests."""

from __future__ import annotations

import json
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.triton_packaging import triton_config
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import write_repository
from components.triton_packaging.triton_server import Server, running_server
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import MAX_REQUESTS
from tests.triton_packaging.triton_clients import (
    ResponseQueue,
    build_infer_body,
    build_tensors,
    build_text_tensor,
    generate_with_transformers,
    infer_grpc,
    open_stream,
    post,
    stream_grpc,
)

pytestmark = pytest.mark.triton

LONG_REQUEST = {"text_input": "Name the fox.", "max_tokens": 64}
# The answer, greedy by top_k, reaches max_tokens: a full queue of such requests takes longer than SLOT_RELEASE_SECONDS.
SLOW_REQUEST = {"text_input": "Name the fox.", "max_tokens": 1000, "temperature": 1.0, "top_k": 1}
SLOT_RELEASE_SECONDS = 4.0


@contextmanager
def saturate(server: Server) -> Iterator[Callable[[], None]]:
    """Open slow streams until the server rejects one: all slots are occupied. Yield a function that cancels all.

    A fixed number of streams is not enough: on a loaded machine the first streams end before the last ones begin.
    """
    with ExitStack() as stack:
        responses, streams, rejected = ResponseQueue(), [], False
        deadline = time.monotonic() + 60
        while not rejected:
            assert time.monotonic() < deadline, f"{len(streams)} streams, and none was rejected"
            streams.append(stack.enter_context(open_stream(server, "tiny_stream", responses, **SLOW_REQUEST)))
            time.sleep(0.02)
            while not rejected and not responses.empty():
                rejected = responses.get()[1] is not None

        def cancel() -> None:
            for client, _ in streams:
                client.stop_stream(cancel_requests=True)

        yield cancel


def wait_for_free_slots(server: Server, seconds: float = SLOT_RELEASE_SECONDS) -> bool:
    """Return whether all slots accept requests within `seconds`. Slow requests that still run would hold their slots longer."""
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(16) as pool:
        while time.monotonic() < deadline:
            answers = list(
                pool.map(lambda _: post(server, "tiny/generate", {**LONG_REQUEST, "max_tokens": 1}), range(16))
            )
            if all(status == 200 for status, _ in answers):
                return True
            assert all(status == 200 or "queue positions are occupied" in answer for status, answer in answers), answers
    return False


def test_full_queue_rejects_and_cancelled_streams_free_it(server: Server) -> None:
    with saturate(server) as cancel:
        with pytest.raises(
            InferenceServerException, match=f"all {MAX_REQUESTS} slots and queue positions are occupied"
        ) as error:
            infer_grpc(server, "tiny", **LONG_REQUEST)
        assert "UNAVAILABLE" in error.value.status()
        with pytest.raises(InferenceServerException, match="slots and queue positions are occupied; retry later"):
            stream_grpc(server, "tiny_stream", **LONG_REQUEST)
        cancel()
        assert wait_for_free_slots(server)


def test_cancelled_unary_requests_free_their_slots(server: Server) -> None:
    results: list[Any] = []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        calls = [
            client.async_infer("tiny", build_tensors(SLOW_REQUEST), lambda result, error: results.append(error))
            for _ in range(2 * MAX_REQUESTS)
        ]
        deadline = time.monotonic() + 60
        while len(results) < MAX_REQUESTS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (
            sum("UNAVAILABLE" in str(error) for error in results) >= MAX_REQUESTS - 4
        )  # a few requests may have finished
        for call in calls:
            call.cancel()
        assert wait_for_free_slots(server)


def test_disconnected_generate_stream_client_frees_its_slots(server: Server) -> None:
    body = json.dumps(SLOW_REQUEST).encode()
    head = f"POST /v2/models/tiny_stream/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.ports.http)))
            for _ in range(2 * MAX_REQUESTS)
        ]
        for client in clients:
            client.sendall(head + body)
        deadline = time.monotonic() + 60
        responses = dict.fromkeys(clients, b"")
        while (
            sum(b"queue positions are occupied" in response for response in responses.values()) < MAX_REQUESTS
            and time.monotonic() < deadline
        ):
            for client in select.select(clients, [], [], 1)[0]:
                responses[client] += client.recv(1 << 16)
        assert sum(b"queue positions are occupied" in response for response in responses.values()) == MAX_REQUESTS, (
            "as many again as are taken are refused"
        )
    assert wait_for_free_slots(server)


# Triton's errors for a body that is not JSON or has values of a wrong JSON type.
PARSING_ERRORS = ("failed to parse the request JSON buffer", "Unable to parse")


def build_malformed_request(rng: random.Random) -> tuple[str, bytes]:
    """Return path and body of a request that is probably invalid."""
    values = [
        None,
        True,
        -1,
        0,
        2**31,
        2**64,
        1.5,
        -0.1,
        1e400,
        "",
        "a",
        "\ud800",
        "ä" * 300,
        [],
        ["a", "b"],
        [None],
        {},
        {"a": 1},
        [[1]],
    ]
    conversation = json.dumps([{"role": rng.choice(["user", "king", 3]), "content": rng.choice(values)}])
    names = [
        "text_input",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "apply_chat_template",
        "id",
        "x",
    ]
    fields = {rng.choice(names): rng.choice([*values, conversation]) for _ in range(rng.randrange(5))}
    if rng.random() < 0.5:
        fields["text_input"] = "a"
    kinds = ["BYTES", "INT32", "INT64", "FP32", "BOOL", "FP64", "?"]
    shapes = [[1], [], [0], [-1], [2], [1, 1], ["1"], None]
    tensor = {
        "name": rng.choice(names),
        "datatype": rng.choice(kinds),
        "shape": rng.choice(shapes),
        "data": rng.choice(values),
    }
    path, body = rng.choice(
        [("generate", fields), ("generate_stream", fields), ("infer", build_infer_body(tensor, build_text_tensor()))]
    )
    model = "tiny" if path == "infer" else rng.choice(["tiny", "tiny_stream"])
    data = json.dumps(body).encode()
    if rng.random() < 0.2:  # truncate the body or change a byte
        position = rng.randrange(len(data))
        data = data[:position] + rng.choice([b"", bytes([rng.randrange(256)]) + data[position + 1 :]])
    return f"{model}/{path}", data


def test_malformed_requests_are_rejected_and_the_next_one_is_answered(
    server: Server, golden_answers: list[dict[str, Any]]
) -> None:
    rng = random.Random(7)
    requests = [build_malformed_request(rng) for _ in range(500)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: post(server, *request), requests))
    unexpected = [
        (status, answer, *request)
        for (status, answer), request in zip(answers, requests, strict=True)
        if status >= 500 and not any(message in answer for message in PARSING_ERRORS)
    ]
    assert unexpected == []
    assert not any("Traceback" in answer or "internal error" in answer for _, answer in answers)
    assert sum(status >= 400 for status, _ in answers) > 300
    assert (
        infer_grpc(server, "tiny", text_input=golden_answers[0]["prompt"], max_tokens=12)["text_output"]
        == golden_answers[0]["text"]
    )


def test_unbatchable_generation_settings_are_answered_sequentially(
    tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    folder = tiny_model(tmp_path / "base", seed=3)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "repetition_penalty": 1.3}))
    model = model_loading.open_model(folder)
    write_repository(model, tmp_path / "repository", unproven_config, "float32")
    with running_server(tmp_path / "repository", log=tmp_path / "log") as server:
        answers = [
            infer_grpc(server, "tuneline", **LONG_REQUEST)["text_output"],
            stream_grpc(server, "tuneline_stream", **LONG_REQUEST).text,
        ]
    assert "answered one by one" in (tmp_path / "log").read_text()
    assert "RepetitionPenalty" in (tmp_path / "log").read_text()
    assert answers == [generate_with_transformers(model, "Name the fox.", 64)] * 2


def test_streaming_model_reports_that_the_engine_model_is_not_loaded(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    write_repository(base_model, tmp_path, unproven_config, "float32")
    with running_server(tmp_path, models=[triton_config.stream_model_name("tuneline")], log=tmp_path / "log") as server:
        status, answer = post(server, "tuneline_stream/generate_stream", {"text_input": "a"})
    assert (status, "the engine model tuneline version 1 is not loaded" in answer) == (400, True), answer
