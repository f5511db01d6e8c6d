"""Triton Python backend model: vLLM's AsyncLLM behind the inputs and outputs of tuneline's streaming model.

Written for the comparison from vLLM's public interface. It runs in vLLM's environment and does not import tuneline. The model is
decoupled: each response contains the new text. Decoding is greedy, and the end token does not end an answer: every answer has max_tokens
tokens. The engine's keyword arguments, and the variables to set before vLLM is imported, are parameters of config.pbtxt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import locale
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

locale.setlocale(
    locale.LC_CTYPE, "C.UTF-8"
)  # the stub starts in ASCII, and libraries open their text files in the locale's encoding

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The class and methods that Triton's Python backend requires."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine, a thread for its event loop, and a thread that sends: sending takes longer than the other work for a token."""
        parameters = {
            name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        os.environ.update(json.loads(parameters["environment"]))
        self.numbers, self.ready = itertools.count(), queue.SimpleQueue[Any]()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        threading.Thread(target=self._send, daemon=True).start()
        starting = asyncio.run_coroutine_threadsafe(self._start(json.loads(parameters["engine"])), self.loop)
        starting.result()

    async def _start(self, keywords: dict[str, Any]) -> None:
        from transformers import AutoTokenizer
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.tokenizer = AutoTokenizer.from_pretrained(keywords["model"])
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**keywords))

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the answers."""
        for request in requests:
            fields = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
            text, tokens = fields["text_input"].decode("utf-8"), int(fields["max_tokens"])
            asyncio.run_coroutine_threadsafe(self._answer(text, tokens, request.get_response_sender()), self.loop)

    def finalize(self) -> None:
        """Stop the engine's process."""
        self.engine.shutdown()

    async def _answer(self, text: str, tokens: int, sender: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        try:
            ids, made = self.tokenizer(text, add_special_tokens=False)["input_ids"], 0
            how = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            async for output in self.engine.generate({"prompt_token_ids": ids}, how, str(next(self.numbers))):
                piece = output.outputs[0]
                made += len(piece.token_ids)
                self.ready.put((sender, (piece.text, piece.finish_reason or "", len(ids), made), output.finished))
        except Exception as error:
            self.ready.put((sender, error, True))

    def _send(self) -> None:
        while True:
            sender, said, last = self.ready.get()
            sender.send(response(said), flags=FINAL if last else 0)


def response(said: Any) -> Any:
    """Return Triton's response for a chunk or an error."""
    if isinstance(said, Exception):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(said)))
    text, reason, prompt_tokens, tokens = said
    values = {
        "text_output": np.array([text.encode("utf-8")], dtype=np.object_),
        "finish_reason": np.array([reason.encode("utf-8")], dtype=np.object_),
        "prompt_tokens": np.array([prompt_tokens], dtype=np.int32),
        "completion_tokens": np.array([tokens], dtype=np.int32),
    }
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, value) for name, value in values.items()])
