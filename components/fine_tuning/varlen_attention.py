"""Attention of packed rows with PyTorch's FlashAttention for sequences of different lengths, on NVIDIA GPUs.

transformers' `sdpa` computes packed rows with a block-diagonal mask: a micro-batch of R rows costs R times the attention
of its rows, and twice that for the masked upper half. These kernels compute only the pairs of tokens that a row has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_HEAD_WIDTH = 256  # of FlashAttention 2, which also requires a multiple of 8
# From this length on, rows of equal lengths are computed by cuDNN, if it supports the device. On an H200 (torch 2.11) with
# the heads of Llama 3 8B, forward and backward of 16,384 tokens took 2.3 ms per layer instead of 4.0 with rows of 2,048
# tokens, and 7.6 instead of 12.7 with rows of 8,192.
MIN_EQUAL_LENGTH = 1024
NAME = "varlen"  # of the attention kernel in a recipe and in transformers


def is_available() -> bool:
    """Return whether this torch has the kernels: from 2.10 on."""
    return util.find_spec("torch.nn.attention.varlen") is not None


def register() -> None:
    """Register the kernel as an attention implementation of transformers."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    # torch 2.10 to 2.13 name the arguments of causal attention and of shared keys differently.
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    options |= {"enable_gqa": True} if "enable_gqa" in names else {}
    AttentionInterface.register(NAME, partial(attend, kernel=partial(varlen_attn, **options)))
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # no mask, unless a batch is padded


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    kernel: Callable[..., torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each row, with the signature of transformers' attention functions.

    Rows are separated by `cu_seq_lens_q` and `max_length_q`, which TRL's collator adds to a batch, or else by position
    ids. Long rows of equal lengths are computed by cuDNN; generation, padded batches and other data types by
    transformers' `sdpa`.

    Args:
        module: The attention layer.
        query: (1, heads, tokens, width).
        key: (1, key heads, tokens, width).
        value: In the shape of `key`.
        attention_mask: None, or the mask of a padded batch, (rows, tokens).
        scaling: Factor of the scores. Default: 1/√width.
        kernel: Causal `varlen_attn` of torch.
        kwargs: `cu_seq_lens_q`, `max_length_q`, `position_ids` and `sliding_window`; others are passed on.

    Returns:
        The output, (1, tokens, heads, width), and None instead of attention weights.
    """
    import torch

    is_supported = (
        query.shape[0] == 1
        and query.shape[2] == key.shape[2]
        and query.dtype in (torch.bfloat16, torch.float16)
        and attention_mask is None
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= MAX_HEAD_WIDTH
        and not kwargs.get("sliding_window")
        and kwargs.get("softcap") is None
        and kwargs.get("s_aux") is None
    )
    if not is_supported:
        return _attend_with_sdpa(module, query, key, value, attention_mask, scaling, kwargs)
    ends, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if ends is None or longest is None:
        ends, longest = _find_rows(kwargs.get("position_ids"), query)
    if longest >= MIN_EQUAL_LENGTH and (ends.shape[0] - 1) * longest == query.shape[2]:
        return _attend_equal_rows(query, key, value, longest, scaling), None
    parts = (part[0].transpose(0, 1) for part in (query, key, value))
    out = kernel(*parts, ends, ends, longest, longest, scale=scaling)
    return out.unsqueeze(0), None


def _attend_equal_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scaling: float | None
) -> torch.Tensor:
    """Compute causal attention within rows of this length; arguments and result have the shapes of `attend`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    queries, keys, values = (part[0].unflatten(1, (-1, length)).transpose(0, 1) for part in (query, key, value))
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _find_rows(position_ids: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the cumulative lengths of the rows, which start at position 0, and the longest length."""
    import torch

    tokens = query.shape[2]
    if position_ids is None:
        return torch.tensor([0, tokens], dtype=torch.int32, device=query.device), tokens
    starts = (position_ids[0] == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([tokens])]).to(torch.int32)
    return ends, int(ends.diff().max())


def _attend_with_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    padding: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Compute attention with transformers' `sdpa` and a mask of causality, padding, rows and the sliding window."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tokens, keys = query.shape[2], key.shape[2]
    columns = torch.arange(keys, device=query.device)
    rows = torch.arange(keys - tokens, keys, device=query.device)[:, None]
    mask = (columns <= rows)[None]
    if window := kwargs.get("sliding_window"):
        mask = mask & (rows - columns < window)
    positions = kwargs.get("position_ids")
    if positions is not None and tokens == keys and padding is None:
        numbers = (positions == 0).cumsum(-1)
        mask = mask & (numbers[:, :, None] == numbers[:, None])
    if padding is not None:
        mask = mask & padding[:, None, :keys].bool()
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, mask[:, None], scaling=scaling, **kwargs
    )
