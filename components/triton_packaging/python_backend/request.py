"""A request, checked: what the server leaves to us, since it checks only types and shapes."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .asked import Asked
from .wire import ClientError

Fields = Mapping[str, list[Any]]

ROLES = ("system", "user", "assistant", "tool")
# No tokenizer needs this many characters for one token on real text; a longer request is refused before it is tokenized.
CHARACTERS_PER_TOKEN = 64
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, in tokens."""

    max_prompt_tokens: int
    max_tokens: int
    default_max_tokens: int
    context: int


def read(fields: Fields, tokenizer: Any, limits: Limits) -> Asked:
    """The request of these fields. Raises ClientError with a sentence for whatever is wrong with it."""
    temperature = ranged(fields, "temperature", 0.0, 10.0, 0.0)
    top_p = ranged(fields, "top_p", 0.0, 1.0, 1.0)
    if top_p == 0:
        raise ClientError("top_p is 0; it must be above 0 and at most 1")
    top_k = int(ranged(fields, "top_k", 0, 2**31 - 1, 0))
    wanted, seed, stop = read_max_tokens(fields, limits), read_seed(fields), read_stops(fields)
    prompt = tokenize(read_prompt(fields, tokenizer, limits), tokenizer, limits)
    max_tokens = wanted or min(limits.default_max_tokens, limits.context - len(prompt))
    if len(prompt) + max_tokens > limits.context:
        raise ClientError(
            f"the prompt's {len(prompt)} tokens and max_tokens {max_tokens} exceed the model's context of {limits.context} tokens"
        )
    return Asked(prompt, max_tokens, temperature, top_p, top_k, seed, stop)


def read_prompt(fields: Fields, tokenizer: Any, limits: Limits) -> str:
    """The text the model continues: the conversation in the model's template, or the raw text when the request says so."""
    text, messages = fields.get("text_input"), fields.get("messages")
    if (text is None) == (messages is None):
        raise ClientError("give either text_input or messages" + ("" if text is None else ", not both"))
    given = one("text_input", text) if text is not None else one("messages", messages or [])
    longest = limits.max_prompt_tokens * CHARACTERS_PER_TOKEN
    if len(given) > longest:
        raise ClientError(f"the prompt has {len(given)} characters; at most {longest} are allowed")
    conversation = [{"role": "user", "content": given}] if text is not None else conversation_of(given)
    wrap = scalar(fields, "apply_chat_template")
    if wrap is not None and not wrap:
        if text is None:
            raise ClientError("messages need the chat template: leave apply_chat_template out, or give text_input")
        return given
    if text is not None and not given.strip():
        raise ClientError("text_input is empty")
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template refuses a conversation by raising whatever it likes
        raise ClientError(f"the model's chat template refuses these messages: {error}") from None


def conversation_of(given: str) -> list[dict[str, str]]:
    """The messages of a JSON list, checked."""
    try:
        messages = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"messages is not JSON: {error}") from None
    if not isinstance(messages, list) or not messages:
        raise ClientError('messages must be a JSON list such as [{"role": "user", "content": "Hello"}]')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ClientError(f"messages[{number}] must have a role ({', '.join(ROLES)}) and a text as content")
    if messages[-1]["role"] == "assistant":
        raise ClientError("the last message is the assistant's: there is nothing to answer")
    return messages


def tokenize(text: str, tokenizer: Any, limits: Limits) -> list[int]:
    """The prompt's tokens, within the limits."""
    try:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which is no character
        raise ClientError("the prompt holds half of a surrogate pair, which is no character") from None
    limit = min(limits.max_prompt_tokens, limits.context - 1)
    if not ids:
        raise ClientError("the prompt is empty")
    if len(ids) > limit:
        raise ClientError(f"the prompt has {len(ids)} tokens; at most {limit} are allowed")
    return ids


def read_max_tokens(fields: Fields, limits: Limits) -> int | None:
    """The most tokens the request wants, or None where it does not say."""
    value = scalar(fields, "max_tokens")
    if value is not None and not 1 <= value <= limits.max_tokens:
        raise ClientError(f"max_tokens is {value}; it must be from 1 to {limits.max_tokens}")
    return value if value is None else int(value)


def read_seed(fields: Fields) -> int:
    """The request's seed, or any."""
    seed = scalar(fields, "seed")
    if seed is not None and seed < 0:
        raise ClientError(f"seed is {seed}; it must be from 0 to {2**63 - 1}")
    return secrets.randbits(63) if seed is None else int(seed)


def read_stops(fields: Fields) -> tuple[str, ...]:
    """The stop strings of a request."""
    stops = fields.get("stop") or []
    if len(stops) > MAX_STOPS:
        raise ClientError(f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ClientError(f"a stop string must have from 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def ranged(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    """A number of the request within [low, high], or the default where it brings none."""
    value = scalar(fields, name)
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high:
        raise ClientError(f"{name} is {value:g}; it must be from {low:g} to {high:g}")
    return float(value)


def scalar(fields: Fields, name: str) -> Any:
    """The single value of a numeric input, or None where the request does not bring it."""
    values = fields.get(name)
    if values is None:
        return None
    if len(values) != 1:
        raise ClientError(f"{name} holds {len(values)} values; give one")
    return values[0]


def one(name: str, values: list[str]) -> str:
    """The only text of an input."""
    if len(values) != 1:
        raise ClientError(f"{name} holds {len(values)} texts; give one")
    return values[0]
