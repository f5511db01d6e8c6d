"""Validates requests of the OpenAI API and translates them into inputs of a Triton model.

A field that is not implemented is refused by name, unless its value is the neutral one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from components.common.runtime import json_loading
from pipelines.gateway.errors import invalid
from pipelines.gateway.tool_calls import ToolChoice, build_call_schema

MAX_JSON_DEPTH, MAX_JSON_VALUES = 64, 100_000
MAX_CHOICES = 8
MAX_SEED = 2**63 - 1
# Fields that change nothing about the answer: the gateway accepts and ignores any value.
IGNORED_FIELDS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
# Fields that are not implemented, with the values that request nothing.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
# Longer lists are refused before their items are validated.
MAX_ITEMS = {"prompt": MAX_CHOICES, "stop": 16, "tools": 512}
PENALTIES = ("frequency_penalty", "presence_penalty")  # implemented if the package has the input


def _join_parts(content: object) -> object:
    """Return the text of a list of content parts; leave another value for the validation."""
    if not isinstance(content, list):
        return content
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part {number} is of type {kind!r}; only text parts are supported")
    return "".join(part["text"] for part in content)


Text = Annotated[str, BeforeValidator(_join_parts)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class FunctionCall(_Strict):
    """A call that the assistant made: `arguments` is a JSON object as text. `parsed_arguments` is the client's own."""

    name: str
    arguments: str
    parsed_arguments: object = None


class ToolCall(_Strict):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    index: int | None = None  # of a streamed call
    function: FunctionCall


class Message(_Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast()] = []
    tool_call_id: str | None = None


