"""Validation of requests: messages with tool calls, tools, JSON schemas and the ranges of numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from components.common.models import model_loading

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Vienna"}}}
# Writes tools and tool calls, as the templates of models with tool calling do.
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role + ':' + message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{% if message.role == 'tool' %}({{ message.tool_call_id }} {{ message.name }}){% endif %}"
    "{{ '\n' }}{% endfor %}assistant:"
)
Parse = Callable[..., Any]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return model_loading.load_tokenizer(model_loading.open_model(tiny_folder).tokenizer)


@pytest.fixture
def parse(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Return a function that parses the fields of a request; it returns the request, or the error's message."""
    triton = ModuleType("triton_python_backend_utils")  # exists only inside of Triton
    triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    from components.triton_packaging.python_backend import request_parsing
    from components.triton_packaging.python_backend.triton_messages import ClientError

    def parse_fields(template: str = "", **fields: Any) -> Any:
        if template:
            monkeypatch.setattr(tokenizer, "chat_template", template)
        texts = {"messages", "tools", "json_schema"}
        values = {
            name: [json.dumps(value) if name in texts and not isinstance(value, str) else value]
            for name, value in fields.items()
        }
        limits = request_parsing.RequestLimits(500, 100, 50, 1000)
        try:
            return request_parsing.parse_request(values, tokenizer, limits)
        except ClientError as error:
            return str(error)

    return parse_fields


def test_tools_and_tool_calls_reach_the_chat_template(parse: Parse, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"},
    ]
    request = parse(TOOL_TEMPLATE, messages=messages, tools=TOOLS)
    assert tokenizer.decode(request.prompt) == (
        '[{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {}}}]\n'
        "system:Be short.\nuser:Weather?\n"
        'assistant:[get_weather {"city": "Vienna"}]\ntool:sunny(c1 get_weather)\nassistant:'
    )


def test_tools_apply_to_a_text(parse: Parse, tokenizer: PreTrainedTokenizerBase) -> None:
    request = parse(TOOL_TEMPLATE, text_input="Weather?", tools=TOOLS)
    assert tokenizer.decode(request.prompt).startswith('[{"type": "function"')


def test_template_that_requires_tools_supports_them(parse: Parse) -> None:
    template = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    assert len(parse(template, text_input="Weather?", tools=TOOLS).prompt) > 0


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": "a", "tools": TOOLS}, "tools are not supported: the model's chat template ignores them"),
        ({"messages": [{"role": "assistant", "content": "b", "tool_calls": [CALL]}, USER]}, "tool_calls are not supported: the model's chat template ignores them"),
        ({"text_input": "a", "tools": TOOLS, "apply_chat_template": False}, "tools require the chat template"),
        ({"text_input": "a", "tools": "["}, "tools is not JSON"),
        ({"text_input": "a", "tools": []}, "tools is []; expected a non-empty JSON list"),
        ({"text_input": "a", "tools": [{"type": "function"}]}, 'tools[0] is {"type": "function"}; expected {"type": "function", "function"'),
        ({"text_input": "a", "tools": [{"type": "search", "function": {"name": "f"}}]}, "tools[0] is"),
        ({"text_input": "a", "tools": [*TOOLS, {"type": "function", "function": {"name": 5}}]}, "tools[1] is"),
        ({"text_input": "a", "tools": "[" + " " * 40_000 + "]"}, "the prompt has 40003 characters; at most 32000"),
        ({"messages": [{"role": "user", "content": None}]}, 'messages[0] is {"role": "user", "content": null}; expected a role'),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages[0] is"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls is [{"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}, USER]}, "messages[0].tool_calls is []; expected a non-empty list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, USER]}, "with arguments as an object"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": ["f"]}, USER]}, 'messages[0].tool_calls[0] is "f"'),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "the last message has the role assistant"),
        ({"text_input": "a", "json_schema": "{"}, "json_schema is not JSON"),
        ({"text_input": "a", "json_schema": "[" * 50_000}, "json_schema is not JSON"),
        ({"text_input": "a", "json_schema": [1]}, "json_schema is [1]; expected a JSON object"),
        ({"text_input": "a", "json_schema": {"title": "x" * 70_000}}, "json_schema has 70013 bytes; at most 65536 are allowed"),
        ({"text_input": "a", "logprobs": -1}, "logprobs is -1; it must be from 0 to 20"),
        ({"text_input": "a", "logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"text_input": "a", "frequency_penalty": 2.5}, "frequency_penalty is 2.5; it must be from -2 to 2"),
        ({"text_input": "a", "presence_penalty": float("nan")}, "presence_penalty is nan; it must be from -2 to 2"),
    ],
)  # fmt: skip
def test_invalid_field_is_rejected_with_the_value_found(parse: Parse, fields: dict[str, Any], message: str) -> None:
    assert message in parse(**fields)


def test_optional_fields_have_neutral_defaults(parse: Parse) -> None:
    request = parse(text_input="a")
    assert (request.json_schema, request.logprobs) == ("", None)
    assert (request.frequency_penalty, request.presence_penalty) == (0, 0)


def test_optional_fields_are_read(parse: Parse) -> None:
    request = parse(
        text_input="a", json_schema={"type": "object"}, logprobs=0, frequency_penalty=-2.0, presence_penalty=0.5
    )
    assert (request.json_schema, request.logprobs) == ('{"type": "object"}', 0)
    assert (request.frequency_penalty, request.presence_penalty) == (-2, 0.5)
