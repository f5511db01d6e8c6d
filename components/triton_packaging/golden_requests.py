"""Sends golden prompts to a running server, over the protocols of each backend."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.common.runtime.errors import TunelineError
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.triton_config import stream_model_name
from components.triton_packaging.triton_server import ServerAddress

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput, InferResult

REQUEST_TIMEOUT_SECONDS = 600
REPLACEMENT_CHARACTER = "\ufffd"  # decoders return it for an incomplete character
TOKEN_COUNT_FLAGS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


class ProofError(TunelineError):
    """The server rejects a golden prompt, or its answer differs from the model's answer before packaging."""

    kind = "proof"


@dataclass(frozen=True)
class ReferenceAnswer:
    """The model's answer before packaging.

    Attributes:
        prefixes: the text of the first k tokens, for each k from 0.
        rounding_ties: for each token, whether rounding could have selected another token.
        rendered: the prompt, rendered with the chat template.
        adapter: name of the adapter to request; empty for requests without an adapter.
    """

    prompt: str
    prompt_tokens: int
    text: str
    prefixes: list[str]
    rounding_ties: list[bool]
    rendered: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class ServerAnswer:
    """The server's answer over one protocol."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def strip_incomplete_character(text: str) -> str:
    """Return the text without an incomplete character at its end: transformers decodes it, vLLM omits it."""
    return text.rstrip(REPLACEMENT_CHARACTER)


def describe_adapter(reference: ReferenceAnswer) -> str:
    """Return the adapter of a request, as a part of a message; empty without an adapter."""
    return f" with the adapter {reference.adapter}" if reference.adapter else ""


def request_grpc(server: ServerAddress, config: TritonPackagingConfig, reference: ReferenceAnswer) -> ServerAnswer:
    """Request a greedy answer through gRPC inference, with chat messages instead of text.

    Raises:
        ProofError: the server rejects the prompt.
    """
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    try:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            inputs = _build_message_inputs(config, reference)
            result = client.infer(config.model_name, inputs, client_timeout=REQUEST_TIMEOUT_SECONDS)
    except InferenceServerException as error:
        raise _rejection_error("gRPC", reference, str(error)) from None
    return _parse_responses([result])


def request_stream(server: ServerAddress, config: TritonPackagingConfig, reference: ReferenceAnswer) -> ServerAnswer:
    """Request a greedy answer as a gRPC stream.

    Raises:
        ProofError: the server rejects the prompt.
    """
    model = stream_model_name(config.model_name)
    return _parse_responses(_receive(server, model, _build_message_inputs(config, reference), reference, b""))


def request_vllm(server: ServerAddress, config: TritonPackagingConfig, reference: ReferenceAnswer) -> ServerAnswer:
    """Request a complete greedy answer of the vLLM backend, which must omit the input.

    Raises:
        ProofError: the server rejects the prompt.
    """
    return _request_vllm(server, config, reference, {"exclude_input_in_output": True})


def request_vllm_stream(
    server: ServerAddress, config: TritonPackagingConfig, reference: ReferenceAnswer
) -> ServerAnswer:
    """Request a greedy answer of the vLLM backend as a stream.

    Raises:
        ProofError: the server rejects the prompt.
    """
    return _request_vllm(server, config, reference, {"stream": True})


def _request_vllm(
    server: ServerAddress, config: TritonPackagingConfig, reference: ReferenceAnswer, flags: Mapping[str, bool]
) -> ServerAnswer:
    """Request an answer of the vLLM backend, whose model is decoupled: complete answers also need a gRPC stream."""
    values: dict[str, str | int] = {
        "text_input": reference.rendered,
        "return_finish_reason": True,
        **TOKEN_COUNT_FLAGS,
        **flags,
        "sampling_parameters": json.dumps(_build_sampling_parameters(config, reference)),
    }
    results = _receive(server, config.model_name, build_inputs(values), reference, b"None")
    # Each response counts its own tokens.
    tokens = sum(int(result.as_numpy("num_output_tokens")[0]) for result in results)
    return ServerAnswer(_join_texts(results), int(results[-1].as_numpy("num_input_tokens")[0]), tokens)


def _receive(
    server: ServerAddress, model: str, inputs: list[InferInput], reference: ReferenceAnswer, unfinished: bytes
) -> list[InferResult]:
    """Return the responses of a gRPC stream; the finish reason of all but the last is `unfinished`."""
    from tritonclient import grpc

    responses: queue.Queue[tuple[InferResult, Exception | None]] = queue.Queue()
    results: list[InferResult] = []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, inputs)
        while not results or results[-1].as_numpy("finish_reason")[0] == unfinished:
            result, error = responses.get(timeout=REQUEST_TIMEOUT_SECONDS)
            if error is not None:
                raise _rejection_error("a gRPC stream", reference, str(error))
            results.append(result)
    return results


def _join_texts(results: Sequence[InferResult]) -> str:
    return "".join(result.as_numpy("text_output")[0].decode("utf-8") for result in results)


def _parse_responses(results: Sequence[InferResult]) -> ServerAnswer:
    counts = (int(results[-1].as_numpy(name)[0]) for name in ("prompt_tokens", "completion_tokens"))
    return ServerAnswer(_join_texts(results), *counts)


def _build_message_inputs(config: TritonPackagingConfig, reference: ReferenceAnswer) -> list[InferInput]:
    messages = json.dumps([{"role": "user", "content": reference.prompt}], ensure_ascii=False)
    return build_inputs({"messages": messages, "max_tokens": config.golden_max_tokens})


def build_inputs(values: Mapping[str, str | int]) -> list[InferInput]:
    """Return the inputs of a gRPC request, each of shape [1].

    Args:
        values: strings, booleans and 32-bit integers by input name.
    """
    import numpy as np
    from tritonclient import grpc

    kinds = {str: ("BYTES", np.object_), bool: ("BOOL", np.bool_), int: ("INT32", np.int32)}
    inputs = []
    for name, value in values.items():
        kind, dtype = kinds[type(value)]
        tensor = grpc.InferInput(name, [1], kind)
        tensor.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=dtype))
        inputs.append(tensor)
    return inputs


def _build_sampling_parameters(config: TritonPackagingConfig, reference: ReferenceAnswer) -> dict[str, str | int]:
    greedy: dict[str, str | int] = {"temperature": 0, "max_tokens": config.golden_max_tokens}
    return {**greedy, "lora_name": reference.adapter} if reference.adapter else greedy


def _rejection_error(protocol: str, reference: ReferenceAnswer, message: str) -> ProofError:
    return ProofError(
        f"Triton rejected the golden prompt {reference.prompt!r}{describe_adapter(reference)} over {protocol}: "
        f"{message}",
        hint="Check triton_packaging.golden_prompts.",
    )


PROTOCOLS: dict[str, dict[str, Callable[[ServerAddress, TritonPackagingConfig, ReferenceAnswer], ServerAnswer]]] = {
    "python": {"gRPC": request_grpc, "a gRPC stream": request_stream},
    "vllm": {"gRPC": request_vllm, "a gRPC stream": request_vllm_stream},
}
