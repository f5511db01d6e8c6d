"""Tool calls of a request: the functions that an answer may call, the schema that forces a call, and streamed calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.models.tool_calls import OPENINGS, Call, find_opening, split_calls
from pipelines.gateway.errors import invalid

DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may call.

    `forced` is the name of a tool that it must call, or "*" for any tool. `is_single` limits an answer to one call.
    """

    names: frozenset[str]
    forced: str = ""
    is_single: bool = False

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.forced)

    def allows(self, name: str) -> bool:
        """Return whether the answer may call this tool."""
        return name in self.names and self.forced in ("", "*", name)

    def split(self, text: str, sent_characters: int = 0) -> tuple[str, list[Call]]:
        """Split an answer, or its rest after the sent text, into its text and its calls; see `split_calls`."""
        rest, calls = split_calls(text, self.allows, sent_characters)
        return rest, calls[:1] if self.is_single else calls

    @staticmethod
    def parse(
        value: str | Mapping[str, Any] | None, names: Sequence[str], *, is_single: bool = False
    ) -> ToolChoice | None:
        """Return the choice of a request, or None if the answer may call no tool.

        Args:
            value: the field `tool_choice`.
            names: names of the request's tools.
            is_single: whether an answer may contain only one call (`parallel_tool_calls: false`).

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
            return ToolChoice(frozenset(names), "", is_single)
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


class CallBuffer:
    """Holds back the part of a streamed answer that may be a tool call."""

    def __init__(self, choice: ToolChoice) -> None:
        self._choice, self._text, self._is_held, self._sent_characters = choice, "", choice.is_forced, 0

    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a call."""
        self._text += text
        if self._is_held:
            return ""
        start = self._find_opening()
        ready, self._text = self._text[:start], self._text[start:]
        self._sent_characters += len(ready)
        return ready

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest of the text and the calls."""
        return self._choice.split(self._text, self._sent_characters)

    def _find_opening(self) -> int:
        """Return the position of a possible opening; hold everything after a complete one."""
        is_start = not self._sent_characters
        if is_start and not self._text.strip():
            return 0
        if (found := find_opening(self._text, is_start=is_start)) is not None:
            self._is_held = True
            return found
        longest = max(map(len, OPENINGS)) - 1
        for start in range(max(0, len(self._text) - longest), len(self._text)):
            if any(opening.startswith(self._text[start:]) for opening in OPENINGS):
                return start
        return len(self._text)
