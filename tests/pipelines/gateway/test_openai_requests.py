"""Requests of the OpenAI API: what each field becomes for Triton, and which fields are refused by name."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from pipelines.gateway.errors import RequestError
from pipelines.gateway.openai_requests import parse_chat, parse_completion, parse_json

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": [USER], **fields})


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    call = parse_chat({"model": "m", "messages": list(messages)})
    parsed: list[dict[str, Any]] = json.loads(str(call.prompts[0]["messages"]))
    return parsed


def refusal(body: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_chat({"model": "m", "messages": [USER], **body})
    return caught.value


def test_sampling_fields_become_inputs() -> None:
    call = chat(temperature=0.5, top_p=0.9, top_k=4, stop="end", max_completion_tokens=7, max_tokens=9, seed=3, n=2)
    assert call.inputs == {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["end"], "max_tokens": 7}
    assert (call.seed, call.choices, call.stream, call.needs) == (3, 2, False, {})


def test_null_and_neutral_values_request_nothing() -> None:
    neutral = {
        "n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "store": False, "user": "u",
        "metadata": {"a": "b"}, "temperature": None, "tools": None, "stop": [], "service_tier": "auto",
        "modalities": ["text"], "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto",
    }  # fmt: skip
    assert chat(**neutral) == chat()


@pytest.mark.parametrize(
    "field",
    [
        {"logit_bias": {"5": 1}},
        {"modalities": ["audio"]},
        {"web_search_options": {}},
        {"reasoning_effort": "low"},
        {"prediction": {"type": "content"}},
        {"functions": [{"name": "f"}]},
        {"store": True},
        {"anything": 1},
    ],
)
def test_unimplemented_fields_are_refused_by_name(field: dict[str, Any]) -> None:
    error = refusal(field)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", next(iter(field)))


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"stream_options": {"unknown": 1}}, "stream_options.unknown"),
    ],
)
def test_invalid_values_name_their_field(field: dict[str, Any], param: str) -> None:
    error = refusal(field)
    assert (error.status, error.param) == (400, param)


def test_content_parts_and_roles_become_what_templates_expect() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
    assert messages_of(
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}]},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ) == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"q": 1}}}],
        },
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]


def test_arguments_that_are_not_an_object_are_refused() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "[1]"}}
    with pytest.raises(RequestError, match="arguments of find are not a JSON object"):
        messages_of(USER, {"role": "assistant", "tool_calls": [call]}, USER)


def test_structured_answers_need_the_schema_input() -> None:
    call = chat(response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}})
    assert json.loads(call.inputs["json_schema"]) == SCHEMA
    assert call.needs == {"json_schema": "response_format"}
    assert json.loads(chat(response_format={"type": "json_object"}).inputs["json_schema"]) == {"type": "object"}


def test_a_forced_tool_constrains_the_answer() -> None:
    call = chat(tools=[TOOL], tool_choice="required")
    [schema] = json.loads(call.inputs["json_schema"])["anyOf"]
    assert schema["properties"]["name"] == {"const": "find"}
    assert refusal(
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"$defs": [1]}}}], "tool_choice": "required"}
    )
    assert call.tool_choice.is_forced
    assert call.needs == {"tools": "tools", "json_schema": "tool_choice"}
    assert chat(tools=[TOOL], tool_choice="none").tool_choice is None
    assert refusal({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}).param == (
        "tool_choice"
    )


def test_logprobs_of_both_endpoints() -> None:
    assert chat(logprobs=True, top_logprobs=2).inputs["logprobs"] == 2
    assert chat(logprobs=True).inputs["logprobs"] == 0
    assert parse_completion({"model": "m", "prompt": "x", "logprobs": 0}).inputs["logprobs"] == 0


def test_a_completion_has_one_prompt_per_text() -> None:
    call = parse_completion({"model": "m", "prompt": ["a", "b"], "n": 2, "echo": False, "suffix": None, "best_of": 1})
    assert [prompt["text_input"] for prompt in call.prompts] == ["a", "b"]
    assert {prompt["apply_chat_template"] for prompt in call.prompts} == {False}
    for prompt in ([], ["x"] * 9, [1, 2], [[1]], None):
        with pytest.raises(RequestError):
            parse_completion({"model": "m", "prompt": prompt})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "JSON list"),
        (b'{"a": NaN}', "NaN is not a JSON value"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 200_000, "nested deeper"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": [' + b"1," * 100_000 + b"1]}", "more than 100000 values"),
    ],
)
def test_a_body_that_is_not_plain_json_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        parse_json(body)
    assert caught.value.status == 400


def test_surrogate_pairs_are_text() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


def test_many_invalid_messages_are_refused_at_the_first() -> None:
    body = {"model": "m", "messages": [1] * 90_000}
    tracemalloc.start()
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        parse_chat(body)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
