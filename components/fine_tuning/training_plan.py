"""Steps and tokens of a training run, computed before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from components.fine_tuning.batch_order import count_epoch_steps
from components.fine_tuning.config import Recipe

WARMUP_SHARE = 0.03  # of the steps, as in Stanford Alpaca and QLoRA (arXiv 2305.14314)
DECAY_SHARE = 0.1  # of the steps, for warmup_stable_decay (MiniCPM, arXiv 2404.06395)
CHECKPOINTS = 20  # per training run, if the recipe sets no interval
MIN_CHECKPOINT_INTERVAL = 10  # optimizer steps


@dataclass(frozen=True)
class TrainingSteps:
    """Optimizer steps of a training run, of its warm-up, and between two checkpoints."""

    total: int
    warmup: int
    checkpoint_interval: int


def count_batched_rows(rows: int, total_tokens: float, config: Recipe) -> int:
    """Return the number of rows, or packed rows, in the batches of an epoch.

    Best-fit decreasing fills packed rows to within 1%.

    Args:
        rows: Number of training rows.
        total_tokens: Tokens of all training rows.
        config: The recipe.
    """
    return math.ceil(total_tokens / config.max_length) if config.packing else rows


def plan_steps(rows: int, config: Recipe) -> TrainingSteps:
    """Return the steps of a training run: max_steps, or else the steps of all epochs.

    Args:
        rows: Rows per epoch; packed rows if packing is enabled.
        config: The recipe.
    """
    total = config.max_steps or math.ceil(config.epochs * count_epoch_steps(rows, config.rows_per_step))
    # The rate of the first warm-up step is 0: a training run of one step has no warm-up.
    automatic = min(math.ceil(WARMUP_SHARE * total), total - 1)
    warmup = automatic if config.warmup_steps is None else config.warmup_steps
    interval = config.checkpoint_every or max(MIN_CHECKPOINT_INTERVAL, math.ceil(total / CHECKPOINTS))
    return TrainingSteps(total, warmup, interval)


def count_epochs(batched_rows: int, steps: int, config: Recipe) -> tuple[int, float]:
    """Return the whole epochs of `steps` optimizer steps, and the fraction of the next one.

    Args:
        batched_rows: Rows per epoch as they are batched: the rows, or packed rows, or pieces of long texts.
        steps: Optimizer steps.
        config: The recipe.
    """
    epochs, remaining_steps = divmod(steps, count_epoch_steps(batched_rows, config.rows_per_step))
    return epochs, min(remaining_steps * config.rows_per_step / max(batched_rows, 1), 1.0)


def count_rows_seen(rows: int, batched_rows: int, steps: int, config: Recipe) -> int:
    """Return the number of rows in the batches of `steps` optimizer steps.

    Args:
        rows: Training rows of an epoch.
        batched_rows: The same rows as they are batched; see `count_epochs`.
        steps: Optimizer steps.
        config: The recipe.
    """
    epochs, partial = count_epochs(batched_rows, steps, config)
    return epochs * rows + round(partial * rows)


def describe_unseen_rows(rows: int, seen: int, config: Recipe) -> str | None:
    """Return a warning if the training ends before it has seen every row of an epoch; None otherwise."""
    if seen >= rows:
        return None
    setting = f"max_steps {config.max_steps}" if config.max_steps else f"epochs {config.epochs:g}"
    return (
        f"with fine_tuning.{setting}, training covers {seen:,} of {rows:,} rows ({seen / rows:.2g} epochs). "
        "Set fine_tuning.max_steps to null and epochs to at least 1 to train on all rows"
    )


def count_packed_tokens(tokens: float, config: Recipe) -> int:
    """Return the number of tokens in all steps of packed rows; `tokens` are those of all training rows."""
    packed = math.ceil(tokens / config.max_length)
    return round(tokens * plan_steps(packed, config).total * config.rows_per_step / max(packed, 1))
