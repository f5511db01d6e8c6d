"""Short recipes on the tiny model, shared by several test modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.fine_tuning.config import Recipe

# Row kind of the test dataset of each objective.
ROW_KINDS = {
    "sft": "sft",
    "text": "text",
    "dpo": "preference",
    "kto": "unpaired",
    "orpo": "preference",
    "simpo": "preference",
    "grpo": "sft",
    "rloo": "sft",
    "reward": "preference",
    "distill": "sft",
}
# Settings that an objective requires.
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {
        "grpo": {
            "rewards": [{"kind": "length", "max_words": 1}, {"kind": "no_repetition", "weight": 0.0}],
            "answers_per_prompt": 4,
            "max_answer_tokens": 16,
            "max_kl": None,
        }
    },
    "distill": {"distillation": {"teacher": "/teacher", "max_answer_tokens": 16}},
}
REQUIRED_SETTINGS["rloo"] = REQUIRED_SETTINGS["grpo"]
SETTINGS: dict[str, Any] = {
    "epochs": 1.0,
    "learning_rate": 5e-4,
    "batch_size": 8,
    "micro_batch_size": 2,
    "max_length": 256,
}
SHORT_TRAINING: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 4,
    "micro_batch_size": 2,
    "checkpoint_every": 2,
    "max_length": 96,
    "learning_rate": 5e-3,
    "warmup_steps": 1,
}


def recipe(tiny: Path, **changes: object) -> Recipe:
    """Return a recipe of a few steps on the tiny model."""
    return complete_recipe(base_model=str(tiny), **{**SHORT_TRAINING, **changes})


def complete_recipe(**changes: object) -> Recipe:
    """Return a recipe with every setting."""
    required = REQUIRED_SETTINGS.get(str(changes.get("objective")), {})
    return Recipe.model_validate({**SETTINGS, **required, **changes})
