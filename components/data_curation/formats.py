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
from dataclasses import dataclass
from typing import Any

from components.data_curation import records
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
SYSTEM_KEYS = ("system", "system_prompt")
ABOUT_KEYS = ("input", "context")  # what a question is about
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]?")
NAMES = 12  # how many of the keys of an unknown record are told


class ShapeError(ValueError):
    """A record that is none of the formats, or not what its format promises. The message goes into the quarantine."""


@dataclass
class Parsed:
    """What a format makes of fields: the row's content, and the keys that are wholly in it (the others become meta)."""

    kind: Kind
    content: dict[str, Any]
    fields: Fields
    used: set[str]


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
    """The first names; a long one, which is a text in a name's place, by its length: half an address is not known for personal data."""
    names = sorted(map(str, fields))
    told = [name if len(name) <= records.NAMED else records.shown(name) for name in names[:NAMES]]
    return ", ".join(told) + (f" and {len(names) - NAMES} more" if len(names) > NAMES else "")


def _row(record: Record, parsed: Parsed, form: str, number: int) -> Row:
    own, source = _own_id(parsed.fields.get("id")), parsed.fields.get("source")
    named = isinstance(source, str) and bool(source)
    row = Row(
        kind=parsed.kind,
        content=parsed.content,
        own_id=f"{own}.{number}" if own and number else own,
        source=str(source) if named else record.file,
        meta=_meta(parsed.fields, parsed.used | {key for key, taken in (("id", own), ("source", named)) if taken}),
        file=record.file,
        line=record.line,
        form=record.form if record.form and parsed.kind == "text" else form,
    )
    _check_text([row.content, row.meta, row.own_id, row.source])
    return row


def _own_id(value: Any) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip() else ""


def _meta(fields: Fields, used: set[str]) -> dict[str, Any]:
    """What the row does not say: all other fields, and of used ones what their turns hold beside their words."""
    left = {key: _unsaid_in(value) if key in used else value for key, value in fields.items()}
    return {key: value for key, value in left.items() if not _blank(value)}


def _unsaid_in(value: Any) -> list[Fields]:
    """What is not said of each turn, in a turn or a list of turns; nothing of any other value."""
    turns = value if isinstance(value, list) else [value]
    unsaid = [_unsaid(turn) for turn in turns if isinstance(turn, dict) and _role_key(turn) in turn]
    return unsaid if any(unsaid) else []


def _unsaid(turn: Fields) -> Fields:
    """A name, a weight, its reasoning: what a turn holds beside its role, its text and its calls."""
    said = {_role_key(turn), _content_key(turn), _calls_key(turn)}
    return {key: value for key, value in turn.items() if key not in said and not _blank(value)}


