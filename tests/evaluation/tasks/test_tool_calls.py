"""Function calls in answers: which answers are right, from which rows the items come, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from components.common.answer_metrics.call_matching import is_equal, match_arguments
from components.common.runtime.errors import InputError
from components.common.tool_rows import build_arguments_validator
from components.evaluation.tasks.tool_calls import ToolCalls, ToolCallsTask
from tests.datasets import SCHEMA, small_dataset
from tests.evaluation.tasks.fake_engines import ScriptedEngine, build_context
from tests.tiny import tiny_tokenizer

TIMER: dict[str, Any] = {
    "name": "set_timer",
    "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}, "label": {"type": "string"}}},
}
STOP: dict[str, Any] = {"name": "stop"}
TOOLS = [{"type": "function", "function": TIMER}, STOP]  # both forms of a definition
TEA: dict[str, Any] = {"name": "set_timer", "arguments": {"minutes": 7, "label": "tea"}}
EGG: dict[str, Any] = {"name": "set_timer", "arguments": {"minutes": 5, "label": "egg"}}


def write_calls(*calls: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, calls))


def write_rows(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(path)


def list_scores(folder: Path, expected: list[dict[str, Any]], answer: str) -> list[float]:
    """Return the scores of an answer to a request with these expected calls, in the order of the metrics."""
    row = {"prompt": "ask", "tools": TOOLS, "calls": expected}
    task = ToolCallsTask(ToolCalls(data=write_rows(folder / "rows.jsonl", row, {**row, "prompt": "other"})))
    engine = ScriptedEngine(tiny_tokenizer(), {"ask": answer, "other": answer})
    context = build_context(engine.tokenizer)
    values = task.score(engine, task.items(context), context, None).values
    assert list(values) == list(task.metrics)
    return [scores[0] for scores in values.values()]


ONE, TWO, NONE = [TEA], [TEA, EGG], list[dict[str, Any]]()
ANSWERS: dict[str, tuple[list[dict[str, Any]], str, list[float]]] = {
    "a call": (ONE, write_calls(TEA), [1, 1, 1]),
    "a call with other spacing and order": (ONE, '{"arguments":{"label":"tea","minutes":7.0},"name":"set_timer"}', [1, 1, 1]),
    "a call after a text": (ONE, f"At once.\n{write_calls(TEA)}", [1, 1, 1]),
    "a call in a tag": (ONE, f"<tool_call>{write_calls(TEA)}</tool_call>", [1, 1, 1]),
    "a number as text": (ONE, write_calls({**TEA, "arguments": {"minutes": "7", "label": "tea"}}), [1, 0.5, 0]),
    "a missing argument": (ONE, write_calls({**TEA, "arguments": {"minutes": 7}}), [1, 0.5, 1]),
    "a hallucinated argument": (ONE, write_calls({**TEA, "arguments": {"minutes": 7, "label": "tea", "loud": True}}), [1, 2 / 3, 0]),
    "another function": (ONE, '{"name": "stop", "arguments": {}}', [0, 0, 1]),
    "an unknown function": (ONE, '{"name": "brew", "arguments": {"minutes": 7, "label": "tea"}}', [0, 0, 0]),
    "no call": (ONE, "The tea needs seven minutes.", [0, 0, 0]),
    "invalid JSON": (ONE, '{"name": "set_timer", "arguments": {"minutes": 7, "label": tea}}', [0, 0, 0]),
    "a call that was cut off": (ONE, write_calls(TEA)[:-9], [0, 0, 0]),
    "one call too many": (ONE, write_calls(TEA, EGG), [0, 0.5, 1]),
    "a second call that cannot be read": (ONE, f"<tool_call>{write_calls(TEA)}</tool_call><tool_call>{{", [0, 0.5, 0]),
    "several calls in another order": (TWO, write_calls(EGG, TEA), [1, 1, 1]),
    "one call of two": (TWO, write_calls(EGG), [0, 0.5, 1]),
    "rightly no call": (NONE, "Seven minutes.", [1, 1, 1]),
    "JSON that is no call": (NONE, '{"name": "tea", "minutes": 7}', [1, 1, 1]),
    "a call although none is needed": (NONE, write_calls(TEA), [0, 0, 1]),
    "an unreadable call although none is needed": (NONE, "<tool_call>{", [0, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
def test_answers_are_scored(case: tuple[list[dict[str, Any]], str, list[float]], tmp_path: Path) -> None:
    expected, answer, scores = case
    assert list_scores(tmp_path, expected, answer) == pytest.approx(scores)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ({"a": [1, {"b": None}], "c": 2}, {"c": 2.0, "a": [1, {"b": None}]}, True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        (True, 1, False),
        (0, False, False),
        ("7", 7, False),
        ("Tea", "tea", False),
        ({}, [], False),
    ],
)
def test_types_matter_and_the_order_of_keys_does_not(first: Any, second: Any, equal: bool) -> None:
    assert is_equal(first, second) is equal


def test_calls_of_the_same_function_are_paired_for_the_best_match() -> None:
    found = [("f", {"a": 1, "b": 1}), ("f", {"a": 1, "b": 2})]
    expected = [("f", {"a": 1, "b": 2}), ("f", {"a": 1, "b": 3})]
    assert match_arguments(found, expected) == match_arguments(found[::-1], expected) == 0.75


def write_test_rows(folder: Path, *rows: dict[str, Any]) -> Any:
    """Write a dataset whose test split contains these rows."""
    dataset = small_dataset(folder)
    path = dataset.path / "test.parquet"
    blank = dict.fromkeys(SCHEMA.names)
    parquet.write_table(pa.Table.from_pylist([{**blank, **row} for row in rows], SCHEMA), path)
    return dataset


def test_items_are_the_first_calls_of_the_test_rows_with_tools(tmp_path: Path) -> None:
    ask, text = {"role": "user", "content": "Boil it."}, {"role": "assistant", "content": "How long?"}
    call, result = {"role": "assistant", "content": write_calls(TEA)}, {"role": "tool", "content": "done"}
    tools = json.dumps(TOOLS)
    dataset = write_test_rows(
        tmp_path / "dataset",
        {"id": "a", "messages": [ask, text, ask, call, result, text], "tools": tools, "source": "log"},
        {"id": "b", "messages": [ask, text, ask, text], "tools": tools},
        {"id": "c", "messages": [ask, {**call, "content": write_calls(TEA, EGG)}], "tools": tools},
        {"id": "d", "messages": [ask, text], "tools": None},
    )
    items = ToolCallsTask(ToolCalls()).items(build_context(tiny_tokenizer(), dataset))
    assert [(item.id, item.category) for item in items] == [("a", "one call"), ("b", "no call"), ("c", "several calls")]
    assert [len(item.request["messages"]) for item in items] == [3, 3, 1]
    assert (items[0].source, items[0].reference) == ("log", write_calls(TEA))


def test_training_rows_in_openai_format_are_a_file_of_items(tmp_path: Path) -> None:
    function = {**TEA, "arguments": json.dumps(TEA["arguments"])}
    messages = [{"role": "user", "content": "Tea!"}, {"role": "assistant", "tool_calls": [{"function": function}]}]
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    data = write_rows(
        tmp_path / "rows.jsonl",
        {"id": "1", "messages": messages, "tools": TOOLS},
        {"id": "2", "messages": talk, "tools": TOOLS},
        {"id": "4", "prompt": "Hi", "tools": TOOLS, "calls": "[]"},
        {"id": "3", "messages": [*messages, {"role": "tool", "content": "ok"}, *talk], "tools": TOOLS, "calls": []},
    )
    first, second, third, fourth = ToolCallsTask(ToolCalls(data=data)).items(build_context(tiny_tokenizer()))
    assert first.request["calls"] == [("set_timer", json.dumps(TEA["arguments"]))]
    assert [item.category for item in (first, second, third, fourth)] == ["one call", *["no call"] * 3]
    assert third.request["messages"][1]["content"] == write_calls(TEA), "earlier calls are text"


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {**TIMER, "parameters": schema}


VALID_SCHEMAS: dict[str, dict[str, Any]] = {
    "a name that is not ASCII": {"$defs": {"Größe": {}}, "properties": {"a": {"$ref": "#/$defs/Größe"}}},
    "an id": {"$defs": {"a": {"$id": "https://example.org/a"}}, "properties": {"a": {"$ref": "https://example.org/a"}}},
    "an id of the whole": {"$id": "https://example.org/s", "$defs": {"a": True}, "properties": {"a": {"$ref": "s#/$defs/a"}}},
    "a dynamic anchor": {"$defs": {"a": {"$dynamicAnchor": "node"}}, "properties": {"a": {"$dynamicRef": "#node"}}},
    "a recursive schema": {"properties": {"a": {"$ref": "#"}}},
    "a property named $ref": {"properties": {"$ref": {"const": "x"}}},
    "a constant that looks like a reference": {"properties": {"a": {"const": {"$ref": "#/none"}}}},
}  # fmt: skip


@pytest.mark.parametrize("schema", VALID_SCHEMAS.values(), ids=VALID_SCHEMAS)
def test_references_within_the_parameters_are_valid(schema: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt": "Tea!", "tools": [with_schema(schema)], "calls": []}
    data = write_rows(tmp_path / "rows.jsonl", row, {**row, "prompt": "Egg!"})
    assert len(ToolCallsTask(ToolCalls(data=data)).items(build_context(tiny_tokenizer()))) == 2


@pytest.mark.parametrize(
    ("changes", "score"),
    [
        ({}, 0.0),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, 0.0),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": True}, 1.0),
        ({"allOf": [{"properties": {"b": {}}}]}, 1.0),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "allOf": [{"properties": {"b": {}}}]}, 1.0),
    ],
)
def test_unlisted_arguments_are_invalid_in_every_draft(changes: dict[str, Any], score: float) -> None:
    validator = build_arguments_validator("f", {"properties": {"a": {}}, **changes})
    assert validator.is_valid({"a": 1})
    assert float(validator.is_valid({"b": 1})) == score


ROW = {"prompt": "Tea!", "tools": TOOLS, "calls": [TEA]}
INVALID_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no tools": ({"tools": None}, "has no tools"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "expected an object with the name of a function"),
    "invalid parameters": ({"tools": [{**TIMER, "parameters": {"type": "dict"}}]}, "the parameters of set_timer is not a valid JSON Schema"),
    "parameters in another file": (
        {"tools": [{**TIMER, "parameters": {"properties": {"minutes": {"$ref": "https://example.org/s.json"}}}}]},
        "the parameters of set_timer refer to https://example.org/s.json",
    ),
    "a missing definition": (
        {"tools": [{**TIMER, "parameters": {"properties": {"minutes": {"$ref": "#/$defs/minutes"}}}}]},
        "the parameters of set_timer refer to #/$defs/minutes",
    ),
    "a pointer into a list": ({"tools": [with_schema({"required": ["a"], "properties": {"a": {"$ref": "#/required/x"}}})]}, "refer to #/required/x"),
    "a pointer into a number": ({"tools": [with_schema({"minProperties": 1, "properties": {"a": {"$ref": "#/minProperties/x"}}})]}, "refer to #/minProperties/x"),
    "a reference to a text": ({"tools": [with_schema({"title": "T", "properties": {"a": {"$ref": "#/title"}}})]}, "refer to #/title"),
    "a dynamic reference": ({"tools": [with_schema({"properties": {"a": {"$dynamicRef": "#node"}}})]}, "refer to #node"),
    "a reference to an invalid schema": (
        {"tools": [with_schema({"shapes": {"a": {"type": "dict"}}, "properties": {"a": {"$ref": "#/shapes/a"}}})]},
        "the target of #/shapes/a is not a valid JSON Schema",
    ),
    "an object as calls": ({"calls": {}}, "has the expected call '{}'"),
    "false as calls": ({"calls": False}, "has the expected call 'false'"),
    "an unknown function": ({"tools": [STOP]}, "expected {name, arguments} of its tools: stop"),
    "no expected answer": ({"calls": None}, "has no calls, and no answer after a prompt"),
    "calls that are no calls": ({"calls": [{"set_timer": {"minutes": 7}}]}, "has the expected call "),
    "an unreadable answer": (
        {"calls": None, "messages": [{"role": "user", "content": "Tea!"}, {"role": "assistant", "content": "<tool_call>{"}]},
        "has the expected call '<tool_call>{'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_ROWS.values(), ids=INVALID_ROWS)
def test_invalid_rows_are_errors(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    changes, message = case
    data = write_rows(tmp_path / "rows.jsonl", {**ROW, "prompt": "Egg!"}, {**ROW, **changes})
    with pytest.raises(InputError) as error:
        ToolCallsTask(ToolCalls(data=data)).items(build_context(tiny_tokenizer()))
    assert message in str(error.value)
    assert "rows.jsonl:2: the row " in str(error.value)


def test_invalid_parameters_do_not_matter_without_valid_calls(tmp_path: Path) -> None:
    row = {**ROW, "tools": [{**TIMER, "parameters": {"type": "dict"}}]}
    data = write_rows(tmp_path / "rows.jsonl", row, {**row, "prompt": "Egg!"})
    settings = ToolCalls(data=data, metrics=["call_accuracy", "argument_match"])
    task, engine = ToolCallsTask(settings), ScriptedEngine(tiny_tokenizer(), {"!": write_calls(TEA)})
    context = build_context(engine.tokenizer)
    assert task.score(engine, task.items(context), context, None).values == {
        "call_accuracy": [1.0, 1.0],
        "argument_match": [1.0, 1.0],
    }
