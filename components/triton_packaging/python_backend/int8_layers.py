"""Linear layers with int8 weights and one scale per output row, computed with oneDNN's integer products on a CPU.

transformers loads a package with this quantizer through the section `quantization_config` of config.json.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "tuneline_int8"
LARGEST = 127  # of the integers; -128 is not used, so that a weight and its negative round alike
LOW_STEPS = 254  # the second integer of an input divides the step of the first: from -127/254 to 127/254


class Int8Linear(torch.nn.Module):  # type: ignore[misc] # torch is not followed
    """A linear layer y = x Wᵀ + b with W = scale · int8, rounded to nearest; scale = max |row of W| / 127.

    Packed on a CPU, each input is the sum of two int8 numbers, which keeps 15 bits of it: with 8 bits, the loss of
    SmolLM2 135M rises ten times as much as from rounding the weights. The sums of integers are exact, so a row of the
    result depends neither on the other rows of the batch nor on the number of threads.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        integers = torch.zeros(out_features, in_features, dtype=torch.int8)
        self.integers = torch.nn.Parameter(integers, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(out_features), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias else None
        self.register_buffer("weight", torch.empty(0), persistent=False)  # Mamba 2 reads the dtype of this attribute
        self.packed: torch.Tensor | None = None
        self.zero_points: torch.Tensor | None = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def store(self, layer: torch.nn.Linear) -> None:
        """Store the rounded weights and the bias of a layer."""
        weight = layer.weight.float()
        scale = (weight.abs().amax(1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        self.integers.copy_((weight / scale[:, None]).round_())
        self.scale.copy_(scale)
        if self.bias is not None:
            self.bias.copy_(layer.bias)

    def pack(self) -> None:
        """Replace the weights by a copy in oneDNN's layout."""
        self.packed = torch.ops.onednn.qlinear_prepack(self.integers.detach(), None)
        self.zero_points = torch.zeros(len(self.scale), dtype=torch.int64)
        self.integers = torch.nn.Parameter(self.integers.new_empty(0), requires_grad=False)

    def restore(self) -> torch.nn.Linear:
        """Return a linear layer with the rounded weights in float32."""
        with torch.device(self.integers.device):
            layer = torch.nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = torch.nn.Parameter(self.integers.float() * self.scale[:, None], requires_grad=False)
        layer.bias = self.bias
        return layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output in the dtype of its input, shape (..., out_features)."""
        if self.packed is None:
            weight = self.integers.to(states.dtype) * self.scale.to(states.dtype)[:, None]
            return functional.linear(states, weight, None if self.bias is None else self.bias.to(states.dtype))
        rows = states.reshape(-1, self.in_features).float()
        step = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True).div_(LARGEST).clamp_(min=1e-30)
        scaled = rows / step
        high = scaled.round()
        low = scaled.sub_(high).mul_(LOW_STEPS).round_()
        products = torch.ops.onednn.qlinear_pointwise(
            torch.cat([high, low]).to(torch.int8),
            *(1.0, 0, self.packed, self.scale, self.zero_points),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        result = products[: len(rows)].add_(products[len(rows) :], alpha=1 / LOW_STEPS).mul_(step)
        if self.bias is not None:
            result += self.bias
        return result.view(*states.shape[:-1], self.out_features).to(states.dtype)


def pack_int8_layers(model: torch.nn.Module) -> bool:
    """Let a model on a CPU compute with integers; with float32 weights if the processor lacks VNNI.

    Without VNNI, oneDNN's sums of int8 products may overflow.

    Returns:
        Whether the model has layers that compute with integers.
    """
    is_supported = torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()
    is_packed = False
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Int8Linear) and is_supported:
                layer.pack()
                is_packed = True
            elif isinstance(layer, Int8Linear):
                setattr(module, name, layer.restore())
    return is_packed


def replace_linear_layers(model: torch.nn.Module, *, stores_weights: bool) -> int:
    """Replace a model's linear layers by layers with int8 weights.

    An output layer that shares its weight with the input embedding gets its own; the embedding stays as it is.

    Args:
        stores_weights: whether to round the weights; otherwise, they are loaded later.

    Returns:
        The number of replaced layers.
    """
    replaced = 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is torch.nn.Linear:
                with torch.device(layer.weight.device):
                    replacement = Int8Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                if stores_weights:
                    replacement.store(layer)
                setattr(module, name, replacement)
                replaced += 1
    return replaced


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):  # type: ignore[misc]
    """The section `quantization_config` of config.json."""

    def __init__(self, **options: Any) -> None:
        self.quant_method = METHOD


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):  # type: ignore[misc]
    """Loads the weights that `replace_linear_layers` has rounded."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        replace_linear_layers(model, stores_weights=False)

    def is_serializable(self) -> bool:
        """Return whether transformers can save the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return False
