"""A gRPC load client for language models behind Triton that uses little CPU time of the measured machine.

A streamed answer uses a separate stream per request; a whole answer uses a unary call. All clients share one thread, which only stores
each response with its arrival time. `read` decodes the responses after the measurement.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from components.common.runtime.errors import UsageError
from components.triton_packaging.triton_config import INPUTS

STREAM, WHOLE = "/inference.GRPCInferenceService/ModelStreamInfer", "/inference.GRPCInferenceService/ModelInfer"
CONTENTS = {
    "TYPE_STRING": ("BYTES", "bytes_contents"),
    "TYPE_BOOL": ("BOOL", "bool_contents"),
    "TYPE_INT32": ("INT32", "int_contents"),
    "TYPE_INT64": ("INT64", "int64_contents"),
    "TYPE_FP32": ("FP32", "fp32_contents"),
}
TIMEOUT = 600.0  # seconds that an answer may take

Fields = Mapping[str, Any]
AskT = TypeVar("AskT")
SentT = TypeVar("SentT")


@dataclass(frozen=True)
class Target:
    """A served model: its address, its name for whole answers, and its name for streamed ones."""

    url: str
    model: str
    stream: str


@dataclass(frozen=True)
class Ask:
    """A request: the model's inputs, whether the answer is streamed, and the seconds after which the client disconnects (0: never)."""

    fields: Fields
    streamed: bool = True
    hang_up: float = 0.0


@dataclass
class Sent:
    """A request and its undecoded responses. Times are seconds of time.monotonic."""

    number: int
    ask: Ask
    due: float
    came: list[tuple[float, bytes]] = field(default_factory=list)
    end: float = 0.0
    error: str = ""
    hung_up: bool = False


@dataclass
class Answer:
    """The decoded answer to a request. Seconds count from the time at which the request was due; first_tokens are the tokens of the first chunk."""

    number: int
    due: float
    streamed: bool
    hung_up: bool
    error: str
    text: str = ""
    version: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the request was answered completely."""
        return not self.error and not self.hung_up

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first chunk; None without further tokens."""
        further = self.tokens - self.first_tokens
        return (self.seconds - self.first) / further if self.streamed and further > 0 else None


class Line:
    """A connection to a server, which all clients share; HTTP/2 multiplexes their requests."""

    def __init__(self, channel: Any, target: Target) -> None:
        self._target = target
        self._stream, self._whole = channel.stream_stream(STREAM), channel.unary_unary(WHOLE)

    async def send(self, number: int, ask: Ask, due: float) -> Sent:
        """Send a request, and wait until its answer ends or fails."""
        import grpc

        sent = Sent(number, ask, due)
        try:
            async with asyncio.timeout(ask.hang_up or None):
                await (self._receive_pieces if ask.streamed else self._receive_whole)(sent)
        except TimeoutError:
            sent.hung_up = True
        except grpc.aio.AioRpcError as error:
            sent.error = f"{error.code().name}: {error.details()}"
        sent.end = time.monotonic()
        return sent

    async def _receive_pieces(self, sent: Sent) -> None:
        """Send one request per stream; the server ends the stream after the last chunk."""
        message = request_of(self._target.stream, sent.ask.fields)
        async for piece in self._stream((message,), timeout=TIMEOUT):
            sent.came.append((time.monotonic(), piece))

    async def _receive_whole(self, sent: Sent) -> None:
        answer = await self._whole(request_of(self._target.model, sent.ask.fields), timeout=TIMEOUT)
        sent.came.append((time.monotonic(), answer))


async def connected(target: Target, work: Callable[[Line], Awaitable[None]]) -> None:
    """Run a function with an open connection."""
    import grpc

    channel = grpc.aio.insecure_channel(target.url, options=[("grpc.max_receive_message_length", -1)])
    async with channel:
        await work(Line(channel, target))


