"""Describes tools in a system message, for models whose chat template has no place for tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelines.gateway.tool_calls import END_TAG, TAG

INSTRUCTION = """You can call functions. Each line between <tools> and </tools> is the JSON definition of one function.
<tools>
{definitions}
</tools>
To call a function, answer only with the call, one line for each call:
{tag}{{"name": "the function's name", "arguments": {{"argument": "value"}}}}{end_tag}
Otherwise answer in plain text."""


def describe_tools(messages: str, tools: str | None) -> str:
    """Return a conversation in which a system message describes the tools, and calls and results are text.

    Args:
        messages: JSON list of messages.
        tools: JSON list of tools, or None.
    """
    described = [_write_as_text(message) for message in json.loads(messages)]
    if tools is not None:
        definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in json.loads(tools))
        instruction = INSTRUCTION.format(definitions=definitions, tag=TAG, end_tag=END_TAG)
        if described[0]["role"] == "system":
            described[0]["content"] = f"{described[0]['content']}\n\n{instruction}"
        else:
            described.insert(0, {"role": "system", "content": instruction})
    return json.dumps(described, ensure_ascii=False)


def _write_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"{TAG}{json.dumps(call['function'], ensure_ascii=False)}{END_TAG}" for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}
