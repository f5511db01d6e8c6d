"""Metrics of the gateway for Prometheus, and traces through OpenTelemetry's API."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pipelines.gateway.backend_protocols import AnswerChunk
from pipelines.gateway.triton_models import ServedModel

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class GatewayMetrics:
    """The gateway's metrics. Labels: model and version as served, key as named in the key file."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels, registry = ("model", "version", "key"), self.registry
        self.requests = Counter(
            "tuneline_gateway_requests",
            "Requests by endpoint and status.",
            ("endpoint", "status", *labels),
            registry=registry,
        )
        self.duration = Histogram(
            "tuneline_gateway_request_seconds", "Time from a request to the end of its answer.", labels,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "tuneline_gateway_time_to_first_token_seconds", "Time from a request to the first text of its answer.", labels,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.token_gap = Histogram(
            "tuneline_gateway_inter_token_seconds", "Time between consecutive chunks of an answer, per token.", labels,
            buckets=TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("tuneline_gateway_prompt_tokens", "Prompt tokens.", labels, registry=registry)
        self.completion_tokens = Counter(
            "tuneline_gateway_completion_tokens", "Answer tokens.", labels, registry=registry
        )
        self.running = Gauge(
            "tuneline_gateway_running_requests", "Requests that are being answered.", registry=registry
        )
        self.draining = Gauge("tuneline_gateway_draining", "1 while the server is draining.", registry=registry)
        self.ready_models = Gauge(
            "tuneline_gateway_ready_models", "Models that are ready to answer, including adapters.", registry=registry
        )
        self.slots = Gauge(
            "tuneline_gateway_slots", "Requests that the model processes concurrently.", ("model", "version"),
            registry=registry,
        )  # fmt: skip

    def record_models(self, models: Iterable[ServedModel]) -> None:
        """Set the gauges of the models that are ready now."""
        served = list(models)
        self.ready_models.set(len(served))
        self.slots.clear()  # a model that is no longer served
        for model in served:
            if model.slots is not None and not model.adapter:  # an adapter shares the slots of its model
                self.slots.labels(model.name, model.version).set(model.slots)


class AnswerMeasures:
    """Times and token counts of one request. Recorded in plain lists, because a histogram update costs microseconds.

    Attributes:
        choices: number of answers to each prompt. A prompt is counted once for all of its answers.
    """

    def __init__(self) -> None:
        self.choices = 1
        self.first_seconds: float | None = None
        self.prompt_tokens: dict[int, int] = {}
        self.completion_tokens: dict[int, int] = {}
        self.gaps: list[tuple[float, int]] = []
        self._last: dict[int, float] = {}

    @property
    def total_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        counts: dict[int, int] = {}
        for number, tokens in self.prompt_tokens.items():
            counts[number // self.choices] = tokens
        return sum(counts.values())

    @property
    def total_completion_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.completion_tokens.values())

    def record(self, number: int, seconds: float, chunk: AnswerChunk) -> None:
        """Record a chunk of the answer `number`, `seconds` after the request."""
        if self.first_seconds is None:
            self.first_seconds = seconds
        if number in self._last and (tokens := chunk.completion_tokens - self.completion_tokens[number]) > 0:
            self.gaps.append(((seconds - self._last[number]) / tokens, tokens))
        self._last[number] = seconds
        self.prompt_tokens[number], self.completion_tokens[number] = chunk.prompt_tokens, chunk.completion_tokens

    def publish(self, metrics: GatewayMetrics, labels: tuple[str, str, str], seconds: float) -> None:
        """Add the request to the metrics.

        Args:
            metrics: the gateway's metrics.
            labels: model, version and key.
            seconds: duration of the request.
        """
        metrics.duration.labels(*labels).observe(seconds)
        if self.first_seconds is not None:
            metrics.first_token.labels(*labels).observe(self.first_seconds)
        gap = metrics.token_gap.labels(*labels)
        for each, _ in self.gaps:
            gap.observe(each)
        metrics.prompt_tokens.labels(*labels).inc(self.total_prompt_tokens)
        metrics.completion_tokens.labels(*labels).inc(self.total_completion_tokens)
