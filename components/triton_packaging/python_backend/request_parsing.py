"""Validates the values of a request; the server checks only types and shapes."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .generation_request import GenerationRequest
from .triton_messages import ClientError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Fields = Mapping[str, Sequence[str | int | float | bool]]
Message = dict[str, Any]  # a message may have any additional keys, which the chat template receives
V = TypeVar("V")

ROLES = ("system", "user", "assistant", "tool")
# Real text has fewer characters per token; a longer prompt is rejected before tokenization.
MAX_CHARACTERS_PER_TOKEN = 64
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
MAX_LOGPROBS, MAX_PENALTY, MAX_SCHEMA_BYTES = 20, 2.0, 1 << 16


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request, in tokens."""

    max_prompt_tokens: int
    max_tokens: int
    default_max_tokens: int
    context: int


def parse_request(fields: Fields, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> GenerationRequest:
    """Build the request from its fields.

    Raises:
        ClientError: a field is missing or invalid.
    """
    temperature = _parse_number(fields, "temperature", 0.0, 10.0, 0.0)
    top_p = _parse_number(fields, "top_p", 0.0, 1.0, 1.0)
    if top_p == 0:
        raise ClientError("top_p is 0; it must be above 0 and at most 1")
    top_k = int(_parse_number(fields, "top_k", 0, 2**31 - 1, 0))
    requested = _get_number(fields, "max_tokens")
    if requested is not None and not 1 <= requested <= limits.max_tokens:
        raise ClientError(f"max_tokens is {requested}; it must be from 1 to {limits.max_tokens}")
    seed = _get_number(fields, "seed")
    if seed is not None and seed < 0:
        raise ClientError(f"seed is {seed}; it must be from 0 to {2**63 - 1}")
    stop = tuple(map(str, fields.get("stop") or ()))
    if len(stop) > MAX_STOP_STRINGS:
        raise ClientError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for number, each in enumerate(stop):
        if not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            raise ClientError(f"stop[{number}] has {len(each)} characters; from 1 to {MAX_STOP_CHARACTERS} are allowed")
    logprobs = _get_number(fields, "logprobs")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise ClientError(f"logprobs is {logprobs}; it must be from 0 to {MAX_LOGPROBS}")
    frequency, presence = (
        _parse_number(fields, name, -MAX_PENALTY, MAX_PENALTY, 0.0)
        for name in ("frequency_penalty", "presence_penalty")
    )
    schema = _parse_schema(fields)
    prompt = _encode_prompt(fields, tokenizer, limits)
    max_tokens = int(requested or min(limits.default_max_tokens, limits.context - len(prompt)))
    if len(prompt) + max_tokens > limits.context:
        raise ClientError(
            f"the length of the prompt ({len(prompt)} tokens) plus max_tokens ({max_tokens}) exceeds the model's context "
            f"of {limits.context} tokens"
        )
    seed = secrets.randbits(63) if seed is None else int(seed)
    return GenerationRequest(
        prompt,
        max_tokens,
        temperature,
        top_p,
        top_k,
        seed,
        stop,
        schema,
        None if logprobs is None else int(logprobs),
        frequency,
        presence,
    )


def _encode_prompt(fields: Fields, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    """Return the token IDs of the rendered conversation, or of the raw text if apply_chat_template is false."""
    has_text, has_messages = "text_input" in fields, "messages" in fields
    if has_text == has_messages:
        raise ClientError(f"text_input and messages are both {'set' if has_text else 'missing'}; send exactly one")
    name = "text_input" if has_text else "messages"
    text = str(_get_single(name, fields[name], "texts"))
    has_tools = "tools" in fields
    tools_text = str(_get_single("tools", fields["tools"], "texts")) if has_tools else ""
    characters, max_characters = len(text) + len(tools_text), limits.max_prompt_tokens * MAX_CHARACTERS_PER_TOKEN
    if characters > max_characters:
        raise ClientError(f"the prompt has {characters} characters; at most {max_characters} are allowed")
    tools = _parse_tools(tools_text) if has_tools else None
    messages: list[Message] = [{"role": "user", "content": text}] if has_text else _parse_messages(text)
    if _get_number(fields, "apply_chat_template") in (None, True):
        if has_text and not text.strip():
            raise ClientError("text_input is empty")
        text = _apply_chat_template(tokenizer, messages, tools)
    elif has_messages or has_tools:
        name = "messages" if has_messages else "tools"
        raise ClientError(f"{name} require the chat template: omit apply_chat_template, or send only text_input")
    try:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except UnicodeEncodeError:  # JSON can encode a lone surrogate
        raise ClientError("the prompt contains a lone surrogate, which UTF-8 cannot encode") from None
    limit = min(limits.max_prompt_tokens, limits.context - 1)
    if not ids:
        raise ClientError("the prompt is empty")
    if len(ids) > limit:
        raise ClientError(f"the prompt has {len(ids)} tokens; at most {limit} are allowed")
    return ids


def _apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[object] | None
) -> str:
    """Return the conversation's text, up to the beginning of the answer.

    Raises:
        ClientError: the template rejects the messages, or ignores tools or tool calls.
    """

    def render(messages: list[Message], tools: list[object] | None) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise arbitrary errors to reject a conversation
            raise ClientError(f"the model's chat template rejects these messages: {error}") from None

    def is_equal(messages: list[Message], tools: list[object] | None) -> bool:
        try:
            return render(messages, tools) == text
        except ClientError:
            return False

    text = render(messages, tools)
    if tools is not None and is_equal(messages, None):
        raise ClientError("tools are not supported: the model's chat template ignores them")
    if any("tool_calls" in message for message in messages):
        without_calls = [{key: each[key] for key in each if key != "tool_calls"} for each in messages]
        if is_equal(without_calls, tools):
            raise ClientError("tool_calls are not supported: the model's chat template ignores them")
    return text


def _parse_messages(text: str) -> list[Message]:
    messages = _parse_json("messages", text)
    if not isinstance(messages, list) or not messages:
        expected = 'a non-empty JSON list such as [{"role": "user", "content": "Hello"}]'
        raise ClientError(f"messages is {text:.60}; expected {expected}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not _is_content(message):
            raise ClientError(
                f"messages[{number}] is {json.dumps(message):.60}; expected a role ({', '.join(ROLES)}) and a "
                "text as content, which may be null in an assistant's message with tool_calls"
            )
        if "tool_calls" in message:
            _check_tool_calls(number, message)
            message["content"] = message["content"] or ""  # templates insert the content as a text
    if messages[-1]["role"] == "assistant":
        raise ClientError("the last message has the role assistant; end with a message of another role")
    return messages


def _is_content(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) or (content is None and "tool_calls" in message)


def _check_tool_calls(number: int, message: Message) -> None:
    """Check the tool calls of a message. Their arguments are objects, as chat templates expect them."""
    calls = message["tool_calls"]
    if message["role"] != "assistant" or not isinstance(calls, list) or not calls:
        raise ClientError(
            f"messages[{number}].tool_calls is {json.dumps(calls):.60}; expected a non-empty list in a message with "
            "the role assistant"
        )
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not (
            isinstance(function.get("name"), str) and isinstance(function.get("arguments"), dict)
        ):
            raise ClientError(
                f"messages[{number}].tool_calls[{index}] is {json.dumps(call):.120}; expected "
                '{"id": …, "type": "function", "function": {"name": …, "arguments": {…}}} with arguments as an object'
            )


def _parse_tools(text: str) -> list[object]:
    """Parse the definitions of tools in the form of OpenAI's API."""
    tools = _parse_json("tools", text)
    if not isinstance(tools, list) or not tools:
        expected = 'a non-empty JSON list such as [{"type": "function", "function": {"name": "f", "parameters": {}}}]'
        raise ClientError(f"tools is {text:.60}; expected {expected}")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not (
            tool.get("type") == "function" and isinstance(function.get("name"), str)
        ):
            raise ClientError(
                f"tools[{number}] is {json.dumps(tool):.120}; expected "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
            )
    return tools


def _parse_schema(fields: Fields) -> str:
    """Return the JSON schema's text; empty if the request sets none. Its keywords are checked by the compiler."""
    if "json_schema" not in fields:
        return ""
    text = str(_get_single("json_schema", fields["json_schema"], "texts"))
    size = len(text.encode())
    if size > MAX_SCHEMA_BYTES:
        raise ClientError(f"json_schema has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    if not isinstance(_parse_json("json_schema", text), dict):
        raise ClientError(f'json_schema is {text:.60}; expected a JSON object such as {{"type": "object"}}')
    return text


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"{name} is not JSON: {error}") from None


def _parse_number(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    """Return a number within [low, high], or the default if the request does not set it."""
    value = _get_number(fields, name)
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high:
        raise ClientError(f"{name} is {value:g}; it must be from {low:g} to {high:g}")
    return float(value)


def _get_number(fields: Fields, name: str) -> float | None:
    """Return the single value of a numeric or boolean input, or None if the request does not set it."""
    value = _get_single(name, fields[name], "values") if name in fields else None
    assert not isinstance(value, str), "the server checks the types of inputs"
    return value


def _get_single(name: str, values: Sequence[V], kind: str) -> V:
    if len(values) != 1:
        raise ClientError(f"{name} has {len(values)} {kind}; send exactly one")
    return values[0]
