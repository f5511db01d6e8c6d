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

    Spans are found in the rendered text and carried over to tokens by where these begin, so no `{% generation %}` mark is needed in the
    template and a token that joins the prompt and the answer is never counted as answer.
    """
    text = render(tokenizer, messages, tools)
    spans = _answer_spans(tokenizer, messages, tools, text)
    ids, starts = _tokens(tokenizer, text)
    mask = [int(any(start <= place < end for start, end in spans)) for place in starts]
    return Encoded(ids[:max_length], mask[:max_length], len(ids) > max_length)


def _tokens(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text and where each begins: where the one before ended.

    A tokenizer may leave white space out of the places it tells (ByteLevel's trim_offsets, marks that strip), and the tokens that make up
    one character have the same place.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, reached = [], 0
    for start, end in encoding["offset_mapping"]:
        starts.append(min(start, reached))
        reached = max(reached, end)
    return list(encoding["input_ids"]), starts


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
    """The conversation as the model's template writes it; with `prompt`, ready for the assistant's turn.

    Raises InputError where the template refuses it: some allow no system message, or want turns to alternate.
    """
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt))
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise InputError(
            f"the model's chat template refuses a conversation of {roles}: {error}",
            hint="Curate rows as this template wants them, or give the tokenizer another chat template.",
        ) from None


def _answer_spans(tokenizer: Any, messages: Sequence[Message], tools: Any, text: str) -> list[tuple[int, int]]:
    """Character ranges of the assistant turns: from after the template's opening to the end-of-turn token."""
    return [
        _answer_span(tokenizer, messages[:index], messages[: index + 1], tools, text)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def _answer_span(tokenizer: Any, before: Sequence[Message], turn: Sequence[Message], tools: Any, text: str) -> tuple[int, int]:
    """Where in the text the assistant turn lies that makes `turn` of `before`: from after the template's opening to its end-of-turn token.

    A template may open a thinking block that this answer does without, and may end a conversation, but not a turn within one, with a mark.
    """
    opening, ending = render(tokenizer, before, tools, prompt=True), render(tokenizer, turn, tools)
    start, end = _shared(tokenizer, text, opening), _shared(tokenizer, text, ending)
    if start < len(opening):
        _check_kept(text, render(tokenizer, before, tools), before)
    if end < len(ending):
        _check_kept(text, ending, turn)
    return start, len(text[:end].rstrip())


def _shared(tokenizer: Any, text: str, part: str) -> int:
    """How many characters a text and what is said to begin it have in common, in whole tokens."""
    if text.startswith(part):
        return len(part)
    (ids, starts), (others, _) = _tokens(tokenizer, text), _tokens(tokenizer, part)
    first = next((i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), min(len(ids), len(others)))
    return starts[first] if first < len(starts) else len(text)


def _check_kept(text: str, part: str, messages: Sequence[Message]) -> None:
    """Raise InputError where the text does not begin as its first messages alone do, up to the last one's words."""
    said = str(messages[-1]["content"]).strip() if messages else ""
    place = part.rfind(said)
    if place < 0 or not text.startswith(part[: place + len(said)]):
        raise InputError(
            "the model's chat template rewrites earlier turns, so the assistant's tokens cannot be told apart",
            hint="Use a template that only appends, or split the conversation into one row a turn.",
        )


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as tokens. No token of the prompt is in the answer, and none of what the template writes after it."""

    prompt_ids: list[int]
    answer_ids: list[int]


def encode_completion(tokenizer: Any, prompt: Sequence[Message], answer: Sequence[Message], tools: Any = None) -> Completion:
    """Tokens of a conversation up to where the assistant begins its last answer, and of that answer with its end-of-turn token."""
    text = render(tokenizer, [*prompt, *answer], tools)
    start, end = _answer_span(tokenizer, prompt, [*prompt, *answer], tools, text)
    ids, starts = _tokens(tokenizer, text)
    first = next((i for i, place in enumerate(starts) if place >= start), len(ids))
    last = next((i for i, place in enumerate(starts) if place >= end), len(ids))
    return Completion(ids[:first], ids[first:last])
