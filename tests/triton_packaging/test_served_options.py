"""The real Triton server over gRPC: JSON schemas, log-probabilities, penalties and tools, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from components.triton_packaging.triton_config import INPUTS, OUTPUTS
from components.triton_packaging.triton_server import Server
from tests.triton_packaging.test_generation_options import SCHEMA
from tests.triton_packaging.triton_clients import (
    StreamedAnswer,
    cancel_answer,
    infer_grpc,
    open_stream,
    read_counts,
    stream_grpc,
)

pytestmark = pytest.mark.triton

REQUEST: dict[str, Any] = {"text_input": "Name the fox.", "max_tokens": 48}
CONSTRAINED = {**REQUEST, "json_schema": json.dumps(SCHEMA)}


def request_whole(server: Server, **fields: Any) -> StreamedAnswer:
    answer = infer_grpc(server, "tiny", **fields)
    return StreamedAnswer([answer.pop("text_output")], **answer)


def request_stream(server: Server, **fields: Any) -> StreamedAnswer:
    return stream_grpc(server, "tiny_stream", **fields)


Request = Callable[..., StreamedAnswer]
each_model = pytest.mark.parametrize("request_answer", [request_whole, request_stream], ids=["whole", "stream"])


@pytest.mark.parametrize("model", ["tiny", "tiny_stream"])
def test_metadata_lists_the_optional_fields(server: Server, model: str) -> None:
    """A client detects by them which fields a package supports."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        metadata = client.get_model_metadata(model)
    assert {tensor.name for tensor in metadata.inputs} == set(INPUTS)
    assert {tensor.name for tensor in metadata.outputs} == set(OUTPUTS)


@each_model
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.4, "seed": 5}], ids=["greedy", "sampled"])
def test_constrained_answer_is_valid(server: Server, request_answer: Request, sampling: dict[str, Any]) -> None:
    answer = request_answer(server, **CONSTRAINED, **sampling)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert answer.finish_reason == "stop"
    assert answer.logprobs is None
    assert request_answer(server, **CONSTRAINED, **sampling).text == answer.text


def test_constrained_and_free_answers_share_a_batch(server: Server) -> None:
    requests = [REQUEST, CONSTRAINED, {**REQUEST, "logprobs": 1}, {**CONSTRAINED, "temperature": 1.2, "seed": 8}] * 3
    expected = [request_whole(server, **request).text for request in requests[:4]] * 3
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: request_stream(server, **request), requests))
    assert [answer.text for answer in answers] == expected


@each_model
def test_stop_string_ends_a_constrained_answer(server: Server, request_answer: Request) -> None:
    answer = request_answer(server, **CONSTRAINED, stop=['"kind"'])
    assert answer.text in ('{"is_open": true, ', '{"is_open": false, ')
    assert answer.finish_reason == "stop"


@each_model
def test_one_logprob_entry_is_reported_per_token(server: Server, request_answer: Request) -> None:
    answer = request_answer(server, **REQUEST, logprobs=3)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == answer.completion_tokens
    data = b"".join(bytes(entry["bytes"]) for entry in answer.logprobs)
    assert data.decode(errors="replace").removesuffix("<|im_end|>") == answer.text
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3 for entry in answer.logprobs)
    # A greedy answer consists of the best tokens.
    assert [entry["token"] for entry in answer.logprobs] == [
        entry["top_logprobs"][0]["token"] for entry in answer.logprobs
    ]
    assert answer.text == request_answer(server, **REQUEST).text


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server) -> None:
    whole, streamed = (request(server, **REQUEST, logprobs=0) for request in (request_whole, request_stream))
    assert [entry["token"] for entry in streamed.logprobs or []] == [entry["token"] for entry in whole.logprobs or []]
    assert len(streamed.pieces) > 2


@each_model
def test_logprobs_end_with_the_stop_string(server: Server, request_answer: Request) -> None:
    text = request_answer(server, **REQUEST).text
    answer = request_answer(server, **REQUEST, logprobs=0, stop=[text[len(text) // 2 :][:3]])
    assert answer.logprobs is not None
    assert len(answer.logprobs) == answer.completion_tokens < 48


@each_model
def test_penalties_change_the_answer(server: Server, request_answer: Request) -> None:
    penalized = request_answer(server, **REQUEST, frequency_penalty=2.0, presence_penalty=2.0)
    assert penalized.text != request_answer(server, **REQUEST).text


@each_model
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": '{"type": "object", "not": {}}'}, r'json_schema is invalid: Unimplemented keys: \["not"\]'),
        ({"json_schema": "[]"}, r"json_schema is \[\]; expected a JSON object"),
        (
            {"json_schema": '{"type": "string", "pattern": "^(([a-z]{1,50}|[a-y]{1,50}|b.*c){1,50}x){1,50}$"}'},
            "json_schema is too complex: lexer error",
        ),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"presence_penalty": -3.0}, "presence_penalty is -3; it must be from -2 to 2"),
        (
            {"tools": '[{"type": "function", "function": {"name": "f"}}]'},
            "tools are not supported: the model's chat template ignores them",
        ),
    ],
)
def test_invalid_option_is_rejected(
    server: Server, request_answer: Request, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message):
        request_answer(server, **REQUEST, **fields)


def test_cancelled_constrained_answer_frees_its_slot(server: Server) -> None:
    """More answers are cancelled than the server has slots and queue positions; a further one is answered."""
    endless = {**REQUEST, "max_tokens": 1000, "json_schema": '{"type": "string", "minLength": 5000}'}
    for number in range(30):
        with open_stream(server, "tiny_stream", request_id=f"{number}", **endless) as (client, responses):
            assert responses.get(timeout=60)[1] is None
            cancel_answer(client, "tiny_stream", f"{number}")
        chunks = [responses.get() for _ in range(responses.qsize())]
        assert not any(error or read_counts(result)["finish_reason"] for result, error in chunks)
    assert request_stream(server, **CONSTRAINED).finish_reason == "stop"
