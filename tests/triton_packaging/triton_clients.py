"""Clients of a served package: complete and streamed answers over gRPC, and the metrics."""

from __future__ import annotations

import http.client
import json
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient import grpc

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel
from components.triton_packaging.triton_server import Server, ServerAddress

TENSOR_TYPES = {
    int: ("INT32", np.int32),
    float: ("FP32", np.float32),
    bool: ("BOOL", np.bool_),
    str: ("BYTES", np.object_),
}


@dataclass(frozen=True)
class StreamedAnswer:
    """A streamed answer: its pieces of text and the fields of the last response."""

    pieces: list[str]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def build_tensors(fields: dict[str, Any]) -> list[Any]:
    """Build the gRPC inputs of a request."""
    inputs = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        datatype, dtype = ("INT64", np.int64) if name == "seed" else TENSOR_TYPES[type(values[0])]
        encoded = [item.encode() if isinstance(item, str) else item for item in values]
        inputs.append(grpc.InferInput(name, [len(values)], datatype))
        inputs[-1].set_data_from_numpy(np.array(encoded, dtype=dtype))
    return inputs


def infer_grpc(server: ServerAddress, model: str, **fields: Any) -> dict[str, Any]:
    """Return a complete answer by unary inference."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, build_tensors(fields), client_timeout=120)
    return {"text_output": result.as_numpy("text_output")[0].decode(), **read_counts(result)}


def read_counts(result: Any) -> dict[str, Any]:
    """Read the fields of a response other than its text. `logprobs` is None unless requested."""
    logprobs = result.as_numpy("logprobs")
    return {
        "logprobs": None if logprobs is None else json.loads(logprobs[0]),
        "finish_reason": result.as_numpy("finish_reason")[0].decode(),
        "prompt_tokens": int(result.as_numpy("prompt_tokens")[0]),
        "completion_tokens": int(result.as_numpy("completion_tokens")[0]),
    }


ResponseQueue = queue.Queue[tuple[Any, Any]]


@contextmanager
def open_stream(
    server: ServerAddress, model: str, responses: ResponseQueue | None = None, request_id: str = "", **fields: Any
) -> Iterator[tuple[Any, ResponseQueue]]:
    """Open a gRPC stream with one request. Yield its client and a queue of (result, error), which streams may share."""
    responses = responses or ResponseQueue()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, build_tensors(fields), request_id=request_id)
        yield client, responses


def cancel_answer(client: Any, model: str, request_id: str) -> None:
    """End the answer to a request, and wait for the end of the stream."""
    client.async_stream_infer(model, [], request_id=request_id, parameters={"cancel": True})
    client.stop_stream()


def read_answer(responses: ResponseQueue) -> StreamedAnswer:
    """Return the answer whose responses arrive in a queue, or raise the error of a response."""
    pieces, logprobs = [], []
    while True:
        result, error = responses.get(timeout=120)
        if error is not None:
            raise error
        pieces.append(result.as_numpy("text_output")[0].decode())
        counts = read_counts(result)
        logprobs.extend(counts["logprobs"] or [])
        if counts["finish_reason"]:
            return StreamedAnswer(
                pieces, **{**counts, "logprobs": logprobs if counts["logprobs"] is not None else None}
            )


def stream_grpc(server: ServerAddress, model: str, **fields: Any) -> StreamedAnswer:
    """Return a streamed answer over gRPC, or raise the error of a response."""
    with open_stream(server, model, **fields) as (_, responses):
        return read_answer(responses)


def get_metrics(server: Server) -> str:
    """Return the metrics of a server in Prometheus' text format."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.metrics_socket))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: triton\r\nConnection: close\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        return response.read().decode()


def generate_with_transformers(model: LoadableModel, prompt: str, tokens: int) -> str:
    """Return the greedy answer of transformers' generate with the model's generation settings."""
    loaded, tokenizer = model_loading.load_model(model), model_loading.load_tokenizer(model.tokenizer)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = loaded.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
