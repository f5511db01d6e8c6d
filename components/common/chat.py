"""From messages to tokens: chat templates, and which tokens are the assistant's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.errors import InputError

# For a tokenizer that brings no template. The answer ends with the end-of-sequence token, so a model tuned on it learns to stop.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Encoded:
    """One conversation as tokens. `answer` is 1 where the token belongs to an assistant turn, its end-of-turn token included."""

    input_ids: list[int]
    answer: list[int]
    truncated: bool


def encode(tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, max_length: int) -> Encoded:
    """Tokens of a conversation and the mask of its assistant turns, cut after `max_length` tokens.

    Spans are found in the rendered text and carried over to tokens by their offsets, so no `{% generation %}` mark is needed in the
    template and a token that joins the prompt and the answer is never counted as answer.
    """
    text = render(tokenizer, messages, tools)
    spans = _answer_spans(tokenizer, messages, tools, text)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoding["input_ids"]
    mask = [int(any(start <= a < b <= end for start, end in spans)) for a, b in encoding["offset_mapping"]]
    return Encoded(ids[:max_length], mask[:max_length], len(ids) > max_length)


def encode_prompt(tokenizer: Any, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """Tokens of the conversation up to where the assistant begins to answer."""
    return list(tokenizer(render(tokenizer, messages, tools, prompt=True), add_special_tokens=False)["input_ids"])


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a plain text between the marks of its beginning and its end, where the tokenizer has them."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is not None and begin != end:
        ids = [begin, *ids]
    return ids if end is None else [*ids, end]


def render(tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
    """The conversation as the model's template writes it; with `prompt`, ready for the assistant's turn."""
    return str(tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt))


def _answer_spans(tokenizer: Any, messages: Sequence[Message], tools: Any, text: str) -> list[tuple[int, int]]:
    """Character ranges of the assistant turns: from after the template's opening to the end-of-turn token."""
    return [
        _answer_span(tokenizer, messages[:index], messages[: index + 1], tools, text)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _answer_span(tokenizer: Any, before: Sequence[Message], turn: Sequence[Message], tools: Any, text: str) -> tuple[int, int]:
    """Where in the text the turn lies that makes `turn` of `before`."""
    opening = render(tokenizer, before, tools, prompt=True)
    if not text.startswith(opening):  # a template whose generation prompt opens a thinking block, say
        opening = render(tokenizer, before, tools)
    ending = render(tokenizer, turn, tools)
    if not (text.startswith(opening) and text.startswith(ending)):
        raise InputError(
            "the model's chat template rewrites earlier turns, so the assistant's tokens cannot be told apart",
            hint="Use a template that only appends, or split the conversation into one row a turn.",
        )
    return len(opening), len(ending.rstrip())


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as tokens. No token of the prompt is in the answer, and none of what the template writes after it."""

    prompt_ids: list[int]
    answer_ids: list[int]


def encode_completion(tokenizer: Any, prompt: Sequence[Message], answer: Sequence[Message], tools: Any = None) -> Completion:
    """Tokens of a conversation up to where the assistant begins its last answer, and of that answer with its end-of-turn token."""
    text = render(tokenizer, [*prompt, *answer], tools)
    start, end = _answer_span(tokenizer, prompt, [*prompt, *answer], tools, text)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    first = next((i for i, (a, b) in enumerate(offsets) if start <= a < b), len(ids))
    last = next((i for i, (_, b) in enumerate(offsets) if b > end), len(ids))
    return Completion(ids[:first], ids[first:last])
