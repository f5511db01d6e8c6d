"""Triton backend for vLLM, compatible with the files and requests of Triton's own vLLM backend."""

# This backend serves packages with triton_packaging.backend vllm in the servers that `tuneline serve` and the proof
# start, which lack Triton's vLLM backend. model.json contains keyword arguments of vLLM's AsyncEngineArgs.
# multi_lora.json maps adapter names to folders. The model is decoupled: it sends a streamed answer in several
# responses.
#
# A request contains text_input, used verbatim without a chat template. Optional: stream, sampling_parameters (a JSON
# object as a string; its key lora_name selects the adapter), exclude_input_in_output and the return_* flags.

from __future__ import annotations

import asyncio
import locale
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing
from pathlib import Path

# The stub starts with an ASCII locale, and libraries open their text files in the locale's encoding.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")

import triton_python_backend_utils as pb_utils  # noqa: E402
from tuneline_requests import (  # noqa: E402
    ClientError,
    PartialAnswer,
    VllmRequest,
    build_error,
    build_response,
    parse_request,
)
from tuneline_tensors import INPUTS, OUTPUTS  # noqa: E402
from tuneline_vllm_engine import (  # noqa: E402
    ModelStartError,
    VllmEngine,
    check_vllm_installed,
    read_model_files,
)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CANCEL_CHECK_SECONDS = 0.1  # each check for a disconnected client costs a message to the server
DRAIN_SECONDS = 30.0


class TritonPythonModel:
    """The interface that Triton's python backend expects."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Add the inputs, the outputs and the transaction policy, and return the configuration."""
        for name, (kind, dims, optional) in INPUTS.items():
            auto_complete_model_config.add_input({"name": name, "data_type": kind, "dims": dims, "optional": optional})
        for name, (kind, dims) in OUTPUTS.items():
            auto_complete_model_config.add_output({"name": name, "data_type": kind, "dims": dims})
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Read the model's files, and start the engine in the event loop of a separate thread.

        Raises:
            TritonModelException: vLLM is not installed, or a file of the model is missing or invalid.
        """
        try:
            arguments, adapters = read_model_files(Path(args["model_repository"]) / args["model_version"])
            check_vllm_installed()
        except ModelStartError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self.adapters = frozenset(adapters)
        self.answers: set[Future[None]] = set()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="requests", daemon=True).start()
        self.engine = asyncio.run_coroutine_threadsafe(start_engine(arguments, adapters), self.loop).result()

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Accept requests. Each answer is sent through its request's response sender when it is ready."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                parsed = parse_request(request, self.adapters)
            except ClientError as error:
                sender.send(build_error(error), flags=FINAL)
            else:
                answer = asyncio.run_coroutine_threadsafe(self._answer(parsed, sender), self.loop)
                self.answers.add(answer)
                answer.add_done_callback(self.answers.discard)

    def finalize(self) -> None:
        """Wait for answers in progress, then release the engine."""
        wait(set(self.answers), DRAIN_SECONDS)
        self.engine.close()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _answer(self, request: VllmRequest, sender: pb_utils.InferenceResponseSender) -> None:
        """Send the complete answer, or its parts as they are generated."""
        # The server crashes if `is_cancelled` is called after the last response or in another thread.
        sent: PartialAnswer | None = None
        next_check = time.monotonic() + CANCEL_CHECK_SECONDS
        try:
            async with aclosing(self.engine.generate(request)) as answers:
                async for answer in answers:
                    if answer.finished:
                        sender.send(build_response(request, answer, sent), flags=FINAL)
                        return
                    if time.monotonic() > next_check:
                        next_check = time.monotonic() + CANCEL_CHECK_SECONDS
                        if sender.is_cancelled():
                            sender.send(flags=FINAL)
                            return
                    if request.stream and answer.texts != (sent.texts if sent else [""] * len(answer.texts)):
                        sender.send(build_response(request, answer, sent))
                        sent = answer
        except Exception as error:
            sender.send(build_error(error), flags=FINAL)


async def start_engine(arguments: Mapping[str, object], adapters: Mapping[str, str]) -> VllmEngine:
    """Create the engine in the running event loop, as AsyncLLM requires."""
    return VllmEngine(arguments, adapters)
