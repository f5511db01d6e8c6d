"""Registry of record formats: recognizes the format of a record by its keys, and parses the record into rows.

`@record_format` registers a parser with the predicate that recognizes its records. The first matching format in this
file parses a record, so specific formats precede general ones.
"""

# Sources of the formats: the Alpaca, Dolly, HH-RLHF and ShareGPT datasets, OpenAI's chat format, and the dataset
# formats of TRL and LLaMA-Factory.

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.common.models.tool_calls import format_call
from components.data_curation.reading.raw_records import (
    MAX_QUOTED_CHARACTERS,
    TOO_DEEP_MESSAGE,
    Record,
    parse_json,
    quote_name,
)
from components.data_curation.rows import Kind, Message, Row

Fields = Mapping[str, Any]
TURN_LIST_KEYS = (
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "instances",
)

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
CONTEXT_KEYS = ("input", "context")  # context for a question
PAIR_KEYS = ("response_j", "response_k", "output_1", "output_2", "preference")
# Keys that may be spelled in any case. `tools`, `system`, `label` and `history` may not: exports have such columns.
ANY_CASE_KEYS = frozenset().union(
    *(TURN_LIST_KEYS, QUESTION_KEYS, ANSWER_KEYS, TEXT_KEYS, CONTEXT_KEYS, PAIR_KEYS, ("id", "source"))
)
TURN_KEYS = frozenset((*QUESTION_KEYS, *ANSWER_KEYS, "role", "from", "content", "value", "tool_calls", "function_call"))
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]?")
UNKNOWN_FORMAT = "unknown format"  # the start of the reason
MAX_NAMED_KEYS = 12  # listed in an error


class RecordFormatError(ValueError):
    """A record has an unknown or invalid format. The message is the reason in the quarantine."""


@dataclass
class ParsedRecord:
    """A parsed record.

    Attributes:
        kind: the kind of the row.
        content: the row's content, see `rows.CONTENT_COLUMNS`.
        fields: the fields of the record.
        used_keys: the keys whose values `content` contains completely. The other fields become `meta`.
    """

    kind: Kind
    content: dict[str, Any]
    fields: Fields
    used_keys: set[str]


@dataclass(frozen=True)
class RecordFormat:
    """A registered format: the predicate that recognizes its records, and their parser."""

    matches: Callable[[Fields], bool]
    parse: Callable[[Fields], list[ParsedRecord]]


FORMATS: dict[str, RecordFormat] = {}
Parser = Callable[[Fields], list[ParsedRecord]]


def record_format(name: str, matches: Callable[[Fields], bool]) -> Callable[[Parser], Parser]:
    """Register the decorated function under `name` as the parser of the records that `matches` accepts."""

    def register(parse: Parser) -> Parser:
        FORMATS[name] = RecordFormat(matches, parse)
        return parse

    return register


def parse_record(record: Record, name: str = "auto") -> list[Row]:
    """Parse a record into rows, usually a single row.

    Args:
        record: the record.
        name: the name of its format; "auto" recognizes the format by the record's keys.

    Raises:
        RecordFormatError: the format is unknown, a required key is missing, or a value is invalid.
    """
    fields, spellings = _lower_known_keys(record.fields, name)
    if name == "auto":
        name = recognize_format(fields, record.fields)
    try:
        parsed = FORMATS[name].parse(fields)
    except KeyError as error:
        raise RecordFormatError(
            f"format {name} requires the key {error.args[0]!r}; found {describe_keys(record.fields)}"
        ) from None
    rows = [
        _build_row(record, part, spellings, name, number if len(parsed) > 1 else 0)
        for number, part in enumerate(parsed, 1)
    ]
    try:
        _check_value([[row.content, row.meta, row.own_id, row.source] for row in rows])
    except UnicodeEncodeError:
        raise RecordFormatError("a lone surrogate, which UTF-8 cannot encode") from None
    except RecursionError:
        raise RecordFormatError(f"values {TOO_DEEP_MESSAGE}") from None
    return rows


def is_record(fields: Fields) -> bool:
    """Return whether a format recognizes the fields as a record."""
    lowered, _ = _lower_known_keys(fields, "auto")
    return _matches(lowered, "auto")


