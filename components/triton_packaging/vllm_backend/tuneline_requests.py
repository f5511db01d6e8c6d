"""Parses requests to the vLLM backend and builds its responses, with the tensors of Triton's vLLM backend."""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tuneline_tensors import INPUTS, OUTPUTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensors = Mapping[str, "NDArray[np.generic]"]

# Clients may send these values as strings ("0.1" for 0.1), as in the examples of Triton's documentation.
NUMERIC_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "n", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip
# Request parameters for the server, not for the model.
SERVER_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output")
UNFINISHED_REASON = "None"  # finish_reason of an answer that is still being generated


class ClientError(Exception):
    """The request is invalid; the client receives the message."""


@dataclass(frozen=True)
class VllmRequest:
    """A validated request. `extra_outputs` are the requested outputs in addition to the text."""

    text: str
    stream: bool
    include_input: bool
    sampling: dict[str, object]
    adapter: str | None
    extra_outputs: frozenset[str]


@dataclass(frozen=True)
class PartialAnswer:
    """An answer so far, one entry per sequence: the text from its start, the token count and the finish reason.

    `logprobs` has vLLM's Logprob objects by token ID, for each token of a sequence; None if not requested.
    """

    texts: list[str]
    token_counts: list[int]
    finish_reasons: list[str]
    prompt_tokens: int
    finished: bool
    logprobs: Sequence[Sequence[Mapping[int, Any]] | None] = ()


def parse_request(request: pb_utils.InferenceRequest, adapters: Collection[str]) -> VllmRequest:
    """Validate and parse a request.

    Args:
        adapters: names of the adapters that a request may select.

    Raises:
        ClientError: an input is invalid, or the requested adapter is not in `adapters`.
    """
    tensors = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
    if "text_input" not in tensors:
        raise ClientError("text_input is missing")
    text, stream = _read_text("text_input", tensors), _read_flag("stream", tensors)
    if stream and not _read_flag("exclude_input_in_output", tensors, default=True):
        raise ClientError(
            "exclude_input_in_output is false, but a streamed answer never contains the input; "
            "omit the flag, or set it to true"
        )
    sampling = _parse_sampling(request, tensors)
    adapter = sampling.pop("lora_name", None)
    if adapter is not None and adapter not in adapters:
        available = f"available adapters: {', '.join(sorted(adapters))}" if adapters else "this model has no adapters"
        raise ClientError(f"adapter {adapter!r} does not exist; {available}")
    extra = frozenset(name for name in OUTPUTS if f"return_{name}" in INPUTS and _read_flag(f"return_{name}", tensors))
    include_input = not stream and not _read_flag("exclude_input_in_output", tensors)
    return VllmRequest(text, stream, include_input, sampling, None if adapter is None else str(adapter), extra)


def _parse_sampling(request: pb_utils.InferenceRequest, tensors: Tensors) -> dict[str, object]:
    """Return the sampling parameters of the input tensor, or of the request parameters in the generate extension."""
    has_input = "sampling_parameters" in tensors
    text = _read_text("sampling_parameters", tensors) if has_input else request.parameters() or "{}"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"sampling_parameters is not JSON: {error}") from None
    if not isinstance(values, dict):
        expected = 'a JSON object such as {"temperature": 0, "max_tokens": 64}'
        raise ClientError(f"sampling_parameters is {text!s:.60}; expected {expected}")
    for name in NUMERIC_PARAMETERS:
        if isinstance(values.get(name), str):
            with suppress(ValueError):  # vLLM rejects a string that is not a number
                values[name] = json.loads(values[name].lower())
    if "structured_outputs" in values:
        values["structured_outputs"] = _parse_structured_outputs(values["structured_outputs"])
    return {
        name: value
        for name, value in values.items()
        if name not in SERVER_PARAMETERS and not name.startswith("triton_")
    }


def _parse_structured_outputs(value: object) -> dict[str, object]:
    """Return the keywords of vLLM's StructuredOutputsParams. Triton's vLLM backend expects them as a JSON text."""
    parsed: object = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ClientError(f"structured_outputs is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ClientError(f'structured_outputs is {parsed!s:.60}; expected a JSON object such as {{"json": {{…}}}}')
    return parsed


def _read_text(name: str, tensors: Tensors) -> str:
    values = tensors[name]
    if len(values) != 1:
        raise ClientError(f"{name} has {len(values)} strings; send exactly one")
    try:
        return bytes(values[0]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClientError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_flag(name: str, tensors: Tensors, *, default: bool = False) -> bool:
    values = tensors.get(name)
    return bool(values[0]) if values is not None and len(values) else default


def build_response(
    request: VllmRequest, answer: PartialAnswer, sent: PartialAnswer | None
) -> pb_utils.InferenceResponse:
    """Build the response for an answer; a streamed response contains only the text generated since `sent`."""
    count = len(answer.texts)
    known = sent if request.stream and sent else PartialAnswer([""] * count, [0] * count, [], 0, False)
    prefix = request.text if request.include_input else ""
    texts = [prefix + text[len(old) :] for text, old in zip(answer.texts, known.texts, strict=True)]
    tensors = [_string_tensor("text_output", texts)]
    if "finish_reason" in request.extra_outputs:
        tensors.append(_string_tensor("finish_reason", answer.finish_reasons))
    if "logprobs" in request.extra_outputs:
        entries = [
            None if logprobs is None else [_describe_logprobs(each) for each in logprobs[old:]]
            for logprobs, old in zip(answer.logprobs, known.token_counts, strict=True)
        ]
        tensors.append(_string_tensor("logprobs", [json.dumps(each) for each in entries]))
    if "num_input_tokens" in request.extra_outputs:
        tensors.append(pb_utils.Tensor("num_input_tokens", np.array([answer.prompt_tokens], dtype=np.uint32)))
    if "num_output_tokens" in request.extra_outputs:
        new = [now - old for now, old in zip(answer.token_counts, known.token_counts, strict=True)]
        tensors.append(pb_utils.Tensor("num_output_tokens", np.array(new, dtype=np.uint32)))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _describe_logprobs(logprobs: Mapping[int, Any]) -> dict[int, dict[str, object]]:
    return {
        token: {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
        for token, each in logprobs.items()
    }


def build_error(error: Exception) -> pb_utils.InferenceResponse:
    """Build the response for an invalid request, or for an internal error, which is logged with its traceback."""
    message, code = str(error), pb_utils.TritonError.INVALID_ARG
    if not isinstance(error, ClientError):
        pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
        message = f"internal error: {type(error).__name__}; see the server's log"
        code = pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _string_tensor(name: str, values: list[str]) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array([value.encode("utf-8") for value in values], dtype=np.object_))
