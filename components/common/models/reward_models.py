"""Rewards of conversations: loading of a reward model, and its scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from components.common.models import model_loading
from components.common.models.model_loading import LoadableModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_reward_model(
    model: LoadableModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Return a loaded reward model that finds the last token of a padded row by the tokenizer's padding token.

    Its output layer computes in float32, as in training: in bfloat16, close rewards would be equal.

    Args:
        model: The reward model.
        tokenizer: Its tokenizer.
        dtype: See `model_loading.load_model`.
    """
    loaded: PreTrainedModel = model_loading.load_model(model, dtype=dtype)
    (head,) = (module for name, module in loaded.named_modules() if re.fullmatch(r"(base_model\.model\.)?score", name))
    head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
    loaded.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return loaded


def compute_rewards(
    model: PreTrainedModel,
    conversations: Sequence[Sequence[int]],
    batch_tokens: int,
    report: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Return the reward of each conversation, in order.

    Args:
        model: A model that `load_reward_model` returned.
        conversations: Token ids.
        batch_tokens: Tokens per batch, including padding.
        report: Called with the number of scored conversations.
    """
    import torch

    rewards = [0.0] * len(conversations)
    order = sorted(range(len(conversations)), key=lambda index: -len(conversations[index]))
    padding = model.config.get_text_config().pad_token_id
    done = 0
    while done < len(order):
        length = len(conversations[order[done]])
        batch = order[done : done + max(1, batch_tokens // length)]
        ids = torch.full((len(batch), length), padding, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(batch):
            ids[row, : len(conversations[index])] = torch.tensor(conversations[index])
            mask[row, : len(conversations[index])] = 1
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
        for index, reward in zip(batch, logits.squeeze(-1).float().tolist(), strict=True):
            rewards[index] = reward
        done += len(batch)
        report(done)
    return rewards
