"""Acceleration of the output layer on a CPU; in a small model, this layer takes most of the time."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

# Minimum share of the model's parameters for a second copy of the output layer's weights, packed in oneDNN's layout.
# Times for 4, 12 and 16 requests (49,152 words, width 384, float32, one core, torch 2.13): 7, 10 and 12 ms with packed
# weights; 16, 37 and 15 ms with torch's matrix product.
MIN_PACKED_SHARE = 0.25
# Without packed weights, torch's product of MIN_SLOW_ROWS or more rows with a wide float32 matrix is slower than the
# product of FULL_ROWS rows.
MIN_SLOW_ROWS, FULL_ROWS = 4, 16


def accelerate_output_layer(model: PreTrainedModel) -> None:
    """Accelerate the output layer for several rows; scores change only by rounding.

    Does nothing on a GPU, for weights other than float32, or for an output layer that is not a torch.nn.Linear.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.device.type != "cpu" or head.weight.dtype != torch.float32:
        return
    is_large = head.weight.numel() >= MIN_PACKED_SHARE * sum(each.numel() for each in model.parameters())
    can_pack = is_large and head.bias is None and torch.backends.mkldnn.is_available()
    plain = head.forward
    # Packed once, as torch.compile does for a linear layer with frozen weights.
    packed = torch.ops.mkldnn._reorder_linear_weight(head.weight.detach(), FULL_ROWS) if can_pack else None

    def forward(states: torch.Tensor) -> torch.Tensor:
        rows = states.shape[-2]
        if rows == 1 or states.shape[:-2].numel() != 1:
            return plain(states)
        if packed is not None:
            return torch.ops.mkldnn._linear_pointwise(states, packed, None, "none", [], "")
        if MIN_SLOW_ROWS <= rows < FULL_ROWS:  # pad a slow number of rows, and discard the additional scores
            return plain(torch.nn.functional.pad(states, (0, 0, 0, FULL_ROWS - rows)))[..., :rows, :]
        return plain(states)

    head.forward = forward
