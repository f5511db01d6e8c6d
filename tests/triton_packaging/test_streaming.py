"""The real Triton server with many clients at once, streamed answers, and the faults it tells."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from components.common.models import Model
from components.triton_packaging.server import Server
from tests.triton_packaging.clients import by_transformers, infer, open_stream, over_grpc, post, streamed, streamed_http, tensors, text

pytestmark = pytest.mark.triton

LONG = {"text_input": "Name the fox.", "max_tokens": 64}
STREAMS = pytest.mark.parametrize("stream", [streamed, streamed_http], ids=["grpc", "generate_stream"])


@STREAMS
def test_a_streamed_answer_is_the_whole_one_in_pieces(served: Server, golden: list[dict[str, Any]], stream: Callable[..., Any]) -> None:
    for answer in golden:
        came = stream(served, "tiny_stream", text_input=answer["prompt"], max_tokens=12)
        assert came.text == answer["text"]
        assert came.prompt_tokens == answer["prompt_tokens"]
        assert len(came.pieces) > 2


@STREAMS
def test_a_streamed_answer_counts_and_ends_like_the_whole_one(served: Server, stream: Callable[..., Any]) -> None:
    whole = over_grpc(served, "tiny", **LONG)
    came = stream(served, "tiny_stream", **LONG)
    assert (came.finish_reason, came.completion_tokens, came.text) == (
        whole["finish_reason"],
        whole["completion_tokens"],
        whole["text_output"],
    )


@STREAMS
def test_a_stop_string_ends_a_stream_before_it(served: Server, stream: Callable[..., Any]) -> None:
    full = over_grpc(served, "tiny", **LONG)["text_output"]
    stop = full[len(full) // 2 :][:3]
    came = stream(served, "tiny_stream", **LONG, stop=["never there", stop])
    assert came.text == full[: full.index(stop)]
    assert came.finish_reason == "stop"
    assert came.completion_tokens == over_grpc(served, "tiny", **LONG, stop=[stop])["completion_tokens"] < 64


def test_the_plain_model_gives_its_whole_answer_in_one_event(served: Server, golden: list[dict[str, Any]]) -> None:
    came = streamed_http(served, "tiny", text_input=golden[0]["prompt"], max_tokens=12)
    assert came.pieces == [golden[0]["text"]]


def test_sixteen_clients_at_once_get_the_texts_they_get_alone(served: Server) -> None:
    requests = [{"text_input": f"Say {'the number ' * (n % 5)}{n}.", "max_tokens": 20 + 2 * n} for n in range(16)]
    alone = [over_grpc(served, "tiny", **request)["text_output"] for request in requests]
    assert len(set(alone)) == 16

    def ask(n: int) -> str:
        if n % 2:
            return streamed(served, "tiny_stream", **requests[n]).text
        return str(over_grpc(served, "tiny", **requests[n])["text_output"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_a_seed_repeats_an_answer_streamed_or_whole_while_others_are_answered(served: Server) -> None:
    how = {**LONG, "temperature": 1.2, "top_p": 0.95, "top_k": 50}
    alone = [over_grpc(served, "tiny", **how, seed=seed)["text_output"] for seed in (1, 2, 3)]
    assert len(set(alone)) == 3
    asked = [(seed, stream) for seed in (1, 2, 3) for stream in (True, False)]

    def again(case: tuple[int, bool]) -> str:
        seed, stream = case
        if stream:
            return streamed(served, "tiny_stream", **how, seed=seed).text
        return str(over_grpc(served, "tiny", **how, seed=seed)["text_output"])

    with ThreadPoolExecutor(10) as pool:
        others = [pool.submit(over_grpc, served, "tiny", **LONG) for _ in range(4)]
        assert list(pool.map(again, asked)) == [alone[seed - 1] for seed, _ in asked]
        assert len({other.result()["text_output"] for other in others}) == 1


def test_a_prompt_longer_than_one_step_is_answered_whole(served: Server, tiny_adapted: Model) -> None:
    prompt = "Open the file, read every line. " * 110
    answer = over_grpc(served, "tiny", text_input=prompt, max_tokens=24)
    assert answer["prompt_tokens"] > 1024
    assert answer["text_output"] == by_transformers(tiny_adapted, prompt, 24)


# What the server does is written down as it is, so that a newer one that does otherwise is noticed.
BEHAVIOUR = [
    ("tiny/infer", infer(text(datatype="INT32", data=[1])), 400, "expects 'BYTES'"),
    ("tiny/infer", infer(text(shape=[2], data=["a", "b"])), 400, "unexpected shape"),
    ("tiny/infer", infer(text(shape=[1, 1])), 400, "unexpected shape"),
    ("tiny/infer", infer(text(), {"name": "mood", "datatype": "BYTES", "shape": [1], "data": ["x"]}), 400, "unexpected inference input"),
    ("tiny/infer", infer({"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [4]}), 400, "give either text_input"),
    ("tiny/infer", b'{"inputs": [', 500, "failed to parse the request JSON buffer"),
    ("tiny/infer", infer(text(data=[{}])), 500, "Unable to parse JSON bytes array"),
    ("tiny/generate", b"nonsense", 500, "failed to parse the request JSON buffer"),
    ("tiny/generate", {"text_input": "a", "max_tokens": "four"}, 500, "Unable to parse 'data'"),
    ("tiny/generate", {"text_input": "a", "mood": "good", "max_tokens": 1}, 200, "text_output"),
    ("nobody/infer", infer(text()), 404, "unknown model"),
    ("tiny/versions/7/infer", infer(text()), 404, "unknown model"),
    ("tiny_stream/infer", infer(text()), 501, "decoupled"),
    ("tiny_stream/generate", {"text_input": "Name the fox.", "max_tokens": 8}, 200, "exactly 1 response"),
    ("tiny_stream/generate_stream", {"text_input": ""}, 400, "text_input is empty"),
    ("tiny_stream/generate_stream", {"text_input": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
    ("tiny_stream/generate_stream", {}, 400, "give either text_input or messages"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "said"), BEHAVIOUR)
def test_the_server_and_the_models_answer_wrong_requests_as_written(
    served: Server, path: str, body: bytes | dict[str, Any], status: int, said: str
) -> None:
    found, answer = post(served, path, body)
    assert (found, said in answer) == (status, True), (found, answer)
    assert "Traceback" not in answer


@pytest.mark.parametrize(
    ("model", "fields", "status", "said"),
    [
        ("tiny", {"text_input": ""}, "INVALID_ARGUMENT", "text_input is empty"),
        ("tiny", {"max_tokens": 3}, "INVALID_ARGUMENT", "give either"),
        ("tiny", {"text_input": ["a", "b"]}, "INVALID_ARGUMENT", "unexpected shape"),
        ("nobody", {"text_input": "a"}, "NOT_FOUND", "unknown model"),
        ("tiny_stream", {"text_input": "a"}, "UNIMPLEMENTED", "decoupled"),
    ],
)
def test_grpc_tells_the_kind_of_fault(served: Server, model: str, fields: dict[str, Any], status: str, said: str) -> None:
    with pytest.raises(InferenceServerException, match=said) as refused:
        over_grpc(served, model, **fields)
    assert status in str(refused.value.status())


def test_a_fault_on_a_grpc_stream_is_told_and_the_stream_goes_on(served: Server, golden: list[dict[str, Any]]) -> None:
    with open_stream(served, "tiny_stream", text_input="a", top_p=0.0) as (client, came):
        _, error = came.get(timeout=60)
        assert "top_p is 0" in str(error)
        client.async_stream_infer("tiny_stream", tensors({"text_input": golden[0]["prompt"], "max_tokens": 1}))
        result, error = came.get(timeout=60)
        assert error is None
        assert golden[0]["text"].startswith(result.as_numpy("text_output")[0].decode())
