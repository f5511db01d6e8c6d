"""A Triton backend for vLLM, tuneline's own: it reads the files and answers the requests of Triton's vLLM backend, as documented there.

It serves packages of triton_packaging.backend vllm where no Triton with its own vLLM backend is at hand: the server that `tuneline serve`
and the proof start. model.json holds keywords of vLLM's AsyncEngineArgs, multi_lora.json names adapters and their folders. A request brings
text_input, which is taken as it is, without a chat template, and may bring stream, sampling_parameters (a JSON object as text, the adapter
named by lora_name), exclude_input_in_output and the return_… flags. The model is decoupled: a streamed answer comes in pieces.

Where vLLM is not installed a stand-in answers (tuneline_stand_in.py), which the server's log says.
"""

from __future__ import annotations

import asyncio
import locale
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # the stub starts in ASCII, and libraries open their text files in the locale's encoding

import triton_python_backend_utils as pb_utils  # noqa: E402
from tuneline_asking import Asked, ClientError, Part, read, refusal, response  # noqa: E402
from tuneline_engines import Engine, Files, FilesError, Vllm, installed, read_files  # noqa: E402
from tuneline_tensors import INPUTS, OUTPUTS  # noqa: E402

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LOOK_SECONDS = 0.1  # asking the server whether a client has gone costs a message to it
DRAIN_SECONDS = 30.0
STAND_IN = "vLLM IS NOT INSTALLED: a stand-in made of transformers answers, one request at a time. It is for checks, not for service."


class TritonPythonModel:
    """The name and the methods that Triton's python backend asks for."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in the inputs, the outputs and what every model of this backend is."""
        for name, (kind, dims, optional) in INPUTS.items():
            auto_complete_model_config.add_input({"name": name, "data_type": kind, "dims": dims, "optional": optional})
        for name, (kind, dims) in OUTPUTS.items():
            auto_complete_model_config.add_output({"name": name, "data_type": kind, "dims": dims})
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's files and start the engine, in an event loop in a thread of its own."""
        try:
            files = read_files(Path(args["model_repository"]) / args["model_version"])
        except FilesError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.adapters = frozenset(files.adapters)
        self.jobs: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="requests", daemon=True).start()
        self.engine: Engine = self._run(start(files))

    def execute(self, requests: Sequence[Any]) -> None:
        """Take the requests in. Their answers are sent when they are ready, each through its request's own sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                asked = read(request, self.adapters)
            except ClientError as error:
                sender.send(refusal(str(error), client=True), flags=FINAL)
            else:
                self.loop.call_soon_threadsafe(self._begin, asked, sender)

    def finalize(self) -> None:
        """Let answers under way end, then let go of the engine."""
        with suppress(TimeoutError):
            self._run(self._drain(), DRAIN_SECONDS)
        self.engine.close()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def _begin(self, asked: Asked, sender: Any) -> None:
        task = self.loop.create_task(self._answer(asked, sender))
        self.jobs.add(task)
        task.add_done_callback(self.jobs.discard)

    async def _answer(self, asked: Asked, sender: Any) -> None:
        try:
            await self._send_parts(asked, sender)
        except ClientError as error:
            sender.send(refusal(str(error), client=True), flags=FINAL)
        except Exception as error:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
            told = f"internal error: {type(error).__name__}; the server's log has the details"
            sender.send(refusal(told, client=False), flags=FINAL)

    async def _send_parts(self, asked: Asked, sender: Any) -> None:
        """Send the answer whole, or what is new of it as it comes. A sender is asked whether its client has gone only before its last
        response, and by the thread that sends it: the server crashes otherwise."""
        before: Part | None = None
        look = time.monotonic() + LOOK_SECONDS
        async with aclosing(self.engine.answer(asked)) as answer:
            async for part in answer:
                if part.finished:
                    sender.send(response(asked, part, before), flags=FINAL)
                    return
                if time.monotonic() > look:
                    look = time.monotonic() + LOOK_SECONDS
                    if sender.is_cancelled():
                        sender.send(flags=FINAL)
                        return
                if asked.stream and part.texts != (before.texts if before else [""] * len(part.texts)):
                    sender.send(response(asked, part, before))
                    before = part

    async def _drain(self) -> None:
        while self.jobs:
            await asyncio.sleep(0.05)


async def start(files: Files) -> Engine:
    """vLLM, or the stand-in where it is not installed. It is made in the running loop, which it is asked from."""
    if installed():
        return Vllm(files)
    from tuneline_stand_in import StandIn

    pb_utils.Logger.log_warn(STAND_IN)
    return StandIn(files)
