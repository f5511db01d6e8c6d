"""From rows to what a model reads: prompts with and without a chat template, and pairs of a context and what may follow it.

Texts are turned into tokens when a model is asked, by its own tokenizer and template: items are the same for every model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from components.common import chat, conversations
from components.common.artifacts import Artifact
from components.common.errors import InputError
from components.common.progress import Reporter
from components.evaluation.task import Continuation, Given, Item
from components.evaluation.tasks.reading import Record, records

Message = Mapping[str, Any]


def first(items: Sequence[Item], max_items: int | None) -> list[Item]:
    """The items by id, the first `max_items` of them. Raises InputError for fewer than two: an interval needs as many."""
    chosen = sorted(items, key=lambda item: item.id)[:max_items]
    if len(chosen) < 2:
        raise InputError(f"the task has {len(chosen)} items, and an interval needs at least 2", hint="Give it more rows, or leave it out.")
    return chosen


def row_items(settings: Any, given: Given, *, referenced: bool) -> list[Item]:
    """The items of a task of prompts: rows of its file, or of the dataset's test split. `referenced`: each needs a reference.

    `ask` holds `messages` (of which the last is the user's), `tools` as JSON text, and `references`.
    """
    if not settings.data:
        return dataset_items(given)
    reference = getattr(settings, "reference_field", "") if referenced else ""
    return [_row_item(one, settings.prompt_field, reference, given) for one in records(settings.data)]


def _row_item(one: Record, prompt_field: str, reference_field: str, given: Given) -> Item:
    messages = messages_of(one, prompt_field)
    references: list[str] = []
    if messages[-1]["role"] == "assistant":
        references = [messages.pop()["content"]]
    if reference_field and (not references or reference_field in one.row or "references" in one.row):
        references = one.texts(reference_field if reference_field in one.row else "references")
    if not messages:
        raise one.wrong("holds no prompt before its answer")
    told = {"source": one.optional("source"), "category": one.optional("category")}
    return prompt_item(one.id, messages, references, given, tools=tools_of(one), **told)


def messages_of(one: Record, prompt_field: str) -> list[dict[str, str]]:
    """A row's conversation: its `messages`, or its prompt as the user's turn. Raises InputError for what is neither."""
    told = one.row.get("messages")
    if told is None and isinstance(one.row.get(prompt_field), list):
        told = one.row[prompt_field]
    if told is None:
        return [{"role": "user", "content": one.text(prompt_field)}]
    whole = (
        isinstance(told, list) and told and all(isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in told)
    )
    if not whole:
        raise one.wrong("needs a list of role and content in messages")
    return [{"role": str(m["role"]), "content": m["content"]} for m in told]


def tools_of(one: Record) -> str | None:
    """A row's tools as JSON text, as datasets have them; a file may have OpenAI's list. Raises InputError for what is neither."""
    told = one.row.get("tools")
    if told is None or told in ("", []):
        return None
    try:
        tools = json.loads(told) if isinstance(told, str) else told
    except ValueError:
        raise one.wrong("has tools that are no JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise one.wrong("needs a list of objects in tools")
    return told if isinstance(told, str) else json.dumps(tools, ensure_ascii=False)


def dataset_items(given: Given) -> list[Item]:
    """The dataset's test rows: the conversation before its last answer, and that answer as reference. Raises InputError without any."""
    dataset = given_dataset(given)
    rows = conversations.read(dataset.path / "test.parquet", conversations.kind_of(dataset))
    sources = columns(dataset, "test", ["source"])
    made = []
    for row in rows:
        before, answer = before_answer(row["messages"])
        if before:
            source = str((sources.get(row["id"]) or {}).get("source") or "")
            made.append(prompt_item(row["id"], before, [answer], given, tools=row["tools"], source=source))
    return made


def before_answer(messages: Sequence[Message]) -> tuple[list[dict[str, str]], str]:
    """The turns before a conversation's last answer, and that answer; no turns where there is none."""
    last = max((place for place, m in enumerate(messages) if m["role"] == "assistant"), default=0)
    before = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages[:last]]
    return before, str(messages[last]["content"]) if before else ""


