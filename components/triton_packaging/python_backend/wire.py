"""What both Triton models of a package share: tensors to plain values and back, and how a fault is told to the client.

Imports no torch, so that the streaming model's process stays small.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Asking the server whether a client has gone costs a message to it; this often is soon enough.
LOOK_SECONDS = 0.1
# What the streaming model says instead of a request on the connection by which it holds on to the other model.
HOLD = {"hold": True}


class RefusedError(Exception):
    """The request is not answered. `code` names Triton's error code, the message is what the client reads."""

    code = "INTERNAL"


class ClientError(RefusedError):
    """The request is at fault."""

    code = "INVALID_ARG"


class BusyError(RefusedError):
    """The request may be asked again later."""

    code = "UNAVAILABLE"


class CancelledError(RefusedError):
    """The client does not wait for the answer any more."""

    code = "CANCELLED"


@dataclass(frozen=True)
class Piece:
    """A part of an answer: its text, and what is known so far. `finish_reason` is empty in all pieces but the last."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def fields_of(request: Any) -> dict[str, list[Any]]:
    """The request's inputs as plain values: texts, numbers, booleans. Raises ClientError for a text that is not UTF-8."""
    fields = {}
    for tensor in request.inputs():
        values = tensor.as_numpy().reshape(-1)
        fields[tensor.name()] = texts(tensor.name(), values) if values.dtype == np.object_ else values.tolist()
    return fields


def texts(name: str, values: Any) -> list[str]:
    """The texts of a string tensor."""
    try:
        return [bytes(value).decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise ClientError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def response(piece: Piece) -> Any:
    """Triton's response for a piece."""
    return pb_utils.InferenceResponse(
        output_tensors=[
            _text("text_output", piece.text),
            _text("finish_reason", piece.finish_reason),
            pb_utils.Tensor("prompt_tokens", np.array([piece.prompt_tokens], dtype=np.int32)),
            pb_utils.Tensor("completion_tokens", np.array([piece.completion_tokens], dtype=np.int32)),
        ]
    )


def refused(error: Exception) -> RefusedError:
    """What the client is told of an error; one that is nobody's fault but ours goes to the server's log with its traceback."""
    if isinstance(error, RefusedError):
        return error
    pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return RefusedError(f"internal error: {type(error).__name__}; the server's log has the details")


def refusal(error: Exception) -> Any:
    """Triton's response for an error."""
    told = refused(error)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(told), getattr(pb_utils.TritonError, told.code)))


def _text(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))
