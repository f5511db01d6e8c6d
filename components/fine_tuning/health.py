"""What goes wrong in a training, found in its figures: a loss that is lost, one that does not move, a device that waits for data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from components.common.errors import TrainingError

LOOKED_AT = 30  # steps after which a loss that does not move is told for the first time, and then at the end
NOTHING = 1.0  # standard errors: a difference below that is none
# Of its time a device may wait: MLPerf Storage wants accelerators busy for 90% of it (its submission rules, "accelerator utilization").
MAY_WAIT = 0.1
SHOWN = 8  # row ids in a message


def check_finite(values: Mapping[str, float], step: int, rate: float, rows_of_step: Callable[[int], Sequence[str]]) -> None:
    """Raise TrainingError where loss or gradient is not a number any more, with the step, the rows of its batch and the learning rate."""
    for name in ("train_loss", "validation_loss", "gradient_norm"):
        if math.isfinite(values.get(name, 0.0)):
            continue
        told = f"the {name.replace('_', ' ')} is {values[name]} at step {step}, learning rate {rate:.3g}"
        rows = rows_of_step(step)
        if step:
            told += f"; rows of this step: {', '.join(rows[:SHOWN])}" + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")
        raise TrainingError(
            told,
            hint="Lower fine_tuning.learning_rate or raise warmup_steps; look at these rows too. With other settings training begins anew.",
        )


def standing_still(losses: Sequence[float]) -> str | None:
    """A sentence where the loss does not fall: its last third is not lower than its first by more than chance (one standard error of the
    difference of two means). None where it falls, or where there are too few steps to tell."""
    third = len(losses) // 3
    if third < 5:
        return None
    first, last = losses[:third], losses[-third:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    before, after = statistics.fmean(first), statistics.fmean(last)
    if before - after > NOTHING * error and before > after:
        return None
    return (
        f"the training loss does not move: {before:.4g} in the first {third} steps, {after:.4g} in the last. "
        "Raise fine_tuning.learning_rate, or look whether the rows can be learned from"
    )


def worse(before: float | None, best: float | None) -> str | None:
    """A sentence where no checkpoint is better on the validation rows than the model was before."""
    if before is None or best is None or best < before:
        return None
    told = f"no checkpoint is better than the base model: validation loss {before:.4g} before, {best:.4g} at best"
    return f"{told}. Lower fine_tuning.learning_rate"


def starved(waited_share: float) -> str | None:
    """A sentence where the device waited for data for more of the time than it should; the share is of 1."""
    if waited_share <= MAY_WAIT:
        return None
    return (
        f"the device waited for data {waited_share:.0%} of the time: the rows come too slowly from storage. "
        "Put the state folder on faster storage"
    )
