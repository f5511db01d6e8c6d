"""The real Triton server under overload, with cancelled requests and with malformed requests."""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.triton_packaging import triton_config
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.stage import write_repository
from components.triton_packaging.triton_config import INPUTS
from components.triton_packaging.triton_server import Server, running_server
from tests.tiny import tiny_model
from tests.triton_packaging.conftest import MAX_REQUESTS
from tests.triton_packaging.triton_clients import (
    ResponseQueue,
    build_tensors,
    cancel_answer,
    generate_with_transformers,
    infer_grpc,
    open_stream,
    read_answer,
    read_counts,
    stream_grpc,
)

pytestmark = pytest.mark.triton

LONG_REQUEST = {"text_input": "Name the fox.", "max_tokens": 64}
# The answer, greedy by top_k, reaches max_tokens: a full queue of such requests takes longer than SLOT_RELEASE_SECONDS.
SLOW_REQUEST = {"text_input": "Name the fox.", "max_tokens": 1000, "temperature": 1.0, "top_k": 1}
SLOT_RELEASE_SECONDS = 4.0


@contextmanager
def saturate(server: Server) -> Iterator[list[tuple[Any, Any]]]:
    """Open slow streams until the server rejects one: all slots are occupied. At the end, cancel all.

    Yield a list of results and errors, which contains all of them at the end.

    A fixed number of streams is not enough: on a loaded machine the first streams end before the last ones begin.
    """
    with ExitStack() as stack:
        responses, received, count, rejected = ResponseQueue(), list[tuple[Any, Any]](), 0, False
        deadline = time.monotonic() + 60
        while not rejected:
            assert time.monotonic() < deadline, f"{count} streams, and none was rejected"
            stream = open_stream(server, "tiny_stream", responses, request_id=f"{count}", **SLOW_REQUEST)
            client, _ = stack.enter_context(stream)
            stack.callback(cancel_answer, client, "tiny_stream", f"{count}")
            count += 1
            time.sleep(0.02)
            while not rejected and not responses.empty():
                received.append(responses.get())
                rejected = received[-1][1] is not None
        yield received
    while not responses.empty():
        received.append(responses.get())


def wait_for_free_slots(server: Server, seconds: float = SLOT_RELEASE_SECONDS) -> bool:
    """Return whether all slots accept requests within `seconds`. Slow requests that still run would hold their slots longer."""

    def request_token(_: int) -> str:
        try:
            infer_grpc(server, "tiny", **{**LONG_REQUEST, "max_tokens": 1})
        except InferenceServerException as error:
            return str(error)
        return ""

    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(16) as pool:
        while time.monotonic() < deadline:
            errors = list(filter(None, pool.map(request_token, range(16))))
            if not errors:
                return True
            assert all("queue positions are occupied" in error for error in errors), errors
    return False


def test_full_queue_rejects_and_cancelled_streams_free_it(server: Server) -> None:
    with saturate(server) as received:
        with pytest.raises(
            InferenceServerException, match=f"all {MAX_REQUESTS} slots and queue positions are occupied"
        ) as error:
            infer_grpc(server, "tiny", **LONG_REQUEST)
        assert "UNAVAILABLE" in error.value.status()
        with pytest.raises(InferenceServerException, match="slots and queue positions are occupied; retry later"):
            stream_grpc(server, "tiny_stream", **LONG_REQUEST)
    assert wait_for_free_slots(server)
    results = [result for result, error in received if error is None]
    begun = {result.get_response().id for result in results}
    assert begun > {result.get_response().id for result in results if read_counts(result)["finish_reason"]}


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


def build_malformed_request(rng: random.Random) -> tuple[str, list[grpc.InferInput]]:
    """Return the model and the inputs of a request that is probably invalid."""
    texts = ["", "a", "\ud800", "ä" * 300, "[]", "{}", '[{"role": "king", "content": 3}]', '[{"role": "user"}]']
    numbers = [-1, 0, 1, 2**31 - 1, float("nan"), float("inf"), 1.5]
    inputs = []
    for name in {"text_input" if rng.random() < 0.5 else "messages", *rng.sample([*INPUTS, "x"], rng.randrange(4))}:
        kind = rng.choice(["BYTES", "INT32", "INT64", "FP32", "BOOL", "FP64"]) if rng.random() < 0.3 else "BYTES"
        if name in INPUTS and rng.random() < 0.8:
            kind = INPUTS[name][0].removeprefix("TYPE_").replace("STRING", "BYTES")
        shape = rng.choice([[1], [1], [1], [0], [2], [1, 1]])
        drawn = [rng.choice(texts if kind == "BYTES" else numbers) for _ in range(math.prod(shape))]
        values = [text.encode(errors="surrogatepass") if isinstance(text, str) else text for text in drawn]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NaN and infinity have no integer
            array = np.array(values).astype(triton_to_np_dtype(kind)).reshape(shape)
        inputs.append(grpc.InferInput(name, shape, kind))
        inputs[-1].set_data_from_numpy(array)
    return rng.choice(["tiny", "tiny_stream"]), inputs


