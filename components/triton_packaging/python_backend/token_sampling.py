"""Token sampling with a separate random state for each request."""

from __future__ import annotations

import math

import torch
import transformers

from .generation_request import GenerationRequest

# A smaller divisor could exceed the range of float32. The best token has nearly all probability at this temperature.
MIN_TEMPERATURE = 1e-4


def create_sampler(request: GenerationRequest, device: torch.device) -> transformers.LogitsProcessorList:
    """Return the logits processors that leave only the chosen token finite; an empty list for a greedy request."""
    steps: list[transformers.LogitsProcessor] = []
    if request.temperature > 0:
        steps.append(transformers.TemperatureLogitsWarper(max(request.temperature, MIN_TEMPERATURE)))
        if request.top_k > 0:
            steps.append(transformers.TopKLogitsWarper(request.top_k))
        if request.top_p < 1:
            steps.append(transformers.TopPLogitsWarper(request.top_p))
        steps.append(SeededSampler(request.seed, device))
    return transformers.LogitsProcessorList(steps)


class SeededSampler(transformers.LogitsProcessor):  # type: ignore[misc] # transformers is untyped
    """Samples the token with the request's own random state, and makes it the only finite score.

    All threads share the process-wide random state: seeding it would not make a request repeatable while the
    model answers other requests.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(scores.float(), dim=-1)
        if not probabilities.isfinite().all():
            return (
                scores  # NaN logits of a broken model: an error in sampling would fail the other requests of the batch
            )
        token = torch.multinomial(probabilities, 1, generator=self._generator)
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0.0)
