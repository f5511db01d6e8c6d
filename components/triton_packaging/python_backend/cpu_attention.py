"""CPU attention over the cache of transformers' continuous batching: each request attends to its own keys only.

transformers multiplies every query of a step with the keys of all requests, and masks the keys of other requests. The
cost grows with the square of the number of requests, and the keys are copied for every group of heads.
"""

# Attention took 5 of 34 ms per step with 16 requests of 60 tokens, and most of the step with 16 requests of 2,000
# tokens.

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

Span = tuple[int, int]  # first token and end of a request, as indices into a concatenation of all requests

# Arguments of attention variants that `attend` does not support; transformers computes these variants.
UNSUPPORTED_ARGUMENTS = ("block_table", "position_bias", "softcap", "s_aux")
# Requests are padded to the longest and computed together up to this number of keys, or while their lengths differ by
# at most this factor.
MAX_PADDED_KEYS, MAX_LENGTH_RATIO = 4096, 2


def install() -> None:
    """Register `attend` as transformers' `sdpa` attention."""
    AttentionInterface.register("sdpa", attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature of transformers' attention functions.

    Delegates to transformers unless the call is full attention on a CPU over the cache of continuous batching.

    Args:
        query: queries of all requests, (1, heads, tokens, width).
        key: keys of the same tokens, (1, key heads, tokens, width).
        value: values of the same tokens, in the shape of `key`.
        attention_mask: mask of the keys of all requests, (…, tokens, keys).
        scaling: factor of the scores. Default: 1/√width.

    Returns:
        The output, (1, tokens, heads, width), and None instead of attention weights.
    """
    cache = kwargs.get("cache")
    if not (
        isinstance(cache, PagedAttentionCache)
        and query.device.type == "cpu"
        and cache.layer_to_allocator[module.layer_idx].layer_type == "full_attention"
        and all(kwargs.get(name) is None for name in UNSUPPORTED_ARGUMENTS)
    ):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    query_spans, key_spans = _compute_spans(kwargs["cu_seq_lens_q"]), _compute_spans(kwargs["cu_seq_lens_k"])
    out = torch.empty_like(query)
    for group in group_decoding_requests(query_spans, key_spans):
        rows = [query_spans[index][0] for index in group]
        spans = [key_spans[index] for index in group]
        out[:, :, rows] = _attend_decoding(query[:, :, rows], keys, values, spans, scaling)
    groups = query.shape[1] // keys.shape[1]
    for (first, last), (begin, end) in zip(query_spans, key_spans, strict=True):
        if last - first > 1:  # a prompt or a chunk of a prompt: causal for the first chunk, else masked
            is_first_chunk = last - first == end - begin
            out[:, :, first:last] = scaled_dot_product_attention(
                query[:, :, first:last],
                repeat_kv(keys[:, :, begin:end], groups),
                repeat_kv(values[:, :, begin:end], groups),
                attn_mask=None if is_first_chunk else attention_mask[..., first:last, begin:end],
                is_causal=is_first_chunk,
                scale=scaling,
            )
    return out.transpose(1, 2).contiguous(), None


def _compute_spans(cumulative: torch.Tensor) -> list[Span]:
    return list(itertools.pairwise(cumulative.tolist()))


def group_decoding_requests(query_spans: Sequence[Span], key_spans: Sequence[Span]) -> Iterator[list[int]]:
    """Yield the requests with one new token in groups of similar key counts, as indices into the spans."""
    lengths = {
        index: key_spans[index][1] - key_spans[index][0]
        for index, (first, last) in enumerate(query_spans)
        if last - first == 1
    }
    group: list[int] = []
    for index in sorted(lengths, key=lengths.__getitem__):
        is_too_long = group and lengths[index] > MAX_LENGTH_RATIO * lengths[group[0]]
        if is_too_long and lengths[index] * (len(group) + 1) > MAX_PADDED_KEYS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _attend_decoding(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_spans: Sequence[Span], scaling: float | None
) -> torch.Tensor:
    """Compute attention of one token per request: query and output have the shape (1, heads, requests, width)."""
    _, heads, count, width = query.shape
    key_heads = keys.shape[1]
    # The heads that share a key head become its queries, so the keys are not copied for each head.
    queries = query[0].transpose(0, 1).reshape(count, key_heads, heads // key_heads, width)
    if count == 1:
        begin, end = key_spans[0]
        own_keys, own_values, mask = keys[:, :, begin:end], values[:, :, begin:end], None
    else:
        # Padded keys and values are (requests, key heads, longest, width), the mask (requests, 1, 1, longest).
        index, is_own = _build_padded_index(tuple(key_spans))
        own_keys, own_values = (
            part[0].transpose(0, 1).index_select(0, index).view(*is_own.shape, *part.shape[1::2]).transpose(1, 2)
            for part in (keys, values)
        )
        mask = is_own[:, None, None]
    out = scaled_dot_product_attention(queries, own_keys, own_values, attn_mask=mask, scale=scaling)
    return out.reshape(count, heads, width).transpose(0, 1).unsqueeze(0)


@lru_cache(maxsize=8)  # all layers of a step have the same spans
def _build_padded_index(key_spans: tuple[Span, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of each request's keys, flattened from (requests, longest), and the mask of real keys."""
    begins, ends = torch.tensor(key_spans).T[..., None]
    positions = begins + torch.arange(int((ends - begins).max()))
    is_own = positions < ends
    return torch.where(is_own, positions, begins).flatten(), is_own  # padding repeats the first key