def _matches(fields: Fields, name: str) -> bool:
    """Return whether the format, or any format for "auto", recognizes the fields."""
    return any(entry.matches(fields) for entry in (FORMATS.values() if name == "auto" else [FORMATS[name]]))


def _lower_known_keys(fields: Fields, name: str) -> tuple[Fields, dict[str, str]]:
    """Return the fields with lower-case ANY_CASE_KEYS, and the original spellings of the changed keys.

    The keys of a record that the format recognizes as it is remain unchanged, because other columns of an export may
    have the names of such keys. Keys of the turns of a conversation are always in lower case.
    """
    lowered, spellings = fields, dict[str, str]()
    if not all(map(str.islower, fields)) and not _matches(fields, name):
        spellings = _find_spellings(fields, ANY_CASE_KEYS)
        lowered = _rename_keys(fields, spellings)
    turns = {key: _lower_turn_keys(lowered[key]) for key in TURN_LIST_KEYS if isinstance(lowered.get(key), dict | list)}
    return ({**lowered, **turns} if turns else lowered), spellings


def _lower_turn_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_lower_turn_keys(turn) if isinstance(turn, dict) else turn for turn in value]
    return value if all(map(str.islower, value)) else _rename_keys(value, _find_spellings(value, TURN_KEYS))


def _find_spellings(fields: Fields, known: frozenset[str]) -> dict[str, str]:
    """Return the keys that are known in lower case, by lower-case key. Of keys that differ only in case, use the first."""
    spellings: dict[str, str] = {}
    for key in fields:
        if key.lower() in known and key.lower() not in fields:
            spellings.setdefault(key.lower(), key)
    return spellings


def _rename_keys(fields: Fields, spellings: Mapping[str, str]) -> Fields:
    names = {key: lower for lower, key in spellings.items()}
    return {names.get(key, key): value for key, value in fields.items()}


def recognize_format(fields: Fields, original: Fields) -> str:
    """Return the name of a record's format. An error lists the keys of `original`, in their original spelling.

    Raises:
        RecordFormatError: no format matches the record's keys.
    """
    for name, entry in FORMATS.items():
        if entry.matches(fields):
            return name
    raise RecordFormatError(f"{UNKNOWN_FORMAT}: {describe_keys(original)}")


def describe_keys(fields: Fields) -> str:
    """List the first keys. Describe a long key by its length: redaction does not recognize a truncated address."""
    names = sorted(map(str, fields))
    shown = [name if len(name) <= MAX_QUOTED_CHARACTERS else quote_name(name) for name in names[:MAX_NAMED_KEYS]]
    rest = f" and {len(names) - MAX_NAMED_KEYS} more" if len(names) > MAX_NAMED_KEYS else ""
    return f"keys {', '.join(shown)}{rest}" if names else "no keys"


def _build_row(record: Record, parsed: ParsedRecord, spellings: Mapping[str, str], name: str, number: int) -> Row:
    fields, used = parsed.fields, set(parsed.used_keys)
    own, source = fields.get("id"), fields.get("source")
    own_id = str(own) if isinstance(own, str | int) and not isinstance(own, bool) and str(own).strip() else ""
    if own_id:
        used.add("id")
    if isinstance(source, str) and source:
        used.add("source")
    else:
        source = record.file
    meta = {key: _collect_unused_turn_fields(value) if key in used else value for key, value in fields.items()}
    meta = record.unmapped | meta
    meta = {key if (original := spellings.get(key, key)) in meta else original: value for key, value in meta.items()}
    return Row(
        kind=parsed.kind,
        content=parsed.content,
        own_id=f"{own_id}.{number}" if own_id and number else own_id,
        source=source,
        meta={key: value for key, value in meta.items() if not _is_blank(value)},
        file=record.file,
        line=record.line,
        format=record.extracted_from if record.extracted_from and parsed.kind == "text" else name,
    )


