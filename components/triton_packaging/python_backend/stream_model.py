"""Triton python backend model that streams the answers of the package's engine model, without weights.

The model is decoupled: each response contains new text, and the last response has a finish_reason. The model requests
the socket address of the engine model of the same version once, through the server.
"""

# The model receives all answers from that socket.

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import triton_python_backend_utils as pb_utils

from .triton_messages import (
    CANCEL_CHECK_SECONDS,
    FINAL,
    HOLD,
    AnswerChunk,
    OverloadedError,
    RequestFailedError,
    build_error,
    build_response,
    read_fields,
)

HOLD_RETRY_SECONDS = 0.2


class TritonPythonModel:
    """The interface that Triton's python backend expects."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the engine model's name and connect in the background; the engine model need not be loaded yet."""
        self.engine = json.loads(args["model_config"])["parameters"]["engine"]["string_value"]
        self.version = int(args["model_version"])
        self.address = ""
        self.is_finalized = threading.Event()
        threading.Thread(target=self._hold_engine, name="hold", daemon=True).start()

    def finalize(self) -> None:
        """Disconnect from the engine model. Triton calls this method after the last answer."""
        self.is_finalized.set()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Start one thread per request; the threads mostly wait."""
        for request in requests:
            threading.Thread(target=self._answer, args=(request, request.get_response_sender()), daemon=True).start()

    def _answer(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        try:
            fields = read_fields(request)
            with self._connect() as connection:
                connection.sendall(json.dumps(fields).encode("ascii") + b"\n")
                relay(connection, sender)
        except Exception as error:
            sender.send(build_error(error), flags=FINAL)

    def _hold_engine(self) -> None:
        """Keep the engine model loaded until this model is finalized; reconnect whenever it is reloaded."""
        while not self.is_finalized.wait(HOLD_RETRY_SECONDS):
            # Triton reports various errors while it loads and unloads; each is retried.
            with suppress(Exception), self._connect() as connection:
                connection.sendall(json.dumps(HOLD).encode("ascii") + b"\n")
                while not self.is_finalized.is_set() and is_open(connection):
                    pass

    def _connect(self) -> socket.socket:
        """Connect to the engine model; request its address first, and again after a reload."""
        connection = connect(self.address) if self.address else None
        if connection is None:
            request = pb_utils.InferenceRequest(
                model_name=self.engine,
                model_version=self.version,
                requested_output_names=["text_output"],
                inputs=[],
                parameters={"stream_address": True},
            )
            response = request.exec()
            if response.has_error():
                raise OverloadedError(
                    f"the engine model {self.engine} version {self.version} is not loaded: {response.error().message()}"
                )
            address = pb_utils.get_output_tensor_by_name(response, "text_output").as_numpy()[0]
            self.address = bytes(address).decode("ascii")
            connection = connect(self.address)
        if connection is None:
            raise OverloadedError(f"the model {self.engine} version {self.version} is being unloaded")
        return connection


def connect(address: str) -> socket.socket | None:
    """Connect to an address in the abstract namespace; return None if no process listens on it."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{address}")
    except ConnectionRefusedError:
        connection.close()
        return None
    return connection


def is_open(connection: socket.socket) -> bool:
    """Wait CANCEL_CHECK_SECONDS, and return whether the connection is still open."""
    connection.settimeout(CANCEL_CHECK_SECONDS)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True


def relay(connection: socket.socket, sender: pb_utils.InferenceResponseSender) -> None:
    """Forward the answer until its last chunk, or until the client disconnects.

    The caller closes the connection, which cancels an unfinished answer in the engine model.

    Raises:
        RequestFailedError: the engine model reports an error, or closes the connection before the end of the answer.
    """
    next_check = time.monotonic() + CANCEL_CHECK_SECONDS
    for message in read_messages(connection):
        if time.monotonic() > next_check:
            next_check = time.monotonic() + CANCEL_CHECK_SECONDS
            if sender.is_cancelled():
                sender.send(flags=FINAL)
                return
        if message is None:
            continue
        if "error" in message:
            error = RequestFailedError(message["error"])
            error.code = message["code"]
            raise error
        chunk = AnswerChunk(**message)
        sender.send(build_response(chunk), flags=FINAL if chunk.finish_reason else 0)
        if chunk.finish_reason:
            return
    raise RequestFailedError("the engine model closed the connection before the end of the answer")


def read_messages(connection: socket.socket) -> Iterator[dict[str, Any] | None]:
    """Yield the messages of a connection: an AnswerChunk's fields, or an error and its code; None at each timeout."""
    connection.settimeout(CANCEL_CHECK_SECONDS)
    rest = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            yield None
            continue
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)
