"""Chat templates: which tokens are prompt and which are the assistant's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.common.models import chat_templates, model_loading
from components.common.runtime.errors import InputError
from tests.tiny import tiny_model

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "Six, naïvely."},
]
COUNTING_TEMPLATE = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_loading.load_tokenizer(tiny_model(tmp_path_factory.mktemp("tiny")))


def decode_answers(tokenizer: Any, encoded: chat_templates.EncodedConversation) -> str:
    return str(tokenizer.decode([t for t, a in zip(encoded.input_ids, encoded.answer_mask, strict=True) if a]))


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer = model_loading.load_tokenizer(Path(tokenizer.name_or_path))
    tokenizer.chat_template = template
    return tokenizer


def decode_completion(tokenizer: Any, completion: chat_templates.EncodedCompletion) -> tuple[str, str]:
    return str(tokenizer.decode(completion.prompt_ids)), str(tokenizer.decode(completion.answer_ids))


def test_answer_mask_covers_exactly_the_assistant_turns(tokenizer: Any) -> None:
    encoded = chat_templates.encode_conversation(tokenizer, CONVERSATION, max_length=10_000)
    assert decode_answers(tokenizer, encoded) == "Four.<|im_end|>Six, naïvely.<|im_end|>"
    assert tokenizer.decode(encoded.input_ids) == chat_templates.render_conversation(tokenizer, CONVERSATION)
    assert encoded.cut_tokens == 0


def test_long_conversation_is_truncated_and_cut_tokens_are_counted(tokenizer: Any) -> None:
    full = chat_templates.encode_conversation(tokenizer, CONVERSATION, max_length=10_000)
    truncated = chat_templates.encode_conversation(tokenizer, CONVERSATION, max_length=20)
    assert truncated.cut_tokens == len(full.input_ids) - 20 > 0
    assert (truncated.input_ids, truncated.answer_mask) == (full.input_ids[:20], full.answer_mask[:20])


def test_prompt_ends_with_opening_of_assistant_turn(tokenizer: Any) -> None:
    prompt = tokenizer.decode(chat_templates.encode_prompt(tokenizer, CONVERSATION[:2]))
    assert chat_templates.render_conversation(tokenizer, CONVERSATION).startswith(prompt)
    assert prompt.endswith("assistant\n")


def test_default_template_ends_answers(tokenizer: Any) -> None:
    tokenizer = with_template(tokenizer, chat_templates.DEFAULT_CHAT_TEMPLATE)
    encoded = chat_templates.encode_conversation(tokenizer, CONVERSATION, max_length=10_000)
    assert decode_answers(tokenizer, encoded) == f" Four.{tokenizer.eos_token} Six, naïvely.{tokenizer.eos_token}"


def list_answers(tokenizer: Any, template: str, messages: Any) -> list[tuple[str, str]]:
    """Return the text before each learned answer and the answer, of all examples in order."""
    tokenizer = with_template(tokenizer, template)
    answers = []
    for encoded in chat_templates.encode_answers(tokenizer, messages, max_length=10_000):
        mask = [*encoded.answer_mask, 0]
        starts = [i for i, is_answer in enumerate(mask) if is_answer and not mask[i - 1]]
        spans = [(start, mask.index(0, start)) for start in starts]
        answers += [
            (tokenizer.decode(encoded.input_ids[:i]), tokenizer.decode(encoded.input_ids[i:j])) for i, j in spans
        ]
    return answers


def test_answers_that_the_template_rewrites_later_are_learned_in_separate_examples(tokenizer: Any) -> None:
    """As Qwen3, the template writes a thinking block in the last turn only."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    first = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    second = f"{first}Four.<|im_end|>\n<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert list_answers(tokenizer, template, CONVERSATION) == [
        (first, "<think></think>Four.<|im_end|>"),
        (second, "<think></think>Six, naïvely.<|im_end|>"),
    ]


def test_system_prompt_in_the_last_question_is_part_of_each_prompt(tokenizer: Any) -> None:
    """As in Mistral 7B v0.3 and Pixtral, whose templates omit the system prompt if an answer follows the question."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST]"
        "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
        "{{ m['content'] }}[/INST]{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% endif %}"
        "{% endfor %}"
    )
    assert list_answers(tokenizer, template, CONVERSATION) == [
        ("[INST]Be brief.\n\nWhat is 2 + 2?[/INST]", "Four.<|im_end|>"),
        (
            "[INST]What is 2 + 2?[/INST]Four.<|im_end|>[INST]Be brief.\n\nAnd 3 + 3?[/INST]",
            "Six, naïvely.<|im_end|>",
        ),
    ]


def test_opening_of_next_turn_is_not_learned(tokenizer: Any) -> None:
    """As that of Command R7B, the template always opens the assistant's turn at the end."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
        "<|im_start|>assistant:"
    )
    assert [answer for _, answer in list_answers(tokenizer, template, CONVERSATION)] == [
        "Four.<|im_end|>",
        "Six, naïvely.<|im_end|>",
    ]


