"""Describes tools in a system message, for models whose chat template does not support tools.

Training, evaluation and the gateway use the same description, so that a served model reads what it was tuned on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

TAG, END_TAG = "<tool_call>", "</tool_call>"
INSTRUCTION = """You can call functions. Each line between <tools> and </tools> is the JSON definition of one function.
<tools>
{definitions}
</tools>
To call a function, answer only with the call, one line for each call:
{tag}{{"name": "the function's name", "arguments": {{"argument": "value"}}}}{end_tag}
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
    described = [_write_as_text(message) for message in messages]
    if tools:
        functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
        definitions = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
        instruction = INSTRUCTION.format(definitions=definitions, tag=TAG, end_tag=END_TAG)
        if described and described[0]["role"] == "system":
            described[0]["content"] = f"{described[0]['content']}\n\n{instruction}"
        else:
            described.insert(0, {"role": "system", "content": instruction})
    return described


def _write_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"{TAG}{json.dumps(call['function'], ensure_ascii=False)}{END_TAG}" for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}
