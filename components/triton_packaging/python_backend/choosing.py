"""How a request's next token is chosen from the model's scores: the best one, or one drawn by a random state of the request's own."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers

from .asked import Asked

# Scores divided by less than this leave the numbers that float32 has, and nothing could be drawn; the best token is certain long before.
COLDEST = 1e-4


def choice_of(asked: Asked, device: Any) -> Any:
    """What turns scores into the request's own choice of a token, as transformers' LogitsProcessorList. Empty for a greedy request."""
    steps: list[Any] = []
    if asked.temperature > 0:
        steps.append(transformers.TemperatureLogitsWarper(max(asked.temperature, COLDEST)))
        if asked.top_k > 0:
            steps.append(transformers.TopKLogitsWarper(asked.top_k))
        if asked.top_p < 1:
            steps.append(transformers.TopPLogitsWarper(asked.top_p))
        steps.append(Drawn(asked.seed, device))
    return transformers.LogitsProcessorList(steps)


class Drawn(transformers.LogitsProcessor):  # type: ignore[misc] # transformers is untyped
    """Draws the token by a random state of the request's own: the process has one for all threads, so a seed there repeats nothing while
    others are answered. What is drawn is then the best of the scores."""

    def __init__(self, seed: int, device: Any) -> None:
        self._state = torch.Generator(device)
        self._state.manual_seed(seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chances = torch.softmax(scores.float(), dim=-1)
        if not chances.isfinite().all():
            return scores  # a model that gives no numbers: its answer is as wrong as a greedy one, and the others' are not touched
        drawn = torch.multinomial(chances, 1, generator=self._state)
        return torch.full_like(scores, -math.inf).scatter_(1, drawn, 0.0)
