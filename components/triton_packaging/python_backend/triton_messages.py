"""Triton requests, responses and errors, shared by both models of a package.

Imports no torch, so that the streaming model's process stays small.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CANCEL_CHECK_SECONDS = 0.1  # each check for a disconnected client costs a message to the server
# Sent by the streaming model instead of a request, on the connection that keeps the engine model loaded.
HOLD = {"hold": True}

RequestFields = dict[str, list[str | int | float | bool]]


class RequestFailedError(Exception):
    """The request is not answered. `code` is Triton's error code; the client receives the message."""

    code = "INTERNAL"


class ClientError(RequestFailedError):
    """The request is invalid."""

    code = "INVALID_ARG"


class OverloadedError(RequestFailedError):
    """The engine model is overloaded or not loaded; the client may retry later."""

    code = "UNAVAILABLE"


class CancelledError(RequestFailedError):
    """The client cancelled the request."""

    code = "CANCELLED"


@dataclass(frozen=True)
class AnswerChunk:
    """A part of an answer: its text, and the counts so far. `finish_reason` is empty except in the last chunk.

    `logprobs` has one entry for each token that the count includes for the first time; None if not requested.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Sequence[object] | None = None


def read_fields(request: pb_utils.InferenceRequest) -> RequestFields:
    """Return the values of the request's inputs by input name: lists of texts, numbers or booleans.

    Raises:
        ClientError: a text is not UTF-8.
    """
    fields = {}
    for tensor in request.inputs():
        values = tensor.as_numpy().reshape(-1).tolist()
        try:
            fields[tensor.name()] = [value.decode() if isinstance(value, bytes) else value for value in values]
        except UnicodeDecodeError as error:
            raise ClientError(f"{tensor.name()} is not UTF-8: {error.reason} at byte {error.start}") from None
    return fields


def build_response(chunk: AnswerChunk) -> pb_utils.InferenceResponse:
    """Return Triton's response for a chunk. It has the output `logprobs` only if the client requested it."""
    arrays = {
        "text_output": np.array([chunk.text.encode()], dtype=np.object_),
        "finish_reason": np.array([chunk.finish_reason.encode()], dtype=np.object_),
        "prompt_tokens": np.array([chunk.prompt_tokens], dtype=np.int32),
        "completion_tokens": np.array([chunk.completion_tokens], dtype=np.int32),
    }
    if chunk.logprobs is not None:
        arrays["logprobs"] = np.array([json.dumps(chunk.logprobs).encode()], dtype=np.object_)
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(*each) for each in arrays.items()])


def as_client_error(error: Exception) -> RequestFailedError:
    """Return the error that the client receives; log an unexpected error with its traceback."""
    if isinstance(error, RequestFailedError):
        return error
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return RequestFailedError(f"internal error: {type(error).__name__}; see the server's log")


def build_error(error: Exception) -> pb_utils.InferenceResponse:
    """Return Triton's response for an error."""
    shown = as_client_error(error)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(shown), getattr(pb_utils.TritonError, shown.code)))
