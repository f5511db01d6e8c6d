"""How the golden prompts are asked of a running server: the protocols of each backend, and what an answer is."""

from __future__ import annotations

import json
import queue
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.errors import TunelineError
from components.triton_packaging.config import TritonPackagingConfig
from components.triton_packaging.pbtxt import stream_name
from components.triton_packaging.server import Server, get_json


class ProofError(TunelineError):
    """The server answers, but not as the model did before packaging."""

    kind = "proof"


HALF = "\ufffd"  # what decoding makes of the first bytes of a character


def said(text: str) -> str:
    """A text to compare. Half a character, where the last token cuts one, is text to transformers and nothing to vLLM."""
    return text.rstrip(HALF)


@dataclass(frozen=True)
class Reference:
    """What the model answers before packaging. `prefixes[k]` is the text of its first k tokens and `close[k]` says whether rounding could
    have chosen another token there. `rendered` is the prompt as the chat template writes it; `adapter` is what a request names, if any."""

    prompt: str
    prompt_tokens: int
    text: str
    prefixes: list[str]
    close: list[bool]
    rendered: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class Answer:
    """What the server answered over one protocol."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def with_adapter(reference: Reference) -> str:
    """The adapter a request names, for a message."""
    return f" with the adapter {reference.adapter}" if reference.adapter else ""


def ask_http(server: Server, config: TritonPackagingConfig, reference: Reference) -> Answer:
    """A greedy answer through the generate extension."""
    answer = _post(server, config, reference, {"text_input": reference.prompt, "max_tokens": config.golden_max_tokens})
    return Answer(answer["text_output"], int(answer["prompt_tokens"]), int(answer["completion_tokens"]))


def _post(server: Server, config: TritonPackagingConfig, reference: Reference, body: dict[str, Any]) -> Any:
    try:
        return get_json(f"{server.http_url}/v2/models/{config.model_name}/generate", method="POST", body=body, timeout=600)
    except urllib.error.HTTPError as error:
        raise _refused("HTTP", reference, error.read().decode("utf-8", errors="replace")) from None


def ask_grpc(server: Server, config: TritonPackagingConfig, reference: Reference) -> Answer:
    """A greedy answer through gRPC inference, with chat messages instead of a text."""
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    try:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            result = client.infer(config.model_name, _inputs(config, reference), client_timeout=600)
    except InferenceServerException as error:
        raise _refused("gRPC", reference, str(error)) from None
    return _answer([result])


def ask_stream(server: Server, config: TritonPackagingConfig, reference: Reference) -> Answer:
    """A greedy answer streamed over gRPC."""

    def last(result: Any) -> bool:
        return bool(result.as_numpy("finish_reason")[0])

    return _answer(_streamed(server, stream_name(config.model_name), _inputs(config, reference), reference, last))


def _streamed(server: Server, model: str, inputs: list[Any], reference: Reference, last: Callable[[Any], bool]) -> list[Any]:
    """The responses of a gRPC stream with one request, up to the last."""
    from tritonclient import grpc

    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    results: list[Any] = []
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(model, inputs)
        while not results or not last(results[-1]):
            result, error = came.get(timeout=600)
            if error is not None:
                raise _refused("a gRPC stream", reference, str(error))
            results.append(result)
    return results


def _answer(results: Sequence[Any]) -> Answer:
    """The answer of a response, or of a stream of them."""
    text = "".join(result.as_numpy("text_output")[0].decode("utf-8") for result in results)
    return Answer(text, *(int(results[-1].as_numpy(name)[0]) for name in ("prompt_tokens", "completion_tokens")))


def _inputs(config: TritonPackagingConfig, reference: Reference) -> list[Any]:
    messages = json.dumps([{"role": "user", "content": reference.prompt}], ensure_ascii=False)
    return tensors({"messages": messages, "max_tokens": config.golden_max_tokens})


def tensors(values: Mapping[str, str | int]) -> list[Any]:
    """Texts, flags and 32-bit numbers as the inputs of a gRPC request."""
    import numpy as np
    from tritonclient import grpc

    kinds = {str: ("BYTES", np.object_), bool: ("BOOL", np.bool_), int: ("INT32", np.int32)}
    inputs = []
    for name, value in values.items():
        kind, dtype = kinds[type(value)]
        inputs.append(grpc.InferInput(name, [1], kind))
        inputs[-1].set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=dtype))
    return inputs


def ask_vllm(server: Server, config: TritonPackagingConfig, reference: Reference) -> Answer:
    """A greedy answer of the vLLM backend through the generate extension, without the input."""
    answer = _post(server, config, reference, {"text_input": reference.rendered, **WHOLE, "parameters": _sampling(config, reference)})
    return Answer(answer["text_output"], int(answer["num_input_tokens"]), int(answer["num_output_tokens"]))


def ask_vllm_stream(server: Server, config: TritonPackagingConfig, reference: Reference) -> Answer:
    """A greedy answer of the vLLM backend streamed over gRPC."""
    asked: dict[str, str | int] = {"text_input": reference.rendered, "stream": True, "return_finish_reason": True, **COUNTS}
    inputs = tensors({**asked, "sampling_parameters": json.dumps(_sampling(config, reference))})

    def last(result: Any) -> bool:
        return bool(result.as_numpy("finish_reason")[0] != b"None")

    results = _streamed(server, config.model_name, inputs, reference, last)
    text = "".join(result.as_numpy("text_output")[0].decode("utf-8") for result in results)
    tokens = sum(int(result.as_numpy("num_output_tokens")[0]) for result in results)
    return Answer(text, int(results[-1].as_numpy("num_input_tokens")[0]), tokens)


COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}
WHOLE = {"exclude_input_in_output": True, **COUNTS}


def _sampling(config: TritonPackagingConfig, reference: Reference) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_tokens": config.golden_max_tokens}
    return {**greedy, "lora_name": reference.adapter} if reference.adapter else greedy


def _refused(protocol: str, reference: Reference, said: str) -> ProofError:
    return ProofError(
        f"over {protocol} Triton refused the golden prompt {reference.prompt!r}{with_adapter(reference)}: {said}",
        hint="Check triton_packaging.golden_prompts.",
    )


PROTOCOLS: dict[str, dict[str, Callable[[Server, TritonPackagingConfig, Reference], Answer]]] = {
    "python": {"HTTP": ask_http, "gRPC": ask_grpc, "a gRPC stream": ask_stream},
    "vllm": {"HTTP": ask_vllm, "a gRPC stream": ask_vllm_stream},
}
