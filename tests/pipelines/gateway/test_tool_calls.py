"""Tool calls in answers: the formats of the model families, whole and streamed in any division."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.common.models.tool_calls import MAX_PARSED_CHARACTERS
from pipelines.gateway.completions import CHAT, Completion, encode_event
from pipelines.gateway.errors import RequestError
from pipelines.gateway.openai_requests import parse_chat
from pipelines.gateway.telemetry import AnswerMeasures
from pipelines.gateway.tool_calls import CallBuffer, ToolChoice, build_call_schema

AUTO = ToolChoice(frozenset({"find", "add"}))
FIND, ADD = ("find", '{"q": "x"}'), ("add", '{"a": 1}')
# What models of these families write for one or more calls (documented in their chat templates).
ANSWERS = {
    "Hermes and Qwen": ('<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>', "", [FIND]),
    "Qwen, two calls after a text": (
        'Let me look.\n<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "Let me look.",
        [FIND, ADD],
    ),
    "SmolLM2, a list in a tag": ('<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>', "", [ADD]),
    "Llama 3": ('{"name": "find", "parameters": {"q": "x"}}', "", [FIND]),
    "Llama 3, two calls": ('{"name": "find", "parameters": {"q": "x"}}; {"name": "add", "parameters": {"a": 1}}', "", [FIND, ADD]),
    "Llama 3 with its tag": ('<|python_tag|>{"name": "find", "parameters": {"q": "x"}}', "", [FIND]),
    "Mistral": ('[TOOL_CALLS] [{"name": "find", "arguments": {"q": "x"}}]', "", [FIND]),
    "Mistral without special tokens": ('[{"name": "find", "arguments": {"q": "x"}}]', "", [FIND]),
    "JSON in a code block": ('```json\n{"name": "find", "arguments": {"q": "x"}}\n```', "", [FIND]),
    "JSON in a code block after a text": ('Sure:\n```json\n{"name": "find", "arguments": {"q": "x"}}\n```', "Sure:", [FIND]),
    "a call after a code block": (
        'So:\n```json\n{"a": 1}\n```\n{"name": "find", "arguments": {"q": "x"}}', 'So:\n```json\n{"a": 1}\n```', [FIND]
    ),
    "a text between two calls": (
        'Hi  <tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>  and '
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "Hi    and",
        [FIND, ADD],
    ),
    "dataset rows, two calls": ('{"name": "find", "arguments": {"q": "x"}}\n{"name": "add", "arguments": {"a": 1}}', "", [FIND, ADD]),
    "dataset rows, calls after a text": (
        'Let me look.\n{"name": "find", "arguments": {"q": "x"}}\n{"name": "add", "arguments": {"a": 1}}',
        "Let me look.",
        [FIND, ADD],
    ),
    "a semicolon in an argument": ('{"name": "find", "parameters": {"q": "a; b"}}; {"name": "add", "parameters": {"a": 1}}', "", [("find", '{"q": "a; b"}'), ADD]),
    "arguments as text": ('{"name": "find", "arguments": "{\\"q\\": \\"x\\"}"}', "", [FIND]),
    "OpenAI's own form": ('{"type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}', "", [FIND]),
}  # fmt: skip
TEXTS = {
    "plain text": "The answer is 4.",
    "a JSON answer": '{"name": "Ada", "age": 36}',
    "an unknown tool": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "arguments that are no object": '{"name": "find", "arguments": [1]}',
    "an unfinished call": '<tool_call>{"name": "find", "argum',
    "an angle bracket": "a <b> and <tool",
    "a list": "[1, 2, 3]",
    "a call after another object": 'See:\n{"name": "Ada"}\n{"name": "find", "arguments": {"q": "x"}}',
    "text after a call": '{"name": "find", "arguments": {"q": "x"}}\nDone.',
    "a number that JSON does not have": '{"name": "add", "arguments": {"a": NaN}}',
    "a number beyond the range of floats": '{"name": "add", "arguments": {"a": 1e999}}',
    "half of a surrogate pair": '{"name": "add", "arguments": {"a": "\\ud800"}}',
    "an object without arguments": '{"name": "find", "age": 7}',
    "an unfinished call after a text": 'Let me look.\n{"name": "find", "argum',
    "a deeply nested list": "[" * 100_000,
    "white space": "  \n",
    "a very long text and a call": "x" * MAX_PARSED_CHARACTERS + '\n{"name": "find", "arguments": {"q": "x"}}',
    "a call before the end of a code block": 'Hi\n{"name": "find", "arguments": {"q": "x"}}```',
    "a very long answer": '{"name": "find", "arguments": {"q": "' + "x" * MAX_PARSED_CHARACTERS + '"}}',
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_calls_are_found(answer: tuple[str, str, list[tuple[str, str]]]) -> None:
    text, content, calls = answer
    assert AUTO.split(text) == (content, calls)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_other_answers_stay_text(text: str) -> None:
    assert AUTO.split(text) == (text, [])


def check_streaming(text: str, choices: random.Random, steps: list[int]) -> None:
    """Assert that the answer in chunks of these sizes has the same text and calls as the whole answer."""
    expected_text, expected_calls = AUTO.split(text)
    buffer, sent, position = CallBuffer(AUTO), "", 0
    while position < len(text):
        step = choices.choice(steps)
        sent += buffer.feed(text[position : position + step])
        position += step
    rest, calls = buffer.finish()
    assert calls == expected_calls
    assert (sent + rest).strip() == expected_text.strip()
    if not calls:
        assert sent + rest == text


@pytest.mark.parametrize("text", [*(each[0] for each in ANSWERS.values()), *TEXTS.values()], ids=[*ANSWERS, *TEXTS])
def test_a_streamed_answer_has_the_same_text_and_calls(text: str) -> None:
    choices = random.Random(1)
    for _ in range(5):
        check_streaming(text, choices, [1, 2, 3, 50_000])


FRAGMENTS = [
    "Hi", "\n", " ", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "```json\n", "```", '\n{"name": "',
    '{"name": "find", "arguments": {"q": "x"}}', '"arguments": {}}', 'find", ', "[", "]", "{", "}", ";", '{"a": 1}',
]  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.randoms(use_true_random=False))
@example('\n{"name": "<tool_call>{"name": "find", "arguments": {"q": "x"}}', random.Random(1))
@example(
    'Hi\n{"name": "find", "arguments": {"q": "x"}}<|python_tag|>{"name": "find", "arguments": {"q": "x"}}',
    random.Random(1),
)
def test_any_mixture_is_the_same_streamed(text: str, choices: random.Random) -> None:
    check_streaming(text, choices, list(range(1, 13)))


def test_text_is_streamed_at_once() -> None:
    buffer = CallBuffer(AUTO)
    assert [buffer.feed(part) for part in ("Hello", " <", "b>", " there")] == ["Hello", " ", "<b>", " there"]


def test_a_forced_choice_allows_only_its_tool() -> None:
    names = ["find", "add"]
    forced = ToolChoice.parse({"type": "function", "function": {"name": "add"}}, names)
    assert forced is not None
    assert forced.is_forced
    assert [forced.allows(name) for name in names] == [False, True]
    assert forced.split('{"name": "find", "arguments": {}}')[1] == []


def test_the_call_schema_accepts_calls_with_shared_definitions() -> None:
    point = {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    tree = {
        "type": "object",
        "properties": {"definitions": {"type": "string"}, "child": {"$ref": "#"}},
        "required": ["definitions"],
    }
    schema = build_call_schema([("find", {"type": "object", "required": ["q"]}), ("add", point), ("grow", tree)])
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for call in (
        {"name": "add", "arguments": {"at": 1}},
        {"name": "find", "arguments": {"q": 1}},
        {"name": "grow", "arguments": {"definitions": "x", "child": {"definitions": "y"}}},
    ):
        assert validator.is_valid(call)
    for call in (
        {"name": "add", "arguments": {"at": "x"}},
        {"name": "find", "arguments": {}},
        {"name": "rm", "arguments": {}},
        {"name": "grow", "arguments": {"definitions": "x", "child": {}}},
        {"name": "grow", "arguments": {"child": {"definitions": "y"}}},
    ):
        assert not validator.is_valid(call)
    with pytest.raises(RequestError, match="not an object"):
        build_call_schema([("find", {"$defs": [1]})])


def test_long_white_space_is_parsed_in_linear_time() -> None:
    text = "a" + " " * 100_000 + "b"
    assert AUTO.split(text) == (text, [])
    fenced = "```json" + " " * 100_000 + '{"name": "find", "arguments": {"q": "x"}}' + " " * 20_000 + "```"
    assert AUTO.split(fenced) == ("", [FIND])


def test_a_client_that_handles_one_call_gets_the_first() -> None:
    text = ANSWERS["dataset rows, calls after a text"][0]
    single = ToolChoice(AUTO.names, is_single=True)
    buffer = CallBuffer(single)
    assert buffer.feed(text) == "Let me look."
    assert single.split(text) == ("Let me look.", [FIND])
    assert buffer.finish() == ("", [FIND])


def test_arguments_that_are_not_utf8_do_not_end_the_response() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = parse_chat({"model": "m", "messages": [{"role": "user", "content": "Add."}], "tools": tools})
    model: Any = SimpleNamespace(version="1", fingerprint="f")
    triton: Any = None
    completion = Completion(triton, model, call, CHAT, AnswerMeasures())
    completion.choices[0].text = TEXTS["half of a surrogate pair"]
    response = json.loads(encode_event(completion.format_response()).removeprefix(b"data: "))
    assert response["choices"][0]["message"]["content"] == TEXTS["half of a surrogate pair"]