def test_end_token_that_is_written_at_the_end_only_is_learned_in_each_turn(tokenizer: Any) -> None:
    """As that of GPT-OSS, the template ends the last answer with another token than earlier ones."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] + ':' + m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    assert [answer for _, answer in list_answers(tokenizer, template, CONVERSATION)] == [
        "Four.<|im_end|>",
        "Six, naïvely.<|im_end|>",
    ]


def test_prompt_that_changes_with_the_number_of_messages_is_read_as_at_inference(tokenizer: Any) -> None:
    answers = list_answers(tokenizer, COUNTING_TEMPLATE, CONVERSATION)
    assert answers == [
        ("2Be brief.What is 2 + 2?", "Four."),
        ("4Be brief.What is 2 + 2?Four.And 3 + 3?", "Six, naïvely."),
    ]
    completion = chat_templates.encode_completion(
        with_template(tokenizer, COUNTING_TEMPLATE), CONVERSATION[:2], CONVERSATION[2:3]
    )
    assert decode_completion(tokenizer, completion) == answers[0]


def test_white_space_at_the_end_of_an_answer_without_end_token(tokenizer: Any) -> None:
    conversation = [CONVERSATION[1], {"role": "assistant", "content": "Four. \n"}]
    assert list_answers(tokenizer, COUNTING_TEMPLATE, conversation) == [("1What is 2 + 2?", "Four.")]


def test_template_that_omits_answers_is_refused(tokenizer: Any) -> None:
    """Templates of Idefics3 and SmolVLM expect a list of parts as content, and write nothing for a text."""
    template = (
        "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{{ p['text'] }}{% endfor %}|{% endfor %}"
    )
    with pytest.raises(InputError, match="omits the text of messages"):
        chat_templates.encode_answers(with_template(tokenizer, template), CONVERSATION, max_length=100)


def test_default_template_writes_one_line_per_message(tokenizer: Any) -> None:
    """Transformers compiles templates with trim_blocks, which drops the newline after a tag."""
    with_default = with_template(tokenizer, chat_templates.DEFAULT_CHAT_TEMPLATE)
    end = with_default.eos_token
    lines = [
        "System: Be brief.",
        "User: What is 2 + 2?",
        f"Assistant: Four.{end}",
        "User: And 3 + 3?",
        f"Assistant: Six, naïvely.{end}",
    ]
    assert chat_templates.render_conversation(with_default, CONVERSATION) == "".join(f"{line}\n" for line in lines)
    assert (
        chat_templates.render_conversation(with_default, CONVERSATION[:4], prompt=True)
        == "".join(f"{line}\n" for line in lines[:4]) + "Assistant:"
    )


def test_completion_separates_prompt_and_answer(tokenizer: Any) -> None:
    completion = chat_templates.encode_completion(tokenizer, CONVERSATION[:2], CONVERSATION[2:3])
    prompt, answer = decode_completion(tokenizer, completion)
    assert prompt == chat_templates.render_conversation(tokenizer, CONVERSATION[:2], prompt=True)
    assert answer == "Four.<|im_end|>"
    assert completion.prompt_ids == chat_templates.encode_prompt(tokenizer, CONVERSATION[:2])
    assert chat_templates.render_conversation(tokenizer, CONVERSATION[:3]) == f"{prompt}{answer}\n", (
        "the template's line break is in neither"
    )


def test_earlier_answers_are_part_of_prompt(tokenizer: Any) -> None:
    prompt, answer = decode_completion(
        tokenizer, chat_templates.encode_completion(tokenizer, CONVERSATION[:4], CONVERSATION[4:])
    )
    assert prompt == chat_templates.render_conversation(tokenizer, CONVERSATION[:4], prompt=True)
    assert "Four.<|im_end|>" in prompt
    assert answer == "Six, naïvely.<|im_end|>"


def test_two_answers_share_prompt_tokens(tokenizer: Any) -> None:
    first, second = (
        chat_templates.encode_completion(tokenizer, CONVERSATION[:2], [{"role": "assistant", "content": text}])
        for text in ("Four.", "五")
    )
    assert first.prompt_ids == second.prompt_ids
    assert first.answer_ids != second.answer_ids


def test_completion_matches_last_turn_of_conversation(tokenizer: Any) -> None:
    completion, conversation = (
        chat_templates.encode_completion(tokenizer, CONVERSATION[:4], CONVERSATION[4:]),
        chat_templates.encode_conversation(tokenizer, CONVERSATION, max_length=10_000),
    )
    prompt_length, answer_length = len(completion.prompt_ids), len(completion.answer_ids)
    assert [*completion.prompt_ids, *completion.answer_ids] == conversation.input_ids[: prompt_length + answer_length]
    assert conversation.answer_mask[prompt_length:] == [1] * answer_length + [0] * (
        len(conversation.answer_mask) - prompt_length - answer_length
    )


def test_tools_are_part_of_completion_prompt(tokenizer: Any) -> None:
    template = str(tokenizer.chat_template)
    with_tools = with_template(tokenizer, "{% if tools %}{{ tools | tojson }}{% endif %}" + template)
    prompt, answer = decode_completion(
        with_tools, chat_templates.encode_completion(with_tools, CONVERSATION[:2], CONVERSATION[2:3], [{"name": "add"}])
    )
    assert prompt.startswith('[{"name": "add"}]')
    assert answer == "Four.<|im_end|>"


def test_template_without_tools_gets_them_in_a_system_message(tokenizer: Any) -> None:
    """The gateway sends the same conversation to a served model."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call, result = {"role": "assistant", "content": '{"name": "add"}'}, {"role": "tool", "content": "4"}
    conversation = [*CONVERSATION[:2], call, result, CONVERSATION[2]]
    encoded = chat_templates.encode_conversation(tokenizer, conversation, tools, max_length=10_000)
    text = tokenizer.decode(encoded.input_ids)
    system = text[: text.index("<|im_end|>")]
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '\n{"name": "add", "parameters": {"type": "object"}}\n</tools>' in system
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>" in text
    assert decode_answers(tokenizer, encoded) == '{"name": "add"}<|im_end|>Four.<|im_end|>'
    prompt = tokenizer.decode(chat_templates.encode_prompt(tokenizer, conversation[1:2], tools))
    assert prompt.startswith("<|im_start|>system\nYou can call functions.")
    assert chat_templates.render_conversation(tokenizer, CONVERSATION, []) == chat_templates.render_conversation(
        tokenizer, CONVERSATION
    )


