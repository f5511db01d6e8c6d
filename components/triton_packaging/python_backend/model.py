"""Triton python backend model: a causal language model answered by transformers, many requests at once.

Self-contained: this folder's files are copied into the model repository beside the weights in `weights/`, and import only numpy, torch,
transformers and Triton's own utilities. Limits and room are parameters of config.pbtxt.

A request brings `text_input` (one user message, or raw text with apply_chat_template false) or `messages` (a JSON list of
{"role", "content"}), and may bring max_tokens, temperature, top_p, top_k, seed and stop. Without a temperature, or at 0, the answer is
greedy. It gets text_output, finish_reason ("stop" or "length"), prompt_tokens and completion_tokens (the end token counted).

This model gives whole answers. The package's second model streams: it reaches this one through a local socket, so that the weights are
loaded once. Triton lets one model do only one of the two.
"""

from __future__ import annotations

import asyncio
import json
import locale
import os
import secrets
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the stub starts in ASCII, and libraries open their text files in the locale's encoding

import torch  # noqa: E402
import transformers  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

from .generation import Batched, OneByOne, Room, Way  # noqa: E402
from .loading import PartsError, load  # noqa: E402
from .request import Fields, Limits, read  # noqa: E402
from .text import TextStream  # noqa: E402
from .wire import (  # noqa: E402
    FINAL,
    HOLD,
    LOOK_SECONDS,
    BusyError,
    CancelledError,
    ClientError,
    Piece,
    RefusedError,
    fields_of,
    refusal,
    refused,
    response,
)

NO_SEED = "a seed repeats nothing here: on a GPU a request's scores depend in their last bits on the requests computed with it"
LONGEST_LINE = 1 << 26  # bytes of a request on the socket; the server holds clients to less
DRAIN_SECONDS = 300.0  # that answers under way may take when the model goes out of service; a server that ends gives them less


