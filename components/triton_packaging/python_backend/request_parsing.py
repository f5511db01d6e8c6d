"""Validates the values of a request; the server checks only types and shapes."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .generation_request import GenerationRequest
from .triton_messages import ClientError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Fields = Mapping[str, Sequence[str | int | float | bool]]
V = TypeVar("V")

ROLES = ("system", "user", "assistant", "tool")
# Real text has fewer characters per token; a longer prompt is rejected before tokenization.
MAX_CHARACTERS_PER_TOKEN = 64
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256


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
    prompt = _encode_prompt(fields, tokenizer, limits)
    max_tokens = int(requested or min(limits.default_max_tokens, limits.context - len(prompt)))
    if len(prompt) + max_tokens > limits.context:
        raise ClientError(
            f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} exceed the model's context of "
            f"{limits.context} tokens"
        )
    seed = secrets.randbits(63) if seed is None else int(seed)
    return GenerationRequest(prompt, max_tokens, temperature, top_p, top_k, seed, stop)


def _encode_prompt(fields: Fields, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    """Return the token IDs of the rendered conversation, or of the raw text if apply_chat_template is false."""
    has_text, has_messages = "text_input" in fields, "messages" in fields
    if has_text == has_messages:
        raise ClientError(f"text_input and messages are both {'set' if has_text else 'missing'}; send exactly one")
    name = "text_input" if has_text else "messages"
    text = str(_get_single(name, fields[name], "texts"))
    max_characters = limits.max_prompt_tokens * MAX_CHARACTERS_PER_TOKEN
    if len(text) > max_characters:
        raise ClientError(f"the prompt has {len(text)} characters; at most {max_characters} are allowed")
    messages = [{"role": "user", "content": text}] if has_text else _parse_messages(text)
    if _get_number(fields, "apply_chat_template") in (None, True):
        if has_text and not text.strip():
            raise ClientError("text_input is empty")
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise arbitrary errors to reject a conversation
            raise ClientError(f"the model's chat template rejects these messages: {error}") from None
    elif has_messages:
        raise ClientError("messages require the chat template: omit apply_chat_template, or send text_input")
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


def _parse_messages(text: str) -> list[dict[str, str]]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"messages is not JSON: {error}") from None
    if not isinstance(messages, list) or not messages:
        expected = 'a non-empty JSON list such as [{"role": "user", "content": "Hello"}]'
        raise ClientError(f"messages is {text:.60}; expected {expected}")
    for number, message in enumerate(messages):
        has_role = isinstance(message, dict) and message.get("role") in ROLES
        if not has_role or not isinstance(message.get("content"), str):
            raise ClientError(
                f"messages[{number}] is {json.dumps(message):.60}; expected a role ({', '.join(ROLES)}) and a "
                "text as content"
            )
    if messages[-1]["role"] == "assistant":
        raise ClientError("the last message has the role assistant; end with a message of another role")
    return messages


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
