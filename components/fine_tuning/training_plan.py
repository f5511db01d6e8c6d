"""Steps and tokens of a training, computed before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from components.fine_tuning.batch_order import order_epoch
from components.fine_tuning.config import FineTuningConfig


def count_batched_rows(rows: int, total_tokens: float, config: FineTuningConfig) -> int:
    """Return the number of rows, or packed rows, in the batches of an epoch.

    Best-fit decreasing fills packed rows to within 1%.

    Args:
        rows: Number of training rows.
        total_tokens: Tokens of all training rows.
        config: The recipe.
    """
    return math.ceil(total_tokens / config.max_length) if config.packing else rows


def count_steps(rows: int, config: FineTuningConfig) -> int:
    """Return the number of optimizer steps of a training: max_steps, or else the steps of all epochs.

    As in transformers, an epoch ends with a partial batch.

    Args:
        rows: Rows per epoch; packed rows if packing is enabled.
        config: The recipe.
    """
    return config.max_steps or math.ceil(config.epochs * _count_epoch_steps(rows, config))


def _count_epoch_steps(rows: int, config: FineTuningConfig) -> int:
    return max(1, math.ceil(rows / config.rows_per_step))


def count_tokens(lengths: Sequence[int], config: FineTuningConfig, seed: int) -> int:
    """Return the number of tokens in all steps, without padding; `lengths` are the tokens of each row."""
    if config.packing:
        packed = count_batched_rows(len(lengths), sum(lengths), config)
        return round(sum(lengths) * count_steps(packed, config) * config.rows_per_step / max(packed, 1))
    steps = count_steps(len(lengths), config)
    epochs, remaining_steps = divmod(steps, _count_epoch_steps(len(lengths), config))
    order = order_epoch(lengths, config.rows_per_step, seed=seed, epoch=epochs)
    last_rows = order[: remaining_steps * config.rows_per_step]
    return epochs * sum(lengths) + sum(lengths[row] for row in last_rows)
