"""How requests and answers of each Triton backend look: one entry in BACKEND_PROTOCOLS per backend."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from components.triton_packaging.triton_config import INPUTS, stream_model_name
from components.triton_packaging.vllm_backend import tuneline_tensors
from pipelines.gateway.errors import invalid

DEFAULT_MAX_TOKENS = 256  # vLLM's own default of 16 tokens cuts most answers
# Names of Triton's data types in requests, with the field of their values.
CONTENTS = {
    "TYPE_STRING": ("BYTES", "bytes_contents"),
    "TYPE_BOOL": ("BOOL", "bool_contents"),
    "TYPE_INT32": ("INT32", "int_contents"),
    "TYPE_INT64": ("INT64", "int64_contents"),
    "TYPE_FP32": ("FP32", "fp32_contents"),
}
PYTHON_KINDS = {name: kind for name, (kind, _) in INPUTS.items()}
VLLM_KINDS = {name: kind for name, (kind, *_) in tuneline_tensors.INPUTS.items()}
NUMBERS = {"INT32": "<i", "UINT32": "<I"}


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of an answer with the token counts so far. `finish_reason` is empty except in the last chunk."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    version: str
    logprobs: list[dict[str, Any]]


@dataclass(frozen=True)
class BackendProtocol:
    """A backend's requests and answers.

    Attributes:
        list_features: names of the gateway's inputs that a model supports, from its configuration.
        build_request: Triton's request for a model's name, an adapter's name ("" for none) and the gateway's inputs.
        read_chunk: an answer's next chunk, from a response and the previous chunk.
        build_cancellation: Triton's request that ends the answer to a request; None if the stream must be cancelled.
        is_queue_bounded: whether the backend rejects requests when its queue is full; else the gateway rejects them.
        needs_rendered_prompt: whether `text_input` must be the conversation rendered with the chat template.
    """

    list_features: Callable[[model_config_pb2.ModelConfig], frozenset[str]]
    build_request: Callable[[str, str, Mapping[str, object]], pb.ModelInferRequest]
    read_chunk: Callable[[pb.ModelInferResponse, AnswerChunk | None], AnswerChunk]
    build_cancellation: Callable[[pb.ModelInferRequest], pb.ModelInferRequest] | None = None
    is_queue_bounded: bool = True
    needs_rendered_prompt: bool = False


def build_tensors(name: str, kinds: Mapping[str, str], values: Mapping[str, object]) -> pb.ModelInferRequest:
    """Return a request with these inputs.

    Args:
        name: the model.
        kinds: Triton's data type of each input.
        values: value or list of values by input name.
    """
    request = pb.ModelInferRequest(model_name=name)
    for key, value in values.items():
        kind, contents = CONTENTS[kinds[key]]
        items = value if isinstance(value, list) else [value]
        tensor = request.inputs.add(name=key, datatype=kind, shape=[len(items)])
        getattr(tensor.contents, contents).extend(item.encode() if isinstance(item, str) else item for item in items)
    return request


def read_tensors(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Return the first value of each output: a string is its length (uint32, little-endian) and its bytes."""
    values: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            values[output.name] = raw[4 : 4 + struct.unpack_from("<I", raw)[0]].decode()
        else:
            values[output.name] = struct.unpack_from(NUMBERS[output.datatype], raw)[0]
    return values


def _list_python_features(config: model_config_pb2.ModelConfig) -> frozenset[str]:
    return frozenset(each.name for each in config.input)


def _build_python_request(name: str, _: str, inputs: Mapping[str, object]) -> pb.ModelInferRequest:
    return build_tensors(stream_model_name(name), PYTHON_KINDS, inputs)


def _build_python_cancellation(request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name=request.model_name, id=request.id, parameters={"cancel": pb.InferParameter(bool_param=True)}
    )


def _read_python_chunk(response: pb.ModelInferResponse, _: AnswerChunk | None) -> AnswerChunk:
    values = read_tensors(response)
    return AnswerChunk(
        values["text_output"],
        values["finish_reason"],
        values["prompt_tokens"],
        values["completion_tokens"],
        response.model_version,
        json.loads(values.get("logprobs") or "[]"),
    )


def _list_vllm_features(_: model_config_pb2.ModelConfig) -> frozenset[str]:
    return frozenset({"tools", "json_schema", "frequency_penalty", "presence_penalty"})


def _build_vllm_request(name: str, adapter: str, inputs: Mapping[str, object]) -> pb.ModelInferRequest:
    sampling = {key: value for key, value in inputs.items() if key not in ("text_input", "json_schema")}
    sampling = {"temperature": 0, "max_tokens": DEFAULT_MAX_TOKENS, **sampling}
    if schema := inputs.get("json_schema"):
        # Triton's vLLM backend parses the value of this parameter as JSON. Small models produce white space without end.
        structure = {"json": json.loads(str(schema)), "disable_any_whitespace": True}
        sampling["structured_outputs"] = json.dumps(structure)
    if adapter:
        sampling["lora_name"] = adapter
    values = {
        "text_input": inputs["text_input"],
        "stream": True,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "sampling_parameters": json.dumps(sampling),
    }
    return build_tensors(name, VLLM_KINDS, values)


def _read_vllm_chunk(response: pb.ModelInferResponse, previous: AnswerChunk | None) -> AnswerChunk:
    values = read_tensors(response)
    reason = values["finish_reason"]
    return AnswerChunk(
        values["text_output"],
        "" if reason == "None" else reason,
        values["num_input_tokens"],
        values["num_output_tokens"] + (previous.completion_tokens if previous else 0),
        response.model_version,
        [],
    )


BACKEND_PROTOCOLS = {
    "python": BackendProtocol(
        _list_python_features, _build_python_request, _read_python_chunk, _build_python_cancellation
    ),
    "vllm": BackendProtocol(
        _list_vllm_features,
        _build_vllm_request,
        _read_vllm_chunk,
        is_queue_bounded=False,
        needs_rendered_prompt=True,
    ),
}


def find_protocol(backend: str) -> BackendProtocol:
    """Return the protocol of a backend.

    Raises:
        RequestError: the backend is unknown.
    """
    if backend not in BACKEND_PROTOCOLS:
        raise invalid(f"models of the backend {backend!r} cannot be used through this API", "model")
    return BACKEND_PROTOCOLS[backend]
