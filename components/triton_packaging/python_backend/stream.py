"""Triton python backend model: the answers of the package's other model, streamed piece by piece.

Decoupled: each response holds the text that is new, the last one a finish_reason. It holds no weights. It asks the other model of its own
version where to find it, once, by a request through the server; from then on each answer comes through a local socket of that model.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import triton_python_backend_utils as pb_utils

from .wire import FINAL, HOLD, LOOK_SECONDS, BusyError, Piece, RefusedError, fields_of, refusal, response

HOLD_SECONDS = 0.2  # between two tries to reach the model that answers


class TritonPythonModel:
    """The name and the methods that Triton's python backend asks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Remember which model answers; it need not be loaded yet."""
        self.engine = json.loads(args["model_config"])["parameters"]["engine"]["string_value"]
        self.version = int(args["model_version"])
        self.address: str | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._hold, name="hold", daemon=True).start()

    def finalize(self) -> None:
        """Let go of the other model: Triton has waited for the answers."""
        self.ended.set()

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin the answers, each in a thread of its own: most of the time it waits."""
        for request in requests:
            threading.Thread(target=self._answer, args=(request, request.get_response_sender()), daemon=True).start()

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            fields = fields_of(request)
            with self._connect() as link:
                link.sendall(json.dumps(fields).encode("ascii") + b"\n")
                relay(link, sender)
        except Exception as error:
            sender.send(refusal(error), flags=FINAL)

    def _hold(self) -> None:
        """Hold on to the model that answers, again whenever it was loaded anew: it then goes out of service after this one, not before."""
        while not self.ended.wait(HOLD_SECONDS):
            with suppress(Exception), self._connect() as link:  # whatever Triton says while it loads and unloads, it is tried again
                link.sendall(json.dumps(HOLD).encode("ascii") + b"\n")
                while not self.ended.is_set() and is_open(link):
                    pass

    def _connect(self) -> socket.socket:
        """A connection to the other model. Its address is asked again when it was loaded again."""
        link = connected(self.address) if self.address else None
        if link is None:
            self.address = self._ask_address()
            link = connected(self.address)
        if link is None:
            raise BusyError(f"the model {self.engine} version {self.version} is going out of service")
        return link

    def _ask_address(self) -> str:
        asking = pb_utils.InferenceRequest(
            model_name=self.engine,
            model_version=self.version,
            requested_output_names=["text_output"],
            inputs=[],
            parameters={"stream_address": True},
        )
        answer = asking.exec()
        if answer.has_error():
            raise BusyError(f"the model {self.engine} version {self.version}, which answers, is not loaded: {answer.error().message()}")
        return bytes(pb_utils.get_output_tensor_by_name(answer, "text_output").as_numpy()[0]).decode("ascii")


def connected(address: str) -> socket.socket | None:
    """A connection to a local address, or None where nobody listens."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(f"\0{address}")
    except ConnectionRefusedError:
        link.close()
        return None
    return link


def is_open(link: socket.socket) -> bool:
    """Whether the other end of a connection, which says nothing, is still there after a moment."""
    link.settimeout(LOOK_SECONDS)
    try:
        return bool(link.recv(1))
    except TimeoutError:
        return True


def relay(link: socket.socket, sender: Any) -> None:
    """Send on what comes, until the last piece or until the client has gone, which hanging up tells the other model."""
    look = time.monotonic() + LOOK_SECONDS
    for message in messages(link):
        if time.monotonic() > look:
            look = time.monotonic() + LOOK_SECONDS
            if sender.is_cancelled():
                sender.send(flags=FINAL)
                return
        if message is not None and pass_on(message, sender):
            return
    raise RefusedError("the model stopped in the middle of the answer")


def pass_on(message: dict[str, Any], sender: Any) -> bool:
    """Send one message to the client. Returns whether it was the last."""
    if "error" in message:
        told = RefusedError(message["error"])
        told.code = message["code"]
        raise told
    piece = Piece(**message)
    sender.send(response(piece), flags=FINAL if piece.finish_reason else 0)
    return bool(piece.finish_reason)


def messages(link: socket.socket) -> Iterator[dict[str, Any] | None]:
    """The messages on a connection; None where there was none for a moment."""
    link.settimeout(LOOK_SECONDS)
    begun = b""
    while True:
        try:
            data = link.recv(1 << 16)
        except TimeoutError:
            yield None
            continue
        if not data:
            return
        *whole, begun = (begun + data).split(b"\n")
        yield from map(json.loads, whole)