async def closed_loop(line: Line, asks: Iterable[Ask], clients: int, done: Callable[[Sent], None]) -> None:
    """Run a number of clients; each sends the next request when the previous answer has ended."""
    waiting = iter(enumerate(asks))

    async def client() -> None:
        for number, ask in waiting:
            done(await line.send(number, ask, time.monotonic()))

    await asyncio.gather(*(client() for _ in range(clients)))


async def open_loop(
    send: Callable[[int, AskT, float], Awaitable[SentT]],
    arriving: Iterable[tuple[float, AskT]],
    done: Callable[[SentT], None],
) -> None:
    """Send each request at its time, in seconds from now, whether or not earlier requests have been answered."""
    began, tasks = time.monotonic(), list[asyncio.Task[None]]()

    async def answered(number: int, ask: AskT, due: float) -> None:
        done(await send(number, ask, due))

    for number, (at, ask) in enumerate(arriving):
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        tasks.append(asyncio.create_task(answered(number, ask, began + at)))
    await asyncio.gather(*tasks)


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Return an endless iterator of arrival times in seconds from the start: a Poisson process of `rate` requests per second."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    return itertools.accumulate(iter(lambda: draw.expovariate(rate), None))


def request_of(model: str, fields: Fields) -> bytes:
    """Return Triton's inference request with these inputs, each a value or a list of values. Raises UsageError for an unknown input."""
    from tritonclient.grpc import service_pb2 as pb

    request = pb.ModelInferRequest(model_name=model)
    for name, value in fields.items():
        if name not in INPUTS:
            raise UsageError(f"a request has the input {name!r}", hint=f"The inputs are {', '.join(INPUTS)}.")
        kind, contents = CONTENTS[INPUTS[name][0]]
        values = value if isinstance(value, list) else [value]
        tensor = request.inputs.add(name=name, datatype=kind, shape=[len(values)])
        getattr(tensor.contents, contents).extend(one.encode() if isinstance(one, str) else one for one in values)
    return bytes(request.SerializeToString())


def read(sent: Sent) -> Answer:
    """Decode the responses to a request. A model that reports no token counts is assumed to send one token per chunk."""
    answer = Answer(sent.number, sent.due, sent.ask.streamed, sent.hung_up, sent.error, seconds=sent.end - sent.due)
    for at, data in sent.came:
        said, outputs = _opened(data, sent.ask.streamed)
        if said.error:
            answer.error = said.error
            break
        answer.version = said.version
        answer.text += outputs.get("text_output", "")
        answer.tokens = outputs.get("completion_tokens", answer.tokens + 1)
        answer.prompt_tokens = outputs.get("prompt_tokens", 0)
        answer.finish_reason = outputs.get("finish_reason", "stop")
        if not answer.first and answer.tokens:
            answer.first, answer.first_tokens = at - sent.due, answer.tokens
        answer.seconds = at - sent.due
    if answer.good and not answer.finish_reason:
        answer.error = "the answer broke off"
    return answer


@dataclass(frozen=True)
class _Said:
    error: str
    version: str


def _opened(data: bytes, streamed: bool) -> tuple[_Said, dict[str, Any]]:
    from tritonclient.grpc import service_pb2 as pb

    if streamed:
        message = pb.ModelStreamInferResponse.FromString(data)
        error, response = message.error_message, message.infer_response
    else:
        error, response = "", pb.ModelInferResponse.FromString(data)
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    return _Said(error, response.model_version), {tensor.name: _value(tensor.datatype, raw) for tensor, raw in pairs}


def _value(kind: str, raw: bytes) -> Any:
    """Return the first value of a tensor; a string is encoded as its length (uint32, little-endian) and its bytes."""
    if kind == "BYTES":
        return raw[4 : 4 + int.from_bytes(raw[:4], "little")].decode("utf-8", errors="replace")
    return int.from_bytes(raw[:4], "little", signed=True) if kind == "INT32" else raw
