"""Triton python backend model that streams the answers of the package's engine model, without weights.

The model is decoupled: each response contains new text, and the last response has a finish_reason. It takes the answers
from local sockets of the engine model of the same version, from the instance with the fewest streams.

A request with the parameter `cancel` ends the answer to the request in progress with the same ID; neither has a further
response. Clients should prefer it to a cancelled gRPC stream, which may end a Triton older than 25.06 (CVE-2025-23322).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import triton_python_backend_utils as pb_utils

from .engine_sockets import build_prefix, connect, find_addresses, is_open
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
        self.prefix = build_prefix(self.engine, args["model_version"])
        self.addresses: list[str] = []  # of the engine model's instances
        self.streams: Counter[str] = Counter()  # number of answers in progress of each instance
        self.lock = threading.Lock()
        self.cancellations: dict[str, threading.Event] = {}  # by the ID of a request in progress
        self.is_finalized = threading.Event()
        threading.Thread(target=self._hold_engine, name="hold", daemon=True).start()

    def finalize(self) -> None:
        """Disconnect from the engine model. Triton calls this method after the last answer."""
        self.is_finalized.set()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Start one thread per request; the threads mostly wait."""
        for request in requests:
            sender, request_id = request.get_response_sender(), request.request_id()
            if "cancel" in request.parameters():
                if cancellation := self.cancellations.get(request_id):  # else the answer has just ended
                    cancellation.set()
                sender.send(flags=FINAL)
                continue
            cancellation = threading.Event()
            if request_id:
                self.cancellations[request_id] = cancellation
            threading.Thread(target=self._answer, args=(request, sender, cancellation), daemon=True).start()

    def _answer(
        self,
        request: pb_utils.InferenceRequest,
        sender: pb_utils.InferenceResponseSender,
        cancellation: threading.Event,
    ) -> None:
        try:
            fields = read_fields(request)
            with self._connected() as connection:
                connection.sendall(json.dumps(fields).encode("ascii") + b"\n")
                relay(connection, sender, cancellation)
        except Exception as error:
            sender.send(build_error(error), flags=FINAL)
        finally:
            if self.cancellations.get(request.request_id()) is cancellation:
                del self.cancellations[request.request_id()]

    def _hold_engine(self) -> None:
        """Keep all instances of the engine model loaded until this model is finalized; find those that are loaded later."""
        held: dict[str, socket.socket] = {}
        while not self.is_finalized.wait(HOLD_RETRY_SECONDS):
            try:
                self._hold_instances(held)
            except OSError as error:  # no file descriptor is free
                pb_utils.Logger.log_warn(f"the instances of {self.engine} cannot be listed: {error}")
        for connection in held.values():
            connection.close()

    def _hold_instances(self, held: dict[str, socket.socket]) -> None:
        """Connect to new instances, and remove those that have been unloaded from `held`."""
        for address in find_addresses(self.prefix):
            if address not in held and (connection := connect(address)):
                held[address] = connection
                with suppress(ConnectionError):  # unloaded in the meantime
                    connection.sendall(json.dumps(HOLD).encode("ascii") + b"\n")
        for address in [address for address, connection in held.items() if not is_open(connection)]:
            held.pop(address).close()
        self.addresses = list(held)

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Connect to the engine model's instance with the fewest answers in progress.

        Raises:
            OverloadedError: no instance is loaded.
        """
        tried: set[str] = set()
        while untried := set(self.addresses) - tried or set(find_addresses(self.prefix)) - tried:
            with self.lock:
                address = min(sorted(untried), key=self.streams.__getitem__)
                self.streams[address] += 1
            tried.add(address)
            try:
                if connection := connect(address):
                    with connection:
                        yield connection
                    return
            finally:
                with self.lock:
                    self.streams -= Counter({address: 1})  # removes the entry at 0
        raise OverloadedError(f"the engine model {self.engine} version {self.version} is not loaded")


def relay(connection: socket.socket, sender: pb_utils.InferenceResponseSender, cancellation: threading.Event) -> None:
    """Forward the answer until its last chunk, until `cancellation` is set or until the client disconnects.

    The caller closes the connection, which cancels an unfinished answer in the engine model.

    Raises:
        RequestFailedError: the engine model reports an error, or closes the connection before the end of the answer.
    """
    next_check = time.monotonic() + CANCEL_CHECK_SECONDS
    for message in read_messages(connection):
        is_cancelled = cancellation.is_set()
        if not is_cancelled and time.monotonic() > next_check:
            next_check = time.monotonic() + CANCEL_CHECK_SECONDS
            is_cancelled = sender.is_cancelled()
        if is_cancelled:
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