def _collect_unused_turn_fields(value: object) -> list[Fields]:
    """Return the unused fields of each turn, such as name, weight or reasoning; [] if every field is used."""
    unused: list[Fields] = []
    for turn in value if isinstance(value, list) else [value]:
        if isinstance(turn, dict) and _get_role_key(turn) in turn and _is_turn(turn):
            used = {_get_role_key(turn), _get_content_key(turn), _get_calls_key(turn)}
            unused.append({key: inner for key, inner in turn.items() if key not in used and not _is_blank(inner)})
    return unused if any(unused) else []


def _is_blank(value: object) -> bool:
    return not value.strip() if isinstance(value, str) else value in (None, [], {})


def _check_value(value: object) -> None:
    """Raise RecordFormatError or UnicodeEncodeError for a value that UTF-8 JSON cannot hold."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_value(key)
            _check_value(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_value(inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RecordFormatError(f"a value that JSON does not support: {value}")
    elif not isinstance(value, int | float | None):
        raise RecordFormatError(f"a value that JSON does not support: a {type(value).__name__}")


# --- messages ---------------------------------------------------------------------------------------------------------


def _parse_messages(value: object) -> list[Message]:
    """Parse turns with OpenAI or ShareGPT keys. A string is an HH transcript or a single user turn."""
    if isinstance(value, str):
        return _parse_transcript(value) if HH_TURN.match(value) else [{"role": "user", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise RecordFormatError(f"messages of type {type(turns).__name__}; expected a non-empty list of turns")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise RecordFormatError(f"a turn of type {type(turn).__name__}; expected an object with role and content")
        name = turn.get(_get_role_key(turn))
        role = ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            found = quote_name(name) if isinstance(name, str) else f"of type {type(name).__name__}"
            problem = "without a role" if name is None else f"with the role {found}"
            raise RecordFormatError(f"a turn {problem}; expected one of {', '.join(sorted(ROLES))}")
        messages.append({"role": role, "content": _extract_turn_text(turn)})
    return messages


def _get_role_key(turn: Fields) -> str:
    return "role" if "role" in turn else "from"


def _get_content_key(turn: Fields) -> str:
    return "content" if "content" in turn else "value"


def _get_calls_key(turn: Fields) -> str:
    return "tool_calls" if turn.get("tool_calls") else "function_call"


def _extract_turn_text(turn: Fields) -> str:
    """Return a turn's text or text parts, followed by each tool call as a line of JSON {"name", "arguments"}."""
    content = turn.get(_get_content_key(turn))
    if isinstance(content, list):
        texts = []
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
            found = quote_name(str(part.get("type"))) if isinstance(part, dict) else type(part).__name__
            if not is_text:
                raise RecordFormatError(f"a turn with a part of type {found}; expected text, input_text or output_text")
            if not isinstance(part.get("text"), str):
                raise RecordFormatError(f"a turn with a part of type {found} whose text is not a string")
            texts.append(part["text"])
        content = "\n".join(texts)
    if content is not None and not isinstance(content, str):
        raise RecordFormatError(
            f"a turn with content of type {type(content).__name__}; expected text or a list of text parts"
        )
    calls = turn.get(_get_calls_key(turn)) or []
    lines = [_format_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return "\n".join([content, *lines] if content else lines)


def _format_call(call: object) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise RecordFormatError('a tool call without a function name; expected {"function": {"name": …}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parse_json_field(arguments, "the arguments of a tool call")
    return format_call(function["name"], arguments)


def _parse_json_field(text: str, owner: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise RecordFormatError(f"invalid JSON in {owner}: {error}") from None


def _parse_transcript(text: str) -> list[Message]:
    """Parse "\\n\\nHuman: … \\n\\nAssistant: …"."""
    pieces = HH_TURN.split(text)
    if pieces[0].strip() or len(pieces) < 3:
        raise RecordFormatError("not a transcript of Human: and Assistant: turns")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[pieces[i]], "content": pieces[i + 1]} for i in range(1, len(pieces), 2)]


def _parse_answer(value: object) -> list[Message]:
    """Parse a completion: a text, one or more turns, or an object or list of objects, whose JSON text is the answer."""
    parts = value if isinstance(value, list) else [value]
    if parts and all(isinstance(part, dict) and not _is_turn(part) for part in parts):
        value = json.dumps(value, ensure_ascii=False)
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else _parse_messages(value)


def _is_turn(fields: Fields) -> bool:
    is_sharegpt = "from" in fields and ("value" in fields or str(fields["from"]).lower() in ROLES)
    return is_sharegpt or not fields.keys().isdisjoint(("role", "content", "tool_calls", "function_call"))


def _find_first_key(fields: Fields, keys: Sequence[str]) -> str:
    """Return the first of `keys` in the record, or `keys[0]`, which the error then reports as missing."""
    return next((key for key in keys if key in fields), keys[0])


def _parse_question(fields: Fields, key: str) -> tuple[Any, list[str]]:
    """Return the question followed by its context, and the used keys."""
    question = fields[key]
    for name in CONTEXT_KEYS:
        context = fields.get(name)  # text, or a number from a column of numbers
        is_given = isinstance(context, str | int | float) and not isinstance(context, bool) and not _is_blank(context)
        if name != key and is_given:
            is_plain = isinstance(question, str) and not HH_TURN.match(question)
            if is_plain and (key == "instruction" or str(context) not in question):  # a prompt may be a filled template
                return f"{question}\n\n{context}", [key, name]
            break
    return question, [key]


def _add_system_and_tools(
    kind: Kind, fields: Fields, content: dict[str, Any], used: Sequence[str]
) -> list[ParsedRecord]:
    """Add the record's tools, and its system prompt unless the messages contain a system turn."""
    opening = "messages" if "messages" in content else "prompt"
    messages, keys = content[opening], {*used}
    system = next((key for key in SYSTEM_KEYS if isinstance(fields.get(key), str) and fields[key]), None)
    if system and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": fields[system]}, *messages]
        keys.add(system)
    tools = None
    if key := next((key for key in TOOL_KEYS if fields.get(key)), None):
        keys.add(key)
        value = _parse_json_field(fields[key], "tools") if isinstance(fields[key], str) else fields[key]
        tools = json.dumps(value, ensure_ascii=False, sort_keys=True) if value else None
    return [ParsedRecord(kind, {**content, opening: messages, "tools": tools}, fields, keys)]


def _build_sft_record(fields: Fields, messages: list[Message], used: Sequence[str]) -> list[ParsedRecord]:
    return _add_system_and_tools("sft", fields, {"messages": messages}, used)


def _build_preference_record(
    fields: Fields, prompt: list[Message], chosen: list[Message], rejected: list[Message], used: Sequence[str]
) -> list[ParsedRecord]:
    if not prompt:
        raise RecordFormatError("a preference pair without a prompt")
    content = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return _add_system_and_tools("preference", fields, content, used)


# --- preference and labelled formats ----------------------------------------------------------------------------------


@record_format("preference", lambda f: {"chosen", "rejected"} <= f.keys() or {"response_j", "response_k"} <= f.keys())
def parse_preference(f: Fields) -> list[ParsedRecord]:
    """Parse a chosen and a rejected answer.

    Without a key for the prompt, the prompt consists of the first turns that both answers share.

    Raises:
        RecordFormatError: the prompt is missing, or the messages are invalid.
    """
    if "response_j" in f:
        question, used = _parse_question(f, "question")
        chosen, rejected = _parse_answer(f["response_j"]), _parse_answer(f["response_k"])
        return _build_preference_record(
            f, _parse_messages(question), chosen, rejected, [*used, "response_j", "response_k"]
        )
    key = next((k for k in ("prompt", "conversations", "messages", *QUESTION_KEYS) if k in f), None)
    if key is None:
        one, other = _parse_messages(f["chosen"]), _parse_messages(f["rejected"])
        shortest = min(len(one), len(other))
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shortest)
        while same and one[same - 1]["role"] == "assistant":  # the answers are equal, or begin with equal turns
            same -= 1
        return _build_preference_record(f, one[:same], one[same:], other[same:], ["chosen", "rejected"])
    question, used = _parse_question(f, key)
    prompt, answers = _parse_messages(question), []
    for name in ("chosen", "rejected"):
        before, answer = _split_at_last_answer(_parse_answer(f[name]))
        answers.append(answer)
        # The turns before the answer are dropped; if the prompt lacks one of them, meta keeps the whole field.
        if all(any(turn["content"].strip() in m["content"] for m in prompt) for turn in before):
            used.append(name)
    return _build_preference_record(f, prompt, answers[0], answers[1], used)


