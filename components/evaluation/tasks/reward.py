"""Task kind `reward`: whether a reward model gives the chosen answer of a pair a higher reward than the rejected one.

The files of RewardBench (arXiv 2403.13787) can be read as they are. The base model has no rewards: it prefers the answer
with the higher log-likelihood per token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from components.common import significance
from components.evaluation.reward_engine import RewardEngine
from components.evaluation.task_interface import Engine, Item, Metric, Scores, TaskContext
from components.evaluation.tasks import preference
from components.evaluation.tasks.preference import SIDES, PairSettings, PairTask

CALIBRATION_BINS = 5  # of equal width, from a confidence of 50% to 100%
CONFIDENCE = 0.975  # of each of the two bounds of a 95% interval
BIN_PREFIX = "bin_"  # of the figures of a bin
PairsToKeep = Literal["all", "chosen_shorter", "chosen_longer"]


class Reward(PairSettings):
    """Settings of a reward task."""

    kind: Literal["reward"] = "reward"
    pairs: PairsToKeep = Field(
        "all",
        description="Pairs to compare. chosen_shorter: pairs whose chosen answer has fewer tokens than the rejected "
        "answer; chosen_longer: pairs whose chosen answer has more tokens. Gate rules on these pairs detect length "
        "bias.",
    )


class RewardTask(PairTask[Reward]):
    """Comparison of rewards. Equal rewards count as incorrect."""

    METRICS: ClassVar = {"accuracy": Metric("higher", is_binary=True, chance=0.5)}

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return the pairs to compare."""
        items = super().build_items(context)
        if self.settings.pairs == "all":
            return items
        sign = 1 if self.settings.pairs == "chosen_longer" else -1
        return [
            item
            for item, difference in zip(items, _list_length_differences(context, items), strict=True)
            if sign * difference > 0
        ]

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Return whether the chosen answers have the higher reward, and figures of calibration and length bias."""
        if not isinstance(engine, RewardEngine):
            means = preference.list_means(preference.compute_likelihoods(engine, items, context))
            return Scores({"accuracy": preference.judge_margins(preference.subtract_rejected(means))})
        completions = [preference.encode_completion(engine.tokenizer, item, side) for item in items for side in SIDES]
        conversations = [[*each.prompt_ids, *each.answer_ids] for each in completions]
        limit = engine.max_input_tokens
        if limit and (cut := sum(len(ids) > limit for ids in conversations)):
            was = "was" if cut == 1 else "were"
            context.reporter.note(f"{cut} of {len(conversations)} conversations {was} truncated to {limit} tokens")
        rewards = engine.compute_rewards([ids[:limit] for ids in conversations], context.reporter)
        margins = preference.subtract_rejected(rewards)
        return Scores(
            {"accuracy": preference.judge_margins(margins)},
            answers=[
                f"reward of the chosen answer {chosen:.3f}, of the rejected answer {rejected:.3f}"
                for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)
            ],
            figures={
                "mean_reward": statistics.fmean(rewards),
                **measure_length_bias(margins, _list_length_differences(context, items)),
                **measure_calibration(margins),
            },
        )


def _list_length_differences(context: TaskContext, items: Sequence[Item]) -> list[int]:
    """Return how many more tokens the chosen answer of each item has than the rejected one."""
    lengths = [
        len(preference.encode_completion(context.tokenizer, item, side).answer_ids) for item in items for side in SIDES
    ]
    return [chosen - rejected for chosen, rejected in zip(lengths[::2], lengths[1::2], strict=True)]


def measure_length_bias(margins: Sequence[float], differences: Sequence[int]) -> dict[str, float]:
    """Return the accuracy for shorter and for longer chosen answers, with 95% intervals, and how often the longer answer wins.

    Args:
        margins: Reward of the chosen answer less that of the rejected one, of each pair.
        differences: Tokens of the chosen answer less those of the rejected one.

    Returns:
        `pairs_NAME`, `accuracy_NAME`, `accuracy_NAME_low` and `accuracy_NAME_high` for the NAMEs chosen_shorter and
        chosen_longer; of the pairs of unequal length, the shares `longer_wins`, in which the longer answer has the higher
        reward, and `longer_is_chosen`. A figure without pairs is left out.
    """
    figures: dict[str, float] = {}
    for name, sign in (("chosen_shorter", -1), ("chosen_longer", 1)):
        flags = [float(m > 0) for m, tokens in zip(margins, differences, strict=True) if sign * tokens > 0]
        figures[f"pairs_{name}"] = len(flags)
        if flags:
            low, high = significance.compute_clopper_pearson_bounds(flags, CONFIDENCE)
            accuracy = statistics.fmean(flags)
            figures |= {f"accuracy_{name}": accuracy, f"accuracy_{name}_low": low, f"accuracy_{name}_high": high}
    unequal = [(m, tokens) for m, tokens in zip(margins, differences, strict=True) if tokens]
    if unequal:
        figures["longer_wins"] = statistics.fmean(m * tokens > 0 for m, tokens in unequal)
        figures["longer_is_chosen"] = statistics.fmean(tokens > 0 for _, tokens in unequal)
    return figures


def measure_calibration(margins: Sequence[float]) -> dict[str, float]:
    """Return the expected calibration error, and the confidence and accuracy of each bin (Guo et al., arXiv 1706.04599).

    In the Bradley–Terry model, the answer with the higher reward is the chosen one with probability σ(|margin|).

    Returns:
        `calibration_error`, and for each bin with pairs `bin_NUMBER_confidence`, `bin_NUMBER_accuracy` and
        `bin_NUMBER_pairs`; empty without a finite margin.
    """
    finite = [margin for margin in margins if math.isfinite(margin)]
    bins: list[list[tuple[float, float]]] = [[] for _ in range(CALIBRATION_BINS)]
    for margin in finite:
        confidence = 1 / (1 + math.exp(-abs(margin)))
        number = min(int((confidence - 0.5) * 2 * CALIBRATION_BINS), CALIBRATION_BINS - 1)
        bins[number].append((confidence, float(margin > 0)))
    figures, error = dict[str, float](), 0.0
    for number, members in enumerate(bins):
        if members:
            confidence, accuracy = (statistics.fmean(values) for values in zip(*members, strict=True))
            error += len(members) / len(finite) * abs(accuracy - confidence)
            prefix = f"{BIN_PREFIX}{number}_"
            figures |= {
                f"{prefix}confidence": confidence,
                f"{prefix}accuracy": accuracy,
                f"{prefix}pairs": len(members),
            }
    return {"calibration_error": error, **figures} if finite else {}
