"""What a training will do, known before it begins: steps, tokens, checkpoints, and how many parameters it trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.methods import ADAPTATIONS
from components.fine_tuning.sampling import epoch_order


def steps(rows: int, config: FineTuningConfig) -> int:
    """Optimizer steps on so many rows, as transformers counts them: the last step of an epoch takes the rows that are left."""
    return config.max_steps or math.ceil(config.epochs * _steps_an_epoch(rows, config))


def _steps_an_epoch(rows: int, config: FineTuningConfig) -> int:
    return max(1, math.ceil(rows / config.batch_size))


def tokens(lengths: Sequence[int], config: FineTuningConfig, seed: int) -> int:
    """Tokens trained on, without padding, in all steps: those of the rows in the order that the training takes them."""
    whole, rest = divmod(steps(len(lengths), config), _steps_an_epoch(len(lengths), config))
    begun = epoch_order(lengths, config.batch_size, seed=seed, epoch=whole)[: rest * config.batch_size]
    return whole * sum(lengths) + sum(lengths[row] for row in begun)


def checkpoints(total_steps: int, config: FineTuningConfig) -> int:
    """Checkpoints written: one every `checkpoint_every` steps, and one after the last step."""
    return math.ceil(total_steps / config.checkpoint_every)


def parameters(model_config: Any, config: FineTuningConfig) -> dict[str, int]:
    """{"all", "trainable", "embedding"} parameters of the model that would be trained, its update included, counted without weights.

    `embedding` are those of an input embedding that is not the output head as well. Raises ConfigurationError for unknown target modules.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says of itself when PEFT wraps a model
        model = ADAPTATIONS[config.adaptation](AutoModelForCausalLM.from_config(model_config, trust_remote_code=False), config)
    tied = model_config.get_text_config().tie_word_embeddings
    return {
        "all": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "embedding": 0 if tied else model.get_input_embeddings().weight.numel(),
    }