def _blank(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else value in (None, [], {})


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
    said = turn.get(_role_key(turn))
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        by = records.shown(said) if isinstance(said, str) else "nobody" if said is None else f"a {type(said).__name__}"
        raise ShapeError(f"a turn by {by}; known are {', '.join(sorted(ROLES))}")
    return {"role": role, "content": _content(turn)}


def _role_key(turn: Fields) -> str:
    return "role" if "role" in turn else "from"


def _content_key(turn: Fields) -> str:
    return "content" if "content" in turn else "value"


def _calls_key(turn: Fields) -> str:
    return "tool_calls" if turn.get("tool_calls") else "function_call"


def _content(turn: Fields) -> str:
    """A turn's text; the text parts of a list; calls of tools as one JSON object {"name", "arguments"} a line."""
    content = turn.get(_content_key(turn))
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise ShapeError(f"a turn whose content is a {type(content).__name__}")
    called = turn.get(_calls_key(turn)) or []
    calls = [_call(call) for call in (called if isinstance(called, list) else [called])]
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
            arguments = records.parsed(arguments)
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


def _tools(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value = records.parsed(value)
        except ValueError:
            raise ShapeError("tools that are not JSON") from None
    return json.dumps(value, ensure_ascii=False, sort_keys=True) if value else None


def _key(fields: Fields, keys: Sequence[str]) -> str:
    """The first of the keys that a record has; the first of all where it has none, to be missed by name."""
    return next((key for key in keys if key in fields), keys[0])


def _first(fields: Fields, keys: Sequence[str]) -> Any:
    return fields.get(_key(fields, keys))


def _system_key(fields: Fields, messages: list[Message]) -> str | None:
    """Where the system prompt stands that the messages lack."""
    if messages and messages[0]["role"] == "system":
        return None
    return next((key for key in SYSTEM_KEYS if isinstance(fields.get(key), str) and fields[key]), None)


def _asked(fields: Fields, key: str) -> tuple[Any, list[str]]:
    """The question under a key, followed by what it is about; and the keys that are in it."""
    question = fields[key]
    about = next((k for k in ABOUT_KEYS if k != key and _stated(fields.get(k))), None)
    if about is None or not isinstance(question, str) or HH_TURN.match(question):
        return question, [key]
    if key != "instruction" and str(fields[about]) in question:  # a prompt may be a template that was filled in
        return question, [key]
    return f"{question}\n\n{fields[about]}", [key, about]


def _stated(value: Any) -> bool:
    """Whether it can follow a question: text, or a number from a column of numbers."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and not _blank(value)


def _parsed(kind: Kind, fields: Fields, content: dict[str, Any], used: Sequence[str]) -> list[Parsed]:
    """The content, after the record's system prompt and with its tools."""
    opening = "messages" if "messages" in content else "prompt"
    system, tools = _system_key(fields, content[opening]), next((key for key in TOOL_KEYS if fields.get(key)), None)
    before = [{"role": "system", "content": fields[system]}] if system else []
    whole = {**content, opening: [*before, *content[opening]], "tools": _tools(fields[tools]) if tools else None}
    return [Parsed(kind, whole, fields, {*used, *filter(None, (system, tools))})]


def _sft(fields: Fields, messages: list[Message], used: Sequence[str]) -> list[Parsed]:
    return _parsed("sft", fields, {"messages": messages}, used)


def _pair(fields: Fields, prompt: list[Message], chosen: list[Message], rejected: list[Message], used: Sequence[str]) -> list[Parsed]:
    if not prompt:
        raise ShapeError("a preference pair without a prompt")
    return _parsed("preference", fields, {"prompt": prompt, "chosen": chosen, "rejected": rejected}, used)


# --- formats ----------------------------------------------------------------------------------------------------------------------


def _is_preference(f: Fields) -> bool:
    return {"chosen", "rejected"} <= f.keys() or {"response_j", "response_k"} <= f.keys()


def _preference(f: Fields) -> list[Parsed]:
    if "response_j" in f:
        question, used = _asked(f, "question")
        return _pair(f, _messages(question), _answer(f["response_j"]), _answer(f["response_k"]), [*used, "response_j", "response_k"])
    key = next((k for k in ("prompt", "conversations", "messages", *QUESTION_KEYS) if k in f), None)
    if key is not None:
        return _answered_twice(f, key)
    prompt, one, other = _parted(_messages(f["chosen"]), _messages(f["rejected"]))
    return _pair(f, prompt, one, other, ["chosen", "rejected"])


def _answered_twice(f: Fields, key: str) -> list[Parsed]:
    question, used = _asked(f, key)
    prompt, pair = _messages(question), {name: _answer_apart(_answer(f[name])) for name in ("chosen", "rejected")}
    used += [name for name, (before, _) in pair.items() if _repeats(prompt, before)]
    return _pair(f, prompt, pair["chosen"][1], pair["rejected"][1], used)


def _answer_apart(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """A conversation up to its last user turn, and the answer after it."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    return messages[: last + 1], messages[last + 1 :]


def _repeats(prompt: list[Message], before: list[Message]) -> bool:
    """Whether the prompt says all that goes before an answer."""
    return all(any(turn["content"].strip() in m["content"] for m in prompt) for turn in before)


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
        raise ShapeError(f"a preference of {records.shown(str(score))} chooses neither output")
    chosen, rejected = (f["output_1"], f["output_2"]) if score < 1.5 else (f["output_2"], f["output_1"])
    question, used = _asked(f, "instruction")
    return _pair(f, _messages(question), _answer(chosen), _answer(rejected), [*used, "output_1", "output_2"])


def _is_kto(f: Fields) -> bool:
    return _label_key(f) is not None and any(k in f for k in ("messages", "conversations", "completion", "response"))


def _label_key(f: Fields) -> str | None:
    return next((k for k in LABEL_KEYS if k in f and _label(f[k]) is not None), None)


def _label(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def _kto(f: Fields) -> list[Parsed]:
    labelled = _label_key(f)
    if labelled is None:
        raise ShapeError("a label that is neither true nor false")
    prompt, completion, used = _answered(f)
    if not prompt or not completion:
        raise ShapeError("a labelled row without a prompt or without a completion")
    label = bool(_label(f[labelled]))
    return _parsed("unpaired", f, {"prompt": prompt, "completion": completion, "label": label}, [*used, labelled])


def _answered(f: Fields) -> tuple[list[Message], list[Message], list[str]]:
    """A prompt and its answer, of a conversation or under keys of their own; and the keys that are in them."""
    turns = next((k for k in ("messages", "conversations") if f.get(k) is not None), None)
    if turns is not None:
        return *_answer_apart(_messages(f[turns])), [turns]
    question, used = _asked(f, _key(f, QUESTION_KEYS))
    answer = _key(f, ANSWER_KEYS)
    return _messages(question), _answer(f[answer]), [*used, answer]


def _is_openai(f: Fields) -> bool:
    return isinstance(f.get("messages"), list)


def _openai(f: Fields) -> list[Parsed]:
    return _sft(f, _messages(f["messages"]), ["messages"])


def _is_sharegpt(f: Fields) -> bool:
    return isinstance(_first(f, ("conversations", "conversation")), list)


def _sharegpt(f: Fields) -> list[Parsed]:
    key = _key(f, ("conversations", "conversation"))
    return _sft(f, _messages(f[key]), [key])


def _is_dolly(f: Fields) -> bool:
    return {"instruction", "response"} <= f.keys()


def _dolly(f: Fields) -> list[Parsed]:
    return _instructed(f, "response")


def _is_alpaca(f: Fields) -> bool:
    return "instruction" in f and ("output" in f or isinstance(f.get("instances"), list))


def _alpaca(f: Fields) -> list[Parsed]:
    """Alpaca's rows, and self-instruct's seed tasks with a list of instances."""
    if "instances" not in f:
        return _instructed(f, "output")
    instances = f["instances"]
    if not isinstance(instances, list) or not instances or not all(isinstance(i, dict) for i in instances):
        raise ShapeError("instances that are not a list of objects")
    return [one for i in instances for one in _instructed(_instance(f, i), "output")]


def _instance(f: Fields, instance: Fields) -> Fields:
    """An instance as a record by itself. What the task says under the instance's keys stays under `instances`."""
    return {**f, **instance, "instances": {k: v for k, v in f.items() if k in instance}}


def _instructed(f: Fields, answer: str) -> list[Parsed]:
    instruction, said = f["instruction"], f[answer]
    if not isinstance(instruction, str) or not isinstance(said, str):
        raise ShapeError("an instruction or an answer that is not text")
    question, used = _asked(f, "instruction")
    history = [turn for pair in _history(f) for turn in pair]
    ready = ["text"] if _is_ready_made(f.get("text"), [*map(f.get, used), said]) else []
    turns = [*history, {"role": "user", "content": question}, {"role": "assistant", "content": said}]
    return _sft(f, turns, [*used, answer, "history", *ready])


def _is_ready_made(text: Any, parts: Sequence[Any]) -> bool:
    """Whether a text is Alpaca's template, filled in with the record's other fields."""
    return isinstance(text, str) and all(str(part).strip() in text for part in parts)


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
    question, used = _asked(f, _key(f, QUESTION_KEYS))
    answer = _key(f, ANSWER_KEYS)
    prompt = _messages(question)
    while len(prompt) > 1 and prompt[-1]["role"] == "assistant" and not prompt[-1]["content"].strip():
        prompt.pop()  # a transcript that ends where the assistant is to begin
    return _sft(f, [*prompt, *_answer(f[answer])], [*used, answer])


def _is_hh(f: Fields) -> bool:
    text = _first(f, TEXT_KEYS)
    return isinstance(text, str) and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def _hh(f: Fields) -> list[Parsed]:
    """A transcript as one text; pairs of transcripts too, when this format is forced."""
    if "chosen" in f:
        return _preference(f)
    text = _text_field(f)
    return _sft(f, _transcript("\n\n" + text.lstrip()), [_key(f, TEXT_KEYS)])


def _is_text(f: Fields) -> bool:
    return isinstance(_first(f, TEXT_KEYS), str)


def _text(f: Fields) -> list[Parsed]:
    return [Parsed("text", {"text": _text_field(f)}, f, {_key(f, TEXT_KEYS)})]


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
