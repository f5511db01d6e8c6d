"""The accelerated output layer returns the logits of the original one."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common.models import model_loading
from components.triton_packaging.python_backend import output_layer
from components.triton_packaging.python_backend.output_layer import FULL_ROWS, MIN_SLOW_ROWS, accelerate_output_layer


@pytest.mark.parametrize("rows", [1, MIN_SLOW_ROWS - 1, MIN_SLOW_ROWS, 9, FULL_ROWS - 1, FULL_ROWS, FULL_ROWS + 1])
@pytest.mark.parametrize("min_packed_share", [0.0, 1.0])
def test_accelerated_logits_match_the_original_layer(
    tiny_folder: Path, rows: int, min_packed_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(output_layer, "MIN_PACKED_SHARE", min_packed_share)
    model = model_loading.load_model(model_loading.open_model(tiny_folder))
    states = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model.lm_head(states)
        accelerate_output_layer(model)
        after = model.lm_head(states)
    assert after.shape == before.shape
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_batches_and_bfloat16_use_the_original_layer(tiny_folder: Path) -> None:
    import torch

    model = model_loading.load_model(model_loading.open_model(tiny_folder))
    accelerate_output_layer(model)
    assert model.lm_head(torch.zeros(3, 5, 64)).shape[:2] == (3, 5)
    bfloat16_model = model_loading.load_model(model_loading.open_model(tiny_folder)).to(torch.bfloat16)
    original_forward = bfloat16_model.lm_head.forward
    accelerate_output_layer(bfloat16_model)
    assert bfloat16_model.lm_head.forward == original_forward
