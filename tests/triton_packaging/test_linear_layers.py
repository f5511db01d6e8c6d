"""Packed linear layers return the results of the original layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.models import model_loading
from components.triton_packaging.python_backend import linear_layers
from components.triton_packaging.python_backend.linear_layers import pack_linear_layers


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 200])
def test_packed_model_gives_the_same_logits_and_frees_weights(
    tiny_folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(linear_layers, "MIN_PACKED_ELEMENTS", 1)
    model = model_loading.load_model(model_loading.open_model(tiny_folder))
    tokens = torch.randint(400, (1, rows), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model(tokens).logits
        assert pack_linear_layers(model)
        after = model(tokens).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    layers = {name: each for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    assert {name for name, each in layers.items() if each.weight.numel()} == {"lm_head"}  # shared with the embedding
    assert len(layers) == 15


def test_layers_whose_weights_another_module_uses_are_restored(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(linear_layers, "MIN_PACKED_ELEMENTS", 1)
    model = model_loading.load_model(model_loading.open_model(tiny_folder))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    layer = model.model.layers[0].mlp.gate_proj
    model.model.layers[1].mlp.forward = lambda states: torch.nn.functional.linear(states, layer.weight)[..., :64]
    assert not pack_linear_layers(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_layer_with_bias(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(linear_layers, "MIN_PACKED_ELEMENTS", 1)
    model = model_loading.load_model(model_loading.open_model(tiny_folder))
    model.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.randn(128))
    tokens = torch.arange(9)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        assert pack_linear_layers(model)
        torch.testing.assert_close(model(tokens).logits, before, atol=1e-5, rtol=1e-5)


def test_small_and_bfloat16_layers_are_not_packed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = model_loading.load_model(model_loading.open_model(tiny_folder))
    monkeypatch.setattr(linear_layers, "MIN_PACKED_ELEMENTS", 1 << 20)
    assert not pack_linear_layers(model)
    monkeypatch.setattr(linear_layers, "MIN_PACKED_ELEMENTS", 1)
    assert not pack_linear_layers(model.to(torch.bfloat16))
    assert all(layer.weight.numel() for layer in model.modules() if type(layer) is torch.nn.Linear)
