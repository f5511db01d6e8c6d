"""From records to rows: which format a record has, and what it says in it.

A format is a pair of functions: whether a record's keys look like it, and how to read it. The first that matches reads the record, so
the more telling ones stand first. Sources of the shapes: the Alpaca, Dolly, HH-RLHF and ShareGPT data sets, OpenAI's chat format, TRL's
and LLaMA-Factory's dataset formats.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.data_curation.records import Record
from components.data_curation.rows import Kind, Message, Row

Fields = Mapping[str, Any]

_ALIASES = {
    "assistant": "assistant bot chatgpt function_call gpt model",
    "user": "human prompter user",
    "system": "developer system",
    "tool": "function function_response ipython observation tool",
}
ROLES = {alias: role for role, aliases in _ALIASES.items() for alias in aliases.split()}
QUESTION_KEYS = ("prompt", "question", "instruction", "query", "input")
ANSWER_KEYS = ("completion", "response", "answer", "output")
TEXT_KEYS = ("text", "content", "raw_content")
LABEL_KEYS = ("label", "kto_tag")
TOOL_KEYS = ("tools", "functions")
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]?")


class ShapeError(ValueError):
    """A record that is none of the formats, or not what its format promises. The message goes into the quarantine."""


@dataclass
class Parsed:
    """What a format makes of a record: the row's content, and the keys that it used up (the others become meta)."""

    kind: Kind
    content: dict[str, Any]
    used: set[str] = field(default_factory=set)


def rows_of(record: Record, form: str = "auto") -> list[Row]:
    """The rows of a record, nearly always one. Raises ShapeError with the reason why there is none."""
    fields = record.fields
    name = recognise(fields) if form == "auto" else form
    try:
        parsed = FORMATS[name][1](fields)
    except KeyError as error:
        raise ShapeError(f"format {name} needs the key {error.args[0]!r}; found {_keys(fields)}") from None
    return [_row(record, one, name, number if len(parsed) > 1 else 0) for number, one in enumerate(parsed, 1)]


def recognise(fields: Fields) -> str:
    """The name of the format that a record's keys show. Raises ShapeError for an unknown shape."""
    for name, (matches, _) in FORMATS.items():
        if matches(fields):
            return name
    raise ShapeError(f"unknown shape: keys {_keys(fields)}")


def _keys(fields: Fields) -> str:
    names = ", ".join(sorted(map(str, fields))[:12])
    return names if len(names) <= 200 else names[:200] + "…"


def _row(record: Record, parsed: Parsed, form: str, number: int) -> Row:
    rest = {k: v for k, v in record.fields.items() if k not in parsed.used | {"id", "source"} and v not in (None, "", [], {})}
    own_id, source = record.fields.get("id"), record.fields.get("source")
    own = str(own_id) if isinstance(own_id, str | int) and not isinstance(own_id, bool) and str(own_id).strip() else ""
    row = Row(
        kind=parsed.kind,
        content=parsed.content,
        own_id=f"{own}.{number}" if own and number else own,
        source=source if isinstance(source, str) and source else record.file,
        meta=rest,
        file=record.file,
        line=record.line,
        form=record.form if record.form and parsed.kind == "text" else form,
    )
    _check_text([row.content, row.meta, row.own_id, row.source])
    return row


def _check_text(value: Any) -> None:
    """Raise ShapeError for what no UTF-8 file of JSON can hold."""
    try:
        _check(value)
    except UnicodeEncodeError:
        raise ShapeError("a lone surrogate: text that no UTF-8 file can hold") from None
    except RecursionError:
        raise ShapeError("values nested too deeply") from None