class FunctionDefinition(_Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class JsonSchemaFormat(_Strict):
    """The schema of `response_format`."""

    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """Form of the answer: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(_Strict):
    """Options of a streamed answer; `include_obfuscation` is OpenAI's padding, which is not sent."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Sampling(_Strict):
    """Fields that both kinds of requests share."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: str | list[str] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool = False
    stream_options: StreamOptions | None = None


class ChatRequest(_Sampling):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], FailFast()] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True


class CompletionRequest(_Sampling):
    """A request to /v1/completions."""

    prompt: str | list[str]
    logprobs: int | None = Field(None, ge=0, le=20)


R = TypeVar("R", bound=_Sampling)


@dataclass(frozen=True)
class GenerationCall:
    """A validated request: what Triton is sent for each answer, and how the answers are returned.

    Attributes:
        model: the name that the client requested.
        prompts: inputs of the model that differ between prompts; chat requests have one prompt.
        inputs: the other inputs of the model, by input name.
        choices: number of answers per prompt.
        seed: seed of the first answer, or None.
        needs: names of inputs that the package must have, with the field that requires each.
        logprobs: number of alternatives per token, or None.
        tool_choice: how tool calls are parsed, or None without tools.
    """

    model: str
    prompts: tuple[Mapping[str, object], ...]
    inputs: Mapping[str, object]
    choices: int
    seed: int | None
    stream: bool
    include_usage: bool
    needs: Mapping[str, str] = field(default_factory=dict)
    logprobs: int | None = None
    tool_choice: ToolChoice | None = None


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body.

    Raises:
        RequestError: the body is not a JSON object, or is nested too deeply.
    """
    try:
        value = json.loads(body, parse_constant=json_loading.reject_constant)
        if b"\\ud" in body.lower():  # a lone surrogate has no UTF-8 form
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise invalid(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json") from None
    except UnicodeEncodeError:
        raise invalid("the body contains a lone surrogate, which UTF-8 cannot encode", code="invalid_json") from None
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is a JSON {type(value).__name__}; expected an object", code="invalid_json")
    level: list[object] = [value]
    count = 0
    for _ in range(MAX_JSON_DEPTH):
        count += len(level)
        if count > MAX_JSON_VALUES:
            raise invalid(f"the body has more than {MAX_JSON_VALUES} values", code="invalid_json")
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
        ]
        if not level:
            return value
    raise invalid(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="invalid_json")


def parse_chat(body: Mapping[str, Any]) -> GenerationCall:
    """Translate a chat request.

    Raises:
        RequestError: a field is invalid or not implemented.
    """
    request = _validate(ChatRequest, body)
    inputs, needs = _translate_sampling(request, request.max_completion_tokens or request.max_tokens)
    logprobs = None
    if request.logprobs:
        logprobs = request.top_logprobs or 0
        inputs["logprobs"], needs["logprobs"] = logprobs, "logprobs"
    elif request.top_logprobs:
        raise invalid("top_logprobs requires logprobs: true", "top_logprobs")
    names = [tool.function.name for tool in request.tools]
    choice = ToolChoice.parse(request.tool_choice, names, is_single=not request.parallel_tool_calls)
    if choice and request.tools:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        inputs["tools"], needs["tools"] = json.dumps(tools, ensure_ascii=False), "tools"
    schema = _read_schema(request.response_format)
    if choice and choice.is_forced:
        if schema is not None:
            raise invalid("response_format and a forced tool_choice exclude each other", "tool_choice")
        functions = [tool.function for tool in request.tools if choice.allows(tool.function.name)]
        schema = build_call_schema([(each.name, each.parameters or {}) for each in functions])
        needs["json_schema"] = "tool_choice"
    if schema is not None:
        inputs["json_schema"] = json.dumps(schema, ensure_ascii=False)
        needs.setdefault("json_schema", "response_format")
    messages = [_translate_message(message, number) for number, message in enumerate(request.messages)]
    return GenerationCall(
        model=request.model,
        prompts=({"messages": json.dumps(messages, ensure_ascii=False)},),
        inputs=inputs,
        choices=request.n,
        seed=request.seed,
        stream=request.stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        needs=needs,
        logprobs=logprobs,
        tool_choice=choice,
    )


def parse_completion(body: Mapping[str, Any]) -> GenerationCall:
    """Translate a request to complete texts.

    Raises:
        RequestError: a field is invalid or not implemented.
    """
    request = _validate(CompletionRequest, body)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not 1 <= len(prompts) <= MAX_CHOICES:
        raise invalid(f"prompt has {len(prompts)} strings; 1 to {MAX_CHOICES} are allowed", "prompt")
    inputs, needs = _translate_sampling(request, request.max_tokens)
    if request.logprobs is not None:
        inputs["logprobs"], needs["logprobs"] = request.logprobs, "logprobs"
    return GenerationCall(
        model=request.model,
        prompts=tuple({"text_input": prompt, "apply_chat_template": False} for prompt in prompts),
        inputs=inputs,
        choices=request.n,
        seed=request.seed,
        stream=request.stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        needs=needs,
        logprobs=request.logprobs,
    )


def _validate(kind: type[R], body: Mapping[str, Any]) -> R:
    fields = {}
    for name, value in body.items():
        if value is None or name in IGNORED_FIELDS:
            continue
        if name not in kind.model_fields:
            if name in NEUTRAL_VALUES and value in NEUTRAL_VALUES[name]:
                continue
            raise invalid(f"{name} is not supported by this server", name, code="unsupported_parameter")
        if isinstance(value, list) and len(value) > MAX_ITEMS.get(name, len(value)):
            raise invalid(f"{name} has {len(value)} items; at most {MAX_ITEMS[name]} are allowed", name)
        fields[name] = value
    if isinstance(messages := fields.get("messages"), list):
        # Clients send an earlier answer back as they received it, with fields that are null or empty.
        fields["messages"] = [
            {k: v for k, v in each.items() if v is not None and v != []} if isinstance(each, dict) else each
            for each in messages
        ]
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _format_location(first["loc"])
        raise invalid(f"{param}: {first['msg']}", param) from None


def _format_location(location: Sequence[int | str]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in location).lstrip(".") or "body"


def _translate_sampling(request: _Sampling, max_tokens: int | None) -> tuple[dict[str, object], dict[str, str]]:
    """Return the inputs for the sampling fields, and the inputs that not every package has."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    # Triton transports max_tokens as a 32-bit integer; the model refuses a value above its own limit.
    values = {
        "max_tokens": min(max_tokens, 2**31 - 1) if max_tokens else None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": min(request.top_k, 2**31 - 1) if request.top_k else None,
        "stop": [text for text in stop if text] or None,
        **{name: getattr(request, name) or None for name in PENALTIES},
    }
    inputs = {name: value for name, value in values.items() if value is not None}
    return inputs, {name: name for name in PENALTIES if name in inputs}


def _read_schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"type": "object"}
    if response_format.json_schema is None:
        raise invalid("response_format.json_schema is missing", "response_format.json_schema")
    return response_format.json_schema.json_schema


def _translate_message(message: Message, number: int) -> dict[str, Any]:
    """Return a message in the form that chat templates expect: arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise invalid(f"messages[{number}].content is missing", f"messages[{number}].content")
    if message.tool_calls and role != "assistant":
        raise invalid(f"messages[{number}].tool_calls requires the role assistant", f"messages[{number}].tool_calls")
    translated: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls:
        translated["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            for call in message.tool_calls
            for arguments in [_parse_arguments(call, number)]
        ]
    if message.tool_call_id is not None:
        translated["tool_call_id"] = message.tool_call_id
    if message.name is not None and role == "tool":
        translated["name"] = message.name
    return translated


def _parse_arguments(call: ToolCall, number: int) -> dict[str, Any]:
    try:
        arguments = json_loading.DECODER.decode(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(
            f"messages[{number}].tool_calls: the arguments of {call.function.name} are not a JSON object",
            f"messages[{number}].tool_calls",
        )
    return arguments


def spread_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of the answer with this number: different answers, repeatable for a request with a seed."""
    return None if seed is None else (seed + number) % (MAX_SEED + 1)
