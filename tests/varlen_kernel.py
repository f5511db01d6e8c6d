"""A reference of torch's `varlen_attn` for the CPU, which has no such kernel."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


@torch.compiler.disable
def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend within each sequence; causal, with the last query at the last key."""
    assert window_size == (-1, 0)
    assert enable_gqa
    parts = []
    for number in range(len(query_ends) - 1):
        first, last = int(query_ends[number]), int(query_ends[number + 1])
        begin, end = int(key_ends[number]), int(key_ends[number + 1])
        assert last - first <= longest_query
        assert end - begin <= longest_key
        mask = torch.ones(last - first, end - begin, dtype=torch.bool).tril(end - begin - (last - first))
        part = scaled_dot_product_attention(
            *(tensor.transpose(0, 1)[None] for tensor in (query[first:last], key[begin:end], value[begin:end])),
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        parts.append(part[0].transpose(0, 1))
    # The kernel does not write the output of padding behind the last sequence.
    parts.append(torch.full_like(query[int(query_ends[-1]) :], torch.nan))
    return torch.cat(parts)
