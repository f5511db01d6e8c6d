"""The real Triton server with more requests than it takes, with cancelled ones, and with requests that make no sense."""

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

from components.common import models
from components.common.models import Model
from components.triton_packaging import pbtxt
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.server import Server, running_server
from components.triton_packaging.stage import write_repository
from tests.tiny import tiny_model
from tests.triton_packaging.clients import (
    Came,
    by_transformers,
    infer,
    open_stream,
    over_grpc,
    post,
    streamed,
    tensors,
    text,
)
from tests.triton_packaging.conftest import CAPACITY

pytestmark = pytest.mark.triton

LONG = {"text_input": "Name the fox.", "max_tokens": 64}
# This answer, drawn from the best token alone, does not end by itself: as many as the model takes keep it busy for longer than SOON.
SLOW = {"text_input": "Name the fox.", "max_tokens": 1000, "temperature": 1.0, "top_k": 1}
SOON = 4.0


@contextmanager
def full(server: Server) -> Iterator[Callable[[], None]]:
    """A model that has as many slow streams as it takes: as many again were refused. And how to cancel them all."""
    with ExitStack() as stack:
        came = Came()
        streams = [stack.enter_context(open_stream(server, "tiny_stream", came, **SLOW)) for _ in range(2 * CAPACITY)]
        refused = 0
        while refused < CAPACITY:
            refused += came.get(timeout=60)[1] is not None

        def cancel() -> None:
            for client, _ in streams:
                client.stop_stream(cancel_requests=True)

        yield cancel


def freed(server: Server, seconds: float = SOON) -> bool:
    """Whether as many requests as there are slots are taken at once within this time. Slow ones would hold theirs for longer."""
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(16) as pool:
        while time.monotonic() < until:
            answers = list(pool.map(lambda _: post(server, "tiny/generate", {**LONG, "max_tokens": 1}), range(16)))
            if all(status == 200 for status, _ in answers):
                return True
            assert all(status == 200 or "which is the most" in answer for status, answer in answers), answers
    return False


def test_a_full_queue_refuses_and_cancelled_streams_free_it_at_once(served: Server) -> None:
    with full(served) as cancel:
        with pytest.raises(InferenceServerException, match=f"{CAPACITY} requests are being answered or wait for it") as refused:
            over_grpc(served, "tiny", **LONG)
        assert "UNAVAILABLE" in refused.value.status()
        with pytest.raises(InferenceServerException, match="which is the most; ask again later"):
            streamed(served, "tiny_stream", **LONG)
        cancel()
        assert freed(served)


def test_cancelled_unary_requests_free_their_slots(served: Server) -> None:
    results: list[Any] = []
    with grpc.InferenceServerClient(served.grpc_url) as client:
        calls = [client.async_infer("tiny", tensors(SLOW), lambda result, error: results.append(error)) for _ in range(2 * CAPACITY)]
        until = time.monotonic() + 60
        while len(results) < CAPACITY and time.monotonic() < until:
            time.sleep(0.01)
        assert sum("UNAVAILABLE" in str(error) for error in results) >= CAPACITY - 4  # a few were answered meanwhile
        for call in calls:
            call.cancel()
        assert freed(served)


def test_a_client_that_hangs_up_a_generate_stream_frees_its_slots(served: Server) -> None:
    body = json.dumps(SLOW).encode()
    head = f"POST /v2/models/tiny_stream/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((served.host, served.http_port))) for _ in range(2 * CAPACITY)]
        for client in clients:
            client.sendall(head + body)
        until = time.monotonic() + 60
        said = dict.fromkeys(clients, b"")
        while sum(b"which is the most" in text for text in said.values()) < CAPACITY and time.monotonic() < until:
            for client in select.select(clients, [], [], 1)[0]:
                said[client] += client.recv(1 << 16)
        assert sum(b"which is the most" in text for text in said.values()) == CAPACITY, "as many again as are taken are refused"
    assert freed(served)