class TritonPythonModel:
    """The name and the methods that Triton's python backend asks for.

    One event loop in a thread of its own holds everything but the computing; `execute` only hands requests over to it.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the weights beside this file onto the instance's device."""
        parameters = {name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()}
        names = ("max_prompt_tokens", "max_tokens", "default_max_tokens", "context")
        self.limits = Limits(**{name: int(parameters[name]) for name in names})
        self.room = Room(int(parameters["slots"]), int(parameters["cache_tokens"]))
        self.most = self.room.slots + int(parameters["max_queue"])
        self.jobs: dict[asyncio.Task[None], Any] = {}
        self.streaming = 0  # streaming models that hold on to this one
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="requests", daemon=True).start()
        self._load(args, parameters)
        self.address = f"tuneline-{secrets.token_hex(16)}"
        self.server = self._run(asyncio.start_unix_server(self._stream, f"\0{self.address}", limit=LONGEST_LINE))
        self.watching = asyncio.run_coroutine_threadsafe(self._watch(), self.loop)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests in. Their answers are sent when they are ready, each through its request's own sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                if "stream_address" in request.parameters():  # the streaming model asks where to find us
                    sender.send(response(Piece(self.address, "", 0, 0)), flags=FINAL)
                else:
                    self.loop.call_soon_threadsafe(self._begin, fields_of(request), sender)
            except RefusedError as error:
                sender.send(refusal(error), flags=FINAL)

    def finalize(self) -> None:
        """Let answers under way end, then let go of the weights."""
        with suppress(TimeoutError):
            self._run(self._drain(), 2 * DRAIN_SECONDS)
        self.way.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        del self.model

    def _load(self, args: dict[str, str], parameters: dict[str, str]) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        device = device_of(args)
        if device.type == "cpu":
            torch.set_num_threads(threads(int(parameters["threads"])))
        try:
            loaded = load(Path(args["model_repository"]) / args["model_version"], parameters, device)
        except PartsError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        ends = self.model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        self.way = self._way(loaded.alone)
        # Low precision rounds a row of scores by what else is in the batch, and a draw may then fall on another token.
        self.repeats = device.type == "cpu" or isinstance(self.way, OneByOne)

    def _way(self, alone: str) -> Way:
        """Many at once, or one by one where that cannot serve this model, which `alone` says of some and the log then says."""
        if not alone:
            try:
                return Batched(self.model, self.room, self.loop)
            except Exception as error:  # the manager raises whatever an architecture leads it to
                alone = f"no continuous batching for this model ({error})"
        pb_utils.Logger.log_warn(f"requests are answered one by one: {alone}")
        pad = self.tokenizer.pad_token_id
        return OneByOne(self.model, self.tokenizer.eos_token_id if pad is None else pad, self.loop)

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def _begin(self, fields: Fields, sender: Any) -> None:
        """Begin a whole answer."""
        try:
            self._job(self._whole(fields, sender), sender)
        except BusyError as error:
            sender.send(refusal(error), flags=FINAL)

    def _job(self, answering: Coroutine[Any, Any, None], sender: Any) -> asyncio.Task[None]:
        """An answer under way, if there is room for one more. Without a sender its connection tells when its client has gone."""
        if len(self.jobs) >= self.most:
            answering.close()
            raise BusyError(f"{self.most} requests are being answered or wait for it, which is the most; ask again later")
        task = self.loop.create_task(answering)
        self.jobs[task] = sender
        task.add_done_callback(self.jobs.pop)
        return task

    async def _whole(self, fields: Fields, sender: Any) -> None:
        try:
            pieces = [piece async for piece in self._pieces(fields, each=False)]
            last = pieces[-1]
            text = "".join(piece.text for piece in pieces)
            answer = response(Piece(text, last.finish_reason, last.prompt_tokens, last.completion_tokens))
        except asyncio.CancelledError:
            answer = refusal(CancelledError("the request was cancelled"))
        except Exception as error:
            answer = refusal(error)
        self._send_last(answer, sender)

    def _send_last(self, answer: Any, sender: Any) -> None:
        """Asking a sender whether its client has gone, after the last response or at the same time, crashes the whole server: this and
        `_watch` run in the event loop's thread, and none looks at a sender that is done."""
        task = asyncio.current_task()
        assert task is not None
        self.jobs[task] = None
        sender.send(answer, flags=FINAL)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of the streaming model; when that hangs up, its client has gone."""
        if peer_uid(writer) != os.getuid():
            writer.close()
            return
        fields = json.loads(await reader.readline())
        if fields == HOLD:
            await self._held(reader)
            writer.close()
            return
        try:
            answer = self._job(self._send_pieces(fields, writer), None)
        except BusyError as error:
            await send_line(writer, {"code": error.code, "error": str(error)})
        else:
            gone = self.loop.create_task(reader.read(1))
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            answer.cancel()
            gone.cancel()
        writer.close()

    async def _held(self, reader: asyncio.StreamReader) -> None:
        """A streaming model holds on: its requests come here, so this model does not go before it."""
        self.streaming += 1
        try:
            await reader.read(1)
        finally:
            self.streaming -= 1

    async def _send_pieces(self, fields: Fields, writer: asyncio.StreamWriter) -> None:
        try:
            async with aclosing(self._pieces(fields, each=True)) as pieces:
                async for piece in pieces:
                    await send_line(writer, vars(piece))
        except ConnectionError:
            return
        except Exception as error:
            told = refused(error)
            await send_line(writer, {"code": told.code, "error": str(told)})

    async def _pieces(self, fields: Fields, *, each: bool) -> AsyncGenerator[Piece, None]:
        """The answer's pieces, the last with a finish reason. Closing it, or cancelling its task, frees the slot at once."""
        asked = read(fields, self.tokenizer, self.limits)
        if "seed" in fields and asked.temperature > 0 and not self.repeats:
            raise ClientError(NO_SEED)
        text, last = TextStream(self.tokenizer, asked.stop), -1
        async with aclosing(self.way.tokens(asked, each=each or bool(asked.stop))) as answer:
            async for tokens in answer:
                ready, last = text.feed(tokens), tokens[-1] if tokens else last
                if text.stopped:
                    break
                if ready:
                    yield Piece(ready, "", len(asked.prompt), text.tokens)
                    ready = ""
        end = ready + text.rest()
        yield Piece(end, "stop" if text.stopped or last in self.ends else "length", len(asked.prompt), text.tokens)

    async def _watch(self) -> None:
        """End the answers whose clients have gone."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._cancel_gone()

    def _cancel_gone(self) -> None:
        """No coroutine keeps a sender that was asked: freed at the end of the interpreter it waits for ever, and the model with it."""
        for task, sender in self.jobs.items():
            if sender is not None and sender.is_cancelled():
                task.cancel()

    async def _drain(self) -> None:
        """A new version is loaded before the streaming model of this one goes: until then streamed requests still come. Where it does not
        go, it finds the address closed in the end, and asks who answers now."""
        until = self.loop.time() + DRAIN_SECONDS
        while (self.jobs or self.streaming) and self.loop.time() < until:
            await asyncio.sleep(0.05)
        self.server.close()
        while self.jobs:
            await asyncio.sleep(0.05)
        self.watching.cancel()


async def send_line(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """One message to the streaming model."""
    writer.write(json.dumps(message).encode("ascii") + b"\n")
    await writer.drain()


def peer_uid(writer: asyncio.StreamWriter) -> int:
    """Who is at the other end of a local socket."""
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1])


def device_of(args: dict[str, str]) -> torch.device:
    """The device Triton placed this instance on."""
    if args["model_instance_kind"] == "GPU" and torch.cuda.is_available():
        return torch.device("cuda", int(args["model_instance_device_id"]))
    return torch.device("cpu")


def threads(configured: int) -> int:
    """TUNELINE_THREADS, else the package's own number, else the cores this process may use: a container's, not the machine's."""
    return int(os.environ.get("TUNELINE_THREADS") or configured or len(os.sched_getaffinity(0)))
