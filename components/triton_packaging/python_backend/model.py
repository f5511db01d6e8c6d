"""Triton python backend model: answers requests with a causal language model of transformers, in batches.

The files of this folder are copied into the model repository next to `weights/`. They import only numpy, torch,
transformers, Triton's utilities and, for JSON schemas, llguidance. Limits and capacity are parameters of config.pbtxt.
"""

# A request contains `text_input` (one user message, or raw text with apply_chat_template false) or `messages` (a JSON
# list of {"role", "content"}). Optional: tools, max_tokens, temperature, top_p, top_k, seed, stop, json_schema,
# logprobs, frequency_penalty and presence_penalty. Without a temperature, or with temperature 0, the answer is greedy.
# The response contains text_output, finish_reason ("stop" or "length"), prompt_tokens, completion_tokens (including the
# end token) and logprobs.
#
# This model returns complete answers. The package's second model streams answers: it connects to this model through a
# local socket, so that the weights are loaded once. A Triton model supports only one of the two modes.

from __future__ import annotations

import asyncio
import gc
import json
import locale
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

# The stub starts with an ASCII locale, and libraries open their text files in the locale's encoding.
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
# With the default of 700 or 2,000 allocations, the collector traverses the modules again and again during the imports.
gc.set_threshold(10_000)

import torch  # noqa: E402
import transformers  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

from .answer_grammar import AnswerGrammar, GrammarCompiler, GrammarError  # noqa: E402
from .cache_size import compute_token_bytes, limit_to_free_memory  # noqa: E402
from .engine_sockets import build_prefix, create_address, is_same_user  # noqa: E402
from .int8_layers import pack_int8_layers  # noqa: E402
from .linear_layers import pack_linear_layers  # noqa: E402
from .model_loading import MissingWeightsError, load_model  # noqa: E402
from .request_parsing import Fields, RequestLimits, parse_request  # noqa: E402
from .text_stream import TextStream  # noqa: E402
from .token_generation import BatchCapacity, BatchedGenerator, SequentialGenerator, TokenGenerator  # noqa: E402
from .token_sampling import RequestSampler, create_sampler  # noqa: E402
from .token_text import TokenDecoder  # noqa: E402
from .triton_messages import (  # noqa: E402
    CANCEL_CHECK_SECONDS,
    FINAL,
    HOLD,
    AnswerChunk,
    CancelledError,
    ClientError,
    OverloadedError,
    RequestFailedError,
    as_client_error,
    build_error,
    build_response,
    read_fields,
)

SEED_ERROR = "seed is not supported for batches on a GPU: scores depend on the other requests of the batch"
MAX_LINE_BYTES = 1 << 26  # size of a request on the socket; the server's own limit for clients is lower
# Timeout for answers in progress when the model is unloaded; the timeout of a server that shuts down is shorter.
DRAIN_SECONDS = 300.0

T = TypeVar("T")