# The server's own errors for a body that is no JSON, and for one whose values are of the wrong JSON type.
PARSING = ("failed to parse the request JSON buffer", "Unable to parse")


def malformed(rng: random.Random) -> tuple[str, bytes]:
    """A request that is likely to be wrong somewhere: path and body."""
    values = [None, True, -1, 0, 2**31, 2**64, 1.5, -0.1, 1e400, "", "a", "\ud800", "ä" * 300, [], ["a", "b"], [None], {}, {"a": 1}, [[1]]]
    conversation = json.dumps([{"role": rng.choice(["user", "king", 3]), "content": rng.choice(values)}])
    names = ["text_input", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "apply_chat_template", "id", "x"]
    fields = {rng.choice(names): rng.choice([*values, conversation]) for _ in range(rng.randrange(5))}
    if rng.random() < 0.5:
        fields["text_input"] = "a"
    kinds = ["BYTES", "INT32", "INT64", "FP32", "BOOL", "FP64", "?"]
    shapes = [[1], [], [0], [-1], [2], [1, 1], ["1"], None]
    tensor = {"name": rng.choice(names), "datatype": rng.choice(kinds), "shape": rng.choice(shapes), "data": rng.choice(values)}
    path, body = rng.choice([("generate", fields), ("generate_stream", fields), ("infer", infer(tensor, text()))])
    model = "tiny" if path == "infer" else rng.choice(["tiny", "tiny_stream"])
    data = json.dumps(body).encode()
    if rng.random() < 0.2:  # a body that is cut, or has a byte changed
        place = rng.randrange(len(data))
        data = data[:place] + rng.choice([b"", bytes([rng.randrange(256)]) + data[place + 1 :]])
    return f"{model}/{path}", data


def test_five_hundred_malformed_requests_are_refused_and_the_next_good_one_is_answered(
    served: Server, golden: list[dict[str, Any]]
) -> None:
    rng = random.Random(7)
    requests = [malformed(rng) for _ in range(500)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: post(served, *request), requests))
    broken = [(status, answer, *asked) for (status, answer), asked in zip(answers, requests, strict=True)
              if status >= 500 and not any(said in answer for said in PARSING)]  # fmt: skip
    assert broken == []
    assert not any("Traceback" in answer or "internal error" in answer for _, answer in answers)
    assert sum(status >= 400 for status, _ in answers) > 300
    assert over_grpc(served, "tiny", text_input=golden[0]["prompt"], max_tokens=12)["text_output"] == golden[0]["text"]


def test_generation_settings_that_cannot_be_batched_are_kept_by_answering_one_by_one(tmp_path: Path, quick: TritonPackagingConfig) -> None:
    folder = tiny_model(tmp_path / "base", seed=3)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "repetition_penalty": 1.3}))
    model = models.open_model(folder)
    write_repository(model, tmp_path / "repository", quick, "float32")
    with running_server(tmp_path / "repository", log=tmp_path / "log") as server:
        answers = [over_grpc(server, "tuneline", **LONG)["text_output"], streamed(server, "tuneline_stream", **LONG).text]
    assert "answered one by one" in (tmp_path / "log").read_text()
    assert "RepetitionPenalty" in (tmp_path / "log").read_text()
    assert answers == [by_transformers(model, "Name the fox.", 64)] * 2


def test_the_streaming_model_says_that_the_other_one_is_not_loaded(tiny_base: Model, tmp_path: Path, quick: TritonPackagingConfig) -> None:
    write_repository(tiny_base, tmp_path, quick, "float32")
    with running_server(tmp_path, models=[pbtxt.stream_name("tuneline")], log=tmp_path / "log") as server:
        status, answer = post(server, "tuneline_stream/generate_stream", {"text_input": "a"})
    assert (status, "the model tuneline version 1, which answers, is not loaded" in answer) == (400, True), answer
