"""The real Triton server: streamed answers, concurrent clients and reported errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from components.common.models.model_loading import LoadableModel
from components.triton_packaging.triton_server import Server
from tests.triton_packaging.triton_clients import (
    build_tensors,
    generate_with_transformers,
    infer_grpc,
    open_stream,
    stream_grpc,
)

pytestmark = pytest.mark.triton

LONG_REQUEST = {"text_input": "Name the fox.", "max_tokens": 64}


def test_streamed_pieces_form_the_complete_answer(server: Server, golden_answers: list[dict[str, Any]]) -> None:
    for expected in golden_answers:
        streamed = stream_grpc(server, "tiny_stream", text_input=expected["prompt"], max_tokens=12)
        assert streamed.text == expected["text"]
        assert streamed.prompt_tokens == expected["prompt_tokens"]
        assert len(streamed.pieces) > 2


def test_streamed_answer_has_the_same_counts_and_finish_reason(server: Server) -> None:
    expected = infer_grpc(server, "tiny", **LONG_REQUEST)
    answer = stream_grpc(server, "tiny_stream", **LONG_REQUEST)
    assert (answer.finish_reason, answer.completion_tokens, answer.text) == (
        expected["finish_reason"],
        expected["completion_tokens"],
        expected["text_output"],
    )


def test_stream_ends_before_the_stop_string(server: Server) -> None:
    full = infer_grpc(server, "tiny", **LONG_REQUEST)["text_output"]
    stop = full[len(full) // 2 :][:3]
    answer = stream_grpc(server, "tiny_stream", **LONG_REQUEST, stop=["never there", stop])
    assert answer.text == full[: full.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.completion_tokens == infer_grpc(server, "tiny", **LONG_REQUEST, stop=[stop])["completion_tokens"] < 64


def test_unary_model_streams_its_answer_in_one_response(server: Server, golden_answers: list[dict[str, Any]]) -> None:
    answer = stream_grpc(server, "tiny", text_input=golden_answers[0]["prompt"], max_tokens=12)
    assert answer.pieces == [golden_answers[0]["text"]]


def test_sixteen_concurrent_clients_get_the_same_texts_as_alone(server: Server) -> None:
    requests = [
        {"text_input": f"Say {'the number ' * (number % 5)}{number}.", "max_tokens": 20 + 2 * number}
        for number in range(16)
    ]
    expected = [infer_grpc(server, "tiny", **request)["text_output"] for request in requests]
    assert len(set(expected)) == 16

    def request_text(number: int) -> str:
        if number % 2:
            return stream_grpc(server, "tiny_stream", **requests[number]).text
        return str(infer_grpc(server, "tiny", **requests[number])["text_output"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(request_text, range(16))) == expected


def test_seeded_answers_are_reproducible_under_concurrency(server: Server) -> None:
    request = {**LONG_REQUEST, "temperature": 1.2, "top_p": 0.95, "top_k": 50}
    expected = [infer_grpc(server, "tiny", **request, seed=seed)["text_output"] for seed in (1, 2, 3)]
    assert len(set(expected)) == 3
    cases = [(seed, is_streamed) for seed in (1, 2, 3) for is_streamed in (True, False)]

    def request_text(case: tuple[int, bool]) -> str:
        seed, is_streamed = case
        if is_streamed:
            return stream_grpc(server, "tiny_stream", **request, seed=seed).text
        return str(infer_grpc(server, "tiny", **request, seed=seed)["text_output"])

    with ThreadPoolExecutor(10) as pool:
        concurrent = [pool.submit(infer_grpc, server, "tiny", **LONG_REQUEST) for _ in range(4)]
        assert list(pool.map(request_text, cases)) == [expected[seed - 1] for seed, _ in cases]
        assert len({future.result()["text_output"] for future in concurrent}) == 1


def test_prompt_longer_than_one_step_is_answered(server: Server, adapted_model: LoadableModel) -> None:
    prompt = "Open the file, read every line. " * 110
    answer = infer_grpc(server, "tiny", text_input=prompt, max_tokens=24)
    assert answer["prompt_tokens"] > 1024
    assert answer["text_output"] == generate_with_transformers(adapted_model, prompt, 24)


@pytest.mark.parametrize(
    ("model", "fields", "status", "message"),
    [
        ("tiny", {"text_input": ""}, "INVALID_ARGUMENT", "text_input is empty"),
        ("tiny", {"max_tokens": 3}, "INVALID_ARGUMENT", "send exactly one"),
        ("tiny", {"text_input": ["a", "b"]}, "INVALID_ARGUMENT", "unexpected shape"),
        ("tiny", {"text_input": 1}, "INVALID_ARGUMENT", "expects 'BYTES'"),
        ("tiny", {"text_input": "a", "mood": "good"}, "INVALID_ARGUMENT", "unexpected inference input"),
        ("nobody", {"text_input": "a"}, "NOT_FOUND", "unknown model"),
        ("tiny_stream", {"text_input": "a"}, "UNIMPLEMENTED", "decoupled"),
    ],
)
def test_grpc_status_names_the_kind_of_error(
    server: Server, model: str, fields: dict[str, Any], status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as error:
        infer_grpc(server, model, **fields)
    assert status in str(error.value.status())


def test_grpc_stream_continues_after_an_error(server: Server, golden_answers: list[dict[str, Any]]) -> None:
    with open_stream(server, "tiny_stream", text_input="a", top_p=0.0) as (client, responses):
        _, error = responses.get(timeout=60)
        assert "top_p is 0" in str(error)
        client.async_stream_infer(
            "tiny_stream", build_tensors({"text_input": golden_answers[0]["prompt"], "max_tokens": 1})
        )
        result, error = responses.get(timeout=60)
        assert error is None
        assert golden_answers[0]["text"].startswith(result.as_numpy("text_output")[0].decode())
