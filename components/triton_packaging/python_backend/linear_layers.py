"""Acceleration of a model's linear layers on a CPU."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import PreTrainedModel

# oneDNN's layout of the weights is chosen for this number of rows, and used for every number. On an AMD EPYC with
# AVX-512, one thread, float32 and torch 2.13, times in ms with torch's product and with packed weights:
#   rows      49,152 x 576    1,536 x 576
#      1       6.9    3.2      0.21   0.11
#      4      12.5    3.9      0.33   0.12
#     16      20.5    6.2      0.52   0.22
PACKED_ROWS = 16
MIN_PACKED_ELEMENTS = 1 << 14  # of a weight matrix; the overhead of a call exceeds the gain for smaller ones
# Maximum difference of a logit by rounding, absolute and relative.
TOLERANCE = 1e-3


def pack_linear_layers(model: PreTrainedModel) -> bool:
    """Replace the weights of float32 linear layers on a CPU by copies in oneDNN's layout, as torch.compile does.

    Results change only by rounding. A packed layer has no weight any more, except where the weight is shared, as that
    of an output layer with the input embedding.

    Returns:
        Whether the layers are packed. They are not if oneDNN does not support them, or another module uses their weights directly.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with torch.inference_mode():
        expected = model(tokens).logits
    packed: dict[torch.nn.Linear, torch.Tensor] = {}
    try:
        for layer in model.modules():
            if type(layer) is torch.nn.Linear and _can_pack(layer.weight):
                packed[layer] = _pack(layer, is_shared=uses[layer.weight] > 1)
        with torch.inference_mode():
            if torch.allclose(model(tokens).logits, expected, rtol=TOLERANCE, atol=TOLERANCE):
                return bool(packed)
    except RuntimeError:  # a module uses an empty weight, or oneDNN lacks the operation on this processor
        pass
    for layer, weight in packed.items():
        del layer.forward
        if not layer.weight.numel():
            layer.weight = torch.nn.Parameter(weight.to_dense(), requires_grad=False)
    return False


def _can_pack(weight: torch.Tensor) -> bool:
    is_float32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return bool(is_float32 and weight.numel() >= MIN_PACKED_ELEMENTS)


def _pack(layer: torch.nn.Linear, *, is_shared: bool) -> torch.Tensor:
    """Let a layer compute with packed weights, and return them."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), PACKED_ROWS)
    bias = None if layer.bias is None else layer.bias.detach()

    def forward(states: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")

    layer.forward = forward
    if not is_shared:
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
    return packed