def columns(dataset: Artifact, split: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The columns of a split by row id, those of `names` that it has."""
    from pyarrow import parquet

    path = dataset.path / f"{split}.parquet"
    there = [name for name in names if name in parquet.read_schema(path).names]
    return {row["id"]: row for row in parquet.read_table(path, columns=["id", *there]).to_pylist()}


class NoDatasetError(InputError):
    """A task that reads the dataset's rows, where there is none (yet)."""


def given_dataset(given: Given) -> Artifact:
    """The dataset. Raises NoDatasetError where the evaluation was given none."""
    if given.dataset is None:
        raise NoDatasetError(
            "this task reads the dataset's rows, and the evaluation was given no dataset",
            hint="Name one with --dataset, or a file in its data.",
        )
    return given.dataset


def prompt_item(
    name: str,
    messages: Sequence[Message],
    references: Sequence[str],
    given: Given,
    *,
    tools: str | None = None,
    source: str = "",
    category: str = "",
) -> Item:
    """An item that asks for the turn after these messages."""
    prompt = "\n\n".join(str(m["content"]) for m in messages)
    return Item(
        id=name,
        prompt=prompt,
        reference=references[0] if references else "",
        source=source,
        category=category,
        length=len(given.tokenizer(prompt, add_special_tokens=False)["input_ids"]),
        ask={"messages": [dict(m) for m in messages], "references": list(references), "tools": tools},
    )


def with_decoding(items: Sequence[Item], decoding: Mapping[str, Any]) -> list[Item]:
    """The items with how they are answered: part of what is asked."""
    return [replace(item, ask={**item.ask, **decoding}) for item in items]


def prompt_ids(tokenizer: Any, item: Item, *, as_chat: bool = True) -> list[int]:
    """The tokens that an item's prompt is for this model: through its chat template, or the messages' texts as they are."""
    messages, tools = item.ask["messages"], item.ask["tools"]
    if as_chat:
        return chat.encode_prompt(tokenizer, messages, json.loads(tools) if tools else None)
    return encode(tokenizer, "".join(str(m["content"]) for m in messages))


def within_room(
    prompts: Sequence[Sequence[int]], room: int | None, new_tokens: int, reporter: Reporter, *, setting: str = "max_new_tokens"
) -> list[list[int]]:
    """Prompts that leave room for the answer: of a longer one the end is kept, as lm-eval does, and how many were cut is told."""
    if room is None:
        return [list(ids) for ids in prompts]
    check_room(room, new_tokens, setting)
    longest = room - new_tokens
    if cut := sum(len(ids) > longest for ids in prompts):
        reporter.note(
            f"{cut} of {len(prompts)} prompts are longer than the {longest} tokens that the model reads, and lose their beginning"
        )
    return [list(ids[-longest:]) for ids in prompts]


def check_room(room: int | None, new_tokens: int, setting: str = "max_new_tokens") -> None:
    """Raise InputError where an answer of so many tokens, which a setting says, leaves nothing of what the model reads."""
    if room is not None and room - new_tokens < 1:
        raise InputError(
            f"the model reads {room} tokens, and an answer of {new_tokens} leaves no room for a prompt", hint=f"Lower {setting}."
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens with the marks the tokenizer adds of itself; a text that begins with the beginning's mark gets no second one."""
    mark = tokenizer.bos_token or tokenizer.eos_token
    return list(tokenizer(text, add_special_tokens=not (mark and text.startswith(mark)))["input_ids"])


def encode_bare(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens without any mark."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def first_token(tokenizer: Any) -> int:
    """What stands before a text that has nothing before it: the mark of a beginning, or that of an end."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise InputError("the model's tokenizer has no mark of a beginning or an end, so that a first token has nothing before it")
    return int(token)


def pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """A context's tokens and those that follow it when both are read as one text, as lm-eval splits them.

    Spaces at the context's end go to the continuation: most vocabularies have words with the space before them.
    """
    if not context:
        ids = list(tokenizer(continuation, add_special_tokens=False)["input_ids"])
        start = first_token(tokenizer)
        return (ids[:1], ids[1:]) if ids and ids[0] == start else ([start], ids)
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    before = encode(tokenizer, context) if context else [first_token(tokenizer)]
    whole = encode(tokenizer, context + continuation)
    return before, whole[len(before) :]


def continuation(before: Sequence[int], after: Sequence[int], room: int | None) -> Continuation:
    """What is scored of a pair: `after`, given as much of `before` as the model reads. The last token is predicted and never read."""
    ids = [*before, *after]
    counted = [False] * len(before) + [True] * len(after)
    longest = len(ids) if room is None else room + 1
    return Continuation(ids[-longest:], [False, *counted[-longest:][1:]])
