"""Clients of a served package: complete and streamed answers over HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
import queue
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

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def post(server: ServerAddress, path: str, body: bytes | dict[str, Any]) -> tuple[int, str]:
    """Post a request and return status and text of the response, also for errors."""
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=120)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/{path}", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", errors="replace")
    finally:
        connection.close()


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


def infer_grpc(server: Server, model: str, **fields: Any) -> dict[str, Any]:
    """Return a complete answer by unary inference."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, build_tensors(fields), client_timeout=120)
    return {"text_output": result.as_numpy("text_output")[0].decode(), **read_counts(result)}


def read_counts(result: Any) -> dict[str, Any]:
    """Read the fields of a response other than its text."""
    return {
        "finish_reason": result.as_numpy("finish_reason")[0].decode(),
        "prompt_tokens": int(result.as_numpy("prompt_tokens")[0]),
        "completion_tokens": int(result.as_numpy("completion_tokens")[0]),
    }


ResponseQueue = queue.Queue[tuple[Any, Any]]


@contextmanager
def open_stream(
    server: Server, model: str, responses: ResponseQueue | None = None, **fields: Any
) -> Iterator[tuple[Any, ResponseQueue]]:
    """Open a gRPC stream with one request. Yield its client and a queue of (result, error), which streams may share."""
    responses = responses or ResponseQueue()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, build_tensors(fields))
        yield client, responses


def stream_grpc(server: Server, model: str, **fields: Any) -> StreamedAnswer:
    """Return a streamed answer over gRPC, or raise the error of a response."""
    pieces = []
    with open_stream(server, model, **fields) as (_, responses):
        while True:
            result, error = responses.get(timeout=120)
            if error is not None:
                raise error
            pieces.append(result.as_numpy("text_output")[0].decode())
            if (counts := read_counts(result))["finish_reason"]:
                return StreamedAnswer(pieces, **counts)


def stream_http(server: Server, model: str, **fields: Any) -> StreamedAnswer:
    """Return a streamed answer of /generate_stream."""
    status, text = post(server, f"{model}/generate_stream", fields)
    assert status == 200, text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    names = ("finish_reason", "prompt_tokens", "completion_tokens")
    return StreamedAnswer([event["text_output"] for event in events], **{name: events[-1][name] for name in names})


def build_infer_body(*inputs: dict[str, Any]) -> dict[str, Any]:
    """Build the body of an /infer request."""
    return {"inputs": list(inputs)}


def build_text_tensor(value: str = "a", **other: Any) -> dict[str, Any]:
    """Build the text_input tensor of an /infer request."""
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [value], **other}


def generate_with_transformers(model: LoadableModel, prompt: str, tokens: int) -> str:
    """Return the greedy answer of transformers' generate with the model's generation settings."""
    loaded, tokenizer = model_loading.load_model(model), model_loading.load_tokenizer(model.tokenizer)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = loaded.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
