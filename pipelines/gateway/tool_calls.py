"""Tool calls in the text of an answer: the formats of the model families, and the schema that forces a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.models.tool_messages import END_TAG, TAG
from pipelines.gateway.errors import invalid

MAX_PARSED_CHARACTERS = 128 * 1024
# Openings of calls: Hermes and Qwen, Llama 3, Mistral, and bare JSON, which Llama 3 and Mistral leave when the special
# tokens before it are not part of the text.
OPENINGS = (TAG, "<|python_tag|>", "[TOOL_CALLS]")
DEFINITIONS = ("$defs", "definitions")
JSON_OPENINGS = ("{", "[", "```json")


@dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may call. `forced` is the name of a tool that it must call, or "*" for any tool."""

    names: frozenset[str]
    forced: str = ""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.forced)

    def allows(self, name: str) -> bool:
        """Return whether the answer may call this tool."""
        return name in self.names and self.forced in ("", "*", name)

    @staticmethod
    def parse(value: str | Mapping[str, Any] | None, names: Sequence[str]) -> ToolChoice | None:
        """Return the choice of a request, or None if the answer may call no tool.

        Args:
            value: the field `tool_choice`.
            names: names of the request's tools.

        Raises:
            RequestError: the field is invalid, or names a tool that the request does not have.
        """
        if len(set(names)) < len(names):
            raise invalid("tools has two functions with the same name", "tools")
        if not names:
            if value in (None, "none", "auto"):
                return None
            raise invalid("tool_choice requires tools", "tool_choice")
        if value == "none":
            return None
        if value in (None, "auto"):
            return ToolChoice(frozenset(names))
        if value == "required":
            return ToolChoice(frozenset(names), "*")
        function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in names:
            raise invalid(f"tool_choice names the function {name!r}, which is not in tools", "tool_choice")
        return ToolChoice(frozenset(names), str(name))


def build_call_schema(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the JSON schema of one call of these functions, given as names with the schemas of their arguments.

    Raises:
        RequestError: the definitions of a schema are not an object.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for name, schema in functions:
        arguments = {key: value for key, value in schema.items() if key not in DEFINITIONS}
        for place in DEFINITIONS:
            if not isinstance(defined := schema.get(place, {}), dict):
                raise invalid(f"{place} in the parameters of {name} is not an object", "tools")
            definitions |= {f"{name}.{key}": _move_references(value, name) for key, value in defined.items()}
        moved = {"type": "object", **_move_references(arguments, name)}
        definitions[name] = moved
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _move_references(schema: Any, name: str) -> Any:
    """Return a schema that refers to its definitions, or to itself, at their places in the schema of the call."""
    if isinstance(schema, list):
        return [_move_references(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _move_references(value, name) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str):
        if reference == "#":
            moved["$ref"] = f"#/$defs/{name}"
        for place in DEFINITIONS:
            if reference.startswith(f"#/{place}/"):
                moved["$ref"] = f"#/$defs/{name}.{reference.removeprefix(f'#/{place}/')}"
    return moved


def split_calls(text: str, choice: ToolChoice) -> tuple[str, list[tuple[str, str]]]:
    """Split an answer into its text and its calls, as (name, arguments as JSON text).

    An answer without a valid call of an allowed tool is returned unchanged.
    """
    if len(text) > MAX_PARSED_CHARACTERS:
        return text, []
    calls: list[tuple[str, str]] = []
    if TAG in text:
        rest = text.split(TAG)
        content = rest[0]
        for part in rest[1:]:
            body, _, after = part.partition(END_TAG)
            parsed = _read_calls(body, choice)
            calls.extend(parsed)
            content += after if parsed else TAG + part
        return (content.strip(), calls) if calls else (text, [])
    body = text.strip()
    for opening in OPENINGS[1:]:
        before, found, after = body.partition(opening)
        if found:
            calls = _read_calls(after, choice)
            return (before.strip(), calls) if calls else (text, [])
    body = body.removeprefix("```json").removesuffix("```").strip()
    calls = _read_calls(body, choice) if body.startswith(JSON_OPENINGS) else []
    return ("", calls) if calls else (text, [])


def _read_calls(body: str, choice: ToolChoice) -> list[tuple[str, str]]:
    """Read one call, a list of calls, or calls separated by semicolons (Llama 3)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        if ";" not in body:
            return []
        try:
            value = [json.loads(part) for part in body.split(";")]
        except (ValueError, RecursionError):
            return []
    calls = []
    for each in value if isinstance(value, list) else [value]:
        call = each.get("function", each) if isinstance(each, dict) and isinstance(each.get("function"), dict) else each
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(name, str) or not choice.allows(name) or not isinstance(arguments, dict):
            return []
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls


class CallBuffer:
    """Holds back the part of a streamed answer that may be a tool call."""

    def __init__(self, choice: ToolChoice) -> None:
        self._choice, self._text, self._is_held, self._has_sent = choice, "", choice.is_forced, False

    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a call."""
        self._text += text
        if self._is_held:
            return ""
        start = self._find_opening()
        ready, self._text = self._text[:start], self._text[start:]
        self._has_sent = self._has_sent or bool(ready.strip())
        return ready

    def finish(self) -> tuple[str, list[tuple[str, str]]]:
        """Return the rest of the text and the calls."""
        return split_calls(self._text, self._choice)

    def _find_opening(self) -> int:
        """Return the position of a possible opening; hold everything after a complete one."""
        for opening in OPENINGS:
            if (position := self._text.find(opening)) >= 0:
                self._is_held = True
                return position
        stripped = self._text.lstrip()
        if not self._has_sent and (not stripped or stripped.startswith(JSON_OPENINGS)):
            self._is_held = bool(stripped)
            return 0
        if not self._has_sent and any(opening.startswith(stripped) for opening in JSON_OPENINGS):
            return 0
        longest = max(map(len, OPENINGS)) - 1
        for start in range(max(0, len(self._text) - longest), len(self._text)):
            if any(opening.startswith(self._text[start:]) for opening in OPENINGS):
                return start
        return len(self._text)
