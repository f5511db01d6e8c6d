"""Greedy generation of one answer with a loaded transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.common.models import chat_templates
from components.common.models.chat_templates import Message


def generate_answer(model: Any, tokenizer: Any, messages: Sequence[Message], max_new_tokens: int) -> str:
    """Return the greedy answer to a conversation. Greedy decoding consumes no random numbers.

    Args:
        model: a transformers model in evaluation mode.
        tokenizer: the model's tokenizer.
        messages: the conversation up to the user's last turn.
        max_new_tokens: maximum length of the answer in tokens.

    Raises:
        InputError: the chat template rejects the conversation.
    """
    import torch

    ids = chat_templates.encode_prompt(tokenizer, messages)
    inputs = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
