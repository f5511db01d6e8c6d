"""Tools and expected calls of rows: the JSON Schemas of arguments, and the checks before a row is evaluated.

The dry run and the fine-tuning make the checks, so that no row ends an evaluation after the training.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.common.answer_metrics import json_answers
from components.common.artifacts.artifact_folder import Artifact
from components.common.models import conversation_rows
from components.common.models.conversation_rows import Message
from components.common.models.tool_calls import Call, has_call_attempt, split_calls
from components.common.runtime.errors import ConfigurationError, InputError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

REFERENCES = ("$ref", "$dynamicRef")
# With one of these, a schema lists arguments in other places than `properties`.
COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependencies", "extends")


def read_parameters(tools: str | None) -> dict[str, object]:
    """Return the JSON Schemas of the functions' arguments by name.

    Raises:
        ValueError: The tools are invalid; the message is a clause for the row's error.
    """
    parameters: dict[str, object] = {}
    for tool in json.loads(tools) if tools else []:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"has the tool {tool!r:.60}; expected an object with the name of a function")
        parameters[function["name"]] = function.get("parameters") or {"type": "object", "properties": {}}
    if not parameters:
        raise ValueError("has no tools; expected a list of functions in OpenAI's format")
    return parameters


def build_arguments_validator(name: str, schema: object) -> Validator:
    """Return a validator that also rejects arguments that the schema does not list, unless it allows them.

    Drafts before 2019-09 have no `unevaluatedProperties`; with combinators, a schema of these drafts is not changed.

    Raises:
        ConfigurationError: The schema is invalid.
    """
    source = f"the parameters of {name}"
    validator = json_answers.build_validator(schema, source)
    if not isinstance(schema, dict) or "properties" not in schema or "additionalProperties" in schema:
        return validator
    if "unevaluatedProperties" in validator.VALIDATORS:
        return json_answers.build_validator({"unevaluatedProperties": False, **schema}, source)
    if any(key in schema for key in COMBINATORS):
        return validator
    return json_answers.build_validator({**schema, "additionalProperties": False}, source)


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Check that each schema is valid and that its references are to schemas within it.

    Raises:
        ValueError: A schema is invalid; the message is a clause for the row's error.
    """
    for name, schema in parameters.items():
        try:
            build_arguments_validator(name, schema)
            reference = _find_unresolvable(schema)
        except ConfigurationError as error:
            raise ValueError(f"has invalid tools: {error.message}; correct the tools, or omit valid_calls") from None
        if reference:
            problem = (
                f"the parameters of {name} refer to {reference}; expected a reference to a schema within the parameters"
            )
            raise ValueError(f"has invalid tools: {problem}; correct the tools, or omit valid_calls")


def _find_unresolvable(schema: Any) -> str | None:
    """Return the first reference that is not to a schema within the schema, or None."""
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root = Resource.from_contents(schema, default_specification=DRAFT202012)
    waiting, known = [(root, Registry().resolver_with_root(root))], {id(schema)}
    while waiting:
        resource, resolver = waiting.pop()
        waiting += [(each, resolver.in_subresource(each)) for each in resource.subresources()]
        for key in REFERENCES if isinstance(resource.contents, dict) else ():
            if (reference := resource.contents.get(key)) is None:
                continue
            try:
                target = resolver.lookup(reference)
            except (Unresolvable, ValueError, TypeError):  # the last two for a pointer into an array or a number
                return str(reference)
            if not isinstance(target.contents, (dict, bool)):
                return str(reference)
            if id(target.contents) not in known:  # it may be at a place that is not checked as a schema
                known.add(id(target.contents))
                json_answers.build_validator(target.contents, f"the target of {reference}")
                found = Resource.from_contents(target.contents, default_specification=DRAFT202012)
                waiting.append((found, target.resolver))
    return None


def select_answer(messages: Sequence[Message], functions: Container[str]) -> tuple[list[Message], str]:
    """Return the turns before the first answer with calls, and that answer; without calls, those of the last answer."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number]
    called = (number for number in answers if split_calls(messages[number]["content"], functions.__contains__)[1])
    last = next(called, answers[-1] if answers else 0)
    return conversation_rows.split_last_answer(messages[: last + 1])


def read_expected(answer: str, parameters: Mapping[str, object], *, is_call: bool) -> tuple[str, list[Call]]:
    """Return the text and the calls of an expected answer.

    Args:
        answer: The answer, or a JSON list of calls.
        parameters: The JSON Schemas of the functions' arguments by name.
        is_call: Whether the answer may contain only calls.

    Raises:
        ValueError: A call is invalid; the message is a clause for the row's error.
    """
    text, calls = split_calls(answer, parameters.__contains__)
    if has_call_attempt(text) or (is_call and text not in ("", "[]")):
        forms = f"{{name, arguments}} of its tools: {', '.join(parameters)}"
        raise ValueError(f"has the expected call {answer!r:.120}; expected {forms}")
    return text, calls


def check_rows(rows: Iterable[tuple[str, Sequence[Message], str | None]], *, checks_schemas: bool) -> None:
    """Check the rows that a tool_calls task will evaluate.

    Args:
        rows: Location, messages and tools of each row.
        checks_schemas: Whether the task has the metric valid_calls.

    Raises:
        InputError: A row's tools or expected calls are invalid.
    """
    for location, messages, tools in rows:
        if not tools or not conversation_rows.split_last_answer(messages)[0]:
            continue
        try:
            parameters = read_parameters(tools)
            if checks_schemas:
                check_parameters(parameters)
            read_expected(select_answer(messages, parameters)[1], parameters, is_call=False)
        except ValueError as error:
            raise InputError(
                f"{location}: the row {error}",
                hint="Correct or remove the row in the sources, or remove the tool_calls task.",
            ) from None


def check_dataset(dataset: Artifact, *, checks_schemas: bool) -> None:
    """Check the rows of a dataset's test split; see `check_rows`."""
    import pyarrow.parquet as parquet

    kind, path = conversation_rows.get_rows_kind(dataset), dataset.path / "test.parquet"
    sources = {row["id"]: row["source"] for row in parquet.read_table(path, columns=["id", "source"]).to_pylist()}
    located = (
        (f"{path}: row {row['id']} of {sources[row['id']]}", row["messages"], row["tools"])
        for row in conversation_rows.read_conversations(path, kind)
    )
    check_rows(located, checks_schemas=checks_schemas)