def _split_at_last_answer(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split a conversation after its last user turn."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    return messages[: last + 1], messages[last + 1 :]


@record_format("scored_pair", lambda f: {"instruction", "output_1", "output_2", "preference"} <= f.keys())
def parse_scored_pair(f: Fields) -> list[ParsedRecord]:
    """Parse AlpacaEval's annotations: a preference from 1 (the first output) to 2 (the second output).

    Raises:
        RecordFormatError: the preference is not a number, or is 1.5.
    """
    score = f["preference"]
    if not isinstance(score, int | float) or score == 1.5:
        raise RecordFormatError(
            f"a preference of {quote_name(str(score))}; expected a number from 1 (output_1) to 2 (output_2), except 1.5"
        )
    chosen, rejected = (f["output_1"], f["output_2"]) if score < 1.5 else (f["output_2"], f["output_1"])
    question, used = _parse_question(f, "instruction")
    used += ["output_1", "output_2"]
    return _build_preference_record(f, _parse_messages(question), _parse_answer(chosen), _parse_answer(rejected), used)


def _find_label_key(f: Fields) -> str | None:
    return next((key for key in LABEL_KEYS if key in f and _parse_label(f[key]) is not None), None)


def _parse_label(value: object) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


@record_format(
    "kto",
    lambda f: (
        _find_label_key(f) is not None and any(k in f for k in ("messages", "conversations", "completion", "response"))
    ),
)
def parse_kto(f: Fields) -> list[ParsedRecord]:
    """Parse a conversation, or a prompt and a completion, whose answer is labelled good or bad.

    Raises:
        RecordFormatError: the label, the prompt or the completion is missing or invalid.
    """
    label_key = _find_label_key(f)
    if label_key is None:
        label = f[_find_first_key(f, LABEL_KEYS)]
        raise RecordFormatError(f"a label of {quote_name(str(label))}; expected true, false, 1 or 0")
    turns = next((key for key in ("messages", "conversations") if f.get(key) is not None), None)
    if turns is not None:
        prompt, completion = _split_at_last_answer(_parse_messages(f[turns]))
        used = [turns]
    else:
        question, used = _parse_question(f, _find_first_key(f, QUESTION_KEYS))
        answer_key = _find_first_key(f, ANSWER_KEYS)
        prompt, completion = _parse_messages(question), _parse_answer(f[answer_key])
        used.append(answer_key)
    if not prompt or not completion:
        raise RecordFormatError(f"a labelled row without a {'completion' if prompt else 'prompt'}")
    content = {"prompt": prompt, "completion": completion, "label": bool(_parse_label(f[label_key]))}
    return _add_system_and_tools("unpaired", f, content, [*used, label_key])


# --- supervised formats -----------------------------------------------------------------------------------------------


@record_format("openai", lambda f: isinstance(f.get("messages"), list))
def parse_openai(f: Fields) -> list[ParsedRecord]:
    """Parse a conversation in `messages`.

    Raises:
        RecordFormatError: the messages are invalid.
    """
    return _build_sft_record(f, _parse_messages(f["messages"]), ["messages"])


def _find_sharegpt_key(f: Fields) -> str:
    return _find_first_key(f, ("conversations", "conversation"))


@record_format("sharegpt", lambda f: isinstance(f.get(_find_sharegpt_key(f)), list))
def parse_sharegpt(f: Fields) -> list[ParsedRecord]:
    """Parse a conversation in `conversations` or `conversation`.

    Raises:
        RecordFormatError: the turns are invalid.
    """
    key = _find_sharegpt_key(f)
    return _build_sft_record(f, _parse_messages(f[key]), [key])


@record_format("dolly", lambda f: {"instruction", "response"} <= f.keys())
def parse_dolly(f: Fields) -> list[ParsedRecord]:
    """Parse an instruction and its response.

    Raises:
        RecordFormatError: the instruction, the response or the history is invalid.
    """
    return _parse_instruction(f, "response")


@record_format("alpaca", lambda f: "instruction" in f and ("output" in f or isinstance(f.get("instances"), list)))
def parse_alpaca(f: Fields) -> list[ParsedRecord]:
    """Parse Alpaca's rows, and self-instruct's seed tasks with a list of instances.

    Raises:
        RecordFormatError: the instances, the instruction, the output or the history is invalid.
    """
    if "instances" not in f:
        return _parse_instruction(f, "output")
    instances = f["instances"]
    if not isinstance(instances, list) or not instances or not all(isinstance(i, dict) for i in instances):
        raise RecordFormatError(f"instances of type {type(instances).__name__}; expected a non-empty list of objects")
    parsed = []
    for instance in instances:
        hidden = {key: value for key, value in f.items() if key in instance}  # kept in meta, under `instances`
        parsed += _parse_instruction({**f, **instance, "instances": hidden}, "output")
    return parsed


def _parse_instruction(f: Fields, answer_key: str) -> list[ParsedRecord]:
    instruction, answer = f["instruction"], f[answer_key]
    if not isinstance(instruction, str) or not isinstance(answer, str):
        raise RecordFormatError(
            f"instruction of type {type(instruction).__name__} and {answer_key} of type {type(answer).__name__}; "
            "expected text for both"
        )
    question, used = _parse_question(f, "instruction")
    # LLaMA-Factory's earlier turns: [[question, answer], …].
    history = f.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history
    ):
        raise RecordFormatError(
            f"an invalid history (type {type(history).__name__}); expected a list of [question, answer] pairs of strings"
        )
    turns = [
        {"role": role, "content": text}
        for pair in [*history, [question, answer]]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    # Alpaca's `text` is the template, filled with the other fields.
    parts, text = [*map(f.get, used), answer], f.get("text")
    if isinstance(text, str) and all(str(part).strip() in text for part in parts):
        used.append("text")
    return _build_sft_record(f, turns, [*used, answer_key, "history"])


@record_format("prompt_completion", lambda f: any(k in f for k in QUESTION_KEYS) and any(k in f for k in ANSWER_KEYS))
def parse_prompt_completion(f: Fields) -> list[ParsedRecord]:
    """Parse a question and an answer, each a text or a list of turns.

    Raises:
        RecordFormatError: the turns are invalid.
    """
    question, used = _parse_question(f, _find_first_key(f, QUESTION_KEYS))
    answer_key = _find_first_key(f, ANSWER_KEYS)
    prompt = _parse_messages(question)
    while len(prompt) > 1 and prompt[-1]["role"] == "assistant" and not prompt[-1]["content"].strip():
        prompt.pop()  # a transcript may end with an empty assistant turn
    return _build_sft_record(f, [*prompt, *_parse_answer(f[answer_key])], [*used, answer_key])


@record_format(
    "hh",
    lambda f: (
        isinstance(text := f.get(_find_first_key(f, TEXT_KEYS)), str)
        and text.lstrip().startswith("Human:")
        and "\n\nAssistant:" in text
    ),
)
def parse_hh(f: Fields) -> list[ParsedRecord]:
    """Parse a transcript in one text. If the format is set explicitly, also parse a pair of transcripts.

    Raises:
        RecordFormatError: the text is not a transcript of Human: and Assistant: turns.
    """
    if "chosen" in f:
        return parse_preference(f)
    key, text = _get_text_field(f)
    return _build_sft_record(f, _parse_transcript("\n\n" + text.lstrip()), [key])


@record_format("text", lambda f: isinstance(f.get(_find_first_key(f, TEXT_KEYS)), str))
def parse_text(f: Fields) -> list[ParsedRecord]:
    """Parse a plain text.

    Raises:
        KeyError: no key contains a text.
    """
    key, text = _get_text_field(f)
    return [ParsedRecord("text", {"text": text}, f, {key})]


def _get_text_field(f: Fields) -> tuple[str, str]:
    key = _find_first_key(f, TEXT_KEYS)
    if not isinstance(f.get(key), str):
        raise KeyError("text")
    return key, f[key]
