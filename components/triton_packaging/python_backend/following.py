"""Following transformers' generate token by token, and stopping it. Imports nothing of ours: both backends take it along."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers


class Given(transformers.generation.BaseStreamer):  # type: ignore[misc] # transformers is untyped
    """Hands over each token as generate chooses it. The first thing generate shows is the prompt."""

    def __init__(self, give: Callable[[int], Any]) -> None:
        self._give, self._prompt = give, True

    def put(self, value: Any) -> None:
        """A token, or the prompt."""
        if not self._prompt:
            self._give(int(value.reshape(-1)[0]))
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


class StopWhen(transformers.StoppingCriteria):  # type: ignore[misc] # transformers is untyped
    """Stops the generation when nobody wants it any more."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._stop.is_set(), device=input_ids.device, dtype=torch.bool)
