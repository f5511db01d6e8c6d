"""Guards of reinforcement learning: signs that a model exploits its rewards or collapses, found in the training's log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

WINDOW = 10  # steps that a guard averages, so that one unusual batch raises no alarm
MAX_LENGTH_RATIO = 4.0  # of the mean answer length, relative to the first steps
MAX_EQUAL_GROUPS = 0.9  # share of prompts whose answers all have the same reward, which teach nothing
SOLVED_REWARD = 0.9  # groups with equal rewards are expected if nearly every answer is right
# A recorded reward is compared at every step, so that small differences would raise false alarms.
MIN_STANDARD_ERRORS = 4.0
MIN_CHANGE = 0.05  # of a reward, from 0 to 1

LogLine = dict[str, Any]


def find_alarm(steps: Sequence[LogLine], max_kl: float | None, recorded_rewards: Sequence[str]) -> str | None:
    """Return a sentence for the first guard that raises an alarm; None without an alarm.

    Gao et al. (arXiv 2210.10760) show that the true reward falls while the proxy rises and the divergence from the
    reference model grows. A reward of weight 0 is such a held-out measure.

    Args:
        steps: Log lines of the training steps, in order, with the names of REWARD_METRICS. Only the first and the last WINDOW count.
        max_kl: Largest mean divergence from the reference model, in nats per token. None: no limit.
        recorded_rewards: Names of the rewards with weight 0.
    """
    if len(steps) < 2 * WINDOW:
        return None
    first, last = steps[:WINDOW], steps[-WINDOW:]
    divergence = _mean(last, "kl")
    if max_kl is not None and divergence is not None and divergence > max_kl:
        return f"the divergence from the reference model is {divergence:.3g} nats per token; the limit is {max_kl:g}"
    before, after = _mean(first, "answer_tokens"), _mean(last, "answer_tokens")
    if before and after and not 1 / MAX_LENGTH_RATIO <= after / before <= MAX_LENGTH_RATIO:
        return f"the mean answer length is {after:.0f} tokens; in the first {WINDOW} steps it was {before:.0f}"
    equal, reward = _mean(last, "equal_reward_groups"), _mean(last, "reward")
    if equal is not None and equal >= MAX_EQUAL_GROUPS and (reward or 0.0) < SOLVED_REWARD:
        return (
            f"for {equal:.0%} of the prompts, all answers have the same reward, so the model learns nothing from them"
        )
    for name in recorded_rewards:
        if _changes_by(first, last, "reward") > 0 > _changes_by(first, last, f"reward_{name}"):
            return f"the trained reward rises while the reward {name}, which is only recorded, falls"
    return None


def _mean(lines: Sequence[LogLine], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return statistics.fmean(values) if values else None


def _changes_by(first: Sequence[LogLine], last: Sequence[LogLine], name: str) -> float:
    """Return the difference of the means if it is significant and not small; otherwise 0."""
    groups = [[line[name] for line in lines if name in line] for lines in (first, last)]
    if min(map(len, groups)) < 2:
        return 0.0
    before, after = map(statistics.fmean, groups)
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in groups))
    return after - before if abs(after - before) > max(MIN_STANDARD_ERRORS * error, MIN_CHANGE) else 0.0