def test_template_without_tools_and_system_messages_is_an_error_with_tools(tokenizer: Any) -> None:
    strict = with_template(
        tokenizer,
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}",
    )
    assert chat_templates.render_conversation(strict, CONVERSATION[1:3]) == "What is 2 + 2?Four."
    with pytest.raises(InputError, match="rejects a conversation with the roles system, user") as error:
        chat_templates.render_conversation(strict, CONVERSATION[1:2], [{"name": "add"}])
    assert error.value.hint.startswith("The template does not support tools, so a system message describes the tools.")


def test_token_across_prompt_and_answer_belongs_to_prompt(tokenizer: Any) -> None:
    bare_template = with_template(tokenizer, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    question, reply = [{"role": "user", "content": "Open t"}], [{"role": "assistant", "content": "he list."}]
    completion = chat_templates.encode_completion(bare_template, question, reply)
    assert decode_completion(bare_template, completion) == ("Open the", " list.")
    encoded = chat_templates.encode_conversation(bare_template, [*question, *reply], max_length=100)
    assert decode_answers(bare_template, encoded) == " list."


def test_text_is_enclosed_in_beginning_and_end_tokens(tokenizer: Any) -> None:
    tokenizer = model_loading.load_tokenizer(Path(tokenizer.name_or_path))
    words = tokenizer("naïve 漢字")["input_ids"]
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert chat_templates.encode_text(tokenizer, "naïve 漢字") == [begin, *words, end]
    tokenizer.bos_token = tokenizer.eos_token
    assert chat_templates.encode_text(tokenizer, "naïve 漢字") == [*words, end], (
        "a token that is both BOS and EOS is added at the end only"
    )
    tokenizer.bos_token = None
    assert chat_templates.encode_text(tokenizer, "naïve 漢字") == [*words, end]
    tokenizer.eos_token = None
    assert chat_templates.encode_text(tokenizer, "naïve 漢字") == words


def test_conversation_refused_by_template_is_input_error(tokenizer: Any) -> None:
    strict = with_template(tokenizer, "{{ raise_exception('System role not supported') }}")
    with pytest.raises(InputError, match="System role not supported"):
        chat_templates.encode_conversation(strict, CONVERSATION, max_length=100)


def test_tokenizer_that_gives_up_on_a_text_is_reported(tokenizer: Any) -> None:
    from tokenizers import Regex, pre_tokenizers

    backtracking = model_loading.load_tokenizer(Path(tokenizer.name_or_path))
    backtracking.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("^(a+)+$"), "isolated")
    assert chat_templates.encode_text(backtracking, "aaa!") == chat_templates.encode_text(tokenizer, "aaa!")
    with pytest.raises(InputError, match=r"tokenizer fails for a text of 41 characters: .*retry-limit"):
        chat_templates.encode_text(backtracking, "a" * 40 + "!")


def test_tokenizer_without_character_offsets_is_refused() -> None:
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer(chat_template=chat_templates.DEFAULT_CHAT_TEMPLATE)
    with pytest.raises(InputError, match="ByT5Tokenizer, reports no character offsets"):
        chat_templates.encode_conversation(slow, CONVERSATION, max_length=100)
    assert chat_templates.encode_prompt(slow, CONVERSATION)
