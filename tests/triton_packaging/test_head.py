"""The model's last layer, computed quicker where several rows are asked for at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.common import models
from components.triton_packaging.python_backend import head
from components.triton_packaging.python_backend.head import FEW, FULL, quicken


@pytest.mark.parametrize("rows", [1, FEW - 1, FEW, 9, FULL - 1, FULL, FULL + 1])
@pytest.mark.parametrize("large", [0.0, 1.0])
def test_scores_are_those_of_the_rows_asked_for(tiny_folder: Path, rows: int, large: float, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(head, "LARGE", large)
    model = models.load(models.open_model(tiny_folder))
    states = torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = model.lm_head(states)
        quicken(model)
        after = model.lm_head(states)
    assert after.shape == before.shape
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_a_batch_of_several_sequences_and_another_number_format_are_left_as_they_are(tiny_folder: Path) -> None:
    import torch

    model = models.load(models.open_model(tiny_folder))
    quicken(model)
    assert model.lm_head(torch.zeros(3, 5, 64)).shape[:2] == (3, 5)
    halved = models.load(models.open_model(tiny_folder)).to(torch.bfloat16)
    plain = halved.lm_head.forward
    quicken(halved)
    assert halved.lm_head.forward == plain
