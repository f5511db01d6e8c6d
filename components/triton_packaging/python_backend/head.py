"""The model's last layer on a CPU, which makes scores for every word of the vocabulary: in a small model most of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The share of a model's parameters from which its last layer is kept a second time, in the order oneDNN computes in. Milliseconds for
# 4, 12 and 16 requests (49,152 words of width 384, float32, one core, torch 2.13): 7, 10 and 12 so, and 16, 37 and 15 by torch's product.
LARGE = 0.25
# Else: rows that torch's product with a wide matrix in float32 takes longer for than for FULL of them.
FEW, FULL = 4, 16


def quicken(model: Any) -> None:
    """Have the model's last layer compute several rows quicker, with the same scores but for rounding.

    Does nothing on a GPU, in another number format, or for a model whose last layer is no plain one.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.device.type != "cpu" or head.weight.dtype != torch.float32:
        return
    large = head.weight.numel() >= LARGE * sum(each.numel() for each in model.parameters())
    several = packed(head) if large and head.bias is None and torch.backends.mkldnn.is_available() else filled(head)
    plain = head.forward

    def forward(states: Any) -> Any:
        alone = states.shape[:-2].numel() != 1 or states.shape[-2] == 1
        return plain(states) if alone else several(states)

    head.forward = forward


def packed(head: Any) -> Callable[[Any], Any]:
    """By oneDNN, from weights put in its order once: what torch.compile makes of a linear layer whose weights stay."""
    weight = torch.ops.mkldnn._reorder_linear_weight(head.weight.detach(), FULL)
    return lambda states: torch.ops.mkldnn._linear_pointwise(states, weight, None, "none", [], "")


def filled(head: Any) -> Callable[[Any], Any]:
    """By the layer itself, given FULL rows where it would compute FEW or more; the scores of the others are let go."""
    plain = head.forward

    def forward(states: Any) -> Any:
        rows = states.shape[-2]
        if not FEW <= rows < FULL:
            return plain(states)
        return plain(torch.nn.functional.pad(states, (0, 0, 0, FULL - rows)))[..., :rows, :]

    return forward
