"""Chat templates: rendering and tokenization of conversations, and location of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.models import tool_messages
from components.common.runtime.errors import InputError

# For a tokenizer without a template. Answers end with the end-of-sequence token, so that a tuned model learns to stop.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

CONTENT_MARK = "content-4c1f"  # a word that no template and no conversation contains
Message = Mapping[str, Any]


@dataclass(frozen=True)
class EncodedConversation:
    """A tokenized conversation. `answer_mask` is 1 for tokens of answers, including the end-of-turn token.

    `cut_tokens` is the number of tokens that were cut off at the end.
    """

    input_ids: list[int]
    answer_mask: list[int]
    cut_tokens: int = 0


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, max_length: int
) -> EncodedConversation:
    """Tokenize a conversation, mark the tokens of its answers, and truncate both lists to `max_length` tokens.

    Answers that the template renders differently in the full conversation than at inference are not marked; see
    `encode_answers`.

    Args:
        tools: definitions of tools (JSON Schema) for the template.

    Raises:
        InputError: the template rejects the conversation or omits the text of messages.
    """
    return encode_answers(tokenizer, messages, tools, max_length=max_length)[-1]


def encode_answers(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, max_length: int
) -> list[EncodedConversation]:
    """Tokenize a conversation such that each answer is marked once, after the prompt that the model reads at inference.

    Most templates render a turn alike whether or not others follow. They give one example, the conversation. Other
    templates drop the reasoning of earlier answers, or move the system prompt to the last question. An answer that
    is rendered differently in the conversation than at inference is marked in a separate example, which ends with it.

    Answers are located as character ranges of the rendered text and mapped to tokens by start offsets. The template
    therefore needs no `{% generation %}` blocks. A token that spans prompt and answer belongs to the prompt.

    Args:
        tools: definitions of tools (JSON Schema) for the template.

    Returns:
        Examples of at most `max_length` tokens; the last is the whole conversation.

    Raises:
        InputError: the template rejects the conversation or omits the text of messages.
    """
    turns = [
        _render_turn(tokenizer, messages[:index], messages[: index + 1], tools)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    is_complete = bool(turns) and len(turns[-1].messages) == len(messages)
    text = turns[-1].ending if is_complete else render_conversation(tokenizer, messages, tools)
    examples = []
    while True:
        spans = [_locate_answer(tokenizer, turn, text, tools) for turn in turns]
        found = [span for span in spans if span]
        ids, starts = _tokenize(tokenizer, text)
        mask = [int(any(start <= offset < end for start, end in found)) for offset in starts]
        examples.append(EncodedConversation(ids[:max_length], mask[:max_length], max(len(ids) - max_length, 0)))
        turns = [turn for turn, span in zip(turns, spans, strict=True) if not span]
        if not turns:
            return examples[::-1]
        text = turns[-1].ending


def _tokenize(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a text and their start offsets, at most the end of the previous token."""
    if not tokenizer.is_fast:
        raise InputError(
            f"the model's tokenizer, {type(tokenizer).__name__}, reports no character offsets of its tokens, so the "
            "answers cannot be located",
            hint="Convert the tokenizer to a fast tokenizer, which has a tokenizer.json, or use another model.",
        )
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
        tools: definitions of tools (JSON Schema). A template without a place for tools gets them in a system message.

    Raises:
        InputError: the template rejects the conversation, for example because of a system message.
    """
    from jinja2 import TemplateError

    needs_tools = bool(tools) or any(message["role"] == "tool" for message in messages)
    hint = "Curate rows that the template accepts, or set another chat template in the tokenizer."
    if needs_tools and not tool_messages.has_tool_template(tokenizer):
        messages, tools = tool_messages.describe_tools(messages, tools), None
        hint = f"The template does not support tools, so a system message describes the tools. {hint}"
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
            hint=hint,
        ) from None


@dataclass(frozen=True)
class _Turn:
    """A conversation that ends with an answer; the rendered prompt with the answer's opening; prompt and answer."""

    messages: Sequence[Message]
    opening: str
    ending: str


def _render_turn(tokenizer: Any, before: Sequence[Message], messages: Sequence[Message], tools: Any) -> _Turn:
    """Render the prompt `before`, and the messages that continue it with an answer.

    Some templates render a prompt differently if an answer follows: that of Mistral 7B v0.3 omits the system prompt.
    """
    opening = render_conversation(tokenizer, before, tools, prompt=True)
    ending = render_conversation(tokenizer, messages, tools)
    if before and not ending.startswith(opening):  # the prompt may also open a thinking block that the answer lacks
        marked = [*before[:-1], {**before[-1], "content": CONTENT_MARK}]
        prompt = opening.removesuffix(_render_after_mark(tokenizer, marked, tools, prompt=True))
        if not ending.startswith(prompt):
            ending = prompt + _render_after_mark(tokenizer, [*marked, *messages[len(before) :]], tools)
    return _Turn(messages, opening, ending)


def _locate_answer(tokenizer: Any, turn: _Turn, text: str, tools: Any) -> tuple[int, int] | None:
    """Return the character range in `text` of the answer that ends `turn`, with its end of turn.

    None if `text` differs there from what the model reads and writes at inference: the prompt, then the answer.
    """
    start = _compute_common_prefix_length(tokenizer, text, turn.opening)
    end = len(text[: _compute_common_prefix_length(tokenizer, text, turn.ending)].rstrip())
    whole, eos = len(turn.ending.rstrip()), tokenizer.eos_token
    answer, content = text[start:end], str(turn.messages[-1].get("content") or "").strip()
    if end >= whole and content in text and (not eos or eos not in answer or answer.endswith(eos)):
        return start, end
    marked = [*turn.messages[:-1], {**turn.messages[-1], "content": CONTENT_MARK}]
    after = _render_after_mark(tokenizer, marked, tools)
    answer_end = len(turn.ending.removesuffix(after))
    if end < min(answer_end, whole) or end == answer_end < whole:  # without an end of turn the answer would not end
        return None
    end_of_turn = text.find(eos, answer_end, end) if eos else -1
    return start, end if end_of_turn < 0 else end_of_turn + len(eos)  # the template may open the next turn


def _render_after_mark(tokenizer: Any, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str:
    """Return the rendered text after the message whose content is CONTENT_MARK."""
    _, found, after = render_conversation(tokenizer, messages, tools, prompt=prompt).rpartition(CONTENT_MARK)
    if not found:
        raise InputError(
            "the model's chat template omits the text of messages",
            hint="Set a chat template in the tokenizer that accepts the content of a message as text, not only as a "
            "list.",
        )
    return after


def _compute_common_prefix_length(tokenizer: Any, text: str, part: str) -> int:
    """Return the length in characters of the common prefix of the text and `part`, in whole tokens."""
    if text.startswith(part):
        return len(part)
    (ids, starts), (others, _) = _tokenize(tokenizer, text), _tokenize(tokenizer, part)
    pairs = enumerate(zip(ids, others, strict=False))
    first = next((i for i, (token, other) in pairs if token != other), min(len(ids), len(others)))
    return starts[first] if first < len(starts) else len(text)


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
        InputError: the template rejects the conversation or omits the text of messages.
    """
    turn = _render_turn(tokenizer, prompt, [*prompt, *answer], tools)
    start, end = _locate_answer(tokenizer, turn, turn.ending, tools) or (0, 0)
    ids, starts = _tokenize(tokenizer, turn.ending)
    first = next((i for i, offset in enumerate(starts) if offset >= start), len(ids))
    last = next((i for i, offset in enumerate(starts) if offset >= end), len(ids))
    return EncodedCompletion(ids[:first], ids[first:last])
