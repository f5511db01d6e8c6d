"""Two ways to tokens: answers many at once, or one after the other where a model cannot be asked otherwise."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers

from .asked import Asked
from .choosing import choice_of
from .following import Given, StopWhen
from .head import quicken

# Tokens of one step, and of a page of the cache. Prompts longer than a step are read in several.
STEP_TOKENS, PAGE_TOKENS = 512, 32
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
TRIAL_SECONDS = 300.0
STOP_SECONDS = 20.0


class SettingsError(Exception):
    """The model's generation settings ask for what the batch leaves out."""


@dataclass(frozen=True)
class Room:
    """How much is computed at once: requests, and tokens in the cache that they share."""

    slots: int
    cache_tokens: int


class Way(Protocol):
    """A way to tokens."""

    def tokens(self, asked: Asked, *, each: bool) -> AsyncGenerator[list[int], None]:
        """The answer's tokens; with `each` as soon as there are any, else all together. Closing the iterator frees the slot."""
        ...

    def close(self) -> None:
        """End. Answers under way fail."""
        ...


class Batched:
    """Many answers at once, by transformers' ContinuousBatchingManager.

    Raises whatever the manager raises for a model it cannot serve; it is tried with one token before it is believed.
    """

    def __init__(self, model: Any, room: Room, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._ids, self._open = loop, itertools.count(), True
        self._answers: dict[str, asyncio.Queue[Any]] = {}
        from .attention import take_over  # parts of transformers that another version may not have: requests are then answered one by one
        from .choices import Choices

        self._choices, self._device = Choices(), model.device
        self._manager = make_manager(model, room)
        self._choices.join(self._manager)
        take_over()
        quicken(model)
        self._manager.start()
        try:
            try_manager(self._manager)
        except BaseException:
            self._stop()
            raise
        threading.Thread(target=self._deliver, name="answers", daemon=True).start()

    async def tokens(self, asked: Asked, *, each: bool) -> AsyncGenerator[list[int], None]:
        """See Way."""
        name, seen, finished = f"r{next(self._ids)}", 0, False
        answer = self._answers[name] = asyncio.Queue()
        self._choices.put(name, choice_of(asked, self._device))
        try:
            self._ask(name, asked, each)
            while not finished:
                output = await answer.get()
                if output.error is not None:
                    raise RuntimeError(output.error)
                finished = output.is_finished()
                new, seen = output.generated_tokens[seen:], len(output.generated_tokens)
                yield new
        finally:
            del self._answers[name]
            if not finished:
                self._manager.cancel_request(name)
            self._choices.drop(name)

    def close(self) -> None:
        """See Way."""
        self._open = False
        self._stop()

    def _ask(self, name: str, asked: Asked, each: bool) -> None:
        """A manager that failed takes no requests, without a word but its log's; it is started again."""
        for _ in range(2):
            if self._manager.add_request(asked.prompt, request_id=name, max_new_tokens=asked.max_tokens, streaming=each) is not None:
                return
            self._manager.start()
        raise RuntimeError("the batch of requests could not be started again")

    def _deliver(self) -> None:
        """Hand the manager's answers to the event loop. Those to requests that were cancelled find nobody there."""
        while self._open:
            output = self._manager.get_result(timeout=0.5)
            if output is not None:
                self._loop.call_soon_threadsafe(self._hand_over, output)
            elif not self._manager.is_running():
                time.sleep(0.5)

    def _hand_over(self, output: Any) -> None:
        answer = self._answers.get(output.request_id)
        if answer is not None:
            answer.put_nowait(output)

    def _stop(self) -> None:
        self._manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)


def make_manager(model: Any, room: Room) -> Any:
    """The manager, not started. Raises SettingsError where it would leave out what the model's generation settings ask for."""
    settings = copy.deepcopy(model.generation_config)
    settings.update(**GREEDY)
    config = transformers.ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=-(-room.cache_tokens // PAGE_TOKENS),
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=room.slots,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,  # it would look for kernels on the network
        drop_unsupported_processors=False,
    )
    manager = model.init_continuous_batching(settings, config)
    if manager.logit_processor.do_processing:
        kinds = ", ".join(type(processor).__name__ for processor in manager.logit_processor.logits_processor)
        raise SettingsError(f"the model's generation settings need {kinds}")
    return manager


def try_manager(manager: Any) -> None:
    """Let a started manager answer two requests at once: their prompts, and tokens after them. Raises RuntimeError where it does not."""
    waiting = 2
    for number in range(waiting):
        manager.add_request([0] * (number + 2), request_id=f"trial {number}", max_new_tokens=3)
    until = time.monotonic() + TRIAL_SECONDS
    while time.monotonic() < until:
        output = manager.get_result(timeout=0.5)
        if output is not None and output.error is None:
            waiting -= 1
            if not waiting:
                return
        elif output is not None or not manager.is_running():
            raise RuntimeError(f"{output.error if output else 'the generation loop ended'}")
    raise RuntimeError(f"no answer in {TRIAL_SECONDS:.0f} seconds")


class OneByOne:
    """Answers by transformers' generate, one after the other."""

    def __init__(self, model: Any, pad: int | None, loop: asyncio.AbstractEventLoop) -> None:
        self._model, self._pad, self._loop = model, pad, loop
        self._pool = ThreadPoolExecutor(1, "one-by-one")

    async def tokens(self, asked: Asked, *, each: bool) -> AsyncGenerator[list[int], None]:
        """See Way."""
        made: asyncio.Queue[int | None] = asyncio.Queue()
        stop = threading.Event()
        running = self._loop.run_in_executor(
            self._pool, self._generate, asked, lambda token: self._loop.call_soon_threadsafe(made.put_nowait, token), stop
        )
        running.add_done_callback(lambda _: made.put_nowait(None))
        try:
            while (token := await made.get()) is not None:
                yield [token]
            await running
        finally:
            stop.set()
            running.cancel()  # where it did not begin yet

    def close(self) -> None:
        """See Way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()  # type: ignore[untyped-decorator] # torch is skipped
    def _generate(self, asked: Asked, give: Callable[[int], Any], stop: threading.Event) -> None:
        ids = torch.tensor([asked.prompt], device=self._model.device)
        self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.max_tokens, pad_token_id=self._pad,
            streamer=Given(give), stopping_criteria=transformers.StoppingCriteriaList([StopWhen(stop)]),
            logits_processor=choice_of(asked, ids.device), **GREEDY,
        )  # fmt: skip
