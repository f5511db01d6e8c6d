"""Attention over the manager's cache on a CPU: each request's queries look at its own keys alone.

transformers computes all requests of a step in one product, every query with the keys of all requests, and masks what is another's: work
that grows with the square of the requests, and copies the keys for every group of heads. At 16 requests of 60 tokens that took 5 of 34 ms
of a step, and at 16 of 2,000 most of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

# What some models add to attention; transformers computes those.
EXTRAS = ("position_bias", "softcap", "s_aux")
# Requests are computed together, padded to the longest, while that makes no more keys than this or they differ by no more than that factor.
FEW_KEYS, SPREAD = 4096, 2


def take_over() -> None:
    """Have transformers' `sdpa` attend as this module says where it reads the manager's cache, and as before elsewhere."""
    AttentionInterface.register("sdpa", attend)


def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **kwargs: Any) -> Any:
    """An attention function of transformers: queries (1, heads, tokens, width) of all requests to (1, tokens, heads, width) and None."""
    cache = cache_of_all(module, query, kwargs)
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    asked = spans(kwargs["cu_seq_lens_q"])
    known = spans(kwargs["cu_seq_lens_k"])
    out = torch.empty_like(query)
    for group in together(asked, known):
        rows = [asked[one][0] for one in group]
        out[:, :, rows] = next_tokens(query[:, :, rows], keys, values, [known[one] for one in group], scaling)
    for (first, last), (begin, end) in zip(asked, known, strict=True):
        if last - first > 1:
            mask = attention_mask[..., first:last, begin:end]
            out[:, :, first:last] = prompt(query[:, :, first:last], keys[:, :, begin:end], values[:, :, begin:end], mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def cache_of_all(module: Any, query: Any, kwargs: dict[str, Any]) -> PagedAttentionCache | None:
    """The manager's cache where this is attention over all tokens in it, on a CPU, and nothing else is asked for; else None."""
    cache = kwargs.get("cache")
    if not isinstance(cache, PagedAttentionCache) or query.device.type != "cpu" or kwargs.get("block_table") is not None:
        return None
    everything = cache.layer_to_allocator[module.layer_idx].layer_type == "full_attention"
    return cache if everything and all(kwargs.get(name) is None for name in EXTRAS) else None


def spans(cumulative: Any) -> list[tuple[int, int]]:
    """Where each request's tokens begin and end."""
    ends = cumulative.tolist()
    return list(itertools.pairwise(ends))


def together(asked: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """The requests that want one token, in groups of about equally many keys."""
    length = {one: known[one][1] - known[one][0] for one, (first, last) in enumerate(asked) if last - first == 1}
    group: list[int] = []
    for one in sorted(length, key=length.__getitem__):
        if group and length[one] > SPREAD * length[group[0]] and length[one] * (len(group) + 1) > FEW_KEYS:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def next_tokens(query: Any, keys: Any, values: Any, known: Sequence[tuple[int, int]], scaling: float | None) -> Any:
    """One token each: queries (1, heads, requests, width), the same shape back. The heads of a group are its keys' queries, so that no key
    is copied for them."""
    _, heads, count, width = query.shape
    shared = keys.shape[1]
    queries = query[0].transpose(0, 1).reshape(count, shared, heads // shared, width)
    if count == 1:
        begin, end = known[0]
        own, worth, mask = keys[:, :, begin:end], values[:, :, begin:end], None
    else:
        own, worth, mask = padded(keys, values, known)
    out = scaled_dot_product_attention(queries, own, worth, attn_mask=mask, scale=scaling)
    return out.reshape(count, heads, width).transpose(0, 1).unsqueeze(0)


def padded(keys: Any, values: Any, known: Sequence[tuple[int, int]]) -> tuple[Any, Any, Any]:
    """Each request's keys and values, (requests, shared heads, longest, width), and the mask of those that are its own, (requests, 1, 1,
    longest)."""
    index, there = places(tuple(known))
    own, worth = (part[0].transpose(0, 1).index_select(0, index).view(*there.shape, *part.shape[1::2]) for part in (keys, values))
    return own.transpose(1, 2), worth.transpose(1, 2), there[:, None, None]


@lru_cache(maxsize=8)  # all layers of a step ask for the same
def places(known: tuple[tuple[int, int], ...]) -> tuple[Any, Any]:
    """Where each request's keys are, (requests x longest), its first one in the places that are not its own; and which are its own."""
    begins, ends = torch.tensor(known).T[..., None]
    wanted = begins + torch.arange(int((ends - begins).max()))
    there = wanted < ends
    return torch.where(there, wanted, begins).flatten(), there


def prompt(query: Any, keys: Any, values: Any, mask: Any, scaling: float | None) -> Any:
    """The tokens of a prompt, or of a part of one, (1, heads, tokens, width): causal where it is the first part, else as the mask says."""
    groups = query.shape[1] // keys.shape[1]
    whole = query.shape[2] == keys.shape[2]
    return scaled_dot_product_attention(
        query, repeat_kv(keys, groups), repeat_kv(values, groups), attn_mask=None if whole else mask, is_causal=whole, scale=scaling
    )
