"""What a training will do, known before it begins: steps, tokens, checkpoints, and how many parameters it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from components.fine_tuning.config import FineTuningConfig
from components.fine_tuning.sampling import epoch_order
from components.fine_tuning.training import counted_parameters as parameters

__all__ = ["batched_rows", "checkpoints", "parameters", "steps", "tokens"]


def batched_rows(rows: int, all_tokens: float, config: FineTuningConfig) -> int:
    """Rows that batches are made of: with packing, packed rows, which best fit decreasing fills to the last per cent."""
    return math.ceil(all_tokens / config.max_length) if config.packing else rows


def steps(rows: int, config: FineTuningConfig) -> int:
    """Optimizer steps on so many rows, as transformers counts them: the last step of an epoch takes the rows that are left."""
    return config.max_steps or math.ceil(config.epochs * _steps_an_epoch(rows, config))


def _steps_an_epoch(rows: int, config: FineTuningConfig) -> int:
    return max(1, math.ceil(rows / config.step_rows))


def tokens(lengths: Sequence[int], config: FineTuningConfig, seed: int) -> int:
    """Tokens trained on, without padding, in all steps: those of the rows in the order that the training takes them."""
    if config.packing:
        packed = batched_rows(len(lengths), sum(lengths), config)
        return round(sum(lengths) * steps(packed, config) * config.step_rows / max(packed, 1))
    whole, rest = divmod(steps(len(lengths), config), _steps_an_epoch(len(lengths), config))
    begun = epoch_order(lengths, config.step_rows, seed=seed, epoch=whole)[: rest * config.step_rows]
    return whole * sum(lengths) + sum(lengths[row] for row in begun)


def checkpoints(total_steps: int, config: FineTuningConfig) -> int:
    """Checkpoints written: one every `checkpoint_every` steps, and one after the last step."""
    return math.ceil(total_steps / config.checkpoint_every)
