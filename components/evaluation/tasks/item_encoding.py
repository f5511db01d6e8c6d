"""Construction of items from rows, and encoding of items as prompts or as contexts with continuations.

Texts are encoded with a model's tokenizer and chat template when the model is queried, so all models share the items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import chat_templates, conversation_rows
from components.common.runtime.counts import format_count
from components.common.runtime.errors import InputError
from components.common.runtime.reporters import Reporter
from components.evaluation.task_interface import Continuation, Item, Request, TaskContext
from components.evaluation.tasks import record_files
from components.evaluation.tasks.config import FewShotSettings, PromptSettings
from components.evaluation.tasks.record_files import Record, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


class NoDatasetError(InputError):
    """The task reads dataset rows, and no dataset is available."""


def build_row_items(settings: PromptSettings, context: TaskContext, reference_field: str = "") -> list[Item]:
    """Return the items of a prompt task, from its file or from the dataset's test split.

    The reference of a test row is its last answer, and the prompt is the conversation before it. `request` holds
    `messages` (the last by the user), `tools` as JSON text, and `references`, which are required if
    `reference_field` is given.

    Raises:
        InputError: A row has no prompt or no required reference, or its messages or tools are invalid.
        NoDatasetError: The task reads dataset rows, and no dataset is available.
    """
    items = []
    if not settings.data:
        dataset = require_dataset(context)
        path = dataset.path / "test.parquet"
        sources = read_columns(dataset, "test", ["source"])
        for row in conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset)):
            before, answer = conversation_rows.split_last_answer(row["messages"])
            if before:
                record = Record(row["id"], sources[row["id"]], str(path))
                items.append(build_prompt_item(record, before, [answer], context, row["tools"]))
        return items
    for record in record_files.read_records(settings.data):
        messages = read_messages(record, settings.prompt_field)
        references = [messages.pop()["content"]] if messages[-1]["role"] == "assistant" else []
        if reference_field and (not references or reference_field in record.row or "references" in record.row):
            references = record.get_texts(reference_field if reference_field in record.row else "references")
        if not messages:
            raise record.build_error("has no prompt before its answer")
        items.append(build_prompt_item(record, messages, references, context, read_tools(record)))
    return items


def read_examples(settings: FewShotSettings) -> list[Record]:
    """Return the few-shot examples.

    Raises:
        InputError: The file has fewer than `shots` rows.
    """
    if not settings.shots:
        return []
    records = record_files.read_records(settings.examples, "examples")[: settings.shots]
    if len(records) < settings.shots:
        raise InputError(
            f"{settings.examples} has {format_count(len(records), 'row')}; expected at least {settings.shots}, as in "
            "shots",
            hint="Lower shots, or add rows to the file.",
        )
    return records


def read_messages(record: Record, prompt_field: str) -> list[Message]:
    """Return a row's `messages`, or its prompt as a user turn.

    Raises:
        InputError: The row has neither messages nor a prompt, or its messages are invalid.
    """
    messages = record.row.get("messages")
    if messages is None and isinstance(record.row.get(prompt_field), list):
        messages = record.row[prompt_field]
    if messages is None:
        return [{"role": "user", "content": record.get_text(prompt_field)}]
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in messages)
    ):
        raise record.build_error(f"has the messages {messages!r:.60}; expected a list of {{role, content}}")
    return [{"role": str(m["role"]), "content": m["content"]} for m in messages]


def read_tools(record: Record) -> str | None:
    """Return a row's tools as JSON text; in a file they may also be a list, as in OpenAI's format.

    Raises:
        InputError: The tools are not a list of objects.
    """
    value = record.row.get("tools")
    if value in (None, "", []):
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise record.build_error(f"has invalid JSON in tools: {error}; expected a list of objects") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise record.build_error(f"has {tools!r:.60} in tools; expected a list of objects")
    return value if isinstance(value, str) else json.dumps(tools, ensure_ascii=False)


def read_columns(dataset: Artifact, split: str, names: Sequence[str]) -> dict[str, Row]:
    """Return the columns of a split by row id. Missing columns are omitted."""
    from pyarrow import parquet

    path = dataset.path / f"{split}.parquet"
    present = [name for name in names if name in parquet.read_schema(path).names]
    return {row["id"]: row for row in parquet.read_table(path, columns=["id", *present]).to_pylist()}


def require_dataset(context: TaskContext) -> Artifact:
    """Return the dataset.

    Raises:
        NoDatasetError: No dataset is available.
    """
    if context.dataset is None:
        raise NoDatasetError(
            "this task reads dataset rows, and the evaluation has no dataset",
            hint="Pass a dataset with --dataset, or set the task's data to a file.",
        )
    return context.dataset


def build_prompt_item(
    record: Record,
    messages: Sequence[Message],
    references: Sequence[str],
    context: TaskContext,
    tools: str | None = None,
) -> Item:
    """Return an item with these messages as its prompt."""
    prompt = join_contents(messages)
    request = {"messages": [dict(m) for m in messages], "references": list(references), "tools": tools}
    return build_item(record, context, prompt, references[0] if references else "", [prompt], request)


def build_item(
    record: Record, context: TaskContext, prompt: str, reference: str, texts: Sequence[str], request: Request
) -> Item:
    """Return the item of a record. Its length is the number of tokens in the longest of `texts`, the model's inputs."""
    length = max(count_tokens(context.tokenizer, text) for text in texts)
    return Item(
        record.id, prompt, reference, record.get_optional("source"), record.get_optional("category"), length, request
    )


