"""Training on an NVIDIA GPU: every recipe that needs one, and kernels that must not change the losses.

These tests run only where a GPU exists (marker `gpu`): CI has none. Each trains a model of two layers for a few steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import stages

pytestmark = pytest.mark.gpu

STEPS = 6
RECIPE: dict[str, Any] = {"micro_batch_size": 2, "batch_size": 4, "learning_rate": 1e-3, "fused_kernels": "off"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model and the datasets."""
    return tmp_path_factory.mktemp("gpu")


def train(folder: Path, name: str, *, rows: str = "short", **changes: Any) -> dict[str, Any]:
    recipe = {**RECIPE, **changes}
    settings = {"shape": "tiny", "rows": rows, "length": 256, "steps": STEPS, "name": name, "recipe": recipe}
    return stages.finetune(settings, folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[float]:
    """Losses with PyTorch's attention, unfused layers and no compilation, in bfloat16."""
    result = train(folder, "reference", attention="sdpa")
    assert result["losses"][-1] < result["losses"][0]
    return list(result["losses"])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("varlen", {}),
        ("fused", {"fused_kernels": "auto"}),
        ("compiled", {"compile": True, "fused_kernels": "auto"}),
        ("recomputed", {"activation_checkpointing": "on"}),
        ("compiled and recomputed", {"compile": True, "activation_checkpointing": "on"}),
        ("float32", {"precision": "float32"}),
    ],
)
def test_kernels_and_precision_do_not_change_the_losses(
    name: str, changes: dict[str, Any], folder: Path, reference: list[float]
) -> None:
    result = train(folder, name.replace(" ", "-"), **changes)
    assert result["losses"] == pytest.approx(reference, abs=0.02)
    kernel = "sdpa" if "precision" in changes else "varlen"
    assert any(f"attention {kernel}" in reason for reason in result["choices"])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("full", {"adaptation": "full"}),
        ("qlora", {"adaptation": "qlora"}),
        ("unpacked", {"packing": False}),
        ("bits", {"adaptation": "full", "optimizer": "adamw_8bit"}),
        ("dpo", {"objective": "dpo", "packing": False}),
        ("orpo", {"objective": "orpo", "packing": False}),
    ],
)
def test_recipe_trains(name: str, changes: dict[str, Any], folder: Path) -> None:
    rows = "pairs" if "objective" in changes else "short"
    result = train(folder, name, rows=rows, **changes)
    assert result["losses"][-1] < result["losses"][0] + 0.05
    assert result["peak_memory"] > 0
