"""GPU attention over the cache of transformers' continuous batching, with PyTorch's FlashAttention for rows of different
lengths: each request attends to its own keys only, and no mask is built.

transformers' `sdpa` multiplies every query of a step with the keys of all requests, and masks the keys of others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_HEAD_WIDTH = 256  # of FlashAttention 2, which also requires a multiple of 8
NAME = "varlen_cache"  # of the attention implementation in transformers


def supports(model: PreTrainedModel) -> bool:
    """Return whether every layer of the model can be computed: full attention in half precision on an NVIDIA GPU."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        model.device.type == "cuda"
        and model.dtype in (torch.bfloat16, torch.float16)
        and kinds == {"full_attention"}
        and width % 8 == 0
        and width <= MAX_HEAD_WIDTH
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attn_logit_softcapping", None)
        and bool(model._supports_flash_attn)
        and util.find_spec("torch.nn.attention.varlen") is not None  # from torch 2.10 on
    )


def install(model: PreTrainedModel) -> None:
    """Register `attend` as an attention implementation of transformers, and select it for the model.

    The model builds no mask for this implementation. The manager has to exist: it would not accept the name.
    """
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    # torch 2.10 to 2.13 name the arguments of causal attention and of shared keys differently.
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    options |= {"enable_gqa": True} if "enable_gqa" in names else {}
    AttentionInterface.register(NAME, partial(attend, kernel=partial(varlen_attn, **options)))
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    model.set_attn_implementation(NAME)


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
    """Compute causal attention of each request's new tokens to its keys, with the signature of transformers.

    Args:
        module: the attention layer.
        query: new tokens of all requests, (1, heads, tokens, width).
        key: keys of the same tokens, (1, key heads, tokens, width).
        value: values of the same tokens, in the shape of `key`.
        attention_mask: None.
        scaling: factor of the scores. Default: 1/√width.
        kernel: causal `varlen_attn` of torch.
        kwargs: the manager's cache, and the cumulative and the longest lengths of the requests.

    Returns:
        The output, (1, tokens, heads, width), and None instead of attention weights.
    """
    keys, values = kwargs["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    lengths = [kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    parts = (part[0].transpose(0, 1) for part in (query, keys, values))
    return kernel(*parts, *lengths, scale=scaling).unsqueeze(0), None
