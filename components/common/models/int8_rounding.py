"""Weights rounded to int8 as in a package for the python backend, in a model that computes with floating-point numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST = 127


def round_linear_layers(model: torch.nn.Module) -> None:
    """Round the weights of a model's linear layers to integers times one scale per output row.

    Like `Int8Linear.store` of the python backend, which must not import this module; a test compares them. An output
    layer that shares its weight with the input embedding gets its own; the embedding stays as it is.
    """
    import torch

    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
    for layer in layers:
        weight = layer.weight.detach().float()
        scale = (weight.abs().amax(1, keepdim=True) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        layer.weight = torch.nn.Parameter(
            ((weight / scale).round_() * scale).to(layer.weight.dtype), requires_grad=False
        )
