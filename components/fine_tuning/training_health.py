"""Checks of training metrics: non-finite values, a stalled loss, a regression, and data starvation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from components.common.runtime.errors import TrainingError

STALL_CHECK_STEP = 30  # step of the first check for a stalled loss; the second check is at the end
SOLVED_REWARD = 0.9  # a mean reward that need not rise
MIN_STANDARD_ERRORS = 1.0  # a smaller difference of two means is not significant
# MLPerf Storage requires accelerators to be busy 90% of the time (submission rules, "accelerator utilization").
MAX_WAIT_FRACTION = 0.1
MAX_SHOWN_ROWS = 8  # row ids in a message


def check_finite(
    values: Mapping[str, float], step: int, rate: float, get_step_rows: Callable[[int], Sequence[str]]
) -> None:
    """Check that the losses and the gradient norm are finite.

    Args:
        values: Logged values by metric name.
        step: Optimizer step of the values; 0 before training.
        rate: Learning rate of the step.
        get_step_rows: Function that returns the row ids of a step.

    Raises:
        TrainingError: a value is not finite; the message contains step, rows and learning rate.
    """
    for name in ("train_loss", "validation_loss", "gradient_norm"):
        if math.isfinite(values.get(name, 0.0)):
            continue
        message = f"the {name.replace('_', ' ')} is {values[name]} at step {step}, learning rate {rate:.3g}"
        if step:
            rows = get_step_rows(step)
            message += f"; rows of this step: {', '.join(rows[:MAX_SHOWN_ROWS])}"
            message += f" and {len(rows) - MAX_SHOWN_ROWS} more" if len(rows) > MAX_SHOWN_ROWS else ""
        raise TrainingError(
            message,
            hint="Reduce fine_tuning.learning_rate, which starts a new training run.",
        )


def describe_stall(losses: Sequence[float], *, are_rewards: bool = False) -> str | None:
    """Return a warning if the loss does not fall; None if the loss falls or the training has fewer than 15 steps.

    The loss falls if its mean over the last third of the steps is more than one standard error lower than over the
    first third.

    Args:
        losses: Losses of the steps.
        are_rewards: Whether the losses are negative rewards.
    """
    third = len(losses) // 3
    if third < 5:
        return None
    first, last = losses[:third], losses[-third:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    before, after = statistics.fmean(first), statistics.fmean(last)
    if before - after > MIN_STANDARD_ERRORS * error and before > after:
        return None
    if are_rewards and -after >= SOLVED_REWARD:
        return None
    if are_rewards:
        return (
            f"the reward does not rise: mean {0 - before:.4g} in the first {third} steps, {0 - after:.4g} in the "
            f"last {third} steps. Increase fine_tuning.learning_rate, or start from a model that gets the reward for "
            "some answers"
        )
    return (
        f"the training loss does not fall: mean {before:.4g} in the first {third} steps, {after:.4g} in the last "
        f"{third} steps. Increase fine_tuning.learning_rate"
    )


def describe_regression(before: float | None, best: float | None, *, are_rewards: bool = False) -> str | None:
    """Return a warning if no checkpoint has a lower validation loss than the model before training; None otherwise.

    Args:
        before: Validation loss before training; None without validation.
        best: Lowest validation loss of a checkpoint; None without validation.
        are_rewards: Whether the losses are 1 − the mean reward.
    """
    if before is None or best is None or best < before:
        return None
    if are_rewards:
        return (
            f"no checkpoint has a higher validation reward than the model before training: {1 - before:.4g} before, "
            f"{1 - best:.4g} at best"
        )
    return (
        f"no checkpoint is better than the model before training: validation loss {before:.4g} before, "
        f"{best:.4g} at best. Reduce fine_tuning.learning_rate"
    )


def describe_data_starvation(waited_share: float) -> str | None:
    """Return a warning if the device waited for data more than MAX_WAIT_FRACTION of the time; None otherwise."""
    if waited_share <= MAX_WAIT_FRACTION:
        return None
    return (
        f"the device waited for data for {waited_share:.0%} of the time: storage is too slow. "
        "Move the state folder to faster storage"
    )
