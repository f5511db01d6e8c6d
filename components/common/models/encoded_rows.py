"""Random rows of a dataset's split as token ids, with their answers marked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from components.common.artifacts.artifact_folder import Artifact
from components.common.models import chat_templates, conversation_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_ITEM = 4  # read at once; some rows have no answer within the limit


class EncodedItem(NamedTuple):
    """A row: its id, its token ids, and 1 for each token of an answer."""

    id: str
    ids: list[int]
    mask: list[int]


def read_random_rows(
    dataset: Artifact,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_items: int,
    max_length: int,
    seed: int,
) -> list[EncodedItem]:
    """Return random rows of a split that have an answer within `max_length` tokens, in the chat template."""
    items: list[EncodedItem] = []
    for row in _read_in_random_order(dataset, split, max_items, seed):
        if "text" in row:
            ids = chat_templates.encode_text(tokenizer, row["text"])[:max_length]
            item = EncodedItem(str(row["id"]), ids, [1] * len(ids))
        else:
            tools = json.loads(row["tools"]) if row["tools"] else None
            encoded = chat_templates.encode_conversation(tokenizer, row["messages"], tools, max_length=max_length)
            item = EncodedItem(str(row["id"]), encoded.input_ids, encoded.answer_mask)
        if any(item.mask[1:]):
            items.append(item)
        if len(items) == max_items:
            break
    return items


def _read_in_random_order(dataset: Artifact, split: str, max_items: int, seed: int) -> Iterator[conversation_rows.Row]:
    """Yield the rows of a split in random order. A training split may not fit into memory; only its ids are read at once."""
    import pyarrow.parquet as parquet

    path = dataset.path / f"{split}.parquet"
    ids = set(parquet.read_table(path, columns=["id"])["id"].to_pylist())
    order = sorted(ids, key=lambda id_: hashlib.sha256(f"{seed}:{id_}".encode()).digest())
    for start in range(0, len(order), ROWS_PER_ITEM * max_items):
        selected = order[start : start + ROWS_PER_ITEM * max_items]
        if dataset.manifest.summary.get("rows_kind") == conversation_rows.TEXT_KIND:
            rows = conversation_rows.read_texts(path, selected)
        else:
            rows = conversation_rows.read_conversations(path, conversation_rows.get_rows_kind(dataset), selected)
        position = {id_: index for index, id_ in enumerate(selected)}
        yield from sorted(rows, key=lambda row: position[row["id"]])
