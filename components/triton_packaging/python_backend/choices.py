"""The choices of many requests in the manager's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import cb_logits_processors as batching


class Choices(batching.ContinuousBatchingLogitsProcessor):  # type: ignore[misc] # transformers is untyped
    """The choices of the requests in the manager's batch, each made on its request's own row of scores, by the request's name.

    The manager's own sampling has one random state for all requests. Its settings stay greedy: it takes the best of the scores, which is
    what was chosen. Which rows are whose is told before each step, and used in it: both happen in the manager's thread.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - the base class has it so
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._choices: dict[str, Any] = {}
        self._rows: list[Any] = []

    def join(self, manager: Any) -> None:
        """Have a manager that was not started ask these."""
        manager.logit_processor = batching.ContinuousBatchingLogitsProcessorList(transformers.LogitsProcessorList([self]))
        manager.logit_processor.tensors_required = 1

    def put(self, name: str, choice: Any) -> None:
        """Choose so for a request; nothing to remember for a greedy one."""
        if choice:
            self._choices[name] = choice

    def drop(self, name: str) -> None:
        """The request is over."""
        self._choices.pop(name, None)

    def fill_defaults(self, int32_tensor: Any) -> None:
        """Nothing of this goes by tensors."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Any:
        """The choices of the coming step's rows, in their order."""
        self._rows = [self._choices.get(request.state.request_id) for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: Any) -> Any:
        for row, choice in enumerate(self._rows):
            if choice is not None:
                scores[row : row + 1] = choice(None, scores[row : row + 1])
        return scores
