"""CUDA graphs for the decoding steps of transformers' continuous batching: one launch per step instead of hundreds.

transformers can capture whole steps, but its graphs would contain the samplers of the requests that they were captured
with. Here a graph ends with the logits, and the samplers run after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import pad_to_interval, pad_to_pow2, stream_context

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

logger = logging.getLogger(__name__)

# A graph has fixed sizes, to which a step is padded: keys to this number of tokens, or to a quarter of the power of two
# below their number. The first step of a size captures its graph, which takes as long as two steps without one.
MIN_KEY_STEP = 4096
MAX_GRAPHS = 256  # steps of further sizes are computed directly


def install(manager: ContinuousBatchingManager) -> None:
    """Let a manager that has not been started compute with `DecodeGraphRunner`."""
    create = manager._create_batch_processor

    def create_with_graphs() -> ContinuousBatchProcessor:
        processor = create()
        if not isinstance(processor.model_runner, DecodeGraphRunner):
            processor.model_runner = DecodeGraphRunner(
                processor.logit_processor,
                processor.cb_config,
                processor.inputs_and_outputs,
                processor.cache,
                do_sample=processor.do_sample,
                return_logprobs=processor.return_logprobs,
            )
        return processor

    manager._create_batch_processor = create_with_graphs


class DecodeGraphRunner(ModelRunner):  # type: ignore[misc] # transformers is untyped
    """Computes steps of at most one token per slot as CUDA graphs, and longer steps, which process prompts, directly.

    On a device without graphs, steps are padded in the same way and computed directly.
    """

    _logits: torch.Tensor | None = None  # (slots, vocabulary), written by every step

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        """Return the numbers of new and of cached tokens to which the next step is padded."""
        self.pad_inputs = max_kv_read > 0 and num_q_tokens <= self.cb_config.max_requests_per_batch
        if not self.pad_inputs:
            return num_q_tokens, max_kv_read
        key_step = max(MIN_KEY_STEP, 1 << max(0, max_kv_read.bit_length() - 3))
        return (
            pad_to_pow2(num_q_tokens, self.cb_config.max_requests_per_batch),
            pad_to_interval(max_kv_read, key_step, self.cache.max_tokens_read),
        )

    def compute_batch(self, model: PreTrainedModel, batch_data: dict[str, Any]) -> None:
        """Compute the logits of a step, as a graph if the step is padded, and choose the next tokens."""
        streams = self.inputs_and_outputs
        if self._logits is None:
            shape = (self.cb_config.max_requests_per_batch, model.get_output_embeddings().weight.shape[0])
            self._logits = torch.empty(shape, dtype=model.dtype, device=model.device)
        if streams.compute_stream is not None:  # the inputs were copied on the default stream
            streams.compute_stream.wait_stream(torch.get_device_module().current_stream())
        super().compute_batch(model, batch_data)
        rows = streams.num_request_in_batch
        with stream_context(streams.compute_stream):
            scores = self._logits[:rows].float()
            if self.logit_processor.do_processing:
                tokens = batch_data["input_ids"][0, batch_data["logits_indices"][:rows]]
                scores = self.logit_processor(tokens, scores, batch_data["logits_processor_args"][:, :rows])
            self._sample(scores[None], streams.output_ids)

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        graphs = self.inputs_and_outputs.graphs._storage
        has_graph = self.inputs_and_outputs._get_graph_key() in graphs or len(graphs) < MAX_GRAPHS
        return self._compute_logits, self.pad_inputs and self.use_cuda_graph_varlen and has_graph

    def _capture_graph(self, forward_fn: Callable[..., None], compute_stream: torch.cuda.Stream, *args: Any) -> None:
        """Capture the graph of a step. If that fails, compute this step and all later ones without graphs."""
        try:
            super()._capture_graph(forward_fn, compute_stream, *args)
        except RuntimeError as error:  # a layer waits for the device, such as one with experts, or memory ran out
            logger.warning("decoding without CUDA graphs: %s", error)
            self.use_cuda_graph_varlen = False
            with stream_context(compute_stream):
                forward_fn(*args)

    def _compute_logits(self, model: PreTrainedModel, batch_data: dict[str, Any], *_: torch.Tensor) -> None:
        logits = model(**batch_data).logits[0]
        if "logits_to_keep" not in batch_data:
            logits = logits[batch_data["logits_indices"]]
        assert self._logits is not None
        self._logits[: len(logits)] = logits
