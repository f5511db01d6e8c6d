"""Recipes on the tiny model that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.fine_tuning.config import FineTuningConfig

# The kind of rows that each objective is tried on.
ROWS = {"sft": "sft", "text": "text", "dpo": "preference", "kto": "unpaired"}
SHORT: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 4,
    "micro_batch_size": 2,
    "checkpoint_every": 2,
    "max_length": 96,
    "learning_rate": 5e-3,
    "warmup_steps": 1,
}


def recipe(tiny: Path, **changes: object) -> FineTuningConfig:
    """A few steps on the tiny model."""
    return FineTuningConfig.model_validate({"base_model": str(tiny), **SHORT, **changes})
