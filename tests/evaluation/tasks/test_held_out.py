"""The held-out task with a short context length."""

from __future__ import annotations

from typing import Any

import pytest

from components.common.runtime.errors import InputError
from components.evaluation.task_interface import Item, Scores
from components.evaluation.tasks.held_out import HeldOut, HeldOutTask
from components.evaluation.transformers_engine import TransformersEngine
from tests.evaluation.tasks.fake_engines import build_context
from tests.tiny import tiny_tokenizer


def build_64_position_engine(tokenizer: Any) -> TransformersEngine:
    """Build an engine whose model has 64 learned positions."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    special_tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, **special_tokens)
    return TransformersEngine(GPT2LMHeadModel(config).eval(), tokenizer, 2048)


LONG = list(range(5, 125))


def score_two_items(prompt: list[int], generation_tokens: int) -> Scores:
    tokenizer = tiny_tokenizer()
    request = {"ids": LONG[:60], "answer": [0] * 50 + [1] * 10, "prompt": prompt}
    task = HeldOutTask(HeldOut(generation_tokens=generation_tokens))
    return task.score(
        build_64_position_engine(tokenizer),
        [Item(str(n), "p", request=request) for n in range(2)],
        build_context(tokenizer),
        None,
    )


def test_long_prompt_keeps_its_end() -> None:
    assert score_two_items(LONG, 8).answers == score_two_items(LONG[-56:], 8).answers


def test_answer_limit_without_prompt_room_is_refused() -> None:
    with pytest.raises(
        InputError, match="the model's context length is 64 tokens; an answer of 64 tokens leaves no room"
    ) as refused:
        score_two_items(LONG, 64)
    assert refused.value.hint == "Lower generation_tokens."
