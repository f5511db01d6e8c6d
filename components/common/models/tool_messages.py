"""Describes tools in a system message, for models whose chat template does not support tools.

Training, evaluation and the gateway use the same description, so that a served model reads what it was tuned on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from components.common.models.tool_calls import format_call

INSTRUCTION = """You can call functions. Each line between <tools> and </tools> is the JSON definition of one function.
<tools>
{definitions}
</tools>
To call a function, answer only with the call, one line for each call:
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
Otherwise answer in plain text."""
PROBE = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@lru_cache(maxsize=8)  # asked for every row with tools
def has_tool_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template has a place for tools; False if it rejects a short conversation."""
    messages = [{"role": "user", "content": "Hello"}]
    try:
        with_tool, without = (
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) for tools in ([PROBE], None)
        )
    except Exception:  # templates raise arbitrary errors; the conversations report them
        return False
    return bool(with_tool != without)


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return a conversation in which a system message describes the tools, and calls and results are text.

    Args:
        messages: messages in OpenAI's format, or those of a dataset, whose calls are text.
        tools: tools in OpenAI's format, or the definitions of their functions; None for a conversation without tools.
    """
    described = [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool"
        else write_calls_as_text(message)
        for message in messages
    ]
    if tools:
        functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
        # Sorted, as curation writes the tools of a dataset's rows.
        definitions = "\n".join(json.dumps(function, ensure_ascii=False, sort_keys=True) for function in functions)
        instruction = INSTRUCTION.format(definitions=definitions)
        if described and described[0]["role"] == "system":
            described[0]["content"] = f"{described[0]['content']}\n\n{instruction}"
        else:
            described.insert(0, {"role": "system", "content": instruction})
    return described


def write_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's role and text, followed by its `tool_calls` as lines of JSON, as in the rows of a dataset."""
    lines = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or {}
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        lines.append(format_call(call["function"]["name"], value))
    return {"role": message["role"], "content": "\n".join([*filter(None, [message.get("content")]), *lines])}
