"""The engine of reward models: one transformers model in this process that scores conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from components.common.models import reward_models
from components.common.models.model_loading import LoadableModel
from components.common.runtime.reporters import Reporter
from components.evaluation import forward_pass
from components.evaluation.task_interface import Continuation, Decoding, Likelihood

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardEngine:
    """Engine for a reward model, which computes neither likelihoods nor answers.

    Args:
        model: The reward model.
        tokenizer: The model's tokenizer.
        batch_tokens: Tokens per batch, including padding.
        input_limit: Upper limit of `max_input_tokens`.
    """

    def __init__(
        self, model: LoadableModel, tokenizer: PreTrainedTokenizerBase, batch_tokens: int, input_limit: int | None
    ) -> None:
        self.tokenizer, self._batch_tokens, self._input_limit = tokenizer, batch_tokens, input_limit
        self._model = reward_models.load_reward_model(model, tokenizer)

    @property
    def max_input_tokens(self) -> int | None:
        """Context length in tokens; None without a limit."""
        own = getattr(forward_pass.get_decoder_config(self._model), "max_position_embeddings", None)
        return min((int(limit) for limit in (own, self._input_limit) if limit), default=None)

    def compute_rewards(self, conversations: Sequence[Sequence[int]], reporter: Reporter) -> list[float]:
        """Return the reward of each conversation (token ids), in order."""
        total = len(conversations)
        return reward_models.compute_rewards(
            self._model, conversations, self._batch_tokens, lambda done: reporter.progress(done, total, "answers")
        )

    def compute_likelihoods(self, continuations: Sequence[Continuation], reporter: Reporter) -> list[Likelihood]:
        """Raise NotImplementedError; the configuration rejects tasks that need likelihoods."""
        raise NotImplementedError

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding, reporter: Reporter) -> list[str]:
        """Raise NotImplementedError; the configuration rejects tasks that need answers."""
        raise NotImplementedError
