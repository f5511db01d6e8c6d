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
REWRITING = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny")))


def answered(tokenizer: Any, encoded: chat.Encoded) -> str:
    return str(tokenizer.decode([t for t, a in zip(encoded.input_ids, encoded.answer, strict=True) if a]))


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer = models.load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = template
    return tokenizer


def completed(tokenizer: Any, completion: chat.Completion) -> tuple[str, str]:
    return str(tokenizer.decode(completion.prompt_ids)), str(tokenizer.decode(completion.answer_ids))


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
    tokenizer = with_template(tokenizer, chat.PLAIN_TEMPLATE)
    encoded = chat.encode(tokenizer, TALK, max_length=10_000)
    assert answered(tokenizer, encoded) == f" Four.{tokenizer.eos_token} Six, naïvely.{tokenizer.eos_token}"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer = with_template(tokenizer, REWRITING)
    with pytest.raises(InputError, match="rewrites earlier turns"):
        chat.encode(tokenizer, TALK, max_length=100)


def test_the_plain_template_writes_one_line_a_message_though_transformers_trims_blocks(tokenizer: Any) -> None:
    plain = with_template(tokenizer, chat.PLAIN_TEMPLATE)
    end = plain.eos_token
    lines = ["System: Be brief.", "User: What is 2 + 2?", f"Assistant: Four.{end}", "User: And 3 + 3?", f"Assistant: Six, naïvely.{end}"]
    assert chat.render(plain, TALK) == "".join(f"{line}\n" for line in lines)
    assert chat.render(plain, TALK[:4], prompt=True) == "".join(f"{line}\n" for line in lines[:4]) + "Assistant:"


def test_a_prompt_and_its_answer_are_apart_and_nothing_follows_the_end_of_the_turn(tokenizer: Any) -> None:
    made = chat.encode_completion(tokenizer, TALK[:2], TALK[2:3])
    prompt, answer = completed(tokenizer, made)
    assert prompt == chat.render(tokenizer, TALK[:2], prompt=True)
    assert answer == "Four.<|im_end|>"
    assert made.prompt_ids == chat.encode_prompt(tokenizer, TALK[:2])
    assert chat.render(tokenizer, TALK[:3]) == f"{prompt}{answer}\n", "the template's line break is in neither"


def test_earlier_answers_belong_to_the_prompt(tokenizer: Any) -> None:
    prompt, answer = completed(tokenizer, chat.encode_completion(tokenizer, TALK[:4], TALK[4:]))
    assert prompt == chat.render(tokenizer, TALK[:4], prompt=True)
    assert "Four.<|im_end|>" in prompt
    assert answer == "Six, naïvely.<|im_end|>"


def test_two_answers_to_a_prompt_have_the_same_prompt(tokenizer: Any) -> None:
    one, other = (chat.encode_completion(tokenizer, TALK[:2], [{"role": "assistant", "content": said}]) for said in ("Four.", "五"))
    assert one.prompt_ids == other.prompt_ids
    assert one.answer_ids != other.answer_ids


def test_a_completion_is_learned_as_the_last_turn_of_its_conversation_is(tokenizer: Any) -> None:
    made, whole = chat.encode_completion(tokenizer, TALK[:4], TALK[4:]), chat.encode(tokenizer, TALK, max_length=10_000)
    first, count = len(made.prompt_ids), len(made.answer_ids)
    assert [*made.prompt_ids, *made.answer_ids] == whole.input_ids[: first + count]
    assert whole.answer[first:] == [1] * count + [0] * (len(whole.answer) - first - count)


def test_tools_stand_in_the_prompt_of_a_completion(tokenizer: Any) -> None:
    template = str(tokenizer.chat_template)
    told = with_template(tokenizer, "{% if tools %}{{ tools | tojson }}{% endif %}" + template)
    prompt, answer = completed(told, chat.encode_completion(told, TALK[:2], TALK[2:3], [{"name": "add"}]))
    assert prompt.startswith('[{"name": "add"}]')
    assert answer == "Four.<|im_end|>"


def test_a_token_that_joins_prompt_and_answer_belongs_to_the_prompt(tokenizer: Any) -> None:
    glued = with_template(tokenizer, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    asked, said = [{"role": "user", "content": "Open t"}], [{"role": "assistant", "content": "he list."}]
    made = chat.encode_completion(glued, asked, said)
    assert completed(glued, made) == ("Open the", " list.")
    encoded = chat.encode(glued, [*asked, *said], max_length=100)
    assert answered(glued, encoded) == " list."


def test_a_completion_of_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    rewriting = with_template(tokenizer, REWRITING)
    with pytest.raises(InputError, match="rewrites earlier turns"):
        chat.encode_completion(rewriting, TALK[:2], TALK[2:3])


def test_a_text_stands_between_the_marks_of_its_beginning_and_end(tokenizer: Any) -> None:
    tokenizer = models.load_tokenizer(Path(tokenizer.name_or_path))
    words = tokenizer("naïve 漢字")["input_ids"]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert chat.encode_text(tokenizer, "naïve 漢字") == [begin, *words, end]
    tokenizer.bos_token = tokenizer.eos_token
    assert chat.encode_text(tokenizer, "naïve 漢字") == [*words, end], "one mark for both stands at the end"
    tokenizer.bos_token = None
    assert chat.encode_text(tokenizer, "naïve 漢字") == [*words, end]
    tokenizer.eos_token = None
    assert chat.encode_text(tokenizer, "naïve 漢字") == words


def test_a_conversation_that_the_template_refuses_is_an_error_for_people(tokenizer: Any) -> None:
    strict = with_template(tokenizer, "{{ raise_exception('System role not supported') }}")
    with pytest.raises(InputError, match="System role not supported"):
        chat.encode(strict, TALK, max_length=100)
