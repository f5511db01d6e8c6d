"""What a request to the vLLM backend holds, checked, and what its answer is made of: the tensors that Triton's vLLM backend documents."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tuneline_tensors import INPUTS, OUTPUTS

# Clients send these as texts too, "0.1" for 0.1: the samples of Triton's documentation do.
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "n", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logprobs", "prompt_logprobs", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
# Parameters of a request that speak to the server, not to the model.
OF_THE_SERVER = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output")
NOT_YET = "None"  # the finish reason of an answer that goes on


class ClientError(Exception):
    """The request is at fault; the message is what the client reads."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for. `wants` are the outputs it asks for beside the text."""

    text: str
    stream: bool
    with_input: bool
    sampling: dict[str, Any]
    lora: str | None
    wants: frozenset[str]


@dataclass(frozen=True)
class Part:
    """An answer as far as it goes, one entry a sequence: the whole text, its tokens, and why it ended; NOT_YET where it goes on."""

    texts: list[str]
    tokens: list[int]
    reasons: list[str]
    prompt_tokens: int
    finished: bool


def read(request: Any, adapters: Collection[str]) -> Asked:
    """The request, checked. Raises ClientError for whatever is wrong with it, an adapter that is not in `adapters` among it."""
    tensors = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
    if "text_input" not in tensors:
        raise ClientError("text_input is missing")
    text, stream = _text("text_input", tensors), _flag("stream", tensors)
    if stream and not _flag("exclude_input_in_output", tensors, otherwise=True):
        raise ClientError("a streamed answer never holds the input: leave exclude_input_in_output out, or set it to true")
    sampling = _sampling(request, tensors)
    lora = sampling.pop("lora_name", None)
    if lora is not None and lora not in adapters:
        known = f"known are {', '.join(sorted(adapters))}" if adapters else "this model has none"
        raise ClientError(f"there is no adapter {lora!r}: {known}")
    wants = frozenset(name for name in OUTPUTS if f"return_{name}" in INPUTS and _flag(f"return_{name}", tensors))
    return Asked(text, stream, not stream and not _flag("exclude_input_in_output", tensors), sampling, lora, wants)


def _sampling(request: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters: a JSON object in their input, or the request's own parameters, as the generate extension passes them on."""
    given = _text("sampling_parameters", tensors) if "sampling_parameters" in tensors else request.parameters() or "{}"
    try:
        values = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ClientError('sampling_parameters must be a JSON object such as {"temperature": 0, "max_tokens": 64}')
    return {
        name: _number(value) if name in NUMBERS else value
        for name, value in values.items()
        if name not in OF_THE_SERVER and not name.startswith("triton_")
    }


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value


def _text(name: str, tensors: dict[str, Any]) -> str:
    values = tensors[name]
    if len(values) != 1:
        raise ClientError(f"{name} holds {len(values)} texts; give one")
    try:
        return bytes(values[0]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClientError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _flag(name: str, tensors: dict[str, Any], *, otherwise: bool = False) -> bool:
    values = tensors.get(name)
    return bool(values[0]) if values is not None and len(values) else otherwise


def response(asked: Asked, part: Part, before: Part | None) -> Any:
    """Triton's response for a part. A streamed one holds what is new since the part before."""
    known = before if asked.stream and before else Part([""] * len(part.texts), [0] * len(part.texts), [], 0, False)
    ahead = asked.text if asked.with_input else ""
    texts = [ahead + text[len(old) :] for text, old in zip(part.texts, known.texts, strict=True)]
    tensors = [_strings("text_output", texts)]
    if "finish_reason" in asked.wants:
        tensors.append(_strings("finish_reason", part.reasons))
    if "num_input_tokens" in asked.wants:
        tensors.append(pb_utils.Tensor("num_input_tokens", np.array([part.prompt_tokens], dtype=np.uint32)))
    if "num_output_tokens" in asked.wants:
        new = [now - old for now, old in zip(part.tokens, known.tokens, strict=True)]
        tensors.append(pb_utils.Tensor("num_output_tokens", np.array(new, dtype=np.uint32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def refusal(message: str, *, client: bool) -> Any:
    """Triton's response for an error: the client's own fault, or ours."""
    code = pb_utils.TritonError.INVALID_ARG if client else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _strings(name: str, values: list[str]) -> Any:
    return pb_utils.Tensor(name, np.array([value.encode("utf-8") for value in values], dtype=np.object_))
