"""Token generators: continuous batching, and sequential generation for models that cannot be batched."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import transformers

from .generation_request import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import GenerationOutput

    from .token_sampling import RequestSampler

# Tokens per step and per page of the cache. A longer prompt is processed in several steps.
STEP_TOKENS, PAGE_TOKENS = 512, 32
GPU_STEP_TOKENS = 2048  # a GPU computes a step of 512 tokens about as fast as one of 100
GREEDY_SETTINGS: dict[str, bool | None] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
TRIAL_TIMEOUT_SECONDS = 300.0
STOP_GRACE_SECONDS = 20.0
RESULT_POLL_SECONDS = 0.5


class UnsupportedSettingsError(Exception):
    """Continuous batching would ignore some of the model's generation settings."""


@dataclass(frozen=True)
class BatchCapacity:
    """Maximum number of requests in a batch, and size of their shared cache in tokens."""

    slots: int
    cache_tokens: int


class TokenGenerator(Protocol):
    """Generates the tokens of answers."""

    def generate(
        self, request: GenerationRequest, sampler: RequestSampler | None, *, stream: bool
    ) -> AsyncGenerator[list[int], None]:
        """Yield the answer's tokens: with `stream` as they are generated, else all at once.

        Closing the iterator frees the request's slot.

        Args:
            sampler: chooses the tokens. Without a sampler, the tokens with the best scores are chosen.
        """
        ...

    def close(self) -> None:
        """Stop the generator. Answers in progress fail."""
        ...


class BatchedGenerator:
    """Generates the answers to many requests in batches with transformers' ContinuousBatchingManager.

    The constructor runs a trial batch, and raises the manager's error if the manager does not support the model.
    """

    def __init__(self, model: PreTrainedModel, capacity: BatchCapacity, loop: asyncio.AbstractEventLoop) -> None:
        # These modules use internals of transformers. If an import fails, requests are answered one by one.
        from . import cache_indices, cpu_attention, decode_graphs, gpu_attention
        from .batch_sampling import BatchSampler

        self._loop, self._ids, self._is_open = loop, itertools.count(), True
        self._outputs: dict[str, asyncio.Queue[GenerationOutput]] = {}
        self._sampler = BatchSampler()
        has_gpu_attention, attention = gpu_attention.supports(model), model.config._attn_implementation
        self._manager = create_manager(model, capacity, use_graphs=has_gpu_attention)
        self._sampler.install(self._manager)
        cache_indices.install(self._manager)
        cpu_attention.install()
        if has_gpu_attention:
            gpu_attention.install(model)
            decode_graphs.install(self._manager)
        self._manager.start()
        try:
            run_trial(self._manager)
        except BaseException:
            self._stop_manager()
            model.set_attn_implementation(attention)  # the other one requires the manager's cache
            raise
        threading.Thread(target=self._deliver_outputs, name="answers", daemon=True).start()

    async def generate(
        self, request: GenerationRequest, sampler: RequestSampler | None, *, stream: bool
    ) -> AsyncGenerator[list[int], None]:
        """See TokenGenerator.

        Raises:
            RuntimeError: the manager fails, or cannot be restarted.
        """
        request_id, seen, finished = f"r{next(self._ids)}", 0, False
        outputs = self._outputs[request_id] = asyncio.Queue()
        self._sampler.add(request_id, sampler)
        try:
            # A manager that has failed ignores requests and only logs a message, so it is restarted once.
            for _ in range(2):
                accepted = self._manager.add_request(
                    request.prompt, request_id=request_id, max_new_tokens=request.max_tokens, streaming=stream
                )
                if accepted is not None:
                    break
                self._manager.start()
            else:
                raise RuntimeError("continuous batching could not be restarted")
            while not finished:
                output = await outputs.get()
                if output.error is not None:
                    raise RuntimeError(output.error)
                finished = output.is_finished()
                new, seen = output.generated_tokens[seen:], len(output.generated_tokens)
                yield new
        finally:
            del self._outputs[request_id]
            if not finished:
                self._manager.cancel_request(request_id)
            self._sampler.remove(request_id)

    def close(self) -> None:
        """See TokenGenerator."""
        self._is_open = False
        self._stop_manager()

    def _deliver_outputs(self) -> None:
        while self._is_open:
            output = self._manager.get_result(timeout=RESULT_POLL_SECONDS)
            if output is not None:
                outputs = self._outputs.get(output.request_id)
                if outputs is not None:  # else the request was cancelled
                    self._loop.call_soon_threadsafe(outputs.put_nowait, output)
            elif not self._manager.is_running():
                time.sleep(RESULT_POLL_SECONDS)

    def _stop_manager(self) -> None:
        self._manager.stop(block=True, timeout=STOP_GRACE_SECONDS, hard_stop=True)