def join_contents(messages: Sequence[Mapping[str, object]]) -> str:
    """Return the messages' texts, separated by empty lines."""
    return "\n\n".join(str(m["content"]) for m in messages)


def extend_requests(items: Sequence[Item], values: Mapping[str, object]) -> list[Item]:
    """Return the items with additional values in their requests, such as the decoding settings."""
    return [replace(item, request={**item.request, **values}) for item in items]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, item: Item, *, chat: bool = True) -> list[int]:
    """Return the tokens of an item's prompt, with the chat template or as the raw texts of the messages."""
    messages, tools = item.request["messages"], item.request["tools"]
    if chat:
        return chat_templates.encode_prompt(tokenizer, messages, json.loads(tools) if tools else None)
    return encode_text(tokenizer, "".join(str(m["content"]) for m in messages))


def fit_prompts(
    prompts: Sequence[Sequence[int]],
    limit: int | None,
    new_tokens: int,
    reporter: Reporter,
    *,
    setting: str = "max_new_tokens",
) -> list[list[int]]:
    """Truncate prompts on the left to leave room for the answer, as lm-eval does.

    The number of truncated prompts is reported.

    Args:
        prompts: Token ids.
        limit: The model's context length in tokens; None without a limit.
        new_tokens: Maximum answer length in tokens.
        reporter: Receives the note.
        setting: Name of the setting that defines `new_tokens`.

    Raises:
        InputError: The maximum answer length leaves no room for a prompt.
    """
    if limit is None:
        return [list(ids) for ids in prompts]
    check_prompt_room(limit, new_tokens, setting)
    longest = limit - new_tokens
    if truncated := sum(len(ids) > longest for ids in prompts):
        was = "was" if truncated == 1 else "were"
        reporter.note(f"{truncated} of {len(prompts)} prompts {was} truncated on the left to {longest} tokens")
    return [list(ids[-longest:]) for ids in prompts]


def check_prompt_room(limit: int | None, new_tokens: int, setting: str = "max_new_tokens") -> None:
    """Raise InputError if the maximum answer length leaves no room for a prompt.

    Args:
        limit: The model's context length in tokens; None without a limit.
        new_tokens: Maximum answer length in tokens.
        setting: Name of the setting that defines `new_tokens`.
    """
    if limit is not None and limit - new_tokens < 1:
        raise InputError(
            f"the model's context length is {limit:,} tokens; an answer of {new_tokens:,} tokens leaves no room for "
            "a prompt",
            hint=f"Lower {setting}.",
        )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a text's tokens with the tokenizer's special tokens; a leading start token in the text is not repeated."""
    start = tokenizer.bos_token or tokenizer.eos_token
    return list(tokenizer(text, add_special_tokens=not (start and text.startswith(start)))["input_ids"])


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return a text's tokens without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the number of a text's tokens without special tokens."""
    return len(encode_plain(tokenizer, text))


def get_start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token before a text without context: the start token, or else the end-of-sequence token.

    Raises:
        InputError: The tokenizer has neither token.
    """
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise InputError(
            "the model's tokenizer has neither a start nor an end-of-sequence token, so the first token of a text "
            "cannot be scored",
            hint="Set bos_token or eos_token in the model's tokenizer_config.json.",
        )
    return int(token)


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, encoded as one text and split as lm-eval does.

    Trailing spaces of the context become part of the continuation, because most vocabularies have words with a
    leading space.

    Raises:
        InputError: The context is empty, and the tokenizer has neither a start nor an end-of-sequence token.
    """
    if not context:
        ids = encode_plain(tokenizer, continuation)
        start = get_start_token_id(tokenizer)
        return (ids[:1], ids[1:]) if ids and ids[0] == start else ([start], ids)
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    before = encode_text(tokenizer, context) if context else [get_start_token_id(tokenizer)]
    return before, encode_text(tokenizer, context + continuation)[len(before) :]


def build_continuation(before: Sequence[int], after: Sequence[int], limit: int | None) -> Continuation:
    """Return a request that scores `after` given `before`, truncated on the left to the context length.

    The last token is not an input, so the request may have `limit` + 1 tokens.

    Args:
        before: Token ids of the context.
        after: Token ids of the continuation.
        limit: The model's context length in tokens; None without a limit.
    """
    ids = [*before, *after]
    scored = [False] * len(before) + [True] * len(after)
    longest = len(ids) if limit is None else limit + 1
    return Continuation(ids[-longest:], [False, *scored[-longest:][1:]])
