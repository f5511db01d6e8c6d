"""Per-request sampling inside the batch of transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import transformers
from transformers.generation.continuous_batching import cb_logits_processors as batching

from .token_sampling import RequestSampler, sample_together

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import FutureRequestState


class BatchSampler(batching.ContinuousBatchingLogitsProcessor):  # type: ignore[misc] # transformers is untyped
    """Applies each request's own sampler, registered by request ID, to its row of logits.

    The manager's own sampling has one random state for all requests. The manager therefore decodes greedily, and
    selects the only token that the request's sampler left finite. `prepare_tensor_args` and `__call__` run in the
    manager's thread.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - declared so in the base class
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._samplers: dict[str, RequestSampler] = {}
        self._rows: list[RequestSampler | None] = []

    def install(self, manager: ContinuousBatchingManager) -> None:
        """Install this sampler in a manager that has not been started."""
        manager.logit_processor = batching.ContinuousBatchingLogitsProcessorList(
            transformers.LogitsProcessorList([self])
        )
        manager.logit_processor.tensors_required = 1

    def add(self, request_id: str, sampler: RequestSampler | None) -> None:
        """Register a request's sampler; a greedy request has none."""
        if sampler is not None:
            self._samplers[request_id] = sampler

    def remove(self, request_id: str) -> None:
        """Remove the sampler of a finished request."""
        self._samplers.pop(request_id, None)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Clear the argument tensor, which this sampler does not use."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[FutureRequestState]) -> torch.Tensor:
        """Collect the samplers for the rows of the next step, in row order.

        Returns:
            The argument tensor, which this sampler does not use: zeros of shape (rows,).
        """
        self._rows = [self._samplers.get(request.state.request_id) for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        groups: dict[object, list[int]] = {}
        for row, sampler in enumerate(self._rows):
            if sampler is not None and sampler.settings is None:
                scores[row : row + 1] = sampler(None, scores[row : row + 1])
            elif sampler is not None:
                groups.setdefault(sampler.settings, []).append(row)
        for rows in groups.values():
            samplers = [sampler for row in rows if (sampler := self._rows[row])]
            scores[rows] = sample_together(samplers, scores[rows])
        return scores