class TritonPythonModel:
    """The interface that Triton's python backend expects.

    An event loop in a separate thread runs everything except the computation; `execute` only passes requests to it.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model of this version folder onto the instance's device.

        Raises:
            TritonModelException: a folder that the package refers to is missing or has changed.
        """
        parameters = {
            name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        names = ("max_prompt_tokens", "max_tokens", "default_max_tokens", "context")
        self.limits = RequestLimits(**{name: int(parameters[name]) for name in names})
        slots, cache_tokens = int(parameters["slots"]), int(parameters["cache_tokens"])
        self.max_requests = slots + int(parameters["max_queue"])
        self.tasks: dict[asyncio.Task[None], pb_utils.InferenceResponseSender | None] = {}
        self.streaming_models = 0  # number of connected streaming models, which keep this model loaded
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="requests", daemon=True).start()
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        is_gpu = args["model_instance_kind"] == "GPU" and torch.cuda.is_available()
        device = torch.device("cuda", int(args["model_instance_device_id"])) if is_gpu else torch.device("cpu")
        if not is_gpu:
            # The affinity mask contains the cores of the container, not of the machine.
            configured = os.environ.get("TUNELINE_THREADS") or int(parameters["threads"])
            torch.set_num_threads(int(configured or len(os.sched_getaffinity(0))))
        try:
            version = Path(args["model_repository"]) / args["model_version"]
            self.model, self.tokenizer, sequential_reason = load_model(version, parameters, device)
        except MissingWeightsError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        if not is_gpu and not (pack_int8_layers(self.model) or pack_linear_layers(self.model)):
            pb_utils.Logger.log_info("the linear layers are not packed")
        if is_gpu:
            config = self.model.config.get_text_config()
            cache_tokens = limit_to_free_memory(
                int(parameters.get("gpu_cache_tokens", cache_tokens)),
                min(self.limits.context, self.limits.max_prompt_tokens + self.limits.max_tokens),
                compute_token_bytes(config, self.model.dtype.itemsize),
                torch.cuda.mem_get_info(device)[0],
            )
            pb_utils.Logger.log_info(f"the key-value cache holds {cache_tokens} tokens")
        end_ids = self.model.generation_config.eos_token_id
        self.end_ids = frozenset(end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids])
        self.token_decoder = TokenDecoder(self.tokenizer)
        self.schema_pool = ThreadPoolExecutor(1, "schemas")
        self.grammar_compiler = create_grammar_compiler(self.tokenizer, self.end_ids)
        self.generator = self._create_generator(BatchCapacity(slots, cache_tokens), sequential_reason)
        # On a GPU, rounding of a row of scores depends on the rest of the batch, which may change a sampled token.
        self.is_repeatable = not is_gpu or isinstance(self.generator, SequentialGenerator)
        address = create_address(build_prefix(args["model_name"], args["model_version"]))
        self.server = self._run(asyncio.start_unix_server(self._serve_stream, f"\0{address}", limit=MAX_LINE_BYTES))
        self.loop.call_soon_threadsafe(self._cancel_disconnected)

    def _create_generator(self, capacity: BatchCapacity, sequential_reason: str) -> TokenGenerator:
        """Return a generator for batches, or one for single requests if the model cannot answer in batches."""
        if not sequential_reason:
            try:
                return BatchedGenerator(self.model, capacity, self.loop)
            except Exception as error:  # the manager raises arbitrary errors for an unsupported architecture
                sequential_reason = f"no continuous batching for this model ({error})"
        pb_utils.Logger.log_warn(f"requests are answered one by one: {sequential_reason}")
        pad = self.tokenizer.pad_token_id
        return SequentialGenerator(self.model, self.tokenizer.eos_token_id if pad is None else pad, self.loop)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        """Accept requests. Each answer is sent through its request's response sender when it is ready."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                answer = self._answer_whole(read_fields(request), sender)
                asyncio.run_coroutine_threadsafe(answer, self.loop)
            except RequestFailedError as error:
                sender.send(build_error(error), flags=FINAL)

    def finalize(self) -> None:
        """Wait for answers in progress, then release the weights."""
        with suppress(TimeoutError):
            self._run(self._drain(), 2 * DRAIN_SECONDS)
        self.generator.close()
        self.schema_pool.shutdown(wait=False, cancel_futures=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        del self.model

    def _run(self, coroutine: Coroutine[object, None, T], timeout: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def _admit(self, sender: pb_utils.InferenceResponseSender | None) -> None:
        """Register the current task. Raises OverloadedError if all slots and queue positions are occupied."""
        if len(self.tasks) >= self.max_requests:
            raise OverloadedError(f"all {self.max_requests} slots and queue positions are occupied; retry later")
        task = asyncio.current_task()
        assert task is not None
        self.tasks[task] = sender
        task.add_done_callback(lambda task: self.tasks.pop(task, None))

    async def _answer_whole(self, fields: Fields, sender: pb_utils.InferenceResponseSender) -> None:
        try:
            self._admit(sender)
            chunks = [chunk async for chunk in self._generate_chunks(fields, stream=False)]
            logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
            response = build_response(
                replace(
                    chunks[-1],
                    text="".join(chunk.text for chunk in chunks),
                    logprobs=None if chunks[-1].logprobs is None else logprobs,
                )
            )
        except asyncio.CancelledError:
            response = build_error(CancelledError("the request was cancelled"))
        except Exception as error:
            response = build_error(error)
        # Calling is_cancelled after the last response, or at the same time, crashes the whole server. This and
        # `_cancel_disconnected` run in the event loop's thread, and a finished sender is no longer in `tasks`.
        task = asyncio.current_task()
        assert task is not None
        self.tasks.pop(task, None)
        sender.send(response, flags=FINAL)

    async def _serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of the streaming model, which closes the connection if its client disconnects."""
        if not is_same_user(writer.get_extra_info("socket")):
            writer.close()
            return
        fields = json.loads(await reader.readline())
        if fields == HOLD:
            # The streaming model sends its requests to this model, which must therefore stay loaded.
            self.streaming_models += 1
            try:
                await reader.read(1)
            finally:
                self.streaming_models -= 1
            writer.close()
            return
        answer, disconnection = asyncio.current_task(), self.loop.create_task(reader.read(1))
        assert answer is not None
        disconnection.add_done_callback(lambda _: answer.cancel())
        try:
            self._admit(None)
            async with aclosing(self._generate_chunks(fields, stream=True)) as chunks:
                async for chunk in chunks:
                    await send_line(writer, vars(chunk))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has disconnected: nobody reads an answer or an error
        except Exception as error:
            shown = as_client_error(error)
            await send_line(writer, {"code": shown.code, "error": str(shown)})
        finally:
            disconnection.cancel()
            writer.close()

    async def _generate_chunks(self, fields: Fields, *, stream: bool) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer's chunks; the last has a finish reason. Closing the iterator frees the slot at once."""
        request = parse_request(fields, self.tokenizer, self.limits)
        if "seed" in fields and request.temperature > 0 and not self.is_repeatable:
            raise ClientError(SEED_ERROR)
        grammar = await self._compile_schema(request.json_schema) if request.json_schema else None
        sampler = create_sampler(request, self.model.device, grammar)
        text, last, reported = TextStream(self.tokenizer, request.stop), -1, 0

        def build_chunk(ready: str, reason: str) -> AnswerChunk:
            nonlocal reported
            logprobs = None
            if sampler is not None and request.logprobs is not None:
                scores = sampler.token_scores[reported : text.token_count]
                logprobs = [self.token_decoder.describe(score) for score in scores]
            reported = text.token_count
            return AnswerChunk(ready, reason, len(request.prompt), text.token_count, logprobs)

        streams = stream or bool(request.stop)
        async with aclosing(self.generator.generate(request, sampler, stream=streams)) as answer:
            async for tokens in answer:
                raise_sampling_error(sampler)
                ready, last = text.feed(tokens), tokens[-1] if tokens else last
                if text.stopped:
                    break
                if ready:
                    yield build_chunk(ready, "")
                    ready = ""
        reason = "stop" if text.stopped or last in self.end_ids else "length"
        yield build_chunk(ready + text.flush(), reason)

    async def _compile_schema(self, schema: str) -> AnswerGrammar:
        """Compile a schema in another thread, because a large schema takes as long as several tokens."""
        if isinstance(self.grammar_compiler, str):
            raise ClientError(self.grammar_compiler)
        try:
            return await self.loop.run_in_executor(self.schema_pool, self.grammar_compiler.compile, schema)
        except GrammarError as error:
            raise ClientError(str(error)) from None

    def _cancel_disconnected(self) -> None:
        """Cancel the answers of disconnected clients, and schedule the next check."""
        # Not a coroutine: a sender in a coroutine's frame, freed when the interpreter exits, blocks the exit.
        for task, sender in self.tasks.items():
            if sender is not None and sender.is_cancelled():
                task.cancel()
        self.next_check = self.loop.call_later(CANCEL_CHECK_SECONDS, self._cancel_disconnected)

    async def _drain(self) -> None:
        """Wait for answers in progress and for connected streaming models."""
        # Streamed requests arrive until the streaming model of this version is unloaded, after the new version is
        # loaded. A streaming model that remains loaded finds the sockets of the new instances.
        deadline = self.loop.time() + DRAIN_SECONDS
        while (self.tasks or self.streaming_models) and self.loop.time() < deadline:
            await asyncio.sleep(0.05)
        self.server.close()
        while self.tasks:
            await asyncio.sleep(0.05)
        self.next_check.cancel()


def create_grammar_compiler(
    tokenizer: transformers.PreTrainedTokenizerBase, end_ids: frozenset[int]
) -> GrammarCompiler | str:
    """Return the compiler of JSON schemas, or the message for clients if the model or the server has none."""
    try:
        return GrammarCompiler(tokenizer, end_ids)
    except Exception as error:  # llguidance raises arbitrary errors for an unsupported tokenizer
        message = f"json_schema is not supported by this server: {error}"
        pb_utils.Logger.log_warn(message)
        return message


def raise_sampling_error(sampler: RequestSampler | None) -> None:
    """Raise the error of a request's sampler, if any; an error of the schema as a ClientError."""
    if sampler is not None and sampler.error is not None:
        if isinstance(sampler.error, GrammarError):
            raise ClientError(str(sampler.error)) from None
        raise sampler.error


async def send_line(writer: asyncio.StreamWriter, message: Mapping[str, object]) -> None:
    """Send one message to the streaming model."""
    writer.write(json.dumps(message).encode("ascii") + b"\n")
    await writer.drain()
