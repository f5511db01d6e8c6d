"""The dataset's own test split, asked of models that read few tokens."""

from __future__ import annotations

from typing import Any

import pytest

from components.common.errors import InputError
from components.evaluation.engine import TransformersEngine
from components.evaluation.task import Item, Scores
from components.evaluation.tasks.config import HeldOut
from components.evaluation.tasks.held_out import HeldOutTask
from tests.evaluation.tasks.plain_engine import given
from tests.tiny import tiny_tokenizer


def of_64_positions(tokenizer: Any) -> TransformersEngine:
    """A model whose positions are learned: it has nothing for the 65th."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, **marks)
    return TransformersEngine(GPT2LMHeadModel(config).eval(), tokenizer, 2048)


LONG = list(range(5, 125))


def answered(prompt: list[int], generation_tokens: int) -> Scores:
    tokenizer = tiny_tokenizer()
    ask = {"ids": LONG[:60], "answer": [0] * 50 + [1] * 10, "prompt": prompt}
    task = HeldOutTask(HeldOut(generation_tokens=generation_tokens))
    return task.score(of_64_positions(tokenizer), [Item(str(n), "p", ask=ask) for n in range(2)], given(tokenizer), None)


def test_of_a_prompt_longer_than_the_model_reads_the_end_is_answered() -> None:
    assert answered(LONG, 8).answers == answered(LONG[-56:], 8).answers


def test_answers_that_leave_no_room_for_a_prompt_are_told_with_their_setting() -> None:
    with pytest.raises(InputError, match="the model reads 64 tokens, and an answer of 64 leaves no room") as refused:
        answered(LONG, 64)
    assert refused.value.hint == "Lower generation_tokens."
