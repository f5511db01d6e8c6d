"""Losses on preference pairs that need no reference model. Imports no trainer, because every step imports the objectives.

ORPO and SimPO are experimental trainers in TRL, which tokenize rows themselves. With `reference_free_trainer`, these
functions use the rows, masks and padding of `dpo`, and return the same values as TRL's on the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from components.fine_tuning.config import PreferenceConfig

# A mean log-probability rounds to 0 if a model is certain of every token. The odds are then infinite, and the gradient is
# not a number; at the maximum the odds have no gradient.
MAX_LOG_PROBABILITY = -1e-7


@dataclass(frozen=True)
class PairScores:
    """Log-probabilities of a batch of pairs.

    Attributes:
        chosen: Mean over the tokens of each chosen answer.
        rejected: Mean over the tokens of each rejected answer.
        chosen_tokens: Mean over all scored tokens of the chosen sequences of the batch.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor


@dataclass(frozen=True)
class PairLoss:
    """A loss on pairs.

    Attributes:
        compute: Function that returns the loss of a batch, and its scale of the rewards: a reward is the scale × the
            mean log-probability of an answer's tokens.
        scores_prompts: Whether `PairScores.chosen_tokens` includes the prompts.
    """

    compute: Callable[[PairScores, PreferenceConfig], tuple[Tensor, float]]
    scores_prompts: bool = False


def compute_orpo_loss(scores: PairScores, settings: PreferenceConfig) -> tuple[Tensor, float]:
    """Return the negative log-likelihood of the chosen sequences, less the weighted log-sigmoid of the log odds ratio.

    Hong et al., arXiv 2403.07691, equations 4 to 7. As in the authors' code, the likelihood covers the prompt, too.
    """
    from torch.nn.functional import logsigmoid

    log_odds = scores.chosen - scores.rejected - (_log1mexp(scores.chosen) - _log1mexp(scores.rejected))
    weight = settings.odds_ratio_weight
    return -scores.chosen_tokens - weight * logsigmoid(log_odds).mean(), weight


def compute_simpo_loss(scores: PairScores, settings: PreferenceConfig) -> tuple[Tensor, float]:
    """Return the negative log-sigmoid of the reward margin, less the target margin (Meng et al., arXiv 2405.14734)."""
    from torch.nn.functional import logsigmoid

    margin = settings.reward_scale * (scores.chosen - scores.rejected) - settings.target_margin
    return -logsigmoid(margin).mean(), settings.reward_scale


def _log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) of values up to 0 without cancellation (Mächler, Rmpfr vignette, 2012)."""
    import torch

    value = value.clamp(max=MAX_LOG_PROBABILITY)
    is_small = value > -math.log(2)
    # `where` also differentiates the branch that it drops, which must stay finite.
    near = torch.where(is_small, value, -1.0)
    far = torch.where(is_small, -1.0, value)
    return torch.where(is_small, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
