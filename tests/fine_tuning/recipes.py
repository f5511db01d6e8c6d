"""Short recipes on the tiny model, shared by several test modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.fine_tuning.config import FineTuningConfig

# Row kind of the test dataset of each objective.
ROW_KINDS = {"sft": "sft", "text": "text", "dpo": "preference", "kto": "unpaired"}
SHORT_TRAINING: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 4,
    "micro_batch_size": 2,
    "checkpoint_every": 2,
    "max_length": 96,
    "learning_rate": 5e-3,
    "warmup_steps": 1,
}


def recipe(tiny: Path, **changes: object) -> FineTuningConfig:
    """Return a recipe of a few steps on the tiny model."""
    return FineTuningConfig.model_validate({"base_model": str(tiny), **SHORT_TRAINING, **changes})
