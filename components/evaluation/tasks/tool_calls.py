"""Task kind `tool_calls`: function calls in answers, compared with the expected calls.

Answers are read as the gateway reads them, so a call counts exactly if a client receives it as one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from components.common import tool_rows
from components.common.answer_metrics import call_matching, json_answers
from components.common.models import conversation_rows
from components.common.models.tool_calls import Call, format_call, has_call_attempt, split_calls
from components.common.models.tool_messages import write_calls_as_text
from components.evaluation.task_interface import Engine, Item, Metric, Request, Scores, TaskContext
from components.evaluation.tasks import item_encoding, record_files
from components.evaluation.tasks.base_task import Task
from components.evaluation.tasks.config import PromptSettings, check_distinct
from components.evaluation.tasks.item_encoding import Message
from components.evaluation.tasks.record_files import Record

ToolCallMetric = Literal["call_accuracy", "argument_match", "valid_calls"]
CATEGORIES = ("no call", "one call", "several calls")  # slices of the report and the gate
UNREADABLE: Call = ("", "{}")


class ToolCalls(PromptSettings):
    """Settings of a tool_calls task."""

    kind: Literal["tool_calls"] = "tool_calls"
    data: str = Field(
        "",
        description="File of rows with prompt or messages, tools and calls. Empty: rows with tools in the dataset's "
        "test split.",
    )
    calls_field: str = Field(
        "calls",
        min_length=1,
        description="Field that contains a row's expected calls, a list of {name, arguments}. Rows without this "
        "field end with the expected answer, as in training.",
    )
    metrics: list[ToolCallMetric] = Field(
        list(get_args(ToolCallMetric)),
        min_length=1,
        description="Metrics: call_accuracy, argument_match, valid_calls.",
    )
    max_new_tokens: int = Field(256, ge=1, description="Maximum answer length in tokens.")

    @model_validator(mode="after")
    def _check_metrics(self) -> ToolCalls:
        check_distinct(list(self.metrics))
        return self


class ToolCallsTask(Task[ToolCalls]):
    """Greedy answers to prompts with tools, and checks of their calls. Categories are the numbers of expected calls."""

    METRICS: ClassVar = {
        "call_accuracy": Metric("higher", is_binary=True),
        "argument_match": Metric("higher", max_item_loss=1.0, harm=0.5),
        "valid_calls": Metric("higher", is_binary=True),
    }

    def build_items(self, context: TaskContext) -> list[Item]:
        """Return one item per row: its first turn with calls, or its last answer if it has none.

        `request` holds the expected calls, the tools and the decoding.

        Raises:
            ConfigurationError: The file does not exist or has an unknown format.
            InputError: A row has no prompt or no expected answer, or its tools or calls are invalid.
        """
        items = []
        for record, messages in self._read_rows() if self.settings.data else _read_test_rows(context):
            tools = item_encoding.read_tools(record)
            calls, prompt = record.row.get(self.settings.calls_field), messages
            try:
                parameters = tool_rows.read_parameters(tools)
                if "valid_calls" in self.settings.metrics:
                    tool_rows.check_parameters(parameters)
                if calls is None:
                    prompt, answer = tool_rows.select_answer(messages, parameters)
                    if not prompt:
                        raise ValueError(f"has no {self.settings.calls_field}, and no answer after a prompt")
                else:
                    answer = calls if isinstance(calls, str) else json.dumps(calls, ensure_ascii=False)
                text, expected = tool_rows.read_expected(answer, parameters, is_call=calls is not None)
            except ValueError as error:
                raise record.build_error(str(error)) from None
            text = "" if calls is not None else text
            reference = "\n".join(format_call(name, json.loads(arguments)) for name, arguments in expected)
            item = item_encoding.build_prompt_item(record, prompt, [reference or text], context, tools)
            values = {"parameters": parameters, "calls": expected, "max_new_tokens": self.settings.max_new_tokens}
            category = CATEGORIES[min(len(expected), 2)]
            items.append(replace(item, category=category, request={**item.request, **values}))
        return items

    def _read_rows(self) -> Iterator[tuple[Record, list[Message]]]:
        """Yield the rows of the file and their messages, with calls as text."""
        for record in record_files.read_records(self.settings.data):
            row = dict(record.row)
            if isinstance(messages := row.get("messages"), list):
                row["messages"] = [_write_as_text(message) for message in messages]
            yield record, item_encoding.read_messages(replace(record, row=row), self.settings.prompt_field)

    def score(self, engine: Engine, items: Sequence[Item], context: TaskContext, base: Scores | None) -> Scores:
        """Generate the answers and check their calls."""
        return self.check_answers(self.generate_answers(engine, items, context), items)

    def check_answers(self, answers: Sequence[str], items: Sequence[Item]) -> Scores:
        """Return the answers with one score per item and metric."""
        values: dict[str, list[float]] = {name: [] for name in self.settings.metrics}
        for answer, item in zip(answers, items, strict=True):
            found = _read_calls(answer, item.request)
            for name in self.settings.metrics:
                values[name].append(METRIC_FUNCTIONS[name](found, item.request))
        return Scores(values, answers=answers)


def _read_calls(answer: str, request: Request) -> list[Call]:
    """Return the calls of an answer, and a call without a name for calls that cannot be read or are of no tool."""
    text, calls = split_calls(answer, request["parameters"].__contains__)
    return [*calls, UNREADABLE] if has_call_attempt(text) else calls


def _score_functions(found: Sequence[Call], request: Request) -> float:
    """Return 1 for calls of the expected functions, each as often as expected, in any order."""
    functions, expected = (Counter(name for name, _ in calls) for calls in (found, request["calls"]))
    return float(functions == expected)


def _score_arguments(found: Sequence[Call], request: Request) -> float:
    decoded = ([(name, json.loads(arguments)) for name, arguments in calls] for calls in (found, request["calls"]))
    return call_matching.match_arguments(*decoded)


def _score_validity(found: Sequence[Call], request: Request) -> float:
    """Return 1 if all calls are of known functions with valid arguments; 0 also for an answer that lacks any call."""
    if not found:
        return float(not request["calls"])
    parameters = request["parameters"]
    return min(
        json_answers.score_schema(arguments, tool_rows.build_arguments_validator(name, parameters[name]))
        if name in parameters
        else 0.0
        for name, arguments in found
    )


METRIC_FUNCTIONS: dict[ToolCallMetric, Callable[[Sequence[Call], Request], float]] = {
    "call_accuracy": _score_functions,
    "argument_match": _score_arguments,
    "valid_calls": _score_validity,
}


def _read_test_rows(context: TaskContext) -> Iterator[tuple[Record, list[Message]]]:
    """Yield the rows with tools of the dataset's test split, and their messages."""
    dataset = item_encoding.require_dataset(context)
    path = dataset.path / "test.parquet"
    sources = item_encoding.read_columns(dataset, "test", ["source"])
    for row in conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset)):
        if row["tools"] and conversation_rows.split_last_answer(row["messages"])[0]:
            yield Record(row["id"], {**sources[row["id"]], "tools": row["tools"]}, str(path)), row["messages"]


def _write_as_text(message: Any) -> object:
    """Return a message of OpenAI's format with its calls as text; another value is reported with the messages."""
    try:
        return write_calls_as_text(message)
    except (AttributeError, KeyError, TypeError, ValueError):
        return message