def test_malformed_requests_are_rejected_and_the_next_one_is_answered(
    server: Server, golden_answers: list[dict[str, Any]]
) -> None:
    rng = random.Random(7)
    errors: list[InferenceServerException] = []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        for model, inputs in [build_malformed_request(rng) for _ in range(500)]:
            responses = ResponseQueue()
            client.start_stream(lambda result, error, responses=responses: responses.put((result, error)))
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            _, error = responses.get(timeout=60)
            client.stop_stream()
            errors.extend([error] if error else [])
    assert not any("Traceback" in str(error) or "internal error" in str(error) for error in errors)
    assert len(errors) > 300
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


def third_request_is_rejected(server: Server) -> bool:
    """Begin two slow streams and return whether the server rejects a third while both run. Cancel both."""
    with ExitStack() as stack:
        queues = []
        for number in range(2):
            stream = open_stream(server, "tiny_stream", request_id=f"{number}", **SLOW_REQUEST)
            client, responses = stack.enter_context(stream)
            stack.callback(cancel_answer, client, "tiny_stream", f"{number}")
            if responses.get(timeout=60)[1] is not None:
                return False
            queues.append(responses)
        _, third = stack.enter_context(open_stream(server, "tiny_stream", **LONG_REQUEST))
        error = third.get(timeout=60)[1]
        later = [result for responses in queues for result, _ in list(responses.queue)]
        both_run = not any(read_counts(result)["finish_reason"] for result in later)
        return both_run and "all 1 slots and queue positions are occupied" in str(error)


@pytest.mark.long
def test_streams_are_divided_among_the_instances_of_a_model(base_model: LoadableModel, tmp_path: Path) -> None:
    """Two instances stand for two GPUs; each accepts one request. Long: starts its own server."""
    config = TritonPackagingConfig(model_name="tiny", prove=False, slots=1, max_queue=0, max_tokens=1000)
    write_repository(base_model, tmp_path, config, "float32")
    triton = triton_config.read_config(tmp_path / "tiny")
    triton.instance_group[0].count = 2
    triton_config.write_config(tmp_path / "tiny", triton)
    with running_server(tmp_path, log=tmp_path / "log") as server:
        expected = stream_grpc(server, "tiny_stream", **LONG_REQUEST).text
        time.sleep(1)  # until the streaming model knows both instances
        deadline, rejected = time.monotonic() + 60, False
        while not rejected:  # on a loaded machine a stream may end before the third request
            assert time.monotonic() < deadline, "two streams did not run at the same time"
            rejected = third_request_is_rejected(server)
            time.sleep(1)  # until the slots are free
        assert stream_grpc(server, "tiny_stream", **LONG_REQUEST).text == expected
    assert "cannot be listed" not in (tmp_path / "log").read_text()


@pytest.mark.long
def test_stopping_server_finishes_answers_and_refuses_requests(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    """The messages of a full queue and of a stopping server differ, so that clients know which one to expect to end.

    Long: starts its own server, which it stops.
    """
    write_repository(base_model, tmp_path, unproven_config, "float32")
    complete = ResponseQueue()
    with running_server(tmp_path, log=tmp_path / "log") as server, ExitStack() as stack:
        expected = infer_grpc(server, "tuneline", **SLOW_REQUEST)["text_output"]
        client = stack.enter_context(grpc.InferenceServerClient(server.grpc_url))
        client.async_infer("tuneline", build_tensors(SLOW_REQUEST), lambda result, error: complete.put((result, error)))
        _, streamed = stack.enter_context(open_stream(server, "tuneline_stream", **SLOW_REQUEST))
        deadline = time.monotonic() + 60
        while streamed.qsize() < 5:  # the server has then accepted both requests: it refuses those after the signal
            assert time.monotonic() < deadline, "the streamed answer did not begin"
            time.sleep(0.001)
        server.process.terminate()
        errors = []
        for request, model in ((infer_grpc, "tuneline"), (stream_grpc, "tuneline_stream")):
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:  # until the server handles the signal, it accepts requests
                try:
                    request(server, model, **{**LONG_REQUEST, "max_tokens": 1})
                except InferenceServerException as error:
                    if "scheduler for model has stopped" in error.message():  # between the signal and the unloading
                        continue
                    errors.append((error.status(), error.message()))
                    break
        result, error = complete.get(timeout=120)
        assert error is None, error
        assert result.as_numpy("text_output")[0].decode() == expected
        assert read_answer(streamed).text == expected
    assert errors == [
        ("StatusCode.NOT_FOUND", "Request for unknown model: 'tuneline' has no available versions"),
        (None, "Request for unknown model: 'tuneline_stream' has no available versions"),
    ]


def test_streaming_model_reports_that_the_engine_model_is_not_loaded(
    base_model: LoadableModel, tmp_path: Path, unproven_config: TritonPackagingConfig
) -> None:
    write_repository(base_model, tmp_path, unproven_config, "float32")
    models = [triton_config.stream_model_name("tuneline")]
    with (
        running_server(tmp_path, models=models, log=tmp_path / "log") as server,
        pytest.raises(InferenceServerException, match="the engine model tuneline version 1 is not loaded"),
    ):
        stream_grpc(server, "tuneline_stream", text_input="a")
