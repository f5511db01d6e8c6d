"""Which tokens are the assistant's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common import chat, models
from components.common.errors import InputError
from tests.tiny import tiny_model

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six, naïvely."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny")))


def answered(tokenizer: Any, encoded: chat.Encoded) -> str:
    return str(tokenizer.decode([t for t, a in zip(encoded.input_ids, encoded.answer, strict=True) if a]))


def test_every_assistant_turn_with_its_end_is_the_answer_and_nothing_else(tokenizer: Any) -> None:
    encoded = chat.encode(tokenizer, TALK, max_length=10_000)
    assert answered(tokenizer, encoded) == "Four.<|im_end|>Six, naïvely.<|im_end|>"
    assert tokenizer.decode(encoded.input_ids) == chat.render(tokenizer, TALK)
    assert not encoded.truncated


def test_long_conversations_are_cut_and_said_to_be(tokenizer: Any) -> None:
    whole = chat.encode(tokenizer, TALK, max_length=10_000)
    cut = chat.encode(tokenizer, TALK, max_length=20)
    assert cut.truncated
    assert (cut.input_ids, cut.answer) == (whole.input_ids[:20], whole.answer[:20])


def test_the_prompt_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    prompt = tokenizer.decode(chat.encode_prompt(tokenizer, TALK[:2]))
    assert chat.render(tokenizer, TALK).startswith(prompt)
    assert prompt.endswith("assistant\n")


def test_a_tokenizer_without_a_template_gets_one_whose_answers_end(tokenizer: Any) -> None:
    tokenizer = models.load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = chat.PLAIN_TEMPLATE
    encoded = chat.encode(tokenizer, TALK, max_length=10_000)
    assert answered(tokenizer, encoded) == f" Four.{tokenizer.eos_token} Six, naïvely.{tokenizer.eos_token}"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer = models.load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(InputError, match="rewrites earlier turns"):
        chat.encode(tokenizer, TALK, max_length=100)
