"""Places of cached tokens for transformers' continuous batching, computed with numpy from the pages of each request.

transformers appends the place of every cached token to a list in each step, and converts the list to a tensor: with 64
requests of 2,000 tokens this takes longer than a step of an 8B model on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
    from transformers.generation.continuous_batching.requests import FutureRequestState


def install(manager: ContinuousBatchingManager) -> None:
    """Let a manager that has not been started compute the places with `list_places`, if all layers have full attention."""
    create = manager._create_batch_processor

    def create_with_places() -> ContinuousBatchProcessor:
        processor = create()
        allocators = list(processor.cache.cache_allocators.values())
        is_new = "prepare_batch_tensors" not in vars(processor.inputs_and_outputs)  # a restart returns the same one
        if is_new and [allocator.layer_type for allocator in allocators] == ["full_attention"]:
            _replace_lists(processor, allocators[0])
        return processor

    manager._create_batch_processor = create_with_places


def _replace_lists(processor: ContinuousBatchProcessor, allocator: FullAttentionCacheAllocator) -> None:
    cache, inputs = processor.cache, processor.inputs_and_outputs
    extend, prepare = cache.extend_read_and_write_indices, inputs.prepare_batch_tensors

    def extend_write_places(request_id: str, past: int, new: int, _: object, places_to_write: list[list[int]]) -> None:
        extend(request_id, past, new, None, places_to_write)

    def prepare_batch_tensors(requests_in_batch: Sequence[FutureRequestState], *args: Any, **kwargs: Any) -> None:
        prepare(requests_in_batch, *args, **kwargs)
        if inputs.max_kv_read:
            places = list_places(allocator, requests_in_batch)
            inputs.read_index_storage[allocator.index, : len(places)] = torch.from_numpy(places).to(inputs.device)
            inputs.true_read_sizes[allocator.index] = len(places)

    cache.extend_read_and_write_indices = extend_write_places
    inputs.prepare_batch_tensors = prepare_batch_tensors


def list_places(
    allocator: FullAttentionCacheAllocator, requests: Sequence[FutureRequestState]
) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]:
    """Return the places of all tokens of the requests, request by request, with the tokens that this step computes."""
    offsets = numpy.arange(allocator.tokens_per_page)
    places: list[numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]] = []
    for request in requests:
        pages = numpy.array(allocator.block_table[request.state.request_id])[:, None] * allocator.block_physical_stride
        places.append((pages + offsets).ravel()[: request.state.position_offset])
    joined: numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]] = numpy.concatenate(places)
    return joined
