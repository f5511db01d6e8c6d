"""Shadow traffic: copies of answered requests are sent to a second model, and both answers are compared."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram

from pipelines.gateway.completions import Completion
from pipelines.gateway.errors import RequestError
from pipelines.gateway.telemetry import AnswerMeasures
from pipelines.gateway.triton_models import ServedModel, TritonModels

QUEUE_LENGTH, CONCURRENCY = 32, 2
CLOSE_SECONDS = 5.0  # for the waiting copies at the end
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
EQUAL, DIFFERENT, FAILED, DROPPED = "equal", "different", "failed", "dropped"

# Captures a shadow answer, with its HTTP status, duration in seconds, and seconds to the first token.
CaptureAnswer = Callable[[Completion, int, float, float | None], bool]

logger = logging.getLogger("tuneline.gateway")


@dataclass(frozen=True)
class _Copy:
    """An answered request and the model that receives its copy. `seconds` is the duration of the first answer."""

    route: str
    model: ServedModel
    answered: Completion
    seconds: float
    capture: CaptureAnswer | None


@dataclass
class ShadowTraffic:
    """Sends copies one after another from a bounded queue; a full queue drops them.

    Attributes:
        triton: the model server.
        seconds: limit of the time for one answer.
        outcomes: number of copies by route, model and outcome.
    """

    triton: TritonModels
    seconds: float
    registry: CollectorRegistry
    outcomes: Tally[tuple[str, str, str]] = field(default_factory=Tally)
    _workers: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[_Copy] = asyncio.Queue(QUEUE_LENGTH)
        labels = ("route", "model", "version")
        self._answers = Counter(
            "tuneline_gateway_shadow_answers", "Copied requests by outcome: equal, different, failed or dropped.",
            (*labels, "outcome"), registry=self.registry,
        )  # fmt: skip
        self._length = Histogram(
            "tuneline_gateway_shadow_length_ratio", "Length of a shadow answer divided by that of the answer to the client.",
            labels, buckets=RATIOS, registry=self.registry,
        )  # fmt: skip
        self._duration = Histogram(
            "tuneline_gateway_shadow_duration_ratio", "Duration of a shadow answer divided by that of the answer to the client.",
            labels, buckets=RATIOS, registry=self.registry,
        )  # fmt: skip

    def submit(
        self,
        route: str,
        model: ServedModel,
        answered: Completion,
        seconds: float,
        capture: CaptureAnswer | None = None,
    ) -> None:
        """Queue a copy of an answered request, or drop it if the queue is full."""
        if not self._workers:
            self._workers = [asyncio.create_task(self._work()) for _ in range(CONCURRENCY)]
        try:
            self._queue.put_nowait(_Copy(route, model, answered, seconds, capture))
        except asyncio.QueueFull:
            self.drop(route, model)

    def drop(self, route: str, model: ServedModel) -> None:
        """Count a copy that is not sent."""
        self._count(route, model, DROPPED)

    async def close(self) -> None:
        """Answer the waiting copies, so that their answers are captured; after CLOSE_SECONDS, drop them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._queue.join()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        while not self._queue.empty():
            copy = self._queue.get_nowait()
            self.drop(copy.route, copy.model)

    async def _work(self) -> None:
        while True:
            copy = await self._queue.get()
            try:
                await self._answer(copy)
            except asyncio.CancelledError:
                self.drop(copy.route, copy.model)
                raise
            self._queue.task_done()

    async def _answer(self, copy: _Copy) -> None:
        began, measures, status = time.perf_counter(), AnswerMeasures(), 200
        shadow = Completion(self.triton, copy.model, copy.answered.call, copy.answered.form, measures)
        try:
            async with asyncio.timeout(self.seconds):
                await shadow.answer()
        except Exception as error:  # no failure of a copy may end the worker
            if not isinstance(error, RequestError | TimeoutError):
                logger.error("shadow_failed", exc_info=error)
            self._count(copy.route, copy.model, FAILED)
            status = error.status if isinstance(error, RequestError) else 500
        seconds = time.perf_counter() - began
        if copy.capture:
            copy.capture(shadow, status, seconds, measures.first_seconds)
        if status != 200:
            return
        labels = (copy.route, copy.model.client_name, copy.model.version)
        texts = [[choice.text for choice in each.choices] for each in (copy.answered, shadow)]
        self._count(copy.route, copy.model, EQUAL if texts[0] == texts[1] else DIFFERENT)
        lengths = [sum(map(len, each)) for each in texts]
        self._length.labels(*labels).observe(lengths[1] / max(1, lengths[0]))
        self._duration.labels(*labels).observe(seconds / max(1e-6, copy.seconds))

    def _count(self, route: str, model: ServedModel, outcome: str) -> None:
        self.outcomes[route, model.client_name, outcome] += 1
        self._answers.labels(route, model.client_name, model.version, outcome).inc()