def _check(value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(key)
            _check(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ShapeError(f"a value that JSON does not know: {value}")
    elif not isinstance(value, int | float | None):
        raise ShapeError(f"a value that JSON does not know: a {type(value).__name__}")


# --- messages ---------------------------------------------------------------------------------------------------------------------


def _messages(value: Any) -> list[Message]:
    """A list of {"role", "content"} from OpenAI's or ShareGPT's names, or an HH transcript, or one user turn from a string."""
    if isinstance(value, str):
        return _transcript(value) if HH_TURN.match(value) else [{"role": "user", "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ShapeError("messages that are not a list of turns")
    return [_message(turn) for turn in value]


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise ShapeError("a turn that is not an object")
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise ShapeError(f"a turn by {said!r}; known are {', '.join(sorted(ROLES))}")
    return {"role": role, "content": _content(turn)}


def _content(turn: Fields) -> str:
    """A turn's text; the text parts of a list; calls of tools as one JSON object {"name", "arguments"} a line."""
    content = turn["content"] if "content" in turn else turn.get("value")
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise ShapeError(f"a turn whose content is a {type(content).__name__}")
    calls = [_call(call) for call in turn.get("tool_calls") or []]
    return "\n".join([content, *calls] if content else calls)


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ShapeError("a turn with a part that is not text")


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ShapeError("a tool call without a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ShapeError("a tool call whose arguments are not JSON") from None
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def _transcript(text: str) -> list[Message]:
    """The turns of "\\n\\nHuman: … \\n\\nAssistant: …"."""
    pieces = HH_TURN.split(text)
    if pieces[0].strip() or len(pieces) < 3:
        raise ShapeError("not a transcript of Human: and Assistant: turns")
    who = {"Human": "user", "Assistant": "assistant"}
    return [{"role": who[pieces[i]], "content": pieces[i + 1]} for i in range(1, len(pieces), 2)]


def _answer(value: Any) -> list[Message]:
    """A completion: a string is one assistant turn."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages(value)


def _tools(fields: Fields) -> str | None:
    value = _first(fields, TOOL_KEYS)
    if not value:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ShapeError("tools that are not JSON") from None
    return json.dumps(value, ensure_ascii=False, sort_keys=True) if value else None


def _first(fields: Fields, keys: Sequence[str]) -> Any:
    return next((fields[k] for k in keys if k in fields), None)


def _with_system(fields: Fields, messages: list[Message]) -> list[Message]:
    system = fields.get("system") or fields.get("system_prompt")
    if not isinstance(system, str) or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _sft(fields: Fields, messages: list[Message], used: Sequence[str]) -> list[Parsed]:
    content = {"messages": _with_system(fields, messages), "tools": _tools(fields)}
    return [Parsed("sft", content, {*used, *TOOL_KEYS, "system", "system_prompt"})]


def _pair(fields: Fields, prompt: list[Message], chosen: list[Message], rejected: list[Message], used: Sequence[str]) -> list[Parsed]:
    if not prompt:
        raise ShapeError("a preference pair without a prompt")
    content = {"prompt": _with_system(fields, prompt), "chosen": chosen, "rejected": rejected, "tools": _tools(fields)}
    return [Parsed("preference", content, {*used, *TOOL_KEYS, "system", "system_prompt"})]


# --- formats ----------------------------------------------------------------------------------------------------------------------


def _is_preference(f: Fields) -> bool:
    return {"chosen", "rejected"} <= f.keys() or {"response_j", "response_k"} <= f.keys()


def _preference(f: Fields) -> list[Parsed]:
    if "response_j" in f:
        used = ["question", "response_j", "response_k"]
        return _pair(f, _messages(f["question"]), _answer(f["response_j"]), _answer(f["response_k"]), used)
    chosen, rejected = f["chosen"], f["rejected"]
    key = next((k for k in ("prompt", "conversations", "messages", *QUESTION_KEYS) if k in f), None)
    if key is not None:
        return _pair(f, _messages(_question(f, key)), _reply(chosen), _reply(rejected), [key, "chosen", "rejected", *_INPUT])
    prompt, one, other = _parted(_messages(chosen), _messages(rejected))
    return _pair(f, prompt, one, other, ["chosen", "rejected"])


_INPUT = ("input", "context")  # what an instruction is about


def _question(f: Fields, key: str) -> Any:
    about = _first(f, _INPUT) if key == "instruction" else None
    return f"{f[key]}\n\n{about}" if isinstance(about, str) and about.strip() else f[key]


def _reply(value: Any) -> list[Message]:
    """The last turns of an answer: of a whole conversation, those after the last user turn."""
    messages = _answer(value)
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    return messages[last + 1 :]


def _parted(one: list[Message], other: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """Two conversations as what they have in common and how each goes on."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    while same and one[same - 1]["role"] == "assistant":  # equal to the end, or answers that begin alike
        same -= 1
    return one[:same], one[same:], other[same:]


def _is_scored_pair(f: Fields) -> bool:
    return {"instruction", "output_1", "output_2", "preference"} <= f.keys()


def _scored_pair(f: Fields) -> list[Parsed]:
    """AlpacaEval's annotations: a preference from 1 (the first output) to 2 (the second)."""
    score = f["preference"]
    if not isinstance(score, int | float) or score == 1.5:
        raise ShapeError(f"a preference of {score!r} chooses neither output")
    chosen, rejected = (f["output_1"], f["output_2"]) if score < 1.5 else (f["output_2"], f["output_1"])
    return _pair(f, _messages(f["instruction"]), _answer(chosen), _answer(rejected), ["instruction", "output_1", "output_2"])


def _is_kto(f: Fields) -> bool:
    return any(k in f and _label(f[k]) is not None for k in LABEL_KEYS) and any(
        k in f for k in ("messages", "conversations", "completion", "response")
    )


def _label(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def _kto(f: Fields) -> list[Parsed]:
    label = _label(_first(f, LABEL_KEYS))
    if label is None:
        raise ShapeError("a label that is neither true nor false")
    turns = _first(f, ("messages", "conversations"))
    if turns is not None:
        messages = _messages(turns)
        completion = _reply(messages)
        prompt = messages[: len(messages) - len(completion)]
    else:
        prompt, completion = _messages(_first(f, QUESTION_KEYS)), _answer(_first(f, ANSWER_KEYS))
    if not prompt or not completion:
        raise ShapeError("a labelled row without a prompt or without a completion")
    content = {"prompt": _with_system(f, prompt), "completion": completion, "label": label, "tools": _tools(f)}
    used = {*LABEL_KEYS, *TOOL_KEYS, *QUESTION_KEYS, *ANSWER_KEYS, "messages", "conversations", "system", "system_prompt"}
    return [Parsed("unpaired", content, used)]


def _is_openai(f: Fields) -> bool:
    return isinstance(f.get("messages"), list)


def _openai(f: Fields) -> list[Parsed]:
    return _sft(f, _messages(f["messages"]), ["messages"])


def _is_sharegpt(f: Fields) -> bool:
    return isinstance(_first(f, ("conversations", "conversation")), list)


def _sharegpt(f: Fields) -> list[Parsed]:
    key = "conversation" if "conversation" in f else "conversations"
    return _sft(f, _messages(f[key]), [key])


def _is_dolly(f: Fields) -> bool:
    return {"instruction", "response"} <= f.keys()


def _dolly(f: Fields) -> list[Parsed]:
    return _asked(f, f["instruction"], f.get("context"), f["response"], ["instruction", "context", "response"])


def _is_alpaca(f: Fields) -> bool:
    return "instruction" in f and ("output" in f or isinstance(f.get("instances"), list))


def _alpaca(f: Fields) -> list[Parsed]:
    """Alpaca's rows, and self-instruct's seed tasks with a list of instances. Their ready-made `text` repeats the rest."""
    used = ["instruction", "input", "output", "instances", "text"]
    instances = f.get("instances", [f])
    if not isinstance(instances, list) or not instances or not all(isinstance(i, dict) for i in instances):
        raise ShapeError("instances that are not a list of objects")
    return [one for i in instances for one in _asked({**f, **i}, f["instruction"], i.get("input"), i["output"], used)]


def _asked(f: Fields, instruction: Any, about: Any, answer: Any, used: Sequence[str]) -> list[Parsed]:
    if not isinstance(instruction, str) or not isinstance(answer, str):
        raise ShapeError("an instruction or an answer that is not text")
    question = f"{instruction}\n\n{about}" if isinstance(about, str) and about.strip() else instruction
    history = [turn for pair in _history(f) for turn in pair]
    return _sft(f, [*history, {"role": "user", "content": question}, {"role": "assistant", "content": answer}], [*used, "history"])


def _history(f: Fields) -> list[list[Message]]:
    """LLaMA-Factory's earlier turns: [[question, answer], …]."""
    history = f.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(p, list) and len(p) == 2 and all(isinstance(s, str) for s in p) for p in history
    ):
        raise ShapeError("a history that is not a list of [question, answer]")
    return [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in history]


def _is_prompt_completion(f: Fields) -> bool:
    return any(k in f for k in QUESTION_KEYS) and any(k in f for k in ANSWER_KEYS)


def _prompt_completion(f: Fields) -> list[Parsed]:
    question, answer = (next((k for k in keys if k in f), keys[0]) for keys in (QUESTION_KEYS, ANSWER_KEYS))
    prompt = _messages(f[question])
    while len(prompt) > 1 and prompt[-1]["role"] == "assistant" and not prompt[-1]["content"].strip():
        prompt.pop()  # a transcript that ends where the assistant is to begin
    return _sft(f, [*prompt, *_answer(f[answer])], [question, answer])


def _is_hh(f: Fields) -> bool:
    text = _first(f, TEXT_KEYS)
    return isinstance(text, str) and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def _hh(f: Fields) -> list[Parsed]:
    """A transcript as one text; pairs of transcripts too, when this format is forced."""
    if "chosen" in f:
        return _preference(f)
    text = _text_field(f)
    return _sft(f, _transcript("\n\n" + text.lstrip()), TEXT_KEYS)


def _is_text(f: Fields) -> bool:
    return isinstance(_first(f, TEXT_KEYS), str)


def _text(f: Fields) -> list[Parsed]:
    return [Parsed("text", {"text": _text_field(f)}, {next(k for k in TEXT_KEYS if k in f)})]


def _text_field(f: Fields) -> str:
    text = _first(f, TEXT_KEYS)
    if not isinstance(text, str):
        raise KeyError("text")
    return text


FORMATS: dict[str, tuple[Callable[[Fields], bool], Callable[[Fields], list[Parsed]]]] = {
    "preference": (_is_preference, _preference),
    "scored_pair": (_is_scored_pair, _scored_pair),
    "kto": (_is_kto, _kto),
    "openai": (_is_openai, _openai),
    "sharegpt": (_is_sharegpt, _sharegpt),
    "dolly": (_is_dolly, _dolly),
    "alpaca": (_is_alpaca, _alpaca),
    "prompt_completion": (_is_prompt_completion, _prompt_completion),
    "hh": (_is_hh, _hh),
    "text": (_is_text, _text),
}
