"""Clients of a served package: whole answers and streamed ones, over HTTP and gRPC."""

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

from components.common import models
from components.common.models import Model
from components.triton_packaging.server import Server

KINDS = {int: ("INT32", np.int32), float: ("FP32", np.float32), bool: ("BOOL", np.bool_), str: ("BYTES", np.object_)}


@dataclass(frozen=True)
class Streamed:
    """A streamed answer: its pieces of text, and what the last one said."""

    pieces: list[str]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def post(server: Server, path: str, body: bytes | dict[str, Any]) -> tuple[int, str]:
    """Status and text of an HTTP answer, whatever it is."""
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=120)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/v2/models/{path}", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", errors="replace")
    finally:
        connection.close()


def tensors(fields: dict[str, Any]) -> list[Any]:
    """A request's inputs for gRPC."""
    inputs = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        kind, dtype = ("INT64", np.int64) if name == "seed" else KINDS[type(values[0])]
        raw = [each.encode() if isinstance(each, str) else each for each in values]
        inputs.append(grpc.InferInput(name, [len(values)], kind))
        inputs[-1].set_data_from_numpy(np.array(raw, dtype=dtype))
    return inputs


def over_grpc(server: Server, model: str, **fields: Any) -> dict[str, Any]:
    """A whole answer by unary inference."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, tensors(fields), client_timeout=120)
    return {"text_output": result.as_numpy("text_output")[0].decode(), **counts(result)}


def counts(result: Any) -> dict[str, Any]:
    """What a response says beside its text."""
    return {
        "finish_reason": result.as_numpy("finish_reason")[0].decode(),
        "prompt_tokens": int(result.as_numpy("prompt_tokens")[0]),
        "completion_tokens": int(result.as_numpy("completion_tokens")[0]),
    }


Came = queue.Queue[tuple[Any, Any]]


@contextmanager
def open_stream(server: Server, model: str, came: Came | None = None, **fields: Any) -> Iterator[tuple[Any, Came]]:
    """A gRPC stream with one request on it: its client, and a queue of (result, error), which several may share."""
    came = came or Came()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(model, tensors(fields))
        yield client, came


def streamed(server: Server, model: str, **fields: Any) -> Streamed:
    """A streamed answer over gRPC. Raises the error that came instead of a piece."""
    pieces = []
    with open_stream(server, model, **fields) as (_, came):
        while True:
            result, error = came.get(timeout=120)
            if error is not None:
                raise error
            pieces.append(result.as_numpy("text_output")[0].decode())
            if (said := counts(result))["finish_reason"]:
                return Streamed(pieces, **said)


def streamed_http(server: Server, model: str, **fields: Any) -> Streamed:
    """A streamed answer of /generate_stream."""
    status, text = post(server, f"{model}/generate_stream", fields)
    assert status == 200, text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    names = ("finish_reason", "prompt_tokens", "completion_tokens")
    return Streamed([event["text_output"] for event in events], **{name: events[-1][name] for name in names})


def infer(*inputs: dict[str, Any]) -> dict[str, Any]:
    """A body for /infer."""
    return {"inputs": list(inputs)}


def text(value: str = "a", **other: Any) -> dict[str, Any]:
    """The tensor of a text for /infer."""
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [value], **other}


def by_transformers(model: Model, prompt: str, tokens: int) -> str:
    """The greedy answer of plain generate, with the model's own settings."""
    loaded, tokenizer = models.load(model), models.load_tokenizer(model.tokenizer)
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = loaded.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