def create_manager(
    model: PreTrainedModel, capacity: BatchCapacity, *, use_graphs: bool = False
) -> ContinuousBatchingManager:
    """Create the manager without starting it.

    Args:
        use_graphs: whether `decode_graphs` is going to be installed.

    Raises:
        UnsupportedSettingsError: the manager would ignore some of the model's generation settings.
    """
    settings = copy.deepcopy(model.generation_config)
    settings.update(**GREEDY_SETTINGS)
    config = transformers.ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=-(-capacity.cache_tokens // PAGE_TOKENS),
        max_batch_tokens=GPU_STEP_TOKENS if model.device.type == "cuda" else STEP_TOKENS,
        max_requests_per_batch=capacity.slots,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=(use_graphs, False),  # of steps with and without the fast path
        max_blocks_per_request=0,  # the fast path for single tokens requires the package flash-attn
        auto_switch_to_flash=False,  # it would download kernels
        drop_unsupported_processors=False,
    )
    manager = model.init_continuous_batching(settings, config)
    if manager.logit_processor.do_processing:
        kinds = ", ".join(type(processor).__name__ for processor in manager.logit_processor.logits_processor)
        raise UnsupportedSettingsError(f"the model's generation settings require {kinds}")
    return manager


def run_trial(manager: ContinuousBatchingManager) -> None:
    """Generate three tokens for each of two concurrent requests on a started manager.

    Raises:
        RuntimeError: the manager fails or does not answer in time.
    """
    pending = 2
    for number in range(pending):
        manager.add_request([0] * (number + 2), request_id=f"trial {number}", max_new_tokens=3)
    deadline = time.monotonic() + TRIAL_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        output = manager.get_result(timeout=RESULT_POLL_SECONDS)
        if output is not None and output.error is None:
            pending -= 1
            if not pending:
                return
        elif output is not None or not manager.is_running():
            raise RuntimeError(f"{output.error if output else 'the generation loop ended'}")
    raise RuntimeError(f"no answer within {TRIAL_TIMEOUT_SECONDS:.0f} seconds")


class SequentialGenerator:
    """Generates the answers to requests one by one with `generate` of transformers."""

    def __init__(self, model: PreTrainedModel, pad_token_id: int | None, loop: asyncio.AbstractEventLoop) -> None:
        self._model, self._pad_token_id, self._loop = model, pad_token_id, loop
        self._pool = ThreadPoolExecutor(1, "one-by-one")

    async def generate(
        self, request: GenerationRequest, sampler: RequestSampler | None, *, stream: bool
    ) -> AsyncGenerator[list[int], None]:
        """See TokenGenerator."""
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        stop = threading.Event()
        generation = self._loop.run_in_executor(
            self._pool,
            self._generate,
            request,
            sampler,
            lambda token: self._loop.call_soon_threadsafe(tokens.put_nowait, token),
            stop,
        )
        generation.add_done_callback(lambda _: tokens.put_nowait(None))
        try:
            while (token := await tokens.get()) is not None:
                yield [token]
            await generation
        finally:
            stop.set()
            generation.cancel()  # effective only if the generation has not started

    def close(self) -> None:
        """See TokenGenerator."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()  # type: ignore[untyped-decorator] # torch is skipped
    def _generate(
        self,
        request: GenerationRequest,
        sampler: RequestSampler | None,
        on_token: Callable[[int], object],
        stop: threading.Event,
    ) -> None:
        input_ids = torch.tensor([request.prompt], device=self._model.device)
        self._model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=request.max_tokens,
            pad_token_id=self._pad_token_id,
            streamer=TokenStreamer(on_token),
            stopping_criteria=transformers.StoppingCriteriaList([EventStoppingCriterion(stop)]),
            logits_processor=transformers.LogitsProcessorList([] if sampler is None else [sampler]),
            **GREEDY_SETTINGS,
        )


class TokenStreamer(transformers.generation.BaseStreamer):  # type: ignore[misc] # transformers is untyped
    """Passes each generated token to a callback. The first value that `generate` passes to `put` is the prompt."""

    def __init__(self, on_token: Callable[[int], object]) -> None:
        self._on_token, self._is_prompt = on_token, True

    def put(self, value: torch.Tensor) -> None:
        """Pass a token to the callback; ignore the prompt."""
        if not self._is_prompt:
            self._on_token(int(value.reshape(-1)[0]))
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing: no token is buffered."""


class EventStoppingCriterion(transformers.StoppingCriteria):  # type: ignore[misc] # transformers is untyped
    """Stops the generation when the event is set."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device, dtype=torch.bool)
