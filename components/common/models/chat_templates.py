"""Chat templates: rendering and tokenization of conversations, and location of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.runtime.errors import InputError

# For a tokenizer without a template. Answers end with the end-of-sequence token, so that a tuned model learns to stop.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class EncodedConversation:
    """A tokenized conversation. `answer_mask` is 1 for tokens of assistant turns, including the end-of-turn token."""

    input_ids: list[int]
    answer_mask: list[int]
    truncated: bool


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, max_length: int
) -> EncodedConversation:
    """Tokenize a conversation, mark the tokens of its assistant turns, and truncate both lists to `max_length` tokens.

    Assistant turns are located as character ranges of the rendered text and mapped to tokens by start offsets. The
    template therefore needs no `{% generation %}` blocks. A token that spans prompt and answer belongs to the prompt.

    Args:
        tools: definitions of tools (JSON Schema) for the template.

    Raises:
        InputError: the template rejects the conversation or rewrites earlier turns.
    """
    text = render_conversation(tokenizer, messages, tools)
    spans = [
        _locate_answer(tokenizer, messages[:index], messages[: index + 1], tools, text)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    ids, starts = _tokenize(tokenizer, text)
    mask = [int(any(start <= offset < end for start, end in spans)) for offset in starts]
    return EncodedConversation(ids[:max_length], mask[:max_length], len(ids) > max_length)


def _tokenize(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text and their start offsets, at most the end of the previous token."""
    # ByteLevel's trim_offsets excludes white space from offsets. Tokens of the same character have equal offsets.
    encoding = _call_tokenizer(tokenizer, text, return_offsets_mapping=True)
    starts, reached = [], 0
    for start, end in encoding["offset_mapping"]:
        starts.append(min(start, reached))
        reached = max(reached, end)
    return list(encoding["input_ids"]), starts


def _call_tokenizer(tokenizer: Any, text: str, **options: bool) -> Any:
    """Return the encoding of a text. Raises InputError if a regular expression of the tokenizer gives up."""
    try:
        return tokenizer(text, add_special_tokens=False, **options)
    except BaseException as error:
        # A failure in the Rust code of tokenizers, which is no Exception. Oniguruma gives up after 10 million steps.
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"the model's tokenizer fails for a text of {len(text):,} characters: {error}",
            hint="Remove rows with long repetitions, or use a model with another tokenizer.",
        ) from None


def encode_prompt(tokenizer: Any, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """Return the token IDs of a conversation and the opening of the assistant's turn.

    Args:
        tools: definitions of tools (JSON Schema) for the template.

    Raises:
        InputError: the template rejects the conversation.
    """
    text = render_conversation(tokenizer, messages, tools, prompt=True)
    return list(_call_tokenizer(tokenizer, text)["input_ids"])


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token IDs of plain text, including the beginning and end tokens that the tokenizer defines."""
    ids = list(_call_tokenizer(tokenizer, text)["input_ids"])
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is not None and begin != end:
        ids = [begin, *ids]
    return ids if end is None else [*ids, end]


def render_conversation(tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
    """Render a conversation with the model's template; with `prompt`, append the opening of the assistant's turn.

    Args:
        tools: definitions of tools (JSON Schema) for the template.

    Raises:
        InputError: the template rejects the conversation, for example because of a system message.
    """
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt)
        )
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages[:8]) + (
            f" and {len(messages) - 8} more" if len(messages) > 8 else ""
        )
        raise InputError(
            f"the model's chat template rejects a conversation with the roles {roles}: {error}",
            hint="Curate rows that the template accepts, or set another chat template in the tokenizer.",
        ) from None


def _locate_answer(
    tokenizer: Any, before: Sequence[Message], turn: Sequence[Message], tools: Any, text: str
) -> tuple[int, int]:
    """Return the character range of the assistant turn that extends `before` to `turn`."""
    # The prompt may open a thinking block that the answer lacks; an end mark may follow the last turn only.
    opening = render_conversation(tokenizer, before, tools, prompt=True)
    ending = render_conversation(tokenizer, turn, tools)
    start, end = (
        _compute_common_prefix_length(tokenizer, text, opening),
        _compute_common_prefix_length(tokenizer, text, ending),
    )
    if start < len(opening):
        _check_turns_unchanged(text, render_conversation(tokenizer, before, tools), before)
    if end < len(ending):
        _check_turns_unchanged(text, ending, turn)
    return start, len(text[:end].rstrip())


def _compute_common_prefix_length(tokenizer: Any, text: str, part: str) -> int:
    """Return the length in characters of the common prefix of the text and `part`, in whole tokens."""
    if text.startswith(part):
        return len(part)
    (ids, starts), (others, _) = _tokenize(tokenizer, text), _tokenize(tokenizer, part)
    pairs = enumerate(zip(ids, others, strict=False))
    first = next((i for i, (token, other) in pairs if token != other), min(len(ids), len(others)))
    return starts[first] if first < len(starts) else len(text)


def _check_turns_unchanged(text: str, part: str, messages: Sequence[Message]) -> None:
    """Raise InputError if the text does not begin with the separate rendering of its first messages."""
    content = str(messages[-1]["content"]).strip() if messages else ""
    start = part.rfind(content)
    if start < 0 or not text.startswith(part[: start + len(content)]):
        raise InputError(
            "the model's chat template rewrites earlier turns, so the assistant's tokens cannot be located",
            hint="Use a template that keeps earlier turns unchanged, or split the conversation into one row per turn.",
        )


@dataclass(frozen=True)
class EncodedCompletion:
    """A tokenized prompt and answer.

    The answer excludes tokens that also cover prompt text, and text that the template appends to a conversation.
    """

    prompt_ids: list[int]
    answer_ids: list[int]


def encode_completion(
    tokenizer: Any, prompt: Sequence[Message], answer: Sequence[Message], tools: Any = None
) -> EncodedCompletion:
    """Tokenize a prompt and its answer; the answer ends with its end-of-turn token.

    Args:
        tools: definitions of tools (JSON Schema) for the template.

    Raises:
        InputError: the template rejects the conversation or rewrites earlier turns.
    """
    text = render_conversation(tokenizer, [*prompt, *answer], tools)
    start, end = _locate_answer(tokenizer, prompt, [*prompt, *answer], tools, text)
    ids, starts = _tokenize(tokenizer, text)
    first = next((i for i, offset in enumerate(starts) if offset >= start), len(ids))
    last = next((i for i, offset in enumerate(starts) if offset >= end), len(ids))
    return EncodedCompletion(ids[:first], ids[first:last])
